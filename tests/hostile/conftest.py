"""``opened``: what opening a hostile file came to, in a process that may use little memory and time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.harness import Process

MIB = 1 << 20
# The slowest takes a little more than one; what these files ask of a careless reader is minutes, or no end.
SECONDS = 4

Opened = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def opener() -> Iterator[Process]:
    started = Process("opener")
    yield started
    started.close()


@pytest.fixture
def opened(opener: Process, tmp_path: Path) -> Opened:
    """Open a file, read its first tensors, and return the error, in a process that may allocate ``nbytes`` more."""

    def call(data: bytes, *, nbytes: int = 64 * MIB) -> dict[str, Any]:
        path = tmp_path / "hostile"
        path.write_bytes(data)
        found = opener.ask(path=str(path), nbytes=nbytes)
        assert "broken" not in found, found
        assert found["seconds"] < SECONDS
        assert found["grown"] <= nbytes
        return found

    return call
