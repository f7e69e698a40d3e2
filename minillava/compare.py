"""From runs to sentences: paired differences with their uncertainty, and what may be concluded from them.

Arms of one seed share projector, data and order, so differences are taken within seeds. Fewer than three seeds support
no conclusion, and the text says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from scipy import stats

MEASURES = {  # key in a run: (words, whether more is better)
    "visual_accuracy": ("visual accuracy", True),
    "stage1_caption_loss": ("stage 1 caption loss", False),
    "text_accuracy_after": ("text-only accuracy after training", True),
    "words_accuracy_after": ("answers from words after training", True),
}


@dataclass
class Difference:
    """Mean over seeds of (arm − reference), with a 95 % t interval; infinite with one seed."""

    mean: float
    low: float
    high: float
    seeds: int

    @property
    def significant(self) -> bool:
        return self.seeds >= 3 and not self.low <= 0 <= self.high

    def __str__(self) -> str:
        if self.seeds < 2:
            return f"{self.mean:+.3f} (one seed)"
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def difference(values: Iterable[float]) -> Difference:
    """Mean of paired differences and Student's 95 % interval of that mean."""
    values = list(values)
    n, mean = len(values), sum(values) / len(values)
    if n < 2:
        return Difference(mean, -math.inf, math.inf, n)
    spread = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n)
    half = float(stats.t.ppf(0.975, n - 1)) * spread
    return Difference(mean, mean - half, mean + half, n)


def rate_label(run: dict) -> str:
    return "chosen" if run.get("rates_chosen") else f"{run['stage2_lr']:g}"


def paired(runs: list[dict], arm: str, reference: str, key: str) -> dict[str, Difference]:
    """Differences of `key` between two arms by stage-2 learning rate, paired by seed."""
    by = {(run["arm"], run["seed"], rate_label(run)): run[key] for run in runs}
    rates = dict.fromkeys(rate_label(run) for run in runs)
    result = {}
    for rate in rates:
        seeds = sorted({run["seed"] for run in runs})
        pairs = [(by.get((arm, s, rate)), by.get((reference, s, rate))) for s in seeds]
        values = [a - b for a, b in pairs if a is not None and b is not None]
        if values:
            result[rate] = difference(values)
    return result


def summary(results: dict) -> str:
    """One paragraph made from the numbers alone: what held, what did not, and what cannot be said."""
    runs, arms = results["runs"], list(dict.fromkeys(run["arm"] for run in results["runs"]))
    seeds = len({run["seed"] for run in runs})
    sentences = []
    if seeds < 3:
        number = {1: "One seed supports", 2: "Two seeds support"}[seeds]
        sentences.append(f"**{number} no conclusion about which arm is better**: below are the numbers of these runs.")
    else:
        sentences.append(f"Over {seeds} seeds, paired by seed, with 95 % intervals:")
    if "base" in arms:
        sentences += disparity(runs)
        for arm in ("aligned", "gwc", "default", "scale"):
            if arm in arms:
                sentences += [compared(runs, arm, "base", key) for key in ("visual_accuracy", "stage1_caption_loss")]
    if "gwc" in arms and "aligned" in arms:
        sentences.append(compared(runs, "gwc", "aligned", "visual_accuracy"))
    if "post-norm" in arms and "base" in arms:
        sentences.append(control(runs))
    return " ".join(sentences)


def compared(runs: list[dict], arm: str, reference: str, key: str) -> str:
    """'aligned − base in visual accuracy: +0.021 [..] at 0.0003 (significant, better), ...'."""
    words, more_is_better = MEASURES[key]
    differences = paired(runs, arm, reference, key)
    if key.startswith("stage1"):  # the same run of stage 1 stands before every rate of stage 2
        differences = dict(list(differences.items())[:1])
    parts = []
    for rate, d in differences.items():
        verdict = ""
        if d.seeds >= 3:
            good = (d.mean > 0) == more_is_better
            verdict = f" ({'better' if good else 'worse'})" if d.significant else " (not significant)"
        parts.append(f"{d}{verdict}" + ("" if key.startswith("stage1") else f" at rate {rate}"))
    return f"{arm} − {reference} in {words}: {', '.join(parts)}."


def disparity(runs: list[dict]) -> list[str]:
    """How loud the base arm's visual tokens are, and how little they turn in the first layer."""
    base = [run for run in runs if run["arm"] == "base"]
    ratio = [run["norm_visual"][0] / run["norm_text"][0] for run in base]
    visual, text = ([run[f"cosine_{m}"][0] for run in base] for m in ("visual", "text"))
    return [
        f"In the base arm visual tokens enter the language model {average(ratio):.0f} times as loud as text; the first "
        f"layer leaves them a cosine of {average(visual):.2f} to what they were, text {average(text):.2f}."
    ]


def control(runs: list[dict]) -> str:
    """Whether inertia goes away when the block is Post-Norm."""
    gap = {
        arm: average(run["cosine_visual"][0] - run["cosine_text"][0] for run in runs if run["arm"] == arm)
        for arm in ("base", "post-norm")
    }
    less = abs(gap["post-norm"]) < abs(gap["base"])
    return (
        f"The first layer's cosine of visual tokens is above that of text by {gap['base']:+.2f} with Pre-Norm blocks "
        f"and by {gap['post-norm']:+.2f} with Post-Norm blocks: the control {'fits' if less else 'does not fit'} "
        "the claim that Pre-Norm is the cause."
    )


def average(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)
