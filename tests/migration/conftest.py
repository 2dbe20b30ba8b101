"""How what is written begins."""

from __future__ import annotations

import os

import pytest

WAYS = ["nameless", "named"] if hasattr(os, "O_TMPFILE") else ["named"]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return how a new file begins; a system without nameless files is one where it has a name from the beginning."""
    if request.param == "named":
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    return str(request.param)
