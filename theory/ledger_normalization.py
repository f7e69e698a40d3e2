"""The ledger's claims about LayerNorm, compensation and bf16 (N1-N3, G1-G4, P1-P2), with their numeric evidence."""

# ruff: noqa: E501 - a claim's sentence and its evidence's sentence stay on one line

from __future__ import annotations

import numpy as np

from theory import normalization, precision
from theory.evidence import Claim, Evidence, Outcome, symbolic
from theory.ledger_rotation import EPS, LLAVA_TEXT
from theory.transformer import gain_gradient_ratio
from theory.vectors import angle_between


def _jacobian() -> Outcome:
    rng, worst, spectral = np.random.default_rng(40), 0.0, 0.0
    for D in (3, 8, 33):
        h, eps = rng.standard_normal(D), 1e-5
        J = normalization.layernorm_jacobian(h, 0.3, eps)
        # Complex step: exact derivatives of the plain formula, column by column.
        bumped = h + 1e-30j * np.eye(D)
        centred = bumped - bumped.mean(axis=-1, keepdims=True)
        exact = (0.3 * centred / np.sqrt((centred * centred).mean(axis=-1, keepdims=True) + eps)).imag.T / 1e-30
        worst = max(worst, np.max(np.abs(J - exact)))
        spectral = max(spectral, abs(np.linalg.norm(J, 2) / (0.3 / np.sqrt(h.var() + eps)) - 1))
    two = np.max(np.abs(normalization.layernorm_jacobian(rng.standard_normal(2), 1.0, 0.0)))
    passed = worst < 256 * EPS and spectral < 256 * EPS and two < 16 * EPS
    return Outcome(
        bool(passed), f"against complex steps {worst:.1e}; spectral norm g/s to {spectral:.1e}; D = 2: {two:.1e}"
    )


def _gradient_turns() -> Outcome:
    rng = np.random.default_rng(41)
    h, w = rng.standard_normal((2, 64))
    sizes = np.array([1.0, 10.0, 100.0])
    steps = [1e-3 * normalization.layernorm_vjp(size * h, 1.0, 0.0, w) for size in sizes]
    turns = np.array([angle_between(size * h, size * h - step) for size, step in zip(sizes, steps, strict=True)])
    power = np.log(turns[0] / turns[2]) / np.log(sizes[2] / sizes[0])
    radial = max(abs(step @ h) / np.linalg.norm(step) / np.linalg.norm(h) for step in steps)
    left = normalization.radial_part(0.01, 1e-5)
    return Outcome(
        bool(abs(power - 2) < 1e-3 and radial < 64 * EPS),
        f"turn ∝ n^−{power:.4f}; radial part {radial:.1e}; with ε = 1e-5 at σ = .01, {left:.1%} of g/s is left along x̃",
    )


def _output_norm() -> Outcome:
    rng = np.random.default_rng(42)
    D, eps = 512, 1e-5
    h = rng.standard_normal((200, D)) * 10.0 ** rng.uniform(-1, 3, (200, 1))
    gain = normalization.alignment_gain(LLAVA_TEXT, D)
    rho = np.sqrt(h.var(axis=-1) / (h.var(axis=-1) + eps))
    error = np.max(np.abs(np.linalg.norm(normalization.aligned(h, gain, eps), axis=-1) / (LLAVA_TEXT * rho) - 1))
    uneven = rng.uniform(0.5, 2, D)
    low, high = normalization.output_norm_bounds(h, uneven, eps)
    sizes = np.linalg.norm(normalization.aligned(h, uneven, eps), axis=-1)
    passed = error < 64 * EPS and (low <= sizes).all() and (sizes <= high).all()
    return Outcome(
        bool(passed), f"norms .7 to 20,000 in, {LLAVA_TEXT} ρ out to {error:.1e}; uneven gains within their bounds"
    )


def _gradient_survives() -> Outcome:
    ratios = {
        L: [gain_gradient_ratio(L, LLAVA_TEXT, 32, np.random.default_rng(seed), tokens=2) for seed in range(6)]
        for L in (1, 2, 4)
    }
    means = {L: np.exp(np.mean(np.log(values))) for L, values in ratios.items()}
    premise = LLAVA_TEXT / np.sqrt(32)
    passed = abs(means[1] - 1) < 1e-9 and all(mean > 2 * premise for mean in means.values())
    shown = ", ".join(f"L = {L}: {means[L]:.3f} ({min(v):.2f}–{max(v):.2f})" for L, v in ratios.items())
    return Outcome(bool(passed), f"gradient at g = T/√D over g = 1: {shown}; if it were multiplied by g: {premise:.3f}")


def circulation(corners, points: int = 20_000) -> float:
    """∮ of the compensated toy field around a rectangle ((g_0, g_1), (w_0, w_1)), by the midpoint rule (G1)."""
    (g0, g1), (w0, w1) = corners
    middle = (np.arange(points) + 0.5) / points
    gs, ws = g0 + (g1 - g0) * middle, w0 + (w1 - w0) * middle
    along_g = [normalization.compensated_toy_field(gs, w)[0].mean() * (g1 - g0) for w in (w0, w1)]
    along_w = [normalization.compensated_toy_field(g, ws)[1].mean() * (w1 - w0) for g in (g0, g1)]
    return along_g[0] + along_w[1] - along_g[1] - along_w[0]


def _circulation() -> Outcome:
    around = circulation(((1.0, 2.0), (0.0, 1.0)))
    g, w = 1.0, 0.0
    losses = []
    for _ in range(4000):
        losses.append((g * w - 3) ** 2 / 2)
        toward_g, toward_w = normalization.compensated_toy_field(g, w)
        g, w = float(g - 0.01 * toward_g), float(w - 0.01 * toward_w)
    descends = bool((np.diff(losses) <= 0).all()) and losses[-1] < 1e-12
    return Outcome(
        abs(around - 2) < 1e-8 and descends,
        f"∮ around [1, 2] × [0, 1] = {around:.6f}; the flow still descends to {losses[-1]:.0e}",
    )


def _adam() -> Outcome:
    rng = np.random.default_rng(43)
    grads = rng.standard_normal((300, 40)) * 10.0 ** rng.uniform(-4, 0, (300, 1))
    same = bool((normalization.adam_steps(64 * grads) == normalization.adam_steps(grads)).all())
    kappa, eps = 50.0, 1e-3
    moved = np.max(
        np.abs(normalization.adam_steps(kappa * grads, eps=eps) - normalization.adam_steps(grads, eps=eps / kappa))
    )
    R, delta = normalization.largest_adam_step(300), 0.1
    varied = normalization.adam_steps(grads * rng.uniform(1 - delta, 1 + delta, (300, 1)))
    change = np.max(np.abs(varied - normalization.adam_steps(grads)))
    bound = normalization.varying_factor_bound(delta, R)
    passed = same and moved < 1e-12 and change <= bound
    return Outcome(
        bool(passed),
        f"κ = 64 bit for bit; ε → ε/κ to {moved:.1e}; κ ± 10 % changes a step by {change:.2f} ≤ {bound:.2f} (R = {R:.2f})",
    )


def _coupled_decay() -> Outcome:
    grads = np.random.default_rng(44).standard_normal((300, 40)) * 0.05
    plain, compensated = (normalization.adam_steps(kappa * grads, decay=0.1) for kappa in (1.0, 50.0))
    change = np.linalg.norm(compensated - plain) / np.linalg.norm(plain)
    return Outcome(change > 0.1, f"coupled L2 of .1: κ = 50 changes the steps by {change:.0%}")


def _clipping() -> Outcome:
    rng = np.random.default_rng(45)
    worst = 0.0
    for _ in range(500):
        up, rest, kappa = (
            rng.standard_normal(20) * 10.0 ** rng.uniform(-3, 0),
            rng.standard_normal(50),
            10.0 ** rng.uniform(0, 2),
        )
        total = np.hypot(np.linalg.norm(up), np.linalg.norm(rest))
        scaled = np.hypot(np.linalg.norm(kappa * up), np.linalg.norm(rest))
        effect = normalization.clip_effect((np.linalg.norm(up) / total) ** 2, kappa)
        ratios = np.array([kappa * total / scaled, total / scaled])
        worst = max(worst, np.max(np.abs(ratios / np.array(effect) - 1)))
    example = normalization.clip_effect(0.0008, 50)
    return Outcome(
        worst < 64 * EPS,
        f"500 gradients clipped both ways, to {worst:.1e}; s = .0008, κ = 50: × {example.upstream:.1f} and × {example.rest:.3f}",
    )


def _amplification() -> Outcome:
    rng = np.random.default_rng(46)
    gain = rng.lognormal(-4, 1, (500, 64))
    above = [normalization.restored_amplitude(row) for row in gain]
    error = max(abs(a.upper / (np.abs(row).max() / np.abs(row).mean()) - 1) for a, row in zip(above, gain, strict=True))
    mean_error = max(abs(a.lower - 1) for a in above)
    tiny = normalization.restored_amplitude(np.full(8, 1e-5), 1e-3)
    return Outcome(
        bool(max(error, mean_error) < 16 * EPS and abs(tiny.lower - 0.01) < EPS),
        f"max/mean to {error:.1e}; mean |g| = 1e-5 at δ = 1e-3 restores {tiny.lower:.3f}",
    )


def _half_precision() -> Outcome:
    gradient, gain = 1e-6, 0.02
    lost = float(np.float16(gradient * gain)) == 0.0
    rescued = float(np.float16(gradient * gain / gain))
    kept = float(precision.round_to_bf16(gradient * gain))
    return Outcome(
        lost and rescued > 0 and kept > 0,
        f"a gradient of 1e-6 times .02: {np.float16(gradient * gain)!s} in fp16, {rescued:.1e} if compensated, {kept:.1e} in bf16",
    )


def _every_bf16() -> Outcome:
    weights = precision.all_bf16()
    thresholds, sign, wrong = precision.lost_below(weights), np.where(weights == 0, 1, np.sign(weights)), 0
    for direction, threshold in ((sign, thresholds.away), (-sign, thresholds.toward)):
        for factor in (1 - 2.0**-20, 1.0, 1 + 2.0**-20):
            update = direction * threshold * factor  # exact, as is the sum: 30 bits at most
            wrong += np.sum(
                precision.update_lost(weights, update) != (precision.round_to_bf16(weights + update) == weights)
            )
    return Outcome(wrong == 0, f"{len(weights):,} weights, just below, at and above both thresholds: {wrong} wrong")


def _random_updates() -> Outcome:
    rng = np.random.default_rng(47)
    weights = precision.round_to_bf16(rng.standard_normal(200_000) * 10.0 ** rng.uniform(-6, 3, 200_000))
    updates = weights * 2.0 ** -rng.integers(5, 12, 200_000) * rng.choice([-1, 1], 200_000)
    wrong = np.sum(precision.update_lost(weights, updates) != (precision.round_to_bf16(weights + updates) == weights))
    frozen = precision.frozen_from(1e-3)
    return Outcome(
        bool(wrong == 0 and frozen == 0.50390625),
        f"200,000 sums: {wrong} wrong; a step of 1e-3 freezes every weight from {frozen}",
    )


def _subnormal_border() -> Outcome:
    border = 2.0**precision.SMALLEST_EXPONENT
    toward = precision.lost_below(border).toward
    # A step of 2^(e−9) ought to be at the border of being felt; here even 1.5 times that is lost.
    lost = precision.round_to_bf16(border - 1.5 * 2.0 ** (precision.SMALLEST_EXPONENT - 9)) == border
    return Outcome(
        bool(lost), f"at 2^−126 the spacing below is the subnormals': threshold 2^{int(np.log2(toward))}, not 2^−135"
    )


def _gain_table() -> Outcome:
    values = (0.9609, 53.25, 0.0400, 2.2812)
    digits = all(abs(precision.round_to_bf16(x) - x) < 0.5e-4 for x in values)
    wide, narrow = (precision.audit_gain(0.9609, 53.25, width) for width in (3584, 3072))
    target = normalization.alignment_gain(1.09, 3072)
    spacing = 2 * precision.lost_below(0.99609375).away
    passed = digits and not wide.possible and narrow.possible
    return Outcome(
        bool(passed),
        f"all four are bf16 numbers; at D = 3584 the rms {wide.root_mean_square:.3f} would be below the mean, at 3072 it is "
        f"{narrow.root_mean_square:.4f}; .9609 is {(1 - 0.9609375) / spacing:.0f} steps below 1; g_init = {target:.4f}: "
        f"moved by {abs(0.0400 - target):.3f}, the default by {1 - 0.9609:.3f}",
    )


CLAIMS = (
    Claim(
        "N1", "LayerNorm's Jacobian", "The norm passes gradients orthogonal to its input and to 1, times g/s; so a gradient step turns a large token by 1/n².",
        "J = (g/s)(I − 11ᵀ/D − x̃x̃ᵀ/D), ‖J‖ = g/s, Jᵀw ⊥ h for ε = 0", ("scalar gain", "D ≥ 3 for the spectral norm"), ("proves E",),
        (symbolic("N1"), Evidence("property", "complex steps", _jacobian), Evidence("property", "gradient steps", _gradient_turns)),
    ),
    Claim(
        "N2", "output norm", "With g = T/√D every token leaves the norm with length T, up to ρ.",
        "‖y‖ = |g|√D ρ; general gain: between min|g| and max|g| times √D ρ", ("σ > 0",), ("proves D",),
        (symbolic("N2"), Evidence("property", "random tokens", _output_norm)),
    ),
    Claim(
        "N3", "the gradient need not vanish", "Only the skip path carries the small gain back; through the branches the gradient arrives unchanged.",
        "∂y¹/∂x̂ = gI + DΔ(x̂)", ("Pre-Norm", "loss on a text token"), ("contradicts E",),
        (Evidence("simulated", "random transformers", _gradient_survives),), nature="empirical",
        reason="exact at one layer only; deeper it depends on the network, and trained models have to be measured",
    ),
    Claim(
        "G1", "compensation is no gradient", "The compensated gradient belongs to no loss, but it has the same stationary points and its flow descends.",
        "curl = κ'L_w + (κ − 1)L_wg; gradient in the metric diag(1/κ, 1)", ("κ > 0 depends on the gain",), ("repairs E",),
        (symbolic("G1"), Evidence("property", "circulation and flow", _circulation)),
    ),
    Claim(
        "G2", "Adam ignores compensation", "Adam divides by the gradient's own size, so a constant κ changes nothing, and ε becomes ε/κ.",
        "κm/(κ√v + ε) = m/(√v + ε/κ); κ(1 ± δ): |Δstep/lr| ≤ 2Rδ/(1 − δ)", ("κ constant", "no clipping", "decoupled weight decay"), ("contradicts E",),
        (symbolic("G2"), Evidence("property", "random gradients", _adam)), _coupled_decay,
    ),
    Claim(
        "G3", "clipping and compensation", "Where clipping is active, compensation also slows the rest of the network.",
        "upstream × κ/√(1 − s + sκ²), the rest × 1/√(1 − s + sκ²)", ("clipping active with and without κ",), ("repairs E",),
        (symbolic("G3"), Evidence("property", "clipped gradients", _clipping)),
    ),
    Claim(
        "G4", "uneven and tiny gains", "Compensation by the mean amplifies the largest gain by max/mean and restores only mean/δ below the floor.",
        "κ max|g| = max|g|/mean|g|; mean|g| < δ: κ mean|g| = mean|g|/δ", ("κ = 1/max(mean|g|, δ)",), ("repairs E",),
        (symbolic("G4"), Evidence("property", "random gains", _amplification), Evidence("simulated", "half precision", _half_precision)),
    ),
    Claim(
        "P1", "lost updates in bf16", "A bf16 weight does not move if its update is below half a step.",
        "lost ⇔ |u| < 2^(e−8), toward 0 from a power of two 2^(e−9); at equality iff the mantissa is even",
        ("e = ⌊log₂|w|⌋, at least −126", "the power-of-two exception holds above 2^−126 only"), ("beyond the paper",),
        (symbolic("P1"), Evidence("exhaustive", "all bf16 numbers", _every_bf16), Evidence("property", "random sums", _random_updates)), _subnormal_border,
    ),
    Claim(
        "P2", "the table of initialisations", "The paper's gains look like bf16 numbers of a width of 3072; whether rounding explains them is not decided.",
        "‖g‖/√D ≥ mean|g| excludes D = 3584", ("the table is what was published",), ("repairs F",),
        (Evidence("measured", "four numbers", _gain_table),), nature="open",
        reason="strict stagnation contradicts .9609; only a histogram of the trained gains can decide",
    ),
)  # fmt: skip
