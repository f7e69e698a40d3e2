"""What `python -m theory simulate` writes: a figure, a table and a few sentences."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from theory import attention
from theory.arrays import Floats
from theory.simulate import Run, Setup, run_seeds
from theory.simulate_transformer import BranchAudit, measure_transformer

# As everywhere in this project; written out because this package does not import `minillava`.
COLOURS = {"visual": "#D55E00", "text": "#0072B2"}


def attention_by_layer(
    setup: Setup, norm_v: float, norm_t: float, head_width: int, distractors: int
) -> dict[str, Floats]:
    """Similarity and chance to be the argmax of the relevant pair after each layer, balanced and not (A3, A5)."""
    layers = np.arange(1, setup.layers + 1)
    q = {n: attention.alignment(n, setup.update, setup.target_cosine, setup.drift, layers) for n in (norm_v, norm_t)}
    S = {"balanced": q[norm_t] ** 2, "imbalanced": q[norm_t] * q[norm_v]}
    won = {name: attention.argmax_probability(similarity, head_width, distractors) for name, similarity in S.items()}
    return {f"S_{name}": values for name, values in S.items()} | {
        f"argmax_{name}": values for name, values in won.items()
    }


def attention_sentences(setup: Setup, norm_v: float, norm_t: float, signal: Mapping[str, Floats]) -> list[str]:
    """When the signal collapses, and when imbalance turns from harmless to harmful."""
    lost = np.flatnonzero((signal["argmax_imbalanced"] < 0.5) & (signal["argmax_balanced"] >= 0.5)) + 1
    if len(lost):
        collapse = f"collapses at layers {lost[0]} to {lost[-1]}: only the balanced pair leads the crowd there"
    else:
        collapse = (
            "does not collapse: in no layer does the balanced pair lead the crowd while the imbalanced one does not"
        )
    lines = [f"Attention's signal {collapse} (A5, drift {setup.drift:g}, cos a = {setup.target_cosine:g})."]
    if not norm_t < norm_v or setup.target_cosine < 0 or setup.target_cosine == 1:
        return [*lines, "Reversal: A3's criterion needs n_t < n_v and 0 ≤ cos a < 1."]
    start = attention.layers_until_hurt(norm_v, norm_t, setup.update, setup.target_cosine, setup.drift)
    peak = attention.critical_norm(setup.update, setup.target_cosine, setup.drift)
    if start == 0:
        reversal = "it hurts at every depth"
    elif np.isinf(start):
        reversal = "it never hurts: the larger norm protects the pair"
    else:
        reversal = f"it helps up to layer {start:.1f} and hurts beyond"
    return [*lines, f"Imbalance and reversal: the critical norm is {peak:.3g}, so {reversal} (A3)."]


def depth_report(
    setups: Mapping[str, Setup],
    fidelity: str,
    tokens: int,
    seeds: Sequence[int],
    jobs: int,
    head_width: int,
    distractors: int,
    out: Path,
) -> None:
    """Runs both modalities, writes simulate.csv, .png and .svg to `out`, prints the sentences."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("simulating", total=len(setups) * tokens * len(seeds))
        runs = {
            name: run_seeds(fidelity, setup, tokens, seeds, jobs, lambda done: bar.advance(task, done))  # type: ignore[arg-type]
            for name, setup in setups.items()
        }
    visual, text = setups["visual"], setups["text"]
    signal = attention_by_layer(visual, visual.norm, text.norm, head_width, distractors)
    out.mkdir(parents=True, exist_ok=True)
    _write_depth_csv(runs, signal, out / "simulate.csv")
    _draw_depth(runs, signal, visual, out)
    for name, run in runs.items():
        print(
            f"{name}: norm {run.norm.mean[0]:.2f} → {run.norm.mean[-1]:.2f}, "
            f"{np.degrees(run.turn.mean.sum()):.1f}° turned in all, "
            f"cosine to the {'target' if visual.mode == 'drift' else 'start'} {run.cosine_to_reference.mean[-1]:.3f}"
        )
    print("\n".join(attention_sentences(visual, visual.norm, text.norm, signal)))
    print(f"Wrote simulate.csv, simulate.png and simulate.svg to {out}; seeds {', '.join(map(str, seeds))}.")


def _write_depth_csv(runs: Mapping[str, Run], signal: Mapping[str, Floats], path: Path) -> None:
    """One row a layer; the step's columns are empty at layer 0."""
    columns: dict[str, list] = {"layer": list(range(len(runs["text"].norm.mean)))}
    for name, run in runs.items():
        for quantity in ("norm", "cosine_to_reference", "turn", "adjacent_cosine"):
            curve = getattr(run, quantity)
            gap = [""] * (len(columns["layer"]) - len(curve.mean))
            columns[f"{name}_{quantity}"] = gap + list(curve.mean)
            columns[f"{name}_{quantity}_ci95"] = gap + list(curve.half_width)
    columns |= {name: ["", *values] for name, values in signal.items()}
    columns["seeds"] = [" ".join(map(str, runs["text"].seeds))] * len(columns["layer"])
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


def _draw_depth(runs: Mapping[str, Run], signal: Mapping[str, Floats], setup: Setup, out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(10, 7), constrained_layout=True)
    reference = "target" if setup.mode == "drift" else "start"
    panels = (
        ("norm", "norm ‖h‖ (log scale)", 1.0),
        ("turn", "turn at each layer, degrees (log scale)", 180 / np.pi),
        ("cosine_to_reference", f"cosine to the {reference}", 1.0),
    )
    for axis, (quantity, title, unit) in zip(axes.flat, panels, strict=False):
        for name, run in runs.items():
            curve = getattr(run, quantity)
            layers = np.arange(len(run.norm.mean) - len(curve.mean), len(run.norm.mean))
            mean, width = unit * curve.mean, unit * curve.half_width
            axis.plot(layers, mean, color=COLOURS[name], label=f"{name} tokens")
            axis.fill_between(layers, mean - width, mean + width, color=COLOURS[name], alpha=0.25, linewidth=0)
        axis.set(title=title, xlabel="layer")
        if quantity != "cosine_to_reference":
            axis.set_yscale("log")
        axis.grid(alpha=0.3)
    axes[0, 0].legend(frameon=False)
    last, layers = axes[1, 1], np.arange(1, setup.layers + 1)
    for name, style in (("balanced", "-"), ("imbalanced", "--")):
        last.plot(layers, signal[f"S_{name}"], style, color="#009E73", label=f"similarity, {name}")
        last.plot(layers, signal[f"argmax_{name}"], style, color="#CC79A7", label=f"P(argmax), {name}")
    last.set(
        title=f"relevant pair: drift {setup.drift:g}, cos a = {setup.target_cosine:g}",
        xlabel="layer",
        ylim=(-0.05, 1.05),
    )
    last.grid(alpha=0.3)
    last.legend(frameon=False, fontsize=8)
    figure.suptitle(f"{setup.mode} updates of size {setup.update:g}, width {setup.width}")
    for suffix in ("png", "svg"):
        figure.savefig(out / f"simulate.{suffix}", dpi=120)
    plt.close(figure)


def transformer_report(norm_v: float, norm_t: float, layers: int, seed: int, out: Path) -> None:
    """Fidelity (c): writes assumptions.csv and prints how far each assumption is from the measured network."""
    rows = measure_transformer(norm_v, norm_t, layers=layers, seed=seed)
    out.mkdir(parents=True, exist_ok=True)
    with (out / "assumptions.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*BranchAudit.__dataclass_fields__, "seed"])
        writer.writerows([*vars(row).values(), seed] for row in rows)
    for modality in ("visual", "text"):
        mine = [row for row in rows if row.modality == modality]
        update, angle, spread, resultant = (
            np.mean([getattr(row, name) for row in mine]) for name in ("update", "angle", "angle_std", "resultant")
        )
        turned, exact, assumed = np.degrees(
            np.sum([(row.turn, row.turn_from_tokens, row.turn_from_means) for row in mine], axis=0)
        )
        print(
            f"{modality}: update {update:.2f} (A1: one size for both), angle {np.degrees(angle):.1f}° ± "
            f"{np.degrees(spread):.1f}° (A2), mean direction {resultant:.2f} (A3: 0); turned {turned:.1f}°, the exact "
            f"formula says {exact:.1f}°, means under A1 and A2 say {assumed:.1f}°"
        )
    print(f"Wrote assumptions.csv to {out}; seed {seed}.")
