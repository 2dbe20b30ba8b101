"""A gate for threads: many are inside at once, or one alone, which does not starve and cannot wait for itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ckptool.cancellation import LOOK_SECONDS, Cancellation


class Gate:
    """Many threads at once, or one alone. Whoever wants to be alone goes first, so that calls cannot starve it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._waiting = 0
        self._is_alone = False
        self._mine = threading.local()

    def enter(self) -> None:
        """Come in, once nobody is alone inside or waits to be."""
        depth = getattr(self._mine, "depth", 0)
        if not depth:  # a thread that is inside already must not wait for itself
            with self._changed:
                while self._is_alone or self._waiting:
                    self._changed.wait()
                self._inside += 1
        self._mine.depth = depth + 1

    def leave(self) -> None:
        """Go out, as often as one came in."""
        self._mine.depth -= 1
        if not self._mine.depth:
            with self._changed:
                self._inside -= 1
                if not self._inside and self._waiting:
                    self._changed.notify_all()

    @contextmanager
    def alone(self, cancellation: Cancellation | None = None) -> Iterator[None]:
        """
        Give a block in which nobody else is inside.

        Raises:
            Cancelled: While others were still inside.
            RuntimeError: This thread is.
        """
        if getattr(self._mine, "depth", 0):
            raise RuntimeError("reload() inside use() would wait for itself")
        with self._changed:
            self._waiting += 1
            try:
                while self._inside or self._is_alone:
                    if cancellation is not None:
                        cancellation.check()
                    self._changed.wait(None if cancellation is None else LOOK_SECONDS)
                self._is_alone = True
            finally:  # whoever waits may be interrupted
                self._waiting -= 1
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._is_alone = False
                self._changed.notify_all()
