"""Questions about paths: what is there, and what it is called."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

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
