"""
Checkpoints of the package ``torch_checkpointing``: a file for each item and rank, and an index of how they were cut.

    model_0.pt, model_1.pt, optimizer_0.pt, …    ``torch.save`` of what one rank has, ``DTensor`` among it
    metadata.pkl                                 a pickle of plain dicts, written last

The index: ``{"metadata": {item: {"nested_path_to_metadata": {path: [{"ranks": …, "sharding_metadata": …}]},
"rank_to_layout_info": {rank: None or {"file_path": …, "serialization_format": …}}}}, "world_size": 2, "version":
"2.0"}``; a path is JSON. Items without a rule for other numbers of ranks are not in it. The parts record their own
boxes; the index has the files, and the shapes of the whole tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Final

from ckptool.checkpoints.parsed import Parsed, Traits
from ckptool.errors import FileUnavailable, MalformedFile, UnsupportedFeature
from ckptool.formats.directories import side_by_side
from ckptool.formats.directories.rank_files import Set, read_sets
from ckptool.formats.directories.side_by_side import ANOTHER_SAVE
from ckptool.formats.probe import Probe
from ckptool.formats.slices import HEAD_NBYTES, INDEX, MARKS, OF_RANK
from ckptool.formats.strict_json import parse
from ckptool.messages import counted, some
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Inert, Pairs
from ckptool.sources.folder import FolderSource
from ckptool.tensors.tensor import is_size

NAME: Final = "torch_checkpointing"
TRAITS: Final = Traits(
    has_tree=True, keeps_versions=False, is_trusted=True, loader="torch_checkpointing.CheckpointManager.load()"
)
_MOST_RANKS: Final = 1 << 20


def sniff(folder: FolderSource) -> bool:
    """Return whether the folder has an index of this kind."""
    return INDEX in folder.files and any(mark in folder.head(INDEX, HEAD_NBYTES) for mark in MARKS)


def read(folder: FolderSource, probe: Probe) -> Parsed:
    """
    Read the index and the files of all ranks, and join their parts; no tensor is read.

    Raises:
        FileUnavailable: Files that the index names are missing.
        MalformedFile: The index makes no sense, or the files are of another save.
        UnsupportedFeature: An item is in files that do not record how they are cut.
    """
    index = side_by_side.opened(folder, probe, INDEX)
    world = nodes.lookup(_pairs(index.root), "world_size")
    if not is_size(world) or not 0 < world <= _MOST_RANKS:
        raise MalformedFile(f"{INDEX!r} does not say how many ranks there were", kind="malformed-index")
    items = {key: item for key, item in _pairs(index.root, "metadata") if isinstance(key, str)}
    listed = {key: dict(_files(key, item)) for key, item in items.items()}
    _refuse_missing(folder, [file for files in listed.values() for file in files.values()])
    others: dict[str, dict[int, str]] = {}
    for match in filter(None, map(OF_RANK.fullmatch, folder.files)):
        if match["item"] not in listed:
            others.setdefault(match["item"], {})[int(match["rank"])] = match[0]
    sets = [
        *(Set(key, world, listed[key]) for key in listed if listed[key]),
        *(Set(key, None, others[key]) for key in others),
    ]
    parsed = read_sets(folder, probe, sets, keyed=True)
    streams = (*(one.inside(INDEX) for one in index.streams), *parsed.streams)
    absent = tuple(name for key, item in items.items() for name in _absent(key, item, parsed))
    return parsed._replace(format=NAME, traits=TRAITS, streams=streams, absent=absent)


def _pairs(node: Inert, *keys: str) -> Pairs:
    """Return the pairs of a dict, or of one inside it under some keys; empty if there is none."""
    return nodes.mapping_pairs(reduce(nodes.item, keys, node)) or []


def _files(key: str, item: Inert) -> Iterator[tuple[int, str]]:
    """Yield the ranks that have an item, and their files of ``torch.save``; values in other formats are beside them."""
    for rank, layout in _pairs(item, "rank_to_layout_info"):
        file = nodes.lookup(_pairs(layout), "file_path") or f"{key}_{rank}.pt"
        kind = nodes.lookup(_pairs(layout, "serialization_format"), "type")
        if not is_size(rank) or not isinstance(file, str):
            raise MalformedFile(f"{INDEX!r} names no file of {key!r}", kind="malformed-index")
        if kind == "SafetensorsSerialization":
            what = f"the parts of {key!r} are files of safetensors, which are not joined: {file!r}"
            raise UnsupportedFeature(
                what, kind="not-joined", hint="Load it with torch_checkpointing, and save it whole."
            )
        if kind in (None, "TorchSerialization"):
            yield rank, file


def _refuse_missing(folder: FolderSource, files: list[str]) -> None:
    missing = [repr(file) for file in files if not folder.has(file)]
    if missing:
        fact = f"{len(missing):,} of {counted(len(files), 'file')} of ranks not there: {some(missing)}"
        raise FileUnavailable.of_set(fact, "Get the files of these ranks.", len(files), len(files) - len(missing))


def _absent(key: str, item: Inert, parsed: Parsed) -> Iterator[str]:
    """Yield the names that are in the index and in no file; a tensor of another shape is an error."""
    for path, groups in _pairs(item, "nested_path_to_metadata"):
        first = groups[0] if isinstance(groups, list) and groups else None
        components = parse(str(path).encode(errors="replace"), f"a path in {INDEX!r}", "index")
        name = ".".join([key, *map(str, components if isinstance(components, list) else [components])])
        info = parsed.contents.tensors.get(name)
        if info is None and parsed.unmerged is None:
            yield name
        elif info is not None and list(info.shape) != nodes.lookup(
            _pairs(first, "sharding_metadata", "data"), "global_shape"
        ):
            what = f"{name!r} has shape {list(info.shape)} in the files, which the index does not say"
            raise MalformedFile(what, kind="mixed-saves", hint=ANOTHER_SAVE)
