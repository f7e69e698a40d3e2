"""LayerNorm side by side: ours, PyTorch's, its compiled form, and Liger's and apex's where they are installed.

    python benchmarks/layer_norm.py                          # this machine's CPU, two threads
    python benchmarks/layer_norm.py --device cuda            # the current GPU
    python benchmarks/layer_norm.py --quick --out FILE --plot FILE.png

All contenders of a table run in turns in one process; a cell gives the least time of all turns, since whatever else
the machine does can only add to it. Compare within a table, not across machines. Beside the times stands the error
against fp64: a fast wrong answer is not a fast answer.

Bandwidth: forward moves 2 tensors of x's size (x in, y out), backward 3 (x and dy in, dx out); the share is of what a
plain copy of x reaches in the same run. On a GPU the inputs rotate through more memory than the cache holds; on a CPU
small cells fit the cache, which a share above 100 % shows. On Linux the allocator is told to keep what is freed: left
to itself it hands large outputs back to the system, and the page faults of the next call cost more than the LayerNorm.
"""

import argparse
import ctypes
import itertools
import platform
import random
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from minillava.layer_norm import is_compiled, layer_norm

GRID = [(2048, 192), (65536, 256), (4096, 1024), (16384, 1024), (4096, 4096)]
GPU_GRID = [(16384, 1024), (65536, 1024), (16384, 4096), (65536, 4096), (16384, 8192)]
QUICK_GRID = [(512, 192), (1024, 1024)]
ROTATED_BYTES = 512 << 20  # several times the largest second-level cache


class Composed(torch.autograd.Function):
    """LayerNorm with compensation from PyTorch's fused kernels: what one would write without an extension."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        y, mean, rstd = torch.native_layer_norm(x, weight.shape, weight, bias, 1e-5)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, bias, mean, rstd = ctx.saved_tensors
        dx, dg, db = torch.ops.aten.native_layer_norm_backward(
            dy, x, weight.shape, mean, rstd, weight, bias, [True] * 3
        )
        return dx / weight.abs().mean().clamp(min=1e-3), dg, db


class Elementwise(torch.autograd.Function):
    """The same from elementary PyTorch ops, with the same corrected two-pass statistics as ours."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        d = x.float() - x.float().mean(-1, keepdim=True)
        d = d - d.mean(-1, keepdim=True)
        rstd = torch.rsqrt(d.square().mean(-1, keepdim=True) + 1e-5)
        ctx.save_for_backward(d * rstd, rstd, weight)
        return (d * rstd * weight + bias).to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        xhat, rstd, weight = ctx.saved_tensors
        up = dy.float()
        w = up * weight
        dx = (w - w.mean(-1, keepdim=True) - xhat * (w * xhat).mean(-1, keepdim=True)) * rstd
        dx = dx / weight.float().abs().mean().clamp(min=1e-3)
        return dx.to(dy.dtype), (up * xhat).sum(0).to(weight.dtype), up.sum(0).to(weight.dtype)


def contenders(device: str) -> dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], bool]]:
    """Name → (function of x, weight and bias; whether it compensates)."""
    fused = {
        "ours": (lambda x, w, b: layer_norm(x, w, b), False),
        "ours, compensated": (lambda x, w, b: layer_norm(x, w, b, 1e-5, True), True),
        "F.layer_norm": (lambda x, w, b: F.layer_norm(x, w.shape, w, b), False),
        "F.layer_norm, compiled": (torch.compile(lambda x, w, b: F.layer_norm(x, w.shape, w, b)), False),
        "composed, fused ops": (Composed.apply, True),
        "composed, elementwise ops": (Elementwise.apply, True),
    }
    if device == "cuda":
        try:
            from liger_kernel.ops.layer_norm import LigerLayerNormFunction

            fused["Liger"] = (lambda x, w, b: LigerLayerNormFunction.apply(x, w, b, 1e-5), False)
        except ImportError:
            pass
        try:
            from apex.normalization.fused_layer_norm import fused_layer_norm_affine

            fused["apex"] = (lambda x, w, b: fused_layer_norm_affine(x, w, b, w.shape), False)
        except ImportError:
            pass
    return fused


@dataclass
class Cell:
    """One contender on one shape: seconds of the fastest turn, and the largest errors relative to the largest value."""

    forward: float
    backward: float
    y_error: float
    dx_error: float
    dg_error: float


def timed(function: Callable[[], object], device: str) -> tuple[float, object]:
    if device == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        result = function()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3, result
    start_time = time.perf_counter()
    result = function()
    return time.perf_counter() - start_time, result


def errors(y: Tensor, grads: tuple[Tensor, ...], args: tuple[Tensor, ...], compensates: bool) -> list[float]:
    x, weight, bias, dy = (t.detach()[:4096].double() if t.dim() == 2 else t.detach().double() for t in args)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    true_y = F.layer_norm(x, weight.shape, weight, bias)
    true_dx, _, _ = torch.autograd.grad(true_y, leaves, dy)
    if compensates:
        true_dx = true_dx / weight.abs().mean().clamp(min=1e-3)
    true_dg = torch.zeros_like(weight)
    for part_x, part_dy in zip(args[0].detach().split(4096), args[3].split(4096), strict=True):
        part = F.layer_norm(part_x.double(), weight.shape)
        true_dg = true_dg + (part * part_dy.double()).sum(0)
    pairs = ((y[:4096], true_y), (grads[0][:4096], true_dx), (grads[1], true_dg))
    return [((got.double() - want).abs().max() / want.abs().max()).item() for got, want in pairs]


def measure(M: int, D: int, dtype: torch.dtype, device: str, turns: int) -> tuple[dict[str, Cell], float]:
    """All contenders in turns on (M, D), and the bytes a second that a copy of x moves."""
    size = M * D * dtype.itemsize
    copies = max(1, -(-ROTATED_BYTES // size)) if device == "cuda" else 1
    inputs = []
    for _ in range(copies):
        x, dy = (torch.randn(M, D, device=device).to(dtype) for _ in range(2))
        weight, bias = (torch.randn(D, device=device).to(dtype) for _ in range(2))
        inputs.append((*(t.requires_grad_() for t in (x, weight, bias)), dy))
    functions, cells, copy_time, target = contenders(device), {}, float("inf"), torch.empty_like(inputs[0][0])
    target.requires_grad_(False)
    order = random.Random(0)  # a turn of its own order each: who runs next finds what the one before left in the cache
    for turn in range(turns + 2):  # the first two warm up
        args = inputs[turn % copies]
        seconds, _ = timed(lambda args=args: target.copy_(args[0].detach()), device)
        copy_time = min(copy_time, seconds)
        for name, (function, compensates) in order.sample(list(functions.items()), len(functions)):
            forward, y = timed(lambda f=function, args=args: f(*args[:3]), device)
            backward, grads = timed(lambda y=y, args=args: torch.autograd.grad(y, args[:3], args[3]), device)
            if name not in cells:
                cells[name] = Cell(float("inf"), float("inf"), *errors(y.detach(), grads, args, compensates))
            if turn >= 2:
                cells[name].forward = min(cells[name].forward, forward)
                cells[name].backward = min(cells[name].backward, backward)
            del y, grads
    return {name: cells[name] for name in functions}, 2 * size / copy_time


def table(M: int, D: int, dtype: torch.dtype, cells: dict[str, Cell], copy_rate: float) -> str:
    plain = cells["ours"]
    size = M * D * dtype.itemsize
    lines = [
        f"\n{str(dtype).removeprefix('torch.')}, M = {M}, D = {D}: "
        f"x has {size / 2**20:.1f} MiB, a copy moves {copy_rate / 1e9:.1f} GB/s\n",
        "| | forward ms | backward ms | both, ours = 1 | share of copy, fwd / bwd | error y | error dx | error dγ |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, c in cells.items():
        base = cells["ours, compensated"] if "comp" in name and "compiled" not in name else plain
        ratio = (c.forward + c.backward) / (base.forward + base.backward)
        shares = f"{2 * size / c.forward / copy_rate:.0%} / {3 * size / c.backward / copy_rate:.0%}"
        lines.append(
            f"| {name} | {c.forward * 1e3:.3f} | {c.backward * 1e3:.3f} | {ratio:.2f} | {shares} "
            f"| {c.y_error:.1e} | {c.dx_error:.1e} | {c.dg_error:.1e} |"
        )
    return "\n".join(lines)


def plot(results: dict[tuple[str, int, int], dict[str, Cell]], path: Path) -> None:
    """Forward plus backward of each contender, as a multiple of ours (compensated against compensated)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    dtypes = sorted({key[0] for key in results})
    size = {"figsize": (6 * len(dtypes), 4.4), "layout": "constrained"}
    figure, axes = plt.subplots(1, len(dtypes), sharey=True, squeeze=False, **size)
    for axis, dtype in zip(axes[0], dtypes, strict=True):
        keys = [key for key in results if key[0] == dtype]
        for name in results[keys[0]]:
            if name == "ours, compensated":
                continue  # 1 by definition, like ours
            base = "ours, compensated" if "comp" in name and "compiled" not in name else "ours"
            times = [[results[k][n].forward + results[k][n].backward for k in keys] for n in (name, base)]
            axis.plot([a / b for a, b in zip(*times, strict=True)], "o-", label=name)
        axis.set_xticks(range(len(keys)), [f"{k[1]}×{k[2]}" for k in keys], rotation=30)
        axis.set(title=dtype, yscale="log", ylabel="time of forward + backward, ours = 1", xlabel="rows × D")
        axis.set_yticks([1, 2, 5, 10], ["1", "2", "5", "10"])
        axis.minorticks_off()
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def keep_freed_memory() -> None:
    """glibc's malloc: no mmap for large blocks, and no trimming (mallopt's M_MMAP_MAX and M_TRIM_THRESHOLD)."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.mallopt(-4, 0)
        libc.mallopt(-1, 2**31 - 1)


def machine(device: str) -> str:
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    name = names[0].split(":")[1].strip() if names else platform.processor()
    load = Path("/proc/loadavg").read_text().split()[0]
    return f"{name}, {torch.get_num_threads()} threads, load average {load} at the start, torch {torch.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--quick", action="store_true", help="two small shapes, few turns: does it run at all?")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "float16"])
    parser.add_argument("--out", type=Path, help="write the report here instead of to the screen")
    parser.add_argument("--plot", type=Path, help="draw the ratios into this file")
    args = parser.parse_args()
    if not is_compiled():
        warnings.warn("no compiled kernels: 'ours' is the reference in PyTorch (make build)", stacklevel=1)

    keep_freed_memory()
    torch.manual_seed(0)
    grid = QUICK_GRID if args.quick else GPU_GRID if args.device == "cuda" else GRID
    report = [f"{machine(args.device)}; ours is {'compiled' if is_compiled() else 'the reference'}"]
    results = {}
    for dtype, (M, D) in itertools.product(args.dtypes, grid):
        cells, copy_rate = measure(M, D, getattr(torch, dtype), args.device, 3 if args.quick else args.turns)
        results[dtype, M, D] = cells
        report.append(table(M, D, getattr(torch, dtype), cells, copy_rate))
        if args.out is None:
            print(report[-1], flush=True)
    if args.out is not None:
        args.out.write_text("\n".join(report) + "\n")
    if args.plot is not None:
        plot(results, args.plot)


if __name__ == "__main__":
    main()
