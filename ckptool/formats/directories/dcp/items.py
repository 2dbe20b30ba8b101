"""
The items of a ``torch.distributed.checkpoint``: each a whole file of ``torch.save``, of one tensor or one value; or
tensors are in files of safetensors.

An item of a tensor is opened when its bytes are asked for. Values are read in one sweep of each file; writers have
thousands of equal ones, each of which is understood once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from ckptool.checkpoints.parsed import Parsed, Stream
from ckptool.errors import CkptoolError, Failure, MalformedFile, TruncatedFile
from ckptool.formats.directories.dcp.entries import Item
from ckptool.formats.directories.dcp.safetensors_items import SafetensorsItems
from ckptool.formats.directories.dcp.transforms import Undone, check_known
from ckptool.formats.probe import Probe
from ckptool.pickles.nodes import Inert
from ckptool.pickles.reader import Pickle, read_pickle
from ckptool.sources.folder import FolderSource
from ckptool.sources.read_ahead import ReadAhead
from ckptool.sources.source import BytesSource, SliceSource, Source
from ckptool.tensors.rebuild import Rebuilder
from ckptool.tensors.tensor import TensorInfo

_SMALL: Final = 1 << 16
"""Values of fewer bytes are read ahead, and compared with others."""


class Value(NamedTuple):
    """What an item holds that is no piece of a tensor."""

    pickled: Pickle
    rebuilder: Rebuilder
    stream: Stream


class Items:
    """Opens the items of one folder."""

    def __init__(self, folder: FolderSource, probe: Probe) -> None:
        self._folder = folder
        self._probe = probe
        self._undone = Undone(probe.limits)
        self.safetensors = SafetensorsItems(folder, probe)

    def source(self, item: Item) -> Source:
        """
        Return the bytes of an item, as ``torch.save`` wrote them.

        Raises:
            FileUnavailable: Its file is missing.
            TruncatedFile: Its file ends before it does.
            UnsupportedFeature: It was changed in a way that nothing here can undo.
            MissingPackage: What can undo it is not installed.
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
        return self._undone.source(whole, item.transforms) if item.transforms else whole

    def open(self, item: Item) -> Parsed:
        """Read what an item holds."""
        return self._probe.read_inner(self.source(item))

    def piece(self, name: str, item: Item, offsets: tuple[int, ...]) -> Parsed:
        """Read an item that is the piece of a tensor, which begins at these offsets."""
        if not item.transforms and self.safetensors.begin_at(item.file, item.offset):
            return self.safetensors.piece(name, item, offsets)
        return self.open(item)

    def tensor(self, name: str, item: Item, offsets: tuple[int, ...]) -> TensorInfo:
        """Return the piece of a tensor that an item is."""
        try:
            info = self.piece(name, item, offsets).tensor()
        except CkptoolError as error:
            if item.file not in error.message:
                error.message = f"the item of {name!r} in {item.file!r}: {error.message}"
            raise
        if info is None:
            raise MalformedFile(f"the item of {name!r} in {item.file!r} is no tensor", kind="piece")
        return info

    def values(self, items: Mapping[str, Item]) -> Iterator[tuple[str, Value | CkptoolError]]:
        """Yield each value by its name, or why it cannot be read, in the order of the files."""
        known: dict[bytes, Value] = {}
        ahead: tuple[str, ReadAhead] | None = None
        for name, item in sorted(items.items(), key=lambda one: (one[1].file, one[1].offset)):
            try:
                source = self.source(item)
                if item.transforms or item.nbytes > _SMALL:
                    yield name, self._value(name, source)
                    continue
                if ahead is None or ahead[0] != item.file:
                    ahead = item.file, ReadAhead(self._folder.open(item.file))
                data = ahead[1].read(item.offset, item.nbytes)
                value = known.get(data)
                if value is None:
                    value = self._value(name, BytesSource(data, source.cancellation, is_file=True))
                    if _is_plain(value.pickled.root):
                        known[data] = value
                yield name, value
            except Failure as error:
                if item.file not in error.message:
                    error.message = f"the item of {name!r} in {item.file!r}: {error.message}"
                yield name, error

    def beside(self, name: str) -> Value:
        """Return what a file of the folder holds that the index does not name."""
        return self._value(name, self._folder.open(name))

    def _value(self, name: str, source: Source) -> Value:
        parsed = self._probe.read_inner(source)
        if parsed.rebuilder is None or not parsed.streams:
            raise MalformedFile("is no file of torch.save", kind="item")
        stream = parsed.streams[0]
        return Value(
            read_pickle(stream.source, stream.start),
            parsed.rebuilder,
            stream.inside(name),
        )


def _is_plain(root: Inert) -> bool:
    """Say whether a value cannot be told from another that is equal: a number, a word, a tuple of such."""
    parts = root if type(root) is tuple else (root,)
    return all(part is None or type(part) in (bool, int, float, str) for part in parts)
