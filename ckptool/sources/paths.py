"""
Paths and addresses: what is there, suffixes of checkpoints, names in messages and commands.

Names of addresses leave out what may be secret in them.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import ckptool.system as system
from ckptool.sources import HUB, STORES, WEB

_REMOTE: Final = re.compile(rf"({'|'.join((*WEB, *STORES, HUB))})://", re.IGNORECASE)
TORCH_SUFFIXES = (".pth", ".pt", ".bin", ".ckpt", ".th", ".pkl")
"""File suffixes of torch checkpoints."""

ONLY_CHECKPOINTS: Final = (".pth", ".pt", ".ckpt", ".safetensors", ".pt2", ".nemo")
"""Suffixes that only checkpoints have: a file of unknown content with one is a damaged checkpoint."""
_SUFFIXES: Final = (*ONLY_CHECKPOINTS, *TORCH_SUFFIXES, ".t7", ".tar")
"""Suffixes by which files are taken for checkpoints in a folder or an archive."""

INDEX: Final = ".index.json"
MEGATRON: Final = "latest_checkpointed_iteration.txt"
POINTERS: Final = ("latest", "latest_universal", MEGATRON)
"""Files that name the folder of the last save, and are written after it."""
_LASTS: Final = 2.0
"""Seconds that a listing is kept; a later change shows in the time of the directory, even where that is coarse."""

# fmt: off
IGNORED_FOLDERS: Final = frozenset((
    ".git", ".hg", ".svn", ".bzr", ".venv", ".tox", ".nox", ".npm", ".cargo", ".conda", ".mypy_cache", ".pytest_cache",
    ".ruff_cache",
))
# fmt: on
"""Folders of version control and of tools, which are not searched for checkpoints."""
_MOST_NAMES: Final = 1000
_NEAR: Final = 0.8
_PACKED: Final = (".gz", ".bz2", ".xz", ".lzma", ".z", ".zst")


def is_likely(name: str) -> bool:
    """Return whether a file of this name is probably a checkpoint."""
    return name.lower().endswith(_SUFFIXES)


def is_likely_packed(name: str) -> bool:
    """Return whether a file of this name is probably a checkpoint, or one that was compressed."""
    stem, suffix = os.path.splitext(name)
    return is_likely(stem if suffix.lower() in _PACKED else name)


def near_to(path: str) -> str | None:
    """Return the path of a file in the same folder that a missing path probably means; None if none is similar."""
    from difflib import get_close_matches  # most paths exist

    folder, name = os.path.split(path)
    names = directory_entries(folder or os.curdir)[:_MOST_NAMES]
    near = sorted((one for one in names if name and one.startswith(f"{name}.")), key=len)
    near = near or get_close_matches(name, names, n=1, cutoff=_NEAR)
    return os.path.join(folder, near[0]) if near else None


def is_below(root: str, path: str) -> bool:
    """Return whether a path, its links followed, is in a folder, and in none of the ``IGNORED_FOLDERS`` in it."""
    inside = os.path.relpath(os.path.realpath(path), os.path.realpath(root)).split(os.sep)
    return os.pardir not in inside and IGNORED_FOLDERS.isdisjoint(inside)


def directory_entries(path: str, *, folders: bool = False) -> Sequence[str]:
    """
    Return the names of the regular files in a directory, or of its folders, sorted; none if it cannot be listed.

    Every file that is opened calls this, of a folder with thousands, so a listing is kept for two seconds, unless the
    directory has changed since, or just before.
    """
    try:
        status, now = os.stat(path), time.time()
        listed = _listed if now - status.st_mtime > _LASTS else _listed.__wrapped__
        return listed(os.path.abspath(path), folders, status.st_ino, status.st_mtime_ns, now // _LASTS)
    except OSError:
        return ()


@lru_cache(maxsize=4)
def _listed(path: str, folders: bool, *_identity: float) -> tuple[str, ...]:
    with os.scandir(path) as entries:
        return tuple(sorted(entry.name for entry in entries if (entry.is_dir() if folders else entry.is_file())))


def first_bytes(path: str, most_nbytes: int) -> bytes:
    """Return the first bytes of a file, up to ``most_nbytes``; no bytes if it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as stream:
            return stream.read(most_nbytes)
    except OSError:
        return b""


def file_of(path: str) -> str:
    """Return the path of the file that a member is in; of any other file its own, which may have colons in it."""
    return path if os.path.lexists(path) else path.partition("::")[0]


def is_same_file(one: str, other: str) -> bool:
    """Return whether two paths name the same existing file."""
    try:
        return os.path.samefile(one, other)
    except (OSError, ValueError):
        return False


def is_remote(path: str) -> bool:
    """Return whether this is the address of something remote that can be read, by its scheme."""
    return _REMOTE.match(path) is not None


def is_relative(path: str) -> bool:
    """Return whether a path is relative to the working directory."""
    return not (is_remote(path) or os.path.isabs(path))


def is_folder(path: str) -> bool:
    """Return whether a path names a folder, or an address ends with a slash."""
    return path.endswith("/") if is_remote(path) else os.path.isdir(path)


def below(folder: str, name: str) -> str:
    """Return the path of a name in a folder; for an address, an address with the same options."""
    path = os.path.join(folder, name)
    if not is_remote(folder):
        return path
    from ckptool.sources.address import as_remote

    return as_remote(folder).elsewhere(path)


def shown_path(path: str | os.PathLike[str]) -> str:
    """Return the name of a file for messages: its path; an address of any scheme without what may be secret."""
    text = os.fspath(path)
    if "://" not in text:
        return text
    from ckptool.sources.address import as_remote

    return as_remote(text).shown


def local_name(path: str) -> str:
    """Return the name for a local copy of a file: its path; for an address, the last part of it."""
    shown = shown_path(path)
    return shown.rpartition("/")[2] if "://" in shown else path


def command_line(path: str, verb: str, *words: str, **options: str | bool | Sequence[str]) -> str:
    """
    Return a command line for the shell of this system.

    ``options`` are those of the verb; a sequence gives the option once for each value, and false or empty ones are left
    out. ``words`` follow them as they are.
    """
    shown = f"./{path}" if path.startswith("-") else shown_path(path)  # or it would be taken for an option
    spelled: list[str] = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            spelled.append(flag)
        elif value:
            spelled += [part for one in ([value] if isinstance(value, str) else value) for part in (flag, one)]
    return system.command_line("ckptool", verb, shown, *spelled, *words)
