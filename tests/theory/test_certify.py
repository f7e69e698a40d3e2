"""Certificates: the true ones hold, the false ones meet a real witness, and the search admits its limits."""

import math

import pytest
from flint import arb
from hypothesis import given
from hypothesis import strategies as st

from theory.certificates import STATEMENTS
from theory.certify import ball, certify


@pytest.mark.parametrize("statement", STATEMENTS, ids=lambda s: f"{s.claim}: {s.name}")
def test_statement(statement):
    result = statement.run()
    assert result.status == statement.expected
    if result.status == "proved":
        assert result.margin > 0 and result.witness is None and result.boxes >= 1
    else:
        assert statement.expression(*(arb(x) for x in result.witness.values())) <= 0
        assert all(low <= result.witness[name] <= high for name, (low, high) in statement.box.items())


@pytest.mark.parametrize(
    "statement", [s for s in STATEMENTS if s.expected == "proved"], ids=lambda s: f"{s.claim}: {s.name}"
)
def test_the_reverse_is_refuted(statement):
    reverse = certify(lambda *x: -statement.expression(*x), statement.box)
    assert reverse.status == "refuted"


@given(st.floats(-2, 2), st.floats(-2, 2), st.floats(0.01, 1))
def test_a_parabola_is_decided_rightly(a, b, width):
    """x² + ax + b > 0 on [0, width]: the exact minimum says what has to come out."""
    where = min(max(-a / 2, 0), width)
    least = where**2 + a * where + b
    result = certify(lambda x: x * x + a * x + b, {"x": (0.0, width)}, max_boxes=5000)
    if least > 1e-3:
        assert result.status == "proved" and result.margin <= least
    elif least < -1e-3:
        assert result.status == "refuted"
        x = result.witness["x"]
        assert x * x + a * x + b <= 1e-12


def test_undecided_is_said():
    # 0 is attained: neither positive nor refutable by a midpoint.
    result = certify(lambda x: (x - arb(1) / 3) ** 2, {"x": (0.0, 1.0)}, max_boxes=300)
    assert result.status == "undecided" and result.margin is None and result.witness is None
    assert result.boxes >= 300
    assert certify(lambda x: x - x, {"x": (1.0, 1.0)}).status == "refuted"


@given(st.floats(-1e6, 1e6), st.floats(0, 1e6), st.floats(0, 1))
def test_ball_contains_its_interval(low, width, share):
    inside = min(low + share * width, low + width)
    assert ball(low, low + width).contains(arb(inside))


@pytest.mark.parametrize("interval", [(1.0, 0.0), (0.0, math.inf), (math.nan, 1.0)])
def test_bad_boxes_are_named(interval):
    with pytest.raises(ValueError, match="x = "):
        certify(lambda x: x, {"x": interval})
