"""
Paths and addresses: what is there, what it probably is, and what to call it in messages, in commands and as a copy.

What is said of an address leaves out what is secret in it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Final

import ckptool.system as system

TORCH_SUFFIXES = (".pth", ".pt", ".bin", ".ckpt", ".th", ".pkl")
"""File suffixes of torch checkpoints."""

_SUFFIXES = (*TORCH_SUFFIXES, ".safetensors", ".t7", ".tar")

INDEX: Final = ".index.json"
_LASTS: Final = 2.0
"""Seconds that a listing is good for: by then a change shows in the time of the directory, however coarse that is."""

# fmt: off
UNTOLD: Final = frozenset((
    ".git", ".hg", ".svn", ".bzr", ".venv", ".tox", ".nox", ".npm", ".cargo", ".conda", ".mypy_cache", ".pytest_cache",
    ".ruff_cache",
))
# fmt: on
"""Folders of version control and of tools, which are not searched for checkpoints."""
_MOST_NAMES: Final = 1000
_NEAR: Final = 0.8
_PACKED: Final = (".gz", ".bz2", ".xz", ".lzma", ".z", ".zst")


def is_likely(name: str) -> bool:
    """Say whether a file of this name is probably a checkpoint."""
    return name.lower().endswith(_SUFFIXES)


def is_likely_packed(name: str) -> bool:
    """Say whether a file of this name is probably a checkpoint, or one that was compressed."""
    stem, suffix = os.path.splitext(name)
    return is_likely(stem if suffix.lower() in _PACKED else name)


def near_to(path: str) -> str | None:
    """Return the path that was probably meant by one that is not there: of a file in the same folder; or None."""
    from difflib import get_close_matches  # most paths are there

    folder, name = os.path.split(path)
    names = directory_entries(folder or os.curdir)[:_MOST_NAMES]
    near = sorted((one for one in names if name and one.startswith(f"{name}.")), key=len)
    near = near or get_close_matches(name, names, n=1, cutoff=_NEAR)
    return os.path.join(folder, near[0]) if near else None


def is_below(root: str, path: str) -> bool:
    """Say whether a path, its links followed, is inside a folder, and in none of its folders that are left out."""
    inside = os.path.relpath(os.path.realpath(path), os.path.realpath(root)).split(os.sep)
    return os.pardir not in inside and UNTOLD.isdisjoint(inside)


def directory_entries(path: str, *, folders: bool = False) -> Sequence[str]:
    """
    Return the names of the regular files in a directory, or of its folders, sorted; none if it cannot be listed.

    Of thousands of files that are opened one after the other, each asks: what was listed lasts for two seconds, unless
    the directory has changed since, or a moment before.
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
    """Return what a file begins with; no bytes where it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as stream:
            return stream.read(most_nbytes)
    except OSError:
        return b""


def exists(path: str) -> bool:
    """Say whether anything has this path."""
    return os.path.lexists(path)


def is_same_file(one: str, other: str) -> bool:
    """Say whether two paths lead to one file that is there."""
    try:
        return os.path.samefile(one, other)
    except (OSError, ValueError):
        return False


def is_far(path: str) -> bool:
    """Say whether this is the address of something that is read, or written to, far away."""
    if "://" not in path:
        return False
    from ckptool.sources.address import is_address

    return is_address(path)


def is_relative(path: str) -> bool:
    """Say whether a path starts from the folder that a process is in."""
    return not (is_far(path) or os.path.isabs(path))


def is_folder(path: str) -> bool:
    """Say whether a path leads to a folder, or an address is that of one."""
    return path.endswith("/") if is_far(path) else os.path.isdir(path)


def below(folder: str, name: str) -> str:
    """Return the path of something in a folder; of an address, reached in the same way."""
    path = os.path.join(folder, name)
    if not is_far(folder):
        return path
    from ckptool.sources.address import as_remote

    return as_remote(folder).elsewhere(path)


def shown_path(path: str | os.PathLike[str]) -> str:
    """Return what to call a file in messages: its path; of an address, of any scheme, what is not secret in it."""
    text = os.fspath(path)
    if "://" not in text:
        return text
    from ckptool.sources.address import as_remote

    return as_remote(text).shown


def local_name(path: str) -> str:
    """Return what a copy of a file would be called here: its path; of an address, the name at its end."""
    shown = shown_path(path)
    return shown.rpartition("/")[2] if "://" in shown else path


def command_line(path: str, verb: str, *words: str, **options: str | bool | Sequence[str]) -> str:
    """
    Return a command line for the shell of this system.

    ``options`` are those of the verb, each value of a sequence one option; what is false or empty is left out.
    ``words`` follow them as they are.
    """
    shown = f"./{path}" if path.startswith("-") else shown_path(path)  # or it would be taken for an option
    return system.command_line("ckptool", verb, shown, *_spelled(options), *words)


def _spelled(options: Mapping[str, str | bool | Sequence[str]]) -> Iterator[str]:
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            yield flag
        elif value:
            for one in (value,) if isinstance(value, str) else value:
                yield from (flag, one)
