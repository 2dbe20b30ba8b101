"""
Files that processes wrote with ``torch.save``, one each: their parts of tensors joined.

    model_rank3.pt, model_world_size_8_rank_3.pt, pytorch_model_fsdp_rank3.bin

Parts that record their boxes are joined. A flat parameter of FSDP does not: only the model has the names and shapes of
what is in it.

The package ``torch_checkpointing`` has a file for each item and rank, and an index of how they were cut.

    model_0.pt, model_1.pt, optimizer_0.pt, …    ``torch.save`` of what one rank has, ``DTensor`` among it
    metadata.pkl                                 a pickle of plain dicts, written last

The index: ``{"metadata": {item: {"nested_path_to_metadata": {path: [{"ranks": …, "sharding_metadata": …}]},
"rank_to_layout_info": {rank: None or {"file_path": …, "serialization_format": …}}}}, "world_size": 2, "version":
"2.0"}``; a path is JSON. Items without a rule for other numbers of ranks are not in it. The parts record their own
boxes; the index has the files, and the shapes of the whole tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial, reduce
from typing import Final, NamedTuple

from ckptool.checkpoints.parsed import Parsed, Remark, Traits
from ckptool.errors import AmbiguousFile, FileUnavailable, MalformedFile, UnsupportedFeature, within
from ckptool.formats.directories.rank_files.parts import MOST_RANKS, Found, distributed_in, held, is_flat
from ckptool.formats.directories.side_by_side import (
    ANOTHER_SAVE,
    FolderTree,
    Path,
    agree,
    given,
    of_larger_run,
    opened,
)
from ckptool.formats.probe import Probe
from ckptool.formats.sharded import refuse_missing
from ckptool.formats.slices import HEAD_NBYTES, INDEX, MARKS, OF_RANK
from ckptool.formats.strict_json import parse
from ckptool.messages import counted, some
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Dict, Inert, PairList, Pairs
from ckptool.sources.folder import FolderSource
from ckptool.tensors.pieces import Box, Piece, check_tiling, joined
from ckptool.tensors.tensor import TensorInfo, is_size

NAME: Final = "rank_files"
INDEXED: Final = "torch_checkpointing"
_TRAITS: Final = Traits(
    has_tree=True, keeps_versions=False, is_trusted=True, loader="torch_checkpointing.CheckpointManager.load()"
)
TRAITS: Final = Traits(has_tree=True, loader="torch.load() in as many processes as there are files")
_NAME: Final = re.compile(
    r"(?P<stem>.{0,200}?)(?:_?world_size_(?P<world>\d{1,6}))?_?rank[_-]?(?P<rank>\d{1,6})\.(?P<suffix>pt|pth|bin|ckpt)"
)


_ACTOR: Final = "actor"
"""The folder in which verl keeps the model that is trained."""
_HEAD_NBYTES: Final = 1 << 20
_MARKS: Final = (b"ShardedTensor", b"DTensor")


class Set(NamedTuple):
    """Files whose names differ in the rank alone."""

    stem: str
    """The beginning of their names: ``model``, ``optim``."""
    world: int | None
    """How many ranks there are, by the names."""
    files: dict[int, str]
    """Paths of the files by rank."""


def sets_in(folder: FolderSource, inside: str) -> list[Set]:
    """Return the sets of files of ranks in a folder, those of models first."""
    found: dict[tuple[str, str, str], Set] = {}
    for name in folder.names(inside)[0]:
        match = _NAME.fullmatch(name)
        if match is not None:
            world = int(match["world"]) if match["world"] else None
            one = found.setdefault(
                (match["stem"], match["world"] or "", match["suffix"]), Set(match["stem"], world, {})
            )
            one.files.setdefault(int(match["rank"]), f"{inside}/{name}" if inside else name)
    return sorted(found.values(), key=lambda one: ("model" not in one.stem, one.stem))


def sniff(folder: FolderSource) -> bool:
    """Return whether the folder has files of ranks with distributed tensors."""
    return _place(folder) is not None


def _place(folder: FolderSource) -> str | None:
    """Return the folder of the files of ranks: empty for the folder itself, else where verl has them; or None."""
    for inside in ("", _ACTOR) if _ACTOR in folder.folders else ("",):
        heads = (folder.head(one.files[min(one.files)], _HEAD_NBYTES) for one in sets_in(folder, inside))
        if any(mark in head for head in heads for mark in _MARKS):
            return inside
    return None


def read(folder: FolderSource, probe: Probe) -> Parsed:
    """
    Read the files of all ranks, and join their parts; no tensor is read.

    Raises:
        FileUnavailable: Files of ranks are missing.
        MalformedFile: The files are of different saves.
        AmbiguousFile: There are files of several runs.
    """
    found = sets_in(folder, _place(folder) or "")
    stems = [one.stem for one in found]
    twice = [one for one in found if stems.count(one.stem) > 1]
    if twice:
        listed = [f"{one.stem} of {one.world or len(one.files):,}" for one in twice]
        raise AmbiguousFile(
            f"{counted(len(twice), 'set')} of files of ranks: {some(listed)}",
            kind="several-sets",
            hint="They are of different runs: move those of all but one away.",
        )
    return read_sets(folder, probe, found)


class Rank:
    """The file of one rank, and the distributed tensors in it."""

    def __init__(self, tree: FolderTree, file: str, number: int) -> None:
        self.file = file
        self.parsed = tree.open(file)
        rebuilder, cancellation = self.parsed.rebuilder, tree.folder.cancellation
        self.found: dict[Path, Found] = {}
        with within(repr(file)):
            for one in distributed_in(self.parsed.root, rebuilder, cancellation, number) if rebuilder else ():
                self.found[one.path] = one
        said = {one.part.rank for one in self.found.values() if one.part.rank is not None}
        self.number: int = next(iter(said)) if len(said) == 1 else number
        """The rank in its content, or else in its name."""
        self.world = max((one.part.world or 0 for one in self.found.values()), default=0)


class Missing(NamedTuple):
    """The ranks without a file, as far as the files or their names record how many there were."""

    ranks: list[str]
    world: int
    """How many ranks there were."""

    @property
    def message(self) -> str:
        """What is missing, in numbers."""
        return f"{len(self.ranks):,} of {counted(self.world, 'file')} of ranks not there, rank {some(self.ranks)}"

    def explaining(self, error: MalformedFile) -> FileUnavailable:
        """Return the error for a tensor that is not complete without them."""
        fact = f"{self.message}: {error.message}"
        return FileUnavailable.of_set(fact, "Get the files of these ranks.", self.world, self.world - len(self.ranks))


def read_sets(folder: FolderSource, probe: Probe, sets: Sequence[Set], *, keyed: bool = False) -> Parsed:
    """
    Return the content of sets of files: the first is the model, the others are beside it under their own names.

    If ``keyed``, all are under their names, and a set without distributed tensors is joined if its files are copies.
    """
    tree = FolderTree(folder, probe, NAME, TRAITS)
    files: list[str] = []
    pairs: PairList = []
    why: str | None = None
    for one in sets:
        ranks = _ranks(tree, one, keyed=keyed)
        world, known = max(one.world or 0, *(rank.world for rank in ranks)), {rank.number for rank in ranks}
        missing = Missing([str(rank) for rank in range(min(world, MOST_RANKS)) if rank not in known], world)
        files += [rank.file for rank in ranks]
        why_not = _why_not(ranks)
        why = why or why_not
        head = "" if one is sets[0] and not keyed else one.stem
        is_one = any(rank.found for rank in ranks) or (keyed and (one.world is not None or _are_copies(ranks)))
        if why_not is None and is_one:
            if keyed:
                _unite(tree, ranks)
            pairs.append((head, _merged(tree, ranks, missing)))
        else:
            pairs += _apart(tree, ranks, f"{head}_" if head else "", missing)
    root: Inert = pairs[0][1] if len(pairs) == 1 and not pairs[0][0] else Dict(pairs)
    return tree.parsed(root, files)._replace(unmerged=why)


def _are_copies(ranks: Sequence[Rank]) -> bool:
    """Return whether files have the same content, by the checksums in them."""
    sums = {
        tuple(
            (*name.split("/")[1:], record.crc32) for archive in rank.parsed.archives for name, record in archive.items()
        )
        for rank in ranks
    }
    return len(sums) == 1 and all(sums)


def _unite(tree: FolderTree, ranks: Sequence[Rank]) -> None:
    """Add to the tree of the first rank what only others have at their roots: what another stage of a pipeline has."""
    first = ranks[0]
    own = held(first.parsed.root)
    known = {key for key, _ in nodes.mapping_pairs(first.parsed.root) or [] if isinstance(key, str)}
    for rank in ranks[1:]:
        for key, node in nodes.mapping_pairs(rank.parsed.root) or []:
            if not isinstance(key, str) or key in known:
                continue
            known.add(key)
            own.append((key, tree.transplant(node, rank.parsed.rebuilder)))
            for path, found in rank.found.items():
                if path[0] == key:
                    first.found[path] = found if len(path) > 1 else found._replace(siblings=own, place=len(own) - 1)


def _ranks(tree: FolderTree, one: Set, *, keyed: bool) -> list[Rank]:
    """
    Return the ranks of a set, in order; those of a larger run that wrote here before are left out.

    Raises:
        MalformedFile: Two files are of one rank, or the files of runs of different sizes.
    """
    found: dict[int, Rank] = {}
    for number in sorted(one.files):
        rank = Rank(tree, one.files[number], number)
        if keyed:  # by the index: what is in it may be of a part of the ranks
            rank.number, rank.world = number, one.world or 0
        other = found.setdefault(rank.number, rank)
        if other is not rank:
            fact = f"{other.file!r} and {rank.file!r} are both of rank {rank.number}"
            raise MalformedFile(fact, kind="mixed-saves", hint=ANOTHER_SAVE)
    ranks = [found[number] for number in sorted(found)]
    world = ranks[0].world
    extra = [rank.file for rank in ranks if world and rank.number >= world]
    if extra:
        tree.remarks.append(of_larger_run(extra, world))
    own = [rank for rank in ranks if rank.file not in extra]
    agree("numbers of ranks", [(rank.file, rank.world or None) for rank in own])
    return own


def _why_not(ranks: Sequence[Rank]) -> str | None:
    for rank in ranks:
        for one in rank.found.values():
            if is_flat(one):
                return (
                    f"{one.name!r} is the flat parameter of a unit of FSDP, in {counted(len(ranks), 'part')}: names "
                    "and shapes of what is in it are not in the files"
                )
            if one.part.why_not is not None:
                return f"{one.name!r} of {rank.file!r} cannot be put together: {one.part.why_not}"
    return None


def _apart(tree: FolderTree, ranks: Sequence[Rank], head: str, missing: Missing) -> Pairs:
    """Return the tree of each rank under its own key."""
    if missing.ranks:
        tree.remarks.append(Remark("CK140", missing.message, "Get the files of these ranks."))
    names = [frozenset(found.name for found in rank.found.values()) for rank in ranks]
    other = next((rank for rank, own in zip(ranks, names, strict=True) if own != names[0]), None)
    if other is not None:
        what = f"{ranks[0].file!r} and {other.file!r} have other distributed tensors"
        tree.remarks.append(Remark("CK148", what, ANOTHER_SAVE))
    found: PairList = []
    for rank in ranks:
        for one in rank.found.values():
            if len(one.part.boxes) == 1:
                one.put(tree.tensor(one.part.boxes[0][1]))
        found.append((f"{head}rank_{rank.number}", tree.root_of(rank.file)))
    return found


def _merged(tree: FolderTree, ranks: Sequence[Rank], missing: Missing) -> Inert:
    """Return the tree of the first rank, with whole tensors in place of its parts."""
    first = ranks[0]
    for rank in ranks[1:]:
        more = [path for path in rank.found if path not in first.found]
        if more:
            name = rank.found[more[0]].name
            fact = f"{rank.file!r} has {counted(len(more), 'distributed tensor')} that {first.file!r} has not: {name!r}"
            raise MalformedFile(fact, kind="mixed-saves", hint=ANOTHER_SAVE)
    leaves: dict[int, Inert] = {}
    for path, found in first.found.items():
        if id(found.node) not in leaves:
            try:
                info = _whole(tree.folder, [(rank.file, rank.found[path]) for rank in ranks if path in rank.found])
            except MalformedFile as error:
                is_of_rank = missing.ranks and error.kind == "missing-piece"
                raise missing.explaining(error) if is_of_rank else error from error
            leaves[id(found.node)] = tree.tensor(info)
    if missing.ranks:
        tree.remarks.append(Remark("CK157", missing.message, "The others have copies of its parts."))
    _note_differences(tree, ranks)
    for found in first.found.values():
        found.put(leaves[id(found.node)])
    return tree.root_of(first.file)


def _whole(folder: FolderSource, found: Sequence[tuple[str, Found]]) -> TensorInfo:
    """Return a tensor that is joined from the parts of the ranks."""
    name, first = found[0][1].name, found[0][1].part
    agree(f"shapes of {name!r}", [(file, one.part.shape) for file, one in found])
    agree(f"types of {name!r}", [(file, one.part.dtype.name) for file, one in found])
    agree(f"boxes of {name!r}", [(file, one.part.all_boxes) for file, one in found])
    boxes: dict[Box, tuple[str, TensorInfo]] = {}
    for file, one in found:
        for box, info in one.part.boxes:
            if 0 not in box[1]:
                boxes.setdefault(box, (file, info))  # others have copies
    check_tiling(name, first.shape, list(boxes))
    pieces = [Piece(*box, file, partial(given, info)) for box, (file, info) in boxes.items()]
    return joined(name, first.shape, first.dtype, pieces, folder.cancellation)


def _note_differences(tree: FolderTree, ranks: Sequence[Rank]) -> None:
    """Add a remark on tensors that every rank has and that differ, by the checksums in the files."""
    differing: dict[str, None] = {}
    first = ranks[0].parsed.contents.tensors
    for rank in ranks[1:]:
        for name, info in rank.parsed.contents.tensors.items():
            own = first.get(name, info)
            sums = {one.storage.crc32 if one.storage is not None else 0 for one in (own, info)}
            if len(sums) > 1 and 0 not in sums and own.shape == info.shape:
                differing[name] = None
    if differing:
        what = f"{counted(len(differing), 'tensor')} not equal on all ranks: {some(list(differing))}"
        tree.remarks.append(Remark("CK154", what, f"Those of rank {ranks[0].number} are taken."))


def sniff_indexed(folder: FolderSource) -> bool:
    """Return whether the folder has an index of this kind."""
    return INDEX in folder.files and any(mark in folder.head(INDEX, HEAD_NBYTES) for mark in MARKS)


def read_indexed(folder: FolderSource, probe: Probe) -> Parsed:
    """
    Read the index and the files of all ranks, and join their parts; no tensor is read.

    Raises:
        FileUnavailable: Files that the index names are missing.
        MalformedFile: The index makes no sense, or the files are of another save.
        UnsupportedFeature: An item is in files that do not record how they are cut.
    """
    index = opened(folder, probe, INDEX)
    world = nodes.lookup(_pairs(index.root), "world_size")
    if not is_size(world) or not 0 < world <= MOST_RANKS:
        raise MalformedFile(f"{INDEX!r} does not say how many ranks there were", kind="malformed-index")
    items = {key: item for key, item in _pairs(index.root, "metadata") if isinstance(key, str)}
    listed = {key: dict(_indexed_files(key, item)) for key, item in items.items()}
    files = [file for of_item in listed.values() for file in of_item.values()]
    missing = [repr(file) for file in files if not folder.has(file)]
    refuse_missing(missing, len(files), f"{counted(len(files), 'file')} of ranks", "Get the files of these ranks.")
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
    return parsed._replace(format=INDEXED, traits=_TRAITS, streams=streams, absent=absent)


def _pairs(node: Inert, *keys: str) -> Pairs:
    """Return the pairs of a dict, or of one inside it under some keys; empty if there is none."""
    return nodes.mapping_pairs(reduce(nodes.item, keys, node)) or []


def _indexed_files(key: str, item: Inert) -> Iterator[tuple[int, str]]:
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
