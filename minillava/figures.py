"""What `probe` measured, as tables for the terminal and figures for the report.

Every function takes results of `minillava.probe` and returns a matplotlib `Figure` (pass it to `style.svg` or
`style.png`); nothing is drawn on screen. Where arms are compared, `traces` and the like are dicts from the arm's name.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator, StrMethodFormatter
from rich import box
from rich.console import Console
from rich.table import Table

from minillava.probe import CLOSING, MODALITIES, Trace
from minillava.style import MODALITY_COLOURS, SEQUENTIAL, arm_style, canvas, in_style, modality_style

DEGREES = 180 / np.pi
TITLES = {"visual": "Visual tokens", "text": "Text tokens"}
PREDICTIONS = {  # keys of a trace, and what theory was told
    "predicted_turn": "each token's own n, C, φ",
    "turn_at_means": "the means of n, C, φ",
    "turn_at_shared": "mean n, and C, φ shared",
}


# Tables --------------------------------------------------------------------------------------------------------------


def show(trace: Trace, console: Console | None = None) -> None:
    """Print a trace: one table of steps, one of layers, and how well theory's formula does."""
    console = console or Console()
    console.print(steps_table(trace))
    console.print(layers_table(trace))
    error = trace.formula_error["turn"] * DEGREES
    console.print(f"The formula of one step misses the measured turn of a single token by at most {error:.1e}°.")


def steps_table(trace: Trace) -> Table:
    """Every branch of every layer, visual above text: sizes, angles, the measured turn and theory's three."""
    title = "Steps: means over tokens\nnorm n and update C in embedding units, angles in degrees"
    caption = "θ is measured; then theory's, told each token's n, C and φ, or means, or one C and φ"
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("step", "tokens", "n", "±", "C", "φ", "θ", "each", "means", "shared"):
        table.add_column(heading, justify="left" if heading in ("step", "tokens") else "right", no_wrap=True)
    for i, step in enumerate(trace.steps):
        for modality, rows in trace.data.items():
            sizes = [f"{rows[key][i]:.3g}" for key in ("norm", "norm_std", "update")]
            angles = [_degrees(rows[key][i]) for key in ("angle", "turn", *PREDICTIONS)]
            label = step_label(step) if modality == "visual" else ""
            table.add_row(label, modality, *sizes, *angles, style=MODALITY_COLOURS[modality])
    return table


def step_label(step: str) -> str:
    """ "block0.attn" is layer 1's attention: layers are counted from 1 wherever people read."""
    return f"{step_layer(step) + 1} {step.split('.')[1]}"


def step_layer(step: str) -> int:
    """The layer, from 0, that "block0.attn" belongs to."""
    return int(step.split(".")[0].removeprefix("block"))


def layers_table(trace: Trace) -> Table:
    """Cosine of each layer's output to its input (the paper's update rate) and to the LM's input."""
    table = Table(
        title="Layers: cosine to the layer's input (± std) and to the LM's input", box=box.SIMPLE_HEAD, pad_edge=False
    )
    table.add_column("layer", justify="right")
    for modality in trace.data:
        for against in ("layer", "LM"):
            table.add_column(f"{modality}, {against}", justify="right", style=MODALITY_COLOURS[modality])
    ends = [i + 1 for i, step in enumerate(trace.steps) if step.endswith(CLOSING)]  # states that close a layer
    for i, end in enumerate(ends):
        cells = []
        for rows in trace.data.values():
            cells.append(f"{rows['layer_cosine'][i]:.3f} ± {rows['layer_cosine_std'][i]:.3f}")
            cells.append(f"{rows['input_cosine'][end]:.3f}")
        table.add_row(str(i + 1), *cells)
    return table


def _degrees(angle: float) -> str:
    return "–" if np.isnan(angle) else f"{angle * DEGREES:.1f}"


# Curves over depth ---------------------------------------------------------------------------------------------------


@in_style()
def plot_norms(traces: dict[str, Trace]) -> Figure:
    """Norms of the residual stream against depth (the paper's claim of persistence), on a logarithmic axis."""
    figure, panels = _depth_figure(traces, "state_norm", first=0)
    for panel in panels:
        _logarithmic(panel, "y")
    panels[0].set_ylabel("L2 norm of a token [embedding units]")
    return figure


@in_style()
def plot_cosines(traces: dict[str, Trace]) -> Figure:
    """Cosine between a token's states before and after each layer (RQ3): 1 is a token that did not turn."""
    figure, panels = _depth_figure(traces, "layer_cosine", first=1)
    for panel in panels:
        panel.set_ylim(top=1.02)
    panels[0].set_ylabel("cosine to the layer's input [no unit]")
    return figure


def _depth_figure(traces: dict[str, Trace], key: str, first: int) -> tuple[Figure, list[Axes]]:
    """One arm: both modalities in one panel, with a band of one standard deviation. More arms: a panel per modality."""
    if len(traces) == 1:
        figure, panels = canvas(1, 1, 4.8, 3.2)
        (data,) = (trace.data for trace in traces.values())
        for modality, rows in data.items():
            x = depths(next(iter(traces.values())), key, first)
            panels[0].plot(x, rows[key], label=modality, **modality_style(modality))
            low, high = rows[key] - rows[f"{key}_std"], rows[key] + rows[f"{key}_std"]
            low = np.maximum(low, rows[key] / 10) if key == "state_norm" else low  # a logarithm has no 0
            panels[0].fill_between(x, low, high, color=MODALITY_COLOURS[modality], alpha=0.15, linewidth=0)
        panels[0].legend()
    else:
        figure, panels = canvas(1, 2, 7.6, 3.4, sharey=True)
        for panel, modality in zip(panels, MODALITIES, strict=True):
            panel.set_title(TITLES[modality])
            for arm, trace in traces.items():
                rows = trace.data[modality]
                panel.plot(depths(trace, key, first), rows[key], label=arm, **arm_style(arm))
        _legend_below(figure, panels[0])
    for panel in panels:
        panel.set_xlabel("depth [layers]")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, panels


def depths(trace: Trace, key: str, first: int) -> np.ndarray:
    """Depth of each value of `key` in layers; states lie between layers too (after attention)."""
    if key != "state_norm":
        return np.arange(first, first + len(trace.data["visual"][key]))
    halfway = [0.5 if step.endswith(".attn") else 1.0 for step in trace.steps]
    return np.array([0.0] + [step_layer(step) + half for step, half in zip(trace.steps, halfway, strict=True)])


def _logarithmic(panel: Axes, direction: str) -> None:
    """Logarithmic x or y with plain numbers; an axis of less than a decade also labels numbers between."""
    panel.set(**{f"{direction}scale": "log"})
    axis = panel.xaxis if direction == "x" else panel.yaxis
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(1, 0.5)))


def _legend_below(figure: Figure, panel: Axes) -> None:
    handles, labels = panel.get_legend_handles_labels()
    rows = -(-len(labels) // 7)  # more would run out of the figure
    figure.legend(handles, labels, loc="outside lower center", ncols=-(-len(labels) // rows))


# Steps ---------------------------------------------------------------------------------------------------------------


@in_style()
def plot_steps(trace: Trace) -> Figure:
    """Update size C and angle φ of every branch: are they the same for both modalities, as A1 and A2 assume?"""
    figure, panels = canvas(1, 2, 7.6, 3.7)
    x = np.arange(len(trace.steps))
    for modality, rows in trace.data.items():
        shift = 0.08 if modality == "visual" else -0.08  # so that the bars of the two do not hide each other
        style = modality_style(modality) | {"capsize": 2, "elinewidth": 0.8, "label": modality}
        below = np.minimum(rows["update_std"], 0.9 * rows["update"])  # a logarithm has no 0
        panels[0].errorbar(x + shift, rows["update"], [below, rows["update_std"]], **style)
        panels[1].errorbar(x + shift, rows["angle"] * DEGREES, rows["angle_std"] * DEGREES, **style)
    _logarithmic(panels[0], "y")
    panels[0].set_ylabel("update size C [embedding units]")
    panels[1].axhline(90, color="#555555", linewidth=0.8)
    panels[1].set_ylabel("angle φ of token and update [°]")
    for panel in panels:
        every = -(-len(x) // 24)  # more labels would run into each other
        panel.set_xticks(x[::every], [step_label(step) for step in trace.steps[::every]], rotation=90)
        panel.set_xlabel("step [layer, branch]")
    _legend_below(figure, panels[0])
    return figure


@in_style()
def plot_predictions(trace: Trace) -> Figure:
    """Measured turn of each step against theory: told everything (R1), means (R6), the paper's view (A1, A2)."""
    figure, panels = canvas(1, 3, 9.0, 3.9, sharex=True, sharey=True)
    turns = np.concatenate([rows[key] for rows in trace.data.values() for key in ("turn", *PREDICTIONS)]) * DEGREES
    turns = turns[turns > 0]  # neither NaN nor the 0 of a branch that does nothing has a logarithm
    limits = (turns.min() / 1.3, turns.max() * 1.3) if len(turns) else (1, 90)
    for panel, (key, told) in zip(panels, PREDICTIONS.items(), strict=True):
        panel.plot(limits, limits, color="#555555", linewidth=0.8, label="theory = measurement")
        for modality, rows in trace.data.items():
            style = modality_style(modality) | {"linestyle": "none", "alpha": 0.8, "label": modality}
            panel.plot(rows[key] * DEGREES, rows["turn"] * DEGREES, **style)
        _logarithmic(panel, "x")
        _logarithmic(panel, "y")
        panel.set(
            title=f"theory knows\n{told}", xlabel="predicted turn θ [°]", xlim=limits, ylim=limits, aspect="equal"
        )
    panels[0].set_ylabel("measured turn θ [°]")
    _legend_below(figure, panels[0])
    return figure


# Attention, signal, content ------------------------------------------------------------------------------------------


@in_style()
def plot_attention_maps(
    maps: np.ndarray, pictures: np.ndarray, captions: Sequence[str], layers: Sequence[int] | None = None
) -> Figure:
    """Where the answer looks: one row per sample, its picture and then one map per layer.

    maps: (B, L, side, side) from `attention_map`; pictures: uint8 (B, 3, S, S); captions: one line for each, say
    question, answer and truth; `layers` chooses some (from 0). One colour scale for all.
    """
    layers = range(maps.shape[1]) if layers is None else layers
    B, columns = len(maps), len(layers) + 1
    if not len(pictures) == len(captions) == B:
        raise ValueError(f"{B} maps, {len(pictures)} pictures and {len(captions)} captions must be as many")
    width = 1.15 * columns + 0.9  # inches
    captions = [textwrap.fill(caption, round(11 * width)) for caption in captions]
    heights = [1.45 + 0.16 * (1 + caption.count("\n")) for caption in captions]
    figure = Figure((width, sum(heights)), layout="constrained")
    left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=[width - 0.9, 0.9])[0]
    rows = left.subfigures(B, 1, squeeze=False, height_ratios=heights)[:, 0]
    scale = Normalize(0, float(maps[:, list(layers)].max()))
    for row, sample, picture, caption in zip(rows, maps, pictures, captions, strict=True):
        row.suptitle(caption, x=0.01, ha="left", fontsize=9)
        panels = row.subplots(1, columns)
        panels[0].imshow(picture.transpose(1, 2, 0))
        panels[0].set_xlabel("image")
        for panel, layer in zip(panels[1:], layers, strict=True):
            panel.imshow(sample[layer], cmap=SEQUENTIAL, norm=scale)
            panel.set_xlabel(f"layer {layer + 1}")
        for panel in panels:
            panel.set(xticks=[], yticks=[])
            panel.grid(visible=False)
            panel.spines[:].set_visible(False)
    right.colorbar(ScalarMappable(scale, SEQUENTIAL), cax=right.subplots(), label="attention [share]")
    return figure


@in_style()
def plot_signal(result: dict) -> Figure:
    """The paper's signal against the visual norm, one line per layer (claim C): does a quieter image speak clearer?"""
    figure, panels = canvas(1, 2, 8.4, 3.7)
    L = result["mass"].shape[1]
    order = np.argsort(result["norm_visual"])
    scale = BoundaryNorm(np.arange(0.5, L + 1), 256)
    labels = {"standardised": "score, relevant − irrelevant [std]", "mass": "attention on relevant tokens [share]"}
    for panel, (key, label) in zip(panels, labels.items(), strict=True):
        for layer in range(L):
            colour = colormaps[SEQUENTIAL](scale(layer + 1))
            panel.plot(result["norm_visual"][order], result[key][order, layer], color=colour, marker="o")
        panel.axvline(result["norm_text"], label="norm of text", **_upright("text"))
        panel.axvline(_norm_as_is(result), label="visual norm, as trained", **_upright("visual"))
        _logarithmic(panel, "x")
        panel.set(xlabel="mean norm of visual tokens [embedding units]", ylabel=label)
    ticks = np.unique(np.linspace(1, L, min(L, 8)).round())
    figure.colorbar(ScalarMappable(scale, SEQUENTIAL), ax=panels, label="layer [number]", ticks=ticks)
    _legend_below(figure, panels[0])
    return figure


def _upright(modality: str) -> dict:
    return {"color": MODALITY_COLOURS[modality], "linestyle": {"visual": "-.", "text": ":"}[modality]}


def _norm_as_is(result: dict) -> float:
    """The visual norm at scale 1, whether or not that scale was measured: norms are proportional to scales."""
    return float(result["norm_visual"][0] / result["scale"][0])


@in_style()
def plot_content(results: dict[str, dict]) -> Figure:
    """What visual tokens say about their own cell, layer by layer, per arm ('semantically slower')."""
    figure, (panel,) = canvas(1, 1, 5.4, 3.6)
    for arm, result in results.items():
        panel.plot(np.arange(len(result["accuracy"])), 100 * result["accuracy"], label=arm, **arm_style(arm))
    chance = 100 * max(result["chance"] for result in results.values())
    panel.axhline(chance, color="#555555", linewidth=0.8, linestyle=":", label="most frequent class")
    panel.set(xlabel="depth [layers]", ylabel="linear probe on held-out images [%]", ylim=(0, 103))
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend_below(figure, panel)
    return figure
