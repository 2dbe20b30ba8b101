"""
Objects in stores as outputs.

``sources.remote.bucket`` writes objects; this module decides when. A folder is a prefix: its files are written under a
temporary one, and get their names many at a time; the last of them makes the others a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final

from ckptool.errors import OutputExists, OutputFailed
from ckptool.migration.output import Place
from ckptool.sources.address import Remote
from ckptool.sources.remote.bucket import Stored, Upload, exists, temporary
from ckptool.sources.source import Closing, Progress

_COPIES_AT_ONCE: Final = 64


class RemoteObject(Closing):
    """An object being written under one name, which may be a temporary one."""

    takes_any_order = False
    notes = ()
    replaced = ()

    def __init__(self, stored: Stored, shown: str, key: str, progress: Progress | None) -> None:
        self.path = shown
        self.position = 0
        self._stored = stored
        self._key = key
        self._progress = progress
        self._expected = 0
        self._upload: Upload | None = None

    def reserve(self, nbytes: int) -> None:
        """Set the expected size; refuse one that the store cannot copy at once."""
        self._expected = nbytes
        if not self._stored.copies(nbytes):
            what = f"a file of {nbytes:,} bytes, and the store copies no more than 5 GiB at once"
            hint = "Make shards smaller, with `max_shard_size=`, or write a single file."
            raise OutputFailed(what, kind="too-large-to-copy", path=self.path, hint=hint, actual=nbytes)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """
        Append bytes.

        Raises:
            OutputFailed: The store does not take them.
        """
        self.fill(self.leave(len(data)), memoryview(data))
        self.filled(len(data))

    def flush(self) -> None:
        """Bytes are handed on as they come."""

    def leave(self, nbytes: int) -> int:
        """Return the offset of the next bytes, and count them as appended."""
        start, self.position = self.position, self.position + nbytes
        return start

    def fill(self, position: int, view: memoryview) -> None:  # noqa: ARG002 - in order alone
        """Append the bytes for which ``leave`` was called; they come in order."""
        self._begun().write(view)

    def filled(self, nbytes: int) -> None:  # noqa: ARG002 - all of them were
        """Report the progress."""
        if self._progress is not None:
            self._progress(self.position, self._expected)

    @property
    def nbytes(self) -> int:
        """Size so far."""
        return self.position

    def reading_path(self, name: str = "") -> Remote:  # noqa: ARG002 - it has one file
        """Return the address of what was written, for reading back after ``sync``."""
        return self._stored.address_of(self._key)

    def sync(self) -> None:
        """Complete the object under the name that it is written under."""
        if not self._begun().is_there:
            self._begun().end()

    def publish(self) -> None:
        """Complete the object, and keep it."""
        self.sync()
        self._upload = None

    def close(self) -> None:
        """Remove what was written, unless it was published."""
        upload, self._upload = self._upload, None
        if upload is not None:
            upload.give_up()

    def _begun(self) -> Upload:
        if self._upload is None:
            self._upload = Upload(self._stored, self._key, self._expected)
        return self._upload


class RemoteOutput(RemoteObject):
    """One object being written. Used in a ``with`` block as ``Output`` is, with its errors."""

    def __init__(self, address: Remote, *, force: bool = False, progress: Progress | None = None) -> None:
        stored = Stored(address)
        self._own = stored.key
        self._force = force
        super().__init__(stored, address.shown, temporary(stored.key), progress)
        self._refuse_what_is_there()

    def file(self, name: str) -> RemoteOutput:  # noqa: ARG002 - it has one file
        """Return itself: it has one file."""
        return self

    def reserve(self, nbytes: int) -> None:
        """Set the expected size; if the store cannot copy that, the final name is written under at once."""
        self._expected = nbytes
        if not self._stored.copies(nbytes):
            self._key = self._own

    def sync(self) -> None:
        """Complete the object, so that it can be read back."""
        if self._key == self._own and not self._begun().is_there:
            self._refuse_what_is_there()
        super().sync()

    def publish(self) -> None:
        """Give the object its name, in one step."""
        self.sync()
        if self._key != self._own:
            self._refuse_what_is_there()
            self._stored.copy(self._key, self._own, force=self._force)
            with suppress(OutputFailed):  # the result is there; what stays has a name that says what it is
                self._stored.delete(self._key)
        self._upload = None

    def _refuse_what_is_there(self) -> None:
        if not self._force and self._stored.has(self._own):
            raise exists(self.path)


class RemoteFolderOutput(Closing):
    """One prefix being written to. Used in a ``with`` block as ``Output`` is, with its errors."""

    notes = ()
    replaced = ()

    def __init__(self, address: Remote, *, progress: Progress | None = None) -> None:
        self.path = f"{address.shown.rstrip('/')}/"
        self._stored = Stored(address.elsewhere(f"{address.rstrip('/')}/"))
        self._own = self._stored.key
        self._temporary = f"{temporary(self._own.rstrip('/'))}/"
        self._progress = progress
        self._expected = 0
        self._files: dict[str, RemoteObject] = {}
        self._refuse_what_is_there()

    def reserve(self, nbytes: int) -> None:
        """Set the size of all files together."""
        self._expected = nbytes

    def file(self, name: str) -> RemoteObject:
        """Return a file to be written; it is in the folder once that is published."""
        before = sum(one.position for one in self._files.values())

        def progress(written: int, _: int) -> None:
            if self._progress is not None:
                self._progress(before + written, self._expected)

        made = self._files[name] = RemoteObject(self._stored, self.path + name, self._temporary + name, progress)
        return made

    def elsewhere(self, name: str, nbytes: int) -> Place:
        """Return where another process writes a file of ``nbytes`` bytes; they count as written from now on."""
        made = self._files[name] = RemoteObject(self._stored, self.path + name, self._temporary + name, None)
        made.position = nbytes
        return Place(self.reading_path(name), self.path + name)

    def reading_path(self, name: str = "") -> Remote:
        """Return the address of the folder, or of a file in it, while it is written, for reading back."""
        return self._stored.address_of(self._temporary + name)

    def publish(self) -> None:
        """Give the files their names, the last one last; if one is taken meanwhile, remove the names already given."""
        self._refuse_what_is_there()
        *others, last = self._files
        done: list[str] = []
        try:
            # For one of gigabytes, a store takes as long as for a hundred.
            with ThreadPoolExecutor(_COPIES_AT_ONCE) as pool:
                try:
                    for copied in [pool.submit(self._name, name, done) for name in others]:
                        copied.result()
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise
            self._name(last, done)
        except BaseException:
            self._delete(self._own + name for name in reversed(done))
            raise

    def _name(self, name: str, done: list[str]) -> None:
        self._stored.copy(self._temporary + name, self._own + name, force=False)
        done.append(name)

    def close(self) -> None:
        """Delete the objects that have a temporary name."""
        names, self._files = list(self._files), {}
        self._delete(self._temporary + name for name in names)

    def _delete(self, keys: Iterator[str]) -> None:
        left = list(keys)
        try:
            self._stored.delete(*left)
        except OutputFailed:  # some stores stop at one that was never written
            for key in left:
                with suppress(OutputFailed):
                    self._stored.delete(key)

    def _refuse_what_is_there(self) -> None:
        if not self._stored.is_empty(self._own):
            raise OutputExists(
                "there are objects already, and objects of another checkpoint are not replaced one by one",
                path=self.path,
                hint="Choose another prefix, or delete them first.",
            )
