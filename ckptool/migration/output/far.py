"""
Objects in buckets of stores as outputs: they get their name when they are complete and have been read back.

How an object is written is ``sources.remote.upload``'s; here is when. A folder is a prefix: its files are written under
a temporary one, and get their names many at once; the last of them makes the others a checkpoint.

Files and folders that are being written and have a temporary name, and those that killed processes left.

The writer holds a lock on its part: a process of another host or container has a number that means nothing here.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from typing import Final

from ckptool.closing import Closing
from ckptool.errors import OutputExists, OutputFailed
from ckptool.migration.output.sink import Place
from ckptool.sources.remote.address import Remote
from ckptool.sources.remote.upload import Stored, Upload, exists, fits_copy, temporary

Progress = Callable[[int, int], None]

_COPIES_AT_ONCE: Final = 64


class _Object(Closing):
    """An object being written under one name, which may be a temporary one."""

    takes_any_order = False
    other_names = 0

    def __init__(self, stored: Stored, shown: str, key: str, progress: Progress | None) -> None:
        self.path = shown
        self.position = 0
        self._stored = stored
        self._key = key
        self._progress = progress
        self._expected = 0
        self._upload: Upload | None = None

    def reserve(self, nbytes: int) -> None:
        """
        Say how large it will be.

        Raises:
            OutputFailed: The store cannot give so large an object another name.
        """
        self._expected = nbytes
        if not fits_copy(self._stored, nbytes):
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
        """Return where the next bytes are."""
        start, self.position = self.position, self.position + nbytes
        return start

    def fill(self, position: int, view: memoryview) -> None:  # noqa: ARG002 - in order alone
        """Append bytes that were left out."""
        self._begun().write(view)

    def filled(self, nbytes: int) -> None:  # noqa: ARG002 - all of them were
        """Say how far it is."""
        if self._progress is not None:
            self._progress(self.position, self._expected)

    @property
    def nbytes(self) -> int:
        """Size so far."""
        return self.position

    def reading_path(self) -> Remote:
        """Return the address of what was written, for reading back after ``sync``."""
        return self._stored.address_of(self._key)

    def sync(self) -> None:
        """Let the object appear under the name that it is written under."""
        if not self._begun().is_there:
            self._begun().end()

    def publish(self) -> None:
        """It has its name."""
        self.sync()
        self._upload = None

    def close(self) -> None:
        """Leave nothing of it, unless it was published."""
        upload, self._upload = self._upload, None
        if upload is not None:
            upload.give_up()

    def _begun(self) -> Upload:
        if self._upload is None:
            self._upload = Upload(self._stored, self._key, self._expected)
        return self._upload


class FarOutput(_Object):
    """One object being written. Used in a ``with`` block; without ``publish`` it leaves nothing."""

    def __init__(self, address: Remote, *, force: bool = False, progress: Progress | None = None) -> None:
        stored = Stored(address)
        self._own = stored.key
        self._force = force
        super().__init__(stored, address.shown, temporary(stored.key), progress)
        self._refuse_what_is_there()

    def reserve(self, nbytes: int) -> None:
        """Say how large it will be: whether the store can copy it then."""
        self._expected = nbytes
        if not fits_copy(self._stored, nbytes):
            self._key = self._own

    def sync(self) -> None:
        """
        Let the object appear where it can be read back.

        Raises:
            OutputExists: It has its own name already, and something took that in the meantime.
            OutputFailed: The store does not have all of it.
        """
        if self._key == self._own and not self._begun().is_there:
            self._refuse_what_is_there()
        super().sync()

    def publish(self) -> None:
        """
        Give the object its name, in one step.

        Raises:
            OutputExists: Something took the name in the meantime.
            OutputFailed: The store refused.
        """
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


def written_at(place: Place, progress: Progress | None) -> _Object:
    """Return an object of a folder that another process writes."""
    stored = Stored(Remote(place.path, **(place.reached or {})))
    return _Object(stored, place.shown, stored.key, progress)


class FarFolder(Closing):
    """One prefix being written to. Used in a ``with`` block; without ``publish`` it leaves nothing."""

    def __init__(self, address: Remote, *, progress: Progress | None = None) -> None:
        self.path = f"{address.shown.rstrip('/')}/"
        self.replaced: list[str] = []
        self._stored = Stored(address.elsewhere(f"{address.rstrip('/')}/"))
        self._own = self._stored.key
        self._temporary = f"{temporary(self._own.rstrip('/'))}/"
        self._progress = progress
        self._expected = 0
        self._files: dict[str, _Object] = {}
        self._refuse_what_is_there()

    def reserve(self, nbytes: int) -> None:
        """Say how large all files will be together."""
        self._expected = nbytes

    def file(self, name: str) -> _Object:
        """Return a file to be written; it is in the folder once that is published."""
        before = sum(one.position for one in self._files.values())

        def progress(written: int, _: int) -> None:
            if self._progress is not None:
                self._progress(before + written, self._expected)

        made = self._files[name] = _Object(self._stored, self.path + name, self._temporary + name, progress)
        return made

    def elsewhere(self, name: str, nbytes: int) -> Place:
        """Return where another process writes a file of so many bytes; they count as written from now on."""
        made = self._files[name] = _Object(self._stored, self.path + name, self._temporary + name, None)
        made.position = nbytes
        address = self.path_of(name)
        return Place(str(address), self.path + name, address.reached)

    def path_of(self, name: str) -> Remote:
        """Return the address of a file while the folder is written, for reading back; of the folder without a name."""
        return self._stored.address_of(self._temporary + name)

    def publish(self) -> None:
        """
        Give the files their names, the last of them last.

        Raises:
            OutputExists: Something took a name in the meantime. What has its name already is deleted again.
            OutputFailed: The store refused.
        """
        self._refuse_what_is_there()
        *others, last = self._files
        done: list[str] = []
        try:
            self._name_at_once(others, done)
            self._name(last, done)
        except BaseException:
            self._delete(self._own + name for name in reversed(done))
            raise

    def _name_at_once(self, names: list[str], done: list[str]) -> None:
        """Give files their names, many at once: for one of gigabytes, a store takes as long as for a hundred."""
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(_COPIES_AT_ONCE) as pool:
            try:
                for copied in [pool.submit(self._name, name, done) for name in names]:
                    copied.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _name(self, name: str, done: list[str]) -> None:
        self._stored.copy(self._temporary + name, self._own + name, force=False)
        done.append(name)

    def close(self) -> None:
        """Delete what has a temporary name."""
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


try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_MARK = ".ckptool-"
_END = ".part"
_OLD_END = ".old"
"""Of a folder that was moved aside for a new one."""
_NAME_CHARACTERS = 48
"""How much of the output's name the temporary one repeats: it must not become too long where that is not."""
_MOST_TRIES = 10
_PID = re.compile(r"[0-9]{1,9}")
_ABANDONED_SECONDS = 86_400
"""After so long without a write, a part is nobody's, on file systems that have no locks."""


def new_name(path: str, end: str = _END) -> str:
    """Return a temporary path for an output, in its folder."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f"{_head(name)}{os.getpid()}-{os.urandom(4).hex()}{end}")


def name_aside(path: str) -> str:
    """Return a path beside a folder, for it to be moved to while another takes its name."""
    return new_name(path, _OLD_END)


def hold(fd: int) -> None:
    """Lock a file until it is closed, so that no other process takes it for an orphan."""
    if fcntl is not None:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def remove_orphans(folder: str, name: str) -> None:
    """
    Remove what killed processes left of this output: parts whose process is gone, and that nobody holds.

    A folder that was moved aside gets its name back, where nothing has it.
    """
    head = _head(name)
    try:
        found = [entry for entry in os.listdir(folder) if entry.startswith(head) and entry.endswith((_END, _OLD_END))]
    except OSError:
        return
    for entry in found:
        pid = entry[len(head) :].partition("-")[0]
        if _PID.fullmatch(pid) and not _is_alive(int(pid)):
            with suppress(OSError):  # not ours to remove
                _remove_unheld(os.path.join(folder, entry), os.path.join(folder, name))


def remove_folder(path: str) -> None:
    """
    Remove a folder and the files in it; folders in it are none of ours, and stay.

    Tried again where files have come meanwhile: a process elsewhere may not have heard yet that it is over.
    """
    for _ in range(_MOST_TRIES):
        with os.scandir(path) as entries:
            remove_others(path, [one.name for one in entries if one.is_dir(follow_symlinks=False)])
        with suppress(OSError):
            os.rmdir(path)
            return
    os.rmdir(path)


def remove_others(folder: str, names: Collection[str]) -> None:
    """Remove the files in a folder that have other names."""
    with os.scandir(folder) as entries:
        others = [one.path for one in entries if one.name not in names]
    for one in others:
        with suppress(FileNotFoundError):
            os.unlink(one)


def _head(name: str) -> str:
    return f".{name[:_NAME_CHARACTERS]}{_MARK}"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        return True
    else:
        return True


def _remove_unheld(path: str, output: str) -> None:
    is_folder = stat.S_ISDIR(os.lstat(path).st_mode)
    access = os.O_RDONLY if is_folder else os.O_RDWR
    fd = os.open(path, access | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    try:
        status = os.fstat(fd)
        if not _is_unheld(fd, status.st_mtime):
            return
        if stat.S_ISREG(status.st_mode):
            os.unlink(path)
        elif stat.S_ISDIR(status.st_mode):
            _remove_or_restore(path, output)
    finally:
        os.close(fd)


def _remove_or_restore(path: str, output: str) -> None:
    """Remove a folder; one that was moved aside gets its name back where nothing has it, or stays if it is unknown."""
    if not path.endswith(_OLD_END):
        remove_folder(path)
    elif len(os.path.basename(output)) <= _NAME_CHARACTERS:
        if os.path.lexists(output):
            remove_folder(path)
        else:
            os.rename(path, output)


def _is_unheld(fd: int, written: float) -> bool:
    if fcntl is not None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            pass
        else:
            return True
    return time.time() - written > _ABANDONED_SECONDS
