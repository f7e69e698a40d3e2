"""Builds what the kernel tests run, once, into .cache/kernel, under a name that changes with the sources."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
CACHE = ROOT / ".cache" / "kernel"
SOURCES = [ROOT / "setup.py", *(ROOT / "minillava/csrc").iterdir(), HERE / "cuda_on_cpu.h", HERE / "harness.cpp"]


def _digest(*extra: str) -> str:
    h = hashlib.sha256(repr((torch.__version__, sys.version_info[:2], extra)).encode())
    for path in sorted(SOURCES):
        h.update(path.read_bytes())
    return h.hexdigest()[:16]


@contextmanager
def _locked(name: str) -> Iterator[None]:
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / f"{name}.lock", "w") as lock:  # pytest-xdist workers wait for the one that builds
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def package_copy(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """A function that copies the package and this suite into an empty folder: the checkout itself is never built in."""

    def copy() -> Path:
        folder = tmp_path_factory.mktemp("copy")
        for name in ("setup.py", "pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, folder)
        (folder / "theory").mkdir()
        (folder / "minillava").mkdir()
        (folder / "tests").mkdir()
        for name in ("__init__.py", "layer_norm.py"):
            shutil.copy(ROOT / "minillava" / name, folder / "minillava")
        shutil.copytree(ROOT / "minillava/csrc", folder / "minillava/csrc")
        shutil.copy(ROOT / "tests/conftest.py", folder / "tests")
        shutil.copy(HERE / "test_layer_norm.py", folder / "tests")
        return folder

    return copy


@pytest.fixture(scope="session")
def build_extension(package_copy) -> Callable[..., Path]:
    """`build_extension(USE_CUDA="0")` gives a folder in which minillava is compiled, from the cache if it can."""

    def build(**environment: str) -> Path:
        if shutil.which("g++") is None:
            pytest.skip("no g++ on this machine")
        name = f"extension-{_digest(repr(sorted(environment.items())))}"
        folder = package_copy()
        with _locked(name):
            kept = CACHE / name
            if not kept.exists():
                variables = {**os.environ, "MINILLAVA_BUILD": "1", **environment}
                command = [sys.executable, "setup.py", "build_ext", "--inplace"]
                done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
                assert done.returncode == 0, done.stdout + done.stderr
                kept.mkdir()
                for library in (folder / "minillava").glob("_C*.so"):
                    shutil.copy(library, kept)
                (kept / "log").write_text(done.stdout + done.stderr)
            for library in kept.glob("_C*.so"):
                shutil.copy(library, folder / "minillava")
        return folder

    return build


@pytest.fixture(scope="session")
def build_harness() -> Callable[..., Path]:
    """`build_harness("-fsanitize=thread", cuh=...)` compiles the CUDA source with g++ (see cuda_on_cpu.h)."""

    def build(*flags: str, cuh: Path = ROOT / "minillava/csrc/layer_norm.cuh") -> Path:
        if shutil.which("g++") is None:
            pytest.skip("no g++ on this machine")
        name = f"harness-{_digest(repr(flags), cuh.read_text())}"
        with _locked(name):
            out = CACHE / name
            if not out.exists():
                include = Path(torch.__file__).parent / "include"
                command = ["g++", "-std=c++20", "-g", "-Wall", "-Wno-unknown-pragmas", "-include", "cuda_on_cpu.h"]
                command += [f"-I{include}", f'-DLAYER_NORM_CUH="{cuh}"', *flags, "harness.cpp", "-o", f"{out}.part"]
                done = subprocess.run(command, cwd=HERE, capture_output=True, text=True)
                assert done.returncode == 0, done.stderr
                os.replace(f"{out}.part", out)
        return out

    return build
