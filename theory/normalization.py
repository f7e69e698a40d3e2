"""The LayerNorm after the projector: its Jacobian, its output, compensation and the optimisers (N1-N3, G1-G4).

y = g·x̃ with x̃ = (h − mean)/s, s² = σ² + ε. Vectors lie along the last axis; D is their width, T the target norm.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from theory.arrays import Floats, Reader, require, whole_number
from theory.invariance import layer_norm
from theory.rotation import Bounds


def _whitened(h: Floats, eps: Floats) -> tuple[Floats, Floats]:
    """x̃ and s of every token."""
    centred = h - h.mean(axis=-1, keepdims=True)
    s = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps)
    require("h", s, s > 0, "different from a constant vector where eps is 0; s")
    return centred / s, s


def layernorm_vjp(h: ArrayLike, gain: ArrayLike, eps: float, upstream: ArrayLike) -> Floats:
    """Jᵀw: the gradient with respect to h of a loss whose gradient with respect to y is w = `upstream` (N1).

    h and upstream (..., D), gain a number or (D,). Raises ValueError for eps < 0 and a constant h with eps = 0.
    """
    read = Reader(h=h, gain=gain, eps=eps, upstream=upstream).nonnegative("eps")
    x, s = _whitened(read["h"], read["eps"])
    w = read["gain"] * read["upstream"]
    return read.out((w - w.mean(axis=-1, keepdims=True) - x * (x * w).mean(axis=-1, keepdims=True)) / s)


def layernorm_jacobian(h: ArrayLike, gain: ArrayLike, eps: float) -> Floats:
    """∂y_i/∂h_j = (g_i/s)(δ_ij − 1/D − x̃_i x̃_j/D) of one token h (D,), as a (D, D) matrix (N1). Raises as the vjp."""
    read = Reader(h=h, gain=gain, eps=eps)
    require("h", np.asarray(read["h"].ndim), read["h"].ndim == 1, "one token; its number of axes")
    return read.out(layernorm_vjp(read["h"], read["gain"], float(read["eps"]), np.eye(len(read["h"]))))


def radial_part(sigma: ArrayLike, eps: ArrayLike) -> Floats:
    """ε/(σ² + ε): how much of g/s is left along x̃ itself. 0 for ε = 0, where the gradient is orthogonal to h (N1)."""
    read = Reader(sigma=sigma, eps=eps).nonnegative("sigma", "eps")
    total = read["sigma"] ** 2 + read["eps"]
    require("sigma", total, total > 0, "greater than 0 where eps is 0; σ² + ε")
    return read.out(read["eps"] / total)


def target_norm(embedding: ArrayLike, smallest: float = 1e-8) -> float:
    """T: mean L2 norm of the rows (V, D) whose norm exceeds `smallest` (the paper's D). Raises if there are none."""
    read = Reader(embedding=embedding)
    require("embedding", np.asarray(read["embedding"].ndim), read["embedding"].ndim == 2, "a matrix; its axes")
    norms = np.linalg.norm(read["embedding"], axis=-1)
    if not (norms > smallest).any():
        raise ValueError(f"embedding must have a row of norm above {smallest}, got a largest norm of {norms.max()}")
    return float(norms[norms > smallest].mean())


def alignment_gain(target: ArrayLike, width: ArrayLike) -> Floats:
    """g = T/√D, with which LayerNorm hands out vectors of norm T, up to ρ (N2). Raises unless T > 0, D ≥ 1."""
    read = Reader(target=target, width=width).positive("target")
    require("width", read["width"], read["width"] >= 1, "at least 1")
    return read.out(read["target"] / np.sqrt(read["width"]))


def output_norm_bounds(h: ArrayLike, gain: ArrayLike, eps: float) -> Bounds:
    """min|g| √D ρ ≤ ‖y‖ ≤ max|g| √D ρ; for a scalar gain both are the norm itself, for every token (N2)."""
    read = Reader(h=h, gain=gain, eps=eps).nonnegative("eps")
    x, _ = _whitened(read["h"], read["eps"])
    length, size = np.linalg.norm(x, axis=-1), np.abs(read["gain"])
    return Bounds(read.out(size.min() * length), read.out(size.max() * length))


def aligned(h: ArrayLike, gain: ArrayLike, eps: float = 0.0) -> Floats:
    """y = g·LN(h) (N2). Raises as `layer_norm`."""
    read = Reader(h=h, gain=gain)
    return read.out(read["gain"] * layer_norm(read["h"], eps))


def compensation_factor(gain: ArrayLike, delta: float = 1e-3) -> Floats:
    """κ = 1/max(mean|g|, δ), by which GWC multiplies the gradient upstream of the norm (the paper's E, G4).

    gain (..., D) or a number. Raises ValueError unless delta > 0.
    """
    read = Reader(gain=gain, delta=delta).positive("delta")
    size = np.abs(read["gain"])
    mean = size if size.ndim == 0 else size.mean(axis=-1)
    return read.out(1 / np.maximum(mean, read["delta"]))


def restored_amplitude(gain: ArrayLike, delta: float = 1e-3) -> Bounds:
    """κ·mean|g| and κ·max|g|: what gain and compensation make of a gradient's components together (G4).

    The first is 1 above δ and mean|g|/δ below; the second is max|g|/mean|g|, the largest amplification.
    """
    read = Reader(gain=gain)
    size, kappa = np.atleast_1d(np.abs(read["gain"])), compensation_factor(gain, delta)
    return Bounds(read.out(kappa * size.mean(axis=-1)), read.out(kappa * size.max(axis=-1)))


class ClipEffect(NamedTuple):
    upstream: Floats
    rest: Floats


def clip_effect(share: ArrayLike, factor: ArrayLike) -> ClipEffect:
    """By what clipping to a global norm multiplies both parts of the gradient once κ is applied upstream (G3).

    `share` is upstream's part of the squared norm; clipping active before and after: κ/√(1 − s + sκ²) upstream and
    1/√(1 − s + sκ²) elsewhere. Raises ValueError unless 0 ≤ s ≤ 1, κ > 0.
    """
    read = Reader(share=share, factor=factor).between("share", 0, 1).positive("factor")
    s, kappa = read["share"], read["factor"]
    length = np.hypot(np.sqrt(1 - s), np.sqrt(s) * kappa)
    return ClipEffect(read.out(kappa / length), read.out(1 / length))


def adam_steps(
    gradients: ArrayLike, beta1: float = 0.9, beta2: float = 0.999, eps: float = 0.0, decay: float = 0.0
) -> Floats:
    """Adam's steps in units of the learning rate for a run of gradients (steps, ...), bias corrections included (G2).

    `decay` is coupled L2 for a weight that starts at 1 and moves by 1e-3 of each step; AdamW's decoupled decay does not
    meet the gradient and is left out. Raises ValueError unless 0 ≤ β < 1, eps, decay ≥ 0.
    """
    read = Reader(gradients=gradients, eps=eps, decay=decay).nonnegative("eps", "decay")
    for name, beta in (("beta1", beta1), ("beta2", beta2)):
        if not 0 <= beta < 1:
            raise ValueError(f"{name} must be at least 0 and less than 1, got {beta}")
    first = second = np.zeros(read["gradients"].shape[1:])
    weight, steps = np.ones_like(first), []
    for t, gradient in enumerate(read["gradients"], start=1):
        gradient = gradient + read["decay"] * weight
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient**2
        size = np.sqrt(second / (1 - beta2**t)) + read["eps"]
        moved = first / (1 - beta1**t)
        steps.append(np.divide(moved, size, out=np.zeros_like(moved), where=size > 0))
        weight = weight - 1e-3 * steps[-1]
    return read.out(np.array(steps))


def largest_adam_step(steps: int, beta1: float = 0.9, beta2: float = 0.999) -> float:
    """R: the largest |step| in units of the learning rate within so many steps, by Cauchy-Schwarz (G2)."""
    steps = whole_number("steps", steps, 1)
    largest = 0.0
    for t in range(1, steps + 1):
        age = np.arange(t)
        a = (1 - beta1) * beta1**age / (1 - beta1**t)
        b = (1 - beta2) * beta2**age / (1 - beta2**t)
        largest = max(largest, float(np.sqrt((a**2 / b).sum())))
    return largest


def varying_factor_bound(spread: ArrayLike, largest_step: float) -> Floats:
    """|Δstep/lr| ≤ 2Rδ/(1 − δ) if κ varies by a relative ±δ (G2). Raises ValueError unless 0 ≤ spread < 1, R > 0."""
    read = Reader(spread=spread, largest_step=largest_step).nonnegative("spread").positive("largest_step")
    require("spread", read["spread"], read["spread"] < 1, "less than 1")
    return read.out(2 * read["largest_step"] * read["spread"] / (1 - read["spread"]))


def compensated_toy_field(gain: ArrayLike, weight: ArrayLike) -> tuple[Floats, Floats]:
    """The compensated 'gradient' (L_g, κ L_w), κ = 1/g, of the toy loss L = ½(gw − 3)² (G1). Raises unless gain > 0."""
    read = Reader(gain=gain, weight=weight).positive("gain")
    miss = read["gain"] * read["weight"] - 3
    return read.out(read["weight"] * miss), read.out(miss)
