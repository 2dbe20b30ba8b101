"""
Open a file far away by its address, as a source: few requests, several at once, and bounded memory.

The tail comes first: it tells the size, and zips are read from there; then the head. Readers say with ``prefetch`` what
comes next. What a reader left unread of an index, as the payloads tell it too, is compared when these are read.

File objects of fsspec (s3fs, gcsfs, adlfs, huggingface_hub and others) fetch ranges. Their own ``read`` keeps blocks
around what is read, of megabytes each: to look at an index costs as much as the file then. The file system that an
object belongs to gives ranges as they are asked for.
"""

from __future__ import annotations

import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as NotYet
from struct import Struct
from typing import TYPE_CHECKING, Any, BinaryIO, Final, cast

from ckptool.cancellation import LOOK_SECONDS, Cancellation, check_cancelled, in_time
from ckptool.errors import CkptoolError, FileUnavailable, reason_of
from ckptool.sources.address import CONNECTIONS, HUB, WEB, Remote, as_remote
from ckptool.sources.descriptors import components
from ckptool.sources.remote.parts import (
    LEAST_NBYTES,
    Data,
    Fetchers,
    Part,
    Parts,
    Range,
    Tail,
    Transport,
    changed_far,
)
from ckptool.sources.source import CLOSED, BytesSource, Compare, FarSource, Source, SourceInFolder, StreamSource

if TYPE_CHECKING:
    from ckptool.sources.remote.web import WebFile


_WHOLE_NBYTES: Final = 8 << 20
"""A file of this size is fetched as a whole: that takes less time than asking for parts of it."""
_MOSTLY_INDEX: Final = 8
"""A file of up to twice that size is, too, if the directory at its end is at least an eighth of it: what is read of it
then, the names once more and headers between small payloads, is most of the file."""
_END: Final = Struct("<4s8x2L2x")
"""The last record of a zip without a comment: how large its directory is, and where it begins."""
TAIL_NBYTES: Final = 256 << 10
_SLACK: Final = 512
"""Fetched around what was announced: the header before a payload, and the descriptor after it."""


class Beside(SourceInFolder):
    """A file far away. Files that were opened beside it are closed with it, and so are the threads that fetch them."""

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
        """Another for each open file: whether two names lead to one file is not known far away."""
        return id(self), 0

    def close(self) -> None:
        super().close()
        if self._fetchers is not None:
            self._fetchers.close()


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
        self._transport.check_unchanged()

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


class CopiedSource(Beside):
    """A copy of a file: of a small one in memory, on the disk of one that its server gives only as a whole."""

    def __init__(
        self,
        held: Source,
        path: str,
        open_named: Callable[[str], SourceInFolder],
        fetchers: Fetchers | None,
        version: tuple[object, ...] = (),
    ) -> None:
        super().__init__(path, open_named, fetchers)
        self.version = version
        self._held = held
        self.nbytes = held.nbytes
        self.cancellation = held.cancellation

    def read(self, offset: int, nbytes: int) -> bytes:
        return self._held.read(offset, nbytes)

    def close(self) -> None:
        self._held.close()
        super().close()


def open_remote(address: str, cancellation: Cancellation | None = None) -> tuple[SourceInFolder, str]:
    """
    Return the source for an address, and the name to show for it.

    Raises:
        FileUnavailable: The file cannot be read; the message says why, in one line.
        MissingPackage: What its scheme needs is not installed.
    """
    remote = as_remote(address)
    found, headers = in_time(lambda: _resolved(remote), cancellation)
    return _opened(found, headers, remote.shown, cancellation), remote.shown


def remote_version(address: str, cancellation: Cancellation | None = None) -> tuple[object, ...] | None:
    """Return what identifies the version of a file that is there now; None if none can be read."""
    remote = as_remote(address)
    try:
        resolved = in_time(lambda: _resolved(remote), cancellation)
        transport = _transport(*resolved, remote.shown, cancellation)
        try:
            transport.tail(1)
            return ("far", remote.shown, *transport.version)
        finally:
            transport.close()
    except FileUnavailable:
        return None


def _resolved(remote: Remote) -> tuple[Remote, Mapping[str, str]]:
    """Return the address that ranges are asked of, and the headers that go with it."""
    if remote.scheme != HUB:
        return remote, {}
    from ckptool.sources.remote.hub import resolve

    return resolve(remote)


def _transport(remote: Remote, headers: Mapping[str, str], shown: str, cancellation: Cancellation | None) -> Transport:
    if remote.scheme in WEB:
        from ckptool.sources.remote.web import WebFile

        return WebFile(remote, headers, shown=shown, cancellation=cancellation)
    from ckptool.sources.remote.bucket import StoredFile

    return StoredFile(remote, cancellation, listed=remote.listed)


def open_file_object(origin: object, cancellation: Cancellation | None = None) -> SourceInFolder | None:
    """Return the source for a file object that fetches ranges from far away; None for any other."""
    if not is_ranged(origin):
        return None

    def open_named(name: str) -> SourceInFolder:
        hint = "Give its address instead, or download the folder."
        raise FileUnavailable(f"{name!r} is beside a file object, which opens nothing else", kind="missing", hint=hint)

    return _fetched(FileObject(origin, cancellation), Fetchers(CONNECTIONS), open_named, cancellation)


def _opened(
    remote: Remote,
    headers: Mapping[str, str],
    shown: str,
    cancellation: Cancellation | None,
    shared: Fetchers | None = None,
) -> SourceInFolder:
    """Return the source for a file; ``shared`` fetches others, too, and does not end with it."""
    fetchers = Fetchers(remote.connections) if shared is None else shared
    own = fetchers if shared is None else None

    def open_named(name: str) -> SourceInFolder:
        beside = f"{shown.rpartition('/')[0]}/{name}"
        return _opened(remote.beside(name), headers, beside, cancellation, fetchers)

    transport = _transport(remote, headers, shown, cancellation)
    if remote.download and remote.scheme in WEB:
        stream = StreamSource(_downloaded(cast("WebFile", transport)), cancellation, owned=True)
        return CopiedSource(stream, shown, open_named, own)
    end = _WHOLE_NBYTES if remote.takes_end else TAIL_NBYTES
    return _fetched(transport, fetchers, open_named, cancellation, shares=shared is not None, end=end)


def _fetched(
    transport: Transport,
    fetchers: Fetchers,
    open_named: Callable[[str], SourceInFolder],
    cancellation: Cancellation | None,
    *,
    shares: bool = False,
    end: int = TAIL_NBYTES,
) -> SourceInFolder:
    """Return the source for a file: a small one is in memory at once. ``end`` is what is fetched first."""
    check_cancelled(cancellation)
    try:
        tail = transport.tail(end)
        if tail.nbytes > _WHOLE_NBYTES and not _is_mostly_index(tail):
            return RemoteSource(transport, tail, fetchers, open_named, cancellation, shares=shares)
        before = tail.nbytes - len(tail.data)
        data = b"".join((transport.fetch(0, before), tail.data)) if before else bytes(tail.data)
    except BaseException:
        transport.close()
        raise
    transport.close()
    own, held = None if shares else fetchers, BytesSource(data, cancellation)
    return CopiedSource(held, transport.shown, open_named, own, transport.version)


def _is_mostly_index(tail: Tail) -> bool:
    """Say whether a zip that is not large has many small members. It is a guess, and decides what is fetched alone."""
    if tail.nbytes > 2 * _WHOLE_NBYTES or len(tail.data) < _END.size:
        return False
    magic, nbytes, start = _END.unpack(tail.data[-_END.size :])
    return bool(magic == b"PK\5\6" and start + nbytes <= tail.nbytes <= _MOSTLY_INDEX * nbytes)


def _downloaded(web: WebFile) -> BinaryIO:
    """Return a copy of the whole file, which has no name, and is gone when it is closed."""
    try:
        stream = tempfile.TemporaryFile()  # noqa: SIM115 - the source closes it
        try:
            web.download(cast("BinaryIO", stream))
        except BaseException:
            stream.close()
            raise
    except OSError as error:
        hint = f"Make room below {tempfile.gettempdir()}, or set TMPDIR to a folder that has it."
        raise FileUnavailable(f"cannot be downloaded: {reason_of(error)}", kind="download", hint=hint) from error
    finally:
        web.close()
    return cast("BinaryIO", stream)


def is_ranged(origin: object) -> bool:
    """Say whether a file object fetches what is read of it from far away, by ranges."""
    found = getattr(origin, "fs", None)
    size = getattr(origin, "size", None)
    return (
        hasattr(origin, "cache")
        and isinstance(getattr(origin, "path", None), str)
        and callable(getattr(found, "cat_file", None))
        and isinstance(size, int)
        and "r" in str(getattr(origin, "mode", ""))
    )


class FileObject(Transport):
    """An open file of fsspec, which stays as it is: nothing is read through it, and it is not closed."""

    def __init__(self, origin: Any, cancellation: Cancellation | None = None) -> None:
        self._cancellation = cancellation
        self.shown: str = origin.path
        self._files = origin.fs
        self._path: str = origin.path
        self._nbytes: int = origin.size
        self._version = self._seen(getattr(origin, "details", None))

    def tail(self, nbytes: int) -> Tail:
        start = max(0, self._nbytes - nbytes)
        return Tail(self.fetch(start, self._nbytes) if self._nbytes else b"", self._nbytes)

    def fetch(self, start: int, stop: int) -> bytes:
        try:
            found = in_time(lambda: self._files.cat_file(self._path, start=start, end=stop), self._cancellation)
        except CkptoolError:
            raise
        except Exception as error:
            raise _unreadable(error) from error
        if not isinstance(found, bytes) or len(found) != stop - start:
            if isinstance(found, bytes) and len(found) > stop - start:
                hint = "Download the file first."
                raise FileUnavailable("what is behind the file object gives no ranges", kind="no-ranges", hint=hint)
            raise changed_far()
        return found

    def check_unchanged(self) -> None:
        def look() -> object:
            self._files.invalidate_cache()
            return self._files.info(self._path)

        try:
            now = self._seen(in_time(look, self._cancellation))
        except CkptoolError:
            raise
        except Exception as error:
            raise _unreadable(error) from error
        if self._version is not None and now != self._version:
            raise changed_far()

    def _seen(self, details: object) -> tuple[object, ...] | None:
        """Return what identifies the version, as far as the file system says."""
        if not isinstance(details, dict):
            return None
        return tuple(str(details.get(key)) for key in ("size", "ETag", "etag", "LastModified", "mtime", "last_commit"))


def _unreadable(error: Exception) -> FileUnavailable:
    if isinstance(error, FileNotFoundError):
        return FileUnavailable("no such file", kind="missing", hint="Open it again.")
    if isinstance(error, PermissionError):
        return FileUnavailable("the store refuses access", kind="permission", hint="Check the rights of the keys.")
    return FileUnavailable(f"cannot be read ({type(error).__name__})", kind="io", hint="Open it again.")
