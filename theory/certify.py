"""Certificates: inequalities proved over whole boxes by interval arithmetic with subdivision (arb, python-flint).

A statement is `expression > 0` for every point of a box. An expression gets one ball per coordinate and gives back a
ball that contains all its values. A box whose ball is positive is done; one whose midpoint is not positive refutes
the statement and is its witness; any other is cut in two. The worst box is always next, so that a false statement
meets its witness early. The statements themselves are in `certificates.py`.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from flint import arb, ctx

Box = tuple[tuple[float, float], ...]
PRECISION = 64


@dataclass(frozen=True)
class Certificate:
    """`margin` is the least lower bound over the proved boxes; `witness` a point at which the statement is false."""

    status: Literal["proved", "refuted", "undecided"]
    boxes: int
    seconds: float
    margin: float | None = None
    witness: Mapping[str, float] | None = None


def ball(low: float, high: float) -> arb:
    """A ball around the interval [low, high]; both ends are exact floats."""
    return arb(low) if low == high else arb(low).union(arb(high))


def _split(box: Box, sizes: tuple[float, ...]) -> tuple[Box, Box]:
    """Cuts the coordinate that is widest relative to the whole box, at its geometric mean if it spans factors."""
    widths = [(high - low) / size if size else 0.0 for (low, high), size in zip(box, sizes, strict=True)]
    axis = widths.index(max(widths))
    low, high = box[axis]
    middle = math.sqrt(low * high) if low > 0 and high > 4 * low else low + (high - low) / 2
    return tuple((*box[:axis], part, *box[axis + 1 :]) for part in ((low, middle), (middle, high)))  # type: ignore[return-value]


def certify(
    expression: Callable[..., arb], box: Mapping[str, tuple[float, float]], max_boxes: int = 200_000
) -> Certificate:
    """Is `expression(*coordinates) > 0` on the whole box? Undecided if that takes more than `max_boxes` boxes.

    Raises ValueError for an empty or reversed interval.
    """
    for name, (low, high) in box.items():
        if not low <= high or not math.isfinite(high - low):
            raise ValueError(f"box must have finite low ≤ high, got {name} = ({low}, {high})")
    started, old_precision = time.perf_counter(), ctx.prec
    ctx.prec = PRECISION
    try:
        status, boxes, margin, witness = _search(expression, tuple(box.values()), max_boxes)
    finally:
        ctx.prec = old_precision
    named = dict(zip(box, witness, strict=True)) if witness else None
    return Certificate(status, boxes, time.perf_counter() - started, margin, named)


def _search(expression, whole: Box, max_boxes: int):
    sizes = tuple(high - low for low, high in whole)
    margin, boxes, tie = math.inf, 0, 0
    queue: list[tuple[float, int, Box]] = [(-math.inf, 0, whole)]
    while queue:
        if boxes >= max_boxes:
            return "undecided", boxes, None, None
        _, _, box = heapq.heappop(queue)
        for part in _split(box, sizes) if boxes else (box,):
            boxes += 1
            value = expression(*(ball(*interval) for interval in part))
            if value > 0:
                margin = min(margin, float(value.lower()))
                continue
            middle = tuple(low + (high - low) / 2 for low, high in part)
            if expression(*(arb(x) for x in middle)) <= 0:
                return "refuted", boxes, None, middle
            if all(low == high for low, high in part):
                return "undecided", boxes, None, None
            tie += 1
            lower = float(value.lower()) if value.is_finite() else -math.inf
            heapq.heappush(queue, (lower, tie, part))
    return "proved", boxes, margin, None
