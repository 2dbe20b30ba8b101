"""
``torch.distributed.checkpoint`` (DCP): an index, and files of items one behind the other.

    .metadata              a pickle: names, shapes, how each tensor is cut, and where the pieces are
    __<rank>_<n>.distcp    items: each a whole file of ``torch.save``, of one tensor or one value

Strategy: the index alone tells names, shapes and types. Items of values are read as data when the folder is opened;
those of tensors when their bytes are asked for. See torch/distributed/checkpoint/{metadata,filesystem}.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from ckptool.cancellation import each
from ckptool.checkpoints.arrays import collect_weights
from ckptool.checkpoints.parsed import Parsed, Shard, Stream, Traits
from ckptool.errors import MalformedFile, TruncatedFile
from ckptool.formats.directories.tree import Path, TreeBuilder, nested
from ckptool.formats.probe import Probe
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Call, Inert
from ckptool.pickles.reader import Pickle, read_pickle
from ckptool.sources.folder import FolderSource
from ckptool.sources.source import SliceSource, Source
from ckptool.tensors.pieces import Piece, PiecesSource, check_tiling, in_pieces
from ckptool.tensors.rebuild_arguments import as_dtype, as_sizes
from ckptool.tensors.tensor import TensorInfo, is_size

NAME = "dcp"
TRAITS = Traits(has_tree=True, loader="torch.distributed.checkpoint.load")
INDEX = ".metadata"
_MODULE = "torch.distributed.checkpoint.metadata"


class _Item(NamedTuple):
    """Bytes of a file that are one item."""

    file: str
    offset: int
    nbytes: int


class _Entry(NamedTuple):
    """A tensor of the index; ``boxes`` are its pieces, offsets and sizes each."""

    name: str
    info: Inert
    """Its properties, of which the element type counts."""
    shape: tuple[int, ...]
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]


def sniff(folder: FolderSource) -> bool:
    """Say whether there is an index of DCP in the folder."""
    return INDEX in folder.files


def read(folder: FolderSource, probe: Probe) -> Parsed:
    """
    Read the index of a folder, and the items that are no tensors.

    Raises:
        MalformedFile: The index is none of DCP, or its pieces do not fit together.
        FileUnavailable: A file that it names is missing.
        TruncatedFile: A file ends before an item does.
    """
    index = folder.open(INDEX)
    pickled = read_pickle(index)
    fields = _fields(pickled.root)
    items = dict(_items(nodes.lookup(fields, "storage_data")))
    paths = _paths(nodes.lookup(fields, "planner_data"))
    builder = TreeBuilder(probe.limits)
    streams = [Stream(INDEX, index, 0, pickled.end, pickled.globals)]
    leaves: list[tuple[Path, Inert]] = []
    for name, entry in each(_pairs(nodes.lookup(fields, "state_dict_metadata")), probe.limits.cancellation):
        if not isinstance(name, str):
            raise _malformed("a name that is no text")
        path = paths.get(name, (name,))
        if _is(entry, "BytesStorageMetadata"):
            value = probe.read_inner(_source(folder, _item(items, name, None)))
            assert value.rebuilder is not None  # noqa: S101 - a file of torch.save has one
            leaves.append((path, builder.graft(_pickled(value), value.rebuilder)))
            streams += [one._replace(record=f"{name}/{one.record}") for one in value.streams]
        else:
            leaves.append((path, builder.tensor(_tensor(folder, probe, name, entry, items))))
    root = nested(leaves)
    contents = collect_weights(root, builder.rebuilder, probe.limits)
    return Parsed(
        index,
        NAME,
        TRAITS,
        contents,
        root=root,
        rebuilder=builder.rebuilder,
        streams=tuple(streams),
        shards=tuple(_files(folder, items)),
    )


def _fields(root: Inert) -> nodes.Pairs:
    if not _is(root, "Metadata"):
        raise _malformed(f"it holds {nodes.class_name(root)} and no Metadata")
    return nodes.attribute_pairs(root)


def _is(node: Inert, name: str) -> bool:
    found = nodes.class_of(node)
    return found is not None and found.name == name and found.module.startswith("torch.distributed.")


def _pairs(node: Inert) -> nodes.Pairs:
    pairs = nodes.mapping_pairs(node)
    if pairs is None:
        raise _malformed("no mapping where one has to be")
    return pairs


def _items(node: Inert) -> Iterator[tuple[tuple[str, tuple[int, ...] | None], _Item]]:
    """Yield where each item is, by its name and, of a piece of a tensor, its offsets."""
    for key, value in _pairs(node):
        own, place = nodes.attribute_pairs(key), nodes.attribute_pairs(value)
        name, offset = nodes.lookup(own, "fqn"), nodes.lookup(own, "offset")
        file, begin, length = (nodes.lookup(place, field) for field in ("relative_path", "offset", "length"))
        if type(name) is not str or type(file) is not str or not is_size(begin) or not is_size(length):
            raise _malformed("an item without a name, or a place")
        yield (name, None if offset is None else as_sizes(offset)), _Item(file, begin, length)


def _paths(node: Inert) -> dict[str, Path]:
    """Return the path in the nested state dict of each name, as far as the index says."""
    found: dict[str, Path] = {}
    for name, path in nodes.mapping_pairs(node) or ():
        if isinstance(name, str) and isinstance(path, tuple) and path:
            found[name] = tuple(key if type(key) is int else str(key) for key in path)
    return found


def _item(items: dict[tuple[str, tuple[int, ...] | None], _Item], name: str, at: tuple[int, ...] | None) -> _Item:
    found = items.get((name, at))
    if found is None:
        raise _malformed(f"no item for {name!r}" + ("" if at is None else f" at {list(at)}"))
    return found


def _tensor(
    folder: FolderSource,
    probe: Probe,
    name: str,
    entry: Inert,
    items: dict[tuple[str, tuple[int, ...] | None], _Item],
) -> TensorInfo:
    """Return the facts of a tensor whose pieces are items."""
    fields = nodes.attribute_pairs(entry)
    properties = nodes.lookup(fields, "properties")
    state = properties.state if isinstance(properties, Call) else None
    dtype = as_dtype(
        state[0] if isinstance(state, tuple) and state else nodes.lookup(nodes.state_pairs(state), "dtype")
    )
    shape = as_sizes(nodes.lookup(fields, "size"))
    chunks = nodes.lookup(fields, "chunks")
    if not isinstance(chunks, list):
        raise _malformed(f"{name!r} without pieces")
    boxes = []
    for chunk in chunks:
        own = nodes.attribute_pairs(chunk)
        boxes.append((as_sizes(nodes.lookup(own, "offsets")), as_sizes(nodes.lookup(own, "sizes"))))
    check_tiling(name, shape, boxes)
    pieces = []
    for offsets, sizes in boxes:
        item = _item(items, name, offsets)
        pieces.append(Piece(offsets, sizes, item.file, partial(_open, folder, probe, name, item)))
    source = PiecesSource(shape, dtype, pieces, folder.cancellation, name=name)
    return in_pieces(name, shape, dtype, source, "cpu")


def _open(folder: FolderSource, probe: Probe, name: str, item: _Item) -> TensorInfo:
    """Return the tensor that an item is."""
    found = probe.read_inner(_source(folder, item))
    info = found.rebuilder.tensor(found.root) if found.rebuilder is not None else None
    if info is None:
        raise _malformed(f"an item of {name!r} in {item.file!r} that is no tensor")
    return info


def _source(folder: FolderSource, item: _Item) -> Source:
    file = folder.open(item.file)
    if item.offset + item.nbytes > file.nbytes:
        raise TruncatedFile(
            f"{item.file!r} is truncated: {item.nbytes:,} bytes at {item.offset:,} are needed, it has {file.nbytes:,}",
            kind="truncated-piece",
            hint="Copy or download it again.",
            needed=item.offset + item.nbytes,
            actual=file.nbytes,
        )
    return SliceSource(file, item.offset, item.nbytes)


def _pickled(value: Parsed) -> Pickle:
    stream = value.streams[0]
    return read_pickle(stream.source, stream.start)


def _files(folder: FolderSource, items: dict[tuple[str, tuple[int, ...] | None], _Item]) -> Iterator[Shard]:
    """Yield the files that the index names, and how many items each holds."""
    counts: dict[str, int] = {}
    for (_, at), item in items.items():
        counts[item.file] = counts.get(item.file, 0) + (at is not None)
    for file, count in sorted(counts.items()):
        source = folder.open(file)
        yield Shard(file, count, source.nbytes, source)


def _malformed(what: str) -> MalformedFile:
    return MalformedFile(f"{INDEX!r} is no index of torch.distributed.checkpoint: {what}", kind="malformed-index")
