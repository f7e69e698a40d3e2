"""The op, whatever runs it: reference, compiled CPU kernel or CUDA kernel. test_build.py runs this file against each.

Truth is the same formula in fp64, on the numbers the op was given. Errors are measured against what rounding the
result to its dtype must cost.
"""

import os

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from minillava.layer_norm import _backward_reference, _forward_reference, is_compiled, layer_norm

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
MIXED = [(torch.bfloat16, torch.float32), (torch.float16, torch.float32)]
PAIRS = [(d, d) for d in DTYPES] + MIXED
SHAPES = [
    (1, 1),
    (3, 1),
    (1, 3),
    (5, 7),
    (4, 8),
    (2, 16),
    (3, 33),
    (7, 255),
    (2, 3, 256),
    (5, 1000),
    (2, 8192),
    (3, 8200),
]


def numbers(*shape, dtype=torch.float32, seed=0, offset=0.0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator, dtype=torch.float64) * 2 * scale - scale + offset).to(dtype)


def problem(*shape, dtype=torch.float32, param_dtype=None, **kw):
    """x, weight, bias, dy."""
    D, p = shape[-1], param_dtype or dtype
    weight, bias = numbers(D, dtype=p, seed=1, offset=0.3), numbers(D, dtype=p, seed=2)
    return numbers(*shape, dtype=dtype, **kw), weight, bias, numbers(*shape, dtype=dtype, seed=3)


def truth(x, weight, bias, dy, eps=1e-5, compensate=False):
    """y, dx, dweight, dbias in fp64, each with the size of the terms it is a sum of."""
    x, g, b, dy = (t.detach().double().reshape(-1, x.shape[-1]) for t in (x, weight, bias, dy))
    d = x - x.mean(-1, keepdim=True)
    d = d - d.mean(-1, keepdim=True)  # else the truth about fp64 is less exact than the op
    rstd = (d.square().mean(-1, keepdim=True) + eps).rsqrt()
    xhat = d * rstd
    w = dy * g
    mu = g.abs().mean().clamp(min=1e-3) if compensate else 1.0
    dx = (w - w.mean(-1, keepdim=True) - xhat * (w * xhat).mean(-1, keepdim=True)) * rstd / mu
    hat = (
        xhat.abs() + 1
    )  # x̂ comes from sums over the row, so its error has the size of a typical x̂, however small it is
    terms = w.abs() + w.abs().mean(-1, keepdim=True) + hat * (w.abs() * hat).mean(-1, keepdim=True)
    return (
        (xhat * g + b, hat * g.abs() + b.abs()),
        (dx, terms * rstd / mu),
        ((dy * xhat).sum(0), (dy.abs() * hat).sum(0)),
        (dy.sum(0), dy.abs().sum(0)),
    )


def run(x, weight, bias, dy, eps=1e-5, compensate=False):
    """y, dx, dweight, dbias of the op, through autograd."""
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
    y = layer_norm(*leaves, eps, compensate)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


def assert_close(got, want, size=None, factor=16.0):
    """Rounded once to its own dtype, and before that off by at most `factor` roundings of the arithmetic's."""
    want = want.reshape(got.shape).double()
    size = want.abs() if size is None else size.reshape(got.shape)
    arithmetic = torch.finfo(torch.float64 if got.dtype == torch.float64 else torch.float32).eps
    own = torch.finfo(got.dtype)
    bound = own.eps * want.abs() + own.smallest_normal * own.eps + factor * arithmetic * size
    error = (got.double() - want).abs()
    assert (error <= bound).all(), f"{(error / bound).max():.2f} times the allowed error; largest {error.max():.2e}"


def check(x, weight, bias, dy, eps=1e-5, compensate=False, factor=16.0):
    results = run(x, weight, bias, dy, eps, compensate)
    for got, (want, size) in zip(results, truth(x, weight, bias, dy, eps, compensate), strict=True):
        assert_close(got, want, size, factor)


def test_the_expected_implementation_runs():
    expected = os.environ.get("MINILLAVA_EXPECT")
    if expected is None:
        pytest.skip("MINILLAVA_EXPECT does not say which implementation this run is for")
    assert is_compiled() == (expected == "compiled")


@pytest.mark.parametrize("compensate", [False, True])
@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape, dtypes, compensate):
    check(*problem(*shape, dtype=dtypes[0], param_dtype=dtypes[1]), compensate=compensate)


@given(
    M=st.integers(0, 40), D=st.integers(1, 300), dtypes=st.sampled_from(PAIRS), seed=st.integers(0, 2**31),
    offset=st.floats(-50, 50), scale=st.floats(0.1, 30), compensate=st.booleans(),
    layout=st.sampled_from(["contiguous", "transposed", "storage offset 1", "every second column"]),
)  # fmt: skip
def test_any_shape_and_layout(M, D, dtypes, seed, offset, scale, compensate, layout):
    x, weight, bias, dy = problem(M, D, dtype=dtypes[0], param_dtype=dtypes[1], seed=seed, offset=offset, scale=scale)

    def laid_out(t):
        if layout == "transposed":
            return t.t().contiguous().t()
        if layout == "every second column":
            return torch.stack([t, t], -1).flatten(-2)[:, ::2]
        if layout == "storage offset 1":
            return torch.cat([t.new_zeros(1), t.reshape(-1)])[1:].view(M, D)
        return t

    if M == 0:
        y, dx, dg, db = run(x, weight, bias, dy)
        assert y.shape == dx.shape == (0, D) and not dg.any() and not db.any() and dg.dtype == dtypes[1]
        return
    got = run(laid_out(x), weight, bias, laid_out(dy), compensate=compensate)
    plain = run(x, weight, bias, dy, compensate=compensate)
    assert all(torch.equal(a, b) for a, b in zip(got, plain, strict=True)), "the layout changed the bits"
    check(x, weight, bias, dy, compensate=compensate)


@pytest.mark.parametrize("offset", [1e2, 1e4])
def test_large_mean(offset):
    """Far from the origin: F.layer_norm is off by 1.7e-3 at 1e4 (measured), this by its own rounding."""
    x, weight, bias, dy = problem(64, 1024, offset=offset)
    weight, bias = torch.ones(1024), torch.zeros(1024)
    y, dx, dg, _ = run(x, weight, bias, dy)
    (true_y, _), (true_dx, _), (true_dg, _), _ = truth(x, weight, bias, dy)
    assert (y - true_y).abs().max() < 1e-5
    assert (dx - true_dx).abs().max() < 1e-5
    assert (dg - true_dg).abs().max() < 1e-5 * 64
    if offset == 1e4:
        assert (F.layer_norm(x, (1024,), weight, bias) - true_y).abs().max() > 1e-4, "PyTorch got better: say so"


@pytest.mark.parametrize("param_dtype", [torch.bfloat16, torch.float32])
def test_weight_gradient_over_many_rows_in_bf16(param_dtype):
    """PyTorch on the CPU keeps partial sums in bf16 and is off by 18 %."""
    x, weight, bias, dy = problem(65536, 256, dtype=torch.bfloat16, param_dtype=param_dtype)
    _, _, dg, db = run(x, weight, bias, dy)
    _, _, (true_dg, _), (true_db, _) = truth(x, weight, bias, dy)
    assert (dg - true_dg).norm() / true_dg.norm() < 0.005
    assert (db - true_db).norm() / true_db.norm() < 0.005


def test_more_rows_than_a_grid_dimension_holds():
    check(*problem(70_001, 4), factor=64.0)


def test_large_fp16_numbers_do_not_overflow():
    x, weight, bias, dy = problem(8, 4096, dtype=torch.float16, scale=60000.0)
    check(x, weight, bias, dy)


def test_zeros_with_a_tiny_eps():
    for dtype in (torch.float16, torch.float32):
        x, weight, bias, dy = problem(4, 64, dtype=dtype)
        y, dx, dg, db = run(torch.zeros_like(x), weight, bias, dy * 1e-3, eps=1e-12)
        assert torch.equal(y, bias.expand(4, 64)) and not dg.any()
        assert db.isfinite().all() and (dtype == torch.float16 or dx.isfinite().all())


def test_constant_rows_give_the_bias():
    x = torch.tensor([1e4, -3.3, 7e-5])[:, None].expand(3, 1000)
    weight, bias = numbers(1000, seed=1), numbers(1000, seed=2)
    assert (layer_norm(x, weight, bias) - bias).abs().max() < 1e-4


def test_one_column_has_no_gradient():
    x, weight, bias, dy = problem(5, 1)
    y, dx, dg, db = run(x, weight, bias, dy, compensate=True)
    assert torch.equal(y, bias.expand(5, 1)) and dx.abs().max() < 1e-4 and not dg.any()
    assert torch.allclose(db, dy.sum(0))


def test_a_single_row_without_batch_dimension():
    x, weight, bias, dy = problem(96)
    check(x, weight, bias, dy)
    assert torch.ops.minillava.layer_norm(x, weight, bias, 1e-5, False)[1].shape == ()


def test_nan_is_passed_on():
    x, weight, bias, dy = problem(3, 40)
    x[1, 5] = float("nan")
    y, dx, _, _ = run(x, weight, bias, dy)
    assert y[1].isnan().all() and y[[0, 2]].isfinite().all() and dx[1].isnan().all()
    weight[7] = float("nan")  # in max(mean|g|, floor) an fmax would swallow it
    _, dx, _, _ = run(x[[0]], weight, bias, dy[[0]], compensate=True)
    assert dx.isnan().all()


def test_a_zero_gain_is_floored():
    x, weight, bias, dy = problem(3, 40)
    for gain in (0.0, 1e-4):
        plain, compensated = (run(x, weight * 0 + gain, bias, dy, compensate=c)[1] for c in (False, True))
        assert torch.allclose(compensated, plain * 1000, rtol=1e-5)


def test_compensation_divides_dx_and_nothing_else():
    x, weight, bias, dy = problem(6, 48, dtype=torch.float64)
    mu = weight.abs().mean()
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    dx, dg, db = torch.autograd.grad(F.layer_norm(x, (48,), weight, bias), leaves, dy)
    _, our_dx, our_dg, our_db = run(x, weight, bias, dy, compensate=True)
    assert torch.allclose(our_dx * mu, dx) and torch.allclose(our_dg, dg) and torch.allclose(our_db, db)


def test_gradcheck_without_compensation():
    leaves = [t.requires_grad_() for t in problem(3, 10, dtype=torch.float64)[:3]]
    assert torch.autograd.gradcheck(layer_norm, leaves)


STRIDED = {
    "cat": lambda y: torch.cat([y, y * 2], 0).square().sum(),
    "t": lambda y: (y.t() @ torch.ones(y.shape[0], 3)).square().sum(),
    "expand": lambda y: y.sum(),
    "every second": lambda y: y[::2, 1::2].square().sum(),
}


@pytest.mark.parametrize("name", STRIDED)
def test_strided_gradients(name):
    """The gradient that arrives is a view with other strides: silently wrong elsewhere, and opcheck can't see it."""
    x, weight, bias, _ = problem(6, 40)
    grads = []
    for norm in (layer_norm, lambda x, w, b: F.layer_norm(x, (40,), w, b)):
        leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias)]
        grads.append(torch.autograd.grad(STRIDED[name](norm(*leaves)), leaves))
    for ours, theirs in zip(*grads, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_used_twice_in_one_graph():
    x, weight, bias, _ = problem(6, 40)
    grads = []
    for norm in (layer_norm, lambda x, w, b: F.layer_norm(x, (40,), w, b)):
        leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias)]
        grads.append(torch.autograd.grad(norm(norm(*leaves) + leaves[0], *leaves[1:]).square().sum(), leaves))
    for ours, theirs in zip(*grads, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_frozen_parts():
    x, weight, bias, dy = problem(6, 40)
    full = run(x, weight, bias, dy)[1:]
    for k, leaf in enumerate((x, weight, bias)):
        leaf.requires_grad_()
        (grad,) = torch.autograd.grad(layer_norm(x, weight, bias), [leaf], dy)
        leaf.requires_grad_(False)
        assert torch.equal(grad, full[k])
    assert not layer_norm(x, weight, bias).requires_grad


def test_no_second_derivative():
    x, weight, bias, _ = problem(3, 8)
    x.requires_grad_()
    (dx,) = torch.autograd.grad(layer_norm(x, weight, bias).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once, not twice"):
        torch.autograd.grad(dx.sum(), x)


def test_statistics_have_no_gradient():
    x, weight, bias, _ = problem(3, 8)
    y, mean, rstd = torch.ops.minillava.layer_norm(x.requires_grad_(), weight, bias, 1e-5, False)
    assert y.requires_grad and not mean.requires_grad and not rstd.requires_grad


def test_same_bits_again_and_with_any_number_of_threads():
    for dtype in (torch.float32, torch.bfloat16):
        args = problem(700, 384, dtype=dtype)
        threads, results = torch.get_num_threads(), []
        try:
            for n in (1, 2, 2, 5):
                torch.set_num_threads(n)
                results.append(run(*args, compensate=True))
        finally:
            torch.set_num_threads(threads)
        # The reference inherits PyTorch's reductions, whose order may follow the number of threads.
        for other in results[1:] if is_compiled() else results[2:3]:
            first = results[0] if is_compiled() else results[1]
            assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("dtypes", [*PAIRS[:2], MIXED[0]], ids=str)
@pytest.mark.parametrize("compensate", [False, True])
def test_opcheck(dtypes, compensate):
    x, weight, bias, dy = problem(2, 5, 24, dtype=dtypes[0], param_dtype=dtypes[1])
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    passed = torch.library.opcheck(torch.ops.minillava.layer_norm.default, (*leaves, 1e-5, compensate))
    assert set(passed.values()) == {"SUCCESS"} and len(passed) == 4
    with torch.no_grad():
        _, mean, rstd = torch.ops.minillava.layer_norm(x, weight, bias, 1e-5, compensate)
    args = (dy, x.detach(), mean, rstd, weight.detach(), compensate)
    passed = torch.library.opcheck(torch.ops.minillava.layer_norm_backward.default, args)
    assert set(passed.values()) == {"SUCCESS"} and len(passed) == 4


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_into_one_graph(dynamic):
    def block(x, weight, bias):
        return layer_norm(F.gelu(x), weight, bias, 1e-6, True) * 2

    compiled = torch.compile(block, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for M in (4, 6):
        x, weight, bias, dy = problem(M, 40)
        grads = []
        for function in (block, compiled):
            leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias)]
            grads.append(torch.autograd.grad(function(*leaves), leaves, dy))
        for a, b in zip(*grads, strict=True):
            assert torch.allclose(a, b, atol=1e-6)


def test_meta_device():
    x, weight, bias, _ = problem(2, 3, 40, dtype=torch.bfloat16, param_dtype=torch.float32)
    leaves = [t.to("meta").requires_grad_() for t in (x, weight, bias)]
    y = layer_norm(*leaves, 1e-5, True)
    assert y.device.type == "meta" and y.shape == (2, 3, 40) and y.dtype == torch.bfloat16
    y.sum().backward()
    assert [t.grad.dtype for t in leaves] == [torch.bfloat16, torch.float32, torch.float32]


def test_autocast_changes_nothing():
    for dtype in (torch.bfloat16, torch.float32):
        x, weight, bias, _ = problem(4, 40, dtype=dtype, param_dtype=torch.float32)
        outside = layer_norm(x, weight, bias)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = layer_norm(x, weight, bias)
        assert inside.dtype == dtype and torch.equal(inside, outside)


@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
def test_agrees_with_the_reference(dtypes):
    x, weight, bias, dy = problem(5, 200, dtype=dtypes[0], param_dtype=dtypes[1])
    y, mean, rstd = torch.ops.minillava.layer_norm(x, weight, bias, 1e-5, True)
    expected = _forward_reference(x, weight, bias, 1e-5, True)
    for got, want in zip((y, mean, rstd), expected, strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
        assert_close(got, want, want.abs().max().double().expand(want.shape), 64.0)
    for got, want in zip(
        torch.ops.minillava.layer_norm_backward(dy, x, mean, rstd, weight, True),
        _backward_reference(dy, x, mean, rstd, weight, True),
        strict=True,
    ):
        assert got.dtype == want.dtype and got.shape == want.shape
        assert_close(got, want, want.abs().max().double().expand(want.shape), 64.0)


X, W = torch.zeros(2, 8), torch.ones(8)
WRONG = {
    "weight must have shape (8,)": (X, torch.ones(7), W),
    "bias must have shape (8,)": (X, W, torch.ones(1, 8)),
    "at least one feature": (torch.zeros(2, 0), torch.ones(0), torch.ones(0)),
    "weight and bias must both be": (X, W.double(), W.double()),
    "got torch.float32 and torch.float16": (X, W, W.half()),
    "takes fp16, bf16, fp32 or fp64": (X.int(), W.int(), W.int()),
    "eps must not be negative": (X, W, W, -1e-5),
    "weight is on meta": (X, W.to("meta"), W),
}


@pytest.mark.parametrize("message", WRONG)
def test_bad_input_is_refused(message):
    with pytest.raises((ValueError, TypeError)) as error:
        layer_norm(*WRONG[message])
    assert message in str(error.value)


def test_the_compiled_op_guards_itself():
    if not is_compiled():
        pytest.skip("no compiled kernel in this run")
    for args in list(WRONG.values())[:5]:
        with pytest.raises((RuntimeError, TypeError)):
            torch.ops.minillava.layer_norm(*args, 1e-5, False)
    _, mean, rstd = torch.ops.minillava.layer_norm(X, W, W, 1e-5, False)
    for args in ((X[:1], X, mean, rstd, W), (X, X, mean[:1], rstd, W), (X.double(), X, mean, rstd, W)):
        with pytest.raises(RuntimeError):
            torch.ops.minillava.layer_norm_backward(*args, False)
