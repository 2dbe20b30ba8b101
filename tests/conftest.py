"""
How all tests run: each promise once, on a small scale; with ``--full``, everything.

Hypothesis has no deadlines, and takes the same examples each time unless asked to explore. Random values are the same
each time that a test runs.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import is_hypothesis_test, settings

from tests import missing, scale, where
from tests.against_torch.strangers import Strangers
from tests.device.tags import of_a_device
from tests.where import built_there

__all__ = ["built_there", "of_a_device"]

# Threads of torch's that wait for work sleep; else they take a third of the processor's time, here and in children.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Garbage that is looked for after each 700 objects takes a seventh of the time of all tests.
gc.set_threshold(50_000, 20, 100)

# The clock of a busy machine is nobody's bug, and a failure that comes and goes helps nobody.
settings.register_profile("small", deadline=None, derandomize=True, max_examples=10)
settings.register_profile("full", deadline=None, derandomize=True, max_examples=100)
settings.register_profile("explore", deadline=None, print_blob=True, max_examples=20_000)


@pytest.hookimpl(optionalhook=True)  # only where xdist is installed
def pytest_xdist_auto_num_workers() -> int:
    """Say how many processes ``-n auto`` means: more than cores, as tests wait for disks, servers and processes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores + cores // 2


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ckptool", "how much to test")
    group.addoption("--full", dest="scale", action="store_const", const=1, default=0, help="all tests, at full scale")
    group.addoption("--scale", dest="scale", type=int, metavar="N", help="all tests, at N times their full scale")
    group.addoption("--device", metavar="NAME", help="the tests that can be on any device, on this one")


def pytest_configure(config: pytest.Config) -> None:
    scale.scale = config.getoption("scale")
    config.pluginmanager.register(missing)
    if config.getoption("--device"):
        where.register(config.getoption("--device"))
    if not config.getoption("--hypothesis-profile"):
        settings.load_profile("full" if scale.scale else "small")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker("scaled")
    if not scale.scale:
        asked = config.getoption("-m")
        left_out = [name for name in ("exhaustive", "install") if name not in asked]
        dear = [item for item in items if any(item.get_closest_marker(name) for name in left_out)]
        items[:] = [item for item in items if not any(item.get_closest_marker(name) for name in left_out)]
        config.hook.pytest_deselected(items=dear)
    if where.device != "cpu":
        others = [item for item in items if not item.get_closest_marker("on_any_device")]
        items[:] = [item for item in items if item.get_closest_marker("on_any_device")]
        config.hook.pytest_deselected(items=others)


def pytest_runtest_setup(item: pytest.Item) -> None:
    seed = crc32(item.nodeid.encode())
    random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


@pytest.fixture(scope="module", autouse=True)
def _frozen_heap() -> None:
    """Keep what is there before a module's tests out of every later garbage collection, of which some ask for many."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def _folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tests")


@pytest.fixture
def tmp_path(_folders: Path, request: pytest.FixtureRequest) -> Path:
    """Return a folder that is alone: whoever opens a file asks what is beside its folder, which would be every test."""
    alone = Path(tempfile.mkdtemp(prefix=f"{request.node.name.partition('[')[0][:40]}-", dir=_folders)) / "alone"
    alone.mkdir()
    return alone


@pytest.fixture(scope="session")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Strangers]:
    own = tmp_path_factory.getbasetemp()
    started = Strangers((own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "strangers")
    yield started
    started.close()
