"""
Write objects of a store: in parts, and under a temporary name, from which the store itself copies them to their own.

1. Parts of 8 MiB, larger ones where there would be too many, go to ``.<name>.ckptool-….part``, some at once. That
   object appears when all of them are there; until then, what fails or is given up is aborted, and nothing is left.
2. It can be read back there. Then one request copies it inside the store: its own name has all of it or nothing,
   and where nothing was to be replaced, the store itself refuses if the name was taken meanwhile.
3. A killed process may leave the temporary object, or parts that belong to none; it never leaves part of a result.

S3 copies up to 5 GiB at once. What is larger goes to its own name at once, looked for just before the end, and is
deleted again unless it is what was to be written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from ckptool.errors import CkptoolError, OutputExists, OutputFailed
from ckptool.sources.address import Remote
from ckptool.sources.remote.bucket import Bucket

_PART_NBYTES: Final = 8 << 20
_MOST_PARTS: Final = 9_000
"""Stores take 10,000."""
_MOST_AT_ONCE: Final = 8
_MOST_COPIED: Final = 5 << 30
"""What S3 copies in one request."""


class Stored:
    """A bucket that is written to, and the requests to it: ``address`` names an object in it, or a prefix."""

    def __init__(self, address: Remote) -> None:
        self.address = address
        self._bucket = Bucket(address, writes=True)
        self._root = address.elsewhere(f"{address.scheme}://{self._bucket.name}/")
        self.key = self._bucket.key

    def copies(self, nbytes: int) -> bool:
        """Say whether the store copies an object of this size in one request."""
        return self._bucket.scheme != "s3" or nbytes <= _MOST_COPIED

    def address_of(self, key: str) -> Remote:
        """Return the address of an object in this bucket."""
        return self._root.elsewhere(self._root + key)

    def writer(self, key: str, nbytes: int) -> Any:
        """Return what is written to, and closed: then the object is there."""
        step = -(-nbytes // _MOST_PARTS)
        part = max(_PART_NBYTES, -(-step // _PART_NBYTES) * _PART_NBYTES)
        at_once = min(_MOST_AT_ONCE, self.address.connections)
        return self._bucket.library.open_writer(self._bucket.store, key, buffer_size=part, max_concurrency=at_once)

    def has(self, key: str) -> bool:
        """Say whether there is an object under a name."""
        with self.failing():
            return self._bucket.find(key) is not None

    def is_empty(self, prefix: str) -> bool:
        """Say whether no object has a name that begins so; ``prefix`` ends with a slash."""
        with self.failing():
            return not any(map(len, self._bucket.library.list(self._bucket.store, prefix)))

    def copy(self, source: str, key: str, *, force: bool) -> None:
        """
        Give an object another name, all at once.

        Raises:
            OutputExists: Something has that name, and was not to be replaced.
            OutputFailed: The store refused.
        """
        known = self._bucket.library.exceptions
        with self.failing():
            try:
                self._bucket.library.copy(self._bucket.store, source, key, overwrite=force)
            except (known.AlreadyExistsError, known.PreconditionError) as error:
                raise exists(self.address_of(key).shown) from error

    def delete(self, *keys: str) -> None:
        """Delete objects, many at once, as far as they are there; raise OutputFailed if the store refuses."""
        with self.failing():
            self._bucket.library.delete(self._bucket.store, list(keys))

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Raise OutputFailed for errors of the library."""
        try:
            yield
        except OutputFailed:
            raise
        except Exception as error:
            found = self._bucket.explained(error)
            what, shown = "no such bucket (404)" if found.kind == "missing" else found.message, self.address.shown
            raise OutputFailed(f"cannot be written: {what}", kind=found.kind, path=shown, hint=found.hint) from error


class Upload:
    """One object being written, from its first byte to its last."""

    def __init__(self, stored: Stored, key: str, nbytes: int) -> None:
        self._stored = stored
        self._key = key
        self._nbytes = nbytes
        self._writer: Any = None
        self.is_there = False
        """Whether all of it is in the store."""

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes; raise OutputFailed if the store does not take them."""
        with self._stored.failing():
            if self._writer is None:
                self._writer = self._stored.writer(self._key, self._nbytes)
            self._writer.write(bytes(data))  # it keeps what it is given, and a view may get other bytes

    def end(self) -> None:
        """Let the object appear; raise OutputFailed if the store does not have all of its parts."""
        self.write(b"")  # there may be no bytes
        with self._stored.failing():
            self._writer.close()
        self.is_there = True

    def give_up(self) -> None:
        """Leave nothing: abort what is under way, and delete what is there."""
        with suppress(Exception):
            if self.is_there:
                self._stored.delete(self._key)
            elif self._writer is not None:
                stopped = CkptoolError("given up")
                self._writer.__exit__(type(stopped), stopped, None)
        self._writer, self.is_there = None, False


def temporary(name: str) -> str:
    """Return a temporary name in the folder of another; both may be keys."""
    folder, slash, own = name.rpartition("/")
    return f"{folder}{slash}.{own[:64]}.ckptool-{os.urandom(8).hex()}.part"


def exists(shown: str) -> OutputExists:
    return OutputExists("exists already", path=shown, hint="Choose another name, or overwrite it with `force=True`.")
