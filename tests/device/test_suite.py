"""The tests of loading and serving that can be on any device, on one whose work is late, in twenty orders of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

from tests import scale
from tests.device import build

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(build.lacks() is not None, reason=str(build.lacks())),
    pytest.mark.skipif(not hasattr(torch, "accelerator"), reason="the device is written for torch 2.6 and later"),
]
DELAY = "50"  # microseconds for each operation; more only takes longer
CHEAP = [f"tests/loading/test_{name}.py" for name in ("as_load_state_dict", "equal_to_torch", "own_loading")]
OF_THE_DEVICE = ["tests/device/faults.py"]
WHERE = ["tests/loading", "tests/serving"] if scale.scale > 1 else CHEAP
KINDS = ["sim", "cuda", "xpu"] if scale.scale > 1 else ["sim"]


@pytest.mark.parametrize("seed", range(max(1, scale.scale)))
@pytest.mark.parametrize("kind", KINDS)
def test_loading_and_serving_are_right_on_a_late_device(kind: str, seed: int) -> None:
    build.library(kind)
    command = [sys.executable, "-m", "pytest", "-q", "--device", f"{kind}:0", *WHERE, *OF_THE_DEVICE]
    env = {**os.environ, "SIM_SEED": str(seed), "SIM_DELAY": DELAY, "PYTEST_ADDOPTS": ""}
    for name in [name for name in env if name.startswith("PYTEST_XDIST")]:
        del env[name]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)

    assert done.returncode == 0, done.stdout[-4000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 170
