"""
Say of a file with a journal beside it that it is being edited in place, or was when the process ended.

``.NAME.ckptool-undo`` holds what is needed to make the file what it was. Nobody reads it unless it is whole.
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


def refuse_edited(path: str, *states: str, fd: int | None = None, folder: int | None = None) -> None:
    """
    Raise UnfinishedEdit if a file, which may be open, has a journal and one of these states: see ``journal.State``.

    ``path`` is a name where ``folder`` is a descriptor. One question to the system: files are opened by the thousand.
    """
    if is_there(journal_path(path), folder):
        from ckptool.sources.journal import look  # few files have one

        if look(path, fd, folder).state in states:
            raise unfinished(path)


def is_there(path: str, folder: int | None = None) -> bool:
    """Say whether anything has a name, be it a link that leads nowhere."""
    try:
        os.lstat(path, dir_fd=folder)
    except OSError:
        return False
    return True


def unfinished(path: str) -> UnfinishedEdit:
    """Return the error for a file that has a journal."""
    from shlex import join  # few files have one

    return UnfinishedEdit(
        "it is being edited in place, or was when the process ended: it may be neither the old file nor the new one",
        path=path,
        hint="Wait if it is being edited; if nothing edits it any more, make it what it was before.",
        command=join(("ckptool", "recover", "--", path) if path.startswith("-") else ("ckptool", "recover", path)),
    )
