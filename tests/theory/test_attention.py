"""Signal and noise (A1-A5)."""

import mpmath
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from theory import attention

EPS = np.finfo(float).eps
angles = st.floats(0, 3.14)
unit = st.floats(0, 1)
norms = st.floats(1e-2, 1e3)
widths = st.integers(2, 4096)


@given(st.floats(-1, 1), angles, angles, angles)
def test_symmetric_similarity(S, turn_q, slow, fast):
    """A1: the mean over mirror images of both directions, and the slower key keeps more."""
    value = attention.symmetric_similarity(S, turn_q, slow)
    assert abs(value - S * np.cos(turn_q) * np.cos(slow)) <= 4 * EPS
    slow, fast = sorted((slow, fast))
    if S > 0 and turn_q < np.pi / 2:
        assert (
            attention.symmetric_similarity(S, turn_q, fast) <= attention.symmetric_similarity(S, turn_q, slow) + 4 * EPS
        )


@given(angles, angles, angles, unit)
def test_one_step(a, first, second, kappa):
    """A2: the criterion is the comparison, and the best turn is best."""
    v, t = sorted((first, second))
    assume(v < t)
    loss = attention.step_alignment(a, t, kappa) - attention.step_alignment(a, v, kappa)
    if abs(loss) > 8 * EPS:
        assert attention.slow_turn_hurts(a, kappa, v, t) == (loss > 0)
    best = attention.best_turn(a, kappa)
    assert attention.step_alignment(a, v, kappa) <= attention.step_alignment(a, best, kappa) + 8 * EPS


@given(angles, angles, angles)
def test_geodesic(psi, v, t):
    """A2."""
    direct = np.cos(psi - 2 * t) - np.cos(psi - t - v)
    # the arguments are sums of angles below 10, rounded to 16 EPS
    assert abs(attention.geodesic_loss(psi, v, t) - direct) <= 32 * EPS


@given(norms, st.floats(-1, 1), unit, st.integers(1, 200), st.floats(0.1, 10))
def test_alignment_against_80_digits(n, k, m, L, C):
    """A3's q(n): absolute accuracy, over all drifts and targets."""
    with mpmath.workdps(80):
        n_, k_, m_, C_ = (mpmath.mpf(x) for x in (n, k, m, C))
        G, W = L * C_ * m_, L * C_**2 * (1 - m_**2)
        square = n_**2 + 2 * n_ * G * k_ + G**2 + W
        assume(square > 1e-12 * (n_ + G) ** 2)
        truth = (n_ * k_ + G) / mpmath.sqrt(square)
        # k near −1 with G near n: the numerator's error is relative to n + G.
        bound = 8 * EPS * float((n_ + G) / mpmath.sqrt(square))
    assert abs(attention.alignment(n, C, k, m, L) - truth) <= bound


@given(norms, norms, st.floats(0.1, 10), st.floats(0, 0.99), unit, st.integers(1, 200))
def test_imbalance_hurts(first, second, C, k, m, L):
    """A3: the criterion is the comparison of q; n_c < H suffices and n_c < A is necessary."""
    v, t = max(first, second), min(first, second)
    assume(v > t * (1 + 1e-9))
    q_v, q_t = (attention.alignment(n, C, k, m, L) for n in (v, t))
    hurts = attention.imbalance_hurts(v, t, C, k, m, L)
    if abs(q_v - q_t) > 1e-14:
        assert hurts == (q_v < q_t)
        peak = attention.critical_norm(C, k, m)
        if peak < 2 * v * t / (v + t) * (1 - 1e-12) and (k > 0 or m > 0):
            assert hurts
        if peak > (v + t) / 2 * (1 + 1e-12):
            assert not hurts
        start = attention.layers_until_hurt(v, t, C, k, m)
        if abs(start / L - 1) > 1e-9:
            assert hurts == (start < L)


@given(st.floats(0.1, 10), st.floats(0.01, 0.9), st.floats(0.01, 0.99), st.integers(1, 100), st.floats(0.2, 5))
def test_alignment_peaks_at_the_critical_norm(C, k, m, L, factor):
    """A3: whatever the number of layers."""
    peak = attention.critical_norm(C, k, m)
    assert attention.alignment(peak * factor, C, k, m, L) <= attention.alignment(peak, C, k, m, L) + 4 * EPS


def test_critical_norm_at_its_ends():
    np.testing.assert_array_equal(
        attention.critical_norm(1, [0, 0.5, 1, 0.5], [0.5, 0, 0.5, 1]), [0, np.inf, np.inf, 0]
    )


@given(angles, angles, angles, st.integers(3, 4096))
def test_noise(turn_q, first, second, d):
    """A4: between 0 and 1, symmetric in its turns, and rising in sin²θ_k while tan²θ_q < d − 1."""
    slow, fast = sorted((first, second), key=np.sin)
    low, high = (attention.noise_variance(turn_q, x, d) for x in (slow, fast))
    assert 0 <= low <= 1 and abs(low - attention.noise_variance(slow, turn_q, d)) <= 4 * EPS
    margin = np.cos(turn_q) ** 2 * (d - 1) - np.sin(turn_q) ** 2
    if abs(margin) > 1e-9:
        assert (high - low) * np.sign(margin) >= -4 * EPS


@given(st.floats(-1, 1), widths)
def test_tail_against_the_incomplete_beta_function(S, d):
    """A5: relative accuracy of the tail down to 1e-250; the exponent (d − 1)/2 magnifies rounding of ln(1 − S²)."""
    with mpmath.workdps(60):
        S_ = mpmath.mpf(S)
        half = mpmath.betainc(mpmath.mpf(d - 1) / 2, 0.5, 0, 1 - S_**2, regularized=True) / 2
        truth = half if S >= 0 else 1 - half
    assume(truth > 1e-250)
    # ln Γ is known to EPS·ln Γ(d/2) < EPS·d·4, and a·ln(1 − S²) to EPS times its size, at most ln 1e250.
    assert abs(attention.tail_probability(S, d) / truth - 1) <= EPS * (32 + 8 * d + 1200)


@given(st.floats(-1, 1), widths, st.integers(0, 10_000))
def test_argmax_probability(S, d, N):
    """A5: F^N, from F by powers."""
    F = 1 - attention.tail_probability(S, d)
    value = attention.argmax_probability(S, d, N)
    assert 0 <= value <= 1
    # F is rounded to EPS, which N magnifies.
    assert abs(value - F**N) <= EPS * (N + 4)


@given(st.floats(0, 1e3), widths)
def test_log_moment(lam, d):
    """A5: ln ₀F₁ against mpmath, never above λ²/2d, nor above λ."""
    assume(lam == 0 or lam > 1e-100)
    with mpmath.workdps(250):
        truth = mpmath.log(mpmath.hyp0f1(mpmath.mpf(d) / 2, mpmath.mpf(lam) ** 2 / 4))
    value = attention.log_moment(lam, d)
    # Each term is e to a sum of up to about 2λ + 100 logarithms of size ≤ 40 (500 for the smallest λ).
    assert abs(value - truth) <= EPS * 500 * (2 * lam + 100) * truth
    assert value <= min(lam**2 / (2 * d), lam) * (1 + 1e-10) + 1e-300


@given(st.floats(-1, 1), widths, st.integers(1, 10_000), st.floats(0, 200))
def test_mass_bounds(S, d, N, lam):
    """A5: a lower bound stays below the upper one, and ½ caps the mass while λS ≤ ln N."""
    low, high = attention.mass_bounds(S, d, N, lam)
    assert 0 <= low <= high * (1 + 1e-9) <= 1 + 1e-9
    if lam * S <= np.log(N):
        assert high <= 0.5
    if lam == 0:
        assert abs(low - 1 / (1 + N)) <= 4 * EPS


@given(st.integers(16, 4096), st.integers(20, 10_000))
def test_critical_similarity(d, N):
    """A5: the crowd's largest cosine lies around it, so half of it loses and twice of it (if there is room) wins."""
    critical = attention.critical_similarity(d, N)
    assume(critical < 0.4)
    assert attention.argmax_probability(critical / 2, d, N) < 0.5 < attention.argmax_probability(2 * critical, d, N)


BAD = [
    (lambda: attention.symmetric_similarity(2, 1, 1), ("similarity", "2.0")),
    (lambda: attention.step_alignment(1, 1, 3), ("drift", "3.0")),
    (lambda: attention.best_turn(-1, 0.5), ("target_angle", "-1.0")),
    (lambda: attention.slow_turn_hurts(1, 0.5, 2, 1), ("turn_v", "2.0")),
    (lambda: attention.geodesic_loss(1, -1, 1), ("turn_v", "-1.0")),
    (lambda: attention.alignment(1, 0, 0.5, 0.5, 3), ("update", "0.0")),
    (lambda: attention.alignment(1, 1, -1, 1, 1), ("norm", "1.0")),
    (lambda: attention.critical_norm(1, -0.5, 0.5), ("target_cosine", "-0.5")),
    (lambda: attention.imbalance_hurts(1, 2, 1, 0.5, 0.5, 3), ("norm_t", "2.0")),
    (lambda: attention.layers_until_hurt(2, 1, 1, 0.5, 1.5), ("drift", "1.5")),
    (lambda: attention.noise_variance(1, 1, 1), ("width", "1.0")),
    (lambda: attention.tail_probability(1.5, 8), ("similarity", "1.5")),
    (lambda: attention.argmax_probability(0.5, 8, -1), ("distractors", "-1.0")),
    (lambda: attention.log_moment(-1, 8), ("inverse_temperature", "-1.0")),
    (lambda: attention.mass_bounds(0.5, 8, 0, 1), ("distractors", "0.0")),
    (lambda: attention.critical_similarity(8, 0), ("distractors", "0.0")),
]


@pytest.mark.parametrize(("call", "words"), BAD)
def test_bad_input_is_named(call, words):
    with pytest.raises(ValueError) as error:
        call()
    assert all(word in str(error.value) for word in words)


def test_broadcasting():
    assert attention.alignment(np.ones((3, 1)), 1, np.zeros(4), 0.5, 2).shape == (3, 4)
    assert attention.mass_bounds(np.zeros((3, 1)), 8, np.array([1, 10]), 2.0).lower.shape == (3, 2)
    assert attention.tail_probability(np.float32(0.5), np.float32(8)).dtype == np.float32
