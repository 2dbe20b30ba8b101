"""
Parts of a file far away: those that are there, those on their way, and those that are planned.

What was announced is fetched ahead of who reads it, as much as there is room for. Who reads goes first: a part that is
wanted now is fetched even where there is no room. A part that was read, or passed by, makes room for the next.

What fetches ranges of one file: the protocol ``Transport``, and what all that follow it share.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, NamedTuple, TypeAlias

import ckptool.system as system
from ckptool.errors import FileUnavailable, OutOfMemory, SourceChanged
from ckptool.sources.source import CLOSED

Data: TypeAlias = "bytes | memoryview"

PART_NBYTES: Final = 6 << 20
"""With less, requests take longer than they bring; with more, all connections at once take too much memory."""
LEAST_NBYTES: Final = 128 << 10
"""Fetched at least, where nobody said what comes next."""
_NEAR: Final = 64 << 10
_LAG: Final = 4
"""Parts that are kept behind the newest that was read: threads do not read quite in order."""
_IDLE_NBYTES: Final = 4 << 20
"""Kept where nothing more is planned."""
Range: TypeAlias = tuple[int, int]
_LARGE_NBYTES: Final = 1 << 20


class Tail(NamedTuple):
    """The last bytes of a file, and its size. ``data`` may be more than was asked for, up to the whole file."""

    data: bytes | memoryview
    nbytes: int


class Transport:
    """
    Fetches ranges of one version of one file, from any thread.

    The first answer binds it to the version that is there then: later ones are of the same version, or an error.
    """

    shown: str
    """Name of the file in messages."""

    @property
    def version(self) -> tuple[object, ...]:
        """What its server says of the version: the size, and a tag or a date; empty where it says nothing."""
        return ()

    def tail(self, nbytes: int) -> Tail:
        """Return the last ``nbytes`` bytes, or the whole file if it is shorter."""
        raise NotImplementedError

    def fetch(self, start: int, stop: int) -> Data:
        """Return exactly the bytes of a range, which is not empty."""
        raise NotImplementedError

    def check_unchanged(self) -> None:
        """Raise SourceChanged if another version is there, where answers do not tell that themselves."""

    def close(self) -> None:
        """End every connection. A fetch that is under way fails."""


def memory_of(nbytes: int) -> memoryview:
    """Return memory for a range; that of a large one goes back to the system when it is given up, all of it."""
    if nbytes < _LARGE_NBYTES:
        return memoryview(bytearray(nbytes))
    try:
        return memoryview(system.new_memory(nbytes))
    except OSError as error:
        raise OutOfMemory(f"no {nbytes:,} bytes of memory are free", needed=nbytes) from error


def changed_far(what: str = "the file was changed while it was being read") -> SourceChanged:
    return SourceChanged(what, hint="Read it again once it is complete.")


def missing_far(hint: str = "Check the address.") -> FileUnavailable:
    return FileUnavailable("no such file (404)", kind="missing", hint=hint)


class Part:
    """
    A range that is there, or on its way.

    ``number`` is the place in the order in which parts were asked for, ``left`` how many bytes are to be read yet, and
    ``furthest`` how far it was read.
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
        """Say whether all of it was read, most likely: small parts, of an index, are read again and again."""
        return self.left <= 0 and self.furthest == self.stop and self.stop - self.start == PART_NBYTES


class Fetchers:
    """Threads that fetch parts, of one file or of several, and how many bytes all of these hold together."""

    def __init__(self, connections: int) -> None:
        self.room = (connections + 2) * PART_NBYTES  # all of them are on their way while two are read
        self.held = 0
        self._connections = connections
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._users: dict[Parts, None] = {}
        self._is_closed = False

    def begin(self, fetch: Callable[[int, int], Data], start: int, stop: int) -> Future[Data]:
        """Begin to fetch a range."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._connections, thread_name_prefix="ckptool-fetch")
            return self._pool.submit(fetch, start, stop)

    def hold(self, nbytes: int) -> None:
        """Count bytes that are held from now on; fewer than none are given up."""
        with self._lock:
            self.held += nbytes

    def use(self, parts: Parts) -> None:
        """Note that a file is read: the last to give something up for others."""
        with self._lock:
            self._users.pop(parts, None)
            self._users[parts] = None

    def others(self, parts: Parts) -> list[Parts]:
        """Return the other files, those first that were not read for the longest time."""
        with self._lock:
            return [one for one in self._users if one is not parts]

    def forget(self, parts: Parts) -> None:
        """Take no notice of a file any more: it was closed."""
        with self._lock:
            self._users.pop(parts, None)
        if self._is_closed:
            self.close()

    def close(self) -> None:
        """End the threads, once all files are closed."""
        with self._lock:
            self._is_closed = True
            if self._users:
                return
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(cancel_futures=True)


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
        """What was fetched last without being announced."""
        self._closed = False

    def put(self, start: int, data: Data) -> None:
        """Take a range that is there already."""
        there: Future[Data] = Future()
        there.set_result(data)
        self._add(start, start + len(data), there)

    def announce(self, ranges: Iterable[Range]) -> None:
        """Note what will be read next, instead of what was noted before: it is fetched from the first read on."""
        with self._lock:
            self._refuse_closed()
            self._newest = self._count
            wanted = merged(ranges, _NEAR)
            self._plan = deque(without(wanted, [(one.start, one.stop) for one in self._parts]))

    def want(self, start: int, stop: int, around: int) -> None:
        """Begin to fetch a range that is read now, with some bytes around it, unless it is there or was announced."""
        with self._lock:
            self._refuse_closed()
            found = self._find(start)
            if (found is None or found.stop < stop) and self._find(stop - 1) is None and not self._plans(stop - 1):
                self._add_to_plan(max(0, start - around), min(self._nbytes, stop + around))
                self._advance()

    def at(self, position: int) -> Part:
        """Return the part that holds a position."""
        with self._lock:
            self._refuse_closed()
            found = self._find(position)
            if found is None:
                if not self._turn_to(position):
                    self._add_to_plan(position, position + 1)
                self._has_room(PART_NBYTES)  # it is made as far as it can be: who reads goes first
                found = self._begin_next()
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
        """Give up what was read, as another file is read now; what this one is just doing is not waited for."""
        if self._lock.acquire(blocking=False):
            try:
                for one in [one for one in self._parts if one.number <= self._newest and one.data.done()]:
                    self._remove(one)
            finally:
                self._lock.release()

    def drop(self, part: Part) -> None:
        """Forget a part that could not be fetched."""
        with self._lock:
            if part in self._parts:
                self._remove(part)

    def close(self) -> None:
        """Give up what is there, and what is on its way."""
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
        """Let the plan go on from a position, and come to what is before that at its end; False if it has it not."""
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
        """Put in front what nobody announced: more each time, where reads go on from each other."""
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
        """Say whether so many bytes may be fetched ahead, once parts that were passed by are dropped."""
        fetchers = self._fetchers
        self._drop_passed(fetchers.held + nbytes - fetchers.room)
        if fetchers.held + nbytes > fetchers.room:
            for other in fetchers.others(self):
                other.rest()
        return fetchers.held + nbytes <= fetchers.room

    def _drop_passed(self, nbytes: int) -> None:
        """Drop parts that were passed by until so many bytes are given up, as far as that can be done."""
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
        """Begin to fetch a part of what is planned first."""
        start, end = self._plan.popleft()
        stop = min(end, start + PART_NBYTES)
        if stop < end:
            self._plan.appendleft((stop, end))
        return self._add(start, stop, self._fetchers.begin(self._fetch, start, stop))

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
    """Return ranges in order, with those in one that overlap, or have no more than ``near`` bytes between them."""
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
    """Yield what ranges have that none of ``taken`` has. Both are in order, and none of them overlaps another."""
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
