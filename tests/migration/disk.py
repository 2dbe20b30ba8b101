"""
A disk under what writes: the log of what it was asked to do, from which all that a stop may leave of it is made.

When the power fails, what was not synced may be there or not, block by block, and names that were not synced may be
there or not, in the order in which they were given. A block of which some write is kept and a later one is not has what
stood in it in between.
"""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ckptool import system

FOLDER = -1
"""Stands for the folder where files have their numbers."""
Files = dict[str, bytes]
"""What is in a folder, by name."""


class Entry(NamedTuple):
    """One thing that a disk was asked to do: ``write``, ``truncate``, ``sync``, ``name``, ``rename`` or ``unname``."""

    what: str
    file: int
    """Its number, which it has whatever its name."""
    offset: int = 0
    """Of a sync: how many entries of the log it covers."""
    data: bytes = b""
    name: str = ""
    old: str = ""
    """Of a rename: the name before."""

    def blocks(self, size: int) -> Iterator[Entry]:
        """Yield a write block by block."""
        if self.what != "write":
            yield self
        start = 0
        while start < len(self.data):
            stop = start + size - (self.offset + start) % size
            yield self._replace(offset=self.offset + start, data=self.data[start:stop])
            start = stop


class Disk:
    """``os`` as what writes sees it, and the log of what it was asked to do; subclasses do more in some calls."""

    def __init__(self) -> None:
        self.log: list[Entry] = []
        self._real_open_new, self._real_write_at = system.open_new, system.write_at

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _note(self, what: str, fd: int, offset: int, data: bytes = b"") -> None:
        status = os.fstat(fd)
        self.log.append(Entry(what, FOLDER if stat.S_ISDIR(status.st_mode) else status.st_ino, offset, data))

    def _name(self, path: str, what: str = "name", old: str = "") -> None:
        self.log.append(Entry(what, os.stat(path).st_ino, name=Path(path).name, old=old))  # noqa: PTH116

    def write(self, fd: int, data: Any) -> int:
        position = os.lseek(fd, 0, os.SEEK_CUR)
        count = os.write(fd, data)
        self._note("write", fd, position, bytes(data[:count]))
        return count

    def pwrite(self, fd: int, data: Any, position: int) -> int:
        count = os.pwrite(fd, data, position)
        self._note("write", fd, position, bytes(data[:count]))
        return count

    def ftruncate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)
        self._note("truncate", fd, nbytes)

    def fsync(self, fd: int) -> None:
        before = len(self.log)  # what other threads write from now on, it may miss
        os.fsync(fd)
        self._note("sync", fd, before)

    def link(self, src: str, dst: str, **named: Any) -> None:
        os.link(src, dst, **named)
        self._name(dst)

    def rename(self, src: str, dst: str) -> None:
        os.rename(src, dst)  # noqa: PTH104
        self._name(dst, "rename", Path(src).name)

    def replace(self, src: str, dst: str) -> None:
        os.replace(src, dst)  # noqa: PTH105
        self._name(dst, "rename", Path(src).name)

    def unlink(self, path: str) -> None:
        self._name(path, "unname")
        os.unlink(path)  # noqa: PTH108

    def open_new(self, path: str, mode: int) -> int:
        fd = self._real_open_new(path, mode)
        self._name(path)
        return fd

    def write_at(self, fd: int, data: Any, offset: int) -> None:
        self._real_write_at(fd, data, offset)
        self._note("write", fd, offset, bytes(data))

    def open(self, path: str, flags: int, *mode: int, **named: Any) -> int:
        fd = os.open(path, flags, *mode, **named)
        if flags & os.O_CREAT:
            self._name(path)
        return fd


class State:
    """What a disk holds: the number that each name leads to, and what is in the file of each number."""

    def __init__(self, names: dict[str, int], files: dict[int, bytes]) -> None:
        self.names = dict(names)
        self.files = {number: bytearray(data) for number, data in files.items()}

    @property
    def content(self) -> Files:
        """What is in the folder."""
        return {name: bytes(self.files.get(number, b"")) for name, number in self.names.items()}

    def after(self, *entries: Entry) -> State:
        """Return what it holds when it has done more."""
        found = State(self.names, self.files)  # type: ignore[arg-type]
        for entry in entries:
            found.do(entry)
        return found

    def do(self, entry: Entry) -> None:
        """Do one thing more."""
        file = self.files.setdefault(entry.file, bytearray()) if entry.what in ("write", "truncate") else bytearray()
        if entry.what == "write":
            file.extend(bytes(max(0, entry.offset - len(file))))
            file[entry.offset : entry.offset + len(entry.data)] = entry.data
        elif entry.what == "truncate":
            file[:] = file[: entry.offset].ljust(entry.offset, b"\0")
        elif entry.what in ("name", "rename"):
            self.names[entry.name] = entry.file
            self.names.pop(entry.old, None)
        elif entry.what == "unname":
            self.names.pop(entry.name, None)


def after_power_loss(log: list[Entry], start: State, dice: random.Random, choice: str, block: int) -> Files:
    """Return the files that a disk may have that was asked for no more than this, and kept all, some or none of it."""
    synced = {entry.file: entry.offset for entry in log if entry.what == "sync"}
    namings = [index for index, entry in enumerate(log) if entry.what in ("name", "rename", "unname")]
    certain = sum(index < synced.get(FOLDER, 0) for index in namings)
    kept = {"none": certain, "all": len(namings)}.get(choice, dice.randint(certain, len(namings)))
    state = start.after(*(log[index] for index in namings[:kept]))
    for index, entry in enumerate(log):
        if entry.what in ("write", "truncate"):
            is_sure = choice == "all" or index < synced.get(entry.file, 0)
            for part in [entry] if is_sure else entry.blocks(block):
                if is_sure or (choice == "some" and dice.random() < 0.5):
                    state.do(part)
    return state.content
