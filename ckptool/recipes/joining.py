"""
Files of ranks → one checkpoint: find the files and their order, and join their slices to whole tensors.

The numbers in the names give the order. A missing number is refused, and so is a name that some ranks lack. Tensors
that every rank must have are read, and compared; no others are read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.contents import Contents, Group
from ckptool.checkpoints.parsed import Parsed, Shard, Traits
from ckptool.checkpoints.weights import WeightsChoice, choose
from ckptool.errors import MigrationRefused, about
from ckptool.formats import open_checkpoint
from ckptool.formats.directories.pointers import named_by
from ckptool.formats.filenames import MEGATRON
from ckptool.formats.slices import ranks_said
from ckptool.formats.slices.numbering import numbers, set_of
from ckptool.limits import Limits
from ckptool.messages import some
from ckptool.pickles import nodes
from ckptool.recipes.apply import Move
from ckptool.recipes.find import settings_of
from ckptool.recipes.slice_rules import SliceRules, joined, refuse_width
from ckptool.sources.folder import FolderSource
from ckptool.sources.paths import is_likely, is_remote
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import TensorInfo, identity

NAME: Final = "slices"
_TRAITS: Final = Traits(keeps_versions=False)
_SAID: Final = re.compile(r"(?:\d[._-]?of|world[._-]?size)[._-]?0*(\d{1,6})(?=[\W_])", re.IGNORECASE)
"""The number of files, in their names."""
_FROM_ZERO: Final = re.compile(r"(?:^|[\W_])(?:rank|tp|mp)(?:[._-]?rank)?[._-]?0*1(?!\d)", re.IGNORECASE)
"""The number of a second rank, in names that begin at 0."""


class Joined(NamedTuple):
    """The checkpoint that slices make up, and how each of its tensors was made."""

    checkpoint: Checkpoint
    moves: tuple[Move, ...]
    notes: tuple[str, ...]


class _Rank(NamedTuple):
    """The weights of one rank, and the names of its files for messages."""

    tensors: dict[str, LazyTensor]
    files: str
    beside: list[str]
    """What else is in the files."""


def open_joined(
    path: str, rules: SliceRules, key: str | None, which: WeightsChoice, given: Mapping[str, int], limits: Limits
) -> Joined:
    """
    Open the files of all ranks in a folder, or of the set that one file belongs to, as one checkpoint of their weights.

    Raises:
        MigrationRefused: Some are missing, or are not slices by the rules.
        CkptoolError: One cannot be read, or it is not clear which weights are meant.
    """
    if is_remote(path):
        raise MigrationRefused("slices of ranks are joined from a folder that is here", kind="far-slices", path=path)
    place = path
    for _ in range(0 if os.path.isdir(path) else 1 + rules.of.files.count("/")):
        place = os.path.dirname(place) or os.curdir
    folder = FolderSource(place, limits.cancellation)
    try:
        if named := named_by(folder, MEGATRON):  # the last save
            place = folder.place_of(named)
            folder.close()
            folder = FolderSource(place, limits.cancellation)
        with about(place):
            names = [*folder.files, *(f"{one}/{name}" for one in folder.folders for name in folder.names(one)[0])]
            files = _files(names, rules, None if os.path.isdir(path) else os.path.relpath(path, place))
            opened = [[_opened(folder, name, limits) for name in own] for own in files]
            ranks = [_rank(own, key or rules.of.key, which) for own in opened]
            first = opened[0][0]
            if (said := ranks_said(first.root)) > len(ranks):
                raise _missing(f"{files[0][0]!r} says that there are {said:,} ranks, and {len(ranks):,} are there")
            infos, moves = _whole(ranks, rules, {**_arguments(first), **settings_of(first), **given})
        contents = Contents(infos)
        contents.groups.append(Group("", "mapping", list(infos)))
        shards = [shard for own, there in zip(files, opened, strict=True) for shard in map(_shard, own, there)]
        parsed = Parsed(folder, NAME, _TRAITS, contents, fixed_form="state_dict", shards=tuple(shards))
        beside = ranks[0].beside
        notes = (f"what is beside the weights of the ranks is left out: {some(beside)}",) if beside else ()
        return Joined(Checkpoint(place, folder, parsed), tuple(moves), notes)
    except BaseException:
        folder.close()
        raise


def _opened(folder: FolderSource, name: str, limits: Limits) -> Checkpoint:
    found = open_checkpoint(folder.place_of(name), limits=limits)
    folder.adopt(found.source)
    found.check_index()
    return found


def _shard(name: str, found: Checkpoint) -> Shard:
    return Shard(name, len(found.tensors), found.file_nbytes, found.source)


def _missing(fact: str) -> MigrationRefused:
    return MigrationRefused(fact, kind="missing-rank", hint="Get the files of all ranks.")


def _files(names: Sequence[str], rules: SliceRules, given: str | None) -> list[list[str]]:
    """Return the files of each rank, in the order of the ranks; if a file is given, those of its set."""
    if rules.of.files:
        return _of_program([one for one in names if given is None or numbers(one)[0] == numbers(given)[0]], rules)
    likely = [name for name in names if is_likely(name)]
    sets = {tuple(found.files): found for found in (set_of(one, likely) for one in likely) if found.nearest}
    if given is not None:
        sets = {files: found for files, found in sets.items() if given in files}
    if len(sets) != 1:
        what = f"{len(sets):,} sets of files, of {some([repr(one[0]) for one in sets])}" if sets else "no files"
        hint = "Give the path of one of those that are meant." if sets else None
        raise MigrationRefused(f"{what} that are numbered as ranks are", kind="no-ranks", hint=hint)
    ((files, found),) = sets.items()
    said = _SAID.search(files[0])
    if found.gap or (said and int(said[1]) != len(files)):
        raise _missing(f"{len(files):,} of {int(said[1]) if said else found.total:,} ranks there{found.gap}")
    if _FROM_ZERO.search(files[0]):
        raise _missing(f"there is no rank 0 before {files[0]!r}")
    if len(found.nearest) > 1:
        fact = f"{files[0]!r} to {files[-1]!r} have two numbers each: only one kind of parallelism can be joined"
        raise MigrationRefused(fact, kind="no-ranks")
    return [[name] for name in files]


def _of_program(names: Sequence[str], rules: SliceRules) -> list[list[str]]:
    found: dict[int, dict[int, str]] = {}
    for match in filter(None, (re.fullmatch(rules.of.files, name) for name in names)):
        groups = match.groupdict()
        parts = found.setdefault(int(groups["rank"]), {})
        twin = parts.setdefault(int(groups.get("part", 0)), match[0])
        if twin != match[0]:
            hint = "Give the path of one of those that are meant."
            raise MigrationRefused(f"{twin!r} and {match[0]!r} are of one rank", kind="no-ranks", hint=hint)
    if len(found) < 2:
        own = some([name for parts in found.values() for name in parts.values()]) or "none"
        fact = f"slices of {rules.of.name!r} are several files, and of their names there is {own}"
        raise MigrationRefused(fact, kind="no-ranks", hint="Give the folder with the files of all ranks.")
    for what, there in (("rank", [*found]), *((f"part of rank {rank}", [*found[rank]]) for rank in sorted(found))):
        if gone := [str(number) for number in range(max(there)) if number not in there]:
            raise _missing(f"there is no {what} {some(gone)}, and there are {len(there):,} others")
    return [[parts[number] for number in sorted(parts)] for _, parts in sorted(found.items())]


def _rank(files: Sequence[Checkpoint], key: str | None, which: WeightsChoice) -> _Rank:
    """Return the weights in the files of one rank."""
    found: dict[str, LazyTensor] = {}
    beside: list[str] = []
    for one in files:
        with about(one.path):
            chosen = choose(one, key, which)
        if twins := [name for name in chosen if name in found]:
            raise MigrationRefused(f"{twins[0]!r} is in two files of one rank", kind="slices-overlap")
        found |= chosen
        paths = (*one.tensors, *(path for path, _ in one.extras))
        beside += [path for path in paths if path.removeprefix(chosen.head) not in chosen]
    return _Rank(found, some([os.path.basename(one.path) for one in files]), beside)


def _whole(
    ranks: Sequence[_Rank], rules: SliceRules, given: Mapping[str, int]
) -> tuple[dict[str, TensorInfo], list[Move]]:
    """Return the whole tensors, and the moves that made them; names that are tied in each rank stay tied."""
    first = ranks[0]
    for other in ranks[1:]:
        for one, two in ((first, other), (other, first)):
            if lacking := [name for name in one.tensors if name not in two.tensors]:
                fact = f"{two.files!r} has no {some(list(map(repr, lacking)))}, and {one.files!r} has"
                raise MigrationRefused(fact, kind="slices-missing", hint="Are all of one save, and slices?")
    numbers = rules.numbers(given, len(ranks))
    wholes: dict[object, LazyTensor] = {}
    infos, moves = {}, []
    for name, rule in rules.by_name(first.tensors).items():
        parts = [one.tensors[name] for one in ranks]
        place = (*map(identity, (one.info for one in parts)), rule.dim, rule.shares)
        if place not in wholes:
            wholes[place] = joined(rule, parts, numbers)
        whole = LazyTensor(name, wholes[place].info)
        refuse_width(rule, whole, first.tensors, numbers)
        infos[name] = whole.info
        if rule.dim is not None:
            sides = tuple((name, one.shape) for one in parts), ((name, whole.shape),)
            moves.append(Move(f"join {rule.text.rpartition('=')[2]}", *sides))
    return infos, moves


def _arguments(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the numbers in the arguments of the training, if the file has them; True is 1."""
    args = nodes.item(checkpoint.root, "args")
    pairs = nodes.mapping_pairs(args) or nodes.attribute_pairs(args) or []
    return {name: int(value) for name, value in pairs if isinstance(name, str) and isinstance(value, int)}
