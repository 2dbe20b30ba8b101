"""
Items of tensors that were written as safetensors: those of one file are one file of safetensors, behind the values.

The index gives all of them the place where that begins, and the size of their own bytes. As each name is there once,
the text beside the header says which piece it is. See ``SerializationFormat`` in
torch/distributed/checkpoint/filesystem.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Final

from ckptool.checkpoints.contents import Contents
from ckptool.checkpoints.parsed import Parsed
from ckptool.errors import Failure, FileUnavailable, MalformedFile
from ckptool.formats import safetensors
from ckptool.formats.directories.dcp.entries import Entry, Item
from ckptool.formats.probe import Probe
from ckptool.formats.strict_json import parse_object
from ckptool.sources.folder import FolderSource
from ckptool.sources.source import SliceSource, Source

_HEAD_NBYTES: Final = 64
_Known = tuple[Parsed, dict[str, object]]


class SafetensorsItems:
    """Files of safetensors among the items of a folder. Each header is read once."""

    def __init__(self, folder: FolderSource, probe: Probe) -> None:
        self._folder = folder
        self._probe = probe
        self._known: dict[tuple[str, int], _Known] = {}
        self._lock = threading.Lock()

    def files(self, entries: Iterable[Entry | Item | None]) -> list[str]:
        """Return the names of the files in which tensors are safetensors, going by the first tensor of each."""
        first: dict[str, Item] = {}
        for entry in entries:
            for item in entry.items if isinstance(entry, Entry) else ():
                if item is not None and not item.transforms:
                    first.setdefault(item.file, item)
        return sorted(file for file, item in first.items() if self.begin_at(file, item.offset))

    def begin_at(self, file: str, offset: int) -> bool:
        """Say whether such a file begins at an offset of a file that can be opened, going by its first bytes."""
        try:
            source = self._folder.open(file)
        except FileUnavailable:
            return False
        return _begins(source, offset)

    def is_without_tensors(self, file: str) -> bool:
        """Say whether a file is safetensors that hold nothing, as a writer leaves it that has no tensor to write."""
        if not self.begin_at(file, 0):
            return False
        try:
            parsed, _ = self._read(file, 0)
        except Failure:
            return False
        return not parsed.contents.tensors

    def piece(self, name: str, item: Item, offsets: tuple[int, ...]) -> Parsed:
        """
        Return the piece of a tensor that begins at ``offsets``, as if it were alone in a file.

        Raises:
            MalformedFile: The file has no such piece.
            CkptoolError: It cannot be read.
        """
        parsed, said = self._read(item.file, item.offset)
        info = parsed.contents.tensors.get(name)
        if info is None:
            raise MalformedFile(f"no tensor {name!r} in the safetensors of {item.file!r}", kind="piece")
        where = said.get(name)
        found = where.get("saved_offsets") if isinstance(where, dict) else None
        if found != list(offsets):
            what = (
                f"the safetensors of {item.file!r} have the piece of {name!r} at {found}, not that at {list(offsets)}"
            )
            raise MalformedFile(what, kind="piece")
        return parsed._replace(contents=Contents({name: info}))

    def _read(self, file: str, offset: int) -> _Known:
        key = file, offset
        with self._lock:
            known = self._known.get(key)
            if known is None:
                source = self._folder.open(file)
                rest = SliceSource(source, offset, source.nbytes - offset)
                parsed = safetensors.read(self._probe.inner(rest))
                text = parsed.metadata.get(safetensors.OF_PIECES, "{}")
                known = self._known[key] = parsed, parse_object(text.encode(), safetensors.OF_PIECES, "sharding")
        return known


def _begins(source: Source, offset: int) -> bool:
    rest = source.nbytes - offset
    inside = SliceSource(source, offset, rest) if rest > 0 else None
    return inside is not None and safetensors.is_safetensors(inside, inside.read(0, min(rest, _HEAD_NBYTES)))
