"""The survey of released models: one committed CSV table that `minillava probe --survey` appends to.

`docs/survey.md` says what each column means. Rows that others published have their source in the column `source`; rows
that this probe measured say "measured".
"""

from __future__ import annotations

import csv
import io
import math
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parents[1] / "docs" / "survey.csv"
_NORMS = ("encoder", "projector", "visual", "text", "vocabulary")
_TURNS = ("turn_visual", "turn_text", "cosine_visual", "cosine_text")
COLUMNS = ("model", "revision", "date", *_NORMS, "ratio", *_TURNS, "verdict", "samples", "source")


def row_of(result: dict[str, Any]) -> dict[str, str]:
    """The row of a probe's result, by column."""
    interface, data = result["interface"], result["trace"].data
    numbers = {name: interface[name]["mean"] for name in _NORMS}
    numbers["ratio"] = interface["ratio_text"]
    for modality in ("visual", "text"):
        numbers[f"turn_{modality}"] = math.degrees(data[modality]["turn"][0])
        numbers[f"cosine_{modality}"] = data[modality]["layer_cosine"][0]
    words = {
        "model": result["model"],
        "revision": result["revision"],
        "date": datetime.now(timezone.utc).date().isoformat(),
        "verdict": result["verdict"]["kind"],
        "samples": str(result["samples"]),
        "source": "measured",
    }
    return words | {name: f"{value:.4g}" for name, value in numbers.items()}


def append(row: dict[str, str], table: Path = TABLE) -> None:
    """Add a row at the end of a survey. Raises ValueError where there is none, or one with other columns."""
    if not table.is_file():
        raise ValueError(f"--survey: {table.name} is not beside this package; run the probe from a checkout")
    with table.open(newline="", encoding="utf-8") as opened:
        header = next(csv.reader(opened), [])
    if tuple(header) != COLUMNS:
        raise ValueError(f"--survey: {table.name} has the columns {', '.join(header)}, not {', '.join(COLUMNS)}")
    text = io.StringIO()
    csv.DictWriter(text, COLUMNS, lineterminator="\n").writerow(row)
    with table.open("a", encoding="utf-8") as opened:
        opened.write(text.getvalue())  # one write: two probes at once do not mix their rows
