"""What a model can do: exact answers by kind of question, with intervals; caption loss; and whether it looks at all."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from minillava.data import Batch, Pool, normalize
from minillava.objectives import CellReader, cell_targets, logits_of, next_token_loss
from minillava.tokenizer import IGNORE


def wilson(right: int, asked: int, z: float = 1.96) -> tuple[float, float]:
    """95 % confidence interval of a share, Wilson's: sensible at 0, at 1 and for few questions."""
    if asked == 0:
        return 0.0, 1.0
    share, spread = right / asked, z * z / asked
    centre = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / asked + spread / (4 * asked)) / (1 + spread)
    return max(0.0, centre - half), min(1.0, centre + half)


def exact_answers(logits: Tensor, batch: Batch) -> list[list[bool]]:
    """For each row, whether each answer is what greedy decoding would say, end token included, given the true turns
    before it. Logits (B, T, V)."""
    labels = batch.labels[:, 1:]
    wrong = (logits[:, :-1].argmax(-1) != labels) & (labels != IGNORE)  # (B, T-1)
    supervised = labels != IGNORE
    starts = supervised & ~torch.cat([torch.zeros_like(supervised[:, :1]), supervised[:, :-1]], dim=1)
    turn = starts.cumsum(1) * supervised  # (B, T-1): 1, 2, ... on the tokens of each answer
    return [
        [not bool(wrong[row][turn[row] == i].any()) for i in range(1, int(turn[row].max()) + 1)]
        for row in range(len(labels))
    ]


@torch.no_grad()
def accuracy(
    model: nn.Module, pool: Pool, image: str = "true", blank: Tensor | None = None, batch_size: int = 200
) -> dict[str, dict]:
    """Share of exact answers by kind, and over `all`, each {accuracy, low, high, asked}.

    `image` is "true", "blank" (`blank` in place of every image: the pixels or features of an empty scene) or "wrong"
    (each conversation gets the picture of the one before it): a model that looks falls to chance on the last two.
    """
    if not len(pool):
        raise ValueError("no questions to answer: the pool is empty")
    device = next(model.parameters()).device
    right: dict[str, list[bool]] = defaultdict(list)
    for rows in np.array_split(np.arange(len(pool)), -(-len(pool) // batch_size)):  # no row is left alone at the end
        batch = swap_images(pool.take(rows).to(device), image, blank)
        for i, answers in zip(rows, exact_answers(logits_of(model, batch), batch), strict=True):
            for kind, correct in zip(pool.samples[i].kinds, answers, strict=True):
                right[kind].append(correct)
                right["all"].append(correct)
    return {
        kind: dict(zip(("accuracy", "low", "high"), (float(np.mean(a)), *wilson(sum(a), len(a))), strict=True))
        | {"asked": len(a)}
        for kind, a in sorted(right.items())
    }


def swap_images(batch: Batch, image: str, blank: Tensor | None) -> Batch:
    """The batch with its images as they are ("true"), all `blank`, or each handed to the next image's row ("wrong")."""
    if image == "true":
        return batch
    images = batch.pixels if batch.features is None else batch.features  # (I, ...)
    assert images is not None, "there are no images to swap"
    if image == "blank":
        assert blank is not None, "a blank image must be given as `blank`"
        images = blank.to(images.device).expand_as(images)
    else:
        images = images.roll(1, 0)
    return replace(batch, pixels=images) if batch.features is None else replace(batch, features=images)


@torch.no_grad()
def mean_loss(model: nn.Module, pool: Pool, batch_size: int = 200) -> float:
    """Cross entropy per supervised token, in nats."""
    if not len(pool):
        raise ValueError("no samples to measure a loss on: the pool is empty")
    device = next(model.parameters()).device
    total, tokens = 0.0, 0
    for start in range(0, len(pool), batch_size):
        batch = pool.take(np.arange(start, min(start + batch_size, len(pool)))).to(device)
        total += next_token_loss(model, batch).item()
        tokens += batch.supervised
    return total / tokens


@torch.no_grad()
def cell_accuracy(reader: CellReader, pixels: np.ndarray, cells: np.ndarray) -> dict[str, float]:
    """Share of cells whose colour, shape, and both are named rightly (empty counts as a name)."""
    device = next(reader.parameters()).device
    colour, shape = reader(normalize(torch.from_numpy(pixels).to(device)))
    colour_target, shape_target = (t.to(device) for t in cell_targets(torch.from_numpy(cells)))
    right = colour.argmax(-1) == colour_target, shape.argmax(-1) == shape_target
    both = right[0] & right[1]
    return {
        name: value.float().mean().item()
        for name, value in zip(("colour", "shape", "both"), (*right, both), strict=True)
    }
