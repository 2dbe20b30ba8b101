"""
Opens an address as a source; also repositories of the hub, and file objects of fsspec.

Files of repositories on the Hugging Face hub have addresses ``hf://ORG/NAME[@REVISION][/FILE]``. A revision is resolved
to its commit once, so what is read afterwards cannot change.

The tail is fetched first: the answer has the size, and zips are read from there; then the head. Readers announce with
``prefetch`` what they read next. A part of an index that a reader skips, because the payloads repeat it, is compared
with them when they are read.

File objects of fsspec (s3fs, gcsfs, adlfs, huggingface_hub and others) are read by ranges, too. Their own ``read``
fetches blocks of megabytes around each read, so an index would cost as much as the file. So the ranges are requested
from the file system that the object belongs to.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as NotYet
from struct import Struct
from typing import TYPE_CHECKING, Any, BinaryIO, Final, cast
from urllib.parse import quote, unquote

from ckptool.cancellation import LOOK_SECONDS, Cancellation, check_cancelled, in_time
from ckptool.errors import CkptoolError, FileUnavailable, MissingPackage, reason_of
from ckptool.sources import HUB, WEB
from ckptool.sources.address import CONNECTIONS, Remote, as_remote
from ckptool.sources.descriptors import components
from ckptool.sources.paths import is_likely
from ckptool.sources.remote.parts import (
    LEAST_NBYTES,
    Data,
    Fetchers,
    Part,
    Parts,
    Range,
    Tail,
    Transport,
    changed_remote,
)
from ckptool.sources.source import CLOSED, BytesSource, RemoteSource, Source, SourceInFolder, StreamSource

if TYPE_CHECKING:
    from ckptool.sources.remote.web import WebFile


_WHOLE_NBYTES: Final = 8 << 20
"""A file up to this size is fetched as a whole: that takes less time than requests for parts of it."""
_MOSTLY_INDEX: Final = 8
"""So is a zip of up to twice that size whose directory is at least an eighth of it: reading its index, with the headers
between small payloads, would fetch most of it anyway."""
_END: Final = Struct("<4s8x2L2x")
"""The last record of a zip without a comment: the size and the offset of its directory."""
TAIL_NBYTES: Final = 256 << 10
_SLACK: Final = 512
"""Bytes fetched around an announced range: the header before a payload, and the descriptor after it."""


_WEIGHTS: Final = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "diffusion_pytorch_model.safetensors",
    "adapter_model.safetensors",
)
"""Names of the file with the weights, in the order in which transformers and others look for them."""


class Beside(SourceInFolder):
    """A remote file. Files that it opened in its folder are closed with it, and so are the threads that fetch them."""

    def __init__(self, path: str, open_named: Callable[[str], SourceInFolder], fetchers: Fetchers | None) -> None:
        """``open_named`` opens a name in the folder of ``path``; ``fetchers`` are closed with this source."""
        super().__init__()
        self.path = path
        self._open_named = open_named
        self._fetchers = fetchers

    def _open_beside(self, name: str) -> SourceInFolder:
        components(name)
        return self._open_named(name)

    @property
    def place(self) -> tuple[int, int]:
        """Different for each open file: whether two remote names are one file is not known."""
        return id(self), 0

    def close(self) -> None:
        super().close()
        if self._fetchers is not None:
            self._fetchers.close()


class FetchedSource(Beside, RemoteSource):
    """A remote file, read by ranges of one version that a transport fetches."""

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
        Take over a transport, and the tail of its file.

        ``shares`` says that other sources use the fetchers, which are not closed with this one; ``first`` is how many
        bytes of the beginning are fetched with the first read.
        """
        super().__init__(transport.shown, open_named, None if shares else fetchers)
        self.cancellation = cancellation
        self.version = transport.version if tail.data else ()  # without data, the folder's listing has the version
        self._transport = transport
        self._postponed = []
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
        """Yield the bytes of the parts in order; wait for parts that are still being fetched."""
        check_cancelled(self.cancellation)
        stop = offset + nbytes
        while offset < stop:
            part = self._parts.at(offset)
            yield memoryview(self._wait(part))[offset - part.start : stop - part.start]
            self._parts.took(part, offset, min(stop, part.stop))
            offset = part.stop

    def prefetch(self, ranges: Iterable[Range]) -> None:
        self._parts.announce((max(0, start - _SLACK), min(self.nbytes, stop + _SLACK)) for start, stop in ranges)

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
        """Start to fetch a range that will be read, and make the comparisons that were left for when it is."""
        check_cancelled(self.cancellation)
        if nbytes:
            self._parts.want(offset, offset + nbytes, _SLACK)
        for one in self._postponed:
            if one.undone:
                one.compare(offset, offset + nbytes)


class _Unchecked(Source):
    """The source that comparisons themselves read, which triggers no others."""

    def __init__(self, source: FetchedSource) -> None:
        self._source = source
        self.nbytes = source.nbytes
        self.cancellation = source.cancellation

    def read(self, offset: int, nbytes: int) -> bytes:
        return b"".join(self._source.views(offset, nbytes))

    def file_offset(self, offset: int) -> int | None:
        return offset


class CopiedSource(Beside):
    """A local copy of a remote file: in memory if it is small, on the disk if it was downloaded as a whole."""

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
    """Return a key for the current version of a remote file; None if it cannot be read."""
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
    """
    Return the address to request ranges from, and the headers for it: those that identify the user of the hub.

    Raises:
        FileUnavailable: There is no such repository, revision or file, or it is not open to everybody.
        MissingPackage: huggingface_hub is not installed.
    """
    if remote.scheme != HUB:
        return remote, {}
    repository, commit, file = _parts(remote)
    hub = _package()
    if remote.listed is None:
        info = _info(remote, repository, commit)
        names = [one.rfilename for one in info.siblings or ()]
        file, commit = file or _chosen(names, remote), info.sha
        if file not in names:
            raise FileUnavailable("no such file in the repository", kind="missing", hint=_pick(names, remote))
    url = hub.hf_hub_url(repository, file, revision=commit, endpoint=remote.endpoint)
    found = remote.elsewhere(url)
    found.listed = remote.listed
    return found, hub.utils.build_hf_headers(token=_token(remote))


def _transport(remote: Remote, headers: Mapping[str, str], shown: str, cancellation: Cancellation | None) -> Transport:
    if remote.scheme in WEB:
        from ckptool.sources.remote.web import WebFile

        return WebFile(remote, headers, shown=shown, cancellation=cancellation)
    from ckptool.sources.remote.bucket import StoredFile

    return StoredFile(remote, cancellation, listed=remote.listed)


def open_file_object(origin: object, cancellation: Cancellation | None = None) -> SourceInFolder | None:
    """Return the source for a file object of fsspec, opened for reading; None for any other."""
    is_ranged = (
        hasattr(origin, "cache")
        and isinstance(getattr(origin, "path", None), str)
        and callable(getattr(getattr(origin, "fs", None), "cat_file", None))
        and isinstance(getattr(origin, "size", None), int)
        and "r" in str(getattr(origin, "mode", ""))
    )
    if not is_ranged:
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
    """Return the source for a file; ``shared`` are fetchers of other files, too, which are not closed with it."""
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
    """Return the source for a file, a small one in memory; ``end`` is how many of its last bytes are fetched first."""
    check_cancelled(cancellation)
    try:
        tail = transport.tail(end)
        if tail.nbytes > _WHOLE_NBYTES and not _is_mostly_index(tail):
            return FetchedSource(transport, tail, fetchers, open_named, cancellation, shares=shares)
        before = tail.nbytes - len(tail.data)
        data = b"".join((transport.fetch(0, before), tail.data)) if before else bytes(tail.data)
    except BaseException:
        transport.close()
        raise
    transport.close()
    own, held = None if shares else fetchers, BytesSource(data, cancellation)
    return CopiedSource(held, transport.shown, open_named, own, transport.version)


def _is_mostly_index(tail: Tail) -> bool:
    """Guess whether a zip of up to 16 MiB has many small members; this only decides how much is fetched at once."""
    if tail.nbytes > 2 * _WHOLE_NBYTES or len(tail.data) < _END.size:
        return False
    magic, nbytes, start = _END.unpack(tail.data[-_END.size :])
    return bool(magic == b"PK\5\6" and start + nbytes <= tail.nbytes <= _MOSTLY_INDEX * nbytes)


def _downloaded(web: WebFile) -> BinaryIO:
    """Return a copy of the whole file in an unnamed temporary file."""
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


class FileObject(Transport):
    """Fetches ranges for an open file of fsspec, from its file system; the file object itself is not read or closed."""

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
            raise changed_remote()
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
            raise changed_remote()

    def _seen(self, details: object) -> tuple[object, ...] | None:
        """Return what identifies the version, from the file system's details; None if there are none."""
        if not isinstance(details, dict):
            return None
        return tuple(str(details.get(key)) for key in ("size", "ETag", "etag", "LastModified", "mtime", "last_commit"))


def _unreadable(error: Exception) -> FileUnavailable:
    if isinstance(error, FileNotFoundError):
        return FileUnavailable("no such file", kind="missing", hint="Open it again.")
    if isinstance(error, PermissionError):
        return FileUnavailable("the store refuses access", kind="permission", hint="Check the rights of the keys.")
    return FileUnavailable(f"cannot be read ({type(error).__name__})", kind="io", hint="Open it again.")


def listed(remote: Remote) -> list[Remote]:
    """
    Return the addresses of all files of a repository, at the current commit of its revision.

    Raises:
        FileUnavailable: There is no such repository or revision, or it is not open to everybody.
        MissingPackage: huggingface_hub is not installed.
    """
    repository, revision, _ = _parts(remote)
    info = _info(remote, repository, revision, files_metadata=True)
    place = f"hf://{repository}@{info.sha}"
    found = []
    for one in info.siblings or ():
        address = remote.elsewhere(f"{place}/{quote(one.rfilename)}")
        tag = (one.lfs and getattr(one.lfs, "sha256", None)) or one.blob_id
        found.append(address if one.size is None else address.as_listed(tag, one.size))
    return found


def _parts(remote: Remote) -> tuple[str, str, str]:
    """Return the repository, the revision and the file that an address names; the last two may be empty."""
    owner, name, file = [*remote.partition("://")[2].split("/", 2), "", ""][:3]
    name, _, revision = name.partition("@")
    if not owner or not name:
        raise FileUnavailable("an address without a repository", kind="address", hint="Give hf://ORG/NAME/FILE.")
    return f"{owner}/{name}", unquote(revision), unquote(file)


def _info(remote: Remote, repository: str, revision: str, *, files_metadata: bool = False) -> Any:
    api = _package().HfApi(endpoint=remote.endpoint, token=_token(remote))
    try:
        return api.repo_info(repository, revision=revision or None, files_metadata=files_metadata)
    except Exception as error:
        raise _explained(error, repository) from error


def _token(remote: Remote) -> bool | None:
    return False if remote.anonymous else None


def _chosen(names: Sequence[str], remote: Remote) -> str:
    found = [name for name in _WEIGHTS if name in names] or [name for name in names if is_likely(name)]
    if not found or (found[0] not in _WEIGHTS and len(found) > 1):
        what = "several files that may be checkpoints" if found else "no file that may be a checkpoint"
        raise FileUnavailable(f"a repository with {what}", kind="which-file", hint=_pick(found or names, remote))
    return found[0]


def _pick(names: Sequence[str], remote: Remote) -> str:
    likely = [name for name in names if is_likely(name)] or list(names)
    shown = ", ".join(likely[:8])
    return f"Name one of its files: {shown}" if likely else f"Look at what {remote.shown} has."


def _explained(error: Exception, repository: str) -> CkptoolError:
    """Return our error for one of huggingface_hub, by the name of its class, whose module differs between versions."""
    kinds = {cls.__name__ for cls in type(error).__mro__}
    if "GatedRepoError" in kinds:
        hint = "Ask for access on its page, then sign in: hf auth login"
        return FileUnavailable(f"{repository} is open only to those who asked for access", kind="permission", hint=hint)
    if kinds & {"RepositoryNotFoundError", "HFValidationError"}:
        hint = "Check the name. If it is private, sign in: hf auth login"
        return FileUnavailable(f"no repository {repository}", kind="missing", hint=hint)
    if "RevisionNotFoundError" in kinds:
        return FileUnavailable(f"no such revision of {repository}", kind="missing", hint="Check what follows '@'.")
    return FileUnavailable("the hub cannot be reached", kind="network", hint="Check the network.")


def _package() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.utils
    except ImportError as error:
        raise MissingPackage.named("huggingface_hub", 'pip install "ckptool[hub]"') from error
    return huggingface_hub
