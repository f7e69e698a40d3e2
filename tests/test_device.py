"""What trains and measures runs on another device than the CPU and finds there what it finds on the CPU. The device is
pretended (pretend_gpu.py), in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("job", ["refuses", "experiment", "folder", "durations", "real_towers", "hugging_face"])
def test_on_another_device(job, tmp_path, monkeypatch):
    monkeypatch.setenv("MINILLAVA_CACHE", str(tmp_path))
    command = [sys.executable, "-W", "ignore", "device_jobs.py", job]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
