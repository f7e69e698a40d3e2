"""Scale (S1-S3), LayerNorm and compensation (N1-N3, G1-G4) and bf16 (P1, P2)."""

import mpmath
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from theory import invariance, normalization, precision
from theory.transformer import gain_gradient_ratio, random_transformer
from theory.vectors import angle_between

EPS = np.finfo(float).eps
seeds = st.integers(0, 2**32 - 1)
decades = st.floats(-6, 6)


def tokens(seed, count=4, width=16):
    return np.random.default_rng(seed).standard_normal((count, width))


@given(seeds, st.integers(-300, 300))
def test_powers_of_two_are_invisible(seed, exponent):
    """S1: bit for bit, LayerNorm and RMSNorm, and with them both branches of a transformer."""
    h = tokens(seed)
    scaled = np.ldexp(h, exponent)
    for norm in (invariance.layer_norm, invariance.rms_norm):
        np.testing.assert_array_equal(norm(scaled), norm(h))
    model = random_transformer(1, 16, 2, np.random.default_rng(1))
    for branch in (model.attention, model.mlp):
        np.testing.assert_array_equal(branch(0, scaled), branch(0, h))


@given(seeds, st.floats(1e-3, 1e3), st.floats(-10, 10))
def test_any_scale_and_shift(seed, alpha, beta):
    """S1: up to the rounding of αh + β, which is relative to the larger of the two."""
    h = tokens(seed)
    error = np.abs(invariance.layer_norm(alpha * h + beta) - invariance.layer_norm(h))
    assert error.max() <= 64 * EPS * (1 + abs(beta) / alpha)


def test_two_branches_see_the_scale_and_parallel_ones_do_not():
    """S1's counterexample, in a random block."""
    h = tokens(3, 8, 32)
    for parallel in (False, True):
        model = random_transformer(1, 32, 4, np.random.default_rng(2), parallel=parallel)
        near, far = (model.residual_states(a * h)[-1] - a * h for a in (1.0, 64.0))
        change = np.max(np.linalg.norm(near - far, axis=-1) / np.linalg.norm(near, axis=-1))
        assert change < 1e-12 if parallel else change > 0.1


@given(st.floats(1e-150, 1e150), st.floats(0, 1e100))
def test_shrinkage(sigma, eps):
    """S2: 1 − ρ to a few ulp, even where it is 1e-300."""
    with mpmath.workdps(700):
        truth = 1 - 1 / mpmath.sqrt(1 + mpmath.mpf(eps) / mpmath.mpf(sigma) ** 2)
    assume(eps == 0 or truth > 1e-300)
    # x = √ε/σ and x² have 3 half-ulps; log1p and expm1 hand on relative errors no larger.
    assert abs(invariance.shrinkage(sigma, eps) - truth) <= 8 * EPS * truth


@given(st.floats(1e-4, 1e4), st.floats(1e-2, 1e2), st.floats(1e-12, 1e-2))
def test_scale_effect(sigma, alpha, eps):
    """S2: the change to 16 ulp, and its bound."""
    effect = invariance.scale_effect(sigma, alpha, eps)
    with mpmath.workdps(60):
        s, a, e = (mpmath.mpf(x) for x in (sigma, alpha, eps))
        truth = abs(1 / mpmath.sqrt(1 + e / (a * s) ** 2) - 1 / mpmath.sqrt(1 + e / s**2))
    assert abs(effect.change - truth) <= 16 * EPS * truth
    assert effect.change <= effect.bound * (1 + 8 * EPS)


@given(seeds, st.floats(0, 1e4))
def test_two_views(seed, constant):
    """S3: the centred view does not feel the constant, beyond the rounding of what it hides in."""
    w, delta = invariance.centred(tokens(seed, 2, 64))
    views = invariance.adjacent_cosine_views(constant + w, delta)
    assert abs(views.layer_norm - np.cos(angle_between(w, w + delta))) <= 16 * EPS * (1 + constant)
    assert abs(invariance.centred(constant + w).mean()) <= 4 * EPS * (1 + constant)


@given(seeds, st.integers(2, 24), st.floats(-3, 3), st.floats(0, 1e-3))
def test_vjp_is_the_jacobian_is_the_derivative(seed, D, decade, eps):
    """N1: both against the complex step; spectral norm g/s."""
    rng = np.random.default_rng(seed)
    h, w, gain = 10.0**decade * rng.standard_normal(D), rng.standard_normal(D), rng.uniform(0.1, 2)
    s = np.sqrt(h.var() + eps)
    assume(h.std() > 1e-3 * np.abs(h).max())
    J = normalization.layernorm_jacobian(h, gain, eps)
    bumped = h + 1e-30 * s * 1j * np.eye(D)
    centred = bumped - bumped.mean(axis=-1, keepdims=True)
    exact = (gain * centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps)).imag.T / (1e-30 * s)
    # x̃ is good to EPS·max|h|/s ≤ 1000 EPS and enters twice.
    assert np.abs(J - exact).max() <= 4e3 * EPS * gain / s
    np.testing.assert_allclose(
        normalization.layernorm_vjp(h, gain, eps, w), w @ J, atol=4e3 * EPS * gain / s * np.abs(w).sum()
    )
    if D >= 3:
        assert abs(np.linalg.norm(J, 2) * s / gain - 1) <= 4e3 * EPS
    elif eps == 0:
        assert np.abs(J).max() <= 4e3 * EPS * gain / s


@given(seeds, st.floats(1, 1e3))
def test_gradient_is_orthogonal_and_turns_by_the_inverse_square(seed, factor):
    """N1 at ε = 0."""
    h, w = tokens(seed, 2, 24)
    near, far = (normalization.layernorm_vjp(size * h, 1.0, 0.0, w) for size in (1.0, factor))
    np.testing.assert_allclose(far * factor, near, atol=64 * EPS * np.linalg.norm(w))
    assert abs(near @ h) <= 64 * EPS * np.linalg.norm(near) * np.linalg.norm(h)
    rate = 1e-6
    turns = [angle_between(size * h, size * h - rate * g) for size, g in ((1.0, near), (factor, far))]
    # tan θ = rate‖g‖/n; the difference rounds to EPS of an angle of about 1e-6/factor²
    assert abs(turns[0] / turns[1] / factor**2 - 1) <= 1e-9 + 8 * EPS * factor**2 / turns[0]


@given(st.floats(1e-6, 1e6), st.floats(1e-12, 1e3))
def test_radial_part(sigma, eps):
    """N1: measured on a token along x̃, D = 3."""
    h = sigma * np.sqrt(1.5) * np.array([1.0, 0.0, -1.0])
    x = invariance.layer_norm(h, eps)
    back = normalization.layernorm_vjp(h, 1.0, eps, x)
    part = normalization.radial_part(sigma, eps)
    s = np.sqrt(sigma**2 + eps)
    # 1 − ‖x̃‖²/D cancels when ε is small: absolute accuracy.
    assert np.abs(back - part * x / s).max() <= 16 * EPS * np.abs(x).max() / s


@given(seeds, st.floats(0.1, 100), st.floats(-2, 3))
def test_output_norm(seed, target, decade):
    """N2: T·ρ for every token; a general gain lies between its extremes."""
    h, eps = 10.0**decade * tokens(seed, 5, 32), 1e-5
    gain = normalization.alignment_gain(target, 32)
    rho = 1 - invariance.shrinkage(h.std(axis=-1), eps)
    sizes = np.linalg.norm(normalization.aligned(h, gain, eps), axis=-1)
    np.testing.assert_allclose(sizes, target * rho, rtol=32 * EPS)
    low, high = normalization.output_norm_bounds(h, gain, eps)
    np.testing.assert_allclose([low, high], [sizes, sizes], rtol=32 * EPS)
    uneven = np.random.default_rng(seed).uniform(0.1, 3, 32)
    low, high = normalization.output_norm_bounds(h, uneven, eps)
    sizes = np.linalg.norm(normalization.aligned(h, uneven, eps), axis=-1)
    assert (low <= sizes * (1 + 32 * EPS)).all() and (sizes <= high * (1 + 32 * EPS)).all()


def test_target_norm_skips_empty_rows():
    """The paper's D."""
    assert normalization.target_norm([[3.0, 4.0], [0.0, 0.0], [0.0, 1.0]]) == 3.0


@given(st.integers(1, 6), st.integers(0, 4), st.floats(1e-3, 1e3), seeds)
def test_target_norm_ignores_empty_rows_and_has_the_unit_of_its_rows(rows, empty, scale, seed):
    """Norms of rows are sums of at most five squares, so a few roundings."""
    table = np.random.default_rng(seed).standard_normal((rows, 5)) + 3
    padded = np.concatenate([np.zeros((empty, 5)), table])
    expected = np.sqrt((table**2).sum(axis=1)).mean()
    assert normalization.target_norm(padded) == pytest.approx(expected, rel=16 * EPS)
    assert normalization.target_norm(scale * padded) == pytest.approx(scale * expected, rel=32 * EPS)


def test_gradient_survives_one_layer_unchanged():
    """N3: exactly 1 at one layer, because the visual token reaches the text through a branch alone."""
    assert gain_gradient_ratio(1, 1.08, 16, np.random.default_rng(0), tokens=2) == pytest.approx(1, abs=1e-12)


@given(st.floats(1e-5, 10), st.floats(1e-5, 1e-2), seeds)
def test_compensation(mean, delta, seed):
    """G4 and the paper's E."""
    gain = mean * np.random.default_rng(seed).choice([-1.5, -0.5, 0.5, 1.5], 16)
    size = np.abs(gain).mean()
    assert normalization.compensation_factor(gain, delta) == pytest.approx(1 / max(size, delta), rel=4 * EPS)
    restored = normalization.restored_amplitude(gain, delta)
    assert restored.lower == pytest.approx(min(1, size / delta), rel=8 * EPS)
    assert restored.upper == pytest.approx(np.abs(gain).max() / max(size, delta), rel=8 * EPS)


@given(seeds, st.floats(1, 1e3), st.floats(-4, 1))
def test_clip_effect(seed, kappa, decade):
    """G3: against clipping itself."""
    rng = np.random.default_rng(seed)
    upstream, rest = 10.0**decade * rng.standard_normal(8), rng.standard_normal(8)

    def clipped(parts):
        return np.concatenate(parts) / np.linalg.norm(np.concatenate(parts))

    plain, compensated = clipped([upstream, rest]), clipped([kappa * upstream, rest])
    share = (plain[:8] ** 2).sum()
    effect = normalization.clip_effect(share, kappa)
    # 1 − s cancels if upstream is almost everything.
    slack = 64 * EPS / (1 - share)
    assert abs(compensated[0] / plain[0] / effect.upstream - 1) <= slack
    assert abs(compensated[-1] / plain[-1] / effect.rest - 1) <= slack


@given(seeds, st.integers(-40, 40), st.floats(0, 0.5))
def test_adam(seed, exponent, spread):
    """G2: powers of two bit for bit; a κ that varies stays within the bound; so does every step within R."""
    rng = np.random.default_rng(seed)
    gradients = rng.standard_normal((60, 6)) * 10.0 ** rng.uniform(-4, 0, (60, 1))
    steps = normalization.adam_steps(gradients)
    np.testing.assert_array_equal(normalization.adam_steps(np.ldexp(gradients, exponent)), steps)
    R = normalization.largest_adam_step(60)
    assert np.abs(steps).max() <= R * (1 + 1e-12)
    varied = normalization.adam_steps(gradients * rng.uniform(1 - spread, 1 + spread, (60, 1)))
    assert np.abs(varied - steps).max() <= normalization.varying_factor_bound(spread, R) + 1e-12


@given(seeds, st.floats(1, 1e3), st.floats(1e-8, 1e-2))
def test_adam_epsilon_becomes_epsilon_over_kappa(seed, kappa, eps):
    """G2."""
    gradients = np.random.default_rng(seed).standard_normal((30, 5))
    a = normalization.adam_steps(kappa * gradients, eps=eps)
    np.testing.assert_allclose(a, normalization.adam_steps(gradients, eps=eps / kappa), rtol=0, atol=256 * EPS)


@given(st.floats(0.2, 3), st.floats(-3, 3), st.floats(0.01, 1), st.floats(0.01, 1))
def test_compensation_has_a_curl(g, w, dg, dw):
    """G1: circulation around a box is the integral of 3 + w − 2gw, which a gradient's would not be."""
    from theory.ledger_normalization import circulation

    curl = dg * dw * (3 + (w + dw / 2) - 2 * (g + dg / 2) * (w + dw / 2))
    assert circulation(((g, g + dg), (w, w + dw)), 64) == pytest.approx(curl, abs=1e-2 * dg * dw)


bf16 = st.sampled_from(list(precision.all_bf16()))


@given(st.floats(-1e38, 1e38))
def test_round_to_bf16_is_nearest(x):
    """P1: no bf16 number is nearer, and a bf16 number stays."""
    rounded = precision.round_to_bf16(x)
    assert precision.round_to_bf16(rounded) == rounded
    e = max(np.floor(np.log2(abs(x))) if x else -126, -126)
    assert abs(rounded - x) <= 2.0 ** (e - 8) * (1 + 1e-9)


@given(bf16, st.floats(2.0**-16, 2.0**3), st.sampled_from([-1, 1]))
def test_lost_updates(w, factor, sign):
    """P1: the rule is the rounding of the sum, wherever the sum is exact (factor has 24 bits)."""
    u = sign * float(np.float32(factor)) * precision.lost_below(w).away
    assume(abs(w + u) < precision.LARGEST_BF16)
    assert precision.update_lost(w, u) == (precision.round_to_bf16(w + u) == w)


def test_thresholds_by_name():
    """P1's examples."""
    assert precision.lost_below(1.0) == (2.0**-8, 2.0**-9)
    assert precision.lost_below(2.0**-126) == (2.0**-134, 2.0**-134)
    assert precision.lost_below(0.0) == (2.0**-134, 2.0**-134)
    assert precision.frozen_from(1e-3) == 0.50390625 and precision.frozen_from(2e-5) < 0.02
    assert precision.round_to_bf16(3.4e38) == np.inf
    weights = precision.all_bf16()
    assert len(weights) == 65_279 and (np.diff(weights) > 0).all()


@given(st.floats(1e-30, 1e30))
@settings(max_examples=30)  # each looks at all bf16 numbers
def test_frozen_from_is_where_freezing_begins(step):
    w = precision.frozen_from(step)
    weights = precision.all_bf16()
    above, below = weights[weights >= w], weights[weights < w][-1]
    assert (precision.update_lost(above, step) & precision.update_lost(above, -step)).all()
    assert not (precision.update_lost(below, step) and precision.update_lost(below, -step))


@given(st.lists(st.floats(1e-3, 10), min_size=1, max_size=50))
def test_a_gain_that_exists_is_possible(gain):
    """P2: the mean of a real vector is never above its root mean square, and rounding to bf16 is allowed for."""
    assert precision.audit_gain(float(np.mean(gain)), float(np.linalg.norm(gain)), len(gain)).possible


def test_audit_of_the_published_gains():
    """P2: 3584 excluded, 3072 not."""
    assert not precision.audit_gain(0.9609, 53.25, 3584).possible
    assert precision.audit_gain(0.9609, 53.25, 3072).possible and precision.audit_gain(0.04, 2.2812, 3072).possible


BAD = [
    (lambda: invariance.layer_norm([2.0, 2.0]), ("h", "zero")),
    (lambda: invariance.rms_norm([1.0, 2.0], -1), ("eps", "-1.0")),
    (lambda: invariance.shrinkage(0, 1), ("sigma", "0.0")),
    (lambda: invariance.scale_effect(1, 0, 1), ("alpha", "0.0")),
    (lambda: normalization.layernorm_vjp([1.0, 1.0], 1, 0, [1, 2]), ("h", "0.0")),
    (lambda: normalization.layernorm_jacobian([[1.0, 2.0]], 1, 0), ("h", "2")),
    (lambda: normalization.radial_part(0, 0), ("sigma", "0.0")),
    (lambda: normalization.target_norm([[0.0, 0.0]]), ("embedding", "0.0")),
    (lambda: normalization.alignment_gain(0, 8), ("target", "0.0")),
    (lambda: normalization.compensation_factor(1, 0), ("delta", "0.0")),
    (lambda: normalization.clip_effect(2, 1), ("share", "2.0")),
    (lambda: normalization.adam_steps([[1.0]], beta1=1.0), ("beta1", "1.0")),
    (lambda: normalization.largest_adam_step(0), ("steps", "0")),
    (lambda: normalization.varying_factor_bound(1.0, 1), ("spread", "1.0")),
    (lambda: normalization.compensated_toy_field(0, 1), ("gain", "0.0")),
    (lambda: random_transformer(1, 10, 4, np.random.default_rng(0)), ("heads", "4")),
    (lambda: precision.update_lost(0.3, 1), ("weight", "0.3")),
    (lambda: precision.round_to_bf16(np.nan), ("values", "nan")),
    (lambda: precision.frozen_from(1e39), ("step", "1e+39")),
    (lambda: precision.audit_gain(1, 1, 0), ("width", "0")),
]


@pytest.mark.parametrize(("call", "words"), BAD)
def test_bad_input_is_named(call, words):
    with pytest.raises(ValueError) as error:
        call()
    assert all(word in str(error.value) for word in words)
