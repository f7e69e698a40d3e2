"""What is saved, how, and how it comes back: safetensors for weights, JSON for the rest, atomically, strictly.

A *model folder* (`save_model`, `load_model`) is what one generates from, probes, or starts a training with:

    model.safetensors   every weight            config.json   sizes, arm, format version, where it came from
    tokenizer.model     the sentencepiece model

A *training state* (`save_state`, `load_state`) is one folder per saved step beside a run's metrics; it holds the
weights, the optimiser and the random state, so that a resumed run ends in the same bits as one that was never stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch
from torch import nn

from minillava.llava import LLaVAConfig, MiniLLaVA
from minillava.tokenizer import IMAGE, Tokenizer

FORMAT = 1


class CheckpointError(Exception):
    """A checkpoint is missing, incomplete, or of another model; the message says which, and where."""


def write_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Fill a new folder and move it into place: a kill leaves the old one or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    settle(path)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        fill(partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    for file in partial.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())  # a name must not reach the disk before what it names
    if path.exists():
        path.rename(_aside(path))
    partial.rename(path)
    settle(path)


def settle(path: Path) -> None:
    """Finish what a kill cut short between the two renames of `write_folder`: the old folder takes its place again."""
    old = _aside(path)
    if old.is_dir() and not path.exists():
        old.rename(path)
    elif old.is_dir():
        shutil.rmtree(old)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def save_model(
    path: Path, model: MiniLLaVA, tokenizer: Tokenizer, notes: dict | None = None, half: bool = False
) -> None:
    """Write a model folder. `notes` say where it came from (command, seed, measures); `half` stores fp16."""
    config = {"format": FORMAT, "model": model.config.to_dict(), "notes": notes or {}}

    def fill(folder: Path) -> None:
        weights = {name: w.half() if half else w for name, w in model.state_dict().items()}
        if model.config.lm.tie_embeddings:
            del weights["lm.lm_head.weight"]  # the same tensor as the embedding
        safetensors.torch.save_file({k: w.contiguous().cpu() for k, w in weights.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config, indent=2))
        (folder / "tokenizer.model").write_bytes(tokenizer.model)

    write_folder(path, fill)


def load_model(path: Path, device: str = "cpu") -> tuple[MiniLLaVA, Tokenizer, dict]:
    """Read a model folder: (model in fp32 and eval mode, tokenizer, notes).

    Raises CheckpointError when a file is missing, of another format, or does not fit the config tensor for tensor.
    """
    if not path.exists():
        settle(path)
    config = _read_json(path / "config.json")
    if config.get("format") != FORMAT:
        raise CheckpointError(f"{path / 'config.json'}: format {config.get('format')}, this version reads {FORMAT}")
    try:
        tokenizer = Tokenizer.load(path / "tokenizer.model")
        weights = safetensors.torch.load_file(path / "model.safetensors")
        model = MiniLLaVA(LLaVAConfig.from_dict(config["model"]))
        if model.config.lm.tie_embeddings:
            weights["lm.lm_head.weight"] = weights.get("lm.embed_tokens.weight", torch.empty(0))
        model.load_state_dict({k: w.float() for k, w in weights.items()}, strict=True)
    except Exception as error:  # whatever a damaged file makes of the libraries that read it
        raise CheckpointError(f"{path}: cannot load this model folder: {_reason(error)}") from error
    if len(tokenizer) != model.config.lm.vocab_size or model.config.image_token_id != IMAGE:
        raise CheckpointError(
            f"{path}: tokenizer has {len(tokenizer)} pieces and image token {IMAGE}, "
            f"model {model.config.lm.vocab_size} and {model.config.image_token_id}"
        )
    return model.to(device).eval(), tokenizer, config.get("notes", {})


def save_state(run: Path, step: int, config: dict, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Save a training state as `run/step-NNNNNN` and then drop the older ones.

    The last state of a training needs no optimizer (None), whose moments are two thirds of the bytes.
    """

    def fill(folder: Path) -> None:
        safetensors.torch.save_model(model, str(folder / "model.safetensors"))
        moments = optimizer.state_dict() if optimizer else None
        torch.save({"optimizer": moments, "rng": torch.get_rng_state()}, folder / "optimizer.pt")
        (folder / "state.json").write_text(json.dumps({"format": FORMAT, "step": step, "config": config}))

    write_folder(run / f"step-{step:06d}", fill)
    for older in _saved(run)[:-1]:
        shutil.rmtree(older)


def _saved(run: Path) -> list[Path]:
    """The states of a run, oldest first."""
    return sorted((p for p in run.glob("step-*") if p.name[5:].isdigit()), key=lambda path: int(path.name[5:]))


def load_state(run: Path, config: dict, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Restore the newest training state of a run in place; returns its step, 0 if there is none.

    Raises CheckpointError when the state was made with another config: resuming would silently be another experiment.
    """
    saved = _saved(run)
    if not saved:
        return 0
    newest = saved[-1]
    state = _read_json(newest / "state.json")
    if state.get("format") != FORMAT or not isinstance(state.get("config"), dict):
        raise CheckpointError(f"{newest / 'state.json'}: format {state.get('format')}, this version reads {FORMAT}")
    was_config: dict = state["config"]
    changed = [k for k in config | was_config if config.get(k) != was_config.get(k)]
    if changed:
        was = ", ".join(f"{k}={was_config.get(k)!r} (now {config.get(k)!r})" for k in changed)
        raise CheckpointError(f"{newest}: was trained with {was}; use the same settings, or another output folder")
    try:
        safetensors.torch.load_model(model, str(newest / "model.safetensors"), strict=True)
        rest = torch.load(newest / "optimizer.pt", weights_only=True)
        if rest["optimizer"] is not None:  # it is None where nothing is left to train
            optimizer.load_state_dict(rest["optimizer"])
        torch.set_rng_state(rest["rng"])
        return int(state["step"])
    except Exception as error:  # whatever a damaged file makes of the libraries that read it
        raise CheckpointError(f"{newest}: cannot resume from it: {_reason(error)}") from error


def fingerprint(*tensors: torch.Tensor) -> str:
    """A short hash of the bits of tensors: what a resumed run compares."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:12]


def _reason(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _read_json(path: Path) -> dict:
    try:
        value = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"{path}: not found; is {path.parent} a model or run folder of minillava?") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return value
