"""Angles between vectors, against 80 digits, from 1e-15 to π."""

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from theory.rotation import step_angle
from theory.vectors import angle_between

EPS = np.finfo(float).eps


def exact_angle(a, b):
    with mpmath.workdps(200):
        a, b = ([mpmath.mpf(float(x)) for x in vector] for vector in (a, b))
        aa, ab = mpmath.fdot(a, a), mpmath.fdot(a, b)
        across = [aa * y - ab * x for x, y in zip(a, b, strict=True)]
        return mpmath.atan2(mpmath.sqrt(mpmath.fdot(across, across)), mpmath.sqrt(aa) * ab)


@given(
    st.integers(0, 2**32 - 1), st.integers(2, 40), st.floats(-15, 1), st.integers(-150, 150), st.sampled_from([1, -1])
)
def test_relative_accuracy(seed, width, decade, scale, sign):
    rng = np.random.default_rng(seed)
    a = rng.standard_normal(width) * 10.0**scale
    b = sign * (a + 10.0**decade * 10.0**scale * rng.standard_normal(width))
    truth = exact_angle(a, b)
    # Twofold arithmetic leaves r good to 2^-100; what remains is one root, one product and one atan2.
    assert abs(angle_between(a, b) - truth) <= 6 * EPS * truth


@given(st.integers(0, 2**32 - 1), st.floats(1e-3, 1e3))
def test_agrees_with_the_step_formula(seed, ratio):
    """R1 on real vectors: h + Δ is rounded to half an ulp a coordinate, which turns it by at most EPS."""
    rng = np.random.default_rng(seed)
    h, delta = rng.standard_normal((2, 24))
    delta *= ratio
    theta = step_angle(np.linalg.norm(h), np.linalg.norm(delta), angle_between(h, delta))
    conditioning = np.linalg.norm(delta) / np.linalg.norm(h + delta) + 1
    assert abs(theta - angle_between(h, h + delta)) <= 16 * EPS * conditioning


def test_shapes_and_types():
    a = np.ones((3, 1, 5), np.float32)
    assert angle_between(a, np.ones((4, 5), np.float32)).shape == (3, 4)
    assert angle_between(a, a).dtype == np.float32
    assert angle_between([1, 0], [0, 1]) == np.pi / 2
    assert angle_between([1, 0], [-1, 0]) == np.pi
    assert angle_between([3.0], [-2.0]) == np.pi


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        ([0, 0], [1, 0], ("a", "zero")),
        ([1, 0], [0, 0], ("b", "zero")),
        ([1, float("nan")], [1, 0], ("a", "nan")),
        ([1, 2, 3], [1, 2], ("a", "(3,)")),
        ([1], [1, 2], ("b", "2")),
        (1.0, [1, 2], ("a", "()")),
    ],
)
def test_bad_vectors_are_named(a, b, words):
    with pytest.raises(ValueError) as error:
        angle_between(a, b)
    assert all(word in str(error.value) for word in words)
