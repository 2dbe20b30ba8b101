"""
System calls on Windows. A descriptor wraps each handle; files below an open folder are opened by the folder's handle.

Every handle shares reading, writing and deletion, so that others can save a checkpoint again while it is open here.
See CreateFileW, ReadFile and NtCreateFile in Microsoft's documentation.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import msvcrt
import os
import re
import stat
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from ctypes import wintypes
from typing import Any, Final

assert sys.platform == "win32"  # for mypy

_MOST_NBYTES: Final = 1 << 30
_READ: Final = 0x8010_0000  # GENERIC_READ, SYNCHRONIZE
_WRITE: Final = 0x4000_0000  # GENERIC_WRITE
_RENAME: Final = 0x1_0000  # DELETE: programs that do not share deletion cannot open it
_SHARED: Final = 7  # FILE_SHARE_READ, _WRITE, _DELETE
_CREATE_NEW: Final = 1
_OPEN_EXISTING: Final = 3
_OPEN_ALWAYS: Final = 4
_FOLDERS_TOO: Final = 0x0200_0000  # FILE_FLAG_BACKUP_SEMANTICS
_WAIT: Final = 0x20  # FILE_SYNCHRONOUS_IO_NONALERT
_LINK_ITSELF: Final = 0x20_0000  # FILE_OPEN_REPARSE_POINT
_IS_REPARSED: Final = 0x400  # FILE_ATTRIBUTE_REPARSE_POINT
_LEADS_ELSEWHERE: Final = 0x2000_0000  # of a tag: links and junctions, but not compressed files, or files in a cloud
_TAG_INFORMATION: Final = 9  # FileAttributeTagInfo
_NO_CASE: Final = 0x40  # OBJ_CASE_INSENSITIVE
_AT_THE_END: Final = 38  # ERROR_HANDLE_EOF
_RENAME_INFORMATION: Final = 22  # FileRenameInfoEx
_REPLACE_OPEN: Final = 0x43  # FILE_RENAME_FLAG_REPLACE_IF_EXISTS, _POSIX_SEMANTICS, _IGNORE_READONLY_ATTRIBUTE
_PAUSES: Final = (0.02, 0.08, 0.3, 0.6)
_LOCK_AT_ONCE: Final = 3  # LOCKFILE_EXCLUSIVE_LOCK, LOCKFILE_FAIL_IMMEDIATELY
_LOCKED_BYTE: Final = 1 << 62
_IS_LOCKED: Final = 33  # ERROR_LOCK_VIOLATION
_HERE: Final = (2, 3, 6)  # DRIVE_REMOVABLE, DRIVE_FIXED, DRIVE_RAMDISK
_SYNCHRONIZE: Final = 0x10_0000
_NO_SUCH_PROCESS: Final = 87  # ERROR_INVALID_PARAMETER
_LONGEST_PATH: Final = 1 << 15

_DEVICES: Final = re.compile(r"(con|prn|aux|nul|(com|lpt)[1-9\xb9\xb2\xb3]) *(\.|$)", re.IGNORECASE)

BLOCKS_NAMES = True

_KERNEL: Final = ctypes.WinDLL("kernel32", use_last_error=True)
_NT: Final = ctypes.WinDLL("ntdll")
_KERNEL.CreateFileW.restype = wintypes.HANDLE
_NT.NtCreateFile.restype = ctypes.c_uint32


class _Text(ctypes.Structure):
    _fields_ = (("nbytes", wintypes.USHORT), ("room", wintypes.USHORT), ("text", wintypes.LPWSTR))


class _Place(ctypes.Structure):
    _fields_ = (
        ("nbytes", wintypes.ULONG),
        ("folder", wintypes.HANDLE),
        ("name", ctypes.POINTER(_Text)),
        ("how", wintypes.ULONG),
        ("security", wintypes.LPVOID),
        ("quality", wintypes.LPVOID),
    )


class _Overlapped(ctypes.Structure):
    _fields_ = (("unused", ctypes.c_void_p * 2), ("offset", ctypes.c_uint64), ("event", wintypes.HANDLE))


# Opening for reading


def open_reading(path: str) -> int:
    return _descriptor(_opened(None, path, 0))


def open_folder(path: str) -> int:
    return _folder(open_reading(path))


def open_at(folder: int | None, name: str) -> int:
    fd = _descriptor(_opened(folder, name, _LINK_ITSELF))
    try:
        tag = _tag_of(fd)
        if not tag:
            return fd
        if not tag & _LEADS_ELSEWHERE:  # this handle reads the raw data, which a filter of the system must decode
            whole = _descriptor(_opened(folder, name, 0))
            if os.path.sameopenfile(fd, whole):
                os.close(fd)
                return whole
            os.close(whole)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name)
    except BaseException:
        os.close(fd)
        raise


def open_folder_at(folder: int, name: str) -> int:
    if name == os.pardir:
        return open_folder(os.path.dirname(path_of(folder)))
    return _folder(open_at(folder, name))


def link_at(folder: int, name: str) -> str:
    return os.readlink(_path_below(folder, name)).replace("\\", "/")


def stat_at(folder: int | None, name: str, *, follow: bool = True) -> os.stat_result:
    return os.stat(name if folder is None else _path_below(folder, name), follow_symlinks=follow)


def _path_below(folder: int, name: str) -> str:
    return os.path.join(path_of(folder), *name.split("/"))


def path_of(fd: int) -> str:
    """Return the current path of an open file or folder."""
    text = ctypes.create_unicode_buffer(_LONGEST_PATH)
    _checked(_KERNEL.GetFinalPathNameByHandleW(_handle(fd), text, len(text), 0))
    return text.value


def _created(path: str, access: int, which: int, how: int = 0) -> int:
    """Return a handle of a path."""
    if "\0" in path:
        raise ValueError("embedded null character")
    handle = _KERNEL.CreateFileW(path, wintypes.DWORD(access), _SHARED, None, which, _FOLDERS_TOO | how, None)
    if handle in (None, wintypes.HANDLE(-1).value):
        raise ctypes.WinError(ctypes.get_last_error())
    return int(handle)


def _opened(folder: int | None, name: str, how: int) -> int:
    """Return a handle of a path, or of a name in an open folder, which cannot lead out of the folder."""
    if folder is None:
        return _created(name, _READ, _OPEN_EXISTING, how)
    if "\0" in name:
        raise ValueError("embedded null character")
    if ":" in name or "\\" in name:  # a stream of a file, or a path
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    nbytes = len(name.encode("utf-16-le", "surrogatepass"))
    text = _Text(nbytes, nbytes, name)
    place = _Place(ctypes.sizeof(_Place), msvcrt.get_osfhandle(folder), ctypes.pointer(text), _NO_CASE, None, None)
    handle, status = wintypes.HANDLE(), (ctypes.c_void_p * 2)()
    fail = _NT.NtCreateFile(
        *(ctypes.byref(handle), wintypes.DWORD(_READ), ctypes.byref(place), status, None, 0, _SHARED),
        *(1, _WAIT | how, None, 0),  # FILE_OPEN
    )
    if fail:
        raise ctypes.WinError(_NT.RtlNtStatusToDosError(wintypes.DWORD(fail)))
    assert handle.value is not None
    return handle.value


def _tag_of(fd: int) -> int:
    """Return the tag of a reparse point; 0 for anything else."""
    found = (wintypes.DWORD * 2)()
    _checked(_KERNEL.GetFileInformationByHandleEx(_handle(fd), _TAG_INFORMATION, found, ctypes.sizeof(found)))
    attributes, tag = found
    return tag if attributes & _IS_REPARSED else 0


def _descriptor(handle: int, flags: int = os.O_RDONLY) -> int:
    try:
        return msvcrt.open_osfhandle(handle, flags | os.O_NOINHERIT)  # binary, as O_TEXT is not set
    except OSError:
        _KERNEL.CloseHandle(wintypes.HANDLE(handle))
        raise


def _handle(fd: int) -> wintypes.HANDLE:
    return wintypes.HANDLE(msvcrt.get_osfhandle(fd))


def _folder(fd: int) -> int:
    if stat.S_ISDIR(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))


def _checked(result: int) -> None:
    if not result:
        raise ctypes.WinError(ctypes.get_last_error())


# Bytes


def read_at(fd: int, nbytes: int, offset: int) -> bytes:
    data = ctypes.create_string_buffer(min(nbytes, _MOST_NBYTES))
    return ctypes.string_at(data, _moved(_KERNEL.ReadFile, fd, data, offset))


def read_into_at(fd: int, buffer: memoryview, offset: int) -> int:
    nbytes = min(buffer.nbytes, _MOST_NBYTES)
    return _moved(_KERNEL.ReadFile, fd, (ctypes.c_char * nbytes).from_buffer(buffer), offset)


def _moved(call: Any, fd: int, data: ctypes.Array[ctypes.c_char], offset: int) -> int:
    """Read or write at an offset, and return how many bytes were transferred."""
    at, count = _Overlapped(offset=offset), wintypes.DWORD()
    if not call(_handle(fd), data, wintypes.DWORD(len(data)), ctypes.byref(count), ctypes.byref(at)):
        error = ctypes.get_last_error()
        if error != _AT_THE_END:
            raise ctypes.WinError(error)
    return count.value


def map_private(fd: int, nbytes: int) -> mmap.mmap:  # noqa: ARG001 - a file that is mapped cannot be saved over
    raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))


# Facts


def is_no_file(path: str) -> bool:
    """Return whether writing to a path goes to a device (``nul.pth``), or to a stream of a file (``a:b.pth``)."""
    name = re.split(r"[\\/]", os.path.splitdrive(path)[1])[-1]
    return ":" in name or _DEVICES.match(name) is not None


def listed_path(line: bytes) -> str:
    """Return the path in a line of a list: UTF-8, or else in the code page of consoles, or of programs."""
    try:
        return line.decode()
    except UnicodeDecodeError:
        found = [line.decode(code_page, "replace") for code_page in ("oem", "mbcs")]
        return next(filter(os.path.lexists, found), found[0])


def most_descriptors() -> int | None:
    return None


def is_network(fd: int) -> bool:  # noqa: ARG001
    return False


def free_room(place: str | int) -> int:
    room = ctypes.c_uint64()
    path = path_of(place) if isinstance(place, int) else place
    path = path if os.path.isdir(path) else os.path.dirname(path)
    _checked(_KERNEL.GetDiskFreeSpaceExW(path, ctypes.byref(room), None, None))
    return room.value


# Memory


def free_memory() -> int | None:
    return _memory()[4]


def physical_memory() -> tuple[int | None, int | None]:
    found = _memory()
    return found[2], found[1]


def new_memory(nbytes: int) -> mmap.mmap:
    return mmap.mmap(-1, nbytes)


def _memory() -> ctypes.Array[ctypes.c_uint64]:
    """Return a MEMORYSTATUSEX: total and free physical memory, and total and free memory to commit, in bytes."""
    found = (ctypes.c_uint64 * 8)(64)
    _checked(_KERNEL.GlobalMemoryStatusEx(ctypes.byref(found)))
    return found


# Writing


def open_new(path: str, mode: int) -> int:  # noqa: ARG001 - there are no modes
    return _descriptor(_created(path, _READ | _WRITE | _RENAME, _CREATE_NEW), os.O_RDWR)


def open_nameless(folder: str, mode: int) -> int | None:  # noqa: ARG001
    return None


def open_appending(path: str) -> int:
    return _descriptor(_created(path, _READ | _WRITE, _OPEN_ALWAYS), os.O_RDWR | os.O_APPEND)


def open_writing(path: str) -> int:
    return _descriptor(_created(path, _READ | _WRITE, _OPEN_EXISTING, _LINK_ITSELF), os.O_RDWR)


def write_at(fd: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        part = view[:_MOST_NBYTES]
        kind = ctypes.c_char * part.nbytes
        array = kind.from_buffer_copy(part) if part.readonly else kind.from_buffer(part)
        count = _moved(_KERNEL.WriteFile, fd, array, offset)
        offset, view = offset + count, view[count:]


def give_name(fd: int, old: str | None, path: str) -> None:  # noqa: ARG001
    assert old is not None
    _patiently(os.rename, old, path)


def replace(fd: int, old: str, path: str, aside: str) -> None:
    name = ctypes.create_unicode_buffer(path)
    renaming = struct.pack("@IPI", _REPLACE_OPEN, 0, ctypes.sizeof(name) - 2) + bytes(name)  # FILE_RENAME_INFO
    if _KERNEL.SetFileInformationByHandle(_handle(fd), _RENAME_INFORMATION, renaming, len(renaming)):
        return
    with suppress(PermissionError):
        os.replace(old, path)
        return
    _patiently(os.rename, path, aside)
    try:
        os.rename(old, path)
    except OSError:
        os.rename(aside, path)
        raise
    with suppress(OSError):
        os.unlink(aside)


def rename(old: str, path: str) -> None:
    try:
        _patiently(os.rename, old, path)
    except FileExistsError:
        os.rmdir(path)  # raises unless it is an empty folder
        os.rename(old, path)


def _patiently(rename: Callable[[str, str], None], old: str, path: str) -> None:
    """Rename a file with some retries, as virus scanners open new files for a moment."""
    for seconds in _PAUSES:
        with suppress(PermissionError):
            rename(old, path)
            return
        time.sleep(seconds)
    rename(old, path)


def sync(fd: int) -> None:
    os.fsync(fd)


def sync_folder(path: str) -> None:
    pass


def narrow(fd: int, mode: int) -> None:
    pass


def copy_attributes(fd: int, path: str, status: os.stat_result) -> None:
    pass


def clone(fd: int, source: int, path: str | None) -> None:  # noqa: ARG001
    raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))


def clones_to(source: int, folder: str) -> bool:  # noqa: ARG001
    return False


# Processes


CAN_EDIT = False


def lock(fd: int) -> bool | None:
    """
    Lock an open file until it is closed; return False if it is locked already, None if there are no locks.

    The lock is on a byte far after the end, as locked bytes cannot be read. A folder cannot be locked: for one on a
    local drive return True, because the processes of this machine can be checked instead.
    """
    at = _Overlapped(offset=_LOCKED_BYTE)
    if _KERNEL.LockFileEx(_handle(fd), _LOCK_AT_ONCE, 0, 1, 0, ctypes.byref(at)):
        return True
    if ctypes.get_last_error() == _IS_LOCKED:
        return False
    place = path_of(fd)
    return (
        True if os.path.isdir(place) and _KERNEL.GetDriveTypeW(f"{os.path.splitdrive(place)[0]}\\") in _HERE else None
    )


def lock_records(fd: int) -> bool | None:  # noqa: ARG001 - there is only one kind of lock
    return None


def is_alive(pid: int) -> bool:
    process = _KERNEL.OpenProcess(_SYNCHRONIZE, False, pid)
    if not process:
        return ctypes.get_last_error() != _NO_SUCH_PROCESS
    try:
        return bool(_KERNEL.WaitForSingleObject(wintypes.HANDLE(process), 0))
    finally:
        _KERNEL.CloseHandle(wintypes.HANDLE(process))


MOST_PROCESSES = 61


def is_unread(error: OSError) -> bool:
    return isinstance(error, BrokenPipeError) or (error.errno == errno.EINVAL and error.filename is None)


@contextmanager
def no_interrupt() -> Iterator[None]:
    _KERNEL.SetConsoleCtrlHandler(None, True)
    try:
        yield
    finally:
        _KERNEL.SetConsoleCtrlHandler(None, False)


# Commands of people, and for them


SHELLS_EXPAND = False


def quoted(word: str) -> str:
    if re.fullmatch(r"[\w./\\:+=-]+", word, re.ASCII):
        return word
    within = re.sub(r'(\\*)"', r'\1\1\\"', word)
    return f'"{within}{within[len(within.rstrip(chr(92))) :]}"'  # backslashes before a quotation mark are doubled


def command_for(what: str, path: str) -> str | None:
    words = {"write": "attrib -r", "remove": "del"}
    return f"{words[what]} {quoted(path)}" if what in words else None


COPY_LINKED = "robocopy FOLDER COPY /e"
MORE_DESCRIPTORS = "Open fewer files at once."
