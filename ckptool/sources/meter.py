"""How far the reading of a file has come, for whoever wants to show it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[int, int], None]
"""Called with the bytes that were read so far, and those to be read in all, about as many."""


class Meter:
    """Counts what is read, and says so after each piece. Of one thread."""

    __slots__ = ("_done", "_progress", "total")

    def __init__(self, progress: Progress | None = None, total: int = 0) -> None:
        self._progress = progress
        self._done = 0
        self.total = total

    def read(self, nbytes: int) -> None:
        """Count a piece that was read."""
        if self._progress is not None:
            self._done += nbytes
            self._progress(min(self._done, self.total), self.total)


SILENT = Meter()
