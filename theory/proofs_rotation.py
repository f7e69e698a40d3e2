"""Proofs about one step and about scale (R1-R5, R7, S1-S3)."""

from __future__ import annotations

import sympy as sp
from sympy import Rational, symbols

from theory.kernel import AngleDerivative, Derivative, Growth, Identity, NonZero, Proof, SameSign, Sign

n, C, c, s, N = symbols("n C c s N")
# t is the turn θ, p and q its cosine and sine.
t, p, q = symbols("t p q")

CIRCLE = c**2 + s**2 - 1
STEP = {"circle": CIRCLE, "norm after": N**2 - (n + C * c) ** 2 - (C * s) ** 2}
SIZES = {"norm": n, "update": C, "sine": s, "norm after": N}
LENGTH = {"norm after": STEP["norm after"]}
TURNING = {"update": C, "sine": s, "norm after": N}
BY_NORM = {n: 1, N: (n + C * c) / N}
BY_UPDATE = {C: 1, N: (C + n * c) / N}
BY_ANGLE = {c: -s, s: c, N: -n * C * s / N}
TURN = {"turn": p**2 + q**2 - 1}
BY_TURN = {t: 1, p: -q, q: p}


def cot_law() -> Proof:
    u, v = C * s, n + C * c
    other = C**2 / n
    return Proof(
        "R1",
        "the cotangent of the turn is affine in the norm, and inertia follows",
        zero=STEP,
        positive=SIZES,
        derivations={"n": BY_NORM, "C": BY_UPDATE, "φ": BY_ANGLE},
        steps=(
            Identity("norm after the step", N**2, n**2 + 2 * n * C * c + C**2),
            Identity("cot θ = cot φ + n/(C sin φ)", v / u, c / s + n / (C * s)),
            AngleDerivative("the turn by the norm", "n", u, v, -u / N**2),
            Sign("so a larger norm turns less", u / N**2, C * s / N**2),
            AngleDerivative("the turn by the update", "C", u, v, n * s / N**2),
            AngleDerivative("the turn by the angle", "φ", u, v, C * (C + n * c) / N**2),
            Derivative("a second time by the norm", "n", -u / N**2, 2 * u * v / N**4),
            SameSign("convex exactly where v > 0", 2 * u * v / N**4, v, 2 * C * s / N**4),
            Identity(
                "θ(n) + θ(C²/n) has the cosine of φ, up to a factor",
                v * (other + C * c) - u * u,
                c * C * N**2 / n,
            ),
            Identity("and its sine, up to the same factor", u * (other + C * c) + v * u, s * C * N**2 / n),
            Sign("which is positive, so θ(n) + θ(C²/n) = φ", C * N**2 / n, C * N**2 / n),
        ),
        conclusion="cot falls on (0, π), so θ_v < θ_t ⇔ cot φ_v + n_v/(C_v sin φ_v) > cot φ_t + n_t/(C_t sin φ_t).",
    )


def tangent_form() -> Proof:
    left, right, d = symbols("n₁ n₂ d")
    return Proof(
        "R2",
        "for every obtuse φ the tangent rises across its pole at n = −C cos φ",
        zero={"n₁ is d left of the pole": left + C * c + d, "n₂ is d right of it": right + C * c - d},
        positive={"update": C, "sine": s, "distance": d},
        steps=(
            NonZero("left of the pole v is not 0", left + C * c, sp.Integer(-1), d),
            NonZero("nor right of it", right + C * c, sp.Integer(1), d),
            Identity("tangent on the left", C * s / (left + C * c), -C * s / d),
            Identity("tangent on the right", C * s / (right + C * c), C * s / d),
            Sign(
                "the larger norm has the larger tangent",
                C * s / (right + C * c) - C * s / (left + C * c),
                2 * C * s / d,
            ),
        ),
        conclusion="while θ falls all the way (R1).",
    )


def tangent_example() -> Proof:
    return Proof(
        "R2",
        "the example C = 5, cos φ = −3/5, sin φ = 4/5, at n = 1, 2 and 4",
        zero={"update": C - 5, "cosine": c + Rational(3, 5), "sine": s - Rational(4, 5)},
        steps=(
            NonZero("n = 1: v = −2", 1 + C * c, sp.Integer(-1), sp.Integer(2)),
            NonZero("n = 2: v = −1", 2 + C * c, sp.Integer(-1), sp.Integer(1)),
            NonZero("n = 4: v = 1", 4 + C * c, sp.Integer(1), sp.Integer(1)),
            Identity("tan θ(1)", C * s / (1 + C * c), sp.Integer(-2)),
            Identity("tan θ(2)", C * s / (2 + C * c), sp.Integer(-4)),
            Identity("tan θ(4)", C * s / (4 + C * c), sp.Integer(4)),
        ),
        conclusion="−4 < 4 though 2 < 4, and |−2| < |−4| though 1 < 2: neither tan θ nor |tan θ| is monotone.",
    )


def turn_bounds() -> Proof:
    u, v = C * s, n + C * c
    return Proof(
        "R3",
        "what C/n bounds, and what a measured cosine certifies",
        zero=STEP,
        positive={"norm": n, "update": C, "norm after": N},
        nonnegative={"acute": c},
        steps=(
            Identity("sine rule: sin θ = (C/n) sin(φ − θ)", u / N, C / n * (s * v / N - c * u / N)),
            Identity(
                "distance from the bound",
                (v / N) ** 2 - (1 - C**2 / n**2),
                C**2 * (C + n * c) ** 2 / (n**2 * N**2),
            ),
            Sign(
                "cos²θ ≥ 1 − C²/n², with equality iff c = −C/n",
                (v / N) ** 2 - 1 + C**2 / n**2,
                C**2 * (C + n * c) ** 2 / (n**2 * N**2),
                strict=False,
            ),
            Sign(
                "for acute φ, cos²θ (n² + C²) ≥ n²",
                v**2 * (n**2 + C**2) - n**2 * N**2,
                C**2 * (n**2 * c**2 + 2 * n * C * c + C**2 * c**2),
                strict=False,
            ),
        ),
        conclusion="For C < n, v > 0 and θ ≤ arcsin(C/n); a cosine alone certifies C/n ≥ sin θ and no more.",
    )


def ratio_sandwich() -> Proof:
    return Proof(
        "R4",
        "Nθ falls with n and (n + Cc)θ rises: their derivatives are θ cos θ − sin θ and θ − sin θ cos θ",
        zero=TURN,
        positive={"turn": t, "sine of the turn": q},
        derivations={"θ": BY_TURN},
        steps=(
            Growth("sin θ > θ cos θ", "θ", q - t * p, {t: 0, p: 1, q: 0}, t * q),
            Growth("θ > sin θ cos θ", "θ", t - p * q, {t: 0, p: 1, q: 0}, 2 * q**2),
        ),
        conclusion="dN/dn = cos θ and dθ/dn = −sin θ/N (R1); integrate from n_t to n_v and divide.",
    )


def acute_ratio() -> Proof:
    excess = symbols("e")
    return Proof(
        "R4",
        "for acute φ, nθ rises with n, and the simpler bound n_t/n_v follows",
        zero={"sine rule (R3)": n * s - N * (s * p - c * q), "e = θ − sin θ cos θ": excess - t + p * q},
        positive={"sine": s, "norm after": N, "θ > sin θ cos θ, proved above": excess},
        nonnegative={"acute": c},
        steps=(
            Identity("the cot law again", n / N, p - q * c / s),
            Sign("d(nθ)/dn = θ − (n/N) sin θ", t - n / N * q, excess + q**2 * c / s),
        ),
        conclusion="n_v θ_v > n_t θ_t.",
    )


def stable_cosine() -> Proof:
    u, v = C * s, n + C * c
    return Proof(
        "R5",
        "1 − cos θ without cancellation",
        zero=LENGTH,
        positive=TURNING,
        steps=(
            NonZero("N + v ≠ 0 since u ≠ 0", N + v, N - v, u**2),
            Identity("1 − cos θ", 1 - v / N, u**2 / (N * (N + v))),
        ),
        conclusion="cos θ = v/N.",
    )


def relaxed_assumptions() -> Proof:
    a, b, slack = symbols("a b δ")
    return Proof(
        "R7",
        "unequal updates can reverse the order, and exactly when",
        positive={"excess": slack},
        zero={"visual is relatively smaller": a - b - slack},
        steps=(
            Sign("at 90°, cot θ = n/C: the smaller n/C turns more", a - b, slack),
            Sign("n_t = 1.08, C_t = 1 against n_v = 39.96, C_v = 40", Rational(27, 25) - Rational(999, 1000),
                 Rational(81, 1000)),
        ),
        conclusion="So the visual token turns more although its norm is 37 times the text token's.",
    )  # fmt: skip


def branch_invariance() -> Proof:
    h = symbols("h1:5")
    r, scaled, alpha, beta, mean = symbols("r R α β μ")
    return Proof(
        "S1",
        "normalisation forgets scale (and LayerNorm a shift), written for four coordinates",
        zero={"‖h‖": r**2 - sum(x**2 for x in h), "mean": 4 * mean - sum(h), "R = αr": scaled - alpha * r},
        positive={"length": r, "scale": alpha},
        steps=(
            Identity("R = ‖αh‖", scaled**2, sum((alpha * x) ** 2 for x in h)),
            Sign("which is a length", scaled, alpha * r),
            *(Identity(f"coordinate {i + 1}", alpha * x / scaled, x / r) for i, x in enumerate(h)),
            Identity("the mean of αh + β1", sum(alpha * x + beta for x in h) / 4, alpha * mean + beta),
            Identity("centring removes β", alpha * h[0] + beta - (alpha * mean + beta), alpha * (h[0] - mean)),
        ),
        conclusion="A branch F(LN(h)) is a function of LN(h), attention included. A second branch reads αh + a.",
    )


def epsilon_breaks_scale() -> Proof:
    x, y, d, e = symbols("x y d e")
    return Proof(
        "S2",
        "ε changes a rescaled token by at most half of |ε/(ασ)² − ε/σ²|",
        zero={"root of 1 + x": (1 + d) ** 2 - 1 - x, "root of 1 + y": (1 + e) ** 2 - 1 - y},
        nonnegative={"first root is at least 1": d, "second root is at least 1": e},
        steps=(
            Sign("first root", 1 + d, 1 + d),
            Sign("second root", 1 + e, 1 + e),
            Sign("their sum", 2 + d + e, 2 + d + e),
            Identity(
                "difference of ρ = 1/√(1 + x)",
                1 / (1 + d) - 1 / (1 + e),
                (y - x) / ((1 + d) * (1 + e) * (2 + d + e)),
            ),
            Sign(
                "the denominator is at least 2",
                (1 + d) * (1 + e) * (2 + d + e) - 2,
                3 * d + 3 * e + d**2 + e**2 + 4 * d * e + d**2 * e + d * e**2,
                strict=False,
            ),
        ),
        conclusion="With x = ε/σ², y = ε/(ασ)²: |ρ(ασ) − ρ(σ)| ≤ ε|α⁻² − 1|/(2σ²).",
    )


def centred_view() -> Proof:
    M, W = symbols("M W")
    return Proof(
        "S3",
        "a constant part M = k²D hides a turn that LayerNorm sees in full",
        positive={"constant part, squared": M, "centred part, squared": W},
        steps=(
            Identity("LN's view: Δ ⊥ w of w's own size, cos²", W**2 / (W * 2 * W), Rational(1, 2)),
            Identity("full space, cos²", (M + W) ** 2 / ((M + W) * (M + 2 * W)), (M + W) / (M + 2 * W)),
            Sign(
                "the full cosine is the larger",
                (M + W) / (M + 2 * W) - Rational(1, 2),
                M / (2 * (M + 2 * W)),
            ),
        ),
        conclusion="The larger M, the nearer the full cosine to 1; LN's view stays at 1/√2.",
    )


PROOFS = (
    cot_law, tangent_form, tangent_example, turn_bounds, ratio_sandwich, acute_ratio, stable_cosine,
    relaxed_assumptions, branch_invariance, epsilon_breaks_scale, centred_view,
)  # fmt: skip
