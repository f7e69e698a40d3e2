"""Proofs about many steps (D1-D7)."""

from __future__ import annotations

from sympy import Rational, symbols

from theory.kernel import AngleDerivative, Derivative, Growth, Identity, NonZero, Proof, SameSign, Sign
from theory.proofs_rotation import BY_NORM, BY_TURN, LENGTH, TURN, TURNING, C, N, c, n, p, q, s, t

# Two tokens that get the same update: text's norm, and how much larger the visual one is.
n_t, gap = symbols("n_t g")
n_v = n_t + gap
PAIR = {"text norm": n_t, "norm gap": gap, "update": C}


def squared(norm):
    """‖h + Δ‖² for a token of this norm."""
    return norm**2 + 2 * norm * C * c + C**2


def fate_of_a_gap() -> Proof:
    A, H = (n_v + n_t) / 2, 2 * n_v * n_t / (n_v + n_t)
    return Proof(
        "D1",
        "order, squared gap and ratio of two norms after one shared step",
        positive=PAIR,
        steps=(
            SameSign("the norm grows iff c > −C/(2n)", squared(n_t) - n_t**2, c + C / (2 * n_t), 2 * n_t * C),
            SameSign("order is kept iff c > −A/C", squared(n_v) - squared(n_t), c + A / C, gap * 2 * C),
            SameSign(
                "the squared gap grows iff c > 0",
                squared(n_v) - squared(n_t) - (n_v**2 - n_t**2),
                c,
                2 * C * gap,
            ),
            SameSign(
                "the ratio shrinks iff c > −C/H",
                squared(n_t) * n_v**2 - squared(n_v) * n_t**2,
                c + C / H,
                2 * C * gap * n_v * n_t,
            ),
        ),
    )


def gap_never_grows() -> Proof:
    return Proof(
        "D1",
        "dN/dn = cos θ, so |N_v − N_t| ≤ |n_v − n_t|",
        zero=LENGTH,
        positive=TURNING,
        derivations={"n": BY_NORM},
        steps=(
            Derivative("N by the norm", "n", N, (n + C * c) / N),
            Sign("its square is below 1", 1 - ((n + C * c) / N) ** 2, C**2 * s**2 / N**2),
        ),
        conclusion="Integrate between the two norms.",
    )


def squared_gap_martingale() -> Proof:
    mean_v, mean_t, total = symbols("E_c_v E_c_t Σ")
    return Proof(
        "D2",
        "if E cos φ = 0 the squared gap does not move in expectation",
        zero={"directionless visual updates": mean_v, "directionless text updates": mean_t},
        positive={"text norm": n_t, "norm gap": gap},
        steps=(
            Identity("one step, E N²", n_t**2 + 2 * n_t * C * mean_t + C**2, n_t**2 + C**2),
            Identity(
                "the squared gap after it",
                (n_v**2 + 2 * n_v * C * mean_v + C**2) - (n_t**2 + 2 * n_t * C * mean_t + C**2),
                n_v**2 - n_t**2,
            ),
            Identity(
                "and so on: L steps add ΣC² to both; the squared ratio is then above 1 by",
                (n_v**2 + total**2) / (n_t**2 + total**2) - 1,
                (n_v**2 - n_t**2) / (n_t**2 + total**2),
            ),
            Sign(
                "which is less than before",
                (n_v**2 - n_t**2) / n_t**2 - (n_v**2 - n_t**2) / (n_t**2 + C**2),
                gap * (2 * n_t + gap) * C**2 / (n_t**2 * (n_t**2 + C**2)),
                strict=False,
            ),
        ),
        conclusion="E n_L² = n_0² + ΣC²: the squared gap is invariant, the ratio tends to 1.",
    )


def obtuse_attractor() -> Proof:
    k = symbols("k")  # −cos φ
    fixed = C / (2 * k)
    after = n**2 - 2 * n * C * k + C**2
    return Proof(
        "D3",
        "one fixed obtuse angle, cos φ = −k: every norm converges to C/(2k)",
        zero={"circle": k**2 + s**2 - 1},
        positive={"update": C, "sine": s, "obtuse": k},
        steps=(
            Identity("it is a fixed point", fixed**2 - 2 * fixed * C * k + C**2, fixed**2),
            SameSign("norms below it grow, norms above it shrink", after - n**2, fixed - n, 2 * C * k),
            Identity("dN/dn = cos θ there, −cos 2φ", (fixed - C * k) / fixed, -(k**2 - s**2)),
            Sign("which is above −1", 1 - (k**2 - s**2), 2 * s**2),
            Sign("and below 1", 1 + (k**2 - s**2), 2 * k**2),
        ),
        conclusion="dN/dn = cos θ ∈ (−1, 1) everywhere (D1), so the distance to n* falls; there θ = 2φ − π.",
    )


def theodorus() -> Proof:
    x, r1, r2 = symbols("x r1 r2")
    return Proof(
        "D4",
        "the spiral of Theodorus between two telescoping sums; sin θ = 1/√(x + 1), tan θ = 1/√x, x = n²/C²",
        zero=TURN | {"r1² = x + 1": r1**2 - x - 1, "r2² = x + 2": r2**2 - x - 2},
        positive={"sine": q, "r1": r1, "r2": r2},
        derivations={"θ": BY_TURN},
        steps=(
            Growth("θ > sin θ", "θ", t - q, {t: 0, p: 1, q: 0}, ((1 - p) ** 2 + q**2) / 2),
            Sign(
                "1/√(x + 1) > 2(√(x + 2) − √(x + 1))",
                1 / r1 - 2 * (r2 - r1),
                1 / (r1 * (r1 + r2) ** 2),
            ),
        ),
        conclusion="Sum over x = a, a + 1, …: Θ_L ≥ 2(√(a + L + 1) − √(a + 1)).",
    )


def theodorus_above() -> Proof:
    x, r, up, down = symbols("x r r_up r_down")
    half = Rational(1, 2)
    return Proof(
        "D4",
        "the upper sum",
        zero={"r²": r**2 - x, "r_up²": up**2 - x - half, "r_down²": down**2 - x + half},
        positive={"turn": t, "sine": q, "r": r, "r_up": up, "r_down": down},
        derivations={"θ": BY_TURN},
        steps=(
            Growth("tan θ > θ, as sin θ > θ cos θ", "θ", q - t * p, {t: 0, p: 1, q: 0}, t * q),
            Sign(
                "1/√x ≤ 2(√(x + ½) − √(x − ½))",
                2 * (up - down) - 1 / r,
                (up - down) ** 2 / ((2 * r + up + down) * r * (up + down)),
                strict=False,
            ),
        ),
        conclusion="Sum over x = a, a + 1, …: Θ_L ≤ 2(√(a + L − ½) − √(a − ½)) for a > ½.",
    )


def spiral() -> Proof:
    turning, growing = symbols("θ' n'")
    return Proof(
        "D4",
        "the continuous limit is a logarithmic spiral; primes are rates along it",
        zero={"turning": turning * n - C * s, "growing": growing - C * c},
        positive={"update": C, "norm": n, "acute": c},
        steps=(
            Sign("the norm grows", growing, C * c),
            Identity("dθ/dn = tan φ/n", turning / growing, (s / c) / n),
        ),
        conclusion="n = n_0 + Cs cos φ and θ = tan φ · ln(n/n_0).",
    )


def cumulative_sandwich() -> Proof:
    r, b1, b2, e1, e2 = symbols("r b1 b2 e1 e2")
    H = 2 * n_v * n_t / (n_v + n_t)
    return Proof(
        "D5",
        "the sandwich of one step survives summation when angles are acute",
        positive=PAIR,
        nonnegative={"acute": c, "first step's slack": e1, "second step's slack": e2},
        steps=(
            Sign("the ratio n_t/n_v rises at every step (D1)", C + c * H, C + c * H),
            Identity(
                "for then n_t/n_v after the step is the larger",
                squared(n_t) * n_v**2 - squared(n_v) * n_t**2,
                gap * (n_v + n_t) * C * (C + c * H),
            ),
            Sign(
                "θ_v ≥ rθ_t at each of two steps adds up",
                (r * b1 + e1) + (r * b2 + e2) - r * (b1 + b2),
                e1 + e2,
                strict=False,
            ),
        ),
        conclusion="R4 at every layer, with r = n_t⁰/n_v⁰ below all lower and n_t^L/n_v^L above all upper bounds.",
    )


def displacement() -> Proof:
    mean, overlap, square, layers, turn_v, turn_t = symbols("E_z X M L θ_v θ_t")
    return Proof(
        "D6",
        "isotropic updates: what is left of the starting direction; and the two effective depths",
        zero={
            "an isotropic update has no mean along h or h_0": mean,
            "X = E⟨h_0, h_L⟩, which stays": overlap - n**2,
            "M = E n_L², which grows by C² a layer": square - n**2 - layers * C**2,
            "θ_v = C/n_v": turn_v * n_v - C,
            "θ_t = C/n_t": turn_t * n_t - C,
        },
        positive={"norm": n, "update": C, "layers": layers, "text norm": n_t, "norm gap": gap},
        steps=(
            Identity("one layer of X", n**2 + C * mean, n**2),
            Identity("one layer of M", n**2 + 2 * n * C * mean + C**2, n**2 + C**2),
            Sign("M is a square", square, n**2 + layers * C**2),
            Identity("cos² between start and end", overlap**2 / (n**2 * square), n**2 / (n**2 + layers * C**2)),
            NonZero("text turns", turn_t, n_t, C),
            Identity("coherent turns add up", layers * turn_v / turn_t, layers * n_t / n_v),
            Identity("diffusing ones add their squares", layers * turn_v**2 / turn_t**2, layers * n_t**2 / n_v**2),
        ),
        conclusion="Exact in the limit of infinite width, where n_L² and ⟨h_0, h_L⟩ concentrate.",
    )


def two_number_chain() -> Proof:
    k, l, z1, z2 = symbols("k l z1 z2")
    return Proof(
        "D7",
        "(n, ⟨h, ĥ_0⟩) moves by two coordinates of the update's direction",
        zero={"ĥ_0 in the basis (ĥ, e₂)": k**2 + l**2 - 1},
        steps=(
            Identity(
                "new norm, squared; (z1, z2, z3…) the direction in that basis",
                (n + C * z1) ** 2 + (C * z2) ** 2 + C**2 * (1 - z1**2 - z2**2),
                n**2 + 2 * n * C * z1 + C**2,
            ),
            Identity("new ⟨h, ĥ_0⟩", (n + C * z1) * k + C * z2 * l, n * k + C * (k * z1 + l * z2)),
            Identity("cosine of ĥ_0 along itself", k * k + l * l, 1),
        ),
        conclusion="By isotropy (z1, z2) has one and the same law whatever (h, ĥ_0): a Markov chain of two numbers.",
    )


def spiral_step() -> Proof:
    return Proof(
        "D4",
        "φ = 90°: the squared norm grows by C² and the turn is arctan(C/n)",
        zero={"right angle": c},
        positive={"update": C},
        derivations={"n": {n: 1}},
        steps=(
            Identity("squared norm", squared(n), n**2 + C**2),
            AngleDerivative("the turn falls with the norm", "n", C, n, -C / (n**2 + C**2)),
        ),
    )


PROOFS = (
    fate_of_a_gap, gap_never_grows, squared_gap_martingale, obtuse_attractor, theodorus, theodorus_above,
    spiral, spiral_step, cumulative_sandwich, displacement, two_number_chain,
)  # fmt: skip
