"""
Rows of many checkpoints at a time: what a process that works for ``scan`` does.

Files here are looked at one after the other, those far away in threads, which mostly wait.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from ckptool.checking.row import SAME, Asked, lost_row, row
from ckptool.errors import Failure, let_go
from ckptool.sources.naming import is_far
from ckptool.sources.versions import stamp_of_version

if TYPE_CHECKING:
    from ckptool.sources.remote.address import Remote

_OF_ONE_FILE: Final = 4
"""Parts of one file far away that are fetched at once: many files are."""


class Place(NamedTuple):
    """One checkpoint to look at: a path, or a ``Remote``."""

    path: str
    is_meant: bool = True
    """It was named, or its own name says that it is a checkpoint."""
    known: str | None = None
    """The version of which there is a row, where only its server knows whether that is the one that is there."""


class _Tell(Protocol):
    def __call__(self, number: int, answer: bytes, *, more: bool = False) -> None: ...


class Rows:
    """Tells the row of each of several places, as a line of JSON; before it, if asked for, those of its tensors."""

    def __init__(self, asked: Asked, threads: int) -> None:
        self._asked = asked
        self._threads = threads
        """For files far away."""
        self._stores: dict[tuple[str, str], Any] = {}
        """Those that were reached."""

    def __call__(self, places: Sequence[Place], tell: _Tell) -> None:
        """Tell of each by its number; whatever goes wrong, there is a row."""
        far = [is_far(place.path) for place in places]
        if any(far):
            from concurrent.futures import ThreadPoolExecutor  # files here need none

            with ThreadPoolExecutor(min(self._threads, sum(far))) as pool:
                for number, place in enumerate(places):
                    if far[number]:
                        pool.submit(self._tell_of_far, place, partial(tell, number))
        for number, place in enumerate(places):
            if not far[number]:
                tell(number, self._row(place.path, partial(tell, number)))

    def _row(self, path: str, tell: Callable[..., None]) -> bytes:
        told = (lambda one: tell(_line(one), more=True)) if self._asked.tensors else None
        return _line(row(path, self._asked, tell=told))

    def _tell_of_far(self, place: Place, tell: Callable[..., None]) -> None:
        try:
            answer = self._far_row(place, tell)
        except Exception as error:  # noqa: BLE001 - nobody would see it
            let_go(error)
            answer = _line(lost_row(place.path, self._asked, "unforeseen", f"{type(error).__name__}: {error}"))
        tell(answer)

    def _far_row(self, place: Place, tell: Callable[..., None]) -> bytes:
        from ckptool.sources.remote.address import as_remote
        from ckptool.sources.remote.opening import remote_version

        remote: Remote = as_remote(place.path)
        address = remote.elsewhere(remote)
        address.listed, address.stores, address.connections = remote.listed, self._stores, _OF_ONE_FILE
        address.takes_end = True
        if place.known is not None:
            with suppress(Failure):  # which opening says again
                stamp = stamp_of_version((remote_version(address) or ())[2:])
                if stamp is not None and stamp.version == place.known:
                    return SAME
        return self._row(address, tell)


_TEXT_OF: Final = json.JSONEncoder(allow_nan=False, check_circular=False).encode


def _line(found: dict[str, object]) -> bytes:
    return _TEXT_OF(found).encode()
