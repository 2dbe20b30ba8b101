"""
Tests where something is missing: a package that few environments have, or what one system has and another has not.

A test that needs torch, or another package of `PACKAGES` that is not installed here, is skipped, with its name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

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


def _skipped(report: Any, node: pytest.Item | pytest.Collector) -> Any:
    found = _ASKED.search(str(report.longrepr))
    if found:
        report.outcome = "skipped"
        report.longrepr = (str(node.path), 0, f"Skipped: needs {found[1] or found[2]}")
    return report
