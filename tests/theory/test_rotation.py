"""One step (R1-R7): against 80 digits over 400 decades, at the ends of the angle and where v cancels."""

import mpmath
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from theory import rotation
from theory.published import MEASURED, predicted_cosine

EPS = np.finfo(float).eps
mpmath.mp.dps = 80
sizes = st.one_of(st.floats(1e-200, 1e200), st.floats(1e-3, 1e3))
angles = st.one_of(
    st.floats(1e-12, 3.14),
    st.floats(1e-12, 1e-3),
    st.floats(1e-12, 1e-3).map(lambda x: np.pi - x),
    st.floats(1e-12, 1e-3).map(lambda x: np.pi / 2 + x),
)


@st.composite
def steps(draw):
    """(n, C, φ), one in three with n next to −C cos φ, where v vanishes, one in three with n next to C."""
    C, phi = draw(sizes), draw(angles)
    how = draw(st.sampled_from(["free", "cancels", "equal"]))
    n = draw(sizes)
    if how == "cancels" and phi > np.pi / 2:
        n = -C * np.cos(phi) * (1 + draw(st.sampled_from([0, 1, -1])) * 10.0 ** draw(st.integers(-16, -1)))
    if how == "equal":
        n = C * (1 + draw(st.sampled_from([0, 1, -1])) * 10.0 ** draw(st.integers(-16, -1)))
    assume(n > 0)
    return float(n), float(C), float(phi)


def exact(n, C, phi):
    """u, v, N to 80 digits (160 while they are made: v may lose 60)."""
    with mpmath.workdps(500):
        n, C, phi = mpmath.mpf(n), mpmath.mpf(C), mpmath.mpf(phi)
        u, v = C * mpmath.sin(phi), n + C * mpmath.cos(phi)
        return u, v, mpmath.sqrt(u * u + v * v)


def relative(value, truth):
    return float(abs((mpmath.mpf(float(value)) - truth) / truth))


@given(steps())
def test_turn_and_norm_are_good_to_a_few_ulp(step):
    # R1. sin, cos, two products and a sum make u and v good to 4 half-ulps of N; atan2 and hypot add one each,
    # and neither magnifies a relative error of u or an error of v relative to N.
    u, v, N = exact(*step)
    theta = mpmath.atan2(u, v)
    assume(theta > 1e-300)  # below, floats are subnormal and have no relative precision
    assert relative(rotation.step_angle(*step), theta) <= 6 * EPS
    assert relative(rotation.norm_after(*step), N) <= 6 * EPS


@given(steps())
def test_cosines_are_good_absolutely_and_their_deficit_relatively(step):
    u, v, N = exact(*step)
    assert abs(float(rotation.adjacent_cosine(*step) - v / N)) <= 6 * EPS  # R5
    deficit = u * u / (N * (N + v)) if v > 0 else 1 - v / N
    assume(deficit > 1e-300)
    assert relative(rotation.adjacent_cosine_deficit(*step), deficit) <= 12 * EPS


@given(steps())
def test_slopes(step):
    n, C, phi = (mpmath.mpf(x) for x in step)
    u, v, N = exact(*step)
    assume(1e-100 < step[0] < 1e100 and 1e-100 < step[1] < 1e100)
    slopes = rotation.turn_slopes(*step)
    assume(abs(u / N) > 1e-90)
    assert relative(slopes.by_norm, -u / N**2) <= 12 * EPS  # R1: never positive
    assert relative(slopes.by_update, n * mpmath.sin(phi) / N**2) <= 12 * EPS
    with mpmath.workdps(500):
        across = C * (C + n * mpmath.cos(phi)) / N**2
    assert abs(float(slopes.by_angle - across)) <= 16 * EPS * float(C / N)
    # v may vanish; its error is relative to N.
    assert abs(float(slopes.by_norm_twice - 2 * u * v / N**4)) <= 24 * EPS * float(2 * u / N**3)
    assert slopes.by_norm <= 0


@given(steps(), st.floats(1, 1e6))
def test_inertia(step, factor):
    """R1: the larger norm never turns more (rounding aside), and R4 brackets the ratio."""
    n, C, phi = step
    assume(n * factor < 1e200)
    slow, fast = rotation.step_angle(n * factor, C, phi), rotation.step_angle(n, C, phi)
    assume(slow > 1e-290)
    assert slow <= fast * (1 + 12 * EPS)
    low, high = rotation.ratio_bounds(n * factor, n, C, phi)
    assert low * (1 - 24 * EPS) <= slow / fast <= high * (1 + 24 * EPS)
    if phi <= np.pi / 2:
        assert n / (n * factor) <= low * (1 + 8 * EPS)


@given(st.floats(1e-6, 1e6), angles)
def test_mirror_symmetry(x, phi):
    """R1: θ(n) + θ(C²/n) = φ; 1/x is rounded, which moves its turn by at most half an ulp relatively."""
    total = rotation.step_angle(x, 1, phi) + rotation.step_angle(1 / x, 1, phi)
    # near n = C at φ near π the turn changes by φ/… per relative step of n: N is small.
    slope = abs(rotation.turn_slopes(1 / x, 1, phi).by_norm) / x
    assert abs(total - phi) <= (16 * phi + slope) * EPS


def test_the_tangent_form_jumps_where_the_turn_falls():
    """R2, with the pole itself at 90° exactly."""
    turns = np.degrees(rotation.step_angle([1.0, 2.0, 3.0, 4.0], 5.0, np.arctan2(4, -3)))
    np.testing.assert_allclose(turns, [116.565, 104.036, 90.0, 75.964], atol=1e-3)
    tangent = np.tan(np.radians(turns))
    assert tangent[1] < tangent[3] and abs(tangent[0]) < abs(tangent[1])


@given(st.floats(1e-6, 1.0), angles)
def test_turn_bound(x, phi):
    """R3: never exceeded, met at cos φ = −C/n; the bound itself against 80 digits up to C = n."""
    bound = rotation.turn_bound(1.0, x)
    assert relative(bound, mpmath.asin(mpmath.mpf(x))) <= 4 * EPS
    assert rotation.step_angle(1.0, x, phi) <= bound * (1 + 8 * EPS)
    if x <= 0.999:
        # arccos(−x) is off by about EPS/√(1 − x²) < 25 EPS, and at a maximum only its square counts.
        assert rotation.step_angle(1.0, x, np.arccos(-x)) >= bound * (1 - 8 * EPS)


@given(st.floats(1e-6, 1e3), angles)
def test_a_cosine_certifies_no_more_than_there_is(x, phi):
    """R3: the least C/n is at most the true one; the cosine's absolute error EPS counts as EPS/sin θ."""
    cosine = np.clip(rotation.adjacent_cosine(1.0, x, phi), -1, 1)
    least = rotation.least_update_ratio(cosine)
    assert least <= x + 8 * EPS / max(least, 1e-9) + 4e-8 * (least < 1e-7)


@given(st.floats(0, 0.9), angles, st.integers(1, 30))
def test_series_within_its_remainder(x, phi, terms):
    """R3."""
    value, remainder = rotation.turn_series(x, phi, terms)
    # The terms sum to at most −ln(1 − x) ≤ 2.4 in size; k·φ is rounded, to k·φ·EPS/2.
    assert abs(value - rotation.step_angle(1.0, x, phi)) <= remainder * (1 + 1e-9) + 2.4 * terms * 4 * EPS


@given(steps(), steps())
def test_turns_slower_agrees_with_the_turns(first, second):
    """R7: the criterion without A1 and A2."""
    assume(all(1e-100 < x < 1e100 for x in (*first[:2], *second[:2])))
    a, b = rotation.step_angle(*first), rotation.step_angle(*second)
    assume(abs(a - b) > 1e-9 * max(a, b) and max(a, b) < np.pi - 1e-6)
    assert rotation.turns_slower(*first, *second) == (a < b)


def test_spread_of_norms():
    """R6: quadrature against a plain sum over quantiles of the lognormal law."""
    from statistics import NormalDist

    result = rotation.lognormal_turn(39.96, 45.58, 1.0, np.pi / 2)
    s = np.sqrt(np.log1p((45.58 / 39.96) ** 2))
    z = np.array([NormalDist().inv_cdf((i + 0.5) / 20_000) for i in range(20_000)])
    plain = np.arctan2(1.0, 39.96 * np.exp(s * z - s**2 / 2)).mean()
    assert abs(result.mean_turn / plain - 1) < 1e-3
    assert result.mean_turn > 2 * result.turn_at_mean
    assert abs(result.harmonic_mean - 17.366) < 1e-3


@given(st.floats(1e-3, 1e3), st.floats(0.01, 1.5), st.floats(1e-2, 1e2), st.floats(1e-3, 1e3))
def test_spread_norms_turn_more_at_a_right_angle(mean, spread, ratio, scale):
    """R6: atan(C/n) is convex in n, so by Jensen the mean turn exceeds the turn at the mean; and only ratios count.

    The quadrature gives the mean norm itself to 1e-6 over these spreads."""
    result = rotation.lognormal_turn(mean, spread * mean, ratio * mean, np.pi / 2)
    assert result.mean_turn >= result.turn_at_mean * (1 - 1e-6)
    assert result.harmonic_mean == pytest.approx(mean / (1 + spread**2), rel=1e-12)
    scaled = rotation.lognormal_turn(scale * mean, scale * spread * mean, scale * ratio * mean, np.pi / 2)
    assert scaled.mean_turn == pytest.approx(result.mean_turn, rel=1e-9)


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row.model} {row.tokens}")
def test_published_cosines(row):
    """R5 and PAPER.md's table: within .05."""
    assert abs(predicted_cosine(row) - row.cosine) <= 0.05


@given(steps())
def test_float32_is_rounded_once(step):
    n, C, phi = (np.float32(x) for x in step)
    assume(np.isfinite(n) and np.isfinite(C) and n > 0 and C > 0 and phi < np.float32(3.1415))
    theta = rotation.step_angle(n, C, phi)
    assert theta.dtype == np.float32
    assert theta == np.float32(rotation.step_angle(float(n), float(C), float(phi)))
    assert rotation.norm_after(n, C, phi).dtype == np.float32


def test_types_and_broadcasting():
    single = np.ones(3, np.float32)
    assert rotation.step_angle(single, 2.0, 1.0).dtype == np.float32
    assert rotation.step_angle(single, np.ones(3), 1.0).dtype == np.float64
    assert rotation.step_angle(np.ones((4, 1)), np.ones(5), 1.0).shape == (4, 5)
    assert isinstance(rotation.step_angle(1, 2, 1), float)


def test_edges():
    assert rotation.step_angle(0, 1, 0.7) == 0.7
    assert rotation.step_angle(1, 0, 0.7) == 0
    assert rotation.step_angle(1e-200, 1e200, 1.0) == 1.0
    assert rotation.step_angle(2.0, 1.0, np.float32(np.pi)) == pytest.approx(0, abs=2e-16)  # float32's π is above π
    assert rotation.step_angle(1e200, 1e191, np.pi / 2) == pytest.approx(1e-9, rel=4 * EPS)  # acos would say 0


FUNCTIONS = [
    rotation.step_angle,
    rotation.norm_after,
    rotation.adjacent_cosine,
    rotation.adjacent_cosine_deficit,
    rotation.turn_slopes,
]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        ((float("nan"), 1, 1), "norm", "nan"),
        ((1, float("inf"), 1), "update", "inf"),
        ((1, -2.5, 1), "update", "-2.5"),
        ((-1, 1, 1), "norm", "-1.0"),
        ((1, 1, 3.2), "angle", "3.2"),
        ((1, 1, -0.1), "angle", "-0.1"),
        ((0, 0, 1), "norm", "0.0"),
        ((2, 2, np.pi), "norm", "2.0"),
        (([1, 2], [1, -7], 1), "update", "-7.0"),
        (("a", 1, 1), "norm", "'a'"),
        (([1, 2], [1, 2, 3], 1), "norm", "(2,)"),
    ],
)
def test_bad_steps_are_named(function, arguments, name, value):
    with pytest.raises(ValueError) as error:
        function(*arguments)
    assert name in str(error.value) and value in str(error.value)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: rotation.turn_bound(1, 2), ("update", "2.0")),
        (lambda: rotation.turn_bound(0, 0), ("norm", "0.0")),
        (lambda: rotation.least_update_ratio(1.5), ("cosine", "1.5")),
        (lambda: rotation.ratio_bounds(1, 2, 1, 1), ("norm_t", "2.0")),
        (lambda: rotation.turn_series(1.0, 1, 3), ("ratio", "1.0")),
        (lambda: rotation.turn_series(0.5, 1, 0), ("terms", "0")),
        (lambda: rotation.turns_slower(1, 0, 1, 1, 1, 1), ("update_v", "0.0")),
        (lambda: rotation.lognormal_turn(1, 0, 1, 1), ("std", "0.0")),
    ],
)
def test_other_bad_input_is_named(call, words):
    with pytest.raises(ValueError) as error:
        call()
    assert all(word in str(error.value) for word in words)
