"""
A folder as a source: lists its names, and opens its files by name.

Neither a name in a file nor a link can lead out of the folder: see ``descriptors``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial

import ckptool.system as system
from ckptool.cancellation import Cancellation, check_cancelled
from ckptool.errors import Failure, LimitExceeded, SourceChanged, is_not_permitted, within
from ckptool.limits import FOLDER_NAMES
from ckptool.sources.descriptors import (
    NO_DESCRIPTOR,
    POOL,
    Descriptor,
    is_link,
    open_below,
    open_folder,
    open_folder_below,
    unavailable,
)
from ckptool.sources.files import FileSource, not_permitted, pooled
from ckptool.sources.source import CLOSED, Source
from ckptool.sources.versions import AGAIN, check_names


class FolderSource(Source):
    """
    An open directory. It has no bytes of its own (``nbytes`` is 0); its files are closed with it.

    ``files`` and ``folders`` are the sorted names that it had when it was opened.
    """

    is_folder = True
    nbytes = 0
    _is_closed = True

    def __init__(
        self, path: str, cancellation: Cancellation | None = None, opening: Callable[[], int] | None = None
    ) -> None:
        check_cancelled(cancellation)
        self._directory = Descriptor(opening or partial(open_folder, path), partial(_check_place, path))
        self._begin(path, cancellation)

    def _begin(self, path: str, cancellation: Cancellation | None) -> None:
        self.path = path
        self.cancellation = cancellation
        self._opened: dict[str, FileSource] = {}
        self._others: list[Source] = []
        self._lock = threading.Lock()
        self._listed: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}
        self._is_closed = False
        self.files, self.folders = self.names("")

    def names(self, folder: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """
        Return the sorted names of the files and of the folders in a subfolder; the empty name is this folder.

        Links count as their targets; a subfolder that cannot be listed counts as empty.

        Raises:
            FileUnavailable: This folder itself may not be listed.
        """
        if folder not in self._listed:
            self._listed[folder] = self._names(folder)
        return self._listed[folder]

    def _names(self, folder: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        files: list[str] = []
        folders: list[str] = []
        path = os.path.join(self.path, folder) if folder else self.path
        try:
            with POOL.opened(partial(_scan, path)) as entries:
                for entry in entries:
                    check_cancelled(self.cancellation)
                    (folders if _is_folder(entry) else files).append(entry.name)
                    if len(files) + len(folders) > FOLDER_NAMES:
                        raise LimitExceeded(f"a folder of more than {FOLDER_NAMES:,} files", actual=FOLDER_NAMES)
        except OSError as error:  # a folder that is gone is empty
            if not folder and is_not_permitted(error):
                raise not_permitted(path) from error
        return tuple(sorted(files)), tuple(sorted(folders))

    def has(self, name: str) -> bool:
        """Return whether there is a file of this name, which may begin with a subfolder."""
        folder, _, own = name.rpartition("/")
        return own in self.names(folder)[0]

    def open(self, name: str) -> FileSource:
        """
        Return the file of a name, which may begin with a subfolder. It is closed with the folder. Of many files, those
        that were read longest ago give up their descriptors until they are read again.

        Raises:
            MalformedFile: The name could lead out of the folder.
            FileUnavailable: It is missing, a link, not permitted, or not a regular file. The message has its name.
        """
        with self._lock:
            known = self._opened.get(name)
            if known is not None:
                return known
            found = self._opened[name] = self.detached(name)
            return found

    def detached(self, name: str) -> FileSource:
        """Return the file of a name, as ``open`` does; but it is not closed with the folder."""
        self._check_open()
        path = os.path.join(self.path, name)
        return pooled(path, self.cancellation, partial(_open_in, self._directory, name))

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError(CLOSED)

    def content(self, name: str, most: int) -> bytes:
        """
        Return the content of a small file, which does not count among the ``opened`` ones.

        Raises:
            LimitExceeded: It is larger than ``most`` bytes.
            CkptoolError: As ``open``.
        """
        with closing(self.detached(name)) as source:
            if source.nbytes > most:
                raise LimitExceeded(f"{name!r} has {source.nbytes:,} bytes; {most:,} are read", actual=source.nbytes)
            return source.read(0, source.nbytes)

    def head(self, name: str, most: int) -> bytes:
        """Return the first ``most`` bytes of a file; no bytes if it cannot be opened."""
        try:
            source = self.detached(name)
        except Failure:
            return b""
        with closing(source):
            return source.read(0, min(source.nbytes, most))

    def below(self, name: str) -> FolderSource:
        """Return a subfolder, which is not closed with this one; raise FileUnavailable if it is a link or missing."""
        self._check_open()
        path = os.path.join(self.path, name)
        return FolderSource(path, self.cancellation, partial(_open_folder_in, self._directory, name))

    def adopt(self, source: Source) -> None:
        """Let this folder close a source when it is closed itself."""
        self._others.append(source)

    def is_link(self, name: str) -> bool:
        """Return whether the entry ``name`` is a link."""
        with self._directory as fd:
            return is_link(fd, name)

    def place_of(self, name: str) -> str:
        """Return the path of a file or folder in it."""
        return os.path.join(self.path, name)

    def nbytes_of(self, name: str) -> int | None:
        """Return the size of a file in it, in bytes; None if it is not there any more."""
        with self._directory as fd:
            try:
                return system.stat_at(fd, name).st_size
            except OSError:
                return None

    def opened(self) -> Iterator[tuple[str, FileSource]]:
        """Yield the files that were opened so far, by name."""
        yield from tuple(self._opened.items())

    def versions(self) -> Iterator[tuple[str, tuple[object, ...]]]:
        for one in (*self._opened.values(), *self._others):
            yield from one.versions()

    def read(self, offset: int, nbytes: int) -> bytes:  # noqa: ARG002 - a source
        """Return no bytes: ``nbytes`` is 0."""
        self._check_open()
        return b""

    def check_unchanged(self) -> None:
        for one in (*self._opened.values(), *self._others):
            one.check_unchanged()
        check_names(self._opened.values())

    def close(self) -> None:
        """Close the folder and its files."""
        self._is_closed = True
        self._directory.rest()  # not close(): a detached file may need it again
        for one in (*self._opened.values(), *self._others):
            one.close()


def _scan(path: str) -> os._ScandirIterator[str]:
    """Return the entries of a folder; raise FileUnavailable if no descriptor is left, else OSError."""
    try:
        return os.scandir(path)
    except OSError as error:
        found = unavailable(error)
        if found.kind == NO_DESCRIPTOR:
            raise found from error
        raise


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder; a broken link counts as a file, and opening it gives the error."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _check_place(path: str, before: os.stat_result, now: os.stat_result) -> None:
    if (before.st_dev, before.st_ino) != (now.st_dev, now.st_ino):
        raise SourceChanged("another folder has its name by now", hint=AGAIN, path=path)


def _open_in(directory: Descriptor, name: str) -> int:
    with within(repr(name)), directory as fd:
        return open_below(fd, name)


def _open_folder_in(directory: Descriptor, name: str) -> int:
    with directory as fd:
        return open_folder_below(fd, name)
