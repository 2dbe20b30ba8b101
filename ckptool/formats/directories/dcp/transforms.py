"""
What DCP's extensions did to items, undone: ``stream.zstd/1``, one frame of Zstandard round an item.

https://docs.pytorch.org/docs/stable/distributed.checkpoint.html, torch/distributed/checkpoint/_extension.py
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

from ckptool.archives.zstandard import unpack
from ckptool.errors import UnsupportedFeature
from ckptool.limits import Limits
from ckptool.sources.source import SliceSource, Source, read_in_steps

_ZSTD: Final = "stream.zstd"
_MOST_KEPT: Final = 4
"""Items that are kept unpacked: what as many threads read."""


def check_known(transforms: tuple[str, ...]) -> None:
    """Raise UnsupportedFeature unless all of these can be undone here. A name may end in a version."""
    for one in transforms:
        name, _, version = one.partition("/")
        if name != _ZSTD or version not in ("", "1"):
            raise UnsupportedFeature(
                f"items were changed by an extension, {one!r}, which only its own code can undo",
                kind="unknown-transform",
                hint="Load it where the extension is registered, and save it without.",
            )


class Undone:
    """Items as they were before they were changed; the last few are kept in memory."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._kept: OrderedDict[int, tuple[Source, bytes]] = OrderedDict()
        self._lock = threading.Lock()

    def source(self, item: SliceSource, transforms: tuple[str, ...]) -> Source:
        """Return the bytes that an item had before."""
        return _UndoneSource(self, item, transforms)

    def content(self, item: SliceSource, transforms: tuple[str, ...]) -> bytes:
        with self._lock:
            known = self._kept.get(id(item))
            if known is not None:
                self._kept.move_to_end(id(item))
                return known[1]
        data = item.read(0, item.nbytes)
        for _ in transforms:
            data = unpack(data, self._limits)
        with self._lock:
            self._kept[id(item)] = item, data
            while len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        return data


class _UndoneSource:
    """The bytes of an item. They are in memory only while they are read."""

    is_compressed = False

    def __init__(self, undone: Undone, item: SliceSource, transforms: tuple[str, ...]) -> None:
        self._undone = undone
        self._item = item
        self._transforms = transforms
        self.cancellation = item.cancellation
        self.nbytes = len(undone.content(item, transforms))

    def read(self, offset: int, nbytes: int) -> bytes:
        if self.cancellation is not None and nbytes > 1 << 22:
            return read_in_steps(self.read, offset, nbytes)
        return self._undone.content(self._item, self._transforms)[offset : offset + nbytes]

    def file_offset(self, offset: int) -> None:  # noqa: ARG002 - a source
        """The file does not hold these bytes as they are."""
        return

    def close(self) -> None:
        """Its file belongs to the folder, which closes it."""
