"""The thread that looks at a path, and reloads when another file is there."""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable
from typing import Generic, TypeVar

from ckptool.cancellation import Cancellation
from ckptool.errors import Cancelled, CkptoolError
from ckptool.messages import show
from ckptool.sources.paths import file_identity

T = TypeVar("T")

logger = logging.getLogger("ckptool")


class Watcher(Generic[T]):
    """
    Calls ``reload`` when the file under ``path`` is not the one with the identity ``loaded``, and rests for one look.

    What comes of it is told to ``told``, if there is one; an error also goes to ``failed``.
    """

    def __init__(
        self,
        path: str,
        every: float,
        loaded: tuple[int, ...] | None,
        reload: Callable[[Cancellation], T],
        failed: Callable[[Exception], None],
        told: Callable[[T | CkptoolError], None] | None,
    ) -> None:
        self._path, self._every, self._loaded = path, every, loaded
        self._reload, self._failed, self._told = reload, failed, told
        self._stopped = threading.Event()
        self._cancellation = Cancellation()
        self._thread = threading.Thread(target=self._run, name="ckptool-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Cancel a reload that has begun, and wait for the thread."""
        self._stopped.set()
        self._cancellation.cancel()  # the reload may wait for a call that waits for this one
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        seen = self._loaded
        while not self._stopped.wait(self._every):
            found = file_identity(self._path)
            if found is not None and found != self._loaded and found == seen:
                self._loaded = found
                self._try()
            seen = found

    def _try(self) -> None:
        try:
            self._tell(self._reload(self._cancellation))
        except Cancelled:
            logger.info("no longer watched, not reloaded: %s", show(self._path))
        except CkptoolError as error:
            self._note(error)
            logger.warning("not reloaded: %s", show(str(error)))
            self._tell(error)
        except Exception as error:  # no memory left on the device, say: the next file may do
            self._note(error)
            logger.exception("not reloaded: %s", show(self._path))

    def _note(self, error: Exception) -> None:
        chain: list[BaseException] = [error]
        for link in chain:  # an error that is kept must not keep what was staged, which its traceback reaches
            traceback.clear_frames(link.__traceback__)
            chain += [one for one in (link.__cause__, link.__context__) if one is not None and one not in chain]
        self._failed(error)

    def _tell(self, outcome: T | CkptoolError) -> None:
        if self._told is None:
            return
        try:
            self._told(outcome)
        except Exception:
            logger.exception("on_reload failed")
