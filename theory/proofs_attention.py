"""Proofs about attention's signal and noise (A1-A5)."""

from __future__ import annotations

from itertools import product

from sympy import symbols

from theory.kernel import Derivative, Identity, Proof, SameSign, Sign

n_t, gap, C, n = symbols("n_t g C n")
n_v = n_t + gap


def symmetric_turns() -> Proof:
    S, x, y, z, cq, sq, ck, sk = symbols("S x y z cos_q sin_q cos_k sin_k")
    # q' = cos θ_q q ± sin θ_q w_q and k' alike; a symmetric law is a mixture of such pairs of signs.
    mean = sum(
        cq * ck * S + e * sq * ck * y + f * cq * sk * x + e * f * sq * sk * z for e, f in product((1, -1), repeat=2)
    )
    return Proof(
        "A1",
        "directionless turns shrink a similarity by cos θ_q cos θ_k; so the slower key keeps more",
        positive={
            "similarity": S,
            "cosine of the query's turn": cq,
            "by how much the slower key's cosine is larger": ck,
        },
        steps=(
            Identity("mean over the signs of both directions", mean / 4, cq * ck * S),
            Sign("more cosine of the key's turn, more signal", cq * S * ck, cq * S * ck),
        ),
        conclusion="E[q'·k'] = cos θ_q cos θ_k q·k: under A3 alone inertia protects the signal.",
    )


def drifting_step() -> Proof:
    R, cs, ss, cm, sm, cd, sd = symbols("R cos_* sin_* cos_m sin_m cos_d sin_d")
    ca, sa, kappa, ct, st = symbols("cos_a sin_a κ cos_θ sin_θ")

    def gain(cosine, sine):
        return R * (cosine * cs + sine * ss)

    # θ_t = m + d and θ_v = m − d: mean and half difference of the two turns.
    text, visual = (gain(cm * cd - e * sm * sd, sm * cd + e * cm * sd) for e in (1, -1))
    return Proof(
        "A2",
        "E cos = R cos(θ − θ*), and imbalance hurts iff the mean of the turns is below θ*",
        zero={"R cos θ*": R * cs - ca, "R sin θ*": R * ss - kappa * sa},
        positive={"amplitude": R, "sine of the half difference": sd},
        steps=(
            Identity("one step toward the target", ca * ct + kappa * sa * st, R * (ct * cs + st * ss)),
            SameSign("S_bal − S_imb and sin(θ* − mean)", text - visual, ss * cm - cs * sm, 2 * R * sd),
        ),
        conclusion="With a positive text factor: S_imb < S_bal ⇔ (θ_v + θ_t)/2 < θ*.",
    )


def geodesic() -> Proof:
    cA, sA, cB, sB = symbols("cos_A sin_A cos_B sin_B")
    psi, turn_t, turn_v = symbols("ψ_0 Θ_t Θ_v")
    return Proof(
        "A2",
        "meeting on a geodesic: A = ψ_0 − (3Θ_t + Θ_v)/2, B = (Θ_t − Θ_v)/2",
        steps=(
            Identity("cos(ψ_0 − 2Θ_t) − cos(ψ_0 − Θ_t − Θ_v)", (cA * cB + sA * sB) - (cA * cB - sA * sB), 2 * sA * sB),
            Identity("A − B", (psi - (3 * turn_t + turn_v) / 2) - (turn_t - turn_v) / 2, psi - 2 * turn_t),
            Identity("A + B", (psi - (3 * turn_t + turn_v) / 2) + (turn_t - turn_v) / 2, psi - turn_t - turn_v),
        ),
        conclusion="S_bal − S_imb = 2 sin(ψ_0 − (3Θ_t + Θ_v)/2) sin((Θ_t − Θ_v)/2).",
    )


def many_layers() -> Proof:
    k, s2, G, W, m, L, Y = symbols("k s² G W m L Y")
    A, H = (n_v + n_t) / 2, 2 * n_v * n_t / (n_v + n_t)
    peak = C * (1 - m**2) * k / (m * s2)

    def along(norm):
        return norm * k + G

    def length(norm):
        return norm**2 + 2 * norm * G * k + G**2 + W

    return Proof(
        "A3",
        "q(n) peaks at n_c whatever L, and imbalance hurts iff G(1 − n_c/A) + cos a (H − n_c) > 0; k = cos a",
        zero={
            "sine of the target angle": k**2 + s2 - 1,
            "displacement": G - L * C * m,
            "spread": W - L * C**2 * (1 - m**2),
            "length": Y**2 - n**2 - 2 * n * G * k - G**2 - W,
        },
        positive={
            "text norm": n_t, "norm gap": gap, "sine": s2, "drift": m, "displacement": G, "length": Y,
        },
        nonnegative={"target not behind": k},
        derivations={"n": {n: 1, Y: (n + G * k) / Y}},
        steps=(
            Derivative("slope of q", "n", along(n) / Y, (k * W - n * G * s2) / Y**3),
            SameSign("it changes sign at n_c", (k * W - n * G * s2) / Y**3, peak - n, G * s2 / Y**3),
            Sign("q(n_v) is positive, and q(n_t) likewise", along(n_v), n_t * k + gap * k + G),
            SameSign(
                "q(n_t)² > q(n_v)²",
                along(n_t) ** 2 * length(n_v) - along(n_v) ** 2 * length(n_t),
                G * (1 - peak / A) + k * (H - peak),
                gap * 2 * A * G * s2,
            ),
        ),
        conclusion="For cos a ≥ 0 and m > 0 both q are positive, so the squares decide.",
    )  # fmt: skip


def noise() -> Proof:
    cq, sq, sk, free, V = symbols("cos²_q sin²_q sin²_k f V")
    variance = (cq * sk + sq * (1 - sk)) / free + sq * sk * (free - 1) / free**2
    return Proof(
        "A4",
        "noise of a fixed orthogonal pair, f = d − 1; squared cosines and sines",
        zero={"uniform keys: d equal variances V sum to 1": (free + 1) * V - 1},
        positive={"directions": free},
        derivations={"sin²θ_k": {sk: 1}},
        steps=(
            Derivative("by the key's turn", "sin²θ_k", variance, (cq * free - sq) / free**2),
            SameSign("rising iff tan²θ_q < d − 1", (cq * free - sq) / free**2, cq * free - sq, 1 / free**2),
            Identity("a uniform key's noise", V, 1 / (free + 1)),
        ),
        conclusion="A slower key means less noise, unless the query has turned to within 1/√(d − 1) of 90°.",
    )


def softmax_mass() -> Proof:
    X, M, x, y, P = symbols("X M x y P")
    return Proof(
        "A5",
        "bounds on the softmax mass of the relevant key",
        positive={"competing mass": X, "its mean": M, "symmetric factor": y, "x = e^{λS}/N": x},
        nonnegative={"λS ≤ ln N": 1 - x},
        steps=(
            Sign(
                "Jensen: 1/(1 + X) above its tangent",
                1 / (1 + X) - (1 / (1 + M) - (X - M) / (1 + M) ** 2),
                (X - M) ** 2 / ((1 + X) * (1 + M) ** 2),
                strict=False,
            ),
            Sign(
                "two mirror-image draws average at most ½ while λS ≤ ln N",
                1 - x / (x + y) - x * y / (1 + x * y),
                (1 - x) * (1 + x) * y / ((x + y) * (1 + x * y)),
                strict=False,
            ),
            Identity("p ≤ 1 if it is the argmax, ≤ ½ if not", P + (1 - P) / 2, (1 + P) / 2),
        ),
        conclusion="E p ≥ 1/(1 + N ₀F₁ e^{−λS}); E p ≤ ½ if λS ≤ ln N; E p ≤ ½(1 + F_d(S)^N) always.",
    )


PROOFS = (symmetric_turns, drifting_step, geodesic, many_layers, noise, softmax_mass)
