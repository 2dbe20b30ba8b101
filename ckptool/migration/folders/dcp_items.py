"""
The file of a DCP folder that holds everything but the index: items one behind the other, each a whole zip.

The index is a pickle of ``torch.distributed.checkpoint.metadata.Metadata``, as torch 2.13 writes it. What newer
releases have added is left out where older ones would look up a class that they lack. The path of the folder is left
out, too: it is that of a machine.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from itertools import chain, groupby, islice
from operator import attrgetter
from typing import Final, NamedTuple, TypeVar

from ckptool.errors import OutputFailed
from ckptool.limits import Limits
from ckptool.migration.output.sink import Sink
from ckptool.migration.transfer import Transfer
from ckptool.migration.zip_writer import append_torch_zip, torch_zip_nbytes
from ckptool.pickles.nodes import Call, Dict, DictInBatches, Global, Inert, PairList, Pairs
from ckptool.pickles.writer import write_pickle
from ckptool.sources.checksums import checksums_of_file, joined_crc32
from ckptool.sources.files import open_source
from ckptool.sources.meter import Meter
from ckptool.sources.source import prefetch
from ckptool.tensors.dtypes import DType
from ckptool.tensors.payloads import Payload

_ROOT: Final = "archive"  # torch's name for what has no file name
NAME: Final = ".metadata"
_MODULE: Final = "torch.distributed.checkpoint.metadata"
_VERSION: Final = "1.0.0"
_BATCH: Final = 1000
"""How many entries are nodes at a time, as ``pickle`` itself writes them."""
_K = TypeVar("_K")
Path = tuple[str | int, ...]
Box = tuple[tuple[int, ...], tuple[int, ...]]
_LAYOUT: Final = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
_MEMORY_FORMAT: Final = Call(Global(_MODULE, "_MEM_FORMAT_ENCODING"), (0,))


class Item(NamedTuple):
    """A tensor, a box of one, or a value, as ``torch.save`` writes it to a stream."""

    name: str
    offsets: tuple[int, ...] | None
    """Where the box begins in its tensor; None for a value."""
    pickled: bytes
    storages: tuple[Payload, ...]
    nbytes: int


class WrittenItems(NamedTuple):
    """What was written: for each member of each zip its offset, its size and its checksum."""

    offsets: array[int]
    sizes: array[int]
    checksums: array[int]
    frame_crc32: int
    """The checksum of all that is no member."""


def item(
    name: str,
    offsets: tuple[int, ...] | None,
    pickled: bytes,
    storages: tuple[Payload, ...],
    known: dict[tuple[int, ...], int],
) -> Item:
    """Return an item with its size: one number for all that are alike, which are ``known``, as there may be many."""
    parts = (len(pickled), *(payload.nbytes for payload in storages))
    nbytes = known.get(parts)
    if nbytes is None:
        nbytes = known[parts] = torch_zip_nbytes(_ROOT, parts[0], parts[1:])
    return Item(name, offsets, pickled, storages, nbytes)


class ItemsFile(NamedTuple):
    """A file that is ready to be written."""

    items: tuple[Item, ...]
    cut: tuple[tuple[int, int, Payload], ...]
    """Storages that are cut into the items from one number up to another, in order."""

    @property
    def nbytes(self) -> int:
        """Size of the file in bytes."""
        return sum(one.nbytes for one in self.items)

    @property
    def copied(self) -> list[Payload]:
        """What is copied into the file, also in several items."""
        whole = [payload for one in self.items for payload in one.storages]
        return [*whole, *(payload for _, _, payload in self.cut)]

    def write(self, output: Sink, *, checksums: bool = True) -> WrittenItems:
        """
        Write the file, and return its members with the CRC-32 of what was read for each.

        Raises:
            DamagedFile: The source has another checksum for a storage.
        """
        written = WrittenItems(array("Q"), array("Q"), array("Q"), 0)
        own: list[int] = []
        with Transfer(output, checksums=checksums) as transfer:
            for one in self.items:
                begin, frame = output.position, written.frame_crc32
                done = append_torch_zip(output, transfer, _ROOT, one.pickled, one.storages, frame)
                written = written._replace(frame_crc32=done.frame_crc32)
                for member in done.members:
                    written.offsets.append(member.offset)
                    written.sizes.append(member.nbytes)
                    written.checksums.append(member.crc32)
                own.append(done.members[-2].crc32)
                if output.position - begin != one.nbytes:
                    raise OutputFailed(f"the item of {one.name!r} is not as long as it was to be")
        output.flush()
        for start, stop, storage in self.cut:
            found = 0
            for one, checksum in zip(self.items[start:stop], own[start:stop], strict=True):
                found = joined_crc32(found, checksum, one.storages[0].nbytes)
            storage.check(found)
        return written

    def verify(self, path: str, written: WrittenItems, limits: Limits, meter: Meter) -> None:
        """
        Read the file back, every byte of it. Whether its items are what the index says is seen once the index is there.

        Raises:
            OutputFailed: The file does not hold what was to be written.
        """
        source, _ = open_source(path, limits.cancellation)
        with closing(source):
            prefetch(source, [(0, source.nbytes)])
            ends = map(sum, zip(written.offsets, written.sizes, strict=True))
            ranges = list(zip(written.offsets, ends, strict=True))
            found, frame = checksums_of_file(source, ranges, meter)
        if frame != written.frame_crc32 or found != written.checksums.tolist():
            raise OutputFailed("its items were not written as they were read", kind="verification-failed")


class Entry(NamedTuple):
    """A tensor or a value of the state dict."""

    name: str
    path: Path
    """The keys and positions that lead to it where it is nested."""
    tensor: tuple[DType, tuple[int, ...], bool] | None = None
    """Element type, shape and whether it requires a gradient; None for a value."""
    boxes: Sequence[Box] = ()
    """How the tensor is cut: offsets and sizes."""


def index(entries: Sequence[Entry], files: Sequence[tuple[str, Sequence[Item]]]) -> bytes:
    """
    Return the pickle of what there is, and where each item lies: names of files, each with its items.

    The items of a tensor are one behind the other in one file, in the order of its boxes.
    """
    nodes = _Nodes()
    fields: PairList = [
        ("state_dict_metadata", _in_batches((one.name, _metadata(one, nodes)) for one in entries)),
        ("planner_data", _in_batches((one.name, one.path) for one in entries)),
        ("storage_data", _in_batches(chain.from_iterable(_places(*file, nodes) for file in files))),
        ("storage_meta", None),
        ("version", _VERSION),
    ]
    return write_pickle(_object(Global(_MODULE, "Metadata"), fields), shared=nodes.shared)


def _in_batches(pairs: Iterator[tuple[Inert, Inert]]) -> DictInBatches:
    # The names of all globals here are plain, so this is written once, with protocol 2.
    return DictInBatches(lambda: iter(lambda: list(islice(pairs, _BATCH)), []))


def _places(file: str, items: Iterable[Item], nodes: _Nodes) -> Iterator[tuple[Inert, Inert]]:
    """Yield which piece or value each item is, and where it lies."""
    position = 0
    for _, own in groupby(items, key=attrgetter("name")):
        for number, item in enumerate(own):
            key: PairList = [("fqn", item.name), ("index", None if item.offsets is None else number)]
            if item.offsets is not None:
                key.append(("offset", nodes.sizes(item.offsets)))
            place: PairList = [("relative_path", file), ("offset", position), ("length", item.nbytes)]
            info = Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
            yield _object(Global(_MODULE, "MetadataIndex"), key), _object(info, place)
            position += item.nbytes


class _Nodes:
    """What is met again and again, as nodes: one for all that are equal, so that readers have few objects as well."""

    def __init__(self) -> None:
        self._sizes: dict[tuple[int, ...], Inert] = {}
        self._chunks: dict[Box, Inert] = {}
        self._properties: dict[tuple[DType, bool], Inert] = {}
        self.shared = {id(_LAYOUT), id(_MEMORY_FORMAT)}

    def sizes(self, sizes: tuple[int, ...]) -> Inert:
        return self._sizes.get(sizes) or self._new(self._sizes, sizes, Call(Global("torch", "Size"), (sizes,)))

    def chunk(self, box: Box) -> Inert:
        known = self._chunks.get(box)
        if known is not None:
            return known
        fields: PairList = [("offsets", self.sizes(box[0])), ("sizes", self.sizes(box[1]))]
        return self._new(self._chunks, box, _object(Global(_MODULE, "ChunkStorageMetadata"), fields))

    def properties(self, dtype: DType, requires_grad: bool) -> Inert:
        known = self._properties.get((dtype, requires_grad))
        if known is not None:
            return known
        made = Call(Global(_MODULE, "TensorProperties"), (), "newobj")
        made.state = (Global("torch", dtype.name), _LAYOUT, requires_grad, _MEMORY_FORMAT, False)
        return self._new(self._properties, (dtype, requires_grad), made)

    def _new(self, kept: dict[_K, Inert], key: _K, made: Inert) -> Inert:
        kept[key] = made
        self.shared.add(id(made))
        return made


def _metadata(entry: Entry, nodes: _Nodes) -> Inert:
    if entry.tensor is None:
        return _object(Global(_MODULE, "BytesStorageMetadata"), [])
    dtype, shape, requires_grad = entry.tensor
    fields: PairList = [
        ("properties", nodes.properties(dtype, requires_grad)),
        ("size", nodes.sizes(shape)),
        ("chunks", [nodes.chunk(box) for box in entry.boxes]),
    ]
    return _object(Global(_MODULE, "TensorStorageMetadata"), fields)


def _object(cls: Global, fields: Pairs) -> Inert:
    made = Call(cls, (), "newobj")
    made.state = Dict(fields) if fields else None
    return made
