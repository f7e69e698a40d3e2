"""Many residual steps: what becomes of a gap between two norms (D1-D6).

Units as in `rotation`: radians, and one common unit for norms and updates. Layers run along axis 0.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from theory.arrays import Floats, Reader, require, whole_number
from theory.rotation import Bounds, components


class Path(NamedTuple):
    """Norms at the L + 1 residual states and turns in the L steps between them."""

    norms: Floats
    turns: Floats


def evolve(norm0: ArrayLike, updates: ArrayLike, angles: ArrayLike) -> Path:
    """Runs the exact step formula through the layers (R1, D1-D5).

    updates (L, ...) and angles (L, ...) broadcast against each other and, without their first axis, against norm0.
    Raises ValueError as `step_angle` does, and for updates or angles that have no layer axis.
    """
    read = Reader(updates=updates, angles=angles).nonnegative("updates").angle("angles")
    start = Reader(norm0=norm0).nonnegative("norm0")
    if not max(read["updates"].ndim, read["angles"].ndim):
        raise ValueError(f"updates must have layers along axis 0, got the number {updates!r}")
    C, phi = np.broadcast_arrays(read["updates"], read["angles"])
    shape = np.broadcast_shapes(start["norm0"].shape, C.shape[1:])
    norms, turns = np.empty((len(C) + 1, *shape)), np.empty((len(C), *shape))
    norms[0] = start["norm0"]
    for layer in range(len(C)):
        u, v, exponent = components(norms[layer], C[layer], phi[layer])
        norms[layer + 1] = np.ldexp(np.hypot(u, v), exponent)
        require(f"norm after layer {layer}", norms[layer + 1], norms[layer + 1] > 0, "greater than 0")
        turns[layer] = np.where(norms[layer] == 0, phi[layer], np.arctan2(u, v))
    single = {start.dtype, read.dtype} == {np.dtype(np.float32)}
    return Path(*(values.astype(np.float32 if single else np.float64) for values in (norms, turns)))


class Fate(NamedTuple):
    """What one shared step does to a pair of norms; booleans."""

    order_kept: Floats
    gap_grows: Floats
    squared_gap_grows: Floats
    ratio_shrinks: Floats


def fate(norm_v: ArrayLike, norm_t: ArrayLike, update: ArrayLike, angle: ArrayLike) -> Fate:
    """D1: order is kept iff c > −A/C, the squared gap grows iff c > 0, the ratio N_v/N_t shrinks iff c > −C/H.

    A and H are the arithmetic and harmonic mean of the norms. The gap |N_v − N_t| never grows, so that field is False
    everywhere; it is there because the paper's persistence says otherwise. The boundary c = 0 is φ = fl(π/2): its
    cosine is 6e-17 and not 0, hence the comparison of φ itself. Raises ValueError unless 0 < n_t < n_v, C > 0.
    """
    read = Reader(norm_v=norm_v, norm_t=norm_t, update=update, angle=angle)
    read.positive("norm_v", "norm_t", "update").angle("angle")
    require("norm_t", read["norm_t"], read["norm_t"] < read["norm_v"], "less than norm_v")
    exponent = np.frexp(np.maximum(read["norm_v"], read["update"]))[1]
    v, t, C = (np.ldexp(read[name], -exponent) for name in ("norm_v", "norm_t", "update"))
    c = np.cos(read["angle"])
    shape = np.broadcast_shapes(*(value.shape for value in read.values.values()))
    return Fate(
        order_kept=np.broadcast_to((v + t) / 2 + C * c > 0, shape)[()],
        gap_grows=np.zeros(shape, bool)[()],
        squared_gap_grows=np.broadcast_to(read["angle"] < np.pi / 2, shape)[()],
        ratio_shrinks=np.broadcast_to(C + c * 2 * v * (t / (v + t)) > 0, shape)[()],
    )


class Attractor(NamedTuple):
    """Where norms go under one fixed obtuse angle: the norm, the local rate of approach, the turn at each layer."""

    norm: Floats
    rate: Floats
    turn: Floats


def attractor(update: ArrayLike, angle: ArrayLike) -> Attractor:
    """n* = −C/(2 cos φ), rate dN/dn = −cos 2φ, turn 2φ − π a layer (D3). Raises unless C > 0, π/2 < φ ≤ π."""
    read = Reader(update=update, angle=angle).positive("update").angle("angle")
    require("angle", read["angle"], read["angle"] > np.pi / 2, "obtuse (greater than π/2)")
    phi = read["angle"]
    return Attractor(
        read.out(-read["update"] / (2 * np.cos(phi))), read.out(-np.cos(2 * phi)), read.out(2 * phi - np.pi)
    )


class Theodorus(NamedTuple):
    lower: Floats
    total_turn: Floats
    upper: Floats


def theodorus_bounds(norm0: ArrayLike, update: ArrayLike, layers: int) -> Theodorus:
    """The total turn of a token whose updates are all orthogonal (the spiral of Theodorus), between its bounds (D4).

    With a = (n_0/C)²: 2(√(a + L + 1) − √(a + 1)) ≤ Θ_L ≤ 2(√(a + L − ½) − √(a − ½)); the upper one is infinite for
    a ≤ ½. Radians. Raises ValueError unless norm0, update > 0 and layers ≥ 1.
    """
    read = Reader(norm0=norm0, update=update).positive("norm0", "update")
    layers = whole_number("layers", layers, 1)
    a = (read["norm0"] / read["update"]) ** 2
    total = sum(np.arctan2(1.0, np.sqrt(a + layer)) for layer in range(layers))
    # √(x + L) − √x = L / (√(x + L) + √x) keeps its digits for large a.
    lower = 2 * layers / (np.sqrt(a + layers + 1) + np.sqrt(a + 1))
    inside = np.where(a > 0.5, a - 0.5, 1.0)
    upper = np.where(a > 0.5, 2 * layers / (np.sqrt(inside + layers) + np.sqrt(inside)), np.inf)
    return Theodorus(read.out(lower), read.out(total), read.out(upper))


def spiral_angle(norm0: ArrayLike, norm1: ArrayLike, angle: ArrayLike) -> Floats:
    """Turn of the continuous limit, a logarithmic spiral: tan φ · ln(n/n_0), in radians (D4).

    Raises ValueError unless the norms are > 0 and φ is not π/2 (there the norm stands still to first order).
    """
    read = Reader(norm0=norm0, norm1=norm1, angle=angle).positive("norm0", "norm1").angle("angle")
    require("angle", read["angle"], read["angle"] != np.pi / 2, "different from π/2")
    return read.out(np.tan(read["angle"]) * np.log(read["norm1"] / read["norm0"]))


def cumulative_bounds(norm_v: ArrayLike, norm_t: ArrayLike, updates: ArrayLike, angles: ArrayLike) -> Bounds:
    """n_t⁰/n_v⁰ ≤ Θ_v/Θ_t ≤ n_t^L/n_v^L for shared updates at acute angles (D5).

    Raises ValueError for an obtuse angle (where it is false) and unless 0 < n_t ≤ n_v.
    """
    read = Reader(norm_v=norm_v, norm_t=norm_t).positive("norm_v", "norm_t")
    require("norm_t", read["norm_t"], read["norm_t"] <= read["norm_v"], "at most norm_v")
    phi = Reader(angles=angles)["angles"]
    require("angles", phi, phi <= np.pi / 2, "acute (at most π/2)")
    v, t = (evolve(read[name], updates, angles) for name in ("norm_v", "norm_t"))
    return Bounds(read.out(read["norm_t"] / read["norm_v"]), read.out(t.norms[-1] / v.norms[-1]))


class IsotropicFate(NamedTuple):
    norm: Floats
    cosine_to_start: Floats


def isotropic_fate(norm0: ArrayLike, update: ArrayLike, layers: ArrayLike) -> IsotropicFate:
    """After L updates whose directions average out: √E n_L² = √(n_0² + LC²), exactly (D2), and the cosine to the
    starting state ≈ n_0/√(n_0² + LC²), exact in the limit of infinite width (D6).

    Raises ValueError unless norm0 > 0, update ≥ 0, layers ≥ 0.
    """
    read = Reader(norm0=norm0, update=update, layers=layers).positive("norm0").nonnegative("update", "layers")
    norm = np.hypot(read["norm0"], np.sqrt(read["layers"]) * read["update"])
    return IsotropicFate(read.out(norm), read.out(read["norm0"] / norm))


def layers_until_ratio(norm_v: float, norm_t: float, update: float, ratio: float) -> float:
    """How many layers of directionless updates bring √(E n_v²/E n_t²) down to `ratio` (D2). Raises unless
    1 < ratio ≤ n_v/n_t and all sizes are > 0."""
    Reader(norm_v=norm_v, norm_t=norm_t, update=update).positive("norm_v", "norm_t", "update")
    if not 1 < ratio <= norm_v / norm_t:
        raise ValueError(f"ratio must be above 1 and at most norm_v/norm_t = {norm_v / norm_t}, got {ratio}")
    return (norm_v**2 - ratio**2 * norm_t**2) / (update**2 * (ratio**2 - 1))


class EffectiveDepth(NamedTuple):
    coherent: Floats
    diffusive: Floats


def effective_depth(norm_v: ArrayLike, norm_t: ArrayLike, layers: ArrayLike) -> EffectiveDepth:
    """How many layers a visual token experiences, counted in a text token's turns, while norms change little (D6).

    L·n_t/n_v if the turns add up, L·(n_t/n_v)² if they diffuse. Raises ValueError unless norms > 0 and layers ≥ 0.
    """
    read = Reader(norm_v=norm_v, norm_t=norm_t, layers=layers).positive("norm_v", "norm_t").nonnegative("layers")
    ratio = read["norm_t"] / read["norm_v"]
    return EffectiveDepth(read.out(read["layers"] * ratio), read.out(read["layers"] * ratio**2))
