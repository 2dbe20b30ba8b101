"""
Tests where something is missing: a package that few environments have, or what one system has and another has not.

A test that needs torch, or another package of `PACKAGES` that is not installed here, is skipped, with its name.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import pytest

from ckptool import system

PACKAGES = [
    name for name in ("torch", "numpy", "sklearn", "scipy", "fastapi", "obstore", "joblib") if find_spec(name) is None
]
"""What is not installed here, of what tests need but not the package."""

_ASKED = re.compile(rf"No module named '({'|'.join(PACKAGES)})[.']|this needs ({'|'.join(PACKAGES)}), which is not")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    report = yield
    return _skipped(report, collector) if PACKAGES and report.failed else report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    return _skipped(report, item) if PACKAGES and report.failed else report


def skip_if_missing(said: str) -> None:
    """Skip a test if a command has said that a package is not installed, which is not."""
    found = _ASKED.search(said) if PACKAGES else None
    if found:
        pytest.skip(f"needs {found[1] or found[2]}")


def _skipped(report: Any, node: pytest.Item | pytest.Collector) -> Any:
    found = _ASKED.search(str(report.longrepr))
    if found:
        report.outcome = "skipped"
        report.longrepr = (str(node.path), 0, f"Skipped: needs {found[1] or found[2]}")
    return report


def on_windows(reason: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test on Windows, for what Windows has not, or has in another way."""
    return pytest.mark.skipif(sys.platform == "win32", reason=f"Windows: {reason}")


def replace_open(path: Path, other: Path) -> None:
    """Give a file the name of one that is open: Windows lets nobody rename over that, but it can be renamed itself."""
    if sys.platform == "win32":
        path.replace(path.with_name(f"{path.name}.old"))
    other.replace(path)


def _can_link() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        try:
            (Path(folder) / "link").symlink_to("nowhere")
        except OSError:
            return False
        return os.path.lexists(Path(folder) / "link")


SYSTEM = sys.modules[system.open_reading.__module__]
"""The module that makes the calls of this system."""

LINKS = _can_link()
NO_LINKS = "Windows: symbolic links need a right there, and Wine makes none"
links = pytest.mark.skipif(not LINKS, reason=NO_LINKS)


def lead_to(source: Path, place: Path) -> None:
    """Make a link to a folder, or a copy of it where no links can be made."""
    if LINKS:
        place.symlink_to(source, target_is_directory=True)
    else:
        shutil.copytree(source, place)


def lock(stream: IO[bytes], *, shared: bool = False) -> None:
    """Lock a file, as another program would."""
    if sys.platform == "win32":
        pytest.skip("Windows: locks there keep others from reading")
    import fcntl

    fcntl.flock(stream, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)


def only_linux(reason: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test everywhere but on Linux, for what the test asks Linux."""
    name = {"win32": "Windows", "darwin": "macOS"}.get(sys.platform, sys.platform)
    return pytest.mark.skipif(sys.platform != "linux", reason=f"{name}: {reason}")
