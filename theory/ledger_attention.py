"""The ledger's claims about attention (A1-A5), with their numeric evidence."""

# ruff: noqa: E501 - a claim's sentence and its evidence's sentence stay on one line

from __future__ import annotations

from typing import Any

import numpy as np

from theory import attention
from theory.evidence import Claim, Evidence, Outcome, certified, symbolic
from theory.ledger_rotation import EPS, LLAVA_TEXT, LLAVA_VISUAL


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def turned(vector, angle: float, rng: np.random.Generator, count: int):
    """`count` copies of a unit vector, each turned by `angle` in a uniformly random direction."""
    noise = rng.standard_normal((count, len(vector)))
    noise -= np.outer(noise @ vector, vector)
    return np.cos(angle) * vector + np.sin(angle) * unit(noise)


def _symmetric() -> Outcome:
    rng, d, count = np.random.default_rng(30), 16, 60_000
    q, k = np.eye(d)[0], np.concatenate([[0.6, 0.8], np.zeros(d - 2)])
    parts, passed = [], True
    for turn_k in (0.1, 0.9):
        s = np.einsum("td,td->t", turned(q, 0.9, rng, count), turned(k, turn_k, rng, count))
        expected = attention.symmetric_similarity(0.6, 0.9, turn_k)
        passed = passed and abs(s.mean() - expected) < 4.5 * s.std() / np.sqrt(count)
        parts.append(f"θ_k = {turn_k}: {s.mean():.3f} ({expected:.3f})")
    return Outcome(bool(passed), "similarity, simulated (formula), " + ", ".join(parts) + "; slower keeps more")


def _one_step() -> Outcome:
    rng = np.random.default_rng(31)
    a, kappa = rng.uniform(0.01, 3.13, 100_000), rng.random(100_000)
    v, t = np.sort(rng.uniform(0, np.pi, (2, 100_000)), axis=0)
    loss = attention.step_alignment(a, t, kappa) - attention.step_alignment(a, v, kappa)
    agree = (attention.slow_turn_hurts(a, kappa, v, t) == (loss > 0)) | (np.abs(loss) < 16 * EPS)
    psi = np.pi * rng.random(100_000)
    direct = np.cos(psi - 2 * t) - np.cos(psi - t - v)
    geodesic = np.max(np.abs(direct - attention.geodesic_loss(psi, v, t)))
    return Outcome(
        bool(agree.all()) and geodesic < 32 * EPS,
        f"criterion right in {agree.sum():,} of 100,000; geodesic form off by {geodesic:.1e}",
    )


def _overshoot() -> Outcome:
    loss = attention.geodesic_loss(1.0, 0.1, 0.9)
    directionless = attention.step_alignment(0.5, 1.0, 0.0) - attention.step_alignment(0.5, 0.1, 0.0)
    return Outcome(
        bool(loss < 0 and directionless < 0),
        f"ψ_0 = 1, Θ_t = .9: S_bal − S_imb = {loss:.3f} (overshoot); κ = 0: {directionless:.3f}",
    )


def _criterion() -> Outcome:
    rng = np.random.default_rng(32)
    t = 10.0 ** rng.uniform(-1, 2, 100_000)
    v, C = t * (1 + 10.0 ** rng.uniform(-1, 2, 100_000)), 10.0 ** rng.uniform(-1, 1, 100_000)
    k, m, L = 0.99 * rng.random(100_000), rng.random(100_000) ** 3, rng.integers(1, 129, 100_000)
    q_v, q_t = (attention.alignment(n, C, k, m, L) for n in (v, t))
    hurts = attention.imbalance_hurts(v, t, C, k, m, L)
    agree = (hurts == (q_v < q_t)) | (np.abs(q_v - q_t) < 64 * EPS)
    peak = attention.critical_norm(C, k, m)
    harmonic, arithmetic = 2 * v * t / (v + t), (v + t) / 2
    sides = (hurts | (peak >= harmonic)) & (~hurts | (peak < arithmetic))
    return Outcome(
        bool(agree.all() and sides.all()),
        f"criterion right in {agree.sum():,} of 100,000; n_c < H suffices, n_c < A is necessary",
    )


def simulate_pair(
    norm_q: float,
    norm_k: float,
    *,
    drift: float,
    cosine: float,
    update: float,
    layers: int,
    width: int,
    rng,
    count: int,
):
    """Similarities of `count` query-key pairs that both drift toward one target, each with noise of its own (A3).

    The start's part across the target is a random direction of its own too, as A3's product of expectations has it.
    """
    states = []
    for norm in (norm_q, norm_k):
        noise = rng.standard_normal((count, width - 1)) * np.sqrt(layers / (width - 1))  # Σ of unit noise vectors
        start = unit(rng.standard_normal((count, width - 1)))
        across = norm * np.sqrt(1 - cosine**2) * start + update * np.sqrt(1 - drift**2) * noise
        along = np.full((count, 1), norm * cosine + layers * update * drift)
        states.append(unit(np.concatenate([along, across], axis=1)))
    return np.einsum("td,td->t", *states)


def _monte_carlo() -> Outcome:
    rng, parts, passed = np.random.default_rng(33), [], True
    for m in (0.2, 0.02):
        common: dict[str, Any] = dict(drift=m, cosine=0.3, update=1.0, layers=32, width=512, rng=rng, count=4000)
        balanced = simulate_pair(LLAVA_TEXT, LLAVA_TEXT, **common)
        imbalanced = simulate_pair(LLAVA_TEXT, LLAVA_VISUAL, **common)
        q_t, q_v = (attention.alignment(n, 1, 0.3, m, 32) for n in (LLAVA_TEXT, LLAVA_VISUAL))
        # The noise vectors of a random walk are orthonormal up to 1/√D, hence the allowance.
        passed = passed and abs(balanced.mean() - q_t**2) < 0.01 and abs(imbalanced.mean() - q_t * q_v) < 0.01
        passed = passed and (imbalanced.mean() < balanced.mean()) == attention.imbalance_hurts(
            LLAVA_VISUAL, LLAVA_TEXT, 1, 0.3, m, 32
        )
        parts.append(f"m = {m}: balanced {balanced.mean():.3f}, imbalanced {imbalanced.mean():.3f}")
    return Outcome(bool(passed), "; ".join(parts))


def _behind() -> Outcome:
    # The criterion of A3 evaluated where its hypothesis cos a ≥ 0 fails, against q itself.
    k, m, C, L, v, t = -0.9, 0.1, 1.0, 4, 10.0, 1.0
    G, peak = L * C * m, C * (1 - m**2) * k / (m * (1 - k**2))
    A, H = (v + t) / 2, 2 * v * t / (v + t)
    says = G * (1 - peak / A) + k * (H - peak) > 0
    q_v, q_t = (float(attention.alignment(n, C, k, m, L)) for n in (v, t))
    return Outcome(
        says != (q_v < q_t),
        f"cos a = −.9: the criterion says {'hurts' if says else 'helps'}, but q(n_v) = {q_v:.3f}, q(n_t) = {q_t:.3f}",
    )


def _noise() -> Outcome:
    rng, d, count = np.random.default_rng(34), 24, 60_000
    q, k = np.eye(d)[:2]
    parts, passed = [], True
    for turn_k in (0.1, 0.9):
        s = np.einsum("td,td->t", turned(q, 0.9, rng, count), turned(k, turn_k, rng, count))
        expected = attention.noise_variance(0.9, turn_k, d)
        passed = passed and abs(s.var() / expected - 1) < 4.5 * np.sqrt(((s**2).std() / s.var()) ** 2 / count)
        parts.append(f"θ_k = {turn_k}: {s.var():.5f} ({expected:.5f})")
    uniform = unit(rng.standard_normal((count, d))) @ q
    passed = passed and abs(uniform.var() * d - 1) < 4.5 * np.sqrt(2 / count)
    return Outcome(
        bool(passed),
        f"variance, simulated (formula), {', '.join(parts)}; uniform keys {uniform.var():.5f} (1/d = {1 / d:.5f})",
    )


def _noise_reversed() -> Outcome:
    slow, fast = (attention.noise_variance(np.radians(89), turn, 16) for turn in (0.1, 1.0))
    return Outcome(
        bool(slow > fast), f"θ_q = 89°, d = 16: the slower key has variance {slow:.5f}, the faster {fast:.5f}"
    )


def _mass() -> Outcome:
    rng, count, passed, parts = np.random.default_rng(35), 20_000, True, []
    for S, d, N, lam in ((0.5, 8, 20, 10.0), (0.2, 16, 50, 30.0), (0.6, 32, 30, 4.0), (0.1, 8, 5, 0.5)):
        # Coordinates of uniform points: a Gaussian over the length of the vector that it belongs to.
        g = rng.standard_normal((count, N))
        t = g / np.sqrt(g**2 + rng.chisquare(d - 1, (count, N)))
        p = 1 / (1 + np.exp(lam * (t - S)).sum(axis=1))
        error, bounds = 4.5 * p.std() / np.sqrt(count), attention.mass_bounds(S, d, N, lam)
        wins = attention.argmax_probability(S, d, N)
        passed = passed and bounds.lower - error <= p.mean() <= bounds.upper + error
        passed = passed and abs((t.max(axis=1) < S).mean() - wins) < 4.5 * np.sqrt(wins * (1 - wins) / count) + 1e-3
        parts.append(f"{bounds.lower:.3f} ≤ {p.mean():.3f} ≤ {bounds.upper:.3f}")
    return Outcome(bool(passed), "; ".join(parts))


def _moment() -> Outcome:
    rng = np.random.default_rng(36)
    lam, d = 10.0 ** rng.uniform(-3, 3, 500), rng.integers(2, 4097, 500)
    excess = np.max(attention.log_moment(lam, d) / (lam**2 / (2 * d)) - 1)
    critical = attention.critical_similarity(128, 576)
    below, above = (attention.argmax_probability(factor * critical, 128, 576) for factor in (0.5, 1.5))
    passed = excess <= 64 * EPS and below < 0.01 and above > 0.99
    return Outcome(
        bool(passed),
        f"ln ₀F₁ ≤ λ²/2d; S* = {critical:.3f} at d = 128, N = 576: argmax {below:.3f} at S*/2, {above:.3f} at 1.5 S*",
    )


def _end_to_end() -> Outcome:
    rng, parts, results = np.random.default_rng(37), [], {}
    for C in (0.4, 1.0):
        for name, norm in (("balanced", LLAVA_TEXT), ("imbalanced", LLAVA_VISUAL)):
            S = simulate_pair(
                LLAVA_TEXT, norm, drift=0.5, cosine=0.0, update=C, layers=32, width=128, rng=rng, count=2000
            )
            results[C, name] = attention.argmax_probability(np.clip(S, -1, 1), 128, 576).mean()
        parts.append(f"C = {C}: {results[C, 'balanced']:.3f} → {results[C, 'imbalanced']:.3f}")
    return Outcome(
        bool(results[0.4, "imbalanced"] < 0.05 and results[1.0, "imbalanced"] > 0.9), "P(argmax) " + ", ".join(parts)
    )


CLAIMS = (
    Claim(
        "A1", "symmetry alone says the opposite", "If tokens turn in directionless ways, the slower visual token keeps more signal, not less.",
        "E[q'·k'] = cos θ_q cos θ_k q·k", ("A3: symmetric directions, independent", "q·k > 0 and θ_q < 90°"), ("contradicts C",),
        (symbolic("A1"), Evidence("simulated", "random turns", _symmetric)),
    ),
    Claim(
        "A2", "one step with drift", "With a drift toward the target, imbalance hurts exactly while the mean turn is below the best turn.",
        "E cos = R cos(θ − θ*), S_imb < S_bal ⇔ (θ_v + θ_t)/2 < θ*", ("κ ≥ 0", "positive text factor"), ("repairs C",),
        (symbolic("A2"), Evidence("property", "random steps", _one_step)), _overshoot,
    ),
    Claim(
        "A3", "many layers with drift", "After L layers the cosine to the target peaks at a critical norm, and imbalance hurts iff the norms lie beyond it.",
        "S_imb < S_bal ⇔ G(1 − n_c/A) + cos a (H − n_c) > 0, n_c = C(1 − m²) cos a/(m sin²a)",
        ("cos a ≥ 0", "m > 0", "orthonormal noise"), ("repairs C",),
        (symbolic("A3"), certified("A3"), Evidence("property", "random settings", _criterion), Evidence("simulated", "LLaVA's norms", _monte_carlo)), _behind,
    ),
    Claim(
        "A4", "noise", "Uniformly random keys make noise of variance 1/d; for a fixed orthogonal pair a slower key makes less.",
        "Var = (cos²θ_q sin²θ_k + sin²θ_q cos²θ_k)/(d − 1) + sin²θ_q sin²θ_k (d − 2)/(d − 1)²",
        ("directionless turns", "for 'slower is less': tan²θ_q < d − 1"), ("contradicts C",),
        (symbolic("A4"), certified("A4"), Evidence("simulated", "random turns", _noise)), _noise_reversed,
    ),
    Claim(
        "A5", "softmax cap", "The relevant key's attention mass is bounded by its chance to be the argmax, whatever the temperature; collapse depends on C/n.",
        "1/(1 + N ₀F₁(; d/2; λ²/4) e^(−λS)) ≤ E p ≤ ½(1 + F_d(S)^N)", ("N independent uniform distractors",), ("repairs C",),
        (symbolic("A5"), Evidence("property", "the moment and S*", _moment), Evidence("simulated", "softmax over random keys", _mass), Evidence("simulated", "end to end", _end_to_end)),
    ),
)  # fmt: skip
