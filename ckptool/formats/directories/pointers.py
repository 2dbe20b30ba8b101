"""
Files of one line that name the folder of the last save: ``latest`` of DeepSpeed, and what other frameworks call it.

Any file may have such a name. So a pointer counts only if it leads to a checkpoint, or names a folder like those that
exist: then that one is missing, or was not finished.

In the cache of Hugging Face's hub, a file names the snapshot that the main branch of a repository is at:

    models--org--name/refs/main                    text: the commit
    models--org--name/snapshots/<commit>/…         links to ../../blobs/<digest>

https://huggingface.co/docs/huggingface_hub/guides/manage-cache
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Final

from ckptool.errors import Failure, FileUnavailable, MalformedFile
from ckptool.formats.filenames import MEGATRON, POINTERS
from ckptool.messages import some
from ckptool.sources.folder import FolderSource

_LONGEST: Final = 255
_NUMBER: Final = re.compile(r"[0-9]+")
_COMMIT: Final = re.compile(rb"[0-9a-f]{40}")
_MAIN: Final = "refs/main"
_MAIN_NBYTES: Final = 4096
_SNAPSHOTS: Final = "snapshots"


def named_by(folder: FolderSource, pointer: str) -> str | None:
    """Return the name of a folder that a file contains; None if there is no such file, or no such name in it."""
    if pointer not in folder.files:
        return None
    try:
        text = folder.content(pointer, _LONGEST).decode().strip()
    except (Failure, UnicodeDecodeError):
        return None
    if pointer == MEGATRON and text.isascii() and text.isdigit():
        return f"iter_{int(text):07}"
    return text if text not in ("", ".", "..") and not any(one in text for one in "/\\\0\n") else None


def followed(folder: FolderSource, candidates: Collection[str]) -> str | None:
    """
    Return the one of several folders that a pointer names; None if none does.

    Raises:
        FileUnavailable: It names one like these, which does not exist, or contains no checkpoint.
    """
    for pointer, name in _pointers(folder):
        if name in candidates:
            return name
        alike = [one for one in candidates if _NUMBER.sub("0", one) == _NUMBER.sub("0", name)]
        if alike:
            raise leads_nowhere(folder, pointer, name, alike)
    return None


def place(folder: FolderSource, pointer: str, saves: Sequence[str]) -> str:
    """
    Return the folder that a pointer names; ``saves`` are the folders that its writer saved into.

    Raises:
        FileUnavailable: There is no such folder.
        MalformedFile: It contains no name of a folder.
    """
    name = named_by(folder, pointer)
    if name is None:
        fact = f"{pointer!r} has no name of a folder beside it"
        raise MalformedFile(fact, kind="malformed-pointer", hint=f"Name one that is there: {some(saves)}")
    if name not in folder.folders:
        raise leads_nowhere(folder, pointer, name, saves)
    return name


def lost(folder: FolderSource) -> FileUnavailable | None:
    """Return the error for a folder without a checkpoint, and with a pointer to one; None if it has no pointer."""
    return next((leads_nowhere(folder, pointer, name, ()) for pointer, name in _pointers(folder)), None)


def _pointers(folder: FolderSource) -> Iterator[tuple[str, str]]:
    for pointer in POINTERS:
        name = named_by(folder, pointer)
        if name is not None:
            yield pointer, name


def leads_nowhere(folder: FolderSource, pointer: str, name: str, others: Collection[str]) -> FileUnavailable:
    """Return the error for a pointer that names a folder without a checkpoint."""
    gone = "there is no such folder" if name not in folder.folders else "there is no checkpoint in it"
    return FileUnavailable(
        f"{pointer!r} names {name!r}, and {gone}",
        kind="missing",
        hint=f"Name one that is there: {some(list(others))}" if others else "Saving was not finished, or it was moved.",
    )


def snapshot(folder: FolderSource) -> str | None:
    """Return the path of the snapshot of a repository's main branch, below the repository; None if it is not one."""
    if _SNAPSHOTS not in folder.folders or not folder.has(_MAIN):
        return None
    try:
        commit = folder.content(_MAIN, _MAIN_NBYTES).strip()
    except Failure:
        return None
    name = commit.decode("ascii", "replace")
    known = _COMMIT.fullmatch(commit) and name in folder.names(_SNAPSHOTS)[1]
    return f"{_SNAPSHOTS}/{name}" if known else None
