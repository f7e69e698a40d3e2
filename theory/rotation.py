"""One residual step: how far a token of norm n turns when an update of size C at angle φ is added (R1-R7).

    h, ‖h‖ = n        Δ, ‖Δ‖ = C, φ = ∠(h, Δ)        u = C sin φ,  v = n + C cos φ,  N = ‖h + Δ‖

The turn is θ = atan2(u, v), so cot θ = cot φ + n / (C sin φ). All angles are radians, all norms and updates are in
one common unit (whatever the hidden states are measured in). Angles and norms are good to a few ulp relatively,
cosines absolutely: a cosine passes through 0 at n = −C cos φ, where no relative promise can be kept.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from theory.arrays import Floats, Reader, require, whole_number


def _read_step(norm: ArrayLike, update: ArrayLike, angle: ArrayLike) -> Reader:
    """The arguments of one step, with h = Δ = 0 and h + Δ = 0 refused: no direction is left to speak of."""
    read = Reader(norm=norm, update=update, angle=angle).nonnegative("norm", "update").angle("angle")
    require("norm", read["norm"], (read["norm"] > 0) | (read["update"] > 0), "greater than 0 where update is 0")
    opposite = (read["norm"] == read["update"]) & (read["angle"] == np.pi)
    require("norm", read["norm"], ~opposite, "different from update at angle π, where h + Δ = 0")
    return read


def components(norm: Floats, update: Floats, angle: Floats) -> tuple[Floats, Floats, Floats]:
    """u and v over 2**e, and e, for arguments that have been read. A power of two scales without rounding.

    For obtuse φ, n + C cos φ cancels; (n − C) + 2C cos²(φ/2) is the same number with a difference that is exact
    whenever it is dangerous.
    """
    exponent = np.frexp(np.maximum(norm, update))[1]
    n, C = np.ldexp(norm, -exponent), np.ldexp(update, -exponent)
    u = C * np.sin(angle)
    v = np.where(angle > np.pi / 2, (n - C) + 2 * C * np.cos(angle / 2) ** 2, n + C * np.cos(angle))
    return u, v, exponent


def _step_components(norm: ArrayLike, update: ArrayLike, angle: ArrayLike) -> tuple[Reader, Floats, Floats, Floats]:
    read = _read_step(norm, update, angle)
    return read, *components(read["norm"], read["update"], read["angle"])


def step_angle(norm: ArrayLike, update: ArrayLike, angle: ArrayLike) -> Floats:
    """The turn θ of a token in radians (R1), the paper's θ_eff without its pole.

    norm, update, angle broadcast to the shape of the result; norm 0 gives back `angle` (the limit).
    Raises ValueError for NaN, infinities, negative sizes, an angle outside [0, π], h = Δ = 0 and h + Δ = 0.
    """
    read, u, v, _ = _step_components(norm, update, angle)
    return read.out(np.where(read["norm"] == 0, read["angle"], np.arctan2(u, v)))


def norm_after(norm: ArrayLike, update: ArrayLike, angle: ArrayLike) -> Floats:
    """N = ‖h + Δ‖ in the unit of `norm` (R1, D1). Raises ValueError as `step_angle` does."""
    read, u, v, exponent = _step_components(norm, update, angle)
    return read.out(np.ldexp(np.hypot(u, v), exponent))


def adjacent_cosine(norm: ArrayLike, update: ArrayLike, angle: ArrayLike) -> Floats:
    """cos θ = v / N, the cosine between a token's states before and after the step (R5). Absolute accuracy."""
    read, u, v, _ = _step_components(norm, update, angle)
    return read.out(v / np.hypot(u, v))


def adjacent_cosine_deficit(norm: ArrayLike, update: ArrayLike, angle: ArrayLike) -> Floats:
    """1 − cos θ = u² / (N (N + v)), accurate relatively where 1 − `adjacent_cosine` has lost every digit (R5)."""
    read, u, v, _ = _step_components(norm, update, angle)
    N = np.hypot(u, v)
    forward = (u / N) * (u / np.where(v > 0, N + v, 1.0))
    return read.out(np.where(v > 0, forward, 1 - v / N))


class TurnSlopes(NamedTuple):
    """Derivatives of the turn: by norm and by update (radians per unit of norm), by angle, and twice by norm."""

    by_norm: Floats
    by_update: Floats
    by_angle: Floats
    by_norm_twice: Floats


def turn_slopes(norm: ArrayLike, update: ArrayLike, angle: ArrayLike) -> TurnSlopes:
    """∂θ/∂n = −u/N², ∂θ/∂C = n sin φ/N², ∂θ/∂φ = C(C + n cos φ)/N², ∂²θ/∂n² = 2uv/N⁴ (R1).

    Raises ValueError as `step_angle` does. The first is never positive: inertia in one line.
    """
    read, u, v, exponent = _step_components(norm, update, angle)
    N = np.hypot(u, v)
    n, C = np.ldexp(read["norm"], -exponent), np.ldexp(read["update"], -exponent)
    half = np.cos(read["angle"] / 2) ** 2
    across = np.where(read["angle"] > np.pi / 2, (C - n) + 2 * n * half, C + n * np.cos(read["angle"]))
    return TurnSlopes(
        by_norm=read.out(np.ldexp(-(u / N) / N, -exponent)),
        by_update=read.out(np.ldexp((n / N) * np.sin(read["angle"]) / N, -exponent)),
        by_angle=read.out((C / N) * (across / N)),
        by_norm_twice=read.out(np.ldexp(2 * (u / N) * (v / N) / N / N, -2 * exponent)),
    )


def turns_slower(
    norm_v: ArrayLike,
    update_v: ArrayLike,
    angle_v: ArrayLike,
    norm_t: ArrayLike,
    update_t: ArrayLike,
    angle_t: ArrayLike,
) -> Floats:
    """Whether token v turns less than token t, without the paper's A1 and A2 (R1, R7): compares the cotangents.

    Boolean, of the broadcast shape. Sizes greater than 0, angles inside (0, π); anything else raises ValueError.
    """
    read = Reader(norm_v=norm_v, update_v=update_v, angle_v=angle_v, norm_t=norm_t, update_t=update_t, angle_t=angle_t)
    read.positive(*read.values).angle("angle_v", "angle_t")
    cot = {
        x: 1 / np.tan(read[f"angle_{x}"]) + read[f"norm_{x}"] / (read[f"update_{x}"] * np.sin(read[f"angle_{x}"]))
        for x in "vt"
    }
    return (cot["v"] > cot["t"])[()]


def turn_bound(norm: ArrayLike, update: ArrayLike) -> Floats:
    """The largest turn that an update of size C < n can cause at any angle: arcsin(C/n) radians (R3).

    Written as atan2(C, √((n − C)(n + C))), which keeps its digits near C = n. Raises ValueError unless C ≤ n, n > 0.
    """
    read = Reader(norm=norm, update=update).positive("norm").nonnegative("update")
    require("update", read["update"], read["update"] <= read["norm"], "at most norm")
    exponent = np.frexp(read["norm"])[1]
    n, C = np.ldexp(read["norm"], -exponent), np.ldexp(read["update"], -exponent)
    return read.out(np.arctan2(C, np.sqrt((n - C) * (n + C))))


def least_update_ratio(cosine: ArrayLike) -> Floats:
    """The smallest C/n that can explain a measured adjacent cosine (R3): sin θ, and 1 once θ ≥ 90°.

    From a cosine alone C and φ cannot be told apart; this is all that it certifies. Raises outside [−1, 1].
    """
    read = Reader(cosine=cosine).between("cosine", -1, 1)
    c = read["cosine"]
    return read.out(np.where(c > 0, np.sqrt((1 - c) * (1 + c)), 1.0))


class Bounds(NamedTuple):
    lower: Floats
    upper: Floats


def ratio_bounds(norm_v: ArrayLike, norm_t: ArrayLike, update: ArrayLike, angle: ArrayLike) -> Bounds:
    """(n_t + Cc)/(n_v + Cc) ≤ θ_v/θ_t ≤ N_t/N_v for two tokens that get the same update size and angle (R4).

    Dimensionless. The lower bound is the trivial 0 where n_v + Cc ≤ 0 or n_t + Cc ≤ 0. For φ ≤ π/2 it is at
    least n_t/n_v. Raises ValueError unless 0 < n_t ≤ n_v, C > 0 and 0 ≤ φ ≤ π.
    """
    read = Reader(norm_v=norm_v, norm_t=norm_t, update=update, angle=angle)
    read.positive("norm_v", "norm_t", "update").angle("angle")
    require("norm_t", read["norm_t"], read["norm_t"] <= read["norm_v"], "at most norm_v")
    sides = []
    for name in ("norm_v", "norm_t"):
        _, u, v, exponent = _step_components(read[name], read["update"], read["angle"])
        sides.append((np.ldexp(v, exponent), np.ldexp(np.hypot(u, v), exponent)))
    (v_v, N_v), (v_t, N_t) = sides
    lower = np.where(v_t > 0, v_t, 0.0) / np.where(v_v > 0, v_v, 1.0)
    return Bounds(read.out(lower), read.out(N_t / N_v))


class Series(NamedTuple):
    value: Floats
    remainder: Floats


def turn_series(ratio: ArrayLike, angle: ArrayLike, terms: int) -> Series:
    """θ = Σ (−1)^(k+1) x^k sin(kφ)/k for x = C/n < 1, and a bound on what `terms` terms leave out (R3).

    Raises ValueError unless 0 ≤ ratio < 1, 0 ≤ angle ≤ π and terms ≥ 1.
    """
    read = Reader(ratio=ratio, angle=angle).nonnegative("ratio").angle("angle")
    require("ratio", read["ratio"], read["ratio"] < 1, "less than 1")
    terms = whole_number("terms", terms, 1)
    x, angle = read["ratio"], read["angle"]
    value = sum((-1) ** (k + 1) * x**k * np.sin(k * angle) / k for k in range(terms, 0, -1))
    return Series(read.out(value), read.out(x ** (terms + 1) / ((terms + 1) * (1 - x))))


class SpreadTurn(NamedTuple):
    mean_turn: float
    turn_at_mean: float
    turn_at_harmonic_mean: float
    harmonic_mean: float


def lognormal_turn(mean: float, std: float, update: float, angle: float) -> SpreadTurn:
    """What a spread of norms does to the mean turn: lognormal norms with this mean and standard deviation (R6).

    Gauss-Hermite quadrature with 200 nodes; radians, and the norms' harmonic mean. Raises on sizes that are not > 0.
    """
    Reader(mean=mean, std=std, update=update).positive("mean", "std", "update")
    spread = np.sqrt(np.log1p((std / mean) ** 2))
    nodes, weights = np.polynomial.hermite_e.hermegauss(200)
    norms = mean * np.exp(spread * nodes - spread**2 / 2)
    harmonic = mean / (1 + (std / mean) ** 2)
    turns = step_angle(norms, update, angle)
    mean_turn = float(weights @ turns / weights.sum())
    at_mean, at_harmonic = (float(step_angle(n, update, angle)) for n in (mean, harmonic))
    return SpreadTurn(mean_turn, at_mean, at_harmonic, harmonic)
