"""When a bf16 weight does not feel its update (P1), and what that says about the paper's gains (P2)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from theory.arrays import Floats, Reader, require, whole_number

MANTISSA_BITS = 7
SMALLEST_EXPONENT = -126
LARGEST_BF16 = (2 - 2.0**-MANTISSA_BITS) * 2.0**127


def _exponent(values: Floats) -> Floats:
    """⌊log₂|w|⌋, not below that of the subnormals, which zero joins."""
    return np.where(values == 0, SMALLEST_EXPONENT, np.maximum(np.frexp(values)[1] - 1, SMALLEST_EXPONENT))


def round_to_bf16(values: ArrayLike) -> Floats:
    """The nearest bf16 number, ties to the even mantissa, infinite beyond the range (P1). Returns float64.

    One rounding straight from float64: going through float32 would round twice. Raises on NaN and infinities.
    """
    x = Reader(values=values)["values"]
    quantum = np.ldexp(1.0, (_exponent(x) - MANTISSA_BITS).astype(int))
    rounded = np.rint(x / quantum) * quantum
    return np.where(np.abs(rounded) > LARGEST_BF16, np.copysign(np.inf, rounded), rounded)[()]


class Thresholds(NamedTuple):
    """Half a step away from 0 and half a step toward it; a smaller update is lost."""

    away: Floats
    toward: Floats


def lost_below(weight: ArrayLike) -> Thresholds:
    """Size of update below which a bf16 weight stays where it is, by direction (P1).

    2^(e−8) with e = ⌊log₂|w|⌋; toward 0 from a power of two the step is half as wide, 2^(e−9), except from the
    smallest normal 2^−126 and the subnormals, whose neighbours are equally spaced. Raises unless weight is bf16.
    """
    w = _bf16_argument(weight)
    half = np.ldexp(1.0, (_exponent(w) - MANTISSA_BITS - 1).astype(int))
    power_of_two = (np.abs(np.frexp(w)[0]) == 0.5) & (np.abs(w) > 2.0**SMALLEST_EXPONENT)
    return Thresholds(half[()], np.where(power_of_two, half / 2, half)[()])


def update_lost(weight: ArrayLike, update: ArrayLike) -> Floats:
    """Whether weight + update rounds back to the bf16 weight: the rule of P1, ties to the even mantissa included.

    Boolean, broadcast shape. Raises ValueError unless weight is a bf16 number and update is finite.
    """
    w, u = _bf16_argument(weight), Reader(update=update)["update"]
    away, toward = lost_below(w)
    threshold = np.where((np.sign(u) == -np.sign(w)) & (w != 0), toward, away)
    mantissa = np.abs(w) / np.ldexp(1.0, (_exponent(w) - MANTISSA_BITS).astype(int))
    even = mantissa % 2 == 0
    return ((np.abs(u) < threshold) | ((np.abs(u) == threshold) & even))[()]


def _bf16_argument(weight: ArrayLike) -> Floats:
    w = Reader(weight=weight)["weight"]
    require("weight", w, round_to_bf16(w) == w, "a bf16 number")
    return w


def all_bf16() -> Floats:
    """Every finite bf16 number once (the two zeros are one), ascending: 65,279 of them."""
    bits = np.arange(2**16, dtype=np.uint32) << 16
    values = bits.view(np.float32)
    return np.unique(values[np.isfinite(values)].astype(np.float64)) + 0.0  # and not −0


def frozen_from(step: float) -> float:
    """The smallest positive bf16 weight w such that no weight ≥ w feels a step of this size in either direction (P1).

    Raises ValueError unless 0 < step < half a step at the largest bf16 number.
    """
    Reader(step=step).positive("step")
    weights = all_bf16()
    weights = weights[weights > 0]
    frozen = update_lost(weights, step) & update_lost(weights, -step)
    if not frozen[-1]:
        raise ValueError(f"step must be too small for the largest bf16 weight, got {step}")
    return float(weights[len(weights) - int(np.argmin(frozen[::-1]))] if not frozen.all() else weights[0])


class GainAudit(NamedTuple):
    """What one row of the paper's table of initialisations implies for a width."""

    root_mean_square: float
    possible: bool
    mean_step_bf16: float


def audit_gain(mean_gain: float, gain_norm: float, width: int) -> GainAudit:
    """Is a mean |g| compatible with a norm ‖g‖ at this width? The root mean square can't be below the mean (P2).

    Both numbers are taken as rounded to bf16, so each may be half a bf16 step off. Raises ValueError unless
    sizes are > 0 and width ≥ 1.
    """
    Reader(mean_gain=mean_gain, gain_norm=gain_norm).positive("mean_gain", "gain_norm")
    width = whole_number("width", width, 1)
    mean, norm = (float(round_to_bf16(x)) for x in (mean_gain, gain_norm))
    slack = [float(lost_below(x).away) for x in (mean, norm)]
    possible = (norm + slack[1]) / np.sqrt(width) >= mean - slack[0]
    return GainAudit(norm / np.sqrt(width), bool(possible), slack[0] * 2)
