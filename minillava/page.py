"""A page that grows piece by piece: Markdown with figures beside it, and the same as one self-contained HTML file."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from pathlib import Path

from markdown_it import MarkdownIt
from matplotlib.figure import Figure

from minillava import style

CSS = """
body { font: 16px/1.55 system-ui, sans-serif; color: #1b1b1b; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h1, h2 { line-height: 1.2 } h2 { margin-top: 2.6rem; border-bottom: 1px solid #ddd; padding-bottom: .2rem }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; font-size: .9rem }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #e4e4e4; text-align: right } th { border-bottom-color: #888 }
th:first-child, td:first-child { text-align: left; white-space: nowrap }
img { max-width: 100%; height: auto } .scroll { overflow-x: auto }
code { background: #f3f3f3; padding: .1rem .3rem; border-radius: 3px }
"""


class Page:
    """Its text, tables and figures, in a folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.parts: list[str] = []
        (folder / "figures").mkdir(parents=True, exist_ok=True)

    def text(self, *paragraphs: str) -> None:
        self.parts += paragraphs

    def table(self, header: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
        lines = [list(header)]
        lines.append(["---"] * len(lines[0]))
        lines += [[cell if isinstance(cell, str) else number(cell) for cell in row] for row in rows]
        escaped = [[cell.replace("|", r"\|") for cell in line] for line in lines]  # |g| is no column
        self.parts.append("\n".join("| " + " | ".join(line) + " |" for line in escaped))

    def figure(self, name: str, figure: Figure, says: str) -> None:
        (self.folder / "figures" / f"{name}.svg").write_text(style.svg(figure))
        self.parts.append(f"![{says}](figures/{name}.svg)\n\n*{says}*")

    def write(self) -> Path:
        markdown = "\n\n".join(self.parts) + "\n"
        (self.folder / "report.md").write_text(markdown)
        html = MarkdownIt("commonmark").enable("table").render(markdown)
        html = html.replace("<table>", '<div class="scroll"><table>').replace("</table>", "</table></div>")
        for path in sorted((self.folder / "figures").glob("*.svg")):
            data = base64.b64encode(path.read_bytes()).decode()
            html = html.replace(f'src="figures/{path.name}"', f'src="data:image/svg+xml;base64,{data}"')
        head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><style>{CSS}</style>'
        head += "<title>minillava report</title>"
        page = f'<!doctype html><html lang="en"><head>{head}</head><body>{html}</body></html>'
        (self.folder / "report.html").write_text(page)
        return self.folder / "report.html"


def number(value: object) -> str:
    if value is None or value != value:  # a NaN is the only value that differs from itself
        return "–"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)
