"""What the tutorials need to talk to their reader: pictures, quoted numbers, one drawing, the explorer."""

from __future__ import annotations

import builtins
import html
import sys
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Arc

import theory
from minillava.style import MODALITY_COLOURS, svg

DEGREES = 180 / np.pi
GREY = "#555555"
PICTURES = Path(__file__).resolve().parent / "pictures"
EXPLORER = Path(__file__).resolve().parents[1] / "docs" / "explorer.html"


class Picture:
    """A figure that a notebook shows as vector graphics, and a screen reader as a sentence. Run as a script, a tutorial
    writes its pictures into `tutorials/pictures` and says where."""

    count = 0

    def __init__(self, figure: Figure, sentence: str):
        self.figure, self.sentence = figure, sentence
        if not hasattr(builtins, "__IPYTHON__"):
            Picture.count += 1
            file = PICTURES / f"{Path(sys.argv[0]).stem}-{Picture.count}.svg"
            file.parent.mkdir(exist_ok=True)
            file.write_text(svg(figure), encoding="utf-8")
            print(f"{file}: {sentence}")

    def _repr_svg_(self) -> str:
        label = html.escape(self.sentence, quote=True)
        return svg(self.figure).replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)

    def __repr__(self) -> str:
        return f"Picture: {self.sentence}"


def quote(text: str, value: float) -> None:
    """Asserts that `value`, rounded as `text` is, reads `text`: every number in the prose goes through here."""
    decimals = len(text.partition(".")[2])
    got = f"{value:.{decimals}f}"
    assert got == text, f"the prose says {text}, the code gives {got} ({value!r})"
    print(text)


class Explorer:
    """The page docs/explorer.html inside a notebook."""

    def __init__(self, height: int = 900):
        self.height = height

    def _repr_html_(self) -> str:
        page = html.escape(EXPLORER.read_text(encoding="utf-8"), quote=True)
        style = f"width:100%;height:{self.height}px;border:1px solid #ccc"
        return f'<iframe title="Explorer: how a token turns" style="{style}" srcdoc="{page}"></iframe>'

    def __repr__(self) -> str:
        return "The explorer: open docs/explorer.html in a browser"


def arrow(panel: Axes, start: tuple[float, float], end: tuple[float, float], colour: str, width: float = 1.8) -> None:
    """An arrow from start to end in data coordinates; matplotlib's annotation without a text."""
    style = {"arrowstyle": "-|>", "color": colour, "linewidth": width, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 11}
    panel.annotate("", end, start, arrowprops=style)


def draw_step(panel: Axes, modality: str, norm: float, update: float, angle: float) -> None:
    """One residual update: the token, what is added, and the token afterwards, which has turned by θ."""
    colour, tip = MODALITY_COLOURS[modality], (norm, 0.0)
    after = (norm + update * np.cos(angle), update * np.sin(angle))
    turn = float(theory.step_angle(norm, update, angle)) * DEGREES
    arrow(panel, (0.0, 0.0), tip, colour)
    arrow(panel, tip, after, GREY)
    arrow(panel, (0.0, 0.0), after, colour, 3.0)
    low, high = min(0.0, after[0]), max(norm, after[0])
    radius = 0.5 * norm
    panel.add_patch(Arc((0, 0), 2 * radius, 2 * radius, theta1=0, theta2=turn, color=GREY, linewidth=1))
    margin = 0.15 * max(high - low, after[1])
    panel.set(xlim=(low - margin, high + margin), ylim=(-margin, after[1] + 2 * margin), aspect="equal")
    panel.set_title(f"{modality}: n = {norm:g}, C = {update:g}, φ = {angle * DEGREES:.0f}°\nturns θ = {turn:.1f}°")
