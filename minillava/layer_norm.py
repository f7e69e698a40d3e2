"""LayerNorm over the last dimension, with Global Weight Compensation in its backward.

    y  = x̂·g + b                                   x̂ = (x − mean)·rstd
    dx = (1/μ)·rstd·(w − mean(w) − x̂·mean(w·x̂))    w = dy·g,  μ = max(mean|g|, 1e-3), or 1 without compensation
    dg = Σ dy·x̂        db = Σ dy                   (compensation touches dx alone)

The op has two names in PyTorch's dispatcher, `minillava::layer_norm` and `minillava::layer_norm_backward`. This file
gives both their schema, their shapes for tracing, their gradient, and a reference in plain PyTorch for every device.
`minillava/csrc` holds the same arithmetic as compiled kernels, and the same gradient in C++; where they were built
(`make build`), loading them puts them in front of the reference, and nothing else changes.

Compensation: arXiv 2512.08374. Corrected two-pass variance: Chan, Golub, LeVeque (1983).
"""

import functools
import importlib
import os
import warnings

import torch
from torch import Tensor

__all__ = ["is_compiled", "layer_norm"]

GAIN_FLOOR = 1e-3  # the smallest mean|g| that compensation divides by: an all-zero gain must not blow dx up


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5, compensate: bool = False) -> Tensor:
    """LayerNorm of `x` over its last dimension; with `compensate`, dx is divided by max(mean|weight|, 1e-3).

    Args:
        x: (..., D), fp16, bf16, fp32 or fp64, D ≥ 1; any strides, any number of rows, none included.
        weight, bias: (D,), both of x's dtype, or both fp32 for a 16-bit x.
        eps: added to the variance; not negative.
        compensate: divides the gradient of x, and nothing else, by max(mean|weight|, 1e-3).

    Returns:
        (..., D), contiguous, of x's dtype. Statistics and sums are taken in fp32 (fp64 for fp64) whatever the dtype.

    There is no autocast rule: 16-bit in, 16-bit out, also under `torch.autocast`, which would turn F.layer_norm's
    output into fp32. It can be differentiated once, not twice. Same input, same bits, whatever the number of threads.

    Raises:
        ValueError: shapes or devices that do not fit, a scalar x, D = 0, a negative eps.
        TypeError: other dtypes.
    """
    _check(x, weight, bias, eps)
    if not torch.compiler.is_compiling():
        _say_once()
    y, _, _ = torch.ops.minillava.layer_norm(x, weight, bias, eps, compensate)
    return y


def is_compiled() -> bool:
    """True if compiled kernels were loaded, False if everything runs on the reference in this file."""
    return _COMPILED


@functools.cache
def _say_once() -> None:
    if _COMPLAINT:
        warnings.warn(_COMPLAINT, stacklevel=3)


def _check(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> None:
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(
            f"layer_norm needs at least one feature in the last dimension, got x of shape {tuple(x.shape)}"
        )
    D = x.shape[-1]
    for name, p in (("weight", weight), ("bias", bias)):
        if p.dim() != 1 or p.shape[0] != D:
            raise ValueError(f"{name} must have shape ({D},), the last dimension of x; got {tuple(p.shape)}")
        if p.device != x.device:
            raise ValueError(f"{name} is on {p.device}, x on {x.device}")
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise TypeError(f"layer_norm takes fp16, bf16, fp32 or fp64, got {x.dtype}")
    if weight.dtype != bias.dtype or weight.dtype not in (x.dtype, _statistics_dtype(x)):
        raise TypeError(
            f"weight and bias must both be {x.dtype} or both {_statistics_dtype(x)} for x of {x.dtype}; "
            f"got {weight.dtype} and {bias.dtype}"
        )
    if not eps >= 0:  # NaN too
        raise ValueError(f"eps must not be negative, got {eps}")


def _statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _forward_reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float, compensate: bool):
    """Corrected two-pass statistics: δ, what rounding left of the mean, is taken out of both y and the variance."""
    d = x.contiguous().to(_statistics_dtype(x))  # (..., D)
    mean = d.mean(-1, keepdim=True)  # (..., 1)
    d = d - mean
    delta = d.mean(-1, keepdim=True)
    var = (d.square().mean(-1, keepdim=True) - delta.square()).clamp(min=0)
    rstd = torch.rsqrt(var + eps)
    y = (d - delta) * rstd * weight + bias
    return y.to(x.dtype), (mean + delta).squeeze(-1), rstd.squeeze(-1)


def _backward_reference(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, compensate: bool):
    """δ again: a mean rounded to fp32 is not exact enough to rebuild x̂ when |mean| is far above the spread."""
    dtype, D = _statistics_dtype(x), x.shape[-1]
    # contiguous() fixes the order in which PyTorch sums, so that strides never change a bit
    dy_ = dy.contiguous().reshape(-1, D).to(dtype)  # (M, D)
    d = x.contiguous().reshape(-1, D).to(dtype) - mean.reshape(-1, 1)
    rstd, g = rstd.reshape(-1, 1), weight.to(dtype)
    xhat = (d - d.mean(-1, keepdim=True)) * rstd
    w = dy_ * g
    dx = (w - w.mean(-1, keepdim=True) - xhat * (w * xhat).mean(-1, keepdim=True)) * rstd
    if compensate:
        dx = dx / g.abs().mean().clamp(min=GAIN_FLOOR)  # clamp, so that a NaN gain stays NaN
    dg, db = (dy_ * xhat).sum(0), dy_.sum(0)
    return dx.to(x.dtype).reshape(x.shape), dg.to(weight.dtype), db.to(weight.dtype)


def _forward_shapes(x: Tensor, weight: Tensor, bias: Tensor, eps: float, compensate: bool):
    stats = x.new_empty(x.shape[:-1], dtype=_statistics_dtype(x))
    return x.new_empty(x.shape), stats, torch.empty_like(stats)


def _backward_shapes(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, compensate: bool):
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape)


def _save(ctx, inputs, output):
    x, weight, _bias, _eps, compensate = inputs
    _y, mean, rstd = output
    ctx.save_for_backward(x, weight, mean, rstd)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.compensate = compensate


def _gradient(ctx, dy, _dmean, _drstd):
    x, weight, mean, rstd = ctx.saved_tensors
    dx, dg, db = torch.ops.minillava.layer_norm_backward(dy, x, mean, rstd, weight, ctx.compensate)
    return dx, dg, db, None, None


def _gradient_of_gradient(ctx, *grads):
    raise RuntimeError(
        "minillava's layer_norm can be differentiated once, not twice: with compensation its gradient is not that of "
        "any function. torch.nn.functional.layer_norm has second derivatives"
    )


def _load_kernels() -> tuple[bool, str]:
    """Load the compiled kernels, which register themselves; returns whether, and what the first call has to say."""
    if os.environ.get("MINILLAVA_REFERENCE") == "1":
        return False, ""
    try:
        built = importlib.import_module("minillava._C")
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "minillava._C"
        reason = "they are not built" if missing else f"they do not load ({error})"
        return False, (
            f"minillava runs LayerNorm on its PyTorch reference, not on compiled kernels: {reason}. The results are "
            "the same to rounding, the speed is not. `make build` builds them; MINILLAVA_REFERENCE=1 keeps this quiet."
        )
    if built.torch_version != torch.__version__.split("+")[0]:
        return True, (
            f"minillava's kernels were built for torch {built.torch_version} and this is {torch.__version__}: "
            "`make build` rebuilds them."
        )
    return True, ""


torch.library.define(
    "minillava::layer_norm",
    "(Tensor x, Tensor weight, Tensor bias, float eps, bool compensate) -> (Tensor y, Tensor mean, Tensor rstd)",
)
torch.library.define(
    "minillava::layer_norm_backward",
    "(Tensor dy, Tensor x, Tensor mean, Tensor rstd, Tensor weight, bool compensate) "
    "-> (Tensor dx, Tensor dweight, Tensor dbias)",
)
torch.library.impl("minillava::layer_norm", "default", _forward_reference)
torch.library.impl("minillava::layer_norm_backward", "default", _backward_reference)
torch.library.register_fake("minillava::layer_norm", _forward_shapes)
torch.library.register_fake("minillava::layer_norm_backward", _backward_shapes)
_COMPILED, _COMPLAINT = _load_kernels()
if not _COMPILED:  # the compiled library brings the same two gradients, from C++
    torch.library.register_autograd("minillava::layer_norm", _gradient, setup_context=_save)
    torch.library.register_autograd("minillava::layer_norm_backward", _gradient_of_gradient)
