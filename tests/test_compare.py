"""Sentences and tables from numbers: intervals, nothing concluded from one seed, a report that stands alone."""

import base64
import copy
import json
import math
import re
from dataclasses import asdict, replace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from rich.console import Console
from scipy import stats

from minillava.compare import MEASURES, difference, paired, summary
from minillava.page import number
from minillava.presets import tiny
from minillava.report import summary_table, write_report
from minillava.reproduce import reproduce
from minillava.world import WorldConfig

values = st.lists(st.floats(-5, 5).map(lambda x: round(x, 4)), min_size=2, max_size=8)


def run(arm: str, seed: int, visual: float, rate: float = 1e-3, **more) -> dict:
    measures = {key: visual for key in MEASURES}
    by_layer = {f"{what}_{m}": [2.0, 3.0] for what in ("norm", "cosine") for m in ("visual", "text")}
    return {"arm": arm, "seed": seed, "stage2_lr": rate} | measures | by_layer | more


# ---- differences


@given(values)
def test_the_interval_is_students(values):
    assume(np.ptp(values) > 1e-3)  # scipy warns, rightly, of what is lost in nearly equal values
    theirs = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    ours = difference(values)
    assert ours.mean == pytest.approx(np.mean(values), abs=1e-12) and ours.seeds == len(values)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), rel=1e-9, abs=1e-9)
    p = stats.ttest_1samp(values, 0).pvalue
    if len(values) >= 3 and abs(p - 0.05) > 1e-6:
        assert ours.significant == (p < 0.05)


@given(st.floats(-1, 1), st.integers(1, 2))
def test_fewer_than_three_seeds_are_never_significant(value, n):
    found = difference([value] * n)
    assert not found.significant
    assert n == 2 or (found.low, found.high) == (-math.inf, math.inf)
    assert n == 2 or str(found).endswith("(one seed)")


def test_equal_values_of_three_seeds_have_no_spread():
    assert difference([0.0, 0.0, 0.0]).significant is False
    assert str(difference([0.25, 0.25, 0.25])) == "+0.250 [+0.250, +0.250]"


@given(st.permutations(range(6)))
def test_pairs_are_of_one_seed_and_one_rate_whatever_the_order(order):
    """Seeds differ much more than arms: paired by anything else than the seed, the difference drowns."""
    runs = [run("base", s, 10.0 * s, r) for s in range(3) for r in (1e-3, 3e-4)]
    runs += [run("gwc", s, 10.0 * s + 0.1 + r, r) for s in range(3) for r in (1e-3, 3e-4)]
    shuffled = [runs[i] for i in order] + [runs[6 + i] for i in order]
    found = paired(shuffled, "gwc", "base", "visual_accuracy")
    assert found.keys() == {"0.001", "0.0003"}
    for rate, d in found.items():
        assert d.mean == pytest.approx(0.1 + float(rate)) and d.high - d.low < 1e-9 and d.significant


def test_a_seed_that_one_arm_lacks_is_left_out():
    runs = [run("base", s, 0.5) for s in range(3)] + [run("gwc", s, 0.75) for s in (0, 2, 3)]
    assert paired(runs, "gwc", "base", "visual_accuracy")["0.001"].seeds == 2
    assert paired(runs, "gwc", "nobody", "visual_accuracy") == {}


# ---- the paragraph


def told(base: list[float], gwc: list[float]) -> str:
    runs = [run("base", s, v) for s, v in enumerate(base)] + [run("gwc", s, v) for s, v in enumerate(gwc)]
    return summary({"runs": runs})


def verdicts(text: str) -> dict[str, list[str]]:
    """Which measures the paragraph puts under which verdict."""
    places = {name: text.index(name) for name in ("Better over", "Worse, with", "Not significant")}
    ends = [*sorted(places.values()), len(text)]
    groups = {name: text[start : ends[ends.index(start) + 1]] for name, start in places.items()}
    return {
        name: [m for m in ("visual accuracy", "caption loss") if f"in {m}" in group or f"in stage 1 {m}" in group]
        for name, group in groups.items()
    }


def test_one_seed_supports_no_conclusion_and_the_paragraph_says_so():
    for seeds, words in ((1, "One seed supports no conclusion"), (2, "Two seeds support no conclusion")):
        text = told([0.2] * seeds, [0.9] * seeds)
        assert words in text and "+0.700" in text, "the numbers are given all the same"
        assert not re.search("significant|[Bb]etter (over|with)|[Ww]orse", text)


def test_three_seeds_give_intervals_and_a_verdict():
    """The same numbers serve as accuracy, where more is better, and as loss, where less is."""
    more = told([0.20, 0.21, 0.22], [0.90, 0.92, 0.91])
    assert "no conclusion" not in more and "3 seeds" in more
    assert verdicts(more) == {
        "Better over": ["visual accuracy"],
        "Worse, with": ["caption loss"],
        "Not significant": [],
    }
    assert re.search(r"\+0\.70\d \[\+0\.\d{3}, \+0\.\d{3}\]", more)
    less = told([0.90, 0.91, 0.92], [0.20, 0.22, 0.21])
    assert verdicts(less)["Better over"] == ["caption loss"] and verdicts(less)["Worse, with"] == ["visual accuracy"]
    unclear = told([0.2, 0.5, 0.3], [0.3, 0.4, 0.35])
    assert verdicts(unclear) == {
        "Better over": [],
        "Worse, with": [],
        "Not significant": ["visual accuracy", "caption loss"],
    }


def test_arms_without_a_partner_are_not_compared():
    for count in (1, 3):
        text = summary({"runs": [run("gwc", seed, 0.5) for seed in range(count)]})
        assert "Differences" not in text and "Better" not in text


# ---- cells


@given(st.one_of(st.none(), st.floats(), st.integers(), st.text(max_size=3)))
def test_no_cell_says_nan(value):
    shown = number(value)
    assert shown and "nan" not in shown.lower() if not isinstance(value, str) else shown == value
    if isinstance(value, float) and abs(value) < 1e6 and not math.isnan(value):
        assert float(shown) == pytest.approx(value, abs=0.0501 if abs(value) >= 10 else 0.000501)


# ---- the report


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    """Real ones of the tiny preset, three arms, then told again for a second and third seed with other accuracies."""
    short = replace(tiny().stage1, steps=2, batch_size=4, eval_every=1, log_every=1, save_every=2)
    stages = {name: short for name in ("vision_training", "language_training", "stage1", "stage2")}
    world = WorldConfig(train_scenes=12, eval_scenes=6)
    preset = replace(tiny(), world=world, variants=("base", "gwc", "discrete", "post-norm"), language_samples=12)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINILLAVA_CACHE", str(tmp_path_factory.mktemp("cache")))
        found = reproduce(replace(preset, **stages, stage2_lrs=(1e-3,)), tmp_path_factory.mktemp("out"), jobs=1)
    torch.set_num_threads(threads)
    return json.loads(json.dumps(found))


def seeds(results: dict, count: int) -> dict:
    several = copy.deepcopy(results)
    several["preset"]["seeds"] = list(range(count))
    several["runs"] = [
        copy.deepcopy(run) | {"seed": seed, "visual_accuracy": 0.1 * seed + 0.05 * i}
        for i, run in enumerate(results["runs"])
        for seed in range(count)
    ]
    return several


class References(HTMLParser):
    """Whatever a page would fetch or lead to."""

    def __init__(self, page: str):
        super().__init__()
        self.found: list[str] = []
        self.tags: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.found += [value for name, value in attributes if name in ("src", "href", "srcset", "data", "poster")]


@pytest.mark.parametrize("count", [1, 3])
def test_the_report_stands_alone(results, tmp_path, count):
    several = seeds(results, count)
    page_file = write_report(several, tmp_path)
    page, markdown = page_file.read_text(), (tmp_path / "report.md").read_text()
    found = References(page)
    assert found.found and all(reference.startswith("data:image/svg+xml;base64,") for reference in found.found)
    assert not {"script", "link", "iframe"} & set(found.tags) and "@import" not in page and "url(" not in page
    drawn = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", markdown)
    assert len(drawn) == len(set(drawn)) == len(found.found) >= 8
    for name, reference in zip(drawn, found.found, strict=True):
        assert (tmp_path / name).read_bytes() == base64.b64decode(reference.partition(",")[2])
    cells = [cell.strip() for line in markdown.splitlines() if line.startswith("|") for cell in line.split("|")]
    assert len(cells) > 200 and not [cell for cell in cells if re.search(r"\b(nan|inf|None|null)\b", cell)]
    assert ("no conclusion" in markdown) == (count == 1)
    assert json.dumps(several["preset"]["world"]["kinds"])[1:-1].split(", ")[0] in markdown, "settings are there"


def test_a_report_of_chosen_rates_and_with_holes(results, tmp_path):
    """What has no value comes as null from results.json; a measure that is NaN must not be printed as one."""
    chosen = copy.deepcopy(results)
    chosen["runs"] = [entry for entry in chosen["runs"] if entry["arm"] in ("base", "gwc")]
    for entry in chosen["runs"]:
        entry["caption_loss_after"], entry["steps_to_95"] = float("nan"), None
    search = {"best": 1e-3, "losses": {"0.001": 1.0, "0.01": None}, "interior": False}
    chosen["rates"] = {
        arm: {"arm": arm, "stage1_lr": 1e-3, "stage2_lr": 1e-3, "stage1": search, "stage2": search}
        for arm in dict.fromkeys(entry["arm"] for entry in chosen["runs"])
    }
    chosen["runs"] = [entry | {"rates_chosen": True} for entry in chosen["runs"]]
    write_report(chosen, tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| chosen |" in text
    assert not re.search(r"\|\s*nan\s*\|", text) and re.search(r"\|\s*–\s*\|", text)


def test_one_arm_is_enough_for_a_report(results, tmp_path):
    some = results | {"runs": [entry for entry in results["runs"] if entry["arm"] == "gwc"]}
    write_report(some, tmp_path)
    assert "RQ3" in (text := (tmp_path / "report.md").read_text()) and "RQ4" not in text and "− base" not in text


def test_the_table_in_the_terminal_fits_80_columns(results):
    console = Console(width=80, record=True, file=open("/dev/null", "w"))
    console.print(summary_table(seeds(results, 3)))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80 and not any("…" in line for line in lines)
    assert sum("post-norm" in line for line in lines) == 3


def test_results_are_those_of_the_preset(results):
    assert results["preset"]["world"] == json.loads(json.dumps(asdict(WorldConfig(train_scenes=12, eval_scenes=6))))
