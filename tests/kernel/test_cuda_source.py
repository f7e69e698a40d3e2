"""The CUDA kernels without a GPU: run by g++ (cuda_on_cpu.h), judged by its sanitizers, compiled by nvcc.

Outputs alone would not do: on one CPU thread the result is right in spite of a missing barrier. So there are also tests
of the tests: faults planted in a copy of the source, each of which has to be caught.
"""

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from minillava.layer_norm import _backward_reference, _forward_reference

CUH = Path(__file__).resolve().parents[2] / "minillava/csrc/layer_norm.cuh"
DTYPES = ["float32_float32", "bfloat16_bfloat16", "bfloat16_float32", "float16_float16", "float16_float32",
          "float64_float64"]  # fmt: skip
SHAPES = [(1, 1), (3, 5), (9, 8), (33, 24), (4, 250), (7, 256), (5, 513), (6, 1024), (2, 4104), (2, 5001), (2, 8200)]
RUNGS = {"forward": [0, 1, 2, 3, 4], "backward": [0, 1, 2, 4]}


@pytest.fixture(scope="module")
def kernels(build_harness):
    library = ctypes.CDLL(str(build_harness("-O2", "-shared", "-fPIC")))

    def call(direction, dtypes, rung, *arguments):
        kinds = {bool: ctypes.c_bool, int: ctypes.c_int64, float: ctypes.c_double}
        values = [
            ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else kinds[type(a)](a) for a in arguments
        ]
        getattr(library, f"{direction}_{dtypes}")(ctypes.c_int(rung), *values)

    return call


def problem(M, D, dtypes, offset=0.0):
    dtype, param_dtype = (getattr(torch, d) for d in dtypes.split("_"))
    generator = torch.Generator().manual_seed(0)
    x, dy = ((torch.rand(M, D, generator=generator) * 2 - 1 + o).to(dtype) for o in (offset, 0.0))
    weight, bias = ((torch.rand(D, generator=generator) * 2 - 1).to(param_dtype) for _ in range(2))
    return x, weight, bias, dy


def forward(kernels, dtypes, rung, x, weight, bias, eps=1e-5):
    (M, D), stats = x.shape, torch.float64 if x.dtype == torch.float64 else torch.float32
    y, mean, rstd = torch.full_like(x, torch.nan), *torch.full((2, M), torch.nan, dtype=stats)
    kernels("forward", dtypes, rung, x, weight, bias, eps, y, mean, rstd, M, D)
    return y, mean, rstd


def backward(kernels, dtypes, rung, dy, x, mean, rstd, weight, compensate):
    dx, (dg, db) = torch.full_like(x, torch.nan), (torch.full_like(weight, torch.nan) for _ in range(2))
    kernels("backward", dtypes, rung, dy, x, mean, rstd, weight, compensate, dx, dg, db, *x.shape)
    return dx, dg, db


def assert_near(got, want, reference_64):
    """As near to the truth as rounding to the dtype, and the reference, are."""
    tolerance = 2 * torch.finfo(got.dtype).eps + 1e-6 * (got.dtype != torch.float64)
    size = reference_64.abs().amax().clamp(min=1.0) if reference_64.numel() else 1.0
    assert got.isfinite().all()
    assert ((got.double() - reference_64).abs() <= tolerance * (reference_64.abs() + size) * 4).all()
    assert ((got.double() - want.double()).abs() <= tolerance * (reference_64.abs() + size) * 4).all()


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_rung_against_the_reference(kernels, shape, dtypes):
    x, weight, bias, dy = problem(*shape, dtypes)
    exact = [t.double() for t in (x, weight, bias, dy)]
    y64, mean64, rstd64 = _forward_reference(*exact[:3], 1e-5, True)
    expected = _forward_reference(x, weight, bias, 1e-5, True)
    for rung in RUNGS["forward"] if shape[1] < 5000 else (0, 4):
        for got, want, truth in zip(
            forward(kernels, dtypes, rung, x, weight, bias), expected, (y64, mean64, rstd64), strict=True
        ):
            assert_near(got, want, truth)
    _, mean, rstd = expected
    grads64 = _backward_reference(exact[3], exact[0], mean64, rstd64, exact[1], True)
    expected = _backward_reference(dy, x, mean, rstd, weight, True)
    for rung in RUNGS["backward"] if shape[1] < 5000 else (0, 4):
        for got, want, truth in zip(
            backward(kernels, dtypes, rung, dy, x, mean, rstd, weight, True), expected, grads64, strict=True
        ):
            assert_near(got, want, truth)


@pytest.mark.parametrize("rung", RUNGS["forward"])
def test_large_mean(kernels, rung):
    x, weight, bias, dy = problem(4, 1024, "float32_float32", offset=1e4)
    weight, bias = torch.ones_like(weight), torch.zeros_like(bias)
    exact = [t.double() for t in (x, weight, bias, dy)]
    y64, mean64, rstd64 = _forward_reference(*exact[:3], 1e-5, False)
    y, mean, rstd = forward(kernels, "float32_float32", rung, x, weight, bias)
    assert (y - y64).abs().max() < 1e-5
    dx64 = _backward_reference(exact[3], exact[0], mean64, rstd64, exact[1], False)[0]
    dx = backward(kernels, "float32_float32", 0, dy, x, mean, rstd, weight, False)[0]
    assert (dx - dx64).abs().max() < 1e-5


@pytest.mark.parametrize("dtypes", ["float32_float32", "bfloat16_bfloat16"])
@pytest.mark.parametrize("shape", [(5, 40), (9, 256), (3, 4104)], ids=str)
def test_alignment_never_changes_a_bit(kernels, shape, dtypes):
    x, weight, bias, dy = problem(*shape, dtypes)

    def off_by_one(t):
        moved = torch.cat([t.new_zeros(1), t.reshape(-1)])[1:]
        assert moved.data_ptr() % 16
        return moved.view(t.shape)

    aligned, moved = (forward(kernels, dtypes, 0, f(x), weight, bias) for f in (torch.clone, off_by_one))
    assert all(torch.equal(a, b) for a, b in zip(aligned, moved, strict=True))
    _, mean, rstd = aligned
    aligned, moved = (
        backward(kernels, dtypes, 0, f(dy), f(x), mean, rstd, weight, True) for f in (torch.clone, off_by_one)
    )
    assert all(torch.equal(a, b) for a, b in zip(aligned, moved, strict=True))


def test_no_rows(kernels):
    x, weight, bias, dy = problem(0, 40, "float32_float32")
    _, mean, rstd = forward(kernels, "float32_float32", 0, x, weight, bias)
    _, dg, db = backward(kernels, "float32_float32", 0, dy, x, mean, rstd, weight, True)
    assert not dg.any() and not db.any()


def test_more_rows_than_one_round_of_blocks(kernels):
    x, weight, bias, dy = problem(34_000, 2, "float32_float32")  # 8448 blocks of four rows, and then some
    y, mean, rstd = forward(kernels, "float32_float32", 0, x, weight, bias)
    assert_near(y, y, _forward_reference(x.double(), weight.double(), bias.double(), 1e-5, False)[0])
    dx, dg, db = backward(kernels, "float32_float32", 0, dy, x, mean, rstd, weight, False)
    expected = _backward_reference(*(t.double() for t in (dy, x, mean, rstd, weight)), False)
    for got, want in zip((dx, dg, db), expected, strict=True):
        assert (got - want).abs().max() <= 1e-5 * want.abs().max() + 1e-3 * (got is dx)


def test_nan_gain_reaches_dx_and_a_zero_gain_is_floored(kernels):
    x, weight, bias, dy = problem(3, 40, "float32_float32")
    _, mean, rstd = forward(kernels, "float32_float32", 0, x, weight, bias)
    for rung in RUNGS["backward"]:
        small = torch.full_like(weight, 1e-4)
        plain, compensated = (
            backward(kernels, "float32_float32", rung, dy, x, mean, rstd, small, c)[0] for c in (False, True)
        )
        assert torch.allclose(compensated, plain * 1000, rtol=1e-5)
        weight[7] = torch.nan
        assert backward(kernels, "float32_float32", rung, dy, x, mean, rstd, weight, True)[0].isnan().all()


# ---- Sanitizers ------------------------------------------------------------------------------------------------------

THREADS = ("-O1", "-DSANITIZED", "-fsanitize=thread")
ADDRESSES = ("-O1", "-DSANITIZED", "-fsanitize=address", "-fsanitize=undefined", "-fno-sanitize-recover=all")


def run_sanitized(program: Path) -> subprocess.CompletedProcess:
    options = {"TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "detect_leaks=0"}
    return subprocess.run([program], capture_output=True, text=True, env={**os.environ, **options})


@pytest.mark.slow
@pytest.mark.parametrize("flags", [THREADS, ADDRESSES], ids=["threads", "addresses"])
def test_sanitizers_are_content(build_harness, flags):
    done = run_sanitized(build_harness(*flags))
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr[:4000]


# What to replace in the source, with what, and what has to be said about it. `#` stands for the line of the fault.
FAULTS = {
    "no barrier before the warps' sums are read": (
        "  __syncthreads();\n  for (int k = 0; k < N; ++k) v[k] = lane % kMaxWarps < warps",
        "  for (int k = 0; k < N; ++k) v[k] = lane % kMaxWarps < warps",
        THREADS, "data race", "row_sum",
    ),
    "one buffer for two sums in a row": (
        "slots + turn * kMaxWarps * 3", "slots", THREADS, "data race", "row_sum",
    ),
    "no warp barrier between the steps of a sum in memory": (
        "slots[lane] += slots[lane + half];\n    __syncwarp();", "slots[lane] += slots[lane + half];",
        THREADS, "data race", "warp_sum_in_memory",
    ),
    "no warp barrier before the memory is used again": (
        "const A total = slots[0];\n  __syncwarp();", "const A total = slots[0];",
        THREADS, "data race", "warp_sum_in_memory",
    ),
    "all blocks write the same partial sums": (
        "int64_t(which) * gridDim.x + blockIdx.x) * D", "int64_t(which) * gridDim.x) * D",
        THREADS, "data race", "write_partial",
    ),
    "a pack is stored past the end of the row": (
        "if (col + k < D) row[col + k] = p.v[k];", "row[col + k] = p.v[k];",
        ADDRESSES, "heap-buffer-overflow", "store",
    ),
    "shared memory for half of the warps": (
        "SHARED_ARRAY(float, slots, 2 * kMaxWarps * 3)", "SHARED_ARRAY(float, slots, 3)",
        ADDRESSES, "use-after-poison", "row_sum",
    ),
    "rows that return before the barrier": (
        "const int64_t row = first + threadIdx.y, width = row < M ? D : 0;  // no row left",
        "const int64_t row = first + threadIdx.y, width = D; if (row >= M) return;  // no row left",
        ADDRESSES, "a barrier or shuffle that other threads have returned before", "layer_norm.cuh:",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_caught(build_harness, tmp_path, name):
    before, after, flags, complaint, place = FAULTS[name]
    source = CUH.read_text()
    assert before in source, "the source has changed under this fault: plant it anew"
    faulty = tmp_path / "layer_norm.cuh"
    faulty.write_text(source.replace(before, after))
    done = run_sanitized(build_harness(*flags[:3], "-DPLANTED", cuh=faulty))
    assert done.returncode != 0, "not caught"
    assert complaint in done.stderr and place in done.stderr, done.stderr[:4000]


# ---- nvcc ------------------------------------------------------------------------------------------------------------

INSTANCES = """
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include "{cuh}"
#define BOTH(T, P, A) \\
  template cudaError_t minillava::forward<T, P, A>(const T*, const P*, const P*, A, T*, A*, A*, int64_t, int64_t, \\
                                                   cudaStream_t); \\
  template cudaError_t minillava::backward<T, P, A>(const T*, const T*, const A*, const A*, const P*, bool, T*, P*, \\
                                                    P*, A*, int64_t, int64_t, cudaStream_t);
BOTH(float, float, float)
BOTH(c10::BFloat16, c10::BFloat16, float)
BOTH(c10::Half, float, float)
BOTH(double, double, double)
"""


def find_nvcc() -> str:
    for candidate in (os.environ.get("CUDA_HOME", "") + "/bin/nvcc", shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"):
        if candidate and Path(candidate).exists():
            return candidate
    pytest.skip("no nvcc on this machine")


def nvcc(tmp_path, *flags):
    source = tmp_path / "instances.cu"
    source.write_text(INSTANCES.format(cuh=CUH))
    include = Path(torch.__file__).parent / "include"
    command = [find_nvcc(), "-std=c++20", "-O3", "--expt-relaxed-constexpr", f"-I{include}", *flags, str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_no_kernel_spills(tmp_path, architecture):
    output = nvcc(tmp_path, "-cubin", f"-arch={architecture}", "--resource-usage", "-o", str(tmp_path / "out.cubin"))
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", output)
    assert len(spills) >= 20 and all(s == ("0", "0") for s in spills), output
    two_blocks = [
        int(m[1]) for m in re.finditer(r"backward_3I\w+Li1ELb1E.*?Used (\d+) registers", output, flags=re.DOTALL)
    ]
    assert two_blocks and max(two_blocks) <= 64, "two blocks of 512 threads need 64 registers a thread"


@pytest.mark.slow
def test_ptx_moves_sixteen_bytes_at_a_time(tmp_path):
    nvcc(tmp_path, "-ptx", "-arch=sm_90", "-o", str(tmp_path / "out.ptx"))
    entries = re.split(r"(?=\.visible \.entry)", (tmp_path / "out.ptx").read_text())[1:]
    fast = [e for e in entries if re.search(r"(forward_4|backward_3)I\w+Li\dELb1E", e.split("(")[0])]
    assert len(fast) >= 12
    for entry in fast:
        loads = re.findall(r"ld\.global(?:\.nc)?\.(?:v4\.[ubf]32|v2\.[ubf]64)", entry)
        stores = re.findall(r"st\.global\.(?:v4\.[ubf]32|v2\.[ubf]64)", entry)
        assert loads and stores, entry.split("(")[0]
