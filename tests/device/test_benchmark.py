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


@pytest.mark.exhaustive
@pytest.mark.skipif(build.lacks() is not None, reason=str(build.lacks()))
@pytest.mark.skipif(not hasattr(torch, "accelerator"), reason="the device is written for torch 2.6 and later")
def test_the_benchmark_loads_all_that_it_times_and_compares_it(tmp_path: Path) -> None:
    build.library("sim")  # which other tests need, too
    command = [sys.executable, str(BENCHMARK), "--simulated", "--device", "sim", "--runs", "1", "--dir", str(tmp_path)]
    env = {**os.environ, "SIM_DELAY": "0"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("  ok   equal to what ") == 3
    assert done.stdout.count("copy from pinned memory") == 3
