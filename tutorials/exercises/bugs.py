"""Exercises of the bonus page: repairs of five silent bugs."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from exercises.judging import Exercise, by_number, by_values, close


def block(h, norm, branch):
    return h + branch(norm(h))


def _judge_block(answer) -> str:
    generator = torch.Generator().manual_seed(0)
    h = 5 * torch.randn(4, 8, generator=generator, dtype=torch.float64)
    weight = torch.randn(8, 8, generator=generator, dtype=torch.float64)

    def norm(x):
        return F.layer_norm(x, x.shape[-1:])

    def branch(x):
        return torch.tanh(x @ weight)

    got = answer(h, norm, branch)
    known = {
        "": h + branch(norm(h)),
        "the residual still starts at the normalised token: keep h, and give norm(h) to the branch alone": (
            norm(h) + branch(norm(h))
        ),
        "the branch reads the token as it is: that is no Pre-Norm": h + branch(h),
        "normalising the sum is Post-Norm: the token's size is lost again": norm(h + branch(h)),
        "the residual is missing": branch(norm(h)),
    }
    return next(
        (why for why, value in known.items() if close(got, value, 1e-12)), "the sum of h and branch(norm(h)) is wanted"
    )


BLOCK = Exercise(
    _judge_block,
    block,
    mistakes={
        "the residual still starts at the normalised token: keep h, and give norm(h) to the branch alone": (
            lambda h, norm, branch: norm(h) + branch(norm(h))
        ),
        "the branch reads the token as it is: that is no Pre-Norm": lambda h, norm, branch: h + branch(h),
        "normalising the sum is Post-Norm: the token's size is lost again": (
            lambda h, norm, branch: norm(h + branch(h))
        ),
        "the residual is missing": lambda h, norm, branch: branch(norm(h)),
    },
)


def variance(x):
    return (x - x.mean(dim=-1, keepdim=True)).square().mean(dim=-1)


def _judge_variance(answer) -> str:
    tokens = torch.randn(6, 300, generator=torch.Generator().manual_seed(0))
    for offset, tolerance in ((0.0, 1e-5), (100.0, 1e-4), (3000.0, 1e-3)):
        x = tokens + offset
        got, truth = answer(x), x.double().var(dim=-1, correction=0)
        if got.shape != truth.shape:
            return f"one number a token is wanted, shape {tuple(truth.shape)}, got {tuple(got.shape)}"
        if close(got, truth, tolerance):
            continue
        if close(got, truth * 300 / 299, 1e-4):
            return "this divides by D − 1; LayerNorm divides by D"
        return f"at a mean of {offset:g} it is off by {float((got - truth).abs().max()):.2g}"
    return ""


VARIANCE = Exercise(
    _judge_variance,
    variance,
    mistakes={
        "this divides by D − 1; LayerNorm divides by D": lambda x: x.var(dim=-1),
        "one number a token is wanted, shape (6,), got ()": lambda x: x.var(correction=0),
    },
)


def labels(ids, lengths, end):
    real = torch.arange(ids.shape[1]) < lengths[:, None]
    return torch.where(real, ids, -100)


_ROWS = torch.tensor([[17, 2, 9, 2, 2, 2], [30, 12, 2, 2, 2, 2], [11, 14, 25, 40, 8, 2]])
LABELS = by_values(
    labels,
    [(_ROWS, torch.tensor([4, 3, 6]), 2)],
    mistakes={
        "no label says stop: the end token that closes an answer has to be learned": (
            lambda ids, lengths, end: torch.where(ids == end, -100, ids)
        ),
        "padding is supervised": lambda ids, lengths, end: ids,
        "the last real token is the end token, and it is missing here": (
            lambda ids, lengths, end: labels(ids, lengths - 1, end)
        ),
    },
)


def loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


_GENERATOR = torch.Generator().manual_seed(0)
_LOGITS = torch.randn(2, 7, 5, generator=_GENERATOR, dtype=torch.float64)
_TARGETS = torch.randint(0, 5, (2, 7), generator=_GENERATOR)
LOSS = by_values(
    loss,
    [(_LOGITS, _TARGETS)],
    mistakes={
        "this shifts a second time: the loader has done so already": (
            lambda logits, labels: F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        ),
        "this shifts the other way": (
            lambda logits, labels: F.cross_entropy(logits[:, 1:].flatten(0, 1), labels[:, :-1].flatten())
        ),
        "a mean over tokens is wanted, this is their sum": (
            lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        ),
    },
)


def wrong_eps():
    variance = 5**2 / 256  # of one component of a token of norm 5
    return variance * (1 / 0.5**2 - 1)  # ρ² = σ²/(σ² + ε)


EPS = by_number(
    wrong_eps,
    {
        "that would be right if the norm were divided by σ² + ε; it is divided by the root": 25 / 256,
        "σ² is the variance of one component: divide the squared norm by the width": 75.0,
        "that is the σ of a component, times 3; square it": 3 * float(np.sqrt(25 / 256)),
    },
)

EXERCISES = {"11.1": BLOCK, "11.2": VARIANCE, "11.3": LABELS, "11.4": LOSS, "11.5": EPS}
