"""The thread that polls a path, and reloads when another file is there."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pkgutil import walk_packages
from typing import Final, Generic, TypeVar

import ckptool.system as system
from ckptool.cancellation import Cancellation
from ckptool.errors import Cancelled, CkptoolError
from ckptool.messages import show
from ckptool.sources.paths import shown_path
from ckptool.sources.versions import identity_of, is_committed, version_under

T = TypeVar("T")

_READERS: Final = ("sources", "archives", "pickles", "tensors", "names", "checkpoints", "formats")
_USED: Final = (
    "_compat_pickle array bz2 concurrent.futures.thread difflib encodings.latin_1 encodings.utf_16 encodings.utf_32_be "
    "encodings.utf_32_le encodings.utf_8_sig fnmatch hashlib heapq json lzma mmap resource shlex unicodedata zlib"
)
"""Modules of the standard library that the packages above import only when they use them."""

logger = logging.getLogger("ckptool")


class _Waiting:
    """
    The file that the last poll found and did not load yet, kept open.

    As long as it is open, no other file gets its inode number, and its status says whether it was written to. On
    Windows it is not kept: who saves again could not rename a file over it.
    """

    def __init__(self) -> None:
        self._fd = -1
        self._status: os.stat_result | None = None

    def keep(self, path: str | None) -> None:
        """Keep the file open that is now at a path, and close the one before; None only closes."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._status = -1, None
        if path is not None and not system.BLOCKS_NAMES:
            try:
                self._fd = system.open_reading(path)
                self._status = os.fstat(self._fd)
            except (OSError, ValueError):
                self._status = None

    def was_replaced_whole(self, found: tuple[object, ...], loaded: tuple[object, ...] | None) -> bool:
        """Return whether another file is at the path now, and the kept one, never loaded, was not written to."""
        before = self._status
        if before is None or identity_of(before) == loaded or found[:2] == (before.st_dev, before.st_ino):
            return False
        now = os.fstat(self._fd)
        return (now.st_size, now.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def import_readers() -> None:
    """Import all that files of any format, and errors about them, need: a server may not be allowed to later on."""
    for package in _READERS:
        for module in walk_packages(import_module(f"ckptool.{package}").__path__, f"ckptool.{package}."):
            if ".remote" not in module.name:  # modules for a network are imported if an address was opened
                import_module(module.name)
    for name in _USED.split():
        with suppress(ImportError):  # some Pythons are built without bz2 or lzma
            import_module(name)


class Watcher(Generic[T]):
    """
    Calls ``reload`` when the file at ``path`` is not the one with the identity ``loaded``, and two polls find it equal.

    If the file is replaced at every poll, no two are equal. But if a file is replaced that was not written to,
    somebody renames whole files to the path: the one that is there now is loaded at once. A file that is gone at two
    polls in a row is an error like any other; the next one is loaded, whatever it is.

    ``on_error`` is called with each error, ``on_reload`` with each reload and each error of ckptool's own.
    """

    def __init__(
        self,
        path: str,
        every: float,
        loaded: tuple[object, ...] | None,
        reload: Callable[[Cancellation], T],
        on_error: Callable[[Exception], None],
        on_reload: Callable[[T | CkptoolError], None] | None,
    ) -> None:
        self._path, self._every = path, every
        self._loaded = self._served = loaded  # the identity that was tried last, and that which serves
        self._reload, self._on_error, self._on_reload = reload, on_error, on_reload
        self._stopped = threading.Event()
        self._cancellation = Cancellation()
        self._thread = threading.Thread(target=self._run, name="ckptool-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Cancel a reload that has begun, and wait for the thread."""
        self._stopped.set()
        self._cancellation.cancel()  # else the reload may wait for a call that waits for this method
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        seen, waiting = self._loaded, _Waiting()
        was_there = seen is not None
        while not self._stopped.wait(self._every):
            try:
                found = version_under(self._path, self._cancellation)
            except Cancelled:
                break
            if found is None and seen is None and was_there:
                was_there, self._loaded, self._served = False, None, None
                self._try()
            was_there = was_there or found is not None
            if found is None or found == self._loaded or not is_committed(found, self._served):
                waiting.keep(None)
            elif found == seen or waiting.was_replaced_whole(found, self._loaded):
                waiting.keep(None)
                self._loaded = found
                self._try()
            else:
                waiting.keep(self._path)
            seen = found
        waiting.keep(None)

    def _try(self) -> None:
        try:
            done = self._reload(self._cancellation)
            self._served = self._loaded
            self._report(done)
        except Cancelled:
            logger.info("no longer watched, not reloaded: %s", show(shown_path(self._path)))
        except CkptoolError as error:
            logger.warning("not reloaded: %s", show(str(error)))
            self._on_error(error)
            self._report(error)
        except Exception as error:  # no memory left on the device, say: the next file may do
            logger.exception("not reloaded: %s", show(shown_path(self._path)))
            self._on_error(error)

    def _report(self, outcome: T | CkptoolError) -> None:
        if self._on_reload is None:
            return
        try:
            self._on_reload(outcome)
        except Exception:
            logger.exception("on_reload failed")
