"""
Open the output for a target: a path or an address, of a file or of a folder.

Folders get their name only when they are complete:

1. Files are written into a temporary folder beside, ``.<name>.ckptool-<pid>-….part``, each as ``Output`` does it.
2. The folder gets its name by one rename. What had the name is moved aside by another just before,
   to ``.<name>.ckptool-<pid>-….old``, and is removed when the new one has the name and is on the disk.
3. It takes over the old folder's mode and, where the system allows, its owner and extended attributes.
4. A killed process leaves such folders, which the next run removes; one that was moved aside gets its name back if
   nothing has it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TypeAlias

import ckptool.system as system
from ckptool.closing import Closing
from ckptool.errors import OutputExists, OutputFailed
from ckptool.messages import counted, some
from ckptool.migration.output import (
    OLD_END,
    Output,
    Place,
    copy_attributes,
    failed,
    mode_there,
    new_name,
    real_path,
    refuse_full,
    remove_folder,
    remove_orphans,
    remove_others,
    sync_folder,
)
from ckptool.sources.paths import is_remote
from ckptool.sources.source import Source

if TYPE_CHECKING:
    from ckptool.migration.output.remote import RemoteFolderOutput, RemoteObject, RemoteOutput

SinkFile: TypeAlias = "Output | RemoteObject"
"""A file that is being written."""
SinkFolder: TypeAlias = "OutputFolder | RemoteFolderOutput"
"""A folder that is being written: its files here, or by other processes."""
Sink: TypeAlias = "Output | RemoteOutput | OutputFolder | RemoteFolderOutput"
"""An output: a single file, or a folder."""
_IN_THE_WAY: Final = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


def open_sink(
    target: str, *, is_folder: bool, force: bool, progress: Callable[[int, int], None] | None, mode: int
) -> Sink:
    """
    Return the output for a file or a folder.

    Raises:
        OutputExists: Something is there, and is not to be replaced; remote folders are never replaced.
        OutputFailed: It cannot be written to.
    """
    if not is_remote(target):
        if is_folder:
            return OutputFolder(target, force=force, progress=progress, mode=mode)
        return Output(target, force=force, progress=progress, mode=mode)
    from ckptool.migration.output.remote import RemoteFolderOutput, RemoteOutput  # few targets are remote
    from ckptool.sources.address import as_remote

    if is_folder:
        return RemoteFolderOutput(as_remote(target), progress=progress)
    return RemoteOutput(as_remote(target), force=force, progress=progress)


def open_place(place: Place, progress: Callable[[int, int], None] | None, mode: int) -> SinkFile:
    """Return the output for a file of another process's folder. Others may write the same file."""
    if not is_remote(place.path):
        return Output(place.path, force=True, progress=progress, shown=place.shown, mode=mode)
    from ckptool.migration.output.remote import written_at

    return written_at(place, progress)


def mode_of(source: Source) -> int:
    """Return the mode of files made from a source, which allows nobody more than each of its files does."""
    mode = 0o666
    for path, _ in source.versions():
        with suppress(OSError, ValueError):  # remote
            mode &= os.stat(path).st_mode
    return mode | stat.S_IRUSR  # to be read back


class OutputFolder(Closing):
    """One folder being written. Used in a ``with`` block as ``Output`` is, with its errors."""

    def __init__(
        self, path: str, *, force: bool = False, progress: Callable[[int, int], None] | None = None, mode: int = 0o666
    ) -> None:
        self._fd = -1
        self._temporary: str | None = None
        self.path = real_path(path)
        self._force = force
        self._progress = progress
        self._mode_of_files = mode
        self._expected = 0
        self._written = 0
        self._names: set[str] = set()
        self._beside = os.path.dirname(self.path)
        remove_orphans(self._beside, os.path.basename(self.path))
        self.replaced = self._refuse_what_is_there()
        """Names of the files in the folder that is to be replaced."""
        self._make()

    def reserve(self, nbytes: int) -> None:
        """Raise OutputFailed unless ``nbytes`` bytes will fit."""
        self._expected = nbytes
        refuse_full(self._fd, nbytes, self.path)

    def file(self, name: str) -> Output:
        """Return a file to be written; it is in the folder once it is published."""
        before = self._written

        def progress(written: int, _: int) -> None:
            if before + written <= self._written:  # a file before this one, which gets its name
                return
            self._written = before + written
            if self._progress is not None:
                self._progress(self._written, self._expected)

        self._names.add(name)
        return Output(
            self.reading_path(name), progress=progress, shown=os.path.join(self.path, name), mode=self._mode_of_files
        )

    def elsewhere(self, name: str, nbytes: int) -> Place:
        """Return where another process writes a file of ``nbytes`` bytes; they count as written from now on."""
        self._names.add(name)
        self._written += nbytes
        return Place(self.reading_path(name), os.path.join(self.path, name))

    @property
    def notes(self) -> tuple[str, ...]:
        """A note on the files of the replaced folder that are gone."""
        gone = [name for name in self.replaced if name not in self._names]
        text = f"the folder that was replaced had {counted(len(gone), 'other file')}, now removed: {some(gone)}"
        return (text,) if gone else ()

    def reading_path(self, name: str = "") -> str:
        """Return the path of the folder, or of a file in it, while it is written, for reading back."""
        return os.path.join(self._temporary or self.path, name)

    def publish(self) -> None:
        """Give the folder its name."""
        assert self._temporary is not None  # it has no other name yet
        if os.path.isdir(self.path):
            copy_attributes(self._fd, self.path)
        try:
            remove_others(self._temporary, self._names)  # left by processes that were killed as they wrote
            sync_folder(self._temporary)
            aside = self._take_name(self._temporary)
        except OSError as error:
            raise failed(error, self.path) from error
        self._temporary = None
        sync_folder(self._beside)
        for path in aside:
            with suppress(OSError):  # what cannot be removed has a name that says whose it is
                remove_folder(path)

    def close(self) -> None:
        """Remove the folder if it has no name yet."""
        fd, self._fd = self._fd, -1
        temporary, self._temporary = self._temporary, None
        if temporary is not None:
            with suppress(OSError):
                remove_folder(temporary)
        if fd >= 0:
            os.close(fd)  # it held the folder until now

    def __del__(self) -> None:
        with suppress(OSError):  # an interrupt may come before the block is entered
            self.close()

    def _refuse_what_is_there(self) -> list[str]:
        """Return the names of the files in a folder that may be replaced; empty if there is no folder."""
        mode = mode_there(self.path, self.path)
        if mode is None:
            return []
        if not stat.S_ISDIR(mode):
            what = "not a folder, and a folder is to be written"
            raise OutputFailed(what, kind="not-a-folder", path=self.path, hint="Choose another name.")
        try:
            with os.scandir(self.path) as entries:
                found = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
            is_current = os.path.samefile(self.path, os.curdir)
        except OSError as error:
            raise failed(error, self.path) from error
        if found and not self._force:
            raise self._exists()
        folders = sorted(name for name, is_folder in found.items() if is_folder)
        if folders or is_current or os.path.ismount(self.path):
            what = "it is the current folder" if is_current else "it is a file system of its own"
            what = f"it has {counted(len(folders), 'folder')} in it: {some(folders)}" if folders else what
            hint = "Write to a folder that is not there yet."
            what = f"a folder that is not replaced: {what}"
            raise OutputFailed(what, kind="not-replaced", path=self.path, hint=hint)
        return sorted(found)

    def _make(self) -> None:
        self._temporary = new_name(self.path)  # known before it exists: an interrupt leaves nothing
        try:
            os.mkdir(self._temporary)
            self._fd = system.open_at(None, self._temporary)
            system.lock(self._fd)
        except OSError as error:
            raise failed(error, self.path) from error

    def _take_name(self, temporary: str) -> list[str]:
        """Give the folder its name, and return where its predecessors were moved: others may take it meanwhile."""
        aside: list[str] = []
        try:
            while not self._is_renamed(temporary):
                with suppress(FileNotFoundError):  # others may take the name, or give it up, meanwhile
                    if not (self._force and stat.S_ISDIR(os.lstat(self.path).st_mode)):
                        raise self._exists()
                    place = new_name(self.path, OLD_END)
                    system.rename(self.path, place)
                    aside.append(place)
        except BaseException:
            if aside:
                with suppress(OSError):
                    system.rename(aside[-1], self.path)
            raise
        return aside

    def _is_renamed(self, temporary: str) -> bool:
        try:
            system.rename(temporary, self.path)  # in the place of an empty folder too
        except OSError as error:
            if error.errno not in _IN_THE_WAY:
                raise
            return False
        return True

    def _exists(self) -> OutputExists:
        return OutputExists(
            "exists already, and is not empty",
            path=self.path,
            hint="Choose another name, or replace the folder and all that is in it with `force=True`.",
        )
