"""The house style of figures: one colour for each modality and each arm, everywhere, and no global state.

Colours are Okabe and Ito's, which people with any common colour vision tell apart; there are not enough of them (yellow
is too pale for a line on white), so the last two arms are grey and brown. No figure relies on colour alone: arms have
their own markers, modalities their own lines.
"""

from __future__ import annotations

import io
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

MODALITY_COLOURS = {"visual": "#D55E00", "text": "#0072B2"}
MODALITY_LINES = {"visual": "-", "text": (0, (4, 2))}
MODALITY_MARKERS = {"visual": "o", "text": "s"}
ARM_COLOURS = {
    "base": "#000000",
    "default": "#E69F00",
    "aligned": "#009E73",
    "gwc": "#56B4E9",
    "scale": "#CC79A7",
    "discrete": "#B0B0B0",
    "post-norm": "#7A2E2E",
    "aligned-frozen": "#4B4BA0",
    "aligned-low": "#8A8A3C",
}
ARM_MARKERS = dict(zip(ARM_COLOURS, "osD^vPX*h", strict=True))
SEQUENTIAL = "viridis"  # for quantities with an order, such as layers or attention

RC: dict[Any, Any] = {
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "savefig.dpi": 150,
    "svg.hashsalt": "minillava",  # the same figure gives the same bytes
}


def in_style():
    """Decorator (or context) in which a figure must be drawn."""
    return matplotlib.rc_context(RC)


def canvas(rows: int, columns: int, width: float, height: float, **subplots) -> tuple[Figure, list[Axes]]:
    """An empty figure of rows × columns panels, size in inches, and its axes row by row."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, **subplots).flat)


def arm_style(arm: str) -> dict:
    """Line style of an arm, as keyword arguments of `plot`. Raises ValueError for an arm without a colour."""
    if arm not in ARM_COLOURS:
        raise ValueError(f"arm '{arm}' has no colour: the house knows {', '.join(ARM_COLOURS)}")
    return {"color": ARM_COLOURS[arm], "marker": ARM_MARKERS[arm]}


def modality_style(modality: str) -> dict:
    """Line style of a modality, as keyword arguments of `plot`."""
    return {
        "color": MODALITY_COLOURS[modality],
        "marker": MODALITY_MARKERS[modality],
        "linestyle": MODALITY_LINES[modality],
    }


def svg(figure: Figure) -> str:
    """The figure as an `<svg>` element that an HTML page can hold."""
    buffer = io.StringIO()
    with in_style():
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def png(figure: Figure) -> bytes:
    """The figure as the bytes of a PNG file."""
    buffer = io.BytesIO()
    with in_style():
        figure.savefig(buffer, format="png")
    return buffer.getvalue()
