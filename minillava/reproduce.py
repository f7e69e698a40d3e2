"""`minillava reproduce`: every variant, every seed, one report.

Variants are independent, so they run in worker processes, each on its share of the cores: two arms at a time on one
thread each finish sooner than one arm after the other on two. Whatever was finished before is not done again: towers
come from the cache, and each stage resumes from its last saved state.
"""

from __future__ import annotations

import json
import math
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import joblib
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from minillava.evaluate import accuracy, mean_loss
from minillava.experiment import (
    Run,
    cache_folder,
    load_world,
    memory_gb,
    preset_from_json,
    preset_to_json,
    pretrain_language,
    pretrain_vision,
    run_variant,
)
from minillava.layer_norm import is_compiled
from minillava.presets import VARIANTS, Preset
from minillava.tokenizer import world_tokenizer
from minillava.train import TrainingError

WIDENINGS = 3  # how often a grid may grow when its best value lies at an edge


def reproduce(preset: Preset, out: Path, jobs: int = 2, device: str = "cpu", console: Console | None = None) -> dict:
    """Run a preset and write `out/results.json`; returns what is in it (documented in docs/results.md).

    Raises ValueError for less than one job, CheckpointError if `out` holds stages of another experiment.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    console = console or Console()
    started = time.perf_counter()
    text = preset_to_json(preset)
    resumed = any(out.glob("*/*/step-*"))
    world_tokenizer(cache_folder())  # once, before the workers would all make it
    if not is_compiled():
        os.environ["MINILLAVA_REFERENCE"] = "1"  # workers need not look for kernels, nor say that there are none
    tower_seeds = preset.seeds if preset.pretrain_seeds else (0,)
    post_norm = sorted({VARIANTS[name].post_norm for name in preset.variants})
    parallel = Workers(jobs, console)

    towers = [(text, "vision", False, seed, device) for seed in tower_seeds]
    towers += [(text, "language", post, seed, device) for seed in tower_seeds for post in post_norm]
    tower_rows = parallel("pretraining towers", tower, towers)

    rates: dict[str, dict] = {}
    if preset.select:
        chosen = parallel("choosing rates", select_rates, [(text, name, str(out), device) for name in preset.variants])
        rates = {row["arm"]: row for row in chosen}
    work = [(text, name, seed, str(out), rates.get(name), device) for seed in preset.seeds for name in preset.variants]
    runs = [run for rows in parallel("training arms", run_quietly, work) for run in rows]

    order = {name: i for i, name in enumerate(preset.variants)}
    runs.sort(key=lambda run: (order[run["arm"]], run["seed"], run["stage2_lr"]))
    results = {
        "format": 1,
        "preset": asdict(preset),
        "machine": machine(device, jobs),
        "towers": tower_rows,
        "vit_cell_accuracy": mean(row["cell_accuracy"]["both"] for row in tower_rows if row["tower"] == "vision"),
        "lm_text_accuracy": mean(row["words"] for row in tower_rows if row["tower"] == "language"),
        "rates": rates,
        "runs": runs,
        "seconds": time.perf_counter() - started,
        "resumed": resumed,
        "peak_memory_gb": peak_memory(runs, jobs),
    }
    save_results(results, out)
    return results


def save_results(results: dict, out: Path) -> None:
    """Write `out/results.json`: a kill leaves the old file or the new one."""
    out.mkdir(parents=True, exist_ok=True)
    partial = out / ".results.json.partial"
    partial.write_text(json.dumps(results))
    partial.replace(out / "results.json")


class Workers:
    """Calls of one function in worker processes, with one line of progress."""

    def __init__(self, jobs: int, console: Console):
        self.jobs, self.console = jobs, console
        self.threads = max(1, torch.get_num_threads() // jobs)  # OMP_NUM_THREADS and containers count

    def __call__(self, label: str, function: Callable, calls: list[tuple]) -> list[Any]:
        # loky restarts a worker that has grown, and ours do: they keep their world
        warnings.filterwarnings("ignore", message="A worker stopped while some jobs were given")
        columns = (TextColumn(f"{label:<20}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        pool = joblib.Parallel(n_jobs=self.jobs, return_as="generator_unordered")
        finished = pool(joblib.delayed(in_worker)(self.threads, function, call) for call in calls)
        with Progress(*columns, console=self.console) as bar:
            return list(bar.track(finished, total=len(calls)))


def in_worker(threads: int, function: Callable, call: tuple) -> Any:
    torch.set_num_threads(threads)
    return function(*call)


def tower(preset_json: str, which: str, post_norm: bool, seed: int, device: str) -> dict:
    """Pretrain one tower, or find it in the cache, and say how good it is."""
    started = time.perf_counter()
    data = load_world(preset_json, seed, device)
    row: dict[str, Any] = {"tower": which, "post_norm": post_norm, "seed": seed}
    if which == "vision":
        row["cell_accuracy"] = pretrain_vision(data, show=False)[1]
    else:
        model = pretrain_language(data, post_norm, show=False).eval()
        row["words"] = accuracy(model, data.words("test"))["all"]["accuracy"]
        row["text"] = accuracy(model, data.text())["all"]["accuracy"]
    return row | {"seconds": time.perf_counter() - started}


def run_quietly(preset_json: str, name: str, seed: int, out: str, rates: dict | None, device: str) -> list[dict]:
    return run_variant(preset_json, name, seed, out, rates, device, show=False)


def select_rates(preset_json: str, name: str, out: str, device: str) -> dict:
    """Choose a variant's learning rates by the loss on the selection split, with its first seed: stage 1's rate (judged
    after a stage 2 at the middle rate), then stage 2's."""
    preset = preset_from_json(preset_json)
    run = Run(preset, name, preset.seeds[0], Path(out) / f"{name}-selection", device)

    def loss(stage1_lr: float, stage2_lr: float) -> float:
        try:
            model, _ = run.stage1(stage1_lr)
            run.stage2(model, stage2_lr, f"stage2-{stage1_lr:g}-{stage2_lr:g}")
            return mean_loss(model, run.questions("selection"))
        except TrainingError:  # a rate at which training diverges is a bad rate, not the end of the experiment
            return math.inf

    middle = sorted(preset.stage2_lrs)[len(preset.stage2_lrs) // 2]
    first = search(preset.stage1_lrs, lambda lr: loss(lr, middle))
    second = search(preset.stage2_lrs, lambda lr: loss(first["best"], lr))
    return {"arm": name, "stage1_lr": first["best"], "stage2_lr": second["best"], "stage1": first, "stage2": second}


def search(grid: Iterable[float], loss: Callable[[float], float]) -> dict:
    """The value of lowest loss (of equals the smallest); the grid grows by a factor of about 3 beyond an edge that
    holds the best.

    Returns `best`, all `losses` by value (None where it was not finite), and `interior`: whether the best ended inside
    the grid.
    """

    def finite(value: float) -> float:
        return value if math.isfinite(value) else math.inf

    def lowest() -> float:
        return min(losses, key=lambda value: (losses[value], value))

    losses = {value: finite(loss(value)) for value in grid}
    for _ in range(WIDENINGS):
        best = lowest()
        if min(losses) < best < max(losses):
            break
        value = float(f"{best * (1 / 3.2 if best == min(losses) else 3.2):.1g}")
        losses[value] = finite(loss(value))
    best = lowest()
    return {
        "best": best,
        "losses": {f"{v:g}": losses[v] if losses[v] < math.inf else None for v in sorted(losses)},
        "interior": min(losses) < best < max(losses),
    }


def mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)


def peak_memory(runs: list[dict], jobs: int) -> float:
    """GiB: this process at its peak, plus the largest workers as if all had peaked at once (an upper bound)."""
    return memory_gb() + sum(sorted((run["worker_memory_gb"] for run in runs), reverse=True)[:jobs])


def machine(device: str, jobs: int) -> dict:
    """What it ran on, for the report."""
    name = torch.cuda.get_device_name() if device.startswith("cuda") else platform.processor() or platform.machine()
    return {
        "device": device,
        "name": name,
        "cores": os.cpu_count(),
        "jobs": jobs,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
