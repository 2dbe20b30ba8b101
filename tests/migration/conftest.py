"""``way``: both ways in which an output gets its name."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(params=["nameless", "named"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return how a new file begins; a system without nameless files is one where it has a name from the beginning."""
    if request.param == "named":
        monkeypatch.delattr(os, "O_TMPFILE")
    return str(request.param)
