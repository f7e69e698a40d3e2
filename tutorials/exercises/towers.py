"""Exercises of tutorials 4 to 8 and 10: towers, labels, the gain, paired differences, attention, a verdict."""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy import stats

from exercises.judging import Exercise, by_number, by_values, close
from minillava.tokenizer import ASSISTANT, END, IGNORE, IMAGE, USER

# Tutorial 4 ----------------------------------------------------------------------------------------------------------


def cut(pixels, P):
    B, _, S, _ = pixels.shape
    grid = pixels.reshape(B, 3, S // P, P, S // P, P)
    return grid.permute(0, 2, 4, 1, 3, 5).reshape(B, (S // P) ** 2, -1)


def uncut(patches, P):
    B, N, _ = patches.shape
    side = math.isqrt(N)
    return patches.reshape(B, side, side, 3, P, P).permute(0, 3, 1, 4, 2, 5).reshape(B, 3, side * P, side * P)


def _rows_and_columns_swapped(patches, P):
    B, N, _ = patches.shape
    side = math.isqrt(N)
    return patches.reshape(B, side, side, 3, P, P).permute(0, 3, 2, 4, 1, 5).reshape(B, 3, side * P, side * P)


def _judge_uncut(answer) -> str:
    for B, side, P in ((2, 4, 8), (1, 3, 2)):
        pixels = torch.arange(B * 3 * (side * P) ** 2, dtype=torch.float64).reshape(B, 3, side * P, side * P)
        got = answer(cut(pixels, P), P)
        if np.shape(got) != tuple(pixels.shape):
            return f"the picture should be {tuple(pixels.shape)}, this is {np.shape(got) or got}"
        if close(got, _rows_and_columns_swapped(cut(pixels, P), P), 1e-12):
            return "patches come row by row, and these are put column by column"
        if not close(got, pixels, 1e-12):
            return "the shape is right and pixels stand in wrong places: think of the order of the six axes"
    return ""


UNCUT = Exercise(
    _judge_uncut,
    uncut,
    mistakes={
        "patches come row by row, and these are put column by column": _rows_and_columns_swapped,
        "the shape is right and pixels stand in wrong places: think of the order of the six axes": lambda patches, P: (
            patches.reshape(patches.shape[0], 3, *[math.isqrt(patches.shape[1]) * P] * 2)
        ),
    },
)


def grown():
    return math.sqrt(0.16**2 + 8)  # at right angles squares add up


GROWN = by_number(
    grown,
    {
        "squares of norms add up at right angles, not norms": 8.16,
        "each of the eight branches adds its 1 to the square of the norm": math.sqrt(0.16**2 + 1),
    },
)

# Tutorial 5 ----------------------------------------------------------------------------------------------------------

TALKS = (
    [USER, IMAGE, IMAGE, 20, 21, ASSISTANT, 30, END],
    [USER, 20, ASSISTANT, 30, 31, END, USER, 22, 23, ASSISTANT, 32, END],
)


def labels_of(ids):
    labels, speaking = [], False
    for i in ids:
        labels.append(i if speaking else IGNORE)
        speaking = i == ASSISTANT or (speaking and i != END)
    return labels


def _without_end(ids):
    return [IGNORE if i == END else label for i, label in zip(ids, labels_of(ids), strict=True)]


def _with_assistant(ids):
    return [i if i == ASSISTANT else label for i, label in zip(ids, labels_of(ids), strict=True)]


def _shifted(ids):
    return [*labels_of(ids)[1:], IGNORE]


LABELS_MISTAKES = {
    "END must be supervised too, or the model never learns to stop": _without_end,
    "ASSISTANT belongs to the prompt: it is not supervised": _with_assistant,
    "these labels are shifted already, and the loss shifts them again": _shifted,
    "everything is supervised: the model would learn to ask": list,
}


def _judge_labels(answer) -> str:
    got = [answer(list(talk)) for talk in TALKS]
    got = [list(labels) if isinstance(labels, list | tuple) else labels for labels in got]
    if got == [labels_of(talk) for talk in TALKS]:
        return ""
    for why, wrong in LABELS_MISTAKES.items():
        if got == [wrong(talk) for talk in TALKS]:
            return why
    talk, labels = next((t, g) for t, g in zip(TALKS, got, strict=True) if g != labels_of(t))
    return f"for {talk} it gives {labels}, and {labels_of(talk)} is right"


LABELS = Exercise(_judge_labels, labels_of, mistakes=LABELS_MISTAKES)


def placeholders():
    return 112  # (5 + 2) pictures of 16 visual tokens


PLACEHOLDERS = by_number(
    placeholders,
    {
        "the conversation with two pictures needs placeholders for both": 96,
        "conversations without a picture hold no placeholder": 144,
    },
    tolerance=1e-6,
)

# Tutorial 6 ----------------------------------------------------------------------------------------------------------


def gain(embeddings):
    norms = embeddings.norm(dim=-1)
    return (norms[norms > 1e-6].mean() / embeddings.shape[-1] ** 0.5).item()


def _tables() -> list[tuple]:
    generator = torch.Generator().manual_seed(0)
    tables = [scale * torch.randn(50, D, generator=generator, dtype=torch.float64) for scale, D in ((0.02, 96), (1, 8))]
    tables[0][:10] = 0
    return [(table,) for table in tables]


GAIN = by_values(
    gain,
    _tables(),
    mistakes={
        "rows of zeros are no text: leave them out of the mean": lambda e: (
            e.norm(dim=-1).mean() / e.shape[-1] ** 0.5
        ).item(),
        "that is T itself: LayerNorm's output already has norm √D": lambda e: gain(e) * e.shape[-1] ** 0.5,
        "divide by the square root of the width, not by the width": lambda e: gain(e) / e.shape[-1] ** 0.5,
    },
    tolerance=1e-6,
)


def compensation():
    return math.sqrt(2048) / 0.9  # 1/g with g = T/√D


COMPENSATION = by_number(
    compensation,
    {
        "that is the gain; the gradient is divided by it": 0.9 / math.sqrt(2048),
        "the gain is T/√D, not 1/√D": math.sqrt(2048),
    },
)

# Tutorial 7 ----------------------------------------------------------------------------------------------------------


def interval(a, b):
    d = np.asarray(a, dtype=float) - np.asarray(b, dtype=float)
    half = stats.t.ppf(0.975, len(d) - 1) * d.std(ddof=1) / math.sqrt(len(d))
    return np.array([d.mean(), d.mean() - half, d.mean() + half])


def _with(factor, ddof):
    def wrong(a, b):
        d = np.asarray(a, dtype=float) - np.asarray(b, dtype=float)
        half = factor(len(d)) * d.std(ddof=ddof) / math.sqrt(len(d))
        return np.array([d.mean(), d.mean() - half, d.mean() + half])

    return wrong


def _unpaired(a, b):
    a, b = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    n, mean = len(a), a.mean() - b.mean()
    half = stats.t.ppf(0.975, n - 1) * math.sqrt((a.var(ddof=1) + b.var(ddof=1)) / n)
    return np.array([mean, mean - half, mean + half])


INTERVAL = by_values(
    interval,
    [([0.9, 0.95, 0.91], [0.85, 0.86, 0.87]), ([1.0, 2.0, 4.0, 3.0], [1.5, 1.0, 2.0, 2.5])],
    mistakes={
        "1.96 is for many seeds: with three, Student's factor is 4.3": _with(lambda n: 1.96, 1),
        "divide the sum of squares by n − 1: the mean was taken from the same values": _with(
            lambda n: stats.t.ppf(0.975, n - 1), 0
        ),
        "these seeds are paired: take the differences first": _unpaired,
        "that is b − a": lambda a, b: interval(b, a),
    },
)

# Tutorial 8 ----------------------------------------------------------------------------------------------------------


def mass(score, others, beta):
    return 1 / (1 + others * math.exp(-beta * score))


MASS = by_values(
    mass,
    [(0.3, 576, 11.0), (0.5, 16, 4.0), (0.1, 100, 30.0)],
    mistakes={
        "the relevant key itself is missing from the sum below": lambda s, n, beta: math.exp(beta * s) / n,
        "the other keys have score 0, and e to the 0 is 1: they count": lambda s, n, beta: (
            math.exp(beta * s) / (1 + math.exp(beta * s))
        ),
        "scores are multiplied by beta before the exponential": lambda s, n, beta: 1 / (1 + n * math.exp(-s)),
    },
)


def harmless_turn():
    return 80.0  # as far beyond the target as it was before it


HARMLESS = by_number(
    harmless_turn,
    {
        "that is the best turn; beyond it there is still a way to go until it is as bad as no turn": 40.0,
        "in degrees, please": math.radians(80),
    },
)

# Tutorial 10 ---------------------------------------------------------------------------------------------------------

NORMS = ((59.0, 0.6), (0.6, 0.59), (0.3, 1.0), (1.5, 1.0), (1.0, 1.5), (1.4, 1.0))


def verdict(visual, text):
    ratio = visual / text
    return "gap" if ratio >= 1.5 else "reversed" if ratio <= 1 / 1.5 else "no gap"


def _difference(visual, text):
    return "gap" if visual - text >= 1.5 else "reversed" if text - visual >= 1.5 else "no gap"


VERDICT_MISTAKES = {
    "take the ratio, not the difference: norms have no natural unit": _difference,
    "there is no third case in it: text may be the louder one": lambda v, t: "gap" if v / t >= 1.5 else "no gap",
    "the ratio is upside down": lambda v, t: verdict(t, v),
}


def _judge_verdict(answer) -> str:
    got = [answer(*norms) for norms in NORMS]
    if got == [verdict(*norms) for norms in NORMS]:
        return ""
    for why, wrong in VERDICT_MISTAKES.items():
        if got == [wrong(*norms) for norms in NORMS]:
            return why
    norms, said = next((n, g) for n, g in zip(NORMS, got, strict=True) if g != verdict(*n))
    return f"for {norms} it says {said!r}, and {verdict(*norms)!r} is right"


VERDICT = Exercise(_judge_verdict, verdict, mistakes=VERDICT_MISTAKES)

EXERCISES = {
    "4.1": UNCUT,
    "4.2": GROWN,
    "5.1": LABELS,
    "5.2": PLACEHOLDERS,
    "6.1": GAIN,
    "6.2": COMPENSATION,
    "7.1": INTERVAL,
    "8.1": MASS,
    "8.2": HARMLESS,
    "10.1": VERDICT,
}
