"""
Refuse a file with a journal beside it: it is being edited in place, or was when the process ended.

``.NAME.ckptool-undo`` holds what is needed to make the file what it was. Until it is gone, nobody reads the file: it
may be the old one, the new one, or neither.
"""

from __future__ import annotations

import os
from typing import Final

from ckptool.errors import UnfinishedEdit

_END: Final = ".ckptool-undo"
_LONGEST: Final = 255 - len(".new")
"""Bytes in the name of a file, and room for what a journal is called before it is complete."""


def journal_path(path: str) -> str:
    """Return the path of the journal that a file has while it is edited in place."""
    folder, name = os.path.split(path)
    return os.path.join(folder, journal_name(name))


def journal_name(name: str) -> str:
    """Return the name of the journal of a file in the same folder."""
    found = f".{name}{_END}"
    if len(found) <= _LONGEST // 4 or len(os.fsencode(found)) <= _LONGEST:  # a character has at most four bytes
        return found
    from hashlib import sha256  # few names are so long

    return f".{sha256(os.fsencode(name)).hexdigest()}{_END}"


def refuse_unfinished(path: str, folder: int | None = None) -> None:
    """
    Raise UnfinishedEdit if there is a journal beside a file; ``path`` is a name where ``folder`` is a descriptor.

    One question to the system, for files are opened by the thousand.
    """
    there = journal_path(path)
    is_there = os.access(there, os.F_OK) if folder is None else os.access(there, os.F_OK, dir_fd=folder)
    if is_there:
        raise unfinished(path)


def explain_link(path: str) -> None:
    """Raise UnfinishedEdit if a path is a link to a file with a journal: asked of what could not be read."""
    real = os.path.realpath(path)
    if real != path:
        refuse_unfinished(real)


def unfinished(path: str) -> UnfinishedEdit:
    """Return the error for a file that has a journal."""
    from shlex import join  # few files have one

    return UnfinishedEdit(
        "it is being edited in place, or was when the process ended: it may be neither the old file nor the new one",
        path=path,
        hint="Wait if it is being edited; if nothing edits it any more, make it what it was before.",
        command=join(("ckptool", "recover", "--", path) if path.startswith("-") else ("ckptool", "recover", path)),
    )
