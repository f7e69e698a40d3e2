"""The angle between two vectors, to a few ulp even when it is 1e-15 (the pitfalls page of R5).

Any formula in plain float64 rounds the products of components and so knows the angle only to about 1e-16
absolutely. The part of b that is orthogonal to a is therefore computed in twofold precision: every number is an
unevaluated sum high + low, with the classical error-free sum (Knuth) and product (Dekker).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from theory.arrays import Floats, Reader, require

Twofold = tuple[Floats, Floats]
_SPLIT = 2.0**27 + 1


def _two_sum(a: Floats, b: Floats) -> Twofold:
    total = a + b
    shadow = total - a
    return total, (a - (total - shadow)) + (b - shadow)


def _two_product(a: Floats, b: Floats) -> Twofold:
    product = a * b
    a_high = _SPLIT * a - (_SPLIT * a - a)
    b_high = _SPLIT * b - (_SPLIT * b - b)
    a_low, b_low = a - a_high, b - b_high
    return product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


def _times(a: Twofold, b: Twofold) -> Twofold:
    high, low = _two_product(a[0], b[0])
    return _two_sum(high, low + (a[0] * b[1] + a[1] * b[0]))


def _minus(a: Twofold, b: Twofold) -> Twofold:
    high, low = _two_sum(a[0], -b[0])
    return _two_sum(high, low + (a[1] - b[1]))


def _dot(a: Floats, b: Floats) -> Twofold:
    """Inner products along the last axis; numpy's pairwise halving, in twofold arithmetic."""
    high, low = _two_product(a, b)
    while high.shape[-1] > 1:
        odd = high.shape[-1] % 2
        tail = (high[..., -1:], low[..., -1:]) if odd else None
        stop = high.shape[-1] - odd
        total, error = _two_sum(high[..., :stop:2], high[..., 1:stop:2])
        high, low = _two_sum(total, error + (low[..., :stop:2] + low[..., 1:stop:2]))
        if tail is not None:
            high, low = (np.concatenate([part, end], axis=-1) for part, end in zip((high, low), tail, strict=True))
    return high, low


def _scaled(vectors: Floats) -> Floats:
    """Each vector times the power of two that puts its largest component in [1/2, 1)."""
    return np.ldexp(vectors, -np.frexp(np.abs(vectors).max(axis=-1, keepdims=True))[1])


def angle_between(a: ArrayLike, b: ArrayLike) -> Floats:
    """∠(a, b) in radians along the last axis; the leading axes broadcast (R1, R5).

    θ = atan2(‖r‖ ‖a‖, a·b) with r = b − a (a·b)/(a·a) in twofold precision. Raises ValueError for NaN, infinities,
    vectors of different width and zero vectors.
    """
    read = Reader(a=a, b=b)
    for name in ("a", "b"):
        if read[name].ndim == 0 or read[name].shape[-1] == 0:
            raise ValueError(f"{name} must be an array of vectors along its last axis, got shape {read[name].shape}")
        length = np.abs(read[name]).max(axis=-1)
        require(name, length, length > 0, "different from the zero vector")
    if read["a"].shape[-1] != read["b"].shape[-1]:
        raise ValueError(f"b must have the width of a, {read['a'].shape[-1]}, got {read['b'].shape[-1]}")
    x, y = np.broadcast_arrays(_scaled(read["a"]), _scaled(read["b"]))
    xx, xy = _dot(x, x), _dot(x, y)
    # xx·r = xx·y − xy·x, component by component: the subtraction that loses digits has twice as many to lose.
    zero = np.zeros_like(x)
    across = _minus(_times(xx, (y, zero)), _times(xy, (x, zero)))[0]
    # Scaled before squaring: the components of a tiny angle would underflow.
    size = np.abs(across).max(axis=-1, keepdims=True)
    exponent = np.frexp(size)[1]
    length = np.ldexp(np.sqrt((np.ldexp(across, -exponent) ** 2).sum(axis=-1)), exponent[..., 0])
    return read.out(np.arctan2(length, np.sqrt(xx[0][..., 0]) * xy[0][..., 0]))
