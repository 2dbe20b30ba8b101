"""
The indexes of ranks that saved without talking to each other, ``__<rank>.metadata``, put together.

Each names that rank's own items alone. What is replicated stands in all of them: the first is taken, and the others
are copies, which a check of every byte compares with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from ckptool.checkpoints.parsed import Stream
from ckptool.errors import CkptoolError, Failure, FileUnavailable, MalformedFile
from ckptool.formats.directories.dcp.entries import Entry, Item, Use
from ckptool.formats.directories.dcp.index import Index, read_index
from ckptool.formats.directories.tree import Path
from ckptool.limits import Limits
from ckptool.messages import counted, some
from ckptool.sources.folder import FolderSource
from ckptool.tensors.tiling import Box, check_tiling

INDEX: Final = ".metadata"
ITEMS: Final = ".distcp"
_MARK: Final = b"torch.distributed.checkpoint"
_HEAD_NBYTES: Final = 4096
_OF_RANK: Final = re.compile(r"__(\d{1,9})\.metadata")


class Copy(NamedTuple):
    """The same piece, or value, of another rank."""

    name: str
    taken: Item
    other: Item
    offsets: tuple[int, ...] | None = None
    """Where the piece begins; None for a value."""


class Merged(NamedTuple):
    """What all indexes of a folder say."""

    entries: dict[str, Entry | Item | None]
    paths: dict[str, Path]
    files: dict[str, Use]
    streams: tuple[Stream, ...]
    copies: tuple[Copy, ...] = ()
    ranks: tuple[int, ...] = ()
    """Those that saved for themselves; empty where one index is that of all."""
    strays: int = 0
    """Items that belong to no entry."""
    whole_shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    """Of tensors that were flattened before they were cut."""
    is_megatrons: bool = False
    """Whether it has what Megatron-core adds to an index."""


def is_index(folder: FolderSource, name: str) -> bool:
    """Say whether a file is an index, going by its name and by what it begins with."""
    return (name == INDEX or _OF_RANK.fullmatch(name) is not None) and _MARK in folder.head(name, _HEAD_NBYTES)


def read_indexes(folder: FolderSource, limits: Limits) -> Merged:
    """
    Read the index of a folder, or those of its ranks.

    Raises:
        FileUnavailable: There is none: the save was not finished.
        CkptoolError: One cannot be read.
    """
    found = {int(match[1]): name for name in folder.files if (match := _OF_RANK.fullmatch(name))}
    if INDEX in folder.files and not (found and not is_index(folder, INDEX)):
        one = read_index(folder.open(INDEX), INDEX, limits)
        return Merged(
            one.entries,
            one.paths,
            one.files,
            (one.stream,),
            strays=one.strays,
            whole_shapes=one.whole_shapes,
            is_megatrons=one.is_megatrons,
        )
    if not found:
        raise _unfinished(folder)
    ranks = sorted(found)
    indexes = [read_index(folder.open(found[rank]), found[rank], limits) for rank in ranks]
    return _merged(indexes)._replace(ranks=tuple(ranks))


def _unfinished(folder: FolderSource) -> FileUnavailable:
    items = [name for name in folder.files if name.endswith(ITEMS)]
    written = f", but {INDEX}.tmp, which it is called until all is written" if f"{INDEX}.tmp" in folder.files else ""
    are = "is" if len(items) == 1 else "are"
    there = f"; there {are} {some(items)}" if items else ""
    return FileUnavailable(
        f"a torch.distributed.checkpoint in {counted(len(items), 'file')} without its index: "
        f"there is no {INDEX}{written}{there}",
        kind="distributed-checkpoint",
        hint="Use another one: saving was not finished. Or copy the index, too, from the machine of rank 0.",
    )


def _merged(indexes: Sequence[Index]) -> Merged:
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
    return Merged(
        entries,
        paths,
        files,
        tuple(index.stream for index in indexes),
        tuple(copies),
        strays=sum(index.strays for index in indexes),
        whole_shapes={name: shape for index in indexes for name, shape in index.whole_shapes.items()},
    )


def _joined(name: str, parts: Sequence[Entry], copies: list[Copy]) -> Entry:
    """Return the tensor that the ranks' parts are; a box that several have is taken of the first."""
    first = parts[0]
    if any((one.dtype, one.shape) != (first.dtype, first.shape) for one in parts):
        raise MalformedFile(f"{name!r} has another shape or type for another rank", kind="ranks")
    # Sorted, and not looked up: the numbers are the file's. The sort keeps the order of the ranks.
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
    fault: CkptoolError | None = None
    try:
        check_tiling(name, first.shape, boxes)
    except Failure as error:
        fault = error
    if fault is None:
        missing = any(item is None and 0 not in box[1] for box, item in zip(boxes, items, strict=True))
        fault = next((one.fault for one in parts if one.fault is not None), None) if missing else None
    return Entry(first.dtype, first.shape, boxes, items, fault)


def gaps(ranks: Sequence[int]) -> Iterator[int]:
    """Yield the ranks that are missing before the last one that is there."""
    known = frozenset(ranks)
    yield from (rank for rank in range(max(ranks, default=-1)) if rank not in known)
