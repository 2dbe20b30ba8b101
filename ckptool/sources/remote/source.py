"""
A file far away as a source: few requests, several at once, and bounded memory.

The tail comes first: it tells the size, and zips are read from there; then the head. Readers say with ``prefetch`` what
comes next. What a reader left unread of an index, as the payloads tell it too, is compared when these are read.

What lies beside a file far away, and belongs to it: shards that an index names.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as NotYet
from typing import Final

from ckptool.cancellation import LOOK_SECONDS, Cancellation, check_cancelled
from ckptool.sources.descriptors import components
from ckptool.sources.remote.parts import LEAST_NBYTES, Data, Fetchers, Part, Parts, Range, Tail, Transport
from ckptool.sources.source import CLOSED, Compare, FarSource, Source, SourceInFolder


class Beside(SourceInFolder):
    """A file far away. What was opened beside it ends with it, and so do the threads that fetch them."""

    def __init__(self, path: str, open_named: Callable[[str], SourceInFolder], fetchers: Fetchers | None) -> None:
        """``open_named`` opens a name in the folder of ``path``; ``fetchers`` end with this one."""
        super().__init__()
        self.path = path
        self._open_named = open_named
        self._fetchers = fetchers

    def _open_beside(self, name: str) -> SourceInFolder:
        components(name)
        return self._open_named(name)

    @property
    def place(self) -> tuple[int, int]:
        """What no two open files have in common. Whether two names lead to one is not known far away."""
        return id(self), 0

    def close(self) -> None:
        super().close()
        if self._fetchers is not None:
            self._fetchers.close()


TAIL_NBYTES: Final = 256 << 10
_SLACK: Final = 512
"""Fetched around what was announced: the header in front of a payload, and what describes it behind."""


class RemoteSource(Beside, FarSource):
    """A file that a transport fetches ranges of, all of one version."""

    def __init__(
        self,
        transport: Transport,
        tail: Tail,
        fetchers: Fetchers,
        open_named: Callable[[str], SourceInFolder],
        cancellation: Cancellation | None = None,
        *,
        shares: bool = False,
        first: int = LEAST_NBYTES,
    ) -> None:
        """
        Take over a transport, and the end of its file.

        ``shares`` says that the threads are another's, and do not end with this one; ``first`` is how much of the
        beginning is fetched with the first read.
        """
        super().__init__(transport.shown, open_named, None if shares else fetchers)
        self.cancellation = cancellation
        self.version = transport.version if tail.data else ()  # a list says it of a file of a folder
        self._transport = transport
        self._left: list[_Left] = []
        self.nbytes = tail.nbytes
        self._parts = Parts(transport.fetch, tail.nbytes, fetchers)
        if tail.data:
            self._parts.put(tail.nbytes - len(tail.data), tail.data)
        self._parts.announce([(0, min(tail.nbytes, first))])
        self.unchecked = _Unchecked(self)

    def read(self, offset: int, nbytes: int) -> bytes:
        self._begin(offset, nbytes)
        return b"".join(self.views(offset, nbytes))

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self._begin(offset, buffer.nbytes)
        filled = 0
        for view in self.views(offset, buffer.nbytes):
            buffer[filled : filled + len(view)] = view
            filled += len(view)

    def views(self, offset: int, nbytes: int) -> Iterator[Data]:
        """Yield bytes as they lie in parts, and wait for those that are on their way."""
        check_cancelled(self.cancellation)
        stop = offset + nbytes
        while offset < stop:
            part = self._parts.at(offset)
            yield memoryview(self._wait(part))[offset - part.start : stop - part.start]
            self._parts.took(part, offset, min(stop, part.stop))
            offset = part.stop

    def prefetch(self, ranges: Iterable[Range]) -> None:
        self._parts.announce((max(0, start - _SLACK), min(self.nbytes, stop + _SLACK)) for start, stop in ranges)

    def compare_later(self, ranges: Sequence[Range], compare: Compare, what: str) -> None:
        self._left.append(_Left(ranges, compare, what))

    def notes(self) -> Iterator[str]:
        for left in self._left:
            if left.undone:
                yield left.what.format(count=f"{len(left.undone):,}")

    def check_unchanged(self) -> None:
        check = getattr(self._transport, "check_unchanged", None)
        if check is not None:  # else each answer tells
            check()

    def close(self) -> None:
        self._transport.close()
        self._parts.close()
        super().close()

    def _wait(self, part: Part) -> Data:
        try:
            while True:
                try:
                    return part.data.result(None if self.cancellation is None else LOOK_SECONDS)
                except NotYet:
                    check_cancelled(self.cancellation)
        except CancelledError as error:
            raise ValueError(CLOSED) from error
        except BaseException:
            if part.data.done():
                self._parts.drop(part)
            raise

    def _begin(self, offset: int, nbytes: int) -> None:
        """Ask for what will be read, all of it at once, and compare what was left for now."""
        check_cancelled(self.cancellation)
        if nbytes:
            self._parts.want(offset, offset + nbytes, _SLACK)
        for left in self._left:
            if left.undone:
                left.compare(offset, offset + nbytes)


class _Left:
    """Comparisons that are made when the bytes are read that they are about."""

    def __init__(self, ranges: Sequence[Range], compare: Compare, what: str) -> None:
        self._starts = [start for start, _ in ranges]
        self._stops = [stop for _, stop in ranges]
        self._compare_one = compare
        self.what = what
        self.undone = set(range(len(ranges)))

    def compare(self, start: int, stop: int) -> None:
        for number in range(bisect_right(self._stops, start), bisect_left(self._starts, stop)):
            if number in self.undone:
                self._compare_one(number)
                self.undone.discard(number)


class _Unchecked(Source):
    """What comparisons themselves read."""

    def __init__(self, source: RemoteSource) -> None:
        self._source = source
        self.nbytes = source.nbytes
        self.cancellation = source.cancellation

    def read(self, offset: int, nbytes: int) -> bytes:
        return b"".join(self._source.views(offset, nbytes))

    def file_offset(self, offset: int) -> int | None:
        return offset
