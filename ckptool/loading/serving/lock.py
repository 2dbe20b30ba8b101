"""A gate for threads: many are inside at once, or one alone. That one does not starve, and none waits for itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ckptool.cancellation import LOOK_SECONDS, Cancellation


class Visits:
    """Re-entrancy depth of one thread: entries without a leave."""

    __slots__ = ("depth",)

    def __init__(self) -> None:
        self.depth = 0


class Gate:
    """Many threads at once, or one alone. Whoever wants to be alone goes first, so that calls cannot starve it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._waiting = 0
        self._is_alone = False
        self._mine = threading.local()

    def enter(self) -> Visits:
        """Enter as a reader, once no writer is inside or waits. Give what is returned to ``leave``."""
        visits: Visits | None = getattr(self._mine, "visits", None)
        if visits is None:
            visits = self._mine.visits = Visits()
        with self._changed:
            if not visits.depth:  # a thread that is inside already must not wait for itself
                while self._is_alone or self._waiting:
                    self._changed.wait()
                self._inside += 1
            visits.depth += 1
        return visits

    def leave(self, visits: Visits) -> None:
        """Go out, as often as one came in; servers end a request in another thread than they began it in."""
        with self._changed:
            visits.depth -= 1
            if not visits.depth:
                self._inside -= 1
                if not self._inside and self._waiting:
                    self._changed.notify_all()

    @contextmanager
    def alone(self, cancellation: Cancellation | None = None) -> Iterator[None]:
        """
        Enter a block as the writer: no reader is inside.

        Raises:
            Cancelled: While others were still inside.
            RuntimeError: This thread is.
        """
        visits: Visits | None = getattr(self._mine, "visits", None)
        if visits is not None and visits.depth:
            raise RuntimeError("reload() inside use() would wait for itself")
        with self._changed:
            self._waiting += 1
            try:
                while self._inside or self._is_alone:
                    if cancellation is not None:
                        cancellation.check()
                    self._changed.wait(None if cancellation is None else LOOK_SECONDS)
                self._is_alone = True
            finally:  # the wait may be interrupted
                self._waiting -= 1
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._is_alone = False
                self._changed.notify_all()
