"""Many steps (D1-D6)."""

import mpmath
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from theory import depth
from theory.rotation import norm_after, step_angle

EPS = np.finfo(float).eps
sizes = st.floats(1e-2, 1e2)
wide = st.floats(1e-150, 1e150)
angles = st.one_of(st.floats(1e-12, 3.14), st.floats(1e-12, 1e-6).map(lambda x: np.pi - x))
layer_counts = st.integers(1, 40)


@given(wide, st.lists(st.tuples(sizes, angles), min_size=1, max_size=12), sizes)
def test_evolve_is_the_step_repeated(norm, steps, ratio):
    """R1, D1: against 80 digits. Each layer adds a few ulp to a norm, magnified by at most n/N when it shrinks."""
    updates, phis = (np.array(column) for column in zip(*steps, strict=True))
    updates = updates * norm * ratio
    path = depth.evolve(norm, updates, phis)
    assert path.norms.shape == (len(steps) + 1,) and path.turns.shape == (len(steps),)
    n, magnified = mpmath.mpf(norm), 1.0
    with mpmath.workdps(80):
        for layer, (C, phi) in enumerate(zip(updates, phis, strict=True)):
            C, phi = mpmath.mpf(float(C)), mpmath.mpf(float(phi))
            u, v = C * mpmath.sin(phi), n + C * mpmath.cos(phi)
            N = mpmath.sqrt(u * u + v * v)
            magnified = magnified * max(1.0, float(n / N)) + 8.0
            assume(magnified < 1e10)
            assert abs(path.norms[layer + 1] / N - 1) <= magnified * EPS
            n = N


@given(sizes, sizes, sizes, angles)
def test_fate(first, second, C, phi):
    """D1, away from its boundaries by more than rounding."""
    v, t = max(first, second), min(first, second)
    assume(v > t * (1 + 1e-6))
    fate = depth.fate(v, t, C, phi)
    with mpmath.workdps(60):
        c, norms = mpmath.cos(mpmath.mpf(phi)), {}
        for n in (v, t):
            norms[n] = mpmath.sqrt(mpmath.mpf(n) ** 2 + 2 * n * c * C + mpmath.mpf(C) ** 2)
        scale = mpmath.mpf(v + C)
        order, squared = norms[v] - norms[t], norms[v] ** 2 - norms[t] ** 2 - (mpmath.mpf(v) ** 2 - mpmath.mpf(t) ** 2)
        ratio = norms[v] * t - norms[t] * v
        if abs(order) > 1e-12 * scale:
            assert fate.order_kept == (order > 0)
        if abs(squared) > 1e-12 * scale**2:
            assert fate.squared_gap_grows == (squared > 0)
        if abs(ratio) > 1e-12 * scale**2:
            assert fate.ratio_shrinks == (ratio < 0)
        assert abs(order) <= (mpmath.mpf(v) - mpmath.mpf(t)) * (1 + mpmath.mpf(10) ** -50) and not fate.gap_grows


def test_fate_at_a_right_angle_leaves_the_squared_gap():
    assert not depth.fate(2.0, 1.0, 3.0, np.pi / 2).squared_gap_grows


@given(sizes, st.floats(np.pi / 2 + 0.05, np.pi - 0.05), sizes)
def test_attractor(C, phi, start):
    """D3: a fixed point of the step, approached at the rate it says."""
    n, rate, turn = depth.attractor(C, phi)
    assert abs(norm_after(n, C, phi) / n - 1) <= 32 * EPS / np.cos(phi) ** 2
    assert abs(step_angle(n, C, phi) - turn) <= 64 * EPS / abs(np.cos(phi))
    h = 1e-5 * n
    slope = (norm_after(n + h, C, phi) - norm_after(n - h, C, phi)) / (2 * h)
    # central difference: error of order h² N''' and of rounding EPS n/h
    assert abs(slope - rate) <= 1e-8 / abs(np.cos(phi)) ** 2 + 4 * EPS * 1e5
    before, after = abs(start - n), abs(norm_after(start, C, phi) - n)
    assert after <= before + 8 * EPS * (start + n)


@given(st.floats(1e-3, 1e3), st.floats(1e-2, 1e2), layer_counts)
def test_theodorus(norm, C, layers):
    """D4: the spiral by `evolve`, between the bounds."""
    bounds = depth.theodorus_bounds(norm, C, layers)
    walked = depth.evolve(norm, np.full(layers, C), np.full(layers, np.pi / 2)).turns.sum()
    assert abs(walked / bounds.total_turn - 1) <= 8 * (layers + 1) * EPS
    assert bounds.lower <= bounds.total_turn * (1 + 8 * layers * EPS)
    assert bounds.total_turn <= bounds.upper * (1 + 8 * layers * EPS)


@given(sizes, st.floats(0.1, 1.4), st.floats(0.1, 3))
def test_spiral(norm, phi, growth):
    """D4: many small steps approach tan φ ln(n/n_0), to first order in the step."""
    layers, length = 4000, norm * growth
    walked = depth.evolve(norm, np.full(layers, length / layers), np.full(layers, phi)).turns.sum()
    limit = depth.spiral_angle(norm, norm + length * np.cos(phi), phi)
    # One step errs by (C/n)² (1/2 + |tan|/…) at most; Σ (C/n)² ≤ growth²/layers · 2/cos φ … bounded generously below.
    assert abs(walked - limit) <= 2 * growth**2 / layers / np.cos(phi) * (1 + np.tan(phi))


@given(sizes, st.floats(1, 1e3), st.lists(st.tuples(sizes, st.floats(1e-6, np.pi / 2)), min_size=1, max_size=20))
def test_cumulative_sandwich(norm, factor, steps):
    """D5."""
    C, phi = (np.array(column) for column in zip(*steps, strict=True))
    total = [depth.evolve(n, C, phi).turns.sum() for n in (norm * factor, norm)]
    low, high = depth.cumulative_bounds(norm * factor, norm, C, phi)
    slack = 1 + 16 * len(steps) * EPS
    assert low <= total[0] / total[1] * slack and total[0] / total[1] <= high * slack


def test_cumulative_sandwich_fails_at_obtuse_angles():
    phi = np.arccos(-24 / 25)
    v, t = (depth.evolve(n, [25.0] * 2, [phi] * 2).turns.sum() for n in (12.0, 1.0))
    assert v > t


@given(sizes, sizes, st.integers(0, 1000))
def test_isotropic_fate(norm, C, layers):
    """D2, D6."""
    fate = depth.isotropic_fate(norm, C, layers)
    assert abs(fate.norm**2 / (norm**2 + layers * C**2) - 1) <= 8 * EPS
    assert abs(fate.cosine_to_start * fate.norm / norm - 1) <= 4 * EPS


@given(sizes, st.floats(1.5, 100), sizes, st.floats(1.1, 50))
def test_layers_until_ratio(norm, start, C, ratio):
    """D2: walking that many layers arrives at the ratio."""
    assume(ratio <= start * (1 - 1e-9))
    layers = depth.layers_until_ratio(norm * start, norm, C, ratio)
    norms = [depth.isotropic_fate(n, C, max(layers, 0)).norm for n in (norm * start, norm)]
    # L is a difference of squares: relative error EPS·n_v²/(LC²), harmless in the ratio but for ratio²/(ratio² − 1).
    assert abs(norms[0] / norms[1] / ratio - 1) <= 32 * EPS * ratio**2 / (ratio**2 - 1)


@given(sizes, sizes, layer_counts)
def test_effective_depth(v, t, layers):
    """D6."""
    worth = depth.effective_depth(v, t, layers)
    assert abs(worth.coherent * v / (layers * t) - 1) <= 4 * EPS
    assert abs(worth.diffusive * layers / worth.coherent**2 - 1) <= 8 * EPS


def test_llava_numbers():
    """THEORY.md's D4 and D6."""
    assert depth.theodorus_bounds(39.96, 1, 32).total_turn == pytest.approx(0.797, abs=5e-4)
    assert depth.theodorus_bounds(1.08, 1, 32).total_turn == pytest.approx(9.24, abs=5e-3)
    np.testing.assert_allclose(depth.isotropic_fate([39.96, 1.08], 1, 32).cosine_to_start, [0.990, 0.188], atol=5e-4)


def test_types_and_shapes():
    single = np.ones((2, 3), np.float32)
    path = depth.evolve(np.ones(3, np.float32), single, single)
    assert path.norms.shape == (3, 3) and path.norms.dtype == path.turns.dtype == np.float32
    assert depth.evolve(1.0, [[1.0], [2.0]], np.ones(4)).turns.shape == (2, 4)
    assert np.shape(depth.fate([2.0, 3.0], 1.0, 1.0, [[1.0], [2.0]])) == (4, 2, 2)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: depth.evolve(1, 2.0, 1.0), ("updates", "2.0")),
        (lambda: depth.evolve(1, [1.0, -3.0], [1.0, 1.0]), ("updates", "-3.0")),
        (lambda: depth.evolve(1, [1.0], [4.0]), ("angles", "4.0")),
        (lambda: depth.evolve(0, [0.0], [1.0]), ("norm after layer 0", "0.0")),
        (lambda: depth.fate(1, 2, 1, 1), ("norm_t", "2.0")),
        (lambda: depth.attractor(1, 1.0), ("angle", "1.0")),
        (lambda: depth.theodorus_bounds(1, 1, 0), ("layers", "0")),
        (lambda: depth.theodorus_bounds(1, 1, 2.5), ("layers", "2.5")),
        (lambda: depth.spiral_angle(1, 2, np.pi / 2), ("angle", "1.57")),
        (lambda: depth.cumulative_bounds(2, 1, [1.0], [2.0]), ("angles", "2.0")),
        (lambda: depth.isotropic_fate(1, 1, -1), ("layers", "-1.0")),
        (lambda: depth.layers_until_ratio(2, 1, 1, 3), ("ratio", "3")),
        (lambda: depth.effective_depth(0, 1, 1), ("norm_v", "0.0")),
    ],
)
def test_bad_input_is_named(call, words):
    with pytest.raises(ValueError) as error:
        call()
    assert all(word in str(error.value) for word in words)
