"""Published measurements of released models, and what the step formula predicts for them (R5)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from theory.rotation import adjacent_cosine


class Measured(NamedTuple):
    """Means over tokens at the first LM block: C/n, cos φ and the adjacent cosine."""

    model: str
    tokens: str
    ratio: float
    angle_cosine: float
    cosine: float


# Blog "Norm Discrepancies in Your VLM Are Probably Fine" (2026-05, code bkal01/vlm-norms).
MEASURED = (
    Measured("SmolVLM2-2.2B", "vision", 0.29, 0.32, 0.97),
    Measured("SmolVLM2-2.2B", "text", 5.02, -0.06, 0.17),
    Measured("Qwen3-VL-2B", "vision", 1.91, 0.24, 0.63),
    Measured("Qwen3-VL-2B", "text", 10.01, -0.05, 0.05),
)
CAVEAT = (
    "The columns are means over tokens of C/n, of cos φ and of the cosine, each taken by itself; the formula is exact "
    "for one token and not for means of ratios, so a difference of a few hundredths is expected and shows their spread."
)


def predicted_cosine(row: Measured) -> float:
    """cos θ at n = 1, C = C/n (R5)."""
    return float(adjacent_cosine(1.0, row.ratio, np.arccos(row.angle_cosine)))
