"""The benchmark for GPUs, tried on a simulated one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.device import build

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "bench_gpu.py"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the first run leaves its files for the next."""
    return tmp_path_factory.mktemp("files")


@pytest.mark.exhaustive
@pytest.mark.skipif(build.lacks() is not None, reason=str(build.lacks()))
@pytest.mark.skipif(not hasattr(torch, "accelerator"), reason="the device is written for torch 2.6 and later")
@pytest.mark.parametrize("kind", ["cuda"])
def test_the_benchmark_loads_all_that_it_times_and_compares_it(kind: str, files: Path) -> None:
    build.library(kind)
    command = [sys.executable, str(BENCHMARK), "--simulated", "--device", kind, "--runs", "1", "--dir", str(files)]
    env = {**os.environ, "SIM_DELAY": "0"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("  ok   equal to what ") == 3
    assert done.stdout.count("copy from pinned memory") == 3
