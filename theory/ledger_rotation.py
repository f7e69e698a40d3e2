"""The ledger's claims about one step and about scale (R1-R7, S1-S3), with their numeric evidence."""

# ruff: noqa: E501 - a claim's sentence and its evidence's sentence stay on one line

from __future__ import annotations

import numpy as np

from theory import invariance, rotation
from theory.evidence import Claim, Evidence, Outcome, certified, symbolic
from theory.transformer import random_transformer
from theory.vectors import angle_between

EPS = np.finfo(float).eps
LLAVA_VISUAL, LLAVA_VISUAL_STD, LLAVA_TEXT = 39.96, 45.58, 1.08


def steps(count: int, seed: int):
    """Norms and updates over 200 decades, angles over (0, π) with both ends crowded: the extremes of one step."""
    rng = np.random.default_rng(seed)
    n, C = 10.0 ** rng.uniform(-100, 100, (2, count))
    C = np.where(rng.random(count) < 0.5, C, n * 10.0 ** rng.uniform(-3, 3, count))
    near = 10.0 ** rng.uniform(-12, 0, count)
    phi = np.choose(rng.integers(0, 3, count), [near, np.pi - near, rng.uniform(0.01, 3.13, count)])
    return n, C, phi


def _cot_law() -> Outcome:
    n, C, phi = steps(100_000, 1)
    rng = np.random.default_rng(2)
    slower, faster = rotation.step_angle(n * (1 + rng.random(len(n))), C, phi), rotation.step_angle(n, C, phi)
    rises = np.max(slower / faster - 1)
    # θ(n) + θ(C²/n) = φ, where C²/n is a float.
    x = 10.0 ** rng.uniform(-8, 8, len(n))
    mirror = np.max(np.abs(rotation.step_angle(x, 1, phi) + rotation.step_angle(1 / x, 1, phi) - phi) / phi)
    passed = rises <= 8 * EPS and mirror <= 16 * EPS
    return Outcome(passed, f"100,000 steps: largest rise of θ with n {rises:.1e}, symmetry off by {mirror:.1e}")


def _measured_vectors() -> Outcome:
    rng = np.random.default_rng(3)
    h, delta = rng.standard_normal((2, 2000, 64)) * 10.0 ** rng.uniform(-3, 3, (2, 2000, 1))
    n, C, phi = np.linalg.norm(h, axis=-1), np.linalg.norm(delta, axis=-1), angle_between(h, delta)
    # The coordinates of h + Δ are rounded, each by half an ulp: that turns a token by at most EPS.
    error = np.max(np.abs(rotation.step_angle(n, C, phi) - angle_between(h, h + delta)))
    return Outcome(error <= 8 * EPS, f"2,000 random vectors of width 64: the formula's turn is off by {error:.1e} rad")


def _tangent() -> Outcome:
    norms, phi = np.array([1.0, 2.0, 4.0]), np.arctan2(0.8, -0.6)
    turns = rotation.step_angle(norms, 5, phi)
    tangents = np.tan(turns)
    wrong = tangents[2] > tangents[1] and abs(tangents[1]) > abs(tangents[0]) and (np.diff(turns) < 0).all()
    shown = ", ".join(
        f"n = {n:g}: tan θ = {x:.2f}, θ = {np.degrees(t):.1f}°" for n, x, t in zip(norms, tangents, turns, strict=True)
    )
    return Outcome(bool(wrong), shown)


def _bounds() -> Outcome:
    rng = np.random.default_rng(4)
    x, phi = rng.random(100_000), rng.uniform(0, np.pi, 100_000)
    theta = rotation.step_angle(1, x, phi)
    excess = np.max(theta - rotation.turn_bound(1, x))
    tight = np.max(np.abs(rotation.step_angle(1, x, np.arccos(-x)) - rotation.turn_bound(1, x)))
    ratio_excess = np.max(rotation.least_update_ratio(np.cos(theta)) - x)
    value, remainder = rotation.turn_series(x, phi, 12)
    series = np.max(np.abs(value - theta) - remainder)
    passed = excess <= 4 * EPS and tight <= 1e-7 and ratio_excess <= 1e-8 and series <= 16 * EPS
    return Outcome(
        passed, f"θ − arcsin(C/n) ≤ {excess:.1e}; equality at c = −C/n to {tight:.1e}; series within its remainder"
    )


def _sandwich() -> Outcome:
    rng = np.random.default_rng(5)
    t, C = 10.0 ** rng.uniform(-3, 3, (2, 100_000))
    v, phi = t * (1 + 10.0 ** rng.uniform(-3, 3, len(t))), rng.uniform(0, np.pi, len(t))
    ratio = rotation.step_angle(v, C, phi) / rotation.step_angle(t, C, phi)
    bounds = rotation.ratio_bounds(v, t, C, phi)
    outside = max(np.max(bounds.lower / ratio), np.max(ratio / bounds.upper)) - 1
    simple = np.max(np.where(phi <= np.pi / 2, (t / v) / ratio, 0)) - 1
    return Outcome(
        outside <= 16 * EPS and simple <= 16 * EPS,
        f"100,000 pairs: outside by {outside:.1e}, simple bound by {simple:.1e}",
    )


def _obtuse_ratio() -> Outcome:
    theta = rotation.step_angle(np.array([2.0, 8.0]), 1, np.radians(135))
    ratio = theta[1] / theta[0]
    return Outcome(ratio < 2 / 8, f"C = 1, φ = 135°, n = 2 and 8: θ_v/θ_t = {ratio:.3f} < n_t/n_v = .250")


def _deficit() -> Outcome:
    import mpmath

    n, C, phi = steps(300, 6)
    worst = 0.0
    with mpmath.workdps(80):
        for a, b, f in zip(n, C, phi, strict=True):
            c, s = mpmath.cos(mpmath.mpf(f)), mpmath.sin(mpmath.mpf(f))
            u, v = b * s, a + b * c
            N = mpmath.sqrt(u * u + v * v)
            exact = u * u / (N * (N + v)) if v > 0 else 1 - v / N
            worst = max(
                worst, abs(float((rotation.adjacent_cosine_deficit(a, b, f) - exact) / exact)) if exact > 1e-290 else 0
            )
    return Outcome(worst <= 16 * EPS, f"300 extreme steps against 80 digits: relative error {worst:.1e}")


def _published() -> Outcome:
    from theory.published import MEASURED, predicted_cosine

    off = [abs(predicted_cosine(row) - row.cosine) for row in MEASURED]
    return Outcome(max(off) <= 0.05, f"four public measurements predicted within {max(off):.3f}")


def _spread() -> Outcome:
    spread = rotation.lognormal_turn(LLAVA_VISUAL, LLAVA_VISUAL_STD, 1, np.pi / 2)
    rng = np.random.default_rng(7)
    width = np.sqrt(np.log1p((LLAVA_VISUAL_STD / LLAVA_VISUAL) ** 2))
    norms = LLAVA_VISUAL * np.exp(width * rng.standard_normal(400_000) - width**2 / 2)
    turns = rotation.step_angle(norms, 1, np.pi / 2)
    error = abs(turns.mean() - spread.mean_turn) / (turns.std() / np.sqrt(len(turns)))
    ratio, harmonic = spread.mean_turn / spread.turn_at_mean, spread.mean_turn / spread.turn_at_harmonic_mean
    passed = error < 4 and ratio > 2 and abs(harmonic - 1) < 0.05
    return Outcome(passed, f"E θ = {ratio:.2f} θ(E n) and {harmonic:.2f} θ(harmonic mean {spread.harmonic_mean:.2f})")


def _reversed() -> Outcome:
    text, visual = np.degrees(rotation.step_angle(np.array([1.08, 39.96]), np.array([1.0, 40.0]), np.pi / 2))
    slow, fast = np.degrees(rotation.step_angle(np.array([1.0, 10.0]), 1, np.array([0.01, np.pi / 2])))
    return Outcome(
        visual > text and fast > slow,
        f"A1 dropped: text {text:.1f}°, visual {visual:.1f}°; A2 dropped: n = 1 turns {slow:.2f}°, n = 10 {fast:.1f}°",
    )


def _general_order() -> Outcome:
    rng = np.random.default_rng(8)
    n, C = 10.0 ** rng.uniform(-2, 2, (2, 2, 100_000))
    phi = rng.uniform(0.05, 3.09, (2, 100_000))
    turns = rotation.step_angle(n, C, phi)
    agree = rotation.turns_slower(n[0], C[0], phi[0], n[1], C[1], phi[1]) == (turns[0] < turns[1])
    return Outcome(
        bool(agree.all()), f"the cotangent criterion decides {agree.sum():,} of {agree.size:,} random pairs as θ does"
    )


def _branch() -> Outcome:
    rng = np.random.default_rng(9)
    model = random_transformer(1, 32, 4, rng)
    h = rng.standard_normal((16, 32))
    alpha = 2.0 ** rng.integers(-20, 20, (16, 1))
    exact = all((branch(0, alpha * h) == branch(0, h)).all() for branch in (model.attention, model.mlp))
    other = rng.uniform(0.01, 100, (16, 1))
    shift = rng.standard_normal((16, 1))
    rough = np.max(np.abs(model.attention(0, other * h + shift) - model.attention(0, h)))
    return Outcome(exact and rough < 1e-11, f"bit for bit for powers of two; αh + β1 off by {rough:.1e}")


def _layer() -> Outcome:
    rng = np.random.default_rng(10)
    sequential, parallel = (random_transformer(1, 32, 4, np.random.default_rng(11), parallel=p) for p in (False, True))
    h, largest, same = rng.standard_normal((16, 32)), 0.0, True
    for alpha in 2.0 ** np.arange(-6, 7):
        update, scaled = (sequential.residual_states(a * h)[-1] - a * h for a in (1.0, alpha))
        largest = max(largest, np.max(np.linalg.norm(scaled - update, axis=-1) / np.linalg.norm(update, axis=-1)))
        update, scaled = (parallel.residual_states(a * h)[-1] - a * h for a in (1.0, alpha))
        same = same and np.max(np.abs(scaled - update)) < 1e-11
    return Outcome(
        largest > 0.1 and same,
        f"a layer of two branches changes its update by up to {largest:.0%}; a parallel block does not",
    )


def _epsilon() -> Outcome:
    rng = np.random.default_rng(12)
    sigma, alpha, eps = (
        10.0 ** rng.uniform(-4, 4, 50_000),
        10.0 ** rng.uniform(-2, 2, 50_000),
        10.0 ** rng.uniform(-12, -3, 50_000),
    )
    effect = invariance.scale_effect(sigma, alpha, eps)
    text, visual = (invariance.shrinkage(norm / np.sqrt(4096), 1e-5) for norm in (LLAVA_TEXT, LLAVA_VISUAL))
    passed = (effect.change <= effect.bound * (1 + 8 * EPS)).all()
    return Outcome(bool(passed), f"50,000 cases within the bound; LLaVA: text {text:.2%}, visual {visual:.1e}")


def _shrink_direct() -> Outcome:
    rng = np.random.default_rng(13)
    h = rng.standard_normal((100, 64)) * 10.0 ** rng.uniform(-3, 2, (100, 1))
    eps = 1e-5
    rho = 1 - invariance.shrinkage(h.std(axis=-1), eps)
    error = np.max(np.abs(invariance.layer_norm(h, eps) - rho[:, None] * invariance.layer_norm(h)))
    return Outcome(error <= 64 * EPS, f"LN_ε = ρ·LN_0 on random tokens to {error:.1e}")


def _two_views() -> Outcome:
    rng = np.random.default_rng(14)
    w, delta = invariance.centred(rng.standard_normal((2, 512)))
    delta -= w * (delta @ w) / (w @ w)
    delta *= np.linalg.norm(w) / np.linalg.norm(delta)
    visual, text = (invariance.adjacent_cosine_views(k + w, delta) for k in (100.0, 0.0))
    passed = abs(visual.layer_norm - np.sqrt(0.5)) < 1e-10 and abs(text.full_space - np.sqrt(0.5)) < 1e-12
    detail = f"h = 100·1 + w: cosine {visual.full_space:.5f} in full space, {visual.layer_norm:.4f} in LN's view (w alone: {text.full_space:.4f})"
    return Outcome(bool(passed and visual.full_space > 0.9999), detail)


STEP = ("n > 0, C > 0, 0 < φ < π",)
CLAIMS = (
    Claim(
        "R1", "cot law", "The cotangent of the turn is affine in the norm, so a token of larger norm turns less: inertia in one line.",
        "θ = atan2(u, v), cot θ = cot φ + n/(C sin φ), ∂θ/∂n = −u/N² < 0, θ(n) + θ(C²/n) = φ", STEP, ("proves A", "repairs A"),
        (symbolic("R1"), certified("R1"), Evidence("property", "extreme steps", _cot_law), Evidence("simulated", "random vectors", _measured_vectors)),
    ),
    Claim(
        "R2", "the tangent form is not monotone", "The paper's tan θ has a pole at n = −C cos φ: as a function of n it is not monotone, though θ is.",
        "tan θ(2) = −4 < 4 = tan θ(4) at C = 5, cos φ = −3/5", ("φ obtuse",), ("contradicts A",),
        (symbolic("R2"), certified("R2"), Evidence("property", "the paper's form", _tangent)),
    ),
    Claim(
        "R3", "what C/n bounds", "An update smaller than the norm turns a token by at most arcsin(C/n); a measured cosine certifies C/n ≥ sin θ.",
        "sin θ = (C/n) sin(φ − θ); θ ≤ arcsin(C/n); θ = Σ (−1)^(k+1) x^k sin(kφ)/k", ("C < n for the bound and the series",), ("beyond the paper",),
        (symbolic("R3"), Evidence("property", "bounds and series", _bounds)),
    ),
    Claim(
        "R4", "ratio sandwich", "With the same update, the ratio of two turns lies between two ratios of lengths.",
        "(n_t + Cc)/(n_v + Cc) ≤ θ_v/θ_t ≤ N_t/N_v; φ ≤ π/2: θ_v/θ_t ≥ n_t/n_v", ("n_v > n_t", "A1, A2", "left: n_v + Cc > 0"), ("proves A",),
        (symbolic("R4"), certified("R4"), Evidence("property", "random pairs", _sandwich)), _obtuse_ratio,
    ),
    Claim(
        "R5", "adjacent cosine", "The cosine between adjacent states is v/N, and it predicts public measurements.",
        "cos θ = v/N, 1 − cos θ = u²/(N(N + v))", STEP, ("proves A",),
        (symbolic("R5"), Evidence("property", "against 80 digits", _deficit), Evidence("measured", "published table", _published)),
    ),
    Claim(
        "R6", "means mislead", "With norms spread as LLaVA's, the mean turn is more than twice the turn at the mean norm; the harmonic mean is the one to use.",
        "E θ(n) = 2.28 θ(E n) for 39.96 ± 45.58", ("norms lognormal", "C = 1, φ = 90°"), ("repairs A",),
        (Evidence("simulated", "400,000 norms", _spread),), nature="empirical",
        reason="it rests on the shape of a measured distribution, of which only mean and deviation are published",
    ),
    Claim(
        "R7", "relaxed assumptions", "Without A1 or A2 the order can reverse; over the range of norms that models span it does not.",
        "θ_v < θ_t on B1: n_v 29–72, n_t .8–1.4, C_t .5–2, C_v/C_t .25–4, φ_v and φ_t in 45–135°", ("box B1",), ("repairs A",),
        (symbolic("R7"), certified("R7"), Evidence("property", "the exact criterion", _general_order)), _reversed, settled_by="certified",
    ),
    Claim(
        "S1", "a branch ignores scale", "A residual branch gives the same update whatever the token's scale; a layer of two branches does not.",
        "LN(αh + β1) = LN(h), RMSNorm(αh) = RMSNorm(h)", ("ε = 0", "α > 0", "one branch, or parallel branches"), ("repairs A",),
        (symbolic("S1"), Evidence("property", "a random block", _branch)), _layer,
    ),
    Claim(
        "S2", "ε and scale", "With ε a rescaled token changes a branch's input by a bounded factor.",
        "LN_ε = ρ LN_0, |ρ(ασ) − ρ(σ)| ≤ ε|α⁻² − 1|/(2σ²)", ("σ > 0", "ε ≥ 0"), ("beyond the paper",),
        (symbolic("S2"), certified("S2"), Evidence("property", "the bound", _epsilon), Evidence("simulated", "random tokens", _shrink_direct)),
    ),
    Claim(
        "S3", "inertia lives in the centred part", "A constant part hides turns from the full-space cosine; LayerNorm sees all of them.",
        "h = k1 + w: cos² = (M + W)/(M + 2W) against 1/2, M = k²D, W = ‖w‖²", ("Δ ⊥ 1, Δ ⊥ w, ‖Δ‖ = ‖w‖",), ("repairs A",),
        (symbolic("S3"), Evidence("property", "two views", _two_views)),
    ),
)  # fmt: skip
