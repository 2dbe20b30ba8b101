"""Errors for paths that cannot be opened as files: what is there instead."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from shlex import join, quote
from typing import Final

from ckptool.errors import FileUnavailable, reason_of
from ckptool.sources.paths import is_likely

_ADDRESS: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def unavailable(path: str, error: OSError) -> FileUnavailable:
    """Return the error for a path that the system does not open."""
    if error.errno == errno.ENOENT or _ADDRESS.fullmatch(path):
        return _missing(path)
    if error.errno in (errno.EACCES, errno.EPERM):
        if os.path.isdir(path):
            return FileUnavailable("a directory, not a file", kind="directory")
        return not_permitted(path)
    return FileUnavailable(f"cannot be opened: {reason_of(error)}", kind="unavailable")


def not_permitted(path: str) -> FileUnavailable:
    """Return the error for a path that may not be read: a file, a folder, or what is in one that may not be entered."""
    closed = next((one for one in _folders(path) if not os.access(one, os.X_OK)), None)
    if closed is not None and closed != path:
        fact, what = f"permission denied: you may not enter the folder {closed!r}", "that folder"
    elif os.path.isdir(path):
        closed, fact, what = path, "a folder that you may not list: permission denied", "the folder"
    else:
        command = join(("chmod", "u+r", "--", path))
        return FileUnavailable("permission denied", kind="permission", hint="Make it readable.", command=command)
    command = join(("chmod", "u+rx", "--", closed))
    return FileUnavailable(
        fact, kind="permission", hint=f"Make {what} one that you may list and enter.", command=command
    )


def _folders(path: str) -> Iterator[str]:
    """Yield the folders on the way to a path, and itself if it is one, as far as the system says of them."""
    folders = [path]
    while os.path.dirname(folders[-1]) not in ("", folders[-1]):
        folders.append(os.path.dirname(folders[-1]))
    yield from filter(os.path.isdir, reversed(folders))


def _missing(path: str) -> FileUnavailable:
    if path == "-":
        return not_a_file("standard input is a pipe")
    address = _ADDRESS.fullmatch(path)
    if address is not None:
        local = address[1].lower() == "file"
        hint = f"Give the path alone: {quote(address[2])}" if local else "Download the file first, and give its path."
        return FileUnavailable("an address, and addresses are not read", kind="address", hint=hint)
    hint = "Check the path."
    if _HUB_NAME.fullmatch(path) and not is_likely(path) and not os.path.isdir(path.partition("/")[0]):
        hint = f"Check the path. If it is a name on the Hugging Face hub, download it first: hf download {path}"
    return FileUnavailable("no such file", kind="missing", hint=hint)


def not_a_file(what: str) -> FileUnavailable:
    """Return the error for a pipe or a device."""
    return FileUnavailable(f"{what}, not a file", kind="not-a-file", hint="Save the stream to a file first.")
