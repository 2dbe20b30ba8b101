"""Open a regular file by its path, and refuse anything else there; read what the system says of an open file."""

from __future__ import annotations

import os
import stat

from ckptool.errors import FileUnavailable, reason_of
from ckptool.sources.journal import refuse_edited


def open_regular(path: str) -> int:
    """
    Return a descriptor of a regular file. A pipe never blocks.

    Raises:
        FileUnavailable: It is missing, not permitted, or something else.
        UnfinishedEdit: An edit in place left it neither old nor new, so far.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    try:
        fd = os.open(path, flags)
    except OSError as error:
        if os.name == "nt" and os.path.isdir(path):
            raise folder_instead() from error  # it is not permitted to open one there
        from ckptool.sources.unavailable import unavailable  # most files are there

        raise unavailable(path, error) from error
    except ValueError as error:  # a NUL in the path
        raise FileUnavailable("not a path", kind="missing") from error
    try:
        mode = status_of(fd).st_mode
    except BaseException:
        os.close(fd)
        raise
    if stat.S_ISREG(mode):
        try:
            refuse_edited(path, "torn", fd=fd)
        except BaseException:
            os.close(fd)
            raise
        return fd
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise folder_instead()
    from ckptool.sources.unavailable import not_a_file

    kinds = (
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISCHR, "a character device"),
        (stat.S_ISBLK, "a block device"),
    )
    what = next((name for test, name in kinds if test(mode)), "not a regular file")
    raise not_a_file(what)


def folder_instead() -> FileUnavailable:
    """Return the error for a directory where a file was asked for."""
    return FileUnavailable("a directory, not a file", kind="directory")


def status_of(fd: int) -> os.stat_result:
    """Return the status of an open file; raise FileUnavailable if there is none."""
    try:
        return os.fstat(fd)
    except OSError as error:
        raise unreadable(error) from error


def unreadable(error: OSError, offset: int | None = None, path: str | None = None) -> FileUnavailable:
    """Return the error for a bad disk, or a network that is gone."""
    where = "" if offset is None else f" at byte {offset:,}"
    return FileUnavailable(f"cannot be read{where}: {reason_of(error)}", kind="io", offset=offset, path=path)
