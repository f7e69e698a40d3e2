"""The report of an experiment, section by section.

Everything in it is computed from `results.json`; no sentence is there that the numbers did not write.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from rich.table import Table

from minillava import curves, figures
from minillava.compare import MEASURES, average, paired, rate_label, summary
from minillava.experiment import preset_from_json
from minillava.page import Page, number
from minillava.probe import Trace
from minillava.world import build_split

PAPER_TABLE = [  # PAPER.md, Llama-3.2-3B and Qwen2.5-7B: no norm, norm without GWC, norm with GWC
    ("Llama-3.2-3B, no norm", 59.01, 45.19),
    ("Llama-3.2-3B, norm", 62.04, 53.21),
    ("Llama-3.2-3B, norm and GWC", 61.27, 51.60),
    ("Qwen2.5-7B, no norm", 68.49, 71.02),
    ("Qwen2.5-7B, norm", 68.71, 71.14),
    ("Qwen2.5-7B, norm and GWC", 69.41, 71.74),
]

Section = Callable[[Page, dict], None]


def write_report(results: dict, folder: Path, sections: Sequence[Section] | None = None) -> Path:
    """Write `report.md`, `report.html` and `figures/` into a folder; returns the path of the HTML file."""
    page = Page(folder)
    for section in sections or SECTIONS:
        section(page, results)
    return page.write()


def run_table(page: Page, runs: Iterable[dict], columns: dict[str, Callable[[dict], object]]) -> None:
    """One row per run: arm, seed and rate, then the columns."""
    columns = {"arm": lambda run: run["arm"], "seed": lambda run: str(run["seed"]), "rate": rate_label} | columns
    page.table(columns, ([column(run) for column in columns.values()] for run in runs))


def shown(results: dict) -> list[dict]:
    """The runs whose layers are drawn: the first seed's, at the highest rate, one of each arm."""
    first = min(run["seed"] for run in results["runs"])
    return list({run["arm"]: run for run in results["runs"] if run["seed"] == first}.values())


def traces(results: dict) -> dict[str, Trace]:
    return {run["arm"]: to_trace(run["trace"]) for run in shown(results)}


def to_trace(saved: dict) -> Trace:
    """A trace as it was before JSON."""
    arrays = {m: {key: np.array(v, dtype=float) for key, v in rows.items()} for m, rows in saved["data"].items()}
    return Trace(saved["steps"], saved["tokens"], arrays, saved["formula_error"])


def by_arm(runs: list[dict]) -> dict[str, list[dict]]:
    arms: dict[str, list[dict]] = {}
    for run in runs:
        arms.setdefault(run["arm"], []).append(run)
    return arms


# Sections -------------------------------------------------------------------------------------------------------------


def opening(page: Page, results: dict) -> None:
    preset, where = results["preset"], results["machine"]
    kinds = ", ".join(kind.replace("_", " ") for kind in dict.fromkeys(preset["world"]["kinds"]))
    page.text(
        f"# minillava, preset `{preset['name']}`",
        summary(results),
        f"{len(results['runs'])} runs of {len(preset['variants'])} variants with {len(preset['seeds'])} seed(s), "
        f"{results['seconds'] / 60:.1f} minutes on {where['name']} ({where['cores']} cores, {where['jobs']} job(s), "
        f"device {where['device']}), at most {results['peak_memory_gb']:.1f} GiB. Kinds of question asked: {kinds}.",
        *["The run was resumed: its minutes are not all."] * results["resumed"],
    )


def towers(page: Page, results: dict) -> None:
    rows = []
    for row in results["towers"]:
        name = "vision tower" if row["tower"] == "vision" else "language model" + (", Post-Norm" * row["post_norm"])
        cells = row.get("cell_accuracy", {}).get("both")
        rows.append((name, str(row["seed"]), cells, row.get("words"), row.get("text"), f"{row['seconds']:.0f}"))
    page.text("## The towers, before anything is put together")
    page.table(("tower", "seed", "cells named rightly", "questions about words", "tested text-only", "seconds"), rows)


def interface(page: Page, results: dict) -> None:
    page.text(
        "## RQ1 and RQ2: how loud are visual tokens at the interface?",
        "Mean L2 norms, after stage 2 unless the column says otherwise; T is the mean norm of the vocabulary.",
    )
    columns: dict[str, Callable[[dict], object]] = {
        "encoder": lambda run: run["interface_end"]["encoder"]["mean"],
        "visual, at start": lambda run: run["interface_start"]["visual"]["mean"],
        "visual, stage 1": lambda run: run["interface_stage1"]["visual"]["mean"],
        "after projector": lambda run: run["interface_end"]["projector"]["mean"],
        "visual": lambda run: run["interface_end"]["visual"]["mean"],
        "text": lambda run: run["interface_end"]["text"]["mean"],
        "T": lambda run: run["interface_end"]["vocabulary"]["mean"],
        "visual / text": lambda run: run["interface_end"]["ratio_text"],
    }
    run_table(page, shown(results), columns)


def cosines(page: Page, results: dict) -> None:
    page.text("## RQ3: how fast do tokens turn?")
    page.figure("norms", figures.plot_norms(traces(results)), "Norms of the residual stream against depth.")
    says = "Cosine between a token's states before and after each layer; 1 is a token that did not turn."
    page.figure("cosines", figures.plot_cosines(traces(results)), says)
    run_table(
        page,
        shown(results),
        {
            "visual, layer 1": lambda run: run["cosine_visual"][0],
            "visual, layer 2": lambda run: run["cosine_visual"][1],
            "text, layer 1": lambda run: run["cosine_text"][0],
            "text, layer 2": lambda run: run["cosine_text"][1],
            "C visual, first branch": lambda run: run["trace"]["data"]["visual"]["update"][0],
            "C text, first branch": lambda run: run["trace"]["data"]["text"]["update"][0],
        },
    )
    worst = max(run["trace"]["formula_error"]["turn"] for run in shown(results))
    page.text(
        "Told each token's own n, C and φ, the formula of one step (claim R1) misses no measured turn by more than "
        f"{worst:.1e} rad. The paper's assumptions, one C and one φ for both modalities, are audited here:"
    )
    first = shown(results)[0]
    trace = to_trace(first["trace"])
    says = "Measured turn of each branch against theory: told everything, told means, told means that both share"
    page.figure("predictions", figures.plot_predictions(trace), f"{says} (arm {first['arm']}).")
    says = "Update sizes C and angles φ: are they the same for both modalities, as A1 and A2 assume?"
    page.figure("steps", figures.plot_steps(trace), f"{says} (arm {first['arm']}).")


def discrete(page: Page, results: dict) -> None:
    drawn = {run["arm"]: run for run in shown(results)}
    if not {"discrete", "base"} <= drawn.keys():
        return
    page.text("## RQ4: is it discreteness, or is it size?")
    run_table(
        page,
        [run for arm, run in drawn.items() if arm in ("base", "discrete", "aligned")],
        {
            "visual norm": lambda run: run["interface_end"]["visual"]["mean"],
            "visual cosine, layer 1": lambda run: run["cosine_visual"][0],
            "text cosine, layer 1": lambda run: run["cosine_text"][0],
            "visual questions": lambda run: run["visual_accuracy"],
        },
    )
    page.text(
        "The discrete arm's words began at the norm of the base arm's visual tokens. It now enters at "
        f"{drawn['discrete']['interface_end']['visual']['mean']:.1f} "
        f"(base: {drawn['base']['interface_end']['visual']['mean']:.1f}), and the first layer leaves its tokens "
        f"a cosine of {drawn['discrete']['cosine_visual'][0]:.2f} (base: {drawn['base']['cosine_visual'][0]:.2f})."
    )


def accuracy(page: Page, results: dict) -> None:
    page.text("## Do aligned models learn better?")
    says = "Accuracy on part of the selection split against steps of stage 2 (dotted: 95 %)."
    page.figure("accuracy", curves.plot_accuracy(results["runs"]), says)
    page.text("Exact answers on the test split, with the 95 % interval of the questions (not of the seeds):")
    run_table(
        page,
        results["runs"],
        {
            "visual questions": lambda run: interval(run["visual_accuracy_by_kind"]["all"]),
            "pairs never seen": lambda run: run["visual_accuracy_novel"],
            "steps to 95 %": lambda run: run["steps_to_95"],
            "tested text-only": lambda run: run["text_accuracy_after"],
        },
    )
    differences(page, results)
    page.text("The paper's results for the same arms, to compare signs with, not values (average of benchmarks, MMLU):")
    paper = [(name, f"{average:.2f}", f"{mmlu:.2f}") for name, average, mmlu in PAPER_TABLE]
    page.table(("backbone and arm", "average", "MMLU"), paper)
    kinds = [kind for kind in results["runs"][0]["visual_accuracy_by_kind"] if kind != "all"]
    page.text("By kind of question:")
    run_table(
        page,
        results["runs"],
        {
            kind.replace("_", " "): lambda run, kind=kind: run["visual_accuracy_by_kind"][kind]["accuracy"]  # type: ignore[misc]
            for kind in kinds
        },
    )
    if results["rates"]:
        page.text("Learning rates of lowest loss on the selection split; 'inside' says whether the grid went further:")
        rows = [
            (
                arm,
                f"{r['stage1_lr']:g}",
                str(r["stage1"]["interior"]),
                f"{r['stage2_lr']:g}",
                str(r["stage2"]["interior"]),
            )
            for arm, r in results["rates"].items()
        ]
        page.table(("arm", "stage 1", "inside", "stage 2", "inside"), rows)


def interval(share: dict) -> str:
    return f"{share['accuracy']:.3f} [{share['low']:.3f}, {share['high']:.3f}]"


def differences(page: Page, results: dict) -> None:
    """Paired differences to the base arm, with intervals over seeds."""
    runs, arms = results["runs"], by_arm(results["runs"])
    if "base" not in arms or len(arms) < 2:
        return
    rows = []
    for arm in arms:
        if arm != "base":
            table = {key: paired(runs, arm, "base", key) for key in MEASURES}
            rows += [(arm, rate, *(str(table[key][rate]) for key in MEASURES)) for rate in table["visual_accuracy"]]
    page.text("Paired differences to `base`, mean over seeds [95 % interval of that mean]:")
    page.table(("arm − base", "rate", *(words for words, _ in MEASURES.values())), rows)


def captions(page: Page, results: dict) -> None:
    page.text("## Stage 1 beside stage 2")
    says = "Caption loss after stage 1 beside accuracy after stage 2: do they rank the arms alike?"
    page.figure("stage1", curves.plot_stage1(results["runs"]), says)
    run_table(
        page,
        results["runs"],
        {
            "caption loss, stage 1": lambda run: run["stage1_caption_loss"],
            "caption loss, stage 2 (captions mixed in)": lambda run: run["caption_loss_after"],
            "visual questions": lambda run: run["visual_accuracy"],
        },
    )


def gain(page: Page, results: dict) -> None:
    with_gain = [run for run in results["runs"] if run["gain_end"]]
    upstream = ", ".join(
        f"{arm} {runs[0]['stage1_rows'][0]['grad_norm_upstream']:.3g}" for arm, runs in by_arm(results["runs"]).items()
    )
    page.text("## The gain: does its initialisation matter, and does alignment stay?")
    page.text(f"Gradient into the projector at the first step of stage 1: {upstream}.")
    if not with_gain:
        return
    page.figure("gain", curves.plot_gain(with_gain), "Mean |gain| through both stages.")
    rows: list[tuple] = []
    for arm, runs in by_arm(with_gain).items():
        start, first, end = runs[0]["stage1_rows"][0], runs[0]["gain_after_stage1"], runs[-1]["gain_end"]
        values = start["gain_mean"], first["gain_mean"], first["gain_norm"], end["gain_mean"], end["gain_norm"]
        rows.append((arm, *values))
    rows += [("paper, gain 1 at start", None, "0.9609", "53.25", None, None)]
    rows += [("paper, targeted", None, "0.0400", "2.2812", None, None)]
    page.table(("arm", "mean |g|, step 1", "mean |g|, stage 1", "‖g‖, stage 1", "mean |g|, end", "‖g‖, end"), rows)


def looking(page: Page, results: dict) -> None:
    page.text("## Does it look? The same questions with the image blanked, and with another scene's image")
    run_table(
        page,
        results["runs"],
        {
            "its image": lambda run: run["visual_accuracy"],
            "blank": lambda run: run["visual_accuracy_blank"],
            "wrong image": lambda run: run["visual_accuracy_wrong"],
        },
    )


def attention(page: Page, results: dict) -> None:
    page.text("## Attention: where answers look, and what the visual norm does to the signal")
    preset = preset_from_json(json.dumps(results["preset"]))
    pictures = build_split(preset.world, "test", min(preset.seeds) if preset.pretrain_seeds else 0).pixels
    drawn = shown(results)
    for run in [run for run in drawn if run["arm"] in ("base", "aligned")] or drawn[:1]:
        asked = zip(run["map_questions"], run["map_answers"], strict=True)
        lines = [f"{question.removeprefix('<image> ')} {given} (truth: {truth})" for (question, truth), given in asked]
        maps = figures.plot_attention_maps(np.array(run["maps"]), pictures[: len(lines)], lines)
        page.figure(f"maps-{run['arm']}", maps, f"Attention of the answering token on the image, arm {run['arm']}.")
        signal = {key: np.array(v, dtype=float) if isinstance(v, list) else v for key, v in run["signal"].items()}
        says = "Signal of relevant against irrelevant keys when visual tokens are scaled as they enter"
        page.figure(f"signal-{run['arm']}", figures.plot_signal(signal), f"{says} (arm {run['arm']}).")
    content = {run["arm"]: run["content"] | {"accuracy": np.array(run["content"]["accuracy"])} for run in drawn}
    says = "What a linear probe reads off visual tokens about their own cell: is a slow token semantically slow?"
    page.figure("content", figures.plot_content(content), says)
    even = drawn[0]["attention_mass"]["uniform"]
    page.text(f"Share of text's attention that goes to the image, by layer (even attention would give {even:.2f}):")
    layers = range(len(drawn[0]["attention_mass"]["mass"]))
    run_table(
        page,
        drawn,
        {f"layer {i + 1}": lambda run, i=i: run["attention_mass"]["mass"][i] for i in layers},  # type: ignore[misc]
    )


def forgetting(page: Page, results: dict) -> None:
    page.text(
        "## Forgetting",
        "Accuracy on text before and after both stages. The text-only questions that are tested were learnt in "
        "pretraining and never replayed; questions about scenes in words are of kinds that were.",
    )
    run_table(
        page,
        results["runs"],
        {
            "text-only, before": lambda run: run["text_accuracy_before"],
            "text-only, after": lambda run: run["text_accuracy_after"],
            "words, before": lambda run: run["words_accuracy_before"],
            "words, after": lambda run: run["words_accuracy_after"],
        },
    )


def post_norm(page: Page, results: dict) -> None:
    drawn = {run["arm"]: run for run in shown(results) if run["arm"] in ("base", "post-norm")}
    if len(drawn) < 2:
        return
    page.text("## The Post-Norm control")
    figure = figures.plot_cosines({arm: to_trace(run["trace"]) for arm, run in drawn.items()})
    page.figure("post-norm", figure, "If Pre-Norm is the cause, visual tokens of the Post-Norm model turn like text.")
    run_table(
        page,
        drawn.values(),
        {
            "visual / text norm at the input": lambda run: run["norm_visual"][0] / run["norm_text"][0],
            "visual cosine, layer 1": lambda run: run["cosine_visual"][0],
            "text cosine, layer 1": lambda run: run["cosine_text"][0],
        },
    )


def settings(page: Page, results: dict) -> None:
    everything = json.dumps(results["preset"] | {"machine": results["machine"]}, indent=1)
    page.text("## Settings", "Everything that was set, seeds included:", f"```json\n{everything}\n```")


def readme_table(results: dict) -> str:
    """The table of the README: means over seeds, by arm and stage-2 rate."""
    rates = list(dict.fromkeys(rate_label(run) for run in results["runs"]))
    lines = [
        "| arm | visual / text norm | cosine, layer 1: visual | text | caption loss, stage 1 | "
        + " | ".join(f"visual questions, rate {rate}" for rate in rates)
        + " | text-only, after |",
        "|---|" + "---:|" * (5 + len(rates)),
    ]
    for arm, runs in by_arm(results["runs"]).items():
        cells = [
            f"{average(run['norm_visual'][0] / run['norm_text'][0] for run in runs):.1f}",
            f"{average(run['cosine_visual'][0] for run in runs):.2f}",
            f"{average(run['cosine_text'][0] for run in runs):.2f}",
            f"{average(run['stage1_caption_loss'] for run in runs):.3f}",
        ]
        cells += [f"{average(r['visual_accuracy'] for r in runs if rate_label(r) == rate):.3f}" for rate in rates]
        cells.append(f"{average(run['text_accuracy_after'] for run in runs):.3f}")
        lines.append(f"| `{arm}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


SECTIONS: tuple[Section, ...] = (
    opening,
    towers,
    interface,
    cosines,
    discrete,
    accuracy,
    captions,
    gain,
    looking,
    attention,
    forgetting,
    post_norm,
    settings,
)


def summary_table(results: dict) -> Table:
    """The end of `minillava reproduce` in the terminal, 80 columns wide."""
    table = Table(
        title=f"preset {results['preset']['name']}",
        caption="norm: visual / text at the LM's input; cos: first layer, visual and text; caption: stage 1;\n"
        "visual, blank: questions with and without the picture; text: tested text-only; 95 %: steps to get there",
        box=None,  # lines between columns would not leave 80 columns for eleven of them
        padding=(0, 1, 0, 0),
    )
    columns: dict[str, Callable[[dict], object]] = {
        "arm": lambda run: run["arm"],
        "seed": lambda run: str(run["seed"]),
        "rate": rate_label,
        "norm": lambda run: run["norm_visual"][0] / run["norm_text"][0],
        "cos v": lambda run: f"{run['cosine_visual'][0]:.2f}",
        "cos t": lambda run: f"{run['cosine_text'][0]:.2f}",
        "caption": lambda run: run["stage1_caption_loss"],
        "visual": lambda run: run["visual_accuracy"],
        "blank": lambda run: run["visual_accuracy_blank"],
        "text": lambda run: run["text_accuracy_after"],
        "95 %": lambda run: run["steps_to_95"],
    }
    for name in columns:
        table.add_column(name, justify="left" if name == "arm" else "right", no_wrap=True)
    for run in results["runs"]:
        table.add_row(*(number(column(run)) for column in columns.values()))
    return table
