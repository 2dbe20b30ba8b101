"""
Open a file far away by its address.

File objects of fsspec (s3fs, gcsfs, adlfs, huggingface_hub and others) fetch ranges. Their own ``read`` keeps blocks
around what is read, of megabytes each: to look at an index costs as much as the file then. The file system that an
object belongs to gives ranges as they are asked for.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from struct import Struct
from typing import TYPE_CHECKING, Any, BinaryIO, Final, cast

from ckptool.cancellation import Cancellation, check_cancelled, in_time
from ckptool.errors import CkptoolError, FileUnavailable, reason_of
from ckptool.sources.remote.address import CONNECTIONS, HUB, WEB, Remote, as_remote
from ckptool.sources.remote.parts import Fetchers, Tail, Transport, changed_far
from ckptool.sources.remote.source import TAIL_NBYTES, Beside, RemoteSource
from ckptool.sources.source import BytesSource, Source, SourceInFolder, StreamSource

if TYPE_CHECKING:
    from ckptool.sources.remote.bucket import StoredFile
    from ckptool.sources.remote.web import WebFile


_WHOLE_NBYTES: Final = 8 << 20
"""A file of this size is fetched as a whole: that takes less time than asking for parts of it."""
_MOSTLY_INDEX: Final = 8
"""A file of up to twice that size is, too, if the directory at its end is at least an eighth of it: what is read of it
then, the names once more and headers between small payloads, is most of the file."""
_END: Final = Struct("<4s8x2L2x")
"""The last record of a zip without a comment: how large its directory is, and where it begins."""


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
    """Return what tells the version of a file that is there now from others; None if none can be read."""
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


def _transport(
    remote: Remote, headers: Mapping[str, str], shown: str, cancellation: Cancellation | None
) -> WebFile | StoredFile:
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
    if remote.listed is not None and remote.listed[1] <= _WHOLE_NBYTES and not remote.download:
        check_cancelled(cancellation)
        nbytes = remote.listed[1]
        try:
            data = bytes(transport.fetch(0, nbytes)) if nbytes else b""
            if nbytes and transport.version[0] != nbytes:
                raise changed_far("the file was changed since it was listed")
        finally:
            transport.close()
        return CopiedSource(BytesSource(data, cancellation), shown, open_named, own, transport.version)
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


class FileObject:
    """An open file of fsspec, which stays as it is: nothing is read through it, and it is not closed."""

    version = ()

    def __init__(self, origin: Any, cancellation: Cancellation | None = None) -> None:
        self._cancellation = cancellation
        self.shown: str = origin.path
        self._files = origin.fs
        self._path: str = origin.path
        self._nbytes: int = origin.size
        self._version = self._seen(getattr(origin, "details", None))

    def tail(self, nbytes: int) -> Tail:
        """Return the last bytes."""
        start = max(0, self._nbytes - nbytes)
        return Tail(self.fetch(start, self._nbytes) if self._nbytes else b"", self._nbytes)

    def fetch(self, start: int, stop: int) -> bytes:
        """Return the bytes of a range."""
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
        """Raise SourceChanged if another file has its name by now; ranges do not tell."""

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

    def close(self) -> None:
        """The object belongs to who opened it."""

    def _seen(self, details: object) -> tuple[object, ...] | None:
        """Return what tells one version from another, as far as the file system says."""
        if not isinstance(details, dict):
            return None
        return tuple(str(details.get(key)) for key in ("size", "ETag", "etag", "LastModified", "mtime", "last_commit"))


def _unreadable(error: Exception) -> FileUnavailable:
    if isinstance(error, FileNotFoundError):
        return FileUnavailable("no such file", kind="missing", hint="Open it again.")
    if isinstance(error, PermissionError):
        return FileUnavailable("the store refuses access", kind="permission", hint="Check the rights of the keys.")
    return FileUnavailable(f"cannot be read ({type(error).__name__})", kind="io", hint="Open it again.")
