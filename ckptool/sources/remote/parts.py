"""
Parts of a remote file, fetched ahead in bounded memory; ``Transport``, the protocol of what fetches.

Announced ranges are fetched ahead of the reader, as long as the parts in memory stay within a bound. The reader has
priority: a part that it needs now is fetched even above the bound. Parts that were read or skipped are dropped to make
space for the next.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, NamedTuple, TypeAlias

from ckptool.errors import FileUnavailable, SourceChanged
from ckptool.sources.source import CLOSED

Data: TypeAlias = "bytes | memoryview"

PART_NBYTES: Final = 6 << 20
"""Bytes of a full part. With less, requests cost more time than data; with more, all connections take much memory."""
LEAST_NBYTES: Final = 128 << 10
"""Bytes that are fetched at least for a read that was not announced."""
_NEAR: Final = 64 << 10
_LAG: Final = 4
"""How many parts before the newest one read are kept: threads do not read quite in order."""
_AHEAD: Final = sys.maxsize
"""The number of a part that was there before it was announced, until it is read."""
_IDLE_NBYTES: Final = 4 << 20
"""Bytes that are kept when nothing more is planned."""
Range: TypeAlias = tuple[int, int]


class Tail(NamedTuple):
    """The last bytes of a file, and its size. ``data`` may be more than requested, up to the whole file."""

    data: bytes | memoryview
    nbytes: int


class Transport:
    """
    Fetches ranges of one version of one file, from any thread.

    The first answer fixes the version; a later answer of another version raises SourceChanged.
    """

    shown: str
    """Name of the file in messages."""

    @property
    def version(self) -> tuple[object, ...]:
        """The version by the server's answers: the size, and a tag or a date; empty if it reports none."""
        return ()

    def tail(self, nbytes: int) -> Tail:
        """Return the last ``nbytes`` bytes, or the whole file if it is shorter."""
        raise NotImplementedError

    def fetch(self, start: int, stop: int) -> Data:
        """Return exactly the bytes from ``start`` to ``stop``; the range must not be empty."""
        raise NotImplementedError

    def check_unchanged(self) -> None:
        """Raise SourceChanged if there is another version now; for transports whose answers do not show that."""

    def close(self) -> None:
        """Close every connection. A running fetch fails."""


def changed_remote(what: str = "the file was changed while it was being read") -> SourceChanged:
    return SourceChanged(what, hint="Read it again once it is complete.")


def missing_remote(hint: str = "Check the address.") -> FileUnavailable:
    return FileUnavailable("no such file (404)", kind="missing", hint=hint)


class Part:
    """
    A range that was fetched, or is being fetched.

    ``number`` counts parts in the order of their requests, ``left`` how many bytes were not read yet, and ``furthest``
    is the highest offset up to which it was read.
    """

    __slots__ = ("data", "furthest", "left", "number", "start", "stop")

    def __init__(self, start: int, stop: int, number: int, data: Future[Data]) -> None:
        self.start = start
        self.stop = stop
        self.number = number
        self.left = stop - start
        self.furthest = start
        self.data = data

    def is_read(self) -> bool:
        """Return whether it is a full part that was read to its end; smaller ones, of an index, may be read again."""
        return self.left <= 0 and self.furthest == self.stop and self.stop - self.start == PART_NBYTES


class Fetchers:
    """Threads that fetch parts, of one file or of several, and the count of bytes that all of these keep in memory."""

    def __init__(self, connections: int) -> None:
        self.room = (connections + 2) * PART_NBYTES  # each connection fetches a part while two are read
        self.held = 0
        self.pool = ThreadPoolExecutor(connections, thread_name_prefix="ckptool-fetch")
        self._lock = threading.Lock()
        self._users: dict[Parts, None] = {}
        self._is_closed = False

    def hold(self, nbytes: int) -> None:
        """Add to the count of bytes in memory; a negative number is of freed ones."""
        with self._lock:
            self.held += nbytes

    def use(self, parts: Parts) -> None:
        """Note that a file is being read: it will be the last to give up memory for others."""
        with self._lock:
            self._users.pop(parts, None)
            self._users[parts] = None

    def others(self, parts: Parts) -> list[Parts]:
        """Return the other files, the one read longest ago first."""
        with self._lock:
            return [one for one in self._users if one is not parts]

    def forget(self, parts: Parts) -> None:
        """Remove a file that was closed."""
        with self._lock:
            self._users.pop(parts, None)
        if self._is_closed:
            self.close()

    def close(self) -> None:
        """End the threads, once all files are closed."""
        self._is_closed = True
        if not self._users:
            self.pool.shutdown(cancel_futures=True)


class Parts:
    """Fetches ranges of a file of ``nbytes`` bytes, in several threads at once, and keeps some of them."""

    def __init__(self, fetch: Callable[[int, int], Data], nbytes: int, fetchers: Fetchers) -> None:
        self._fetch = fetch
        self._nbytes = nbytes
        self._fetchers = fetchers
        fetchers.use(self)
        self._lock = threading.Lock()
        self._parts: list[Part] = []
        """In the order of the file; none overlaps another."""
        self._plan: deque[Range] = deque()
        self._held = self._count = self._newest = 0
        self._last = -1, LEAST_NBYTES
        """The range that was fetched last without being announced."""
        self._closed = False

    def put(self, start: int, data: Data) -> None:
        """Add a range whose bytes are known already."""
        there: Future[Data] = Future()
        there.set_result(data)
        self._add(start, start + len(data), there)

    def announce(self, ranges: Iterable[Range]) -> None:
        """Replace the plan by the ranges that will be read next; fetching starts with the first read."""
        with self._lock:
            self._refuse_closed()
            self._newest = self._count
            wanted = merged(ranges, _NEAR)
            self._plan = deque(without(wanted, [(one.start, one.stop) for one in self._parts]))
            # What is here is not fetched again. Dropped as passed, it would be fetched last, and all that was fetched
            # before it would seem to be passed as well.
            for one in self._parts:
                if any(start < one.stop and one.start < stop for start, stop in wanted):
                    one.number = _AHEAD

    def want(self, start: int, stop: int, around: int) -> None:
        """Start to fetch a range that is read now, with ``around`` bytes on each side, unless there or planned."""
        with self._lock:
            self._refuse_closed()
            found = self._find(start)
            if (found is None or found.stop < stop) and self._find(stop - 1) is None and not self._plans(stop - 1):
                self._add_to_plan(max(0, start - around), min(self._nbytes, stop + around))
                self._advance()

    def at(self, position: int) -> Part:
        """Return the part that contains an offset; start to fetch it if need be."""
        with self._lock:
            self._refuse_closed()
            found = self._find(position)
            if found is None:
                is_planned = self._turn_to(position)
                if not is_planned:
                    self._add_to_plan(position, position + 1)
                self._has_room(PART_NBYTES)  # drops what it can; this part is fetched in any case
                found = self._begin_next()
                if not is_planned:  # one step on: parts that were fetched ahead are not passed by it
                    found.number = self._newest + 1
            if found.number == _AHEAD:
                found.number = self._newest
            if found.number > self._newest:
                self._newest = found.number
                self._fetchers.use(self)
            self._advance()
            return found

    def took(self, part: Part, start: int, stop: int) -> None:
        """Note that bytes of a part were read."""
        with self._lock:
            part.left -= stop - start
            part.furthest = max(part.furthest, stop)

    def rest(self) -> None:
        """Drop parts that were read or skipped, as another file is read now; do nothing if this one is in use."""
        if self._lock.acquire(blocking=False):
            try:
                for one in [one for one in self._parts if one.number <= self._newest and one.data.done()]:
                    self._remove(one)
            finally:
                self._lock.release()

    def drop(self, part: Part) -> None:
        """Remove a part that could not be fetched."""
        with self._lock:
            if part in self._parts:
                self._remove(part)

    def close(self) -> None:
        """Drop all parts, and cancel fetches that have not begun."""
        with self._lock:
            self._closed = True
            self._plan.clear()
            for one in tuple(self._parts):
                one.data.cancel()
                self._remove(one)
        self._fetchers.forget(self)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ValueError(CLOSED)

    def _find(self, position: int) -> Part | None:
        at = bisect_right(self._parts, position, key=lambda one: one.start) - 1
        return self._parts[at] if at >= 0 and position < self._parts[at].stop else None

    def _plans(self, position: int) -> bool:
        return any(start <= position < stop for start, stop in self._plan)

    def _turn_to(self, position: int) -> bool:
        """Rotate the plan so that it starts at an offset, with what is before that at its end; False if not in it."""
        for at, (start, stop) in enumerate(self._plan):
            if start <= position < stop:
                self._plan.rotate(-at)
                begin = position - (position - start) % PART_NBYTES
                if begin > start:
                    self._plan[0] = begin, stop
                    self._plan.append((start, begin))
                return True
        return False

    def _add_to_plan(self, position: int, stop: int) -> None:
        """Put a range that was not announced first in the plan; extend it further each time if reads are sequential."""
        begun, ended = self._last
        goes_on = begun < position <= ended
        least = min(PART_NBYTES, 4 * (ended - begun)) if goes_on else LEAST_NBYTES
        self._last = position, min(self._nbytes, max(stop, position + least))
        taken = merged([*((one.start, one.stop) for one in self._parts), *self._plan])
        self._plan.extendleft(reversed(list(without([self._last], taken))))

    def _advance(self) -> None:
        while self._plan and self._has_room(min(PART_NBYTES, self._plan[0][1] - self._plan[0][0])):
            self._begin_next()
        if not self._plan:
            self._drop_passed(self._held - _IDLE_NBYTES)

    def _has_room(self, nbytes: int) -> bool:
        """Drop parts that were read or skipped, as needed; return whether ``nbytes`` more may then be fetched ahead."""
        fetchers = self._fetchers
        self._drop_passed(fetchers.held + nbytes - fetchers.room)
        if fetchers.held + nbytes > fetchers.room:
            for other in fetchers.others(self):
                other.rest()
        return fetchers.held + nbytes <= fetchers.room

    def _drop_passed(self, nbytes: int) -> None:
        """Drop parts that were read or skipped until ``nbytes`` are freed, or no such part is left."""
        if nbytes <= 0:
            return
        last = self._newest - _LAG
        passed = [one for one in self._parts if (one.number < last or one.is_read()) and one.data.done()]
        for one in sorted(passed, key=lambda one: one.number):
            self._remove(one)
            nbytes -= one.stop - one.start
            if nbytes <= 0:
                return

    def _begin_next(self) -> Part:
        """Start to fetch the first part of the plan."""
        start, end = self._plan.popleft()
        stop = min(end, start + PART_NBYTES)
        if stop < end:
            self._plan.appendleft((stop, end))
        return self._add(start, stop, self._fetchers.pool.submit(self._fetch, start, stop))

    def _add(self, start: int, stop: int, data: Future[Data]) -> Part:
        self._count += 1
        part = Part(start, stop, self._count, data)
        self._parts.insert(bisect_right(self._parts, start, key=lambda one: one.start), part)
        self._held += stop - start
        self._fetchers.hold(stop - start)
        return part

    def _remove(self, part: Part) -> None:
        self._parts.remove(part)
        self._held -= part.stop - part.start
        self._fetchers.hold(part.start - part.stop)


def merged(ranges: Iterable[Range], near: int = 0) -> list[Range]:
    """Return ranges in order; join those that overlap, or have no more than ``near`` bytes between them."""
    found: list[Range] = []
    for start, stop in sorted(ranges):
        if stop <= start:
            continue
        if found and start - found[-1][1] <= near:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


def without(ranges: Iterable[Range], taken: Sequence[Range]) -> Iterator[Range]:
    """Yield the ranges minus those of ``taken``. Both must be in order, and without overlaps among themselves."""
    at = 0
    for start, stop in ranges:
        while at < len(taken) and taken[at][1] <= start:
            at += 1
        after = at
        while after < len(taken) and taken[after][0] < stop:
            if start < taken[after][0]:
                yield start, taken[after][0]
            start = taken[after][1]
            after += 1
        if start < stop:
            yield start, stop
