"""What a normalised branch can and cannot see of its input's size (S1-S3).

A residual branch reads LN(h), so it ignores the scale of h; a layer of two branches does not, because its second
branch reads the direction of αh + (what the first one wrote). With ε the invariance is broken by a known amount.
All vectors lie along the last axis.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from theory.arrays import Floats, Reader


def rms_norm(h: ArrayLike, eps: float = 0.0) -> Floats:
    """h / √(mean h² + ε) (S1). Same shape. Raises ValueError for non-finite input and where the root is 0."""
    read = Reader(h=h, eps=eps).nonnegative("eps")
    square = (read["h"] ** 2).mean(axis=-1, keepdims=True) + read["eps"]
    if (square == 0).any():
        raise ValueError("h must be different from the zero vector where eps is 0, got a zero vector")
    return Reader(h=h).out(read["h"] / np.sqrt(square))


def layer_norm(h: ArrayLike, eps: float = 0.0) -> Floats:
    """(h − mean) / √(variance + ε), no gain and no bias (S1). Raises ValueError as `rms_norm` does."""
    values = Reader(h=h)
    return values.out(rms_norm(values["h"] - values["h"].mean(axis=-1, keepdims=True), eps))


def shrinkage(sigma: ArrayLike, eps: ArrayLike) -> Floats:
    """1 − ρ with ρ = (1 + ε/σ²)^(−1/2), the factor by which ε shrinks a LayerNorm's output (S2, N2).

    `sigma` is the standard deviation of one token's components, `eps` has the unit of its square. By expm1 and
    log1p, so that it is accurate for ε/σ² as small as floats go. Raises ValueError unless sigma > 0, eps ≥ 0.
    """
    read = Reader(sigma=sigma, eps=eps).positive("sigma").nonnegative("eps")
    x = np.sqrt(read["eps"]) / read["sigma"]
    return read.out(-np.expm1(-0.5 * np.log1p(x * x)))


class ScaleEffect(NamedTuple):
    change: Floats
    bound: Floats


def scale_effect(sigma: ArrayLike, alpha: ArrayLike, eps: ArrayLike) -> ScaleEffect:
    """|ρ(ασ) − ρ(σ)| and its bound ε|α⁻² − 1|/(2σ²): all that a rescaled token changes in a branch (S2).

    Dimensionless. Raises ValueError unless sigma, alpha > 0 and eps ≥ 0.
    """
    read = Reader(sigma=sigma, alpha=alpha, eps=eps).positive("sigma", "alpha").nonnegative("eps")
    sigma, alpha, eps = read["sigma"], read["alpha"], read["eps"]
    x, y = eps / sigma**2, eps / (alpha * sigma) ** 2
    gap = eps * np.abs((1 - alpha) * (1 + alpha)) / (alpha * sigma) ** 2  # |y − x| without the subtraction
    p, q = np.sqrt(1 + x), np.sqrt(1 + y)
    return ScaleEffect(read.out(gap / (p * q * (p + q))), read.out(gap / 2))


def centred(h: ArrayLike) -> Floats:
    """Ph, the part of h that LayerNorm sees; ‖Ph‖ = σ√D (S3)."""
    read = Reader(h=h)
    return read.out(read["h"] - read["h"].mean(axis=-1, keepdims=True))


class TwoViews(NamedTuple):
    full_space: Floats
    layer_norm: Floats


def adjacent_cosine_views(h: ArrayLike, delta: ArrayLike) -> TwoViews:
    """The adjacent cosine of h → h + Δ in the full space and in the centred space that LayerNorm sees (S3).

    A large constant part makes the first one nearly 1 whatever the second is. Raises ValueError for vectors that
    vanish, or vanish once centred.
    """
    from theory.vectors import angle_between

    read = Reader(h=h, delta=delta)
    after = read["h"] + read["delta"]
    views = (np.cos(angle_between(view(read["h"]), view(after))) for view in (np.asarray, centred))
    return TwoViews(*(read.out(cosine) for cosine in views))
