"""Monte Carlo of tokens on their way through L Pre-Norm layers, at three fidelities.

(a) `run_chain`: two numbers a token, exact in distribution (D7), at a cost that does not know the width;
(b) `run_vectors`: full vectors; (c) `measure_transformer` in `simulate_transformer.py`: a real random transformer.

A token starts at h_0 and is compared with a *reference* direction: its own start, or in the drifting mode a target
at a given angle. Norms and updates share one unit, angles are radians, seeds are recorded in the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from theory.arrays import Floats, Reader, whole_number

Mode = Literal["isotropic", "angle", "drift"]


@dataclass(frozen=True)
class Setup:
    """What happens to every token: L updates of size C, in directions that depend on the mode.

    isotropic: uniform on the sphere. angle: at the angle φ to the current state, uniform around it. drift:
    C(m t̂ + √(1 − m²) ξ), t̂ the target at cos a to the start and ξ uniform orthogonal to it. Norms are lognormal
    with the given mean and standard deviation (0: all equal). Raises ValueError for impossible numbers.
    """

    norm: float
    layers: int
    width: int
    update: float = 1.0
    mode: Mode = "isotropic"
    norm_std: float = 0.0
    angle: float = np.pi / 2
    drift: float = 0.0
    target_cosine: float = 0.0

    def __post_init__(self) -> None:
        sizes = Reader(norm=self.norm, update=self.update, norm_std=self.norm_std)
        sizes.positive("norm").nonnegative("update", "norm_std")
        Reader(angle=self.angle).angle("angle")
        Reader(drift=self.drift, target_cosine=self.target_cosine).between("drift", 0, 1).between(
            "target_cosine", -1, 1
        )
        whole_number("layers", self.layers, 1)
        whole_number("width", self.width, 4)
        if self.mode not in ("isotropic", "angle", "drift"):
            raise ValueError(f"mode must be isotropic, angle or drift, got {self.mode!r}")

    def first_norms(self, tokens: int, rng: np.random.Generator) -> Floats:
        if self.norm_std == 0:
            return np.full(tokens, float(self.norm))
        spread = np.sqrt(np.log1p((self.norm_std / self.norm) ** 2))
        return self.norm * np.exp(spread * rng.standard_normal(tokens) - spread**2 / 2)


class Curve(NamedTuple):
    """Mean over tokens at each layer, and half the width of its 95 % confidence interval."""

    mean: Floats
    half_width: Floats


@dataclass(frozen=True)
class Run:
    """Norms and cosines to the reference at L + 1 states, turns and adjacent cosines of L steps, and the last state
    of every token. `seeds` reproduce it."""

    norm: Curve
    cosine_to_reference: Curve
    turn: Curve
    adjacent_cosine: Curve
    final_norm: Floats
    final_cosine: Floats
    seeds: tuple[int, ...]


# What one layer of a block yields: norm and cosine to the reference after it, turn and adjacent cosine of the step.
# The state before the first layer comes with None for the last two.
_State = tuple[Floats, Floats, Floats | None, Floats | None]
Progress = Callable[[int], None]


def _sphere_pair(rng: np.random.Generator, dims: int, size: int) -> tuple[Floats, Floats]:
    """Two coordinates of a uniform point on the sphere in `dims` dimensions, without drawing the others.

    z₁² + z₂² follows Beta(1, (dims − 2)/2), whose inverse is elementary: with g two normals, |g|²/2 is exponential.
    """
    g1, g2 = rng.standard_normal((2, size))
    s = g1 * g1 + g2 * g2
    stretch = np.sqrt(-np.expm1(-s / (dims - 2)) / s) if dims > 2 else 1 / np.sqrt(s)
    g1 *= stretch
    g2 *= stretch
    return g1, g2


def _chain_block(setup: Setup, tokens: int, rng: np.random.Generator) -> Iterator[_State]:
    n, C = setup.first_norms(tokens, rng), setup.update
    along = n * (setup.target_cosine if setup.mode == "drift" else 1.0)  # ⟨h, reference⟩
    yield n, along / n, None, None
    for _ in range(setup.layers):
        k = along / n
        across = np.sqrt(np.maximum(1 - k * k, 0.0))  # of ĥ, orthogonal to the reference
        if setup.mode == "drift":
            z, _ = _sphere_pair(rng, setup.width - 1, tokens)
            sideways = np.sqrt((1 - setup.drift) * (1 + setup.drift)) * z
            radial = setup.drift * k + sideways * across  # ⟨Δ, ĥ⟩ / C
            along = along + C * setup.drift
        else:
            if setup.mode == "isotropic":
                radial, other = _sphere_pair(rng, setup.width, tokens)
            else:
                z, _ = _sphere_pair(rng, setup.width - 1, tokens)
                radial, other = np.cos(setup.angle), np.sin(setup.angle) * z
            along = along + C * (k * radial + across * other)
        v = n + C * radial
        u = C * np.sqrt(np.maximum(1 - radial * radial, 0.0))
        n = np.sqrt(u * u + v * v)
        yield n, along / n, _turn(u, v, n), v / n


def _turn(u: Floats, v: Floats, N: Floats) -> Floats:
    """atan2(u, v) for u ≥ 0 by the half angle, whose arctan costs a third of an arctan2."""
    ahead = v >= 0
    with np.errstate(divide="ignore"):
        return 2 * np.arctan(np.where(ahead, u, N - v) / np.where(ahead, N + v, u))


def _vector_block(setup: Setup, tokens: int, rng: np.random.Generator) -> Iterator[_State]:
    D, C, m = setup.width, setup.update, setup.drift
    n = setup.first_norms(tokens, rng)
    k = setup.target_cosine if setup.mode == "drift" else 1.0
    h = np.zeros((tokens, D))  # the reference is the first axis
    h[:, 0], h[:, 1] = n * k, n * np.sqrt(1 - k * k)
    yield n, h[:, 0] / n, None, None
    for _ in range(setup.layers):
        delta = rng.standard_normal((tokens, D))
        if setup.mode == "drift":
            delta[:, 0] = 0.0
        elif setup.mode == "angle":
            delta -= (np.einsum("td,td->t", delta, h) / n**2)[:, None] * h
        delta *= (C / np.sqrt(np.einsum("td,td->t", delta, delta)))[:, None]
        if setup.mode == "drift":
            delta *= np.sqrt((1 - m) * (1 + m))
            delta[:, 0] = C * m
        elif setup.mode == "angle":
            delta *= np.sin(setup.angle)
            delta += (C * np.cos(setup.angle) / n)[:, None] * h
        before, overlap = n, np.einsum("td,td->t", h, delta)
        h += delta
        n = np.sqrt(np.einsum("td,td->t", h, h))
        cosine = (before + overlap / before) / n
        yield n, h[:, 0] / n, np.arccos(np.clip(cosine, -1, 1)), cosine


class _Sums:
    """Running sums and sums of squares of the four quantities, layer by layer."""

    def __init__(self, layers: int) -> None:
        self.sums = np.zeros((2, 4, layers + 1))
        self.tokens = 0

    def add(self, layer: int, state: _State) -> None:
        for row, values in enumerate(state):
            if values is not None:
                self.sums[:, row, layer] += values.sum(), values @ values

    def curve(self, row: int) -> Curve:
        first = 0 if row < 2 else 1
        mean, square = self.sums[:, row, first:] / self.tokens
        variance = np.maximum(square - mean**2, 0.0) * self.tokens / max(self.tokens - 1, 1)
        return Curve(mean, 1.96 * np.sqrt(variance / self.tokens))


def _run(block_of, block: int, setup: Setup, tokens: int, seed: int, progress: Progress | None) -> Run:
    tokens, seed = whole_number("tokens", tokens, 1), whole_number("seed", seed, 0)
    # SFC64 is numpy's fastest generator; the normals are half of fidelity (a)'s cost.
    rng, sums = np.random.Generator(np.random.SFC64(seed)), _Sums(setup.layers)
    finals = []
    for start in range(0, tokens, block):
        size = min(block, tokens - start)
        for layer, state in enumerate(block_of(setup, size, rng)):
            sums.add(layer, state)
        sums.tokens += size
        finals.append(state[:2])
        if progress is not None:
            progress(size)
    norm, cosine = (np.concatenate(parts) for parts in zip(*finals, strict=True))
    return Run(sums.curve(0), sums.curve(1), sums.curve(2), sums.curve(3), norm, cosine, (seed,))


def run_chain(setup: Setup, tokens: int, seed: int, progress: Progress | None = None) -> Run:
    """Fidelity (a), D7: O(tokens × layers) whatever the width. `progress` is called with each block's tokens."""
    return _run(_chain_block, 8192, setup, tokens, seed, progress)


def run_vectors(setup: Setup, tokens: int, seed: int, progress: Progress | None = None) -> Run:
    """Fidelity (b): O(tokens × layers × width), in blocks of about 2²⁰ numbers."""
    return _run(_vector_block, max(1, 2**20 // setup.width), setup, tokens, seed, progress)


def merge(runs: Sequence[Run]) -> Run:
    """Runs of different seeds as one; the intervals shrink accordingly. Raises ValueError if there is none."""
    if not runs:
        raise ValueError("runs must hold at least one run, got none")
    sizes = np.array([len(run.final_norm) for run in runs], dtype=float)
    share = sizes / sizes.sum()

    def curve(name: str) -> Curve:
        means = np.stack([getattr(run, name).mean for run in runs])
        widths = np.stack([getattr(run, name).half_width for run in runs])
        return Curve(share @ means, np.sqrt((share**2) @ widths**2))

    return Run(
        curve("norm"),
        curve("cosine_to_reference"),
        curve("turn"),
        curve("adjacent_cosine"),
        np.concatenate([run.final_norm for run in runs]),
        np.concatenate([run.final_cosine for run in runs]),
        tuple(seed for run in runs for seed in run.seeds),
    )


def run_seeds(
    fidelity: Literal["chain", "vectors"],
    setup: Setup,
    tokens: int,
    seeds: Sequence[int],
    jobs: int = 1,
    progress: Progress | None = None,
) -> Run:
    """One run a seed, in `jobs` processes if more than one, merged. `progress` is called with tokens that are done:
    block by block in this process, seed by seed from others."""
    run = {"chain": run_chain, "vectors": run_vectors}.get(fidelity)
    if run is None:
        raise ValueError(f"fidelity must be chain or vectors, got {fidelity!r}")
    if jobs == 1:
        return merge([run(setup, tokens, seed, progress) for seed in seeds])
    from joblib import Parallel, delayed

    runs = []
    for done in Parallel(n_jobs=jobs, return_as="generator")(delayed(run)(setup, tokens, seed) for seed in seeds):
        runs.append(done)
        if progress is not None:
            progress(tokens)
    return merge(runs)
