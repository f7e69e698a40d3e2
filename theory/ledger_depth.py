"""The ledger's claims about many layers (D1-D7), with their numeric evidence."""

# ruff: noqa: E501 - a claim's sentence and its evidence's sentence stay on one line

from __future__ import annotations

import numpy as np

from theory import depth
from theory.evidence import Claim, Evidence, Outcome, certified, symbolic
from theory.ledger_rotation import EPS, LLAVA_TEXT, LLAVA_VISUAL
from theory.rotation import norm_after
from theory.simulate import Setup, run_chain, run_vectors


def _pairs(count: int, seed: int):
    rng = np.random.default_rng(seed)
    t, C = 10.0 ** rng.uniform(-2, 2, (2, count))
    return t * (1 + 10.0 ** rng.uniform(-1, 2, count)), t, C, rng.uniform(0, np.pi, count)


def _fates() -> Outcome:
    v, t, C, phi = _pairs(100_000, 20)
    fate = depth.fate(v, t, C, phi)
    N_v, N_t = norm_after(v, C, phi), norm_after(t, C, phi)
    squared = (N_v - N_t) * (N_v + N_t) - (v - t) * (v + t)
    scale = v + C
    # Only where a quantity is farther from its boundary than rounding can carry it.
    checks = {
        "order": (fate.order_kept == (N_v > N_t)) | (np.abs(N_v - N_t) < 64 * EPS * scale),
        "squared gap": (fate.squared_gap_grows == (squared > 0)) | (np.abs(squared) < 64 * EPS * scale**2),
        "ratio": (fate.ratio_shrinks == (N_v / N_t < v / t)) | (np.abs(N_v * t - N_t * v) < 64 * EPS * scale**2),
        "gap": np.abs(N_v - N_t) <= (v - t) + 8 * EPS * scale,
    }
    wrong = [name for name, good in checks.items() if not good.all()]
    return Outcome(not wrong, f"100,000 pairs; wrong: {', '.join(wrong) or 'none'}")


def _gap_example() -> Outcome:
    obtuse = np.arccos(-0.9)
    v, t = (norm_after(n, 2.0, obtuse) for n in (2.0, 1.0))
    return Outcome(bool(v < t), f"C = 2, cos φ = −.9 < −A/C: norms 2 and 1 become {v:.2f} and {t:.2f}, order reversed")


def _martingale() -> Outcome:
    runs = [
        run_chain(Setup(norm=n, layers=32, width=256), 40_000, seed) for n, seed in ((LLAVA_VISUAL, 1), (LLAVA_TEXT, 2))
    ]
    squares = [run.final_norm**2 for run in runs]
    gap = squares[0].mean() - squares[1].mean()
    error = np.sqrt(sum(x.var() / len(x) for x in squares))
    expected = LLAVA_VISUAL**2 - LLAVA_TEXT**2
    ratio = np.sqrt(squares[0].mean() / squares[1].mean())
    layers = depth.layers_until_ratio(LLAVA_VISUAL, LLAVA_TEXT, 1, 2)
    passed = abs(gap - expected) < 4 * error and abs(ratio - 7.0) < 0.1
    return Outcome(
        bool(passed),
        f"squared gap {gap:.1f} ± {error:.1f} after 32 layers, {expected:.1f} before; ratio 37.0 → {ratio:.2f}, 2.0 after {layers:.0f}",
    )


def _attractor() -> Outcome:
    phi, starts = np.radians(np.array([100.0, 120.0, 150.0])), np.array([[1e-3], [1.0], [40.0]])
    where = depth.attractor(1.0, phi)
    path = depth.evolve(starts * np.ones(3), np.ones((700, 1)), phi * np.ones((700, 1)))
    error = np.max(np.abs(path.norms[-1] / where.norm - 1))
    turn = np.max(np.abs(path.turns[-1] - where.turn))
    return Outcome(
        error < 1e-9 and turn < 1e-9, f"norms .001 to 40 reach n* to {error:.1e}; turn per layer 2φ − π to {turn:.1e}"
    )


def _not_monotone() -> Outcome:
    path = depth.evolve(np.array([40.0, 1.0]), np.full((200, 1), 1.0), np.radians(np.full((200, 1), 120.0)))
    gap = np.abs(path.norms[:, 0] - path.norms[:, 1])
    return Outcome(gap[-1] < 1e-6, f"φ = 120°: a gap of {gap[0]:.0f} is {gap[-1]:.1e} after 200 layers")


def _theodorus() -> Outcome:
    rng = np.random.default_rng(21)
    inside = True
    for layers in (1, 2, 32, 300):
        bounds = depth.theodorus_bounds(10.0 ** rng.uniform(-2, 3, 2000), 1.0, layers)
        slack = 1 + 8 * EPS * layers
        inside = inside and bool(
            ((bounds.lower <= bounds.total_turn * slack) & (bounds.total_turn <= bounds.upper * slack)).all()
        )
    visual, text = (depth.theodorus_bounds(n, 1.0, 32).total_turn for n in (LLAVA_VISUAL, LLAVA_TEXT))
    return Outcome(
        inside, f"8,000 spirals inside; LLaVA's visual token turns {visual:.3f} rad in 32 layers, text {text:.3f}"
    )


def _spiral() -> Outcome:
    phi, errors = np.radians(70.0), []
    for layers in (1000, 2000):
        path = depth.evolve(1.0, np.full(layers, 2.0 / layers), np.full(layers, phi))
        errors.append(abs(path.turns.sum() - depth.spiral_angle(1.0, 1 + 2 * np.cos(phi), phi)))
    return Outcome(
        1.8 < errors[0] / errors[1] < 2.2,
        f"layers halved in size halve the distance to the spiral: {errors[0]:.1e}, {errors[1]:.1e}",
    )


def _cumulative() -> Outcome:
    rng = np.random.default_rng(22)
    t = 10.0 ** rng.uniform(-1, 1, 5000)
    v = t * (1 + 10.0 ** rng.uniform(-2, 2, 5000))
    C, phi = 10.0 ** rng.uniform(-1, 1, (24, 5000)), rng.uniform(0.01, np.pi / 2, (24, 5000))
    ratio = depth.evolve(v, C, phi).turns.sum(axis=0) / depth.evolve(t, C, phi).turns.sum(axis=0)
    low, high = depth.cumulative_bounds(v, t, C, phi)
    outside = max(np.max(low / ratio), np.max(ratio / high)) - 1
    return Outcome(outside <= 24 * 8 * EPS, f"5,000 paths of 24 layers: outside by {outside:.1e}")


def _cumulative_fails() -> Outcome:
    turns = depth.evolve(np.array([12.0, 1.0]), np.full((2, 1), 25.0), np.full((2, 1), np.arccos(-24 / 25))).turns.sum(
        axis=0
    )
    v, t = np.degrees(turns)
    return Outcome(
        v > t, f"C = 25, cos φ = −24/25, L = 2: the visual token (12) turns {v:.1f}°, the text token (1) {t:.1f}°"
    )


def _displacement() -> Outcome:
    parts, passed = [], True
    for name, norm in (("visual", LLAVA_VISUAL), ("text", LLAVA_TEXT)):
        run = run_chain(Setup(norm=norm, layers=32, width=4096), 20_000, 3)
        expected = depth.isotropic_fate(norm, 1, 32).cosine_to_start
        # E⟨h_0, h_L⟩/(n_0 √E n_L²) is exact; the mean cosine differs by the spread of n_L, of order 1/D.
        exact = (run.final_cosine * run.final_norm).mean() / np.sqrt((run.final_norm**2).mean())
        error = (run.final_cosine * run.final_norm).std() / np.sqrt(20_000) / expected / norm
        passed = passed and abs(exact - expected) < 5 * max(error, 1e-4)
        parts.append(f"{name} {exact:.3f} ({expected:.3f})")
    shallow = depth.effective_depth(LLAVA_VISUAL, LLAVA_TEXT, 32)
    return Outcome(
        bool(passed),
        f"cos to the start, simulated (formula): {', '.join(parts)}; 32 layers are worth {shallow.coherent:.2f} coherent, {shallow.diffusive:.3f} diffusive",
    )


def ks_distance(a, b) -> tuple[float, float]:
    """Two-sample Kolmogorov-Smirnov distance, and its critical value at a level of 1e-4."""
    grid = np.sort(np.concatenate([a, b]))
    distance = np.max(
        np.abs(
            np.searchsorted(np.sort(a), grid, "right") / len(a) - np.searchsorted(np.sort(b), grid, "right") / len(b)
        )
    )
    return float(distance), float(np.sqrt(-np.log(0.5e-4) / 2 * (len(a) + len(b)) / (len(a) * len(b))))


def _chain_is_exact() -> Outcome:
    worst = 0.0
    for mode in ("isotropic", "angle", "drift"):
        setup = Setup(norm=1.5, layers=6, width=12, mode=mode, angle=2.0, drift=0.3, target_cosine=0.2)
        a, b = run_chain(setup, 8000, 4), run_vectors(setup, 8000, 5)
        for x, y in ((a.final_norm, b.final_norm), (a.final_cosine, b.final_cosine)):
            if np.ptp(x) > 1e-9:
                distance, critical = ks_distance(x, y)
                worst = max(worst, distance / critical)
    return Outcome(
        worst < 1,
        f"norms and cosines of (a) and (b) at width 12, three modes: largest KS distance {worst:.0%} of critical",
    )


CLAIMS = (
    Claim(
        "D1", "fate of a gap", "One shared step decides order, gap, squared gap and ratio by the sign of a comparison; the plain gap never grows.",
        "order kept ⇔ c > −A/C; squared gap grows ⇔ c > 0; ratio shrinks ⇔ c > −C/H; |N_v − N_t| ≤ |n_v − n_t|",
        ("one C and one φ for both tokens",), ("contradicts B", "repairs B"),
        (symbolic("D1"), certified("D1"), Evidence("property", "random pairs", _fates)), _gap_example,
    ),
    Claim(
        "D2", "squared gap is a martingale", "If updates have no direction on average, the gap of the squared norms persists exactly and the ratio does not.",
        "E n_L² = n_0² + ΣC²", ("E cos φ = 0 given the state", "equal C"), ("repairs B", "contradicts B"),
        (symbolic("D2"), Evidence("simulated", "LLaVA's norms", _martingale)),
    ),
    Claim(
        "D3", "obtuse attractor", "Under one fixed obtuse angle every norm converges to the same value: no persistence at all.",
        "n* = −C/(2 cos φ), dN/dn = −cos 2φ, turn 2φ − π a layer", ("φ fixed, obtuse", "C fixed"), ("contradicts B",),
        (symbolic("D3"), Evidence("property", "three angles, three starts", _attractor), Evidence("simulated", "a gap that closes", _not_monotone)),
    ),
    Claim(
        "D4", "spiral of Theodorus", "Orthogonal updates make a token walk the spiral of Theodorus; its turn lies between two square-root laws.",
        "2(√(a + L + 1) − √(a + 1)) ≤ Θ_L ≤ 2(√(a + L − ½) − √(a − ½)), a = n_0²/C²", ("φ = 90°", "upper: a > ½"), ("beyond the paper",),
        (symbolic("D4"), certified("D4"), Evidence("property", "random spirals", _theodorus), Evidence("simulated", "continuous limit", _spiral)),
    ),
    Claim(
        "D5", "cumulative sandwich", "Over many layers at acute angles the ratio of total turns lies between the first and the last ratio of norms.",
        "n_t⁰/n_v⁰ ≤ Θ_v/Θ_t ≤ n_t^L/n_v^L", ("shared C_l and φ_l", "φ_l ≤ π/2"), ("proves A", "repairs B"),
        (symbolic("D5"), certified("D5"), Evidence("property", "random paths", _cumulative)), _cumulative_fails,
    ),
    Claim(
        "D6", "path is not displacement", "How far a token ends from its start is not the sum of its turns; a visual token's 32 layers are worth less than one.",
        "cos∠(h_0, h_L) ≈ n_0/√(n_0² + LC²); depth L n_t/n_v or L(n_t/n_v)²", ("isotropic updates", "D large"), ("beyond the paper",),
        (symbolic("D6"), Evidence("simulated", "width 4096", _displacement)),
    ),
    Claim(
        "D7", "two numbers suffice", "Norm and overlap with the start form a Markov chain, so simulation is exact at a cost that ignores the width.",
        "(n, ⟨h, ĥ_0⟩) moves by two coordinates of a uniform point on the sphere", ("isotropic updates, or isotropic around an angle or a drift",), ("beyond the paper",),
        (symbolic("D7"), Evidence("simulated", "chain against vectors", _chain_is_exact)),
    ),
)  # fmt: skip
