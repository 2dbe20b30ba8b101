"""
The index of a DCP folder: a pickle of ``torch.distributed.checkpoint.metadata.Metadata``, as torch 2.13 writes it.

What newer releases have added is left out where older ones would look up a class that they lack. The path of the folder
is left out, too: it is that of a machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from ckptool.migration.folders.dcp_items import Item
from ckptool.pickles.nodes import Call, Dict, Global, Inert, Pairs
from ckptool.pickles.writer import write_pickle
from ckptool.tensors.dtypes import DType

NAME: Final = ".metadata"
ITEMS: Final = "__0_0.distcp"
"""The file that holds the items."""
_MODULE: Final = "torch.distributed.checkpoint.metadata"
_VERSION: Final = "1.0.0"

Path = tuple[str | int, ...]
Box = tuple[tuple[int, ...], tuple[int, ...]]


class Entry(NamedTuple):
    """A tensor or a value of the state dict."""

    name: str
    path: Path
    """The keys and positions that lead to it where it is nested."""
    tensor: tuple[DType, tuple[int, ...], bool] | None = None
    """Element type, shape and whether it requires a gradient; None for a value."""
    boxes: Sequence[Box] = ()
    """How the tensor is cut: offsets and sizes."""


def index(entries: Iterable[Entry], items: Iterable[Item]) -> bytes:
    """Return the pickle of what there is, and where each item lies in the file of items."""
    sizes = _Sizes()
    entries = list(entries)
    numbers = {(one.name, offsets): number for one in entries for number, (offsets, _) in enumerate(one.boxes)}
    places: Pairs = []
    position = 0
    for item in items:
        number = None if item.offsets is None else numbers[item.name, item.offsets]
        key: Pairs = [("fqn", item.name), ("index", number)]
        if item.offsets is not None:
            key.append(("offset", sizes.node(item.offsets)))
        place = [("relative_path", ITEMS), ("offset", position), ("length", item.nbytes)]
        info = Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
        places.append((_object(Global(_MODULE, "MetadataIndex"), key), _object(info, place)))
        position += item.nbytes
    fields: Pairs = [
        ("state_dict_metadata", Dict([(one.name, _metadata(one, sizes)) for one in entries])),
        ("planner_data", Dict([(one.name, one.path) for one in entries])),
        ("storage_data", Dict(places)),
        ("storage_meta", None),
        ("version", _VERSION),
    ]
    return write_pickle(_object(Global(_MODULE, "Metadata"), fields))


class _Sizes:
    """Shapes and offsets as nodes, one for all that are equal."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, ...], Inert] = {}

    def node(self, sizes: tuple[int, ...]) -> Inert:
        return self._made.setdefault(sizes, Call(Global("torch", "Size"), (sizes,)))


_LAYOUT: Final = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
_MEMORY_FORMAT: Final = Call(Global(_MODULE, "_MEM_FORMAT_ENCODING"), (0,))


def _metadata(entry: Entry, sizes: _Sizes) -> Inert:
    if entry.tensor is None:
        return _object(Global(_MODULE, "BytesStorageMetadata"), [])
    dtype, shape, requires_grad = entry.tensor
    properties = Call(Global(_MODULE, "TensorProperties"), (), "newobj")
    properties.state = (Global("torch", dtype.name), _LAYOUT, requires_grad, _MEMORY_FORMAT, False)
    chunks = [
        _object(Global(_MODULE, "ChunkStorageMetadata"), [("offsets", sizes.node(offsets)), ("sizes", sizes.node(box))])
        for offsets, box in entry.boxes
    ]
    fields = [("properties", properties), ("size", sizes.node(shape)), ("chunks", chunks)]
    return _object(Global(_MODULE, "TensorStorageMetadata"), fields)


def _object(cls: Global, fields: Pairs) -> Inert:
    made = Call(cls, (), "newobj")
    made.state = Dict(fields) if fields else None
    return made
