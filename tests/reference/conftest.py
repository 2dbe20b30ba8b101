"""The fixture set, written once for all tests that look at it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Train on one thread: on nets this small, threads that wait for each other cost more than they do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def written_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder into which the fixture set was written anew, on the CPU."""
    pytest.importorskip("sklearn", reason="the reference nets train on scikit-learn's digits")
    folder = tmp_path_factory.mktemp("fixtures")
    # In a process of its own: what another test has scripted before, torch keeps with the places that it had then.
    command = [sys.executable, "-m", "tests.fixture_set", str(folder), "--device", "cpu"]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return folder
