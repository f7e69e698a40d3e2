"""What slow visual tokens do to attention's signal and noise (A1-A5).

Cosines and similarities are those of unit vectors, dimensionless; angles in radians; norms and updates in one
common unit. Everything broadcasts.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from theory.arrays import Floats, Reader, require
from theory.rotation import Bounds


def symmetric_similarity(similarity: ArrayLike, turn_q: ArrayLike, turn_k: ArrayLike) -> Floats:
    """E[q'·k'] = cos θ_q cos θ_k q·k when both turn in directionless ways, the paper's A3 (A1).

    The slower the key, the more signal is left: A3 alone gives the opposite of the paper. Raises outside the ranges.
    """
    read = Reader(similarity=similarity, turn_q=turn_q, turn_k=turn_k).between("similarity", -1, 1)
    read.angle("turn_q", "turn_k")
    return read.out(read["similarity"] * np.cos(read["turn_q"]) * np.cos(read["turn_k"]))


def step_alignment(target_angle: ArrayLike, turn: ArrayLike, drift: ArrayLike) -> Floats:
    """E cos to a target at angle a after a turn θ with drift κ toward it: cos a cos θ + κ sin a sin θ (A2).

    κ = 1 turns straight at the target, 0 in no direction. Raises ValueError unless the angles are in [0, π], |κ| ≤ 1.
    """
    read = Reader(target_angle=target_angle, turn=turn, drift=drift).angle("target_angle", "turn")
    read.between("drift", -1, 1)
    a, theta = read["target_angle"], read["turn"]
    return read.out(np.cos(a) * np.cos(theta) + read["drift"] * np.sin(a) * np.sin(theta))


def best_turn(target_angle: ArrayLike, drift: ArrayLike) -> Floats:
    """θ* = atan2(κ sin a, cos a), the turn after which `step_alignment` is largest (A2). Raises as it does."""
    read = Reader(target_angle=target_angle, drift=drift).angle("target_angle").between("drift", -1, 1)
    a = read["target_angle"]
    return read.out(np.arctan2(read["drift"] * np.sin(a), np.cos(a)))


def slow_turn_hurts(target_angle: ArrayLike, drift: ArrayLike, turn_v: ArrayLike, turn_t: ArrayLike) -> Floats:
    """A2: whether the slower turn θ_v leaves the key farther from its target: (θ_v + θ_t)/2 < θ*. Boolean.

    Raises ValueError unless 0 ≤ θ_v < θ_t ≤ π and 0 ≤ κ ≤ 1.
    """
    read = Reader(target_angle=target_angle, drift=drift, turn_v=turn_v, turn_t=turn_t)
    read.angle("target_angle", "turn_v", "turn_t").between("drift", 0, 1)
    require("turn_v", read["turn_v"], read["turn_v"] < read["turn_t"], "less than turn_t")
    return ((read["turn_v"] + read["turn_t"]) / 2 < best_turn(read["target_angle"], read["drift"]))[()]


def geodesic_loss(separation: ArrayLike, turn_v: ArrayLike, turn_t: ArrayLike) -> Floats:
    """S_bal − S_imb when query and key, ψ_0 apart, turn straight at each other:
    2 sin(ψ_0 − (3Θ_t + Θ_v)/2) sin((Θ_t − Θ_v)/2); negative once they overshoot (A2). Raises outside the ranges."""
    read = Reader(separation=separation, turn_v=turn_v, turn_t=turn_t).angle("separation")
    read.nonnegative("turn_v", "turn_t")
    v, t = read["turn_v"], read["turn_t"]
    return read.out(2 * np.sin(read["separation"] - (3 * t + v) / 2) * np.sin((t - v) / 2))


def _read_drift(**arguments: ArrayLike) -> Reader:
    read = Reader(**arguments).positive("update").between("target_cosine", -1, 1).between("drift", 0, 1)
    return read.positive("layers") if "layers" in arguments else read


def alignment(
    norm: ArrayLike, update: ArrayLike, target_cosine: ArrayLike, drift: ArrayLike, layers: ArrayLike
) -> Floats:
    """q(n) = (n cos a + G)/√(n² + 2nG cos a + G² + W), the cosine to its target of a token of norm n after L updates
    C(m t̂ + √(1 − m²) ξ_l) with orthonormal noise; G = LCm, W = LC²(1 − m²) (A3).

    Raises ValueError unless norm ≥ 0, update, layers > 0, −1 ≤ cos a ≤ 1 and 0 ≤ m ≤ 1.
    """
    read = _read_drift(norm=norm, update=update, target_cosine=target_cosine, drift=drift, layers=layers)
    read.nonnegative("norm")
    # In units of the update; the part across the target is n sin a and √W, at right angles, so no cancellation.
    n, k = read["norm"] / read["update"], read["target_cosine"]
    m, L = read["drift"], read["layers"]
    along = n * k + L * m
    across = np.hypot(n * np.sqrt((1 - k) * (1 + k)), np.sqrt(L * (1 - m) * (1 + m)))
    length = np.hypot(along, across)
    require("norm", np.broadcast_to(read["norm"], length.shape), length > 0, "such that the token does not end at 0")
    return read.out(along / length)


def critical_norm(update: ArrayLike, target_cosine: ArrayLike, drift: ArrayLike) -> Floats:
    """n_c = C(1 − m²) cos a/(m sin²a), at which `alignment` peaks whatever the number of layers (A3).

    Infinite without drift or once aligned (cos a > 0). Raises ValueError unless update > 0, 0 ≤ cos a ≤ 1, 0 ≤ m ≤ 1.
    """
    read = _read_drift(update=update, target_cosine=target_cosine, drift=drift)
    read.between("target_cosine", 0, 1)
    k, m = read["target_cosine"], read["drift"]
    above, below = read["update"] * (1 - m) * (1 + m) * k, m * (1 - k) * (1 + k)
    return read.out(np.where(above == 0, 0.0, np.where(below == 0, np.inf, above / np.where(below == 0, 1.0, below))))


def imbalance_hurts(
    norm_v: ArrayLike,
    norm_t: ArrayLike,
    update: ArrayLike,
    target_cosine: ArrayLike,
    drift: ArrayLike,
    layers: ArrayLike,
) -> Floats:
    """A3: S_imb < S_bal ⇔ G(1 − n_c/A) + cos a (H − n_c) > 0, with A, H the means of the norms. Boolean.

    Raises ValueError unless 0 < n_t < n_v, update, layers > 0, 0 ≤ cos a < 1 and 0 ≤ m ≤ 1. Without drift (m = 0)
    the answer is False: the slower token keeps more, as in A1 (at cos a = 0 nothing is gained or lost).
    """
    read = _read_drift(update=update, target_cosine=target_cosine, drift=drift, layers=layers)
    read.between("target_cosine", 0, 1)
    norms = Reader(norm_v=norm_v, norm_t=norm_t).positive("norm_v", "norm_t")
    require("norm_t", norms["norm_t"], norms["norm_t"] < norms["norm_v"], "less than norm_v")
    C, k, m, L = (read[name] for name in ("update", "target_cosine", "drift", "layers"))
    v, t = norms["norm_v"] / C, norms["norm_t"] / C
    arithmetic, harmonic = (v + t) / 2, 2 * v * (t / (v + t))
    # Both sides times m sin²a / C, so that m = 0 and a = 0 divide by nothing.
    drive, peak = m * (1 - k) * (1 + k), (1 - m) * (1 + m) * k
    return (L * m * (drive - peak / arithmetic) + k * (drive * harmonic - peak) > 0)[()]


def noise_variance(turn_q: ArrayLike, turn_k: ArrayLike, width: ArrayLike) -> Floats:
    """Variance of q'·k' for a fixed orthogonal pair after directionless turns (A4):
    (cos²θ_q sin²θ_k + sin²θ_q cos²θ_k)/(d − 1) + sin²θ_q sin²θ_k (d − 2)/(d − 1)².

    A slower key means less noise as long as tan²θ_q < d − 1. Raises ValueError unless width ≥ 2.
    """
    read = Reader(turn_q=turn_q, turn_k=turn_k, width=width).angle("turn_q", "turn_k")
    require("width", read["width"], read["width"] >= 2, "at least 2")
    sq, sk = np.sin(read["turn_q"]) ** 2, np.sin(read["turn_k"]) ** 2
    cq, ck, free = np.cos(read["turn_q"]) ** 2, np.cos(read["turn_k"]) ** 2, read["width"] - 1
    return read.out((cq * sk + sq * ck) / free + sq * sk * (free - 1) / free**2)


def _beta_fraction(a: Floats, b: Floats, x: Floats) -> Floats:
    """The continued fraction of the incomplete beta function (Lentz's method), for x below the function's mean."""
    c, d = np.ones_like(x), 1 / (1 - (a + b) * x / (a + 1))
    value = d.copy()
    for m in range(1, 200):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / (1 + numerator * d)
            c = 1 + numerator / c
            value *= c * d
        if np.all(np.abs(c * d - 1) < 1e-16):
            break
    return value


def tail_probability(similarity: ArrayLike, width: ArrayLike) -> Floats:
    """1 − F_d(S), the chance that a random unit vector of width d has a cosine above S to a fixed one (A5).

    ½ I_{1−S²}((d − 1)/2, ½) for S ≥ 0, accurate in the tail. Raises ValueError unless −1 ≤ S ≤ 1 and d ≥ 2.
    """
    read = Reader(similarity=similarity, width=width).between("similarity", -1, 1)
    require("width", read["width"], read["width"] >= 2, "at least 2")
    S, d = np.broadcast_arrays(np.abs(read["similarity"]), read["width"])
    a, x = (d - 1) / 2, (1 - S) * (1 + S)
    log_gamma = np.vectorize(lambda value: math.lgamma(value + 0.5) - math.lgamma(value), otypes=[float])(a)
    with np.errstate(divide="ignore"):
        front = np.exp(log_gamma - 0.5 * math.log(math.pi) + a * np.log(x)) * S
    low, half = x < (a + 1) / (a + 2.5), np.full_like(x, 0.5)
    direct = front * _beta_fraction(a, half, np.where(low, x, 0.0)) / a
    # Above its mean the function is one minus its mirror image, in which a and ½ swap roles.
    mirror = 1 - front * _beta_fraction(half, a, np.where(low, 0.0, S * S)) / half
    upper = 0.5 * np.where(low, direct, mirror)
    return read.out(np.where(read["similarity"] >= 0, upper, 1 - upper))


def argmax_probability(similarity: ArrayLike, width: ArrayLike, distractors: ArrayLike) -> Floats:
    """F_d(S)^N, the chance that no one of N random keys beats the relevant one (A5). Raises as
    `tail_probability` does, and unless distractors ≥ 0."""
    read = Reader(similarity=similarity, width=width, distractors=distractors).nonnegative("distractors")
    with np.errstate(divide="ignore"):
        log_f = np.log1p(-tail_probability(read["similarity"], read["width"]))
    with np.errstate(invalid="ignore"):
        return read.out(np.where(read["distractors"] == 0, 1.0, np.exp(read["distractors"] * log_f)))


def log_moment(inverse_temperature: ArrayLike, width: ArrayLike) -> Floats:
    """ln E e^{λt} = ln ₀F₁(; d/2; λ²/4) for t the cosine to a random unit vector of width d; at most λ²/(2d) (A5).

    Summed in logarithms, so that nothing overflows. Raises ValueError unless λ ≥ 0 and d ≥ 2.
    """
    read = Reader(inverse_temperature=inverse_temperature, width=width).nonnegative("inverse_temperature")
    require("width", read["width"], read["width"] >= 2, "at least 2")
    lam, half = read["inverse_temperature"][..., None], read["width"][..., None] / 2
    largest = float(lam.max(initial=0.0))
    peak = largest**2 / (2 * (float(half.min()) + math.hypot(float(half.min()), largest)) + 1e-300)
    k = np.arange(1, int(peak + 20 * math.sqrt(peak) + 60))
    with np.errstate(divide="ignore"):
        logs = np.cumsum(2 * np.log(lam / 2) - np.log(k) - np.log(half + k - 1), axis=-1)
    top = np.maximum(logs.max(axis=-1), 0.0)
    # Minus the leading 1 where everything is small: log1p keeps what e^0 + … would swallow.
    rest = np.exp(logs - top[..., None]).sum(axis=-1)
    return read.out(np.where(top == 0, np.log1p(rest), top + np.log(np.exp(-top) + rest)))


def mass_bounds(
    similarity: ArrayLike, width: ArrayLike, distractors: ArrayLike, inverse_temperature: ArrayLike
) -> Bounds:
    """Bounds on E p, the softmax mass of a relevant key of similarity S among N random keys of width d (A5).

    Below by Jensen, 1/(1 + N ₀F₁ e^{−λS}); above by ½(1 + F_d(S)^N) for every λ, and by ½ if λS ≤ ln N.
    Raises ValueError unless −1 ≤ S ≤ 1, d ≥ 2, N ≥ 1, λ ≥ 0.
    """
    read = Reader(similarity=similarity, width=width, distractors=distractors, inverse_temperature=inverse_temperature)
    require("distractors", read["distractors"], read["distractors"] >= 1, "at least 1")
    S, N, lam = read["similarity"], read["distractors"], read["inverse_temperature"]
    exponent = np.log(N) + log_moment(lam, read["width"]) - lam * S
    lower = np.exp(-np.logaddexp(0.0, exponent))
    by_rank = (1 + argmax_probability(S, read["width"], N)) / 2
    upper = np.where(lam * S <= np.log(N), 0.5, by_rank)
    return Bounds(read.out(lower), read.out(np.minimum(upper, by_rank)))


def critical_similarity(width: ArrayLike, distractors: ArrayLike) -> Floats:
    """S* ≈ √(2 ln N/d), below which the relevant key drowns among N random ones (A5). Raises unless d ≥ 2, N ≥ 1."""
    read = Reader(width=width, distractors=distractors)
    require("width", read["width"], read["width"] >= 2, "at least 2")
    require("distractors", read["distractors"], read["distractors"] >= 1, "at least 1")
    return read.out(np.sqrt(2 * np.log(read["distractors"]) / read["width"]))


def layers_until_hurt(
    norm_v: ArrayLike, norm_t: ArrayLike, update: ArrayLike, target_cosine: ArrayLike, drift: ArrayLike
) -> Floats:
    """How many layers it takes until imbalance begins to hurt, A3 solved for L: cos a (n_c − H)/(Cm(1 − n_c/A)).

    0 if it hurts from the start (n_c ≤ H), infinite if it never does (n_c ≥ A). Raises as `imbalance_hurts`.
    """
    imbalance_hurts(norm_v, norm_t, update, target_cosine, drift, 1)
    read = Reader(norm_v=norm_v, norm_t=norm_t, update=update, target_cosine=target_cosine, drift=drift)
    v, t, C, k, m = read.values.values()
    peak = critical_norm(C, k, m)
    A, H = (v + t) / 2, 2 * v * (t / (v + t))
    open_case = (peak > H) & (peak < A)
    inside = np.where(open_case, peak, (A + H) / 2)
    layers = k * (inside - H) / (C * np.where(open_case, m, 1.0) * (1 - inside / A))
    return read.out(np.where(peak <= H, 0.0, np.where(peak >= A, np.inf, layers)))
