"""Figures of training: accuracy, gain and caption loss, per arm; several seeds are thin lines of one colour."""

from __future__ import annotations

from matplotlib.figure import Figure

from minillava.compare import rate_label
from minillava.style import arm_style, canvas, in_style


@in_style()
def plot_accuracy(runs: list[dict]) -> Figure:
    """Visual accuracy against steps of stage 2, one panel per learning rate."""
    rates = list(dict.fromkeys(rate_label(run) for run in runs))
    figure, panels = canvas(1, len(rates), max(4.8, 3.9 * len(rates)), 3.5, sharey=True)
    for panel, rate in zip(panels, rates, strict=True):
        for run in runs:
            if rate_label(run) == rate:
                points = [
                    (row["step"], 100 * row["visual_accuracy"])
                    for row in run["stage2_rows"]
                    if "visual_accuracy" in row
                ]
                panel.plot(*zip(*points, strict=True), label=run["arm"], **arm_style(run["arm"]) | thin(run, runs))
        panel.axhline(95, color="#555555", linewidth=0.8, linestyle=":")
        panel.set(title=f"stage 2 learning rate {rate}", xlabel="step")
    panels[0].set_ylabel("visual questions answered exactly [%]")
    _legend_once(figure, panels[0])
    return figure


@in_style()
def plot_gain(runs: list[dict]) -> Figure:
    """Mean |g| of the arm's LayerNorm against steps, through both stages: 'aligned' at the start need not stay so."""
    rates = list(dict.fromkeys(rate_label(run) for run in runs))
    figure, panels = canvas(1, len(rates), max(4.8, 3.9 * len(rates)), 3.5, sharey=True)
    for panel, rate in zip(panels, rates, strict=True):
        for run in runs:
            if rate_label(run) == rate and "gain_mean" in run["stage1_rows"][-1]:
                first = [(row["step"], row["gain_mean"]) for row in run["stage1_rows"]]
                end = first[-1][0]
                points = first + [(end + row["step"], row["gain_mean"]) for row in run["stage2_rows"]]
                panel.plot(*zip(*points, strict=True), label=run["arm"], **arm_style(run["arm"]) | thin(run, runs))
                panel.axvline(end, color="#555555", linewidth=0.8, linestyle=":")
        panel.set(title=f"stage 2 learning rate {rate}", xlabel="step (dotted: stage 2 begins)", yscale="log")
    panels[0].set_ylabel("mean |gain| [no unit]")
    _legend_once(figure, panels[0])
    return figure


@in_style()
def plot_stage1(runs: list[dict]) -> Figure:
    """Caption loss after stage 1 beside accuracy after stage 2: do they rank the arms alike?"""
    rates = list(dict.fromkeys(rate_label(run) for run in runs))
    figure, panels = canvas(1, len(rates), max(4.8, 3.9 * len(rates)), 3.5, sharey=True)
    for panel, rate in zip(panels, rates, strict=True):
        for run in runs:
            if rate_label(run) == rate:
                style = arm_style(run["arm"]) | {"linestyle": "none", "markersize": 7}
                panel.plot(run["stage1_caption_loss"], 100 * run["visual_accuracy"], label=run["arm"], **style)
        panel.set(title=f"stage 2 learning rate {rate}", xlabel="caption loss after stage 1 [nats a token]")
    panels[0].set_ylabel("visual questions after stage 2 [%]")
    _legend_once(figure, panels[0])
    return figure


def thin(run: dict, runs: list[dict]) -> dict:
    """Line width by the number of seeds; markers only where one seed is drawn."""
    several = len({other["seed"] for other in runs}) > 1
    return {"linewidth": 0.9, "markersize": 2.5} if several else {"linewidth": 1.6, "markersize": 3.5}


def _legend_once(figure: Figure, panel) -> None:
    handles, labels = panel.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(unique.values(), unique.keys(), loc="outside lower center", ncols=min(7, len(unique)))
