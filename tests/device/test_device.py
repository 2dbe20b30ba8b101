"""Loading and serving on a device whose work is late: nothing is read before it is whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests import scale
from tests.device import build
from tests.device.cases import CASES

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(build.lacks() is not None, reason=str(build.lacks())),
    pytest.mark.skipif(not hasattr(torch, "accelerator"), reason="the device is written for torch 2.6 and later"),
]


def run(seed: int = 0) -> Any:
    build.library("sim")
    command = [sys.executable, "-m", "tests.device.cases"]
    env = {**os.environ, "SIM_SEED": str(seed)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # libraries of torch's may say something first


@pytest.fixture(scope="module")
def found() -> Any:
    return run()


@pytest.mark.parametrize("name", [*CASES, "pinned memory is let go of"])
def test_what_comes_out_is_right(name: str, found: Any) -> None:
    assert found[name] is True


@pytest.mark.parametrize("seed", range(1, scale.scale))  # a minute each, of waiting
def test_it_is_right_however_late_each_stream_is(seed: int) -> None:
    assert {name: result for name, result in run(seed).items() if result is not True} == {}
