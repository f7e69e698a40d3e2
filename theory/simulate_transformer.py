"""Fidelity (c): a real random Pre-Norm transformer, in which the paper's assumptions are measured, not assumed.

Visual and text tokens of different norms share one sequence. At each residual branch and for each modality: how large
the update is and whether it depends on the norm (A1), its angle (A2), whether its directions are symmetric (A3), and
how much of the measured turning the step formula explains from each token's own n, C, φ (all of it) and from the
means that the assumptions would use (some of it).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from theory.arrays import Floats, Reader, whole_number
from theory.rotation import step_angle
from theory.transformer import random_transformer
from theory.vectors import angle_between


@dataclass(frozen=True)
class BranchAudit:
    """One branch, one modality. Means and standard deviations over tokens; angles in radians.

    `resultant` is the length of the mean of the unit directions in which tokens turn: 0 if they are symmetric, about
    1/√tokens by chance, 1 if all turn alike. `update_slope` is d ln C/d ln n over tokens, 0 under A1.
    """

    layer: int
    branch: str
    modality: str
    norm: float
    update: float
    update_std: float
    update_slope: float
    angle: float
    angle_std: float
    resultant: float
    turn: float
    turn_from_tokens: float
    turn_from_means: float


def _audit(layer: int, branch: str, modality: str, before: Floats, after: Floats, shared: float) -> BranchAudit:
    """before, after (tokens, D); `shared` is the mean update over both modalities, A1's one number."""
    delta = after - before
    n, C = np.linalg.norm(before, axis=-1), np.linalg.norm(delta, axis=-1)
    phi, turn = angle_between(before, delta), angle_between(before, after)
    across = delta - (np.einsum("td,td->t", delta, before) / n**2)[:, None] * before
    directions = across / np.linalg.norm(across, axis=-1, keepdims=True)
    logs = np.log(n) - np.log(n).mean()
    slope = float(logs @ np.log(C) / (logs @ logs)) if logs @ logs > 1e-12 else float("nan")
    return BranchAudit(
        layer, branch, modality,
        norm=float(n.mean()), update=float(C.mean()), update_std=float(C.std()), update_slope=slope,
        angle=float(phi.mean()), angle_std=float(phi.std()),
        resultant=float(np.linalg.norm(directions.mean(axis=0))),
        turn=float(turn.mean()), turn_from_tokens=float(step_angle(n, C, phi).mean()),
        turn_from_means=float(step_angle(n.mean(), shared, np.pi / 2)),
    )  # fmt: skip


def measure_transformer(
    norm_v: float,
    norm_t: float,
    *,
    layers: int = 8,
    width: int = 64,
    heads: int = 4,
    tokens: int = 32,
    spread: float = 0.3,
    seed: int = 0,
) -> list[BranchAudit]:
    """Runs `tokens` visual and as many text tokens, norms lognormal around norm_v and norm_t, through random layers.

    Two branches a layer and two modalities a branch: 4·layers rows. Raises ValueError for impossible sizes.
    """
    Reader(norm_v=norm_v, norm_t=norm_t, spread=spread).positive("norm_v", "norm_t").nonnegative("spread")
    tokens, rng = whole_number("tokens", tokens, 2), np.random.default_rng(whole_number("seed", seed, 0))
    model = random_transformer(layers, width, heads, rng)
    directions = rng.standard_normal((2 * tokens, width))
    norms = np.repeat([norm_v, norm_t], tokens) * np.exp(spread * rng.standard_normal(2 * tokens))
    h = directions * (norms / np.linalg.norm(directions, axis=-1))[:, None]
    states, rows = model.residual_states(h), []
    for step, (before, after) in enumerate(pairwise(states)):
        shared = float(np.linalg.norm(after - before, axis=-1).mean())
        branch = ("attention", "mlp")[step % 2]
        for modality, part in (("visual", slice(0, tokens)), ("text", slice(tokens, None))):
            rows.append(_audit(step // 2, branch, modality, before[part], after[part], shared))
    return rows
