"""
The items of DCP: each a complete file of ``torch.save``, of one tensor or one value; or tensors in safetensors.

An item of a tensor is opened when its bytes are requested. Values are read in one pass over each file; writers have
thousands of equal ones, each of which is parsed once.

Changes that extensions made to items are undone: ``stream.zstd/1``, one frame of Zstandard around an item.
https://docs.pytorch.org/docs/stable/distributed.checkpoint.html, torch/distributed/checkpoint/_extension.py

Tensors that were written as safetensors are together in one file of safetensors for each ``.distcp`` file, after the
values. The index gives for each the offset of that file, and the size of its own bytes. As each name is there once, the
metadata says which piece it is. See ``SerializationFormat`` in torch/distributed/checkpoint/filesystem.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Final

from ckptool.archives.compressed import unpack
from ckptool.cancellation import Cancellation
from ckptool.checkpoints.contents import Contents
from ckptool.checkpoints.parsed import Parsed, Part
from ckptool.errors import (
    CkptoolError,
    Failure,
    FileUnavailable,
    MalformedFile,
    TruncatedFile,
    UnsupportedFeature,
    within,
)
from ckptool.formats import safetensors
from ckptool.formats.directories.dcp.index import Copy, Entry, Item
from ckptool.formats.probe import Probe
from ckptool.formats.strict_json import parse_object
from ckptool.limits import Limits
from ckptool.sources.folder import FolderSource
from ckptool.sources.source import BytesSource, ReadAhead, SliceSource, Source, StepwiseSource
from ckptool.tensors.tensor import TensorInfo

_SMALL: Final = 1 << 16
"""Values of fewer bytes are read ahead, and compared with others."""
_ZSTD: Final = "stream.zstd"
_MOST_KEPT: Final = 4
"""Items that are kept unpacked: as many as threads read at once."""
_HEAD_NBYTES: Final = 64
_Known = tuple[Parsed, dict[str, object]]


class Items:
    """Opens the items of one folder."""

    def __init__(self, folder: FolderSource, probe: Probe) -> None:
        self._folder = folder
        self._probe = probe
        self._undone = lru_cache(_MOST_KEPT)(partial(_undone, probe.limits))
        self._known: dict[tuple[str, int], _Known] = {}
        self._lock = threading.Lock()

    def source(self, item: Item) -> Source:
        """
        Return the bytes of an item, as ``torch.save`` wrote them.

        Raises:
            FileUnavailable: Its file is missing.
            TruncatedFile: Its file ends before the item does.
            UnsupportedFeature: It was changed in a way that cannot be undone here.
            MissingPackage: The package that can undo it is not installed.
        """
        if item.transforms:
            check_known(item.transforms)
        file = self._folder.open(item.file)
        if item.offset + item.nbytes > file.nbytes:
            raise TruncatedFile(
                f"{item.file!r} is truncated: {item.nbytes:,} bytes at {item.offset:,} are needed, "
                f"it has {file.nbytes:,}",
                kind="truncated-piece",
                hint="Copy or download it again.",
                needed=item.offset + item.nbytes,
                actual=file.nbytes,
            )
        whole = SliceSource(file, item.offset, item.nbytes)
        if not item.transforms:
            return whole
        return _UndoneSource(partial(self._undone, whole, item.transforms), whole.cancellation)

    def open(self, item: Item) -> Parsed:
        """Read an item."""
        return self._probe.read_inner(self.source(item))

    def piece(self, name: str, item: Item, offsets: tuple[int, ...]) -> Parsed:
        """
        Read an item that is the piece of a tensor at these offsets, as if it were alone in a file.

        Raises:
            MalformedFile: It is in safetensors, which have no such piece.
            CkptoolError: It cannot be read.
        """
        if item.transforms or not self.begin_at(item.file, item.offset):
            return self.open(item)
        parsed, said = self._safetensors(item.file, item.offset)
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

    def tensor(self, name: str, item: Item, offsets: tuple[int, ...]) -> TensorInfo:
        """Return the tensor in an item that is a piece."""
        with within(_place(name, item), known=item.file):
            info = self.piece(name, item, offsets).tensor()
        if info is None:
            raise MalformedFile(f"{_place(name, item)} is no tensor", kind="piece")
        return info

    def values(self, items: Mapping[str, Item]) -> Iterator[tuple[str, Parsed | CkptoolError]]:
        """Yield each value by its name, or the error that reading it raised, in the order of the files."""
        known: dict[bytes, Parsed] = {}
        ahead: tuple[str, ReadAhead] | None = None
        for name, item in sorted(items.items(), key=lambda one: (one[1].file, one[1].offset)):
            try:
                source = self.source(item)
                if item.transforms or item.nbytes > _SMALL:
                    yield name, self._value(source)
                    continue
                if ahead is None or ahead[0] != item.file:
                    ahead = item.file, ReadAhead(self._folder.open(item.file))
                data = ahead[1].read(item.offset, item.nbytes)
                value = known.get(data)
                if value is None:
                    value = self._value(BytesSource(data, source.cancellation, is_file=True))
                    parts = value.root if type(value.root) is tuple else (value.root,)
                    # Only what cannot be told from another equal one: a number, a text, or a tuple of these.
                    if all(part is None or type(part) in (bool, int, float, str) for part in parts):
                        known[data] = value
                yield name, value
            except Failure as error:
                if item.file not in error.message:
                    error.message = f"{_place(name, item)}: {error.message}"
                yield name, error

    def beside(self, name: str) -> Parsed:
        """Return the content of a file of the folder that the index does not name."""
        return self._value(self._folder.open(name))

    def _value(self, source: Source) -> Parsed:
        parsed = self._probe.read_inner(source)
        if parsed.rebuilder is None or not parsed.streams or parsed.traits.program:
            raise MalformedFile("is no file of torch.save", kind="item")
        return parsed

    def in_safetensors(self, entries: Iterable[Entry | Item | None]) -> list[str]:
        """Return the names of the files in which tensors are safetensors, by the first tensor of each."""
        first: dict[str, Item] = {}
        for entry in entries:
            for item in entry.items if isinstance(entry, Entry) else ():
                if item is not None and not item.transforms:
                    first.setdefault(item.file, item)
        return sorted(file for file, item in first.items() if self.begin_at(file, item.offset))

    def begin_at(self, file: str, offset: int) -> bool:
        """Return whether safetensors begin at an offset of a file, by their first bytes; not if it cannot be opened."""
        try:
            source = self._folder.open(file)
        except FileUnavailable:
            return False
        rest = source.nbytes - offset
        inside = SliceSource(source, offset, rest) if rest > 0 else None
        return inside is not None and safetensors.is_safetensors(inside, inside.read(0, min(rest, _HEAD_NBYTES)))

    def is_unused(self, file: str) -> bool:
        """Return whether a rank had nothing to write into a file: it is empty, or safetensors without tensors."""
        try:
            return not self._folder.open(file).nbytes or (
                self.begin_at(file, 0) and not self._safetensors(file, 0)[0].contents.tensors
            )
        except FileUnavailable:
            return True
        except Failure:
            return False

    def _safetensors(self, file: str, offset: int) -> _Known:
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


def _place(name: str, item: Item) -> str:
    return f"the item of {name!r} in {item.file!r}"


class ItemParts:
    """Every item that the index names, in the order of the files, and copies that have to be equal."""

    def __init__(self, items: Items, entries: Mapping[str, Entry | Item | None], copies: Sequence[Copy]) -> None:
        self._items = items
        self._entries = entries
        self._copies = copies

    def __iter__(self) -> Iterator[Part]:
        found: list[tuple[str, int, str, int]] = []
        for name, entry in self._entries.items():
            if isinstance(entry, Entry):
                found += [(one.file, one.offset, name, at) for at, one in enumerate(entry.items) if one is not None]
            elif entry is not None:
                found.append((entry.file, entry.offset, name, -1))
        found.sort()
        for file, _, name, at in found:
            entry = self._entries[name]
            if isinstance(entry, Item):
                yield Part(repr(name), file, partial(self._items.open, entry))
            elif entry is not None and (item := entry.items[at]) is not None:
                offsets, sizes = entry.boxes[at]
                compare = partial(self._piece_contradiction, entry, sizes)
                opens = partial(self._items.piece, name, item, offsets)
                yield Part(f"{name!r} at {list(offsets)}", file, opens, compare, at=(item.offset, item.nbytes))
        for copy in self._copies:
            entry = self._entries[copy.name]
            same = partial(self._piece_contradiction, entry, None) if isinstance(entry, Entry) else None
            reader: Callable[[Item], Parsed] = self._items.open
            if copy.offsets is not None:
                reader = partial(self._items.piece, copy.name, offsets=copy.offsets)
            other = copy.other
            place = other.offset, other.nbytes
            yield Part(repr(copy.name), other.file, partial(reader, other), same, partial(reader, copy.taken), place)

    @staticmethod
    def _piece_contradiction(entry: Entry, sizes: tuple[int, ...] | None, parsed: Parsed) -> str | None:
        """Return how an item contradicts the index; None if it does not."""
        try:
            info = parsed.tensor()
        except Failure as error:
            return error.message
        if info is None:
            return "is no tensor"
        flat = sizes is not None and len(sizes) == 1 and info.numel == sizes[0]
        if sizes is not None and info.shape != sizes and not flat:
            return f"has shape {list(info.shape)}, not {list(sizes)}"
        if info.dtype != entry.dtype:
            return f"is of {info.dtype}, not {entry.dtype}"
        return None


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


def _undone(limits: Limits, item: SliceSource, transforms: tuple[str, ...]) -> bytes:
    data = item.read(0, item.nbytes)
    for _ in transforms:
        data = unpack(data, limits)
    return data


class _UndoneSource(StepwiseSource):
    """The bytes of an item before it was changed. They are in memory only while they are read."""

    def __init__(self, content: Callable[[], bytes], cancellation: Cancellation | None) -> None:
        self._content = content
        self.cancellation = cancellation
        self.nbytes = len(content())

    def _read(self, offset: int, nbytes: int) -> bytes:
        return self._content()[offset : offset + nbytes]
