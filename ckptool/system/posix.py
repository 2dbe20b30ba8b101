"""Linux and macOS. What a docstring says holds on Windows too, unless it says something else."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING

assert sys.platform != "win32"  # for mypy

if TYPE_CHECKING:
    import mmap

_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
_MOST_NBYTES = 0x7FFFF000
"""What one call transfers at most on Linux; on macOS more than 2 GiB are an error."""
_MADV_POPULATE_WRITE = 23
"""Linux 5.14, include/uapi/asm-generic/mman-common.h; older ones refuse it, and go on as they are."""
_NO_DESCRIPTOR: dict[str, bool] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
"""Before, a mapping kept a descriptor of its file for itself."""


# Opening for reading


def open_reading(path: str) -> int:
    """
    Return a descriptor of what has a path, whatever it is: a pipe never blocks. No process that is started has it.

    It is in nobody's way: the file can be replaced, renamed and removed meanwhile.
    """
    return os.open(path, _FILE)


def open_folder(path: str) -> int:
    """Return a descriptor of a folder, to open what is in it. It can be one that may be entered and not listed."""
    return os.open(path, _FOLDER)


def open_at(folder: int | None, name: str) -> int:
    """
    Return what ``open_reading`` does of a name in an open folder; of a path, where ``folder`` is None.

    A link at the end is not followed, and is an error.
    """
    return os.open(name, _FILE | os.O_NOFOLLOW, dir_fd=folder)


def open_folder_at(folder: int, name: str) -> int:
    """Return a descriptor of a folder in an open one, or of the one that is above: ``..``. No link is followed."""
    return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)


def link_at(folder: int, name: str) -> str:
    """Return the target of a link in an open folder, with slashes; raise OSError if the name is not one of a link."""
    return os.readlink(name, dir_fd=folder)


def stat_at(folder: int | None, name: str, *, follow: bool = True) -> os.stat_result:
    """Return the status of a name in an open folder; of a path, where ``folder`` is None."""
    return os.stat(name, dir_fd=folder, follow_symlinks=follow)


# Bytes


def read_at(fd: int, nbytes: int, offset: int) -> bytes:
    """Return bytes from a position, wherever other threads read: at least one, and fewer than asked for at the end."""
    return os.pread(fd, min(nbytes, _MOST_NBYTES), offset)


def read_into_at(fd: int, buffer: memoryview, offset: int) -> int:
    """Fill a buffer with the bytes from a position, or its beginning, and return how many they are: 0 at the end."""
    return os.preadv(fd, [buffer[:_MOST_NBYTES]], offset)


def map_private(fd: int, nbytes: int) -> mmap.mmap:
    """
    Return a private mapping of a file, that may be written to: processes share its pages until one does.

    On Windows, where nobody can save over a file that is mapped, it is an OSError.

    Raises:
        ValueError: The file is shorter.
        OSError: The system has no room for it.
    """
    import mmap  # what only reads needs none

    if sys.platform == "linux":  # more is read at once where a page is touched that is not in memory
        with suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    # Not ACCESS_COPY, which asks for no room to write in on some systems and then kills the writer.
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    return mmap.mmap(fd, nbytes, flags=mmap.MAP_PRIVATE, prot=protection, **_NO_DESCRIPTOR)


# Facts


def most_descriptors() -> int | None:
    """Return how many descriptors the process may have; None if there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def is_network(fd: int) -> bool:
    """
    Say whether an open file answers over a network, or through a process (FUSE), one small page fault at a time.

    False wherever that is not known, and on Windows, where nothing is mapped.
    """
    if sys.platform == "darwin":
        from ckptool.system.macos import is_network  # few files are mapped
    else:
        from ckptool.system.linux import is_network
    return is_network(fd)


def free_room(place: str | int) -> int:
    """Return the bytes that can still be written in a folder, or beside an open file."""
    status = os.statvfs(place)
    return status.f_bavail * status.f_frsize


# Memory


def free_memory() -> int | None:
    """
    Return the bytes that can still be allocated without pushing anything out, or None where the system does not say.

    On Linux, within the limits of control groups; pages of files count as free, for the system drops them on demand.
    On Windows, what this process may still commit.
    """
    from ckptool.system import linux  # few ask

    return linux.free_memory()


def physical_memory() -> tuple[int | None, int | None]:
    """Return the bytes of memory that nobody uses, and those that are there in all; None for what is not known."""
    return _pages("SC_AVPHYS_PAGES"), _pages("SC_PHYS_PAGES")


def _pages(name: str) -> int | None:
    try:
        return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # macOS knows the total but not what is free
        return None


def new_memory(nbytes: int, *, in_large_pages: bool = False) -> mmap.mmap:
    """
    Return memory that goes back to the system, all of it, when it is given up; raise OSError if there is not so much.

    It takes far less time to fill in large pages, where the system has such.
    """
    import mmap

    found = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if in_large_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            found.madvise(mmap.MADV_HUGEPAGE)
    return found


def populate(address: int, nbytes: int) -> None:
    """Fault in the pages of new memory at once: one by one, when touched, takes about as long as the reading."""
    madvise, page = _madvise()
    if madvise is not None and address % page == 0:
        madvise(address, nbytes, _MADV_POPULATE_WRITE)  # if it fails they come one by one


@cache
def _madvise() -> tuple[Callable[[int, int, int], int] | None, int]:
    """Return the system's own, and the size of a page: unlike mmap's, ctypes lets other threads run meanwhile."""
    found, page = None, 1
    if sys.platform == "linux":
        import ctypes  # only who loads needs it
        import mmap

        found, page = ctypes.CDLL(None).madvise, mmap.PAGESIZE
        found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return found, page
