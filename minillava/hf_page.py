"""What the probe of a Hugging Face model found, for the terminal, as `probe.json`, and as one self-contained page."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from minillava import figures
from minillava.page import Page
from minillava.probe import Trace, plain
from minillava.style import MODALITY_COLOURS, canvas, in_style, modality_style

PLACES = {
    "encoder": "encoder output",
    "projector": "after the projector",
    "visual": "visual, as the LM receives it",
    "text": "text, as the LM receives it",
    "vocabulary": "whole vocabulary",
}


def show(result: dict[str, Any], console: Console) -> None:
    """Print the tables and the verdict."""
    table = Table("where", "mean norm", "± std", "harmonic mean", title="Norms at the interface", box=SIMPLE_HEAD)
    for row in interface_rows(result):
        table.add_row(*row)
    console.print(table)
    figures.show(result["trace"], console)
    table = Table("tokens", "turned", "exact", "means", "shared C, φ", title="What theory explains", box=SIMPLE_HEAD)
    for row in audit_rows(result):
        table.add_row(*row)
    console.print(table)
    for title, header, rows in extra_tables(result):
        table = Table(*header, title=title, box=SIMPLE_HEAD)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    console.print(f"Verdict ({result['verdict']['kind']}): {result['verdict']['words']}")


def interface_rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = [(words, result["interface"][name]) for name, words in PLACES.items()]
    return [(words, *(f"{found[key]:.4g}" for key in ("mean", "std", "harmonic"))) for words, found in rows]


def audit_rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = {modality: result["audit"][modality] for modality in ("visual", "text")}
    return [
        (name, f"{row['turned']:.3f} rad", *(f"{100 * row[key]:.1f} %" for key in ("exact", "means", "shared")))
        for name, row in rows.items()
    ]


def extra_tables(result: dict[str, Any]) -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    """Tables of what was measured on request: title, header, rows."""
    tables: list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]] = []
    if "attention" in result:
        mass: list[tuple[str, ...]] = [
            (str(i + 1), f"{value:.3f}") for i, value in enumerate(result["attention"]["mass"])
        ]
        title = f"Attention that text gives to the image (even attention: {result['attention']['uniform']:.3f})"
        tables.append((title, ("layer", "share"), mass))
    if "interventions" in result:
        title = "Visual tokens scaled as they enter the trained model (means over samples, and over layers)"
        header = ("what", "scale", "KL [nat]", "attention on image", "cos(K', K)", "cos(V', V)")
        rows = [
            (name, *(figures_of(found[key]) for key in ("scale", "kl", "mass", "keys", "values")))
            for name, found in result["interventions"].items()
        ]
        tables.append((title, header, rows))
    return tables


def figures_of(value: Any) -> str:
    """A number or the mean of several, to four digits; a dash where there is none."""
    if value is None:
        return "–"
    return f"{np.mean(value):.4g}"


@in_style()
def plot_overlay(result: dict[str, Any]) -> Figure:
    """Norm, turn and cosine through the layers, with what theory says of each laid over it."""
    trace: Trace = result["trace"]
    figure, panels = canvas(1, 3, 9.6, 3.8)
    x = figures.depths(trace, "state_norm", 0)
    for modality, rows in trace.data.items():
        colour, style = MODALITY_COLOURS[modality], modality_style(modality)
        theory: dict[str, Any] = {"color": colour, "linewidth": 0.9}
        panels[0].plot(x, rows["state_norm"], label=modality, **style)
        panels[0].plot(x, result["theory"][modality], linestyle=":", label=f"{modality}, theory: mean C, φ", **theory)
        panels[1].plot(x[1:], rows["turn"] * figures.DEGREES, **style)
        panels[1].plot(x[1:], rows["turn_at_shared"] * figures.DEGREES, linestyle=":", **theory)
        panels[2].plot(x[1:], rows["cosine"], **style)
        panels[2].plot(x[1:], np.cos(rows["turn_at_shared"]), linestyle=":", **theory)
    panels[0].set(yscale="log", ylabel="L2 norm [embedding units]")
    panels[1].set_ylabel("turn θ of a step [°] (dotted: C, φ shared)")
    panels[2].set_ylabel("cosine of a step (dotted: C, φ shared)")
    for panel in panels:
        panel.set_xlabel("depth [layers]")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    return figure


@in_style()
def plot_map(maps: np.ndarray, layers: list[int]) -> Figure:
    """Attention of the last token on the image in some layers (from 0): (L, rows, columns), one colour scale."""
    figure, panels = canvas(1, len(layers), 1.5 * len(layers) + 1.2, 2.2)
    for panel, layer in zip(panels, layers, strict=True):
        drawn = panel.imshow(maps[layer], vmin=0, vmax=float(maps[layers].max()))
        panel.set(title=f"layer {layer + 1}", xticks=[], yticks=[])
        panel.grid(visible=False)
    figure.colorbar(drawn, ax=panels, label="attention [share]")
    return figure


def save(result: dict[str, Any], out: Path) -> Path:
    """Write `probe.json` and the page with its figures into a folder; returns the page's path."""
    out.mkdir(parents=True, exist_ok=True)
    stored = plain(result | {"trace": asdict(result["trace"])})
    (out / "probe.json").write_text(json.dumps(stored, indent=1))
    page, trace = Page(out), result["trace"]
    page.text(f"# Probe of {result['model']}", f"**{result['verdict']['kind']}.** {result['verdict']['words']}")
    tokens = " and ".join(f"{count} {name}" for name, count in trace.tokens.items())
    page.text(f"{result['samples']} sample(s), {tokens} tokens (a prompt's first token is left out).")
    page.text("## Norms at the interface")
    page.table(("where", "mean norm", "± std", "harmonic mean"), interface_rows(result))
    gain = result["gain"]
    page.text(
        f"Alignment would start from the gain T/√D = {gain['T']:.4g}/√{gain['width']} = {gain['gain']:.4g}.",
        "## Layer by layer",
    )
    says = "Norm, turn and cosine through the layers; dotted: what theory says, told less and less."
    page.figure("overlay", plot_overlay(result), says)
    says = "Measured turn of each step against theory: told everything, told means, told means that both share."
    page.figure("predictions", figures.plot_predictions(trace), says)
    says = "Update sizes C and angles φ: are they the same for both modalities, as the paper assumes (A1, A2)?"
    page.figure("steps", figures.plot_steps(trace), says)
    page.figure("cosines", figures.plot_cosines({"model": trace}), "Cosine to the layer's input, layer by layer.")
    page.text("## The assumption audit: share of the turning that theory explains")
    page.table(("tokens", "turned", "exact", "means", "shared C, φ"), audit_rows(result))
    met = result["meeting"]
    measured = "not within the model" if met["measured"] is None else f"{met['measured']} layers"
    page.text(f"Norms within ten percent: measured {measured}, predicted {met['predicted']:.1f} layers (D2).")
    for title, header, rows in extra_tables(result):
        page.text(f"## {title}")
        page.table(header, rows)
    if result.get("attention", {}).get("map") is not None:
        maps = np.asarray(result["attention"]["map"])
        layers = sorted({round(i) for i in np.linspace(0, len(maps) - 1, 5)})
        page.figure("map", plot_map(maps, layers), "Where the last token of the first prompt looks.")
    return page.write()
