"""Proofs about LayerNorm, compensation, optimisers and bf16 (N1, N2, G1-G4, P1)."""

from __future__ import annotations

from sympy import Rational, integrate, symbols

from theory.kernel import Derivative, Identity, Proof, Sign

g, sigma, eps, s, kappa = symbols("g σ ε s κ")


def jacobian() -> Proof:
    h = symbols("h1:4")
    w = symbols("w1:4")
    mean = sum(h) / 3
    x = [(value - mean) / s for value in h]

    def entry(i, j):
        return g / s * (int(i == j) - Rational(1, 3) - x[i] * x[j] / 3)

    back = [sum(w[i] * entry(i, j) for i in range(3)) for j in range(3)]
    return Proof(
        "N1",
        "LayerNorm's Jacobian with a scalar gain, written for three coordinates",
        zero={"s² = σ² + ε": 3 * s**2 - sum((value - mean) ** 2 for value in h) - 3 * eps},
        positive={"s": s},
        derivations={
            f"h_{j + 1}": {symbol: int(i == j) for i, symbol in enumerate(h)} | {s: x[j] / 3} for j in range(3)
        },
        steps=(
            *(
                Derivative(f"∂y_{i + 1}/∂h_{j + 1}", f"h_{j + 1}", g * x[i], entry(i, j))
                for i, j in ((0, 0), (0, 1), (2, 1))
            ),
            Identity("a constant vector is invisible", sum(entry(0, j) for j in range(3)), 0),
            Identity("a step along the gradient has no mean", sum(back), 0),
            Identity(
                "its radial part is ε/(σ² + ε) of what a free direction keeps",
                sum(back[j] * x[j] for j in range(3)),
                g / s * (eps / s**2) * sum(w[i] * x[i] for i in range(3)),
            ),
        ),
        conclusion="Orthogonal to 1 and x̃ the Jacobian is g/s: the spectral norm for D ≥ 3. For ε = 0, Jᵀw ⊥ h.",
    )


def two_coordinates() -> Proof:
    h1, h2 = symbols("h1 h2")
    x = (h1 - h2) / (2 * s)
    return Proof(
        "N1",
        "at D = 2 and ε = 0 nothing passes: x̃ = (x, −x)",
        zero={"s is half the difference": 4 * s**2 - (h1 - h2) ** 2},
        positive={"s": s},
        steps=(
            Identity("on the diagonal, g x²/2s takes away all that 1/D left", g / s * x**2 / 2, g / (2 * s)),
            Identity("and off it", g / s * x * (-x) / 2, -g / (2 * s)),
        ),
        conclusion="J = (g/s)(I − 11ᵀ/2 − x̃x̃ᵀ/2) = 0.",
    )


def output_norm() -> Proof:
    h = symbols("h1:4")
    mean = sum(h) / 3
    y2 = sum((g * (value - mean) / s) ** 2 for value in h)
    T, D = symbols("T D")
    return Proof(
        "N2",
        "‖y‖² = g² D σ²/(σ² + ε), for every token",
        zero={
            "variance": 3 * sigma**2 - sum((value - mean) ** 2 for value in h),
            "s² = σ² + ε": s**2 - sigma**2 - eps,
            "targeted gain": g**2 * D - T**2,
        },
        positive={"s": s},
        steps=(
            Identity("three coordinates", y2, 3 * g**2 * sigma**2 / s**2),
            Identity("at g = T/√D", D * g**2 * sigma**2 / s**2, T**2 * (1 - eps / s**2)),
        ),
    )


def gain_limits() -> Proof:
    x, low, d = symbols("x m d")
    return Proof(
        "N2",
        "a general gain lies between its extremes: |g_i| = min + d_i",
        positive={"smallest": low},
        nonnegative={"above the smallest": d},
        steps=(
            Sign(
                "component by component", ((low + d) * x) ** 2 - (low * x) ** 2, x**2 * d * (2 * low + d), strict=False
            ),
        ),
    )


def compensation_is_no_gradient() -> Proof:
    w, L_w, L_g, L_gw, slope = symbols("w L_w L_g L_gw κ'")
    a, b, lo, hi = Rational(1), Rational(2), Rational(0), Rational(1)
    field_g, field_w = w * (g * w - 3), g * w - 3  # κ = 1/g in the toy loss ½(gw − 3)²
    loop = (
        integrate(field_g.subs(w, lo), (g, a, b)) + integrate(field_w.subs(g, b), (w, lo, hi))
        - integrate(field_g.subs(w, hi), (g, a, b)) - integrate(field_w.subs(g, a), (w, lo, hi))
    )  # fmt: skip
    curl = field_w.diff(g) - field_g.diff(w)
    return Proof(
        "G1",
        "the compensated field (L_g, κ(g) L_w) is the gradient of no function, yet it descends",
        positive={"compensation": kappa},
        derivations={"g": {L_w: L_gw, kappa: slope}},
        steps=(
            Derivative("curl, first term", "g", kappa * L_w, slope * L_w + kappa * L_gw),
            Identity("curl", slope * L_w + kappa * L_gw - L_gw, slope * L_w + (kappa - 1) * L_gw),
            Identity("the toy's curl", curl, 3 + w - 2 * g * w),
            Identity(
                "circulation around [1, 2] × [0, 1] is the integral of the curl",
                loop,
                integrate(curl, (g, a, b), (w, lo, hi)),
            ),
            Identity("which is not 0", loop, 2),
            Sign("it descends: its product with the gradient", L_g**2 + kappa * L_w**2, L_g**2 + kappa * L_w**2, False),
        ),
        conclusion="κL_w = 0 iff L_w = 0: the same stationary points. SGD with it is SGD with upstream rate × κ.",
    )  # fmt: skip


def adam_invariance() -> Proof:
    m, r, scaled, R, low, d = symbols("m r R' R w δ")
    return Proof(
        "G2",
        "Adam divides by √v, so a constant κ cancels; with ε it becomes ε/κ",
        zero={"√(κ²v) = κ√v": scaled - kappa * r, "w = 1 − δ": low - 1 + d},
        positive={"compensation": kappa, "√v": r, "ε": eps, "1 − δ": low},
        steps=(
            Sign("compensated root", scaled, kappa * r),
            Identity("ε = 0: first moment κm", kappa * m / scaled, m / r),
            Identity("with ε", kappa * m / (scaled + eps), m / (r + eps / kappa)),
            Identity("varying κ: what a root smaller by 1 − δ changes", m / (r * low) - m / r, m / r * d / low),
            Identity("both parts at most Rδ/(1 − δ)", R * d / low + R * (1 / low - 1), 2 * R * d / low),
        ),
        conclusion="R bounds Σ a_i|g_i|/√v; κ_i = κ(1 + δ_i) moves Σ a_i g_i by at most δR√v and √v by a factor 1 ± δ.",
    )


def clipping() -> Proof:
    share, r = symbols("s r")
    return Proof(
        "G3",
        "clipping to a fixed norm after upstream has been multiplied by κ",
        zero={"new norm over old": r**2 - (1 - share) - share * kappa**2},
        positive={"new norm": r},
        steps=(
            Identity(
                "the clipped parts make up the same norm",
                share * (kappa / r) ** 2 + (1 - share) * (1 / r) ** 2,
                1,
            ),
            Identity("their ratio is κ", (kappa / r) / (1 / r), kappa),
        ),
        conclusion="upstream × κ/√(1 − s + sκ²), the rest × 1/√(1 − s + sκ²).",
    )


def non_uniform_gain() -> Proof:
    mean, d, floor, at_floor = symbols("mean excess δ κ_δ")
    return Proof(
        "G4",
        "compensation by the mean amplifies the largest gain by max/mean; below δ it restores mean/δ",
        zero={"κ = 1/mean": kappa * mean - 1, "κ_δ = 1/δ": at_floor * floor - 1},
        positive={"mean |g|": mean, "floor": floor},
        nonnegative={"largest above mean": d},
        steps=(
            Identity("largest component", (mean + d) * kappa, (mean + d) / mean),
            Sign("at least 1", (mean + d) * kappa - 1, d / mean, strict=False),
            Identity("below the floor", mean * at_floor, mean / floor),
        ),
    )


def half_step() -> Proof:
    e, k, u, d = symbols("E k u d")  # E = 2^e, w = E(1 + k/128), the next number at k + 1
    return Proof(
        "P1",
        "half a bf16 step is 2^(e−8), and 2^(e−9) downward from a power of two; E = 2^e",
        positive={"short of half a step": d},
        zero={"update": u - (e / 256 - d)},
        steps=(
            Identity("half the step inside a binade", (e * (1 + (k + 1) / 128) - e * (1 + k / 128)) / 2, e / 256),
            Identity("half the step below a power of two", (e - e / 2 * (1 + Rational(127, 128))) / 2, e / 512),
            Sign("a smaller update is nearer to w than to its neighbour", (e / 128 - u) - u, 2 * d),
        ),
        conclusion="Round to nearest sends w + u back to w; at exactly half a step the even mantissa wins.",
    )


PROOFS = (
    jacobian, two_coordinates, output_norm, gain_limits, compensation_is_no_gradient, adam_invariance,
    clipping, non_uniform_gain, half_step,
)  # fmt: skip
