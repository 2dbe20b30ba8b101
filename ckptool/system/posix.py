"""
System calls on Linux and macOS. The docstrings hold for Windows, too, unless they say otherwise.

On Linux, the files in /proc and /sys say what is mounted, and how much memory is free. A control group is a folder, in
each of the two versions of the mechanism, inside the folders of its parent groups, whose limits hold for it, too; see
cgroups(7).
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import resource
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from struct import pack
from typing import Final, NamedTuple

assert sys.platform != "win32"  # for mypy

_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
_NEW = os.O_RDWR | os.O_CLOEXEC
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)
"""Error codes of file systems without hard links."""
# linux/fs.h; a file system that does not know these numbers refuses them
_FICLONE = 0x40049409
_FICLONERANGE = 0x4020940D
_PROBE_NBYTES = 1 << 16
"""Bytes that are cloned to test whether cloning works: a multiple of the block size."""
_MOST_NBYTES = 0x7FFFF000
"""Bytes that one call transfers at most on Linux; on macOS, more than 2 GiB are an error."""
_FLAGS = 16
"""Index of f_flags in the struct statfs of macOS, in words of four bytes; see statfs(2)."""
_MNT_LOCAL = 0x1000
_IN_NO_FOLDER = -2
"""AT_FDCWD of macOS."""
_NO_DESCRIPTOR: dict[str, bool] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
"""Keyword arguments for ``mmap``. Before Python 3.13, a mapping always kept a descriptor of its own."""
_MOUNTS: Final = "/proc/self/mountinfo"
_MEMORY: Final = "/proc/meminfo"
_GROUPS: Final = "/proc/self/cgroup"

# fmt: off
_NETWORK: Final = frozenset((
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "fuse", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "smb3",
    "smbfs", "vboxsf", "virtiofs", "wekafs",
))
# fmt: on


BLOCKS_NAMES = False
"""Whether most programs cannot rename a file over an open one, as on Windows."""


# Opening for reading


def open_reading(path: str) -> int:
    """
    Return a descriptor of a path, whatever it is, without waiting for a pipe. Child processes do not inherit it.

    Others can write to the file, rename, remove and replace it meanwhile; on Windows they can replace it by a rename
    with POSIX semantics, or write into it.
    """
    return os.open(path, _FILE)


def open_folder(path: str) -> int:
    """Return a descriptor of a folder, to open files in it. On Linux, permission to enter the folder is enough."""
    return os.open(path, _FOLDER)


def open_at(folder: int | None, name: str) -> int:
    """
    Return a descriptor of a name in an open folder, as ``open_reading``; of a path, if ``folder`` is None.

    A link as the last component is not followed, and raises OSError.
    """
    return os.open(name, _FILE | os.O_NOFOLLOW, dir_fd=folder)


def open_folder_at(folder: int, name: str) -> int:
    """Return a descriptor of a folder in an open one, or of its parent (``..``). No link is followed."""
    return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)


def link_at(folder: int, name: str) -> str:
    """Return the target of a link in an open folder, with slashes; raise OSError if the name is not a link."""
    return os.readlink(name, dir_fd=folder)


def stat_at(folder: int | None, name: str, *, follow: bool = True) -> os.stat_result:
    """Return the status of a name in an open folder; of a path, if ``folder`` is None."""
    return os.stat(name, dir_fd=folder, follow_symlinks=follow)


# Bytes


def read_at(fd: int, nbytes: int, offset: int) -> bytes:
    """Return up to ``nbytes`` bytes at an offset: at least one, unless it is the end. Threads may share the file."""
    return os.pread(fd, min(nbytes, _MOST_NBYTES), offset)


def read_into_at(fd: int, buffer: memoryview, offset: int) -> int:
    """Read bytes at an offset into a buffer, which may be filled only in part; return how many: 0 at the end."""
    return os.preadv(fd, [buffer[:_MOST_NBYTES]], offset)


def map_private(fd: int, nbytes: int) -> mmap.mmap:
    """
    Return a private, writable mapping of a file: processes share its pages until one writes to them.

    Raises:
        ValueError: The file is shorter than ``nbytes``.
        OSError: The system cannot map it; always on Windows, where nobody can save over a mapped file.
    """
    if sys.platform == "linux":  # so that a page fault reads more at once
        with suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    # Not ACCESS_COPY: on some systems it reserves no memory for written pages, and then kills the writer.
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    return mmap.mmap(fd, nbytes, flags=mmap.MAP_PRIVATE, prot=protection, **_NO_DESCRIPTOR)


# Facts


def is_no_file(path: str) -> bool:  # noqa: ARG001 - Windows has such names
    return False


def listed_path(line: bytes) -> str:
    """Return the path in a line of a list."""
    return os.fsdecode(line)


def most_descriptors() -> int | None:
    """Return how many descriptors the process may have; None if there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def is_network(fd: int) -> bool:
    """
    Return whether an open file is on a network, or served by a process (FUSE), so that each page fault is slow.

    False if that is not known, and on Windows, where nothing is mapped.
    """
    if sys.platform == "darwin":
        import ctypes  # few files are mapped

        system, status = ctypes.CDLL(None), (ctypes.c_uint32 * 1024)()
        call = system["fstatfs$INODE64"] if os.uname().machine == "x86_64" else system.fstatfs
        is_remote: bool = call(fd, status) == 0 and not status[_FLAGS] & _MNT_LOCAL
    else:
        device, kind = os.fstat(fd).st_dev, ""
        for line in _text_of(_MOUNTS).splitlines():  # see proc(5), mountinfo
            mount, _, rest = line.partition(" - ")
            if rest and mount.split()[2:3] == [f"{os.major(device)}:{os.minor(device)}"]:
                kind = rest.split()[0]
        is_remote = kind in _NETWORK or kind.startswith("fuse.")
    return is_remote


def _text_of(path: str) -> str:
    """Return the text of one of the system's own files; an empty string if there is none."""
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError:
        return ""


def free_room(place: str | int) -> int:
    """Return how many bytes are free on the file system of a folder, or of an open file."""
    status = os.statvfs(place)
    return status.f_bavail * status.f_frsize


# Memory


def free_memory() -> int | None:
    """
    Return how many bytes can still be allocated without swapping anything out, or None if it is not known.

    On Linux, it is within the limits of control groups, and cached pages of files count as free, because the system
    drops them on demand. On Windows, it is how much this process may still commit.
    """
    kibibytes = {}
    for line in _text_of(_MEMORY).splitlines():
        name, _, rest = line.partition(":")
        number = rest.split()
        if number and number[0].isdigit():
            kibibytes[name] = int(number[0])
    if "MemAvailable" not in kibibytes:
        return None
    left = 1024 * (kibibytes["MemAvailable"] + kibibytes.get("SwapFree", 0))
    for folder, version in _groups():
        limit = _text_of(f"{folder}/{version.limit}").strip()
        used = _text_of(f"{folder}/{version.used}").strip()
        if limit.isdigit() and used.isdigit() and int(limit) < int(used) + left:
            left = min(left, max(0, int(limit) - int(used)) + _pages(folder, version))
    return left


class _Version(NamedTuple):
    """The folder of the groups in one version of the mechanism, and the names of their files."""

    root: str
    limit: str
    used: str
    pages: tuple[str, ...]
    """Rows of ``memory.stat`` for cached pages of files. The row "file" would count shared memory, too."""


_V2: Final = _Version("/sys/fs/cgroup", "memory.max", "memory.current", ("inactive_file", "active_file"))
_V1: Final = _Version(
    "/sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)


def _groups() -> Iterator[tuple[str, _Version]]:
    """Yield the folders of all groups that this process is in, innermost first."""
    found = {_V2: "", _V1: ""}
    for line in _text_of(_GROUPS).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            found[_V2] = path
        elif "memory" in controllers.split(","):
            found[_V1] = path
    for version, path in found.items():
        # A container may see only its own group, as the root, although the path is the group's path outside.
        parts = [part for part in path.split("/") if part]
        inside = [] if ".." in parts else parts
        yield from (("/".join((version.root, *inside[:depth])), version) for depth in range(len(inside), -1, -1))


def _pages(folder: str, version: _Version) -> int:
    found = 0
    for line in _text_of(f"{folder}/memory.stat").splitlines():
        name, _, nbytes = line.partition(" ")
        if name in version.pages and nbytes.isdigit():
            found += int(nbytes)
    return found


def physical_memory() -> tuple[int | None, int | None]:
    """Return the bytes of unused physical memory, and of all physical memory; None for what is not known."""
    return _in_bytes("SC_AVPHYS_PAGES"), _in_bytes("SC_PHYS_PAGES")


def _in_bytes(name: str) -> int | None:
    try:
        return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # macOS reports the total, but not the free memory
        return None


def new_memory(nbytes: int) -> mmap.mmap:
    """
    Return mapped memory, all of which goes back to the system when it is freed; raise OSError if there is not enough.

    It is in huge pages if the system has them: they take far less time to fill.
    """
    found = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            found.madvise(mmap.MADV_HUGEPAGE)
    return found


# Writing


def open_new(path: str, mode: int) -> int:
    """Return a descriptor of a new file for writing and reading; raise FileExistsError if the name is taken."""
    return os.open(path, _NEW | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)


def open_nameless(folder: str, mode: int) -> int | None:
    """Return a descriptor of a new file without a name, in a folder; None if the file system has no such files."""
    if hasattr(os, "O_TMPFILE") and os.path.exists("/proc/self/fd"):
        try:
            return os.open(folder, _NEW | os.O_TMPFILE, mode)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
    return None


def open_appending(path: str) -> int:
    """Return a descriptor of a file for reading and appending; the file is created if there is none."""
    return os.open(path, _NEW | os.O_CREAT | os.O_APPEND, 0o666)


def open_writing(path: str) -> int:
    """Return a descriptor of an existing file for reading and writing; raise OSError if the path is a link."""
    return os.open(path, _NEW | os.O_NOFOLLOW | os.O_NONBLOCK)


def path_of(fd: int) -> str:
    """Return a path to an open file; on Linux, the file may have no name."""
    return f"/proc/self/fd/{fd}"


def write_at(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all bytes at an offset. Threads may share the file."""
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, offset)
        offset, view = offset + count, view[count:]


def give_name(fd: int, old: str | None, path: str) -> None:
    """
    Give a new file its name in one step; raise FileExistsError if the name is taken.

    ``old`` is its current name, or None if it has no name. It may keep the old name, too.
    """
    if old is None:
        # Python follows the link, which leads to the open file, only if a descriptor is passed, too.
        os.link(path_of(fd), path, src_dir_fd=fd, follow_symlinks=True)
        return
    try:
        os.link(old, path)
    except OSError as error:
        if error.errno not in _NO_LINKS or os.path.lexists(path):
            raise
        os.rename(old, path)  # a file system without hard links, as on most USB sticks


def replace(fd: int, old: str, path: str, aside: str) -> None:  # noqa: ARG001 - Windows needs them
    """
    Rename the open file ``old`` to ``path``, replacing another file in one step.

    Some file systems on Windows cannot replace a file that somebody has open: it is first renamed to ``aside``, and
    removed afterwards. This fails if programs that have it open do not share deletion.
    """
    os.replace(old, path)


def rename(old: str, path: str) -> None:
    """Rename a file or a folder; a folder may replace an empty one, and raises OSError if anything else is there."""
    os.rename(old, path)


def sync(fd: int) -> None:
    """Wait until everything written to an open file is on the disk, and not only in the disk's cache."""
    if sys.platform == "darwin":
        with suppress(OSError):  # not supported by network file systems
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
            return
    os.fsync(fd)


def sync_folder(path: str) -> None:
    """Wait until the names in a folder are on the disk, if the file system supports it; do nothing on Windows."""
    fd = os.open(path or os.curdir, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EACCES, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def narrow(fd: int, mode: int) -> None:
    """Remove permissions from an open file that ``mode`` does not include; do nothing on Windows."""
    with suppress(PermissionError):  # a file system without modes
        os.fchmod(fd, os.fstat(fd).st_mode & mode & 0o777)


def copy_attributes(fd: int, path: str, status: os.stat_result) -> None:
    """
    Give an open file the mode of the file at ``path``, and its owner and extended attributes as far as permitted.

    Do nothing on Windows, where it has the access control list of its folder.
    """
    for owner, group in ((-1, status.st_gid), (status.st_uid, -1)):  # only root may be allowed to
        with suppress(OSError):
            os.fchown(fd, owner, group)
    if sys.platform == "linux":
        with suppress(OSError):
            for name in os.listxattr(path):
                with suppress(OSError):
                    os.setxattr(fd, name, os.getxattr(path, name))
    with suppress(PermissionError):  # a file system without modes
        os.fchmod(fd, stat.S_IMODE(status.st_mode))


def clone(fd: int, source: int, path: str | None) -> None:
    """
    Give a new file the content of another, shared on the disk, if ``clones_to`` is true; its locks are lost.

    ``path`` is its current name, or None if it has no name.
    """
    if sys.platform == "darwin":  # macOS clones only to a free name
        assert path is not None
        mode = stat.S_IMODE(os.fstat(fd).st_mode)
        os.unlink(path)
        _clone_as(path, source)
        os.chmod(path, 0o600)
        new = os.open(path, _NEW | os.O_NOFOLLOW)
        os.fchmod(new, mode)
        os.dup2(new, fd, inheritable=False)
        os.close(new)
    else:
        fcntl.ioctl(fd, _FICLONE, source)


def _clone_as(path: str, source: int) -> None:
    """Clone an open file to a new path on macOS; see clonefile(2)."""
    import ctypes

    if ctypes.CDLL(None, use_errno=True).fclonefileat(source, _IN_NO_FOLDER, os.fsencode(path), 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)


def clones_to(source: int, folder: str) -> bool:
    """Return whether an open file of at least 64 KiB can be cloned to a new one in a folder."""
    with suppress(OSError):  # there may be no folder, or a file system without files of this kind
        if sys.platform == "darwin":
            path = os.path.join(folder, f".ckptool-{os.getpid()}-{os.urandom(8).hex()}")
            _clone_as(path, source)
            os.unlink(path)
            return True
        else:  # noqa: RET505 - it is never reached on macOS
            fd = open_nameless(folder, 0o600)
            if fd is not None:
                try:
                    fcntl.ioctl(fd, _FICLONERANGE, pack("=q3Q", source, 0, _PROBE_NBYTES, 0))
                finally:
                    os.close(fd)
                return True
    return False


# Processes


CAN_EDIT = True
"""Whether files can be edited in place: owners of journals can be checked, and journals synced to the disk."""


def lock(fd: int) -> bool | None:
    """Lock an open file or folder until it is closed; return False if it is locked already, None without locks."""
    return _locked(fcntl.flock, fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def lock_records(fd: int) -> bool | None:
    """
    Lock an open file as ``lockf`` does; such a lock ends when this process closes any descriptor of the file.

    Linux has locks that belong to the open file: these end only with it, and exclude the same processes.
    """
    if sys.platform == "linux":
        record = pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        return _locked(fcntl.fcntl, fd, fcntl.F_OFD_SETLK, record)
    else:  # noqa: RET505 - it is never reached on Linux
        return _locked(fcntl.lockf, fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _locked(call: Callable[..., object], *arguments: object) -> bool | None:
    try:
        call(*arguments)
    except OSError as error:
        return False if error.errno in (errno.EAGAIN, errno.EACCES) else None
    return True


def is_alive(pid: int) -> bool:
    """Return whether this machine has a process with this number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


MOST_PROCESSES = 1024
"""How many processes can be waited for at once."""


def is_unread(error: OSError) -> bool:
    """Return whether an error of writing means that the reader has closed the pipe."""
    return isinstance(error, BrokenPipeError)


@contextmanager
def no_interrupt() -> Iterator[None]:
    """Keep Ctrl-C from reaching processes that are started in the block."""
    import signal

    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


# Commands of people, and for them


SHELLS_EXPAND = True
"""Whether the shell expands patterns of paths that are not quoted, before a program gets them."""


def quoted(word: str) -> str:
    """Return a word quoted for the shell; on Windows for both cmd.exe and PowerShell, as far as they agree."""
    from shlex import quote  # few calls print commands

    return quote(word)


def command_for(what: str, path: str) -> str | None:
    """Return the command that lets this user "read", "enter" or "write" a path, or that can "remove" it; or None."""
    words = {"read": "chmod u+r", "enter": "chmod u+rx", "write": "chmod u+w", "remove": "rm"}
    return f"{words[what]} -- {quoted(path)}"


COPY_LINKED = "cp -rL FOLDER COPY"
"""The command that copies a folder with the targets of its links."""
MORE_DESCRIPTORS = "Allow more open files: ulimit -n 4096"
"""A hint for too few descriptors."""
