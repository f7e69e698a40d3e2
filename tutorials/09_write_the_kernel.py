# %% [markdown]
# # 9. Write the kernel
#
# **Question: how do you make a LayerNorm fast, and how do you know that it is right, without owning a GPU?**
#
# LayerNorm does almost no arithmetic. Whatever time it takes goes into moving numbers from memory to the chip and back.
# So a fast LayerNorm is one that moves few bytes, and one can count bytes with a pencil. Right or wrong is another
# matter: a parallel program can give the right answer by luck, a thousand times. Here you will see both, on a CPU.
#
# You need a C++ compiler (`g++`) for this one. The kernels are those of the package: `minillava/csrc/layer_norm.cuh`.

# %%
import ctypes
import os
import re
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import torch
from exercises import check
from reader import GREY, Picture, quote

import minillava
from minillava.layer_norm import layer_norm
from minillava.style import canvas, in_style

root = Path(minillava.__file__).resolve().parents[1]
cuh = root / "minillava" / "csrc" / "layer_norm.cuh"
stand_in = root / "tests" / "kernel" / "cuda_on_cpu.h"

# %% [markdown]
# ## Count the sectors
#
# GPU memory is read in sectors of 32 bytes. A *warp* is 32 threads that run in step, so one load instruction asks for
# 32 addresses at once, and the memory sends every sector in which at least one of them lies.
#
# The obvious kernel gives each thread a row: thread 0 reads the first number of row 0, thread 1 the first number of row
# 1, and so on. The better one gives each *warp* a row: thread 0 reads number 0, thread 1 number 1.
#
# **Predict.** Numbers of 4 bytes, rows of 4096. How many sectors does one load of a warp need in either case? How many
# of the bytes that arrive are used?


# %%
def sectors(stride):
    """Sectors that 32 threads touch when neighbours read 4 bytes that lie `stride` bytes apart."""
    return len(np.unique(np.arange(32) * stride // 32))


width = 4096
thread_a_row, warp_a_row = sectors(4 * width), sectors(4)
quote("32", thread_a_row)
quote("4", warp_a_row)
quote("12.5", 100 * 32 * 4 / (thread_a_row * 32))
quote("100", 100 * 32 * 4 / (warp_a_row * 32))

# %% [markdown]
# 32 sectors against 4. A thread a row uses 12.5 percent of what it fetches, a warp a row uses 100 percent. Same
# arithmetic, same answer, eight times the traffic. This is the first rung of the ladder.
#
# **Predict.** The rest of the ladder. LayerNorm needs the mean, then the variance, then the output: three passes over
# $x$, and one write. What is the least number of bytes that any LayerNorm can move, for numbers of $s$ bytes?

# %%
s = 2  # bf16
waste = thread_a_row // warp_a_row
bytes_moved = {
    "1: a thread a row": 3 * waste * s + waste * s,  # three reads and a write, all of them scattered
    "2: a warp a row": 3 * s + s,
    "3: a block a row": 3 * s + s,  # the same traffic, but the second and third read can come from the cache
    "4: the row in registers": s + s,
}
with in_style():
    figure, (panel,) = canvas(1, 1, 6.4, 2.6)
    panel.barh(list(bytes_moved), list(bytes_moved.values()), color=["#B0B0B0"] * 3 + ["#009E73"])
    for row, count in enumerate(bytes_moved.values()):
        panel.text(count + 1, row, str(count), va="center")
    panel.axvline(2 * s, color=GREY, linestyle=":", label="the least there is: one read, one write")
    panel.invert_yaxis()
    panel.set(xlabel="bytes moved for each number, at most", xlim=(0, 70))
    panel.legend(loc="lower right")
Picture(figure, "Bytes a number: 64 for a thread a row, 8 for a warp or block a row, 4 with the row in registers.")

# %% [markdown]
# **What to see.** Each rung moves fewer bytes than the one before, or asks the cache for what it asks for twice. The
# last one keeps the row in registers and reads it once: 4 bytes a number in bf16, and no LayerNorm can do with less.
# These are counts, not measured times; the comments in the source say what each rung buys.

# %%
quote("64", bytes_moved["1: a thread a row"])
quote("8", bytes_moved["2: a warp a row"])
quote("4", bytes_moved["4: the row in registers"])

# %% [markdown]
# ## One pass too few
#
# There is a tempting trick: add up $x$ and $x^2$ in a single pass, then $\sigma^2 = \overline{x^2} - \bar x^2$. One
# read fewer.
#
# **Predict.** Single precision has about seven digits. The numbers have spread 1 and a mean of 1000. How many digits of
# the variance are left?

# %%
rng = np.random.default_rng(0)
offsets = np.logspace(0, 5, 26)
spread = rng.standard_normal(4096)
errors = {"one pass": [], "two passes": [], "two passes, corrected": []}
for offset in offsets:
    x = (spread + offset).astype(np.float32)
    exact = np.var(x.astype(np.float64))
    mean = x.mean(dtype=np.float32)
    d = x - mean
    delta = d.mean(dtype=np.float32)  # what rounding has left of the mean
    candidates = {
        "one pass": (x * x).mean(dtype=np.float32) - mean * mean,
        "two passes": (d * d).mean(dtype=np.float32),
        "two passes, corrected": (d * d).mean(dtype=np.float32) - delta * delta,
    }
    for name, value in candidates.items():
        errors[name].append(max(abs(float(value) - exact) / exact, 1e-9))
with in_style():
    figure, (panel,) = canvas(1, 1, 5.8, 3.2)
    for (name, error), line in zip(errors.items(), ("-", "--", ":"), strict=True):
        panel.plot(offsets, error, linestyle=line, color="#D55E00" if name == "one pass" else GREY, label=name)
    panel.set(
        xscale="log", yscale="log", xlabel="mean of x, in units of its spread", ylabel="relative error of the variance"
    )
    panel.legend()
Picture(figure, "The one-pass variance loses all digits once the mean is a few thousand times the spread.")

# %% [markdown]
# **What to see.** The one-pass error grows with the *square* of the mean. At a mean of some thousand spreads nothing of
# the variance is left, and it may even come out negative, and the root of that is NaN. The two-pass forms stay at the
# bottom.

# %%
at_thousand = int(np.argmin(abs(offsets - 1e3)))
at_hundred_thousand = len(offsets) - 1
assert errors["one pass"][at_thousand] > 1e-3
assert errors["one pass"][at_hundred_thousand] > 0.9
assert max(errors["two passes, corrected"]) < 1e-5

# %% [markdown]
# So the kernels here take two passes. On the last rung the second pass reads registers, not memory: it is free.
#
# ## Run the CUDA source on a CPU
#
# A kernel is a C++ function with a few extra words. `tests/kernel/cuda_on_cpu.h` supplies those words: every CUDA
# thread becomes a little thread of its own that runs until it meets a barrier or a shuffle. It is slow and it is
# honest. Here are the rungs of the real source, compiled by g++, behind one C function:

# %%
driver = """
#include LAYER_NORM_CUH
using namespace minillava;
extern "C" void rung(int which, const float* x, const float* g, const float* b, float* y, float* m, float* r,
                     int64_t M, int64_t D) {
  const float e = 1e-5f;
  dim3 warps(32, 4), threads(64), block(64, 2);
  if (which == 1) launch(forward_1<float, float>, ceil_div(M, 64), threads, nullptr, x, g, b, e, y, m, r, M, D);
  if (which == 2) launch(forward_2<float, float>, ceil_div(M, 4), warps, nullptr, x, g, b, e, y, m, r, M, D);
  if (which == 3) launch(forward_3<float, float, false>, dim3(2), block, nullptr, x, g, b, e, y, m, r, M, D);
  if (which == 4) launch_forward<float, float, false, float>(x, g, b, e, y, m, r, M, D, 2, nullptr);
}
int main() {
  static float x[6 * 40], g[40], b[40], y[6 * 40], mean[6], rstd[6];
  for (int i = 0; i < 240; ++i) x[i] = i * 37 % 101 / 50.0f - 1;
  for (int i = 0; i < 40; ++i) g[i] = 1;
  rung(2, x, g, b, y, mean, rstd, 6, 40);
  printf("%.6f %.6f\\n", y[0], y[239]);
}
"""
folder = Path(tempfile.mkdtemp())


def compile_driver(name, *flags, source=cuh):
    (folder / "driver.cpp").write_text(driver)
    command = ["g++", "-std=c++20", "-g", "-O1", "-Wno-unknown-pragmas", "-include", str(stand_in)]
    command += [f'-DLAYER_NORM_CUH="{source}"', *flags, str(folder / "driver.cpp"), "-o", str(folder / name)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return folder / name


library = ctypes.CDLL(str(compile_driver("rungs.so", "-shared", "-fPIC")))

# %% [markdown]
# **Predict.** Four very different programs add up the same numbers in four different orders. Will they agree with
# PyTorch to the last bit?

# %%
torch.manual_seed(0)
x, gain, bias = torch.randn(9, 250) + 3, torch.randn(250), torch.randn(250)
expected = layer_norm(x, gain, bias)
for which in (1, 2, 3, 4):
    y, mean, rstd = torch.full_like(x, torch.nan), torch.empty(9), torch.empty(9)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, gain, bias, y, mean, rstd)]
    library.rung(ctypes.c_int(which), *pointers, ctypes.c_int64(9), ctypes.c_int64(250))
    difference = (y - expected).abs().max().item()
    print(f"rung {which}: largest difference {difference:.1e}")
    assert difference < 5e-6

# %% [markdown]
# To rounding, and no further. Sums of floating point numbers depend on their order. That is why a test of a kernel
# compares with a reference in double precision and a stated tolerance, and why the kernels fix their order, so that at
# least they agree with *themselves* on every run.
#
# ## A missing barrier
#
# Rung 2 adds up 32 partial sums in shared memory, halving their number five times. Between the halvings there is a
# `__syncwarp()`, which says: no thread goes on before all have come this far. Let us remove the one inside the loop.
#
# **Predict.** Will the result be wrong, on our CPU? Would it be wrong on a GPU?

# %%
text = cuh.read_text()
barrier = "    if (lane < half) slots[lane] += slots[lane + half];\n    __syncwarp();\n"
assert text.count(barrier) == 1
broken = folder / "broken.cuh"
broken.write_text(text.replace(barrier, barrier.replace("    __syncwarp();\n", "")))


def run(program):
    done = subprocess.run(
        [program], capture_output=True, text=True, env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    )
    return done.returncode, done.stdout.strip(), done.stderr


good, bad = run(compile_driver("good")), run(compile_driver("bad", source=broken))
print("with the barrier:   ", good[1])
print("without the barrier:", bad[1])
assert good[0] == bad[0] == 0
assert good[1] != bad[1]

# %% [markdown]
# Wrong, and that was luck. Our stand-in runs one thread as far as it can before it turns to the next, and in this order
# the fault shows. On a GPU the threads of a warp often run in step, barrier or not. Then the sum is right, on this GPU,
# with this compiler, until one of them changes. A result says little about a race: wrong proves that there is one,
# right proves nothing.
#
# ThreadSanitizer asks a better question: is there anything in the program that *forces* one access to come before the
# other? It is told that a barrier orders the threads of a warp, and that nothing else does.
#
# **Predict.** Which line will it name?

# %%
clean = run(compile_driver("good-tsan", "-fsanitize=thread"))
raced = run(compile_driver("bad-tsan", "-fsanitize=thread", source=broken))
print("with the barrier:   ", clean[1])
print("without the barrier:", raced[2].split("(pid")[0].strip("=\n "))
place = next(line for line in raced[2].splitlines() if "warp_sum_in_memory" in line)
named = int(re.search(r"broken.cuh:(\d+)", place)[1])
print("it names the line:  ", broken.read_text().splitlines()[named - 1].strip())
assert clean[0] == 0 and clean[1] == good[1]
assert raced[0] != 0 and "data race" in raced[2]
assert "slots" in broken.read_text().splitlines()[named - 1]

# %% [markdown]
# A data race, with a line of the very function that lost its barrier. The test suite plants such faults in copies of
# the source, one of each kind, and demands that each is caught (`tests/kernel/test_cuda_source.py`). A test that has
# never failed has not been tested.
#
# What this can *not* tell: bank conflicts, occupancy, time. For those there is no substitute for the device.
#
# ## Exercises
#
# **9.1** How many 32-byte sectors does a warp touch when neighbouring threads read 4 bytes that lie `stride` bytes
# apart, the first one at the start of a sector? A function of `stride`, at least 4.

# %%
my_sectors = ...
check("9.1", my_sectors)

# %% [markdown]
# **9.2** Two halves of a row were summed up by two warps. Each knows its count, mean and sum of squared deviations from
# its own mean. Combine them: `f(n_a, mean_a, m2_a, n_b, mean_b, m2_b)` gives `(n, mean, m2)`, without subtracting large
# squares.

# %%
my_merge = ...
check("9.2", my_merge)

# %% [markdown]
# **9.3** The fastest time, in microseconds, that a LayerNorm forward can take: `f(rows, width, bytes_per_number,
# terabytes_per_second)`.

# %%
my_microseconds = ...
check("9.3", my_microseconds)

# %% [markdown]
# **What you have now:** a way to count before you optimise, and a way to distrust a right answer.
