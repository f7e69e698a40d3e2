"""One loop for every training: the vision tower, the language model, stage 1 and stage 2.

It is given a model, a loss and a pool of data. A stopped run (Ctrl-C, kill, power) goes on from its last saved state
and ends in the same weights, bit for bit, as one that was never stopped: a batch depends on seed and step alone.
"""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from minillava.checkpoint import load_state, save_state


class TrainingError(Exception):
    """Training cannot go on; the message names the step and the place."""


class Supervised(Protocol):
    """A batch that knows how many predictions its loss adds up."""

    @property
    def supervised(self) -> int: ...

    def to(self, device: Any) -> Any: ...


class Data(Protocol):
    def batch(self, step: int, batch_size: int, seed: int) -> Any: ...


@dataclass
class TrainConfig:
    """One training. `lr` is the peak; `gain_lr` multiplies it for the arm's gain and bias alone."""

    steps: int = 300
    batch_size: int = 64
    lr: float = 1e-3
    warmup: float = 0.05
    weight_decay: float = 0.01
    clip: float = 1.0
    accumulate: int = 1
    gain_lr: float = 1.0
    precision: str = "fp32"
    compile: bool = False
    seed: int = 0
    log_every: int = 25
    eval_every: int = 0
    save_every: int = 100

    def __post_init__(self):
        for name in ("steps", "batch_size", "accumulate", "log_every", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be a positive number, got {self.lr}")
        if self.precision not in ("fp32", "bf16"):
            raise ValueError(f"precision must be fp32 or bf16, got '{self.precision}'")


def learning_rate(step: int, config: TrainConfig) -> float:
    """Linear warm-up to `lr`, then a cosine down to a tenth of it."""
    warmup = max(1, round(config.warmup * config.steps))
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, config.steps - warmup)
    return config.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


def parameter_groups(model: nn.Module, config: TrainConfig) -> list[dict]:
    """What trains, in three groups: matrices (decayed), vectors, and the arm's gain and bias with their own rate."""
    groups: dict[str, list[Tensor]] = {"matrix": [], "vector": [], "gain": []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kind = "matrix" if parameter.dim() > 1 else "gain" if name.startswith("arm.") else "vector"
            groups[kind].append(parameter)
    return [
        {
            "params": parameters,
            "weight_decay": config.weight_decay if kind == "matrix" else 0.0,
            "rate": config.gain_lr if kind == "gain" else 1.0,
        }
        for kind, parameters in groups.items()
        if parameters
    ]


def clip_gradients(model: nn.Module, max_norm: float) -> dict[str, float]:
    """Scale all gradients by one factor so that their norm is at most `max_norm`; returns the norms before.

    The norm is measured before Global Weight Compensation: compensated gradients are divided by their factor first.
    Otherwise a compensated projector would shrink everybody's step, and arms would differ in more than their arm
    (claim G3).
    """
    arm = getattr(model, "arm", None)
    factor = 1.0
    if getattr(arm, "compensate", False):
        factor = 1.0 / max(arm.weight.detach().abs().mean().item(), 1e-3)  # type: ignore[union-attr]
    upstream: list[Tensor] = []
    rest: list[Tensor] = []
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            (upstream if name.startswith(("projector.", "vision.")) else rest).append(parameter.grad)
    upstream_norm = torch.nn.utils.get_total_norm(upstream).item() if upstream else 0.0
    rest_norm = torch.nn.utils.get_total_norm(rest).item() if rest else 0.0
    total = math.hypot(upstream_norm / factor, rest_norm)
    if total > max_norm:
        torch._foreach_mul_(upstream + rest, max_norm / total)
    return {"grad_norm": total, "grad_norm_upstream": upstream_norm}


def gain_of(model: nn.Module) -> dict[str, float]:
    """Mean |g| and ||g|| of the arm's LayerNorm, as the paper tables them; empty for arms without one."""
    gain = getattr(getattr(model, "arm", None), "weight", None)
    if gain is None:
        return {}
    return {"gain_mean": gain.detach().abs().mean().item(), "gain_norm": gain.detach().norm().item()}


def fit(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Tensor],
    data: Data,
    config: TrainConfig,
    run: Path | None = None,
    evaluate: Callable[[], dict] | None = None,
    label: str = "training",
    show: bool = True,
    about: dict | None = None,
) -> list[dict]:
    """Train what requires gradients in `model`, in place; returns the logged rows.

    `loss(model, batch)` is the *sum* over the batch's supervised predictions; accumulation divides by their number over
    all micro-batches, so it changes nothing but memory. With `run`, rows go to `run/metrics.jsonl` and states beside
    it, and a stopped run resumes, if `config` and `about` (whatever else makes this run what it is) are still the same.
    `evaluate()` adds its measures every `eval_every` steps.

    Raises TrainingError at the first loss or gradient that is not finite, before it can reach the weights;
    KeyboardInterrupt after saving when interrupted.
    """
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(parameter_groups(model, config), lr=config.lr, betas=(0.9, 0.95))
    settings = asdict(config) | (about or {})
    start = load_state(run, settings, model, optimizer) if run else 0
    log = MetricsLog(run, start)
    if config.compile:  # each arm and stage is a graph of its own; past 8, PyTorch would quietly stop compiling
        torch._dynamo.config.recompile_limit = 64
    forward: Any = torch.compile(model) if config.compile else model
    clock = Clock()
    model.train()
    with catch_interrupt() as interrupted, progress_bar(label, start, config.steps, show) as advance:
        for step in range(start, config.steps):
            batches = [
                data.batch(step * config.accumulate + i, config.batch_size, config.seed).to(device)
                for i in range(config.accumulate)
            ]
            supervised = sum(batch.supervised for batch in batches)
            total = 0.0
            for batch in batches:
                with torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16"):
                    part = loss(forward, batch) / supervised
                part.backward()
                total += part.item()
            norms = clip_gradients(model, config.clip)
            if not math.isfinite(total) or not math.isfinite(norms["grad_norm"]):
                raise TrainingError(f"{label}, step {step + 1}: the loss is {total}; {first_non_finite(model)}")
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, config) * group["rate"]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            done = step + 1
            clock.count(supervised)
            last = done == config.steps
            row: dict[str, Any] = {"step": done, "loss": total, "lr": learning_rate(step, config)} | norms
            if config.eval_every and evaluate and (done % config.eval_every == 0 or last):
                model.eval()
                row |= evaluate()
                model.train()
                log.write(row | gain_of(model) | clock.read())
            elif done % config.log_every == 0 or last or done == 1:
                log.write(row | gain_of(model) | clock.read())
            if run and (done % config.save_every == 0 or last or interrupted):
                save_state(run, done, settings, model, None if last else optimizer)
            advance(total, clock.read()["tokens_per_second"])
            if interrupted:
                raise KeyboardInterrupt(f"{label} stopped after step {done}")
    model.eval()
    return log.rows


def first_non_finite(model: nn.Module) -> str:
    """Where the trouble is first seen, by name: in the weights, else in the gradients (in the model's own order)."""
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            return f"'{name}' holds non-finite weights"
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
            return f"the first non-finite gradient is that of '{name}'; try a lower learning rate"
    return "weights and gradients are finite; look at the data of this step"


class MetricsLog:
    """Rows of measures, in memory and, given a run, as JSON lines; rows after the resumed step are dropped."""

    def __init__(self, run: Path | None, start: int):
        self.path = run / "metrics.jsonl" if run else None
        self.rows: list[dict] = []
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if start and self.path.is_file():
            lines = self.path.read_text().splitlines(keepends=True)
            rows = [json.loads(line) for line in lines if line.endswith("\n")]  # a kill may have torn the last one
            self.rows = [row for row in rows if row["step"] <= start]
        partial = self.path.with_suffix(f".{os.getpid()}")
        partial.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        partial.replace(self.path)

    def write(self, row: dict) -> None:
        self.rows.append(row)
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")


class Clock:
    """Supervised tokens and seconds since the start of this process's part of the run."""

    def __init__(self):
        self.started, self.tokens = time.perf_counter(), 0

    def count(self, tokens: int) -> None:
        self.tokens += tokens

    def read(self) -> dict[str, float]:
        seconds = time.perf_counter() - self.started
        return {"seconds": seconds, "tokens_per_second": self.tokens / seconds}


@contextmanager
def catch_interrupt() -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM fill the list instead of tearing a step apart; the loop looks at it between steps."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {s: signal.signal(s, lambda number, _: received.append(number)) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def progress_bar(label: str, start: int, steps: int, show: bool) -> Iterator[Callable[[float, float], None]]:
    """A rich bar with loss, supervised tokens a second and time left."""
    columns = (
        TextColumn("{task.description:<22}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tok/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, disable=not show) as bar:
        task = bar.add_task(label, total=steps, completed=start, loss=float("nan"), speed=0.0)
        yield lambda loss, speed: bar.update(task, advance=1, loss=loss, speed=speed)
