"""
Files and folders that are being written under a temporary name, and those that killed processes left.

The writer locks its part: the id of a process on another host or in another container means nothing here.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import NamedTuple

import ckptool.system as system

_MARK = ".ckptool-"
_END = ".part"
OLD_END = ".old"
"""Suffix of what was moved aside for a new version: folders, and files that the system cannot replace while open."""
_NAME_CHARACTERS = 48
"""Characters of the output's name in the temporary one, which must not become too long if the name is not."""
_MOST_TRIES = 10
_PID = re.compile(r"[0-9]{1,9}")
_ABANDONED_SECONDS = 86_400
"""On file systems without locks, a part that was not written to for so long is abandoned."""


class Place(NamedTuple):
    """The temporary place of a file of a folder: plain data, for any process."""

    path: str
    """A path, or an address with how it is reached."""
    shown: str
    """The path to show in errors."""


def new_name(path: str, end: str = _END) -> str:
    """Return a temporary path for an output, in its folder."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f"{_head(name)}{os.getpid()}-{os.urandom(4).hex()}{end}")


def remove_orphans(folder: str, name: str) -> None:
    """
    Remove what killed processes left of this output: parts whose process has ended and that nobody holds a lock on.

    What was moved aside gets its name back, if that is free.
    """
    head = _head(name)
    try:
        found = [entry for entry in os.listdir(folder) if entry.startswith(head) and entry.endswith((_END, OLD_END))]
    except OSError:
        return
    for entry in found:
        pid = entry[len(head) :].partition("-")[0]
        if _PID.fullmatch(pid) and not system.is_alive(int(pid)):
            with suppress(OSError):  # not ours to remove
                _remove_unheld(os.path.join(folder, entry), os.path.join(folder, name))


def remove_folder(path: str) -> None:
    """
    Remove a folder and the files in it; folders in it are not ours, and stay.

    It tries again if files have appeared meanwhile: another process may not know yet that the work is over.
    """
    for _ in range(_MOST_TRIES):
        with os.scandir(path) as entries:
            remove_others(path, [one.name for one in entries if one.is_dir(follow_symlinks=False)])
        with suppress(OSError):
            os.rmdir(path)
            return
    os.rmdir(path)


def remove_others(folder: str, names: Collection[str]) -> None:
    """Remove the files of a folder that are not in ``names``."""
    with os.scandir(folder) as entries:
        others = [one.path for one in entries if one.name not in names]
    for one in others:
        with suppress(FileNotFoundError):
            os.unlink(one)


def _head(name: str) -> str:
    return f".{name[:_NAME_CHARACTERS]}{_MARK}"


def _remove_unheld(path: str, output: str) -> None:
    fd = system.open_at(None, path) if stat.S_ISDIR(os.lstat(path).st_mode) else system.open_writing(path)
    try:
        status = os.fstat(fd)
        is_ours = system.lock(fd)
        if is_ours is False or (is_ours is None and time.time() - status.st_mtime < _ABANDONED_SECONDS):
            return
        if stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode):
            _remove_or_restore(path, output, os.unlink if stat.S_ISREG(status.st_mode) else remove_folder)
    finally:
        os.close(fd)


def _remove_or_restore(path: str, output: str, remove: Callable[[str], None]) -> None:
    """Remove a part; what was moved aside gets its name back if that is free, or stays if it is not known."""
    if not path.endswith(OLD_END):
        remove(path)
    elif len(os.path.basename(output)) <= _NAME_CHARACTERS:
        if os.path.lexists(output):
            remove(path)
        else:
            system.rename(path, output)
