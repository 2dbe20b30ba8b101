"""
Stop a call from another thread, or after some seconds.

Long work calls ``check`` between steps that are far shorter than a tenth of a second; ``each`` and ``steps`` do so for
a loop over many items or bytes. Most calls have no cancellation, and ``None`` must cost them nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from math import inf
from time import monotonic
from typing import Final, TypeVar

from ckptool.arguments import checked
from ckptool.errors import Cancelled

T = TypeVar("T")

STEP_NBYTES: Final = 4 << 20
"""Bytes that are read or computed at most between two checks."""
LOOK_SECONDS: Final = 0.02
"""How long to wait for a lock before checking again."""
_ITEMS: Final = 64


class Cancellation:
    """
    Stops the calls that get it in ``Limits``: when ``cancel`` is called, or ``seconds`` after it was made.

    Calls in any threads may share one: it stops all of them. A checkpoint that was opened with it keeps it for later
    reads. A call that is stopped finishes the piece that it works on, of at most 4 MiB, closes every file, ends every
    thread and raises ``Cancelled``. Some things cannot be stopped, and are waited for: a disk that is synced, a model's
    own code, one large cast.

    Raises:
        ValueError: ``seconds`` is negative, or not a number.
    """

    __slots__ = ("_is_cancelled", "_seconds", "_started", "_until")

    @checked()
    def __init__(self, seconds: float | None = None) -> None:
        if seconds is not None and not seconds >= 0:
            raise ValueError(f"seconds={seconds!r} is no time to wait for")
        self._started = monotonic()
        self._seconds = seconds
        self._until = inf if seconds is None else self._started + seconds
        self._is_cancelled = False

    def cancel(self) -> None:
        """Stop every call that has this cancellation, from any thread; more than once does no harm."""
        self._is_cancelled = True

    def check(self) -> None:
        """
        Raise Cancelled after ``cancel()`` or the deadline. For progress callbacks and work of your own, too.

        Raises:
            Cancelled: It was cancelled, or the seconds are over.
        """
        now = monotonic()
        if self._is_cancelled:
            raise Cancelled(f"cancelled after {now - self._started:,.3f} seconds")
        if now >= self._until:
            fact = f"not done after {now - self._started:,.3f} seconds, {self._seconds:,.3f} were given"
            raise Cancelled(fact, kind="deadline-exceeded", hint="Give it more seconds.")

    def __repr__(self) -> str:
        return f"<Cancellation {'cancelled' if self._is_cancelled else 'open'} seconds={self._seconds}>"


def check_cancelled(cancellation: Cancellation | None) -> None:
    """Raise Cancelled if there is a cancellation, and it was cancelled or its seconds are over."""
    if cancellation is not None:
        cancellation.check()


def in_time(call: Callable[[], T], cancellation: Cancellation | None) -> T:
    """
    Return the result of a call that may wait, for a server for example, and takes no cancellation itself.

    Raises:
        Cancelled: It was cancelled meanwhile. The call goes on in a daemon thread, and its result is dropped.
    """
    if cancellation is None:
        return call()
    cancellation.check()
    from concurrent.futures import Future  # local files do not need it
    from concurrent.futures import TimeoutError as NotYet

    done: Future[T] = Future()

    def work() -> None:
        try:
            done.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            done.set_exception(error)

    threading.Thread(target=work, name="ckptool-wait", daemon=True).start()
    while True:
        try:
            return done.result(LOOK_SECONDS)
        except NotYet:
            if done.done():  # a TimeoutError of the call itself, or a result that has just come
                return done.result()
            cancellation.check()


def each(items: Iterable[T], cancellation: Cancellation | None) -> Iterable[T]:
    """Return the items for a loop over many of them, which raises Cancelled once it is cancelled."""
    return items if cancellation is None else _each(items, cancellation)


def _each(items: Iterable[T], cancellation: Cancellation) -> Iterator[T]:
    for count, item in enumerate(items):
        if not count % _ITEMS:
            cancellation.check()
        yield item


def steps(buffer: memoryview, cancellation: Cancellation | None) -> Iterator[memoryview]:
    """Yield a buffer in pieces of at most ``STEP_NBYTES``, with a check before each."""
    for start in range(0, len(buffer), STEP_NBYTES):
        check_cancelled(cancellation)
        yield buffer[start : start + STEP_NBYTES]
