"""
An index of DCP, ``.metadata``: names, shapes, boxes, and where the bytes are.

It may have hundreds of thousands of entries. So nodes are released as soon as they are read, and no number from a file
is ever hashed: items and boxes are matched because both are sorted. See torch/distributed/checkpoint/metadata.py, and
filesystem.py for ``_StorageInfo``.

Ranks that saved independently have an index each, ``__<rank>.metadata``, of that rank's own items alone. Replicated
items are in all of them: the first is taken, and the others are copies, which a check of every byte compares with it.

Tensors of Megatron-core may be flattened before they are cut: states that its distributed optimizer divides. A tensor
``[X, Y]`` of which each model-parallel rank has ``[x, y]`` is in the index as one of ``[X/x, Y/y, x·y]``, whose last
dimension is cut anywhere. The index has the shape of the whole in ``mcore_data``. See
megatron/core/dist_checkpointing/strategies/torch.py of megatron-core 0.7 to 0.14.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import pairwise
from math import prod
from operator import itemgetter
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

from ckptool.cancellation import each
from ckptool.checkpoints.parsed import Stream
from ckptool.errors import CkptoolError, Failure, FileUnavailable, LimitExceeded, MalformedFile, within
from ckptool.formats.directories.side_by_side import Path, tiling_fault
from ckptool.limits import Limits, refuse_long
from ckptool.messages import counted, some
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Call, Dict, FieldNames, Inert
from ckptool.pickles.reader import read_pickle
from ckptool.sources.descriptors import components
from ckptool.sources.files import FileSource
from ckptool.sources.folder import FolderSource
from ckptool.tensors.dtypes import BY_NAME, DType
from ckptool.tensors.pieces import Box, Piece, boxes_of, check_tiling
from ckptool.tensors.rebuild import as_dtype, as_sizes
from ckptool.tensors.tensor import MAX_RANK, MAX_SIZE, TensorInfo, is_size, row_major

INDEX: Final = ".metadata"
ITEMS: Final = ".distcp"
_MARK: Final = b"torch.distributed.checkpoint"
_HEAD_NBYTES: Final = 4096
_OF_RANK: Final = re.compile(r"__(\d{1,9})\.metadata")
_MOST_TRANSFORMS: Final = 8
_MOST_FIELDS: Final = 64
_FLATTENED: Final = "nd_reformulated_orig_global_shape"
_OF_MEGATRON: Final = ("all_local_plans", "mcore_data")
_AGAIN: Final = "Get the folder again, from one save."
_Places: TypeAlias = "dict[str, list[tuple[tuple[Inert, ...] | None, Item]]]"
"""The items of each name, with their offsets; None for those of values."""


class Item(NamedTuple):
    """Bytes of a file that are one piece of a tensor, or one value."""

    file: str
    offset: int
    nbytes: int
    transforms: tuple[str, ...] = ()
    """Changes to undo, in this order, before the bytes are those of ``torch.save``."""


class Entry(NamedTuple):
    """A tensor of the index: its boxes, sorted by their offsets, and the item of each."""

    dtype: DType
    shape: tuple[int, ...]
    boxes: Sequence[Box]
    items: Sequence[Item | None]
    """None where the index has no item for a box."""
    fault: CkptoolError | None = None
    """Why its pieces do not make the whole tensor."""


class Use(NamedTuple):
    """What the index records about one file."""

    items: int
    end: int
    """Offset at which the last of its items ends."""
    overlap: int | None
    """Offset of an item that begins before the end of another one, but not with it; None if there is none."""
    shared: int | None = None
    """Offset at which several items begin; None if there is none."""


class Copy(NamedTuple):
    """The same piece, or value, of another rank."""

    name: str
    taken: Item
    other: Item
    offsets: tuple[int, ...] | None = None
    """Offsets of the piece; None for a value."""


class Index(NamedTuple):
    """The content of one index file, or of all indexes of a folder."""

    entries: dict[str, Entry | Item | None]
    """By name: a tensor, or the item of a value; None for a value that has none."""
    paths: dict[str, Path]
    """The path of a name in the nested state dict, if the index has it."""
    files: dict[str, Use]
    streams: tuple[Stream, ...]
    strays: int = 0
    """Number of items that belong to no entry."""
    whole_shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    """Shapes of the whole tensors that were flattened before they were cut."""
    is_megatrons: bool = False
    """Whether it has what Megatron-core adds to an index."""
    copies: tuple[Copy, ...] = ()
    ranks: tuple[int, ...] = ()
    """The ranks that saved independently; empty if one index is that of all."""


def is_index(folder: FolderSource, name: str) -> bool:
    """Return whether a file is an index, by its name and its first bytes."""
    return (name == INDEX or _OF_RANK.fullmatch(name) is not None) and _MARK in folder.head(name, _HEAD_NBYTES)


def read_indexes(folder: FolderSource, limits: Limits) -> Index:
    """
    Read the index of a folder, or those of its ranks.

    Raises:
        FileUnavailable: There is none: the save was not finished.
        CkptoolError: One cannot be read.
    """
    found = {int(match[1]): name for name in folder.files if (match := _OF_RANK.fullmatch(name))}
    is_one = INDEX in folder.files and not (found and not is_index(folder, INDEX))
    ranks = [] if is_one else sorted(found)
    if not is_one and not ranks:
        items = [name for name in folder.files if name.endswith(ITEMS)]
        fact = f"a torch.distributed.checkpoint in {counted(len(items), 'file')} without its index: there is no {INDEX}"
        if f"{INDEX}.tmp" in folder.files:
            fact += f", but {INDEX}.tmp, which it is called until all is written"
        if items:
            fact += f"; there {'is' if len(items) == 1 else 'are'} {some(items)}"
        hint = "Use another one: saving was not finished. Or copy the index, too, from the machine of rank 0."
        raise FileUnavailable(fact, kind="distributed-checkpoint", hint=hint)
    indexes = []
    for name in [INDEX] if is_one else map(found.__getitem__, ranks):
        source = folder.open(name)
        with within(repr(name), known=repr(name)):
            indexes.append(_read(source, name, limits))
    return indexes[0] if is_one else _merged(indexes)._replace(ranks=tuple(ranks))


def _merged(indexes: Sequence[Index]) -> Index:
    entries: dict[str, Entry | Item | None] = {}
    several: dict[str, list[Entry]] = {}
    copies: list[Copy] = []
    for index in indexes:
        for name, entry in index.entries.items():
            first = entries.setdefault(name, entry)
            if isinstance(entry, Entry):
                several.setdefault(name, []).append(entry)
            if (first is None or isinstance(first, Item)) != (entry is None or isinstance(entry, Item)):
                raise MalformedFile(f"{name!r} is a tensor for one rank and a value for another", kind="ranks")
            if first is not entry and isinstance(first, Item) and isinstance(entry, Item):
                copies.append(Copy(name, first, entry))
    for name, parts in several.items():
        entries[name] = parts[0] if len(parts) == 1 else _joined(name, parts, copies)
    files: dict[str, Use] = {}
    for index in indexes:
        for file, use in index.files.items():
            other = files.get(file, use)
            overlap = use.overlap if other is use else min(use.end, other.end)  # no two ranks write one file
            files[file] = Use(use.items, max(use.end, other.end), overlap, use.shared)
    paths = {name: path for index in reversed(indexes) for name, path in index.paths.items()}
    return Index(
        entries,
        paths,
        files,
        tuple(stream for index in indexes for stream in index.streams),
        strays=sum(index.strays for index in indexes),
        whole_shapes={name: shape for index in indexes for name, shape in index.whole_shapes.items()},
        copies=tuple(copies),
    )


def _joined(name: str, parts: Sequence[Entry], copies: list[Copy]) -> Entry:
    """Return the tensor that the parts of the ranks are; a box that several have is taken from the first."""
    first = parts[0]
    if any((one.dtype, one.shape) != (first.dtype, first.shape) for one in parts):
        raise MalformedFile(f"{name!r} has another shape or type for another rank", kind="ranks")
    # Sorted, not looked up: the numbers are the file's. The sort keeps the order of the ranks.
    found = sorted((pair for one in parts for pair in zip(one.boxes, one.items, strict=True)), key=lambda pair: pair[0])
    boxes: list[Box] = []
    items: list[Item | None] = []
    for box, item in found:
        if boxes and boxes[-1] == box:
            taken = items[-1]
            if item is not None and taken is not None:
                copies.append(Copy(name, taken, item, box[0]))
            continue
        boxes.append(box)
        items.append(item)
    fault = tiling_fault(name, first.shape, boxes)
    if fault is None:
        missing = any(item is None and 0 not in box[1] for box, item in zip(boxes, items, strict=True))
        fault = next((one.fault for one in parts if one.fault is not None), None) if missing else None
    return Entry(first.dtype, first.shape, boxes, items, fault)


def _read(source: FileSource, name: str, limits: Limits) -> Index:
    """Return the content of the index with this name in its folder."""
    pickled = read_pickle(source, field_names=FieldNames())
    if not _is(pickled.root, "Metadata"):
        raise _malformed(f"it holds {nodes.class_name(pickled.root)} and no Metadata")
    fields = nodes.attribute_pairs(pickled.root)
    rest = pickled.end if pickled.end < source.nbytes else None
    stream = Stream(name, source, 0, pickled.end, pickled.globals, is_index=True, rest=rest, opcodes=pickled.opcodes)
    del pickled
    places, uses = _places(_pairs(nodes.lookup(fields, "storage_data")), limits)
    entries: dict[str, Entry | Item | None] = {}
    before = Entry(BY_NAME["float32"], (), (), ())
    whole_shapes = _whole_shapes(nodes.lookup(fields, "mcore_data"))
    described = _pairs(nodes.lookup(fields, "state_dict_metadata"))
    if len(described) > limits.tensors:
        needed = len(described)
        raise LimitExceeded(f"more than {limits.tensors:,} names", needed=needed, actual=limits.tensors)
    left = source.nbytes  # a file could repeat the cost of one list of pieces by sharing it
    described.reverse()  # taken from the end, so that each node is released when it was read
    for _ in each(range(len(described)), limits.cancellation):
        key, entry = described.pop()
        if type(key) is not str:
            raise _malformed("a name that is not text")
        own = places.pop(key, [])
        if _is(entry, "BytesStorageMetadata"):
            whole = [item for offsets, item in own if offsets is None]
            if len(whole) > 1:
                raise _twice(key)
            entries[key] = whole[0] if whole else None
        else:
            found = _entry(key, _fields(entry), own)
            if key in whole_shapes and (fault := _flattened_fault(key, whole_shapes[key], found.shape, found.boxes)):
                found = found._replace(fault=found.fault or fault)
                del whole_shapes[key]  # it is shown as it is in the index
            left -= len(found.boxes)
            if left < 0:
                raise LimitExceeded("more pieces of tensors than the index has bytes", kind="index-bomb")
            if (found.shape, found.boxes) == (before.shape, before.boxes):  # as most are: so they share these
                found = found._replace(shape=before.shape, boxes=before.boxes)
            entries[key] = before = found
    paths = _paths(nodes.lookup(fields, "planner_data"), source.nbytes)
    strays = sum(map(len, places.values()))
    is_megatrons = any(name in _OF_MEGATRON for name, _ in fields)
    return Index(entries, paths, uses, (stream,), strays, whole_shapes, is_megatrons)


def _places(pairs: nodes.PairList, limits: Limits) -> tuple[_Places, dict[str, Use]]:
    found: _Places = {}
    uses: dict[str, list[int]] = {}
    unordered: set[str] = set()
    pairs.reverse()
    for _ in each(range(len(pairs)), limits.cancellation):
        key, value = pairs.pop()
        name: Inert = None
        file: Inert = None
        offsets: Inert = None
        begin: Inert = None
        nbytes: Inert = None
        transforms: tuple[str, ...] = ()
        for field, content in _fields(key):
            if field == "fqn":
                name = content
            elif field == "offset":
                offsets = content
        for field, content in _fields(value):
            if field == "relative_path":
                file = content
            elif field == "offset":
                begin = content
            elif field == "length":
                nbytes = content
            elif field == "transform_descriptors" and content:
                transforms = _transforms(content)
        if type(name) is not str or type(file) is not str or not is_size(begin) or not is_size(nbytes):
            raise _malformed("an item without a name, or a place")
        use = uses.get(file)
        if use is None:  # once for each file, of which there are few
            components(file)
            refuse_long("the name of a file", file)
            use = uses[file] = [0, 0]
        elif begin < use[1]:
            unordered.add(file)
        use[0] += 1
        use[1] = max(use[1], begin + nbytes)
        own = found.get(name)
        if own is None:
            own = found[name] = []
        own.append((None if offsets is None else _numbers(offsets), Item(file, begin, nbytes, transforms)))
    overlaps = _overlaps(found, unordered)
    nowhere = (None, None)
    return found, {file: Use(count, end, *overlaps.get(file, nowhere)) for file, (count, end) in uses.items()}


def _overlaps(places: _Places, files: set[str]) -> dict[str, tuple[int | None, int | None]]:
    """Return offsets where an item begins before the end of another one, and where several begin, for some files."""
    spans: dict[str, list[tuple[int, int]]] = {file: [] for file in files}
    for own in places.values() if files else ():
        for _, item in own:
            if item.file in spans and item.nbytes:
                spans[item.file].append((item.offset, item.offset + item.nbytes))
    found: dict[str, tuple[int | None, int | None]] = {}
    for file, ranges in spans.items():
        overlap: int | None = None
        shared: int | None = None
        last, end = -1, 0
        for begin, stop in sorted(ranges):
            if begin == last and shared in (None, begin):
                shared = begin
            elif begin < end:
                overlap = begin
                break
            last, end = begin, max(end, stop)
        found[file] = overlap, shared
    return found


def _transforms(node: Inert) -> tuple[str, ...]:
    if not isinstance(node, list | tuple) or len(node) > _MOST_TRANSFORMS or not all(type(one) is str for one in node):
        raise _malformed("an item whose transforms are not a list of names")
    refuse_long("the name of a transform", *node)
    return tuple(node)


def _entry(name: str, fields: nodes.Pairs, places: list[tuple[tuple[Inert, ...] | None, Item]]) -> Entry:
    properties = nodes.lookup(fields, "properties")
    state: Inert = properties.state if isinstance(properties, Call) else None
    # Newer releases have a tuple that begins with the element type, older ones a dict.
    is_tuple = type(state) is tuple and bool(state) and not isinstance(state[0], Dict)
    dtype = as_dtype(state[0] if is_tuple else nodes.lookup(_fields(properties), "dtype"))
    shape = as_sizes(nodes.lookup(fields, "size"))
    chunks = nodes.lookup(fields, "chunks")
    if type(chunks) is not list:
        raise _malformed(f"{name!r} without pieces")
    boxes = [_box(chunk) for chunk in chunks]
    own = [(offsets, item) for offsets, item in places if offsets is not None]
    fault: CkptoolError | None = None
    rows: list[Box] | None = None
    try:
        boxes.sort(key=itemgetter(0))
        own.sort(key=itemgetter(0))
        rows = _in_rows(shape, boxes)
        if rows is None:
            rows = [(as_sizes(offsets), as_sizes(sizes)) for offsets, sizes in boxes]
            check_tiling(name, shape, rows)
    except TypeError as error:
        raise _malformed(f"{name!r} has pieces at what are not numbers") from error
    except Failure as error:
        fault = error
    rows = rows or []
    if len(own) > len(rows) and any(one[0] == other[0] for one, other in pairwise(own)):
        raise _twice(name)
    items = _matched(rows, own)
    missing = [box for box, item in zip(rows, items, strict=True) if item is None and 0 not in box[1]]
    if missing and fault is None:
        fault = MalformedFile(
            f"{name!r} has no item for {counted(len(missing), 'piece')}, the first at {list(missing[0][0])}",
            kind="missing-piece",
            hint=_AGAIN,
        )
    return Entry(dtype, shape, rows, items, fault)


def _box(chunk: Inert) -> tuple[tuple[Inert, ...], tuple[Inert, ...]]:
    offsets = sizes = None
    for field, content in _fields(chunk):
        if field == "offsets":
            offsets = content
        elif field == "sizes":
            sizes = content
    return _numbers(offsets), _numbers(sizes)


def _numbers(node: Inert) -> tuple[Inert, ...]:
    """Return the elements of a ``torch.Size``, which are not checked."""
    if type(node) is Call and type(node.args) is tuple and len(node.args) == 1:
        node = node.args[0]
    if type(node) is tuple and len(node) <= MAX_RANK:
        return node
    if type(node) is not list or len(node) > MAX_RANK:
        raise _malformed("a piece without offsets or sizes")
    return tuple(node)


def _in_rows(shape: tuple[int, ...], boxes: Sequence[tuple[tuple[Inert, ...], tuple[Inert, ...]]]) -> list[Box] | None:
    """
    Return boxes that are cut along one dimension and follow each other from its begin to its end; None for others.

    Nearly all are, and this is many times as fast as checking that they tile the shape.
    """
    if not boxes or not shape or 0 in shape:
        return None
    axis = next((axis for axis, (size, whole) in enumerate(zip(boxes[0][1], shape, strict=False)) if size != whole), 0)
    before, after, zeros = shape[:axis], shape[axis + 1 :], (0,) * len(shape)
    found: list[Box] = []
    at, last, sizes = 0, 0, shape
    for given, given_sizes in boxes:
        offsets = (*zeros[:axis], at, *zeros[axis + 1 :]) if at else zeros
        size: Inert = given_sizes[axis] if len(given_sizes) > axis else None
        if type(size) is not int or size <= 0 or given != offsets:
            return None
        if size != last:
            last, sizes = size, (*before, size, *after) if size != shape[axis] else shape
        if given_sizes != sizes:
            return None
        found.append((offsets, sizes))
        at += size
    return found if at == shape[axis] else None


def _matched(boxes: Sequence[Box], places: Sequence[tuple[tuple[Inert, ...], Item]]) -> list[Item | None]:
    """Return the item of each box, which has the offsets of the box; both are sorted by them."""
    if len(boxes) == len(places) and all(box[0] == place[0] for box, place in zip(boxes, places, strict=True)):
        return [item for _, item in places]
    found: list[Item | None] = []
    at = 0
    for offsets, _ in boxes:
        while at < len(places) and places[at][0] < offsets:
            at += 1
        found.append(places[at][1] if at < len(places) and places[at][0] == offsets else None)
    return found


def _paths(node: Inert, most: int) -> dict[str, Path]:
    """Return paths of names; together they have up to ``most`` keys, as many names may share one long path."""
    found: dict[str, Path] = {}
    for name, path in nodes.mapping_pairs(node) or ():
        if type(name) is str and isinstance(path, tuple) and path:
            most -= len(path)
            if most < 0:
                raise LimitExceeded("more keys in paths than the index has bytes", kind="index-bomb")
            is_valid = all(type(key) is str or (type(key) is int and -MAX_SIZE < key < MAX_SIZE) for key in path)
            if is_valid and path != (name,):  # what has no path is under its name
                found[name] = path
    return found


def _fields(node: Inert) -> nodes.Pairs:
    state = node.state if type(node) is Call else None
    if type(state) is Dict:
        pairs = state.pairs
    elif isinstance(state, tuple) and any(isinstance(one, Dict) and len(one.pairs) > _MOST_FIELDS for one in state):
        pairs = [(None, None)] * (_MOST_FIELDS + 1)
    else:
        pairs = nodes.attribute_pairs(node)
    if len(pairs) > _MOST_FIELDS:
        raise _malformed(f"{nodes.class_name(node)} with more than {_MOST_FIELDS} attributes")
    return pairs


def _pairs(node: Inert) -> nodes.PairList:
    """Return the pairs of a mapping, which the caller may remove from the list."""
    pairs = nodes.mapping_pairs(node)
    if pairs is None:
        raise _malformed("no mapping where one has to be")
    return pairs if isinstance(pairs, list) else list(pairs)


def _is(node: Inert, name: str) -> bool:
    found = nodes.class_of(node)
    return found is not None and found.name == name and found.module.startswith("torch.distributed.")


def _twice(name: str) -> MalformedFile:
    """Return the error for items that differ only in their ``index``, which is not a part of the key for Python."""
    return _malformed(f"two items for one place of {name!r}, of which torch takes the last")


def _malformed(what: str) -> MalformedFile:
    return MalformedFile(f"no index of torch.distributed.checkpoint: {what}", kind="malformed-index")


def _whole_shapes(node: Inert) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that were flattened, by name; an empty one if it cannot be read."""
    found: dict[str, tuple[int, ...]] = {}
    for name, facts in nodes.mapping_pairs(node) or ():
        keys = [key for key, _ in nodes.mapping_pairs(facts) or ()]
        if type(name) is str and _FLATTENED in keys:
            found[name] = ()
            with suppress(Failure):
                found[name] = as_sizes(nodes.item(facts, _FLATTENED))
    return found


def _flattened_fault(
    name: str, whole: tuple[int, ...], shape: tuple[int, ...], boxes: Sequence[Box]
) -> CkptoolError | None:
    """Return why a tensor of shape ``whole`` cannot be the one of ``shape`` in the index; None if it can."""
    is_grid = len(shape) == len(whole) + 1 > 1 and all(
        count and not size % count for size, count in zip(whole, shape, strict=False)
    )
    in_runs = all(set(sizes[:-1]) <= {1} for _, sizes in boxes if 0 not in sizes)
    if is_grid and in_runs and prod(whole) == prod(shape):
        return None
    return MalformedFile(
        f"{name!r} was flattened, and the index contradicts itself: of {list(whole)}, it stands there as {list(shape)}",
        kind="malformed-index",
        hint="Load it in Megatron-LM, and save it without flattening.",
    )


def flattened_pieces(
    whole: tuple[int, ...], shape: tuple[int, ...], items: Sequence[tuple[Box, str, Callable[[], TensorInfo]]]
) -> Iterator[Piece]:
    """Yield the boxes of the whole tensor that the items fill: each is a run of elements, and several boxes."""
    part = tuple(size // count for size, count in zip(whole, shape, strict=False))
    for (offsets, sizes), file, read in items:
        if 0 in sizes:
            continue
        corner = [at * size for at, size in zip(offsets, part, strict=False)]
        once = cache(read)
        done = 0
        for inside, size in boxes_of(part, offsets[-1], offsets[-1] + sizes[-1]):
            place = tuple(map(sum, zip(corner, inside, strict=True)))
            yield Piece(place, size, file, partial(_cut, once, sizes, done, size))
            done += prod(size)


def _cut(read: Callable[[], TensorInfo], sizes: tuple[int, ...], start: int, shape: tuple[int, ...]) -> TensorInfo:
    """Return a part of the run of elements in an item; any other tensor unchanged, which the caller refuses."""
    info = read()
    if info.shape != sizes or not info.is_contiguous:
        return info
    return info._replace(shape=shape, stride=row_major(shape), storage_offset=info.storage_offset + start)
