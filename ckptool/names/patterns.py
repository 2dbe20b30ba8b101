"""
Bounds on what a user's regular expressions may cost on the names of a file.

A name can be made so that an ordinary pattern takes hours: what ``(.*)\\.(.*)\\.weight`` costs grows with the cube of
its length, and nothing can stop Python's ``re`` in the middle of a name. So patterns are tried on short names alone,
and the clock is looked at between them. A pattern that takes hours on one name of 512 characters is not stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from time import thread_time
from typing import Final, TypeVar

from ckptool.cancellation import Cancellation, check_cancelled
from ckptool.errors import LimitExceeded

T = TypeVar("T")

LONGEST: Final = 512
"""Characters of a name that patterns are tried on. Those of real models have some dozens, seldom two hundred."""
_SHORT: Final = 64
SECONDS: Final = 5.0
"""Of processor, for all trials of one call."""


class Trials:
    """What the patterns of one call cost. ``on`` tries one of them on one name."""

    def __init__(self, cancellation: Cancellation | None = None) -> None:
        self._cancellation = cancellation
        self._seconds = SECONDS

    def on(self, name: str, apply: Callable[[str], T]) -> T:
        """
        Return what ``apply`` makes of a name.

        Raises:
            Cancelled: It was cancelled.
            LimitExceeded: The name is too long, or all trials together have taken too long.
        """
        check_cancelled(self._cancellation)
        if len(name) > LONGEST:
            raise LimitExceeded(
                f"a name has {len(name):,} characters; patterns are tried on {LONGEST:,} at most: {name[:_SHORT]!r}…",
                kind="name-too-long",
                hint="Leave it out with `exclude=`.",
                needed=len(name),
                actual=LONGEST,
            )
        started = thread_time()
        result = apply(name)
        self._seconds -= thread_time() - started
        if self._seconds < 0:
            raise LimitExceeded(
                f"patterns took more than {SECONDS:.0f} seconds on its names; the last was {name[:_SHORT]!r}…",
                kind="pattern-too-slow",
                hint="Write the pattern without '.*', or leave out the long names with `exclude=`.",
            )
        return result
