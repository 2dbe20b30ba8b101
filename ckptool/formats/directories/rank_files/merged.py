"""Files of ranks as one checkpoint: the tree of the first, with whole tensors where each has a part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

from ckptool.checkpoints.parsed import Parsed, Remark
from ckptool.errors import CkptoolError, FileUnavailable, MalformedFile
from ckptool.formats.directories import side_by_side
from ckptool.formats.directories.rank_files import NAME, TRAITS, Set
from ckptool.formats.directories.rank_files.parts import Found, Path, distributed_in, held, is_flat
from ckptool.formats.directories.side_by_side import ANOTHER_SAVE, TreeBuilder, agree
from ckptool.formats.probe import Probe
from ckptool.messages import counted, some
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Dict, Inert, PairList, Pairs
from ckptool.sources.folder import FolderSource
from ckptool.tensors.pieces import Box, Piece, PiecesSource, check_tiling, in_pieces
from ckptool.tensors.tensor import TensorInfo

_MOST_RANKS: Final = 1 << 20


class Rank:
    """The file of one rank, and the distributed tensors in it."""

    def __init__(self, folder: FolderSource, probe: Probe, file: str, number: int) -> None:
        self.file = file
        self.parsed = side_by_side.opened(folder, probe, file)
        rebuilder = self.parsed.rebuilder
        self.found: dict[Path, Found] = {}
        try:
            for one in distributed_in(self.parsed.root, rebuilder, folder.cancellation, number) if rebuilder else ():
                self.found[one.path] = one
        except CkptoolError as error:
            error.message = f"{file!r}: {error.message}"
            raise
        said = {one.part.rank for one in self.found.values() if one.part.rank is not None}
        self.number: int = next(iter(said)) if len(said) == 1 else number
        """By what is in it, else by its name."""
        self.world = max((one.part.world or 0 for one in self.found.values()), default=0)


class Missing(NamedTuple):
    """The ranks without a file."""

    ranks: list[str]
    world: int
    """How many there were."""

    @property
    def message(self) -> str:
        """What is missing, in numbers."""
        return f"{len(self.ranks):,} of {counted(self.world, 'file')} of ranks not there, rank {some(self.ranks)}"

    def explaining(self, error: MalformedFile) -> FileUnavailable:
        """Return the error for a tensor that is not whole without them."""
        fact = f"{self.message}: {error.message}"
        return FileUnavailable.of_set(fact, "Get the files of these ranks.", self.world, self.world - len(self.ranks))


def read_sets(folder: FolderSource, probe: Probe, sets: Sequence[Set], *, keyed: bool = False) -> Parsed:
    """
    Return what sets of files hold: the first is the model, the others stand beside it under their own names.

    If they are ``keyed``, all do, and a set without distributed tensors is one if its files are copies.
    """
    builder = TreeBuilder(probe.limits)
    remarks: list[Remark] = []
    files: list[tuple[str, Parsed]] = []
    pairs: PairList = []
    why: str | None = None
    for one in sets:
        ranks = _ranks(folder, probe, one, remarks, keyed=keyed)
        missing = _missing_ranks(ranks, one)
        files += [(rank.file, rank.parsed) for rank in ranks]
        why_not = _why_not(ranks)
        why = why or why_not
        head = "" if one is sets[0] and not keyed else one.stem
        is_one = any(rank.found for rank in ranks) or (keyed and (one.world is not None or _are_copies(ranks)))
        if why_not is None and is_one:
            if keyed:
                _unite(builder, ranks)
            pairs.append((head, _merged(folder, builder, ranks, missing, remarks)))
        else:
            remarks += _apart_remarks(ranks, missing)
            pairs += _apart(builder, ranks, f"{head}_" if head else "")
    root: Inert = pairs[0][1] if len(pairs) == 1 and not pairs[0][0] else Dict(pairs)
    parsed = side_by_side.of_tree(folder, probe, NAME, TRAITS, root, builder, files)
    return parsed._replace(unmerged=why, remarks=tuple(remarks))


def _are_copies(ranks: Sequence[Rank]) -> bool:
    """Say whether files hold the same, going by the checksums in them."""
    sums = {
        tuple(
            (*name.split("/")[1:], record.crc32) for archive in rank.parsed.archives for name, record in archive.items()
        )
        for rank in ranks
    }
    return len(sums) == 1 and all(sums)


def _unite(builder: TreeBuilder, ranks: Sequence[Rank]) -> None:
    """Give the tree of the first rank what only others have at their roots: those of another stage of a pipeline."""
    first = ranks[0]
    own = held(first.parsed.root)
    known = {key for key, _ in nodes.mapping_pairs(first.parsed.root) or [] if isinstance(key, str)}
    for rank in ranks[1:]:
        for key, node in nodes.mapping_pairs(rank.parsed.root) or []:
            if not isinstance(key, str) or key in known or rank.parsed.rebuilder is None:
                continue
            known.add(key)
            own.append((key, builder.transplant(node, rank.parsed.rebuilder)))
            for path, found in rank.found.items():
                if path[0] == key:
                    first.found[path] = found if len(path) > 1 else found._replace(siblings=own, place=len(own) - 1)


def _ranks(folder: FolderSource, probe: Probe, one: Set, remarks: list[Remark], *, keyed: bool) -> list[Rank]:
    """
    Return the ranks of a set, in order; those of a larger run that wrote here before are left out.

    Raises:
        MalformedFile: Two files are of one rank, or the files of runs of different sizes.
    """
    found: dict[int, Rank] = {}
    for number in sorted(one.files):
        rank = Rank(folder, probe, one.files[number], number)
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
        what = f"{counted(len(extra), 'file')} of ranks that this run has not, {world:,} are its: {some(extra)}"
        remarks.append(Remark("CK150", what, "They are of a run with more ranks that was saved here before."))
    own = [rank for rank in ranks if rank.file not in extra]
    agree("numbers of ranks", [(rank.file, rank.world or None) for rank in own])
    return own


def _missing_ranks(ranks: Sequence[Rank], one: Set) -> Missing:
    """Return the ranks without a file, as far as the files or their names say how many there were."""
    world = max(one.world or 0, *(rank.world for rank in ranks))
    known = {rank.number for rank in ranks}
    return Missing([str(number) for number in range(min(world, _MOST_RANKS)) if number not in known], world)


def _apart_remarks(ranks: Sequence[Rank], missing: Missing) -> Iterator[Remark]:
    """Yield what is wrong with ranks that are listed one by one."""
    if missing.ranks:
        yield Remark("CK140", missing.message, "Get the files of these ranks.")
    names = [frozenset(found.name for found in rank.found.values()) for rank in ranks]
    other = next((rank for rank, own in zip(ranks, names, strict=True) if own != names[0]), None)
    if other is not None:
        yield Remark("CK148", f"{ranks[0].file!r} and {other.file!r} have other distributed tensors", ANOTHER_SAVE)


def _why_not(ranks: Sequence[Rank]) -> str | None:
    """Return why a set cannot be put together; None if it can."""
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


def _apart(builder: TreeBuilder, ranks: Sequence[Rank], head: str) -> Pairs:
    """Return the trees of the ranks side by side, each with its own parts."""
    found: PairList = []
    for rank in ranks:
        for one in rank.found.values():
            if len(one.part.boxes) == 1:
                one.put(builder.tensor(one.part.boxes[0][1]))
        rebuilder = rank.parsed.rebuilder
        root = rank.parsed.root if rebuilder is None else builder.transplant(rank.parsed.root, rebuilder)
        found.append((f"{head}rank_{rank.number}", root))
    return found


def _merged(
    folder: FolderSource, builder: TreeBuilder, ranks: Sequence[Rank], missing: Missing, remarks: list[Remark]
) -> Inert:
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
                info = _whole(folder, [(rank.file, rank.found[path]) for rank in ranks if path in rank.found])
            except MalformedFile as error:
                is_of_rank = missing.ranks and error.kind == "missing-piece"
                raise missing.explaining(error) if is_of_rank else error from error
            leaves[id(found.node)] = builder.tensor(info)
    if missing.ranks:
        remarks.append(Remark("CK157", missing.message, "The others have copies of its parts."))
    _note_differences(ranks, remarks)
    for found in first.found.values():
        found.put(leaves[id(found.node)])
    assert first.parsed.rebuilder is not None  # it found them
    return builder.transplant(first.parsed.root, first.parsed.rebuilder)


def _whole(folder: FolderSource, found: Sequence[tuple[str, Found]]) -> TensorInfo:
    """Return the facts of a tensor that is put together of what the ranks have of it."""
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
    pieces = [Piece(*box, file, partial(_itself, info)) for box, (file, info) in boxes.items()]
    source = PiecesSource(first.shape, first.dtype, pieces, folder.cancellation, name=name)
    return in_pieces(name, first.shape, first.dtype, source, "cpu")


def _itself(info: TensorInfo) -> TensorInfo:
    return info


def _note_differences(ranks: Sequence[Rank], remarks: list[Remark]) -> None:
    """Say which tensors that every rank has are not equal, going by the checksums in the files."""
    differing: dict[str, None] = {}
    first = ranks[0].parsed.contents.tensors
    for rank in ranks[1:]:
        for name, info in rank.parsed.contents.tensors.items():
            own = first.get(name)
            if own is None or own.storage is None or info.storage is None:
                continue
            known = own.storage.crc32 and info.storage.crc32
            if known and own.shape == info.shape and own.storage.crc32 != info.storage.crc32:
                differing[name] = None
    if differing:
        what = f"{counted(len(differing), 'tensor')} not equal on all ranks: {some(list(differing))}"
        remarks.append(Remark("CK154", what, f"Those of rank {ranks[0].number} are taken."))
