"""`minillava probe` on one of our own models: the built-in world is its test bench."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from minillava import figures, probe, style
from minillava.attention import attention_mass
from minillava.checkpoint import load_model
from minillava.data import Pool
from minillava.world import WorldConfig, build_split, visual_questions


def probe_world(path: Path, images: int, out: Path | None, attention: bool, console: Console) -> dict:
    """Trace a model folder on questions about `images` scenes; print tables, write probe.json and figures to `out`."""
    model, tokenizer, notes = load_model(path)
    world = WorldConfig(
        **notes.get("world", {}) | {"eval_scenes": images, "image_size": model.config.vision.image_size}
    )
    split = build_split(world, "test", seed=0)
    samples = visual_questions(split, tuple(world.kinds), world.questions, np.random.default_rng(0))
    pool = Pool(samples, tokenizer, model.config.vision.num_patches, pixels=torch.from_numpy(split.pixels))
    batches = [pool.take(range(i, min(i + 50, images))) for i in range(0, images, 50)]

    interface = probe.interface_norms(model, batches)
    trace = probe.trace(model, batches)
    result: dict[str, Any] = {"model": str(path), "arm": model.config.arm, "interface": interface, "trace": vars(trace)}
    table = Table("where", "mean norm", "± std", title="Norms on the way in")
    for name in ("encoder", "projector", "visual", "text", "vocabulary"):
        table.add_row(name, f"{interface[name]['mean']:.3f}", f"{interface[name]['std']:.3f}")
    console.print(table)
    figures.show(trace, console)
    if attention:
        result["attention"] = attention_mass(model, batches)
        mass = ", ".join(f"{value:.3f}" for value in result["attention"]["mass"])
        console.print(f"attention of text on the image, by layer: {mass} (even: {result['attention']['uniform']:.3f})")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "probe.json").write_text(json.dumps(probe.plain(result)))
        for name, figure in (("steps", figures.plot_steps(trace)), ("predictions", figures.plot_predictions(trace))):
            (out / f"{name}.svg").write_text(style.svg(figure))
        console.print(f"probe.json and figures: {out}")
    return result
