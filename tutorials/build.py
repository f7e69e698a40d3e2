"""Executes the tutorials and writes them as notebooks with their outputs.

    python tutorials/build.py               all of them
    python tutorials/build.py 00 03         those whose names begin so

The same source gives the same notebook: no time, no machine, no count of runs is left in it. The source's hash is
written into the notebook, so that a test can tell a notebook that was not made from its source.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
CELL_SECONDS = 300


def sources(*prefixes: str) -> list[Path]:
    """The tutorials' sources in reading order, or those whose names begin with one of the prefixes."""
    found = sorted(HERE.glob("[0-9][0-9]_*.py"))
    return [path for path in found if not prefixes or path.name.startswith(prefixes)]


def source_hash(source: Path) -> str:
    return hashlib.sha256(source.read_bytes()).hexdigest()


def execute(source: Path) -> nbformat.NotebookNode:
    """Runs a source and returns its notebook. Raises `CellExecutionError` for a cell that fails."""
    notebook = jupytext.read(source, fmt="py:percent")
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
            "language_info": {"name": "python"},
        }
    )
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number}", nbformat.from_dict({})
    # No warning that the LayerNorm is not compiled, or that tqdm misses a package: neither is part of a tutorial.
    quiet = {"MINILLAVA_REFERENCE": "1", "PYTHONWARNINGS": "ignore:IProgress not found"}
    seconds = {"timeout": CELL_SECONDS, "startup_timeout": CELL_SECONDS}
    client = NotebookClient(notebook, kernel_name="python3", record_timing=False, **seconds)
    client.execute(cwd=str(HERE), env=os.environ | quiet)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = joined(cell.outputs)
    notebook.metadata.language_info = nbformat.from_dict({"name": "python"})
    notebook.metadata.minillava = nbformat.from_dict({"source": source.name, "sha256": source_hash(source)})
    refuse_traces(source, nbformat.writes(notebook))
    return notebook


def joined(outputs: list) -> list:
    """Outputs with what one stream printed in a row as one: where it was cut is a matter of chance."""
    kept: list = []
    for output in outputs:
        if kept and output.output_type == kept[-1].output_type == "stream" and output.name == kept[-1].name:
            kept[-1].text += output.text
        else:
            kept.append(output)
    return kept


def refuse_traces(source: Path, text: str) -> None:
    """A notebook that names a place on this machine must not be committed."""
    for place in (str(HERE.parent), str(Path.home()), sys.prefix):
        if len(place) > 1 and place in text:
            line = next(line for line in text.splitlines() if place in line)
            raise ValueError(f"{source.name}: its output names this machine's {place}: {line.strip()[:200]}")


def build(source: Path) -> Path:
    """Writes the notebook beside its source, and only once it is complete."""
    target = source.with_suffix(".ipynb")
    partial = target.with_suffix(".partial")
    partial.write_text(nbformat.writes(execute(source)) + "\n", encoding="utf-8")
    partial.replace(target)
    return target


def main(prefixes: list[str]) -> int:
    chosen = sources(*prefixes)
    if not chosen:
        print(f"error: no tutorial begins with {' or '.join(prefixes)}", file=sys.stderr)
        return 2
    for source in chosen:
        started = time.perf_counter()
        target = build(source)
        print(f"{target.name}: {time.perf_counter() - started:.1f} s, {target.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
