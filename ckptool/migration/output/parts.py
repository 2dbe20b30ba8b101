"""
Files and folders that are being written and have a temporary name, and those that killed processes left.

The writer holds a lock on its part: a process of another host or container has a number that means nothing here.
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
"""Of what was moved aside for a new one: folders, and files that the system cannot replace while they are open."""
_NAME_CHARACTERS = 48
"""How much of the output's name the temporary one repeats: it must not become too long where that is not."""
_MOST_TRIES = 10
_PID = re.compile(r"[0-9]{1,9}")
_ABANDONED_SECONDS = 86_400
"""After so long without a write, a part is nobody's, on file systems that have no locks."""


class Place(NamedTuple):
    """Where a file of a folder is written until that has its name: plain data, for any process."""

    path: str
    """Or an address, with how it is reached."""
    shown: str
    """What to call it."""


def new_name(path: str, end: str = _END) -> str:
    """Return a temporary path for an output, in its folder."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f"{_head(name)}{os.getpid()}-{os.urandom(4).hex()}{end}")


def remove_orphans(folder: str, name: str) -> None:
    """
    Remove what killed processes left of this output: parts whose process is gone, and that nobody holds.

    What was moved aside gets its name back, where nothing has it.
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
    """Remove what is left; what was moved aside gets its name back where nothing has it, or stays if it is unknown."""
    if not path.endswith(OLD_END):
        remove(path)
    elif len(os.path.basename(output)) <= _NAME_CHARACTERS:
        if os.path.lexists(output):
            remove(path)
        else:
            system.rename(path, output)
