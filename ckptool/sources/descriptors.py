"""
Descriptors of files and folders: opened without following links out of a folder; a pool keeps few open.

Each component of a name is opened in the folder that was opened before it, and no link is followed, so a change
meanwhile cannot lead elsewhere. There is one exception: links of the form that the cache of Hugging Face's hub makes
for each file of a snapshot, which can lead only to a blob of the same repository. They are resolved step by step. A
small file that holds the text of such a link, as tools that know no links copy it, counts as the link.

    models--…/snapshots/<commit>/model.safetensors  ->  ../../blobs/<40 or 64 hexadecimal digits>

https://huggingface.co/docs/huggingface_hub/guides/manage-cache

A checkpoint may have more files than a process may have open, and so may several together: one pool has all of them.
Those that were used longest ago are closed. When needed, they are opened again and compared with their first status.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final, TypeVar

import ckptool.system as system
from ckptool.errors import (
    CkptoolError,
    Failure,
    FileUnavailable,
    MalformedFile,
    SourceChanged,
    UnfinishedEdit,
    is_not_permitted,
    reason_of,
)
from ckptool.sources.journal import refuse_edited
from ckptool.sources.source import CLOSED

_T = TypeVar("_T")

_MOST_OPEN: Final = 128
_FEWEST_OPEN: Final = 4
_SHARE: Final = 4
"""The pool uses one in this many of the descriptors that the process may have."""
_BLOB = re.compile(r"((?:\.\./){2,9})blobs/([0-9a-f]{40}|[0-9a-f]{64})")
_LONGEST_LINK = 9 * len("../") + len("blobs/") + 64
NO_DESCRIPTOR = "descriptors"
"""The kind of error where no more files may be open."""
LINK = "shard-link"
"""The kind of error for a link that is not followed."""
_LINKS = (errno.ELOOP, errno.EMLINK)
"""The error codes for a link that must not be followed."""


class Descriptor:
    """
    The descriptor of an open file or folder, to be used in a ``with`` block, from any thread.

    The block raises ValueError if it is closed, or was closed meanwhile: another file may have its number by then.

    With a ``check`` it belongs to the pool, which may close it while no block uses it, and open it again for the next:
    ``opening`` opens the name again, and ``check`` raises SourceChanged if the first status and the new one show that
    it is another file.
    """

    fd = -1
    is_closed = False
    """Whether it was closed for good."""

    def __init__(
        self, opening: Callable[[], int], check: Callable[[os.stat_result, os.stat_result], None] | None = None
    ) -> None:
        self.users = 0
        self.is_pooled = check is not None
        self._opening = opening
        self._check = check
        self.fd = POOL.opened(opening)
        self.status = os.fstat(self.fd)
        """Its status when it was opened."""
        POOL.add(self)

    def __enter__(self) -> int:
        with POOL.lock:
            if self.is_closed:
                raise ValueError(CLOSED)
            if self.fd < 0:
                self.fd = self._opened_again()
            self.users += 1
            POOL.add(self)
            return self.fd

    def __exit__(self, *_: object) -> None:
        with POOL.lock:
            self.users -= 1
        if self.is_closed:  # what was done in the block may have met another file that got the number
            raise ValueError(CLOSED)

    def _opened_again(self) -> int:
        try:
            fd = POOL.opened(self._opening)
        except CkptoolError as error:
            if error.kind == NO_DESCRIPTOR:
                raise
            hint = "Read it again once it is complete."
            raise SourceChanged(f"it was there, and is not any more: {error.message}", hint=hint) from error
        try:
            if self._check is not None:
                self._check(self.status, os.fstat(fd))
        except BaseException:
            os.close(fd)
            raise
        return fd

    @property
    def place(self) -> tuple[int, int]:
        """The device and the inode, which together identify a file."""
        return self.status.st_dev, self.status.st_ino

    def rest(self) -> None:
        """Close it until it is needed again; exactly once even if several threads do so at the same time."""
        fd = self.fd
        try:  # not suppress(), which may be gone while Python shuts down, as POOL may
            with POOL.lock:
                POOL.known.pop(id(self), None)
            del self.fd
            os.close(fd)
        except (AttributeError, OSError):  # closed already; nothing was written to it
            pass

    def close(self) -> None:
        """Close it for good."""
        with POOL.lock:
            self.is_closed = True
            self.__dict__.pop("_opening", None)  # it may hold a reference to a folder
        self.rest()

    def __del__(self) -> None:
        if self.fd >= 0:
            self.rest()


class _Pool:
    """The pooled descriptors that are open, by weak reference; the one used last is at the end."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.known: OrderedDict[int, weakref.ref[Descriptor]] = OrderedDict()

    def add(self, one: Descriptor) -> None:
        """Register an open descriptor, or mark it as used last; it may be closed while nobody uses it."""
        if one.is_pooled:
            with self.lock:
                self.known[id(one)] = weakref.ref(one)
                self.known.move_to_end(id(one))
                self._make_room(most_open())

    def opened(self, opening: Callable[[], _T]) -> _T:
        """Return what ``opening`` opens; if no descriptor is left, close those that nobody uses and try again."""
        try:
            return opening()
        except CkptoolError as error:
            if error.kind != NO_DESCRIPTOR:
                raise
        with self.lock:
            self._make_room(0)
        return opening()

    def _make_room(self, most: int) -> None:
        """Close unused descriptors, those used longest ago first, until at most ``most`` are open."""
        for key, known in list(self.known.items()) if len(self.known) > most else ():
            if len(self.known) <= most:
                return
            one = known()
            if one is None:
                self.known.pop(key, None)
            elif not one.users:
                one.rest()

    def after_fork(self) -> None:
        """Replace the lock, which a thread of the parent process may hold."""
        self.lock = threading.RLock()


POOL: Final = _Pool()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=POOL.after_fork)


def most_open() -> int:
    """Return how many files and folders the pool may have open."""
    allowed = system.most_descriptors()
    return _MOST_OPEN if allowed is None else max(_FEWEST_OPEN, min(_MOST_OPEN, allowed // _SHARE))


def refuse_many_mappings(fd: int) -> None:
    """Raise OSError if half of all descriptors are taken: before Python 3.13, each mapping keeps one of its own."""
    allowed = system.most_descriptors()
    if allowed is not None:
        lowest = os.dup(fd)
        os.close(lowest)
        if lowest > allowed // 2:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def components(name: str) -> list[str]:
    """Return the parts of a relative name between slashes; raise MalformedFile if it could lead out of its folder."""
    parts = name.split("/")
    if not name:
        why = "it is empty"
    elif name.startswith("/"):
        why = "it is not a relative path"
    elif "\\" in name or "\0" in name:
        why = "it has a backslash or a NUL in it"
    elif not {"", ".", ".."}.isdisjoint(parts):
        why = "a part of it is empty, or dots alone"
    else:
        return parts
    fact = f"{name!r} cannot be the name of a file in the folder of the index: {why}"
    raise MalformedFile(fact, kind="shard-name", hint="Get the index again, from where it was published.")


def open_sibling(path: str, identity: tuple[int, int], name: str) -> int:
    """
    Return the descriptor of the regular file ``name`` in the folder of ``path``; never wait for a pipe.

    ``identity`` is the device and the inode of the file that was opened as ``path``.

    Raises:
        SourceChanged: ``path`` is another file by now.
        CkptoolError: As ``open_below``.
    """
    components(name)
    parent, own = os.path.split(path)
    folder = open_folder(parent or ".")
    try:
        if identity not in (_place_under(own, folder, follow=True), _place_below(own, folder)):
            raise SourceChanged("another file has its name by now", hint="Read it again once it is complete.")
        return open_below(folder, name)
    finally:
        os.close(folder)


def open_folder(path: str) -> int:
    """Return a descriptor of a directory, for ``open_below``; raise FileUnavailable if there is none."""
    try:
        return system.open_folder(path)
    except OSError as error:
        raise unavailable(error) from error


def open_folder_below(folder: int, name: str) -> int:
    """Return a descriptor of a folder below an open one; raise FileUnavailable if it is missing, a file or a link."""
    *above, last = name.split("/")
    with ExitStack() as stack:
        try:
            for component in above:
                folder = _folder_in(folder, component)
                stack.callback(os.close, folder)
            return _folder_in(folder, last)
        except OSError as error:
            raise unavailable(error) from error


def open_below(folder: int, name: str) -> int:
    """
    Return the descriptor of the regular file ``name`` below an open folder; never wait for a pipe.

    Raises:
        MalformedFile: The name could lead out of the folder.
        FileUnavailable: It is missing (``missing``), a link (``shard-link``), not permitted, or not a regular file.
    """
    *folders, file = components(name)
    with ExitStack() as stack:

        def opened(component: str, inside: int) -> int:
            fd = _folder_in(inside, component)
            stack.callback(os.close, fd)
            return fd

        def blob(target: str) -> int | None:
            """Return the descriptor of the blob of this repository that a link leads to; None if it does not."""
            match = _BLOB.fullmatch(target)
            below = root = folder
            for _ in range(match[1].count("/") if match else 0):
                below, root = root, opened("..", root)
            if match is None or _place_under("snapshots", root, follow=False) != _place(os.fstat(below)):
                return None
            return system.open_at(opened("blobs", root), match[2])

        try:
            for component in folders:
                folder = opened(component, folder)
            found = _open_or_target(system.open_at, folder, file)
            fd = blob(found) if isinstance(found, str) else found
            if fd is None:
                raise _refused_link()
        except OSError as error:
            raise unavailable(error) from error
        try:
            text = _text(fd) if fd == found else ""
            copied = blob(text) if text else None
        except OSError as error:
            os.close(fd)
            raise unavailable(error) from error
        if copied is not None:
            os.close(fd)
            fd = copied
        if stat.S_ISREG(os.fstat(fd).st_mode):
            try:
                refuse_edited(file, "torn", fd=fd, folder=folder)
            except UnfinishedEdit:
                os.close(fd)
                raise
            return fd
        os.close(fd)
        raise FileUnavailable("not a regular file", kind="not-a-file")


def is_link(folder: int, name: str) -> bool:
    """Return whether the entry ``name`` of an open folder is a link."""
    return _link(name, folder) is not None


def _folder_in(folder: int, name: str) -> int:
    fd = _open_or_target(system.open_folder_at, folder, name)
    if isinstance(fd, str):
        raise _refused_link()
    return fd


def _open_or_target(opening: Callable[[int, str], int], folder: int, name: str) -> int | str:
    """Return a descriptor of an entry of an open folder; for a link, which is not followed, its target."""
    try:
        return opening(folder, name)
    except OSError:  # only now is it checked for a link: most names are not links
        target = _link(name, folder)
        if target is None:
            raise
        return target


def _place(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _link(name: str, folder: int) -> str | None:
    """Return the target of a link; None if there is no link of that name."""
    try:
        return system.link_at(folder, name)
    except OSError:
        return None


def _text(fd: int) -> str:
    """Return the content of a file that is short enough for the text of a link; of any other file, an empty text."""
    status = os.fstat(fd)
    is_short = stat.S_ISREG(status.st_mode) and 0 < status.st_size <= _LONGEST_LINK
    return system.read_at(fd, _LONGEST_LINK, 0).decode("ascii", "replace") if is_short else ""


def _place_under(name: str, folder: int, *, follow: bool) -> tuple[int, int] | None:
    """Return device and inode of a file in a folder; None if there is no such file."""
    try:
        return _place(system.stat_at(folder, name, follow=follow))
    except OSError:
        return None


def _place_below(name: str, folder: int) -> tuple[int, int] | None:
    """Return device and inode of the file that ``open_below`` opens; None if it raises."""
    try:
        fd = open_below(folder, name)
    except Failure:
        return None
    try:
        return _place(os.fstat(fd))
    finally:
        os.close(fd)


def unavailable(error: OSError) -> FileUnavailable:
    """Return the error for a file or a folder that the system refuses to open."""
    if error.errno == errno.ENOENT:
        return FileUnavailable("no such file", kind="missing")
    if error.errno in _LINKS:
        return _refused_link()
    reason = reason_of(error)
    if is_not_permitted(error):
        hint = "Make it readable, and its folder one that you may enter."
        return FileUnavailable(f"cannot be opened: {reason}", kind="permission", hint=hint)
    if error.errno in (errno.EMFILE, errno.ENFILE):
        hint = system.MORE_DESCRIPTORS
        return FileUnavailable(f"cannot be opened: {reason}", kind=NO_DESCRIPTOR, hint=hint)
    return FileUnavailable(f"cannot be opened: {reason}", kind="unavailable")


def _refused_link() -> FileUnavailable:
    return FileUnavailable(
        "a link, or reached through one, which may lead anywhere",
        kind=LINK,
        hint=f"Copy the folder with what its links lead to, if you trust them: {system.COPY_LINKED}",
    )
