"""
Files with the tags of a device: those that the reference trainer saved there, and those that only claim it.

Tests of what is done with tags take ``of_a_device``. By default it gives the committed fixtures, whose tags are forged;
``--full`` gives what was really saved on the device for tests, where that can be built, and says why where it cannot.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests import scale

ROOT = Path(__file__).parents[2]
WRAPPERS = ("data-parallel", "ddp")


@dataclass(frozen=True)
class OfADevice:
    """
    Files of a TiedReader, for each habit of saving and both containers; all tensors but counters have one tag.

    The whole model is there in ``WRAPPERS``, too.
    """

    folder: Path
    tag: str
    place: str

    def file(self, habit: str = "state-dict", container: str = "zip", wrapper: str = "plain") -> Path:
        return self.folder / f"{habit}-{wrapper}-{self.place}-{container}.pth"

    def files(self) -> list[Path]:
        return sorted(self.folder.glob(f"*-plain-{self.place}-*.pth"))

    def said(self, path: Path) -> Any:
        """Return what was noted of the live tensors when the file was written."""
        return json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))


FORGED = OfADevice(ROOT / "fixtures" / "valid", "cuda:0", "forged-cuda0")


@pytest.fixture(scope="session", params=["forged", pytest.param("real", marks=scale.exhaustive)])
def of_a_device(request: pytest.FixtureRequest) -> OfADevice:
    return FORGED if request.param == "forged" else real()


def real() -> OfADevice:
    """Return what was saved on the device, or skip the test that wants it."""
    pytest.importorskip("sklearn", reason="the reference nets train on scikit-learn's digits")
    reason = _lacks()
    if reason is not None:
        pytest.skip(f"nothing can be saved on the device for tests, so forged tags stand for its own: {reason}")
    return OfADevice(saved(), "sim:0", "sim0")


def _lacks() -> str | None:
    import torch

    from tests.device import build

    return build.lacks() if hasattr(torch, "accelerator") else "the device is written for torch 2.6 and later"


@cache
def saved() -> Path:
    """Return the folder of what was saved on the device, by a process that is started if none has saved it yet."""
    import fcntl

    from tests.device import build

    built = build.library("sim")
    digest = hashlib.sha256()
    here = (Path(__file__).with_name(f"{name}.py") for name in ("register", "trained"))
    for path in (*sorted((ROOT / "ckptool" / "reference").glob("*.py")), *here):
        digest.update(path.read_bytes())
    folder = built.parent.parent / f"trained-{digest.hexdigest()[:16]}"
    with (folder.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # or each process of the tests would train it
        if not folder.exists():
            _save(folder)
    return folder


def _save(folder: Path) -> None:
    fresh = Path(tempfile.mkdtemp(dir=folder.parent))
    command = [sys.executable, "-m", "tests.device.trained", str(fresh)]
    env = {**os.environ, "SIM_KIND": "sim", "SIM_DELAY": "0"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    fresh.rename(folder)
