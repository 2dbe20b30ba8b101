"""
Write objects of a store: in parts, under a temporary name, from which the store copies them to their final name.

1. Parts of 8 MiB, or larger ones if there would be too many, go to ``.<name>.ckptool-….part``, several at a time. The
   object appears when all parts are there; an upload that fails or is given up before is aborted and leaves nothing.
2. It can be read back there. Then one request copies it inside the store, so the final name has all of it or nothing.
   Unless it may replace an object, the store itself refuses the copy if the name was taken meanwhile.
3. A killed process may leave the temporary object, or parts without an object, but never part of a result.

S3 copies up to 5 GiB in one request. A larger object is written to its final name directly, after a check just before
the end that the name is free, and is deleted again unless it is what was to be written.
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
"""Stores accept 10,000."""
_MOST_AT_ONCE: Final = 8
_MOST_COPIED: Final = 5 << 30
"""What S3 copies in one request."""


class Stored:
    """A bucket to write to, and the requests for that; ``address`` names an object in it, or a prefix."""

    def __init__(self, address: Remote) -> None:
        self.address = address
        self._bucket = Bucket(address, writes=True)
        self._root = address.elsewhere(f"{address.scheme}://{self._bucket.name}/")
        self.key = self._bucket.key

    def copies(self, nbytes: int) -> bool:
        """Return whether the store copies an object of this size in one request."""
        return self._bucket.scheme != "s3" or nbytes <= _MOST_COPIED

    def address_of(self, key: str) -> Remote:
        """Return the address of an object in this bucket."""
        return self._root.elsewhere(self._root + key)

    def writer(self, key: str, nbytes: int) -> Any:
        """Return the library's writer for an object of ``nbytes`` bytes, which appears when the writer is closed."""
        step = -(-nbytes // _MOST_PARTS)
        part = max(_PART_NBYTES, -(-step // _PART_NBYTES) * _PART_NBYTES)
        at_once = min(_MOST_AT_ONCE, self.address.connections)
        return self._bucket.library.open_writer(self._bucket.store, key, buffer_size=part, max_concurrency=at_once)

    def has(self, key: str) -> bool:
        """Return whether there is an object of this name."""
        with self.failing():
            return self._bucket.find(key) is not None

    def is_empty(self, prefix: str) -> bool:
        """Return whether no object's name begins with ``prefix``, which ends with a slash."""
        with self.failing():
            return not any(map(len, self._bucket.library.list(self._bucket.store, prefix)))

    def copy(self, source: str, key: str, *, force: bool) -> None:
        """
        Copy the object ``source`` to the name ``key``, in one request.

        Raises:
            OutputExists: There is an object of that name, and ``force`` is false.
            OutputFailed: The store refused.
        """
        known = self._bucket.library.exceptions
        with self.failing():
            try:
                self._bucket.library.copy(self._bucket.store, source, key, overwrite=force)
            except (known.AlreadyExistsError, known.PreconditionError) as error:
                raise exists(self.address_of(key).shown) from error

    def delete(self, *keys: str) -> None:
        """Delete those of the objects that exist; raise OutputFailed if the store refuses."""
        with self.failing():
            self._bucket.library.delete(self._bucket.store, list(keys))

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Turn errors of the library into OutputFailed."""
        try:
            yield
        except OutputFailed:
            raise
        except Exception as error:
            found = self._bucket.explained(error)
            what, shown = "no such bucket (404)" if found.kind == "missing" else found.message, self.address.shown
            raise OutputFailed(f"cannot be written: {what}", kind=found.kind, path=shown, hint=found.hint) from error


class Upload:
    """An object that is being written, from its first byte to its last."""

    def __init__(self, stored: Stored, key: str, nbytes: int) -> None:
        self._stored = stored
        self._key = key
        self._nbytes = nbytes
        self._writer: Any = None
        self.is_there = False
        """Whether all of it is in the store."""

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes; raise OutputFailed if the store does not accept them."""
        with self._stored.failing():
            if self._writer is None:
                self._writer = self._stored.writer(self._key, self._nbytes)
            self._writer.write(bytes(data))  # a copy: it keeps what it gets, and the memory of a view is reused

    def end(self) -> None:
        """Complete the object, which appears now; raise OutputFailed if the store does not have all of its parts."""
        self.write(b"")  # an object of no bytes has no writer yet
        with self._stored.failing():
            self._writer.close()
        self.is_there = True

    def give_up(self) -> None:
        """Abort the upload, or delete the object if it is complete; never raise."""
        with suppress(Exception):
            if self.is_there:
                self._stored.delete(self._key)
            elif self._writer is not None:
                stopped = CkptoolError("given up")
                self._writer.__exit__(type(stopped), stopped, None)
        self._writer, self.is_there = None, False


def temporary(name: str) -> str:
    """Return a random temporary name, or key, in the same folder."""
    folder, slash, own = name.rpartition("/")
    return f"{folder}{slash}.{own[:64]}.ckptool-{os.urandom(8).hex()}.part"


def exists(shown: str) -> OutputExists:
    return OutputExists("exists already", path=shown, hint="Choose another name, or overwrite it with `force=True`.")
