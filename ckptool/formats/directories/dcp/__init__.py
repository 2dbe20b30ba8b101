"""
``torch.distributed.checkpoint`` (DCP): an index, and files of items one behind the other.

    .metadata              a pickle: names, shapes, how each tensor is cut, and where the pieces are
    __<rank>.metadata      instead of it, one for each rank that saved for itself
    __<rank>_<n>.distcp    items: each a whole file of ``torch.save``, of one tensor or one value; or values, and behind
                           them a file of safetensors with all tensors
    meta.pt, common.pt     values that Lightning, or Megatron, keeps beside them: a file of ``torch.save``

Strategy: the index alone tells names, shapes and types. Items of values are read as data when the folder is opened;
those of tensors when their bytes are asked for. What is missing is said, and does not hide the rest.
See torch/distributed/checkpoint/{metadata,filesystem}.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ckptool.cancellation import each
from ckptool.checkpoints.arrays import collect_weights
from ckptool.checkpoints.companions import Shard
from ckptool.checkpoints.parsed import Parsed, Traits
from ckptool.checkpoints.roles import WEIGHT_KEYS
from ckptool.errors import CkptoolError, Failure
from ckptool.formats.directories.dcp import flattened, whole
from ckptool.formats.directories.dcp.entries import Entry, Item
from ckptool.formats.directories.dcp.items import ItemParts, Items, Value
from ckptool.formats.directories.dcp.ranks import ITEMS, Merged, is_index, read_indexes
from ckptool.formats.directories.tree import Path, TreeBuilder, nested
from ckptool.formats.probe import Probe
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Inert
from ckptool.sources.folder import FolderSource
from ckptool.tensors.pieces import Piece, PiecesSource, in_pieces
from ckptool.tensors.tensor import TensorInfo

NAME = "dcp"
TRAITS = Traits(has_tree=True, loader="torch.distributed.checkpoint.load", is_trusted=True)


def sniff(folder: FolderSource) -> bool:
    """Say whether there is an index of DCP in the folder, or what is left of a save that was not finished."""
    if any(name.endswith(ITEMS) or is_index(folder, name) for name in folder.files):
        return True
    return whole.COMMON in folder.files and whole.is_torch_dist(folder)


def read(folder: FolderSource, probe: Probe) -> Parsed:
    """
    Read the index of a folder, and the items that are no tensors.

    Raises:
        FileUnavailable: There is no index: the save was not finished.
        MalformedFile: The index is none of DCP.
        CkptoolError: It cannot be read.
    """
    index = read_indexes(folder, probe.limits)
    files = whole.look_at(folder, index)
    lost = whole.lost(index, files)
    items = Items(folder, probe)
    values, errors = _values(index, items, lost)
    builder = TreeBuilder(probe.limits)
    leaves: list[tuple[Path, Inert]] = []
    for name, entry in each(index.entries.items(), probe.limits.cancellation):
        path = index.paths.get(name, (name,))
        if name in values:
            leaves.append((path, builder.graft(values[name].pickled, values[name].rebuilder)))
        elif isinstance(entry, Entry):
            whole_shape = index.whole_shapes.get(name)
            info = _tensor(folder, items, name, entry, whole_shape, lost.faults.get(name))
            leaves.append((path, builder.tensor(info)))
    distinct = {id(one): one.stream for one in values.values()}
    streams = [*index.streams, *distinct.values()]
    remarks = [*whole.remarks(folder, index, files, lost, items.safetensors), *whole.unread_values(index, errors, lost)]
    unread = [name for name, one in index.entries.items() if not isinstance(one, Entry) and name not in values]
    taken = {path[0] for path, _ in leaves}
    of_index = frozenset(taken)
    for name in filter(folder.has, (whole.META, whole.COMMON)):
        try:
            beside = items.beside(name)
        except Failure as error:
            remarks.append(whole.unread_beside(name, error))
            unread.append(name)
        else:
            streams.append(beside.stream)
            leaves += _beside(name, builder.graft(beside.pickled, beside.rebuilder), taken)
    remarks += whole.missing_beside(folder, index, of_index)
    root, keys_beside = nested(leaves), taken - of_index
    del leaves, taken, of_index  # there may be very many, and what follows takes memory, too
    as_safetensors = items.safetensors.files(index.entries.values())
    if as_safetensors:
        remarks.append(whole.written_as_safetensors(as_safetensors))
    return Parsed(
        index.streams[0].source,
        NAME,
        TRAITS._replace(is_read=not as_safetensors),
        collect_weights(root, builder.rebuilder, probe.limits, beside=keys_beside),
        root=root,
        rebuilder=builder.rebuilder,
        streams=tuple(streams),
        shards=tuple(_shards(index, files)),
        remarks=tuple(remarks),
        lost=tuple(unread),
        absent=tuple(name for name in unread if name in WEIGHT_KEYS),
        parts=ItemParts(items, index.entries, index.copies),
    )


def _values(index: Merged, items: Items, lost: whole.Lost) -> tuple[dict[str, Value], dict[str, CkptoolError]]:
    """Return the values, and why others cannot be read. A quantised tensor in one piece is one: its item has scales."""
    wanted = {}
    for name, entry in index.entries.items():
        item = entry.items[0] if isinstance(entry, Entry) and _is_quantised(entry) else entry
        if isinstance(item, Item) and name not in lost.faults:
            wanted[name] = item
    values: dict[str, Value] = {}
    errors: dict[str, CkptoolError] = {}
    for name, found in items.values(wanted):
        if isinstance(found, CkptoolError):
            errors[name] = found
        else:
            values[name] = found
    return values, errors


def _is_quantised(entry: Entry) -> bool:
    return entry.dtype.is_quantised and len(entry.items) == 1


def _tensor(
    folder: FolderSource,
    items: Items,
    name: str,
    entry: Entry,
    whole_shape: tuple[int, ...] | None,
    fault: CkptoolError | None,
) -> TensorInfo:
    """Return the facts of a tensor whose pieces are items."""
    shape = entry.shape if whole_shape is None else whole_shape
    source = PiecesSource(
        shape, entry.dtype, _Pieces(items, name, entry, whole_shape), folder.cancellation, name=name, fault=fault
    )
    return in_pieces(name, shape, entry.dtype, source, "cpu")


class _Pieces:
    """Makes the pieces of a tensor when they are asked for."""

    __slots__ = ("_entry", "_items", "_name", "_whole_shape")  # there is one for each tensor

    def __init__(self, items: Items, name: str, entry: Entry, whole_shape: tuple[int, ...] | None) -> None:
        self._items = items
        self._name = name
        self._entry = entry
        self._whole_shape = whole_shape

    def __call__(self) -> list[Piece]:
        entry = self._entry
        found = [
            (box, item.file, partial(self._items.tensor, self._name, item, box[0]))
            for box, item in zip(entry.boxes, entry.items, strict=True)
            if item is not None
        ]
        if self._whole_shape is not None:
            return list(flattened.pieces(self._whole_shape, entry.shape, found))
        return [Piece(offsets, sizes, file, read) for (offsets, sizes), file, read in found]


def _beside(file: str, root: Inert, taken: set[str | int]) -> Iterator[tuple[Path, Inert]]:
    """Yield what a file beside the items holds, under keys that the index does not have."""
    pairs = nodes.mapping_pairs(root)
    if pairs is None or any(type(key) is not str for key, _ in pairs):
        pairs = [(file, root)]
    for key, node in pairs:
        own = key if key not in taken else f"{file}.{key}"
        taken.add(own)
        yield (own,), node


def _shards(index: Merged, files: whole.Files) -> Iterator[Shard]:
    """Yield the files that the index names, as far as they are there."""
    for file in sorted(files.sources):
        source = files.sources[file]
        yield Shard(file, index.files[file].items, source.nbytes, source, "item")
