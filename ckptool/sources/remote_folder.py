"""A prefix of a store as a folder: one listing gives all names below it, and its files are read by ranges."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import islice, takewhile
from typing import Final, NamedTuple, cast

from ckptool.cancellation import Cancellation, check_cancelled, in_time
from ckptool.errors import FileUnavailable, LimitExceeded
from ckptool.limits import FOLDER_OBJECTS
from ckptool.sources.address import Remote, as_remote
from ckptool.sources.descriptors import components
from ckptool.sources.files import FileSource
from ckptool.sources.folder import FolderSource
from ckptool.sources.remote.bucket import Bucket, StoredFile
from ckptool.sources.remote.opening import FetchedSource
from ckptool.sources.remote.parts import LEAST_NBYTES, PART_NBYTES, Fetchers, Tail

_KEPT_NBYTES: Final = 32 << 20


class Beginnings:
    """A cache of the first bytes of files: each layout that is tried opens the files anew and reads them."""

    def __init__(self) -> None:
        self._kept: dict[str, memoryview] = {}
        self._nbytes = 0
        self._lock = threading.Lock()

    def find(self, key: str) -> memoryview | None:
        """Return the first bytes of an object that are kept; None if none are."""
        return self._kept.get(key)

    def keep(self, key: str, data: memoryview) -> None:
        """Keep the first bytes of an object; drop the oldest entries above 32 MiB in all."""
        with self._lock:
            if key in self._kept:
                return
            self._kept[key] = data
            self._nbytes += data.nbytes
            while self._nbytes > _KEPT_NBYTES:
                self._nbytes -= self._kept.pop(next(iter(self._kept))).nbytes


class _ListedFile(StoredFile):
    """A file of a folder whose first bytes are fetched only once."""

    def __init__(
        self,
        remote: Remote,
        bucket: Bucket,
        listed: tuple[str | None, int],
        beginnings: Beginnings,
        cancellation: Cancellation | None,
    ) -> None:
        super().__init__(remote, cancellation, bucket=bucket, listed=listed)
        self._beginnings = beginnings

    def fetch(self, start: int, stop: int) -> memoryview:
        known = self._beginnings.find(self._key) if start == 0 else None
        if known is not None and known.nbytes >= stop:
            return known[:stop]
        found = super().fetch(start, stop)
        if start == 0:
            self._beginnings.keep(self._key, found)
        return found


class Listing(NamedTuple):
    """The listing of a folder and its subfolders: names in order, and the tag and size of each."""

    bucket: Bucket
    names: Sequence[str]
    """Full keys of the bucket."""
    facts: dict[str, tuple[str | None, int]]
    beginnings: Beginnings

    def under(self, prefix: str) -> Iterator[str]:
        """Yield the names that begin with ``prefix``, in order."""
        start = bisect_left(self.names, prefix)
        return takewhile(lambda name: name.startswith(prefix), islice(self.names, start, None))

    def below(self, prefix: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names of the files and of the folders directly below a prefix."""
        files: list[str] = []
        folders: dict[str, None] = {}
        for name in self.under(prefix):
            own, slash, _ = name[len(prefix) :].partition("/")
            if slash and own:
                folders[own] = None
            elif own:
                files.append(own)
        return tuple(files), tuple(folders)


def open_prefix(address: str, cancellation: Cancellation | None = None) -> RemoteFolder:
    """
    Return the folder for an address that ends with a slash.

    Raises:
        FileUnavailable: It cannot be listed, or is empty.
        LimitExceeded: It has more than 100,000 objects.
    """
    remote = as_remote(address)
    bucket = Bucket(remote)
    facts: dict[str, tuple[str | None, int]] = {}
    with bucket.explaining():
        chunks = iter(bucket.library.list(bucket.store, bucket.key or None))
        while (chunk := in_time(lambda: next(chunks, None), cancellation)) is not None:
            facts.update((one["path"], (one["e_tag"], one["size"])) for one in chunk)
            if len(facts) > FOLDER_OBJECTS:
                hint = "Name a folder in it."
                raise LimitExceeded(
                    f"a folder of more than {FOLDER_OBJECTS:,} objects", hint=hint, actual=FOLDER_OBJECTS
                )
    if not facts:
        raise FileUnavailable("no object has a name that begins so", kind="missing", hint="Check the address.")
    return RemoteFolder(remote, Listing(bucket, sorted(facts), facts, Beginnings()), cancellation)


class RemoteFolder(FolderSource):
    """A prefix of a store. Its files share threads and memory; reading one that changed since the listing raises."""

    def __init__(self, remote: Remote, listing: Listing, cancellation: Cancellation | None = None) -> None:
        check_cancelled(cancellation)
        self._remote = remote
        self._prefix = remote.partition("://")[2].partition("/")[2]
        self._listing = listing
        self._fetchers = Fetchers(remote.connections)
        self._begin(remote.shown.rstrip("/"), cancellation)

    def names(self, folder: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names of the files and of the folders in a subfolder; the empty name is this folder."""
        known = self._listed.get(folder)
        if known is None:
            known = self._listed[folder] = self._listing.below(self._prefix + (f"{folder}/" if folder else ""))
        return known

    def detached(self, name: str) -> FileSource:
        """
        Return the file of a name; it is not closed with the folder.

        Raises:
            MalformedFile: The name could lead out of the folder.
            FileUnavailable: There is no such object. The message has its name.
        """
        self._check_open()
        return cast("FileSource", self._file(name))  # it has every method that users of a folder's files call

    def _file(self, name: str) -> FetchedSource:
        components(name)
        facts = self._listing.facts.get(self._prefix + name)
        if facts is None:
            raise FileUnavailable(f"{name!r}: no such file", kind="missing", hint="Check the address.")
        remote = self._remote.elsewhere(self._remote + name)
        listing = self._listing
        transport = _ListedFile(remote, listing.bucket, facts, listing.beginnings, self.cancellation)
        place = name.rpartition("/")[0]

        def open_named(other: str) -> FetchedSource:
            return self._file(f"{place}/{other}".lstrip("/"))

        nbytes = facts[1]
        first = nbytes if nbytes <= PART_NBYTES else LEAST_NBYTES
        tail = Tail(b"", nbytes)
        return FetchedSource(transport, tail, self._fetchers, open_named, self.cancellation, shares=True, first=first)

    def below(self, name: str) -> RemoteFolder:
        """Return a subfolder, which is not closed with this one."""
        self._check_open()
        components(name)
        remote = self._remote.elsewhere(f"{self._remote}{name}/")
        return RemoteFolder(remote, self._listing, self.cancellation)

    def address_of(self, name: str) -> Remote:
        """Return the address of a file in it, with its tag and size from the listing."""
        return self._remote.elsewhere(self._remote + name).as_listed(*self._listing.facts[self._prefix + name])

    def as_listed(self) -> Remote:
        """Return its own address, with a tag and the total size of all objects below it."""
        prefix, facts = self._prefix, self._listing.facts
        inside = [(name, *facts[name]) for name in self._listing.under(prefix)]
        tag = sha256(repr(inside).encode(errors="surrogatepass")).hexdigest()
        return self._remote.as_listed(tag, sum(nbytes for _, _, nbytes in inside))

    def is_link(self, name: str) -> bool:  # noqa: ARG002 - as in a folder here
        """Return False: stores have no links."""
        return False

    def place_of(self, name: str) -> str:
        """Return the address of a file or folder in it, with the same options; a folder's ends with a slash."""
        return self._remote.elsewhere(f"{self.path}/{name}{'/' if name in self.folders else ''}")

    def nbytes_of(self, name: str) -> int | None:
        """Return the size of a file in it; None if there is none."""
        facts = self._listing.facts.get(self._prefix + name)
        return None if facts is None else facts[1]

    def versions(self) -> Iterator[tuple[str, tuple[object, ...]]]:
        """Yield the addresses of the files that were opened so far, each with its tag and size from the listing."""
        for name in tuple(self._opened):
            yield f"{self.path}/{name}", self._listing.facts[self._prefix + name]
        for one in self._others:
            yield from one.versions()

    def check_unchanged(self) -> None:
        """Do nothing: each answer of the store is compared with the listed version."""

    def close(self) -> None:
        """Close its files, and end the threads."""
        self._is_closed = True
        for one in (*self._opened.values(), *self._others):
            one.close()
        self._fetchers.close()
