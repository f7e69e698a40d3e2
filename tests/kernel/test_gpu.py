"""On a device: the same truths as on the CPU, and what only a device can show. Needs `make build` with CUDA."""

import shutil
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from minillava.layer_norm import is_compiled, layer_norm

pytestmark = pytest.mark.gpu

PAIRS = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
    (torch.float16, torch.float32),
    (torch.float64, torch.float64),
]
SHAPES = [
    (1, 1),
    (3, 5),
    (9, 8),
    (33, 24),
    (4, 250),
    (7, 256),
    (5, 513),
    (640, 1024),
    (2, 4104),
    (2, 5001),
    (300, 8200),
]


@pytest.fixture(autouse=True)
def cuda_kernels():
    if not (is_compiled() and torch._C._dispatch_has_kernel_for_dispatch_key("minillava::layer_norm", "CUDA")):
        pytest.skip("minillava is not built for CUDA: make build")


def problem(*shape, dtypes=PAIRS[0]):
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape, dtype):
        return (torch.rand(shape, device="cuda", generator=generator) * 2 - 1).to(dtype)

    D = shape[-1]
    return (
        draw(*shape, dtype=dtypes[0]),
        draw(D, dtype=dtypes[1]),
        draw(D, dtype=dtypes[1]),
        draw(*shape, dtype=dtypes[0]),
    )


def run(norm, x, weight, bias, dy):
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
    y = norm(*leaves)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


def native(x, weight, bias):
    return F.layer_norm(x, weight.shape, weight, bias)


@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_fp64_and_no_worse_than_pytorch(shape, dtypes):
    args = problem(*shape, dtypes=dtypes)
    exact = run(native, *(t.double() for t in args))
    theirs = run(native, args[0], *(t.to(dtypes[0]) for t in args[1:3]), args[3])
    for ours, other, truth in zip(run(layer_norm, *args), theirs, exact, strict=True):
        eps = torch.finfo(ours.dtype).eps + (1e-6 if ours.dtype != torch.float64 else 0)
        error = (ours.double() - truth).abs().max()
        assert error <= 16 * eps * truth.abs().max().clamp(min=1) or error <= 2 * (other.double() - truth).abs().max()


def test_same_bits_again_aligned_or_not():
    for dtypes in PAIRS[:2]:
        x, weight, bias, dy = problem(5000, 1024, dtypes=dtypes)
        first = run(layer_norm, x, weight, bias, dy)
        moved = torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view_as(x)
        for again in (run(layer_norm, x, weight, bias, dy), run(layer_norm, moved, weight, bias, dy)):
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_large_mean():
    x, weight, bias, dy = problem(64, 1024)
    x, weight, bias = x + 1e4, torch.ones_like(weight), torch.zeros_like(bias)
    exact = run(native, *(t.double() for t in (x, weight, bias, dy)))
    y, dx, _, _ = run(layer_norm, x, weight, bias, dy)
    assert (y - exact[0]).abs().max() < 1e-5 and (dx - exact[1]).abs().max() < 1e-5


def test_strided_gradients_and_no_rows():
    x, weight, bias, _ = problem(6, 40)
    for loss in (lambda y: torch.cat([y, y * 2]).square().sum(), lambda y: (y.t() @ torch.ones_like(y)).sum()):
        grads = []
        for norm in (layer_norm, native):
            leaf = x.clone().requires_grad_()
            grads.append(torch.autograd.grad(loss(norm(leaf, weight, bias)), leaf)[0])
        assert torch.allclose(*grads, rtol=1e-4, atol=1e-5)
    _, dx, dg, db = run(layer_norm, x[:0], weight, bias, x[:0])
    assert dx.shape == (0, 40) and not dg.any() and not db.any()


@pytest.mark.parametrize("shape", [(2**21 + 8, 1024), (70_000_000, 32)], ids=str)
def test_more_than_two_to_the_31_elements(shape):
    needed = 5 * shape[0] * shape[1] * 2
    if torch.cuda.mem_get_info()[0] < needed * 1.2:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of free device memory")
    x = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    weight, bias = torch.rand(shape[1], device="cuda"), torch.rand(shape[1], device="cuda")
    y, dx, dg, _ = run(layer_norm, x, weight, bias, x)
    rows = torch.tensor([0, 1, shape[0] // 2, shape[0] - 2, shape[0] - 1], device="cuda")
    expected = run(native, *(t.double() for t in (x[rows], weight, bias, x[rows])))
    assert torch.allclose(y[rows].double(), expected[0], rtol=1e-2, atol=1e-2)
    assert torch.allclose(dx[rows].double(), expected[1], rtol=1e-2, atol=1e-2)
    assert dg.isfinite().all()


def test_current_stream_and_device_are_respected():
    x, weight, bias, _ = problem(4096, 1024)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late = x * 3
        y = layer_norm(late, weight, bias)
    side.synchronize()
    assert torch.allclose(y, native(x * 3, weight, bias), atol=1e-5)
    if torch.cuda.device_count() > 1:
        with torch.cuda.device(1):  # the tensors live on device 0
            assert torch.allclose(layer_norm(x, weight, bias), native(x, weight, bias), atol=1e-5)


def test_opcheck_and_compile():
    x, weight, bias, _ = problem(4, 40)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    passed = torch.library.opcheck(torch.ops.minillava.layer_norm.default, (*leaves, 1e-5, True))
    assert set(passed.values()) == {"SUCCESS"}
    compiled = torch.compile(lambda *a: layer_norm(*a, 1e-5, True) * 2, fullgraph=True)
    assert torch.allclose(compiled(*leaves), layer_norm(*leaves, 1e-5, True) * 2)


MEMCHECK = """
import torch
from minillava.layer_norm import layer_norm
for M, D in [(1, 1), (9, 250), (7, 256), (5, 513), (6, 1024), (3, 4104), (3, 5001), (3, 8200)]:
    for dtype in (torch.float32, torch.bfloat16):
        leaves = [torch.randn(*s, dtype=dtype, device="cuda", requires_grad=True) for s in ((M, D), (D,), (D,))]
        layer_norm(*leaves, 1e-5, True).sum().backward()
torch.cuda.synchronize()
"""


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck", "initcheck"])
def test_compute_sanitizer(tool):
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if program is None:
        pytest.skip("no compute-sanitizer on this machine")
    command = [program, "--tool", tool, "--error-exitcode", "9", "--kernel-regex", "kns=minillava"]
    done = subprocess.run([*command, sys.executable, "-c", MEMCHECK], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
