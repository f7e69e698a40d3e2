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
    runs, arms = results["runs"], {run["arm"] for run in results["runs"]}
    seeds = len({run["seed"] for run in runs})
    sentences = []
    if seeds < 3:
        number = {1: "One seed supports", 2: "Two seeds support"}[seeds]
        sentences.append(f"**{number} no conclusion about which arm is better**; these are the numbers of a try.")
    if "base" in arms:
        sentences += disparity(runs)
    if {"base", "post-norm"} <= arms:
        sentences.append(control(runs))
    pairs = [(arm, "base") for arm in ("aligned", "gwc", "default", "scale") if {arm, "base"} <= arms]
    pairs += [("gwc", "aligned")] if {"gwc", "aligned"} <= arms else []
    found = [row for key in ("visual_accuracy", "stage1_caption_loss") for row in comparisons(runs, pairs, key)]
    if not found:
        return " ".join(sentences)
    if seeds < 3:
        sentences.append("Differences: " + "; ".join(f"{words} {d}" for words, d, _ in found) + ".")
        return " ".join(sentences)
    groups = {
        f"Better over {seeds} seeds (paired, 95 % interval above no difference)": [
            r for r in found if r[2] == "better"
        ],
        "Worse, with the same certainty": [r for r in found if r[2] == "worse"],
        "Not significant": [r for r in found if r[2] == "not significant"],
    }
    for title, rows in groups.items():
        sentences.append(f"{title}: " + ("; ".join(f"{words} {d}" for words, d, _ in rows) or "nothing") + ".")
    return " ".join(sentences)


def comparisons(runs: list[dict], pairs: list[tuple[str, str]], key: str) -> list[tuple[str, Difference, str]]:
    """(words, difference, verdict) of each pair of arms at each rate."""
    words, more_is_better = MEASURES[key]
    rows = []
    for arm, reference in pairs:
        differences = list(paired(runs, arm, reference, key).items())
        if key.startswith("stage1"):  # the same run of stage 1 stands before every rate of stage 2
            differences = [("", difference) for _, difference in differences[:1]]
        for rate, d in differences:
            verdict = "better" if (d.mean > 0) == more_is_better else "worse"
            at = f" at rate {rate}" if rate else ""
            rows.append((f"{arm} − {reference} in {words}{at}", d, verdict if d.significant else "not significant"))
    return rows


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
