"""The certified statements, and false ones that have to come back refuted.

The lessons: divide the norm out (x = C/n), prove monotonicity first and certify the edges only, write a square as a
square so that its ball is tight. Boxes: B1 is what the paper's models span.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from flint import arb

from theory.certify import Certificate, certify

NORM_V, NORM_T = (29.0, 72.0), (0.8, 1.4)
LAYERS = 32


@dataclass(frozen=True)
class Statement:
    """`expression > 0` on `box`, filed under a claim; `expected` is what an honest search has to say."""

    claim: str
    name: str
    expression: Callable[..., arb]
    box: Mapping[str, tuple[float, float]]
    expected: Literal["proved", "refuted"] = "proved"
    max_boxes: int = 200_000

    def run(self) -> Certificate:
        return certify(self.expression, self.box, self.max_boxes)


def degrees(low: float, high: float) -> tuple[float, float]:
    """The interval in radians, rounded outward."""
    return math.nextafter(math.radians(low), 0), math.nextafter(math.radians(high), 4)


def _turn(n: arb, C: arb, phi: arb) -> arb:
    return arb.atan2(C * phi.sin(), n + C * phi.cos())


def _square(x: arb) -> arb:
    """The square of a ball, which knows that it is not negative."""
    size_low, size_high = x.abs_lower(), x.abs_upper()
    return (size_low * size_low).union(size_high * size_high)


def _norm_square(x: arb, phi: arb) -> arb:
    """1 + 2x cos φ + x² as (1 − x)² + 4x cos²(φ/2): a sum of what can't be negative."""
    return _square(1 - x) + 4 * x * _square((phi / 2).cos())


def falls_with_norm(x: arb, phi: arb) -> arb:
    return phi.sin() / _norm_square(x, phi)


def product_rises(x: arb, phi: arb) -> arb:
    """(θ − n·u/N²)/x² for acute φ: d(nθ)/dn without the factors that vanish as x = C/n does."""
    s, c = phi.sin(), phi.cos()
    return (arb.atan2(x * s, 1 + x * c) - x * s / _norm_square(x, phi)) / (x * x)


def tangent_falls(n: arb, step: arb) -> arb:
    """The paper's form read literally: tan θ(n) − tan θ(n + step) at C = 5, cos φ = −3/5."""
    return 4 / (n - 3) - 4 / (n + step - 3)


def below_share(share: float, n_v: arb, n_t: arb, C_v: arb, C_t: arb, phi_v: arb, phi_t: arb) -> arb:
    return share * _turn(n_t, C_t, phi_t) - _turn(n_v, C_v, phi_v)


def shared_share(share: float, C: arb, phi: arb) -> arb:
    """B2 after R1: with one C and one φ the worst case is the smallest n_v and the largest n_t."""
    return below_share(share, arb(NORM_V[0]), arb(NORM_T[1]), C, C, phi, phi)


def slower_anyway(n_v: arb, n_t: arb, C_t: arb, ratio: arb, phi_v: arb, phi_t: arb) -> arb:
    """R7 by cotangents: cot θ_v − cot θ_t with C_v = ratio · C_t, each angle chosen freely."""
    return phi_v.cot() + n_v / (ratio * C_t * phi_v.sin()) - phi_t.cot() - n_t / (C_t * phi_t.sin())


def _total_turn(n: arb, C: arb, phi: arb) -> arb:
    """Θ over the layers; the norm's square is kept, and its root taken once a layer."""
    s, c = phi.sin(), phi.cos()
    total = arb(0)
    for _ in range(LAYERS):
        total += arb.atan2(C * s, n + C * c)
        n = (n * n + 2 * n * C * c + C * C).sqrt()
    return total


def cumulative_share(share: float, C: arb, phi: arb) -> arb:
    """Acute angles: Θ falls with the first norm (R1, D1), so the smallest n_v and the largest n_t are the worst."""
    return share * _total_turn(arb(NORM_T[1]), C, phi) - _total_turn(arb(NORM_V[0]), C, phi)


def imbalance(sign: int, n_v: arb, n_t: arb, C: arb, m: arb, k: arb) -> arb:
    """A3's criterion times m sin²a, so that nothing is divided by m: sign +1 hurts, −1 helps."""
    drive, peak = m * (1 - _square(k)), C * (1 - _square(m)) * k
    A, H = (n_v + n_t) / 2, 2 / (1 / n_v + 1 / n_t)
    return sign * (LAYERS * C * m * (drive - peak / A) + k * (drive * H - peak))


def ratio_shrinks(n_v: arb, n_t: arb, C: arb, phi: arb) -> arb:
    return C + phi.cos() * 2 / (1 / n_v + 1 / n_t)


def theodorus_gap(side: int, x: arb) -> arb:
    """x^{5/2} times the slack of D4's bounds at one layer, in terms of x = n²/C²."""
    turn = arb.atan2(arb(1), x.sqrt())
    if side < 0:
        return (turn - 2 / ((x + 2).sqrt() + (x + 1).sqrt())) * x.sqrt()
    half = arb(1) / 2
    return (2 / ((x + half).sqrt() + (x - half).sqrt()) - turn) * x.sqrt()


def epsilon_bound(x: arb, y: arb) -> arb:
    """S2's bound against the change itself, over |y − x|: ½ − 1/(pq(p + q)), p = √(1 + x), q = √(1 + y)."""
    p, q = (1 + x).sqrt(), (1 + y).sqrt()
    return arb(1) / 2 - 1 / (p * q * (p + q))


def noise_slope(turn_q: arb, width: arb) -> arb:
    """d noise/d sin²θ_k over positive factors: cos²θ_q (d − 1) − sin²θ_q (A4)."""
    return _square(turn_q.cos()) * (width - 1) - _square(turn_q.sin())


def clip_shrinks_rest(share: arb, kappa: arb) -> arb:
    """1/√(1 − s + sκ²) is below 1 for κ > 1: the rest of the network is slowed down (G3)."""
    return 1 - 1 / (1 + share * (_square(kappa) - 1)).sqrt()


B1 = {"n_v": NORM_V, "n_t": NORM_T}
SHARED = {"C": (0.25, 4.0), "φ": degrees(30, 150)}
OBTUSE_TO_ACUTE = degrees(45, 135)
DEEP = {"C": (0.5, 2.0), "φ": degrees(60, 90)}
DRIFTING = B1 | {"C": (0.5, 2.0), "m": (0.2, 0.6), "cos a": (0.0, 0.3)}
AIMLESS = B1 | {"C": (0.5, 2.0), "m": (0.0, 0.01), "cos a": (0.2, 0.9)}

STATEMENTS = (
    Statement("R1", "θ falls with n", falls_with_norm, {"x": (1e-4, 1e4), "φ": (1e-3, 3.14)}),
    Statement(
        "R1",
        "θ rises with n",
        lambda x, phi: -falls_with_norm(x, phi),
        {"x": (1e-4, 1e4), "φ": (1e-3, 3.14)},
        "refuted",
    ),
    Statement("R2", "tan θ falls with n", tangent_falls, {"n": (1.0, 3.5), "step": (0.1, 3.0)}, "refuted"),
    Statement("R4", "Nθ falls with n: sin θ > θ cos θ", lambda t: (t.sin() - t * t.cos()) / t**3, {"θ": (0.05, 3.14)}),
    Statement("R4", "nθ rises with n for acute φ", product_rises, {"x": (0.2, 20.0), "φ": (0.1, math.pi / 2)}),
    Statement("R4", "nθ rises for obtuse φ too", product_rises, {"x": (0.2, 20.0), "φ": degrees(90, 170)}, "refuted"),
    Statement("R7", "θ_v < .18 θ_t on B2", partial(shared_share, 0.18), SHARED),
    Statement("R7", "θ_v > .18 θ_t on B2", lambda C, phi: -shared_share(0.18, C, phi), SHARED, "refuted"),
    Statement(
        "R7",
        "θ_v < .18 θ_t on B1, updates and angles of their own",
        lambda n_v, n_t, C, ratio, phi_v, phi_t: below_share(0.18, n_v, n_t, ratio * C, C, phi_v, phi_t),
        B1 | {"C_t": (0.5, 2.0), "C_v/C_t": (0.25, 4.0), "φ_v": OBTUSE_TO_ACUTE, "φ_t": OBTUSE_TO_ACUTE},
        "refuted",
    ),
    Statement(
        "R7",
        "θ_v < θ_t on B1, updates and angles of their own",
        slower_anyway,
        B1 | {"C_t": (0.5, 2.0), "C_v/C_t": (0.25, 4.0), "φ_v": OBTUSE_TO_ACUTE, "φ_t": OBTUSE_TO_ACUTE},
    ),
    Statement("S2", "ε's effect stays below its bound", epsilon_bound, {"x": (1e-9, 10.0), "y": (1e-9, 10.0)}),
    Statement("D1", "the ratio shrinks up to 105°", ratio_shrinks, B1 | {"C": (1.0, 4.0), "φ": degrees(0, 105)}),
    Statement("D1", "and at every angle", ratio_shrinks, B1 | {"C": (1.0, 4.0), "φ": degrees(0, 179)}, "refuted"),
    Statement("D4", "Theodorus, lower bound of a layer", partial(theodorus_gap, -1), {"x": (0.01, 100.0)}),
    Statement("D4", "Theodorus, upper bound of a layer", partial(theodorus_gap, 1), {"x": (0.51, 100.0)}),
    Statement("D5", "Θ_v < .40 Θ_t, 32 layers", partial(cumulative_share, 0.40), DEEP),
    Statement("D5", "Θ_v < .25 Θ_t, 32 layers", partial(cumulative_share, 0.25), DEEP, "refuted"),
    Statement("A3", "imbalance hurts: drift .2–.6", partial(imbalance, 1), DRIFTING, max_boxes=600_000),
    Statement("A3", "imbalance helps: drift at most .01", partial(imbalance, -1), AIMLESS),
    Statement("A3", "imbalance hurts without drift", partial(imbalance, 1), AIMLESS, "refuted"),
    Statement("A4", "a slower key is less noisy", noise_slope, {"θ_q": (0.0, 1.4), "d": (64.0, 4096.0)}),
    Statement("A4", "whatever the query did", noise_slope, {"θ_q": (1.0, 1.57), "d": (64.0, 4096.0)}, "refuted"),
    Statement("G3", "clipping slows the rest", clip_shrinks_rest, {"s": (1e-6, 1.0), "κ": (1.01, 100.0)}),
)


def statements_of(claim: str) -> list[Statement]:
    return [statement for statement in STATEMENTS if statement.claim == claim]
