"""A prefix of a store as a folder."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import sha256
from itertools import islice, takewhile
from typing import Final, cast

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


class Listing:
    """The listing of a folder and its subfolders; and first bytes of files, which each layout that is tried reads."""

    def __init__(self, bucket: Bucket, facts: dict[str, tuple[str | None, int]]) -> None:
        self.bucket = bucket
        self.facts = facts
        """The tag and the size of each object, by its full key."""
        self._names = sorted(facts)
        self._beginnings: dict[str, memoryview] = {}
        self._room = _KEPT_NBYTES
        self._lock = threading.Lock()

    def under(self, prefix: str) -> Iterator[str]:
        """Yield the names that begin with ``prefix``, in order."""
        start = bisect_left(self._names, prefix)
        return takewhile(lambda name: name.startswith(prefix), islice(self._names, start, None))

    def below(self, prefix: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names of the files and of the folders directly below a prefix."""
        own = [name[len(prefix) :].partition("/") for name in self.under(prefix)]
        files = tuple(name for name, slash, _ in own if name and not slash)
        return files, tuple(dict.fromkeys(name for name, slash, _ in own if name and slash))

    def beginning(self, key: str, nbytes: int, fetch: Callable[[], memoryview]) -> memoryview:
        """Return the first bytes of an object; fetch them if they are not kept. 32 MiB are kept in all."""
        known = self._beginnings.get(key)
        if known is not None and known.nbytes >= nbytes:
            return known[:nbytes]
        found = fetch()
        # Nothing is dropped to make space: each layout reads the files in the same order, so dropping the oldest would
        # drop just what the next layout asks for first.
        with self._lock:
            if key not in self._beginnings and found.nbytes <= self._room:
                self._beginnings[key] = found
                self._room -= found.nbytes
        return found


class _ListedFile(StoredFile):
    """A file of a folder whose first bytes are fetched only once."""

    def __init__(self, remote: Remote, key: str, listing: Listing, cancellation: Cancellation | None) -> None:
        super().__init__(remote, cancellation, bucket=listing.bucket, listed=listing.facts[key])
        self._listing = listing

    def fetch(self, start: int, stop: int) -> memoryview:
        if start:
            return super().fetch(start, stop)
        return self._listing.beginning(self._key, stop, partial(super().fetch, start, stop))


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
    return RemoteFolder(remote, Listing(bucket, facts), cancellation)


class RemoteFolder(FolderSource):
    """A prefix of a store. Its files share threads and memory; reading one that changed since the listing raises."""

    def __init__(self, remote: Remote, listing: Listing, cancellation: Cancellation | None = None) -> None:
        check_cancelled(cancellation)
        self._remote = remote
        self._prefix = remote.partition("://")[2].partition("/")[2]
        self._listing = listing
        self._fetchers = Fetchers(remote.connections)
        self._begin(remote.shown.rstrip("/"), cancellation)

    def _names(self, folder: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return self._listing.below(self._prefix + (f"{folder}/" if folder else ""))

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
        key, facts = self._prefix + name, self._listing.facts
        if key not in facts:
            raise FileUnavailable(f"{name!r}: no such file", kind="missing", hint="Check the address.")
        transport = _ListedFile(self._remote.elsewhere(self._remote + name), key, self._listing, self.cancellation)
        place, nbytes = name.rpartition("/")[0], facts[key][1]

        def open_named(other: str) -> FetchedSource:  # also while the folder is closed, and this file is not
            return self._file(f"{place}/{other}".lstrip("/"))

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
