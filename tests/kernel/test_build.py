"""setup.py's decisions, and the op's suite run against what it builds: the CPU kernel, the CUDA extension, nothing."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def setup(folder, *command, **environment):
    variables = {k: v for k, v in os.environ.items() if k not in ("USE_CUDA", "CXX", "TORCH_CUDA_ARCH_LIST")}
    variables |= {"MINILLAVA_BUILD": "1", **environment}
    command = [sys.executable, "setup.py", *(command or ("--name",))]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)


def suite(folder, expected, **environment):
    """Runs test_layer_norm.py in the copied package."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    variables = {**os.environ, "MINILLAVA_EXPECT": expected, **environment}
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)


@pytest.mark.slow
def test_the_suite_passes_on_the_compiled_cpu_kernel(build_extension):
    done = suite(build_extension(USE_CUDA="0"), "compiled")
    assert done.returncode == 0, done.stdout[-5000:]


@pytest.mark.slow
def test_the_suite_passes_on_the_reference_even_where_a_kernel_is_built(build_extension):
    done = suite(build_extension(USE_CUDA="0"), "reference", MINILLAVA_REFERENCE="1")
    assert done.returncode == 0, done.stdout[-5000:]


@pytest.mark.slow
def test_the_cuda_extension_builds_and_loads_without_a_gpu(build_extension):
    if torch.version.cuda is None or not (shutil.which("nvcc") or Path("/usr/local/cuda/bin/nvcc").exists()):
        pytest.skip("torch without CUDA, or no nvcc on this machine")
    folder = build_extension(USE_CUDA="1", TORCH_CUDA_ARCH_LIST="9.0")
    code = (
        "import torch, minillava.layer_norm as m; has = torch._C._dispatch_has_kernel_for_dispatch_key;"
        "assert m.is_compiled() and has('minillava::layer_norm', 'CUDA') and has('minillava::layer_norm', 'CPU');"
        "assert has('minillava::layer_norm_backward', 'CUDA')"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def python(folder, code, **environment):
    variables = {k: v for k, v in os.environ.items() if k != "MINILLAVA_REFERENCE"} | environment
    return subprocess.run([sys.executable, "-c", code], cwd=folder, env=variables, capture_output=True, text=True)


USE = (
    "import minillava.layer_norm as m, torch; print(m.is_compiled(), m.layer_norm(torch.ones(2, 4), *torch.ones(2, 4)))"
)


def test_without_kernels_it_works_and_says_so_once(package_copy):
    folder = package_copy()
    done = python(folder, USE + "; m.layer_norm(torch.ones(2, 4), *torch.ones(2, 4))")
    assert done.returncode == 0 and done.stdout.startswith("False"), done.stderr
    assert done.stderr.count("UserWarning") == 1 and "they are not built" in done.stderr and "make build" in done.stderr
    assert python(folder, USE, MINILLAVA_REFERENCE="1").stderr == ""


def test_a_library_that_does_not_load_is_named_and_the_reference_runs(package_copy):
    folder = package_copy()
    (folder / "minillava/_C.abi3.so").write_bytes(b"not a library")
    done = python(folder, USE)
    assert done.returncode == 0 and done.stdout.startswith("False"), done.stderr
    assert "they do not load" in done.stderr


def test_kernels_built_for_another_torch_are_named(package_copy):
    folder = package_copy()
    (folder / "minillava/_C.py").write_text("torch_version = '1.0.0'")  # stands for the library
    done = python(folder, USE)
    assert done.returncode == 0 and "built for torch 1.0.0" in done.stderr and "make build" in done.stderr


def test_by_default_nothing_is_compiled(package_copy, tmp_path):
    folder = package_copy()
    done = setup(folder, "bdist_wheel", "-d", str(tmp_path), MINILLAVA_BUILD="")
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("py3-none-any.whl")


def test_without_a_compiler_nothing_is_compiled_unless_cuda_is_demanded(package_copy):
    folder = package_copy()
    done = setup(folder, CXX="no-such-compiler")
    assert done.returncode == 0 and "no C++ compiler: 'no-such-compiler' not found" in done.stderr
    done = setup(folder, CXX="no-such-compiler", USE_CUDA="1")
    assert done.returncode != 0 and "no C++ compiler" in done.stderr


def fake_toolkit(folder, release):
    for name in ("bin", "include"):
        (folder / name).mkdir(parents=True)
    (folder / "include/cuda_runtime.h").touch()
    nvcc = folder / "bin/nvcc"
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
    nvcc.chmod(0o755)
    return str(folder)


def test_a_toolkit_of_another_cuda_is_refused_by_name(package_copy, tmp_path):
    if torch.version.cuda is None:
        pytest.skip("this torch is a build without CUDA")
    home = fake_toolkit(tmp_path / "toolkit", "9.1")
    done = setup(package_copy(), CUDA_HOME=home, USE_CUDA="1")
    assert done.returncode != 0
    assert re.search(rf"{re.escape(home)} is CUDA 9.1, torch was built with CUDA {torch.version.cuda}", done.stderr)


def test_use_cuda_says_no_or_yes_or_is_refused(package_copy):
    folder = package_copy()
    assert "without CUDA: USE_CUDA=0 asks for that" in setup(folder, USE_CUDA="0").stderr
    done = setup(folder, USE_CUDA="maybe")
    assert done.returncode != 0 and "USE_CUDA must be 0 or 1, got 'maybe'" in done.stderr
