"""Package metadata lives in pyproject.toml; this file only decides what to compile.

By default nothing: the package is pure Python. With MINILLAVA_BUILD=1 (and no build isolation, so that the torch that
will run the kernels is the torch they are built against) the LayerNorm extension is compiled: for CUDA where torch has
CUDA and its toolkit is found, whether or not a GPU is; else for the CPU; else, without a compiler, not at all, and the
package works on its PyTorch reference.

    MINILLAVA_BUILD=1 pip install --no-build-isolation -e .

USE_CUDA=0 leaves CUDA out. USE_CUDA=1 makes a missing compiler or toolkit an error. TORCH_CUDA_ARCH_LIST names the
GPUs to build for.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup

# Ampere and Hopper as machine code (sm_80 also runs on 8.6 and 8.9), anything newer from PTX. Without a default, torch
# would ask the GPUs it sees, and fail with an IndexError where it sees none.
DEFAULT_ARCH_LIST = "8.0;9.0+PTX"


def say(message: str) -> None:
    print(f"minillava: {message}", file=sys.stderr, flush=True)


def find_cuda_home() -> Path | None:
    """The toolkit: CUDA_HOME, else where nvcc lies (unless that is a mere wrapper script), else the usual place."""
    nvcc = shutil.which("nvcc")
    candidates = [
        os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"),
        nvcc and Path(nvcc).resolve().parents[1],
        "/usr/local/cuda",
    ]
    for candidate in candidates:
        root = Path(candidate or "")
        if candidate and (root / "bin" / "nvcc").exists() and (root / "include" / "cuda_runtime.h").exists():
            return root
    return None


def why_no_cuda(torch_cuda: str | None, home: Path | None) -> str | None:
    """The reason why CUDA can't be built, or None if it can."""
    if torch_cuda is None:
        return "this torch is a build without CUDA"
    if home is None:
        return "no CUDA toolkit: nvcc is not on PATH, and CUDA_HOME does not name a toolkit's folder"
    output = subprocess.run([home / "bin" / "nvcc", "--version"], capture_output=True, text=True).stdout
    found = re.search(r"release (\d+)\.(\d+)", output)
    if found is None:
        return f"{home / 'bin' / 'nvcc'} does not tell its version"
    if found[1] != torch_cuda.split(".")[0]:
        return (
            f"the toolkit in {home} is CUDA {found[1]}.{found[2]}, torch was built with CUDA {torch_cuda}; "
            f"set CUDA_HOME to a toolkit of CUDA {torch_cuda.split('.')[0]}"
        )
    return None


def simd_flags() -> list[str]:
    """What makes at::vec use AVX2. Any other machine gets its compiler's baseline (on ARM that is NEON)."""
    import torch

    if platform.machine() not in ("x86_64", "AMD64") or torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        return []
    return ["-mavx2", "-mfma", "-mf16c", "-DCPU_CAPABILITY=AVX2", "-DCPU_CAPABILITY_AVX2"]


def extension_options() -> dict:
    """The arguments of setup() that compile the extension, empty if nothing is to be compiled."""
    if os.environ.get("MINILLAVA_BUILD") != "1":
        return {}
    try:
        import torch
    except ImportError:
        sys.exit("minillava: MINILLAVA_BUILD=1 needs an installed torch, and pip needs --no-build-isolation to see it")

    wanted = os.environ.get("USE_CUDA")
    if wanted not in (None, "0", "1"):
        sys.exit(f"minillava: USE_CUDA must be 0 or 1, got {wanted!r}")
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler.split()[0]) is None:
        message = f"no C++ compiler: {compiler!r} not found (install g++, or set CXX)"
        if wanted == "1":
            sys.exit(f"minillava: {message}")
        say(f"{message}; nothing is compiled, the PyTorch reference will run")
        return {}

    home = find_cuda_home()
    obstacle = "USE_CUDA=0 asks for that" if wanted == "0" else why_no_cuda(torch.version.cuda, home)
    if obstacle and wanted == "1":
        sys.exit(f"minillava: USE_CUDA=1, but {obstacle}")
    if obstacle:
        say(f"building the CPU kernel without CUDA: {obstacle}")
    else:
        os.environ["CUDA_HOME"] = str(home)  # before cpp_extension is imported, which looks only then
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", DEFAULT_ARCH_LIST)
        say(f"building for CUDA with {home}, architectures {os.environ['TORCH_CUDA_ARCH_LIST']}")

    from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension, is_ninja_available

    if not is_ninja_available():
        say("ninja not found: one file is compiled after the other, which takes longer (pip install ninja)")
    cxx = ["-O3", "-g0", "-fvisibility=hidden", "-Wno-unknown-pragmas", *simd_flags()]
    if sys.platform == "linux":
        cxx.append("-fopenmp")  # for at::parallel_for; not linked, so that torch's own OpenMP is the only one
    sources = ["autograd.cpp", "layer_norm_cpu.cpp"] + ([] if obstacle else ["layer_norm_cuda.cu"])
    extension = (CppExtension if obstacle else CUDAExtension)(
        "minillava._C",
        [f"minillava/csrc/{name}" for name in sources],
        extra_compile_args={"cxx": cxx, "nvcc": ["-O3"]},
        py_limited_api=True,
    )
    build_ext = BuildExtension.with_options(use_ninja=is_ninja_available())
    return {"ext_modules": [extension], "cmdclass": {"build_ext": build_ext}}


setup(**extension_options())
