"""Trying again what may work later: a server that is busy, a connection that was cut."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Final, TypeVar

from ckptool.cancellation import LOOK_SECONDS, Cancellation
from ckptool.errors import FileUnavailable

T = TypeVar("T")

_MOST_TRIES: Final = 6
_FIRST_SECONDS: Final = 0.1
_LONGEST_SECONDS: Final = 20.0


class Passing(Exception):
    """What may pass; ``seconds`` is how long a server asks to be left alone."""

    def __init__(self, what: str, seconds: float = 0.0) -> None:
        super().__init__(what)
        self.what = what
        self.seconds = seconds


def retried(attempt: Callable[[], T], cancellation: Cancellation | None) -> T:
    """
    Return what an attempt returns, and wait longer after each one that failed in passing.

    Raises:
        FileUnavailable: The last one failed, too.
        Cancelled: It was cancelled while it waited.
    """
    for tries in range(_MOST_TRIES):
        try:
            return attempt()
        except Passing as error:
            if tries == _MOST_TRIES - 1:
                what = f"{error.what}, {_MOST_TRIES} times"
                raise FileUnavailable(what, kind="network", hint="Try again later.") from error
            # Threads that were turned away together do not come back together.
            pause = _FIRST_SECONDS * 2**tries * (1 + random.random())  # noqa: S311 - nothing secret
            _wait(min(max(pause, error.seconds), _LONGEST_SECONDS), cancellation)
    raise AssertionError


def _wait(seconds: float, cancellation: Cancellation | None) -> None:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if cancellation is not None:
            cancellation.check()
        time.sleep(left if cancellation is None else min(left, LOOK_SECONDS))
