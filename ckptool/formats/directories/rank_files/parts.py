"""Files of ranks as one checkpoint: what each has of distributed tensors, and the tree of the first with them whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from math import prod
from operator import mul
from struct import unpack
from typing import Final, NamedTuple

from ckptool.cancellation import Cancellation, check_cancelled
from ckptool.checkpoints.parsed import Parsed, Remark
from ckptool.errors import CkptoolError, FileUnavailable, MalformedFile
from ckptool.formats.directories.rank_files import NAME, TRAITS, Set
from ckptool.formats.directories.side_by_side import ANOTHER_SAVE, FolderTree, Path, agree, given
from ckptool.formats.probe import Probe
from ckptool.messages import counted, some
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Call, Dict, Inert, PairList, Pairs
from ckptool.sources.folder import FolderSource
from ckptool.tensors.dtypes import DType
from ckptool.tensors.pieces import Box, Piece, check_tiling, joined
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.rebuild import Rebuilder, as_dtype, as_sizes
from ckptool.tensors.tensor import TensorInfo, is_size, row_major

_FROM_TYPE: Final = ("_rebuild_from_type", "_rebuild_from_type_v2")
_PARAMETER: Final = ("_rebuild_parameter", "_rebuild_parameter_with_state")
_FLAT: Final = ("_flat_param", "flat_param")
_MOST_RANKS: Final = 1 << 20
_MOST_AXES: Final = 64
_INTEGERS: Final = {"int32": "i", "int64": "q"}


class Found(NamedTuple):
    """A distributed tensor in a tree."""

    path: Path
    siblings: PairList | list[Inert]
    """What holds it: pairs of a mapping, or a list."""
    place: int
    """Its place in there."""
    node: Inert
    part: Part

    @property
    def name(self) -> str:
        """Its dotted name."""
        return ".".join(map(str, self.path))

    def put(self, leaf: Inert) -> None:
        """Put another node in its place."""
        old = self.siblings[self.place]
        self.siblings[self.place] = (old[0], leaf) if isinstance(old, tuple) and old[1] is self.node else leaf


def distributed_in(
    root: Inert, rebuilder: Rebuilder, cancellation: Cancellation | None, rank: int | None = None
) -> Iterator[Found]:
    """Yield the distributed tensors in the mappings and lists of a tree, in order; ``rank`` is its name's."""
    todo: list[tuple[Path, Inert]] = [((), root)]
    seen: set[int] = set()
    known: dict[int, Part | None] = {}
    while todo:
        check_cancelled(cancellation)
        path, node = todo.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        siblings = held(node)
        below: list[tuple[Path, Inert]] = []
        for place, one in enumerate(siblings):
            key, child = (place, one) if isinstance(node, list) else one
            if not isinstance(key, str | int) or not isinstance(child, Call | Dict | list):
                continue
            if id(child) not in known:
                known[id(child)] = part_of(child, rebuilder, rank) if isinstance(child, Call) else None
            part = known[id(child)]
            if part is not None:
                yield Found((*path, key), siblings, place, child, part)
            else:
                below.append(((*path, key), child))
        todo.extend(reversed(below))


def held(node: Inert) -> PairList | list[Inert]:
    """Return what a node holds, itself and no copy, so that it can be changed."""
    if isinstance(node, Call):
        return node.pairs if node.pairs is not None else []
    if isinstance(node, Dict):
        pairs = node.pairs = node.pairs if isinstance(node.pairs, list) else list(node.pairs)
        return pairs
    return node if isinstance(node, list) else []


def part_of(node: Call, rebuilder: Rebuilder, rank: int | None = None) -> Part | None:
    """Return what a call says of a distributed tensor; None if it makes none."""
    func = nodes.global_of(node.func)
    if func is None or not isinstance(node.args, tuple):
        return None
    if func.name in _PARAMETER and node.args and isinstance(node.args[0], Call):
        return part_of(node.args[0], rebuilder, rank)
    cls, state = func, node.state
    if func.name in _FROM_TYPE and len(node.args) == 4:
        named = nodes.global_of(node.args[1])
        if named is None:
            return None
        cls, state = named, node.args[3]
    if not cls.module.startswith("torch.distributed."):
        return None
    if cls.name == "ShardedTensor":
        return part(state, rebuilder)
    if cls.name == "DTensor":
        return part_of_dtensor(state, rebuilder, rank)
    return None


def is_flat(found: Found) -> bool:
    """Say whether a distributed tensor is the flat one of a unit of FSDP, whose parameters have no names in it."""
    last = found.path[-1]
    return isinstance(last, str) and len(found.part.shape) == 1 and last.rpartition(".")[2].startswith(_FLAT)


def part(state: Inert, rebuilder: Rebuilder) -> Part:
    """
    Return what the state of a sharded tensor says.

    Raises:
        MalformedFile: It contradicts itself.
    """
    if not isinstance(state, tuple) or len(state) < 3 or not isinstance(state[0], list):
        raise malformed("without its shards")
    shards, metadata, group = state[:3]
    fields = nodes.attribute_pairs(metadata)
    properties = nodes.attribute_pairs(nodes.lookup(fields, "tensor_properties"))
    dtype = nodes.lookup(properties, "dtype")
    if dtype is None:  # since its state is a tuple
        said = getattr(nodes.lookup(fields, "tensor_properties"), "state", None)
        dtype = said[0] if isinstance(said, tuple) and said else None
    listed = nodes.lookup(fields, "shards_metadata")
    if not isinstance(listed, list):
        raise malformed("that does not list its shards")
    boxes = tuple(_box(nodes.attribute_pairs(one)) for one in listed)
    local = []
    for shard in shards:
        own = nodes.attribute_pairs(shard)
        info = rebuilder.tensor(nodes.lookup(own, "tensor"))
        local.append((_box(nodes.attribute_pairs(nodes.lookup(own, "metadata"))), _checked(info)))
    ranks = nodes.attribute_pairs(group)
    rank, world = (nodes.lookup(ranks, key) for key in ("global_rank", "global_world_size"))
    return Part(
        as_sizes(nodes.lookup(fields, "size")),
        as_dtype(dtype),
        tuple(local),
        boxes,
        rank if is_size(rank) else None,
        world if is_size(world) else None,
    )


def _box(pairs: Pairs) -> Box:
    return as_sizes(nodes.lookup(pairs, "shard_offsets")), as_sizes(nodes.lookup(pairs, "shard_sizes"))


def _checked(info: TensorInfo | None) -> TensorInfo:
    if info is None:
        raise malformed("with a shard that is no tensor")
    return info


class Part(NamedTuple):
    """What one rank holds of a distributed tensor."""

    shape: tuple[int, ...]
    """Of the whole."""
    dtype: DType
    boxes: tuple[tuple[Box, TensorInfo], ...]
    """Those that are in this file, as tensors of their own."""
    all_boxes: tuple[Box, ...] | None
    """Those of all ranks, where the file lists them."""
    rank: int | None
    """That of the process which wrote it, where the file says so."""
    world: int | None
    """How many processes there were, where the file says so."""
    why_not: str | None = None
    """Why it cannot be put together; None where it can."""


def malformed(what: str) -> MalformedFile:
    """Return the error for a distributed tensor that contradicts itself."""
    return MalformedFile(f"a distributed tensor {what}", kind="malformed-tensor", hint="Get the file again.")


class Placement(NamedTuple):
    """How one dimension of the mesh cuts a tensor."""

    kind: str
    dim: int = 0
    split_factor: int = 1


class Mesh(NamedTuple):
    """The ranks in rows and columns, and where in them this one is."""

    shape: tuple[int, ...]
    coordinate: tuple[int, ...]
    rank: int | None


def part_of_dtensor(state: Inert, rebuilder: Rebuilder, named: int | None = None) -> Part:
    """
    Return what the state of a distributed tensor says; ``named`` is the rank that the name of its file has.

    Raises:
        MalformedFile: It contradicts itself.
    """
    fields = nodes.state_pairs(state)
    info = rebuilder.tensor(nodes.lookup(fields, "_local_tensor"))
    spec = nodes.attribute_pairs(nodes.lookup(fields, "_spec"))
    meta = nodes.lookup(spec, "tensor_meta")
    args = meta.args if isinstance(meta, Call) and isinstance(meta.args, tuple) else ()
    if info is None or len(args) < 3:
        raise malformed("without its part, or its facts")
    shape, dtype = as_sizes(args[0]), as_dtype(args[2])
    placements = _placements(nodes.lookup(spec, "placements"))
    found = _mesh(nodes.attribute_pairs(nodes.lookup(spec, "mesh")), rebuilder, named)
    rank, world = (found.rank, prod(found.shape)) if found is not None else (None, None)

    def without(why: str) -> Part:
        return Part(shape, dtype, (), None, rank, world, why)

    unknown = [one.kind for one in placements if one.kind not in ("Shard", "_StridedShard", "Replicate")]
    if unknown:
        added = any("Partial" in kind for kind in unknown)
        return without(f"{unknown[0]}: {'the parts of the ranks are to be added up' if added else 'how is not known'}")
    if found is None or len(found.shape) != len(placements):
        return without("where in the mesh its rank is, is not in the file")
    box = local_box(shape, found, placements, _shard_order(nodes.lookup(spec, "shard_order"), len(placements)))
    if box is None:
        return without("its split factor is that of no dimension of the mesh")
    numel: int = prod(box[1])
    if box[1] != info.shape and (numel or info.numel):
        return without(f"by its placements the part has shape {list(box[1])}, in the file it has {list(info.shape)}")
    return Part(shape, dtype, ((box, info),) if info.numel else (), None, rank, world)


def local_box(
    shape: tuple[int, ...], mesh: Mesh, placements: Sequence[Placement], order: Sequence[int] | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the box of a rank; None where the split factor of a placement fits no dimension of the mesh."""
    offsets, sizes = [0] * len(shape), list(shape)
    in_order = _in_order(mesh, placements) if order is None else order
    if in_order is None:
        return None
    for axis in in_order:
        dim = placements[axis].dim
        if not 0 <= dim < len(shape):
            raise malformed(f"of {len(shape)} dimensions that is cut along number {dim}")
        chunk = -(-sizes[dim] // mesh.shape[axis])
        start = min(chunk * mesh.coordinate[axis], sizes[dim])
        offsets[dim] += start
        sizes[dim] = min(chunk, sizes[dim] - start)
    return tuple(offsets), tuple(sizes)


def _in_order(mesh: Mesh, placements: Sequence[Placement]) -> list[int] | None:
    """Return the dimensions of the mesh that cut, in the order in which they do; each dimension of a tensor apart."""
    found: list[int] = []
    for dim in sorted({one.dim for one in placements if one.kind != "Replicate"}):
        own: list[int] = []
        for axis in reversed(range(len(placements))):
            kind, cut, split_factor = placements[axis]
            if kind == "Replicate" or cut != dim:
                continue
            before = [1, *accumulate((mesh.shape[one] for one in own), mul)]
            factor = split_factor if kind == "_StridedShard" else 1
            if factor not in before:
                return None
            own.insert(before.index(factor), axis)
        found += own
    return found


def _shard_order(said: Inert, axes: int) -> list[int] | None:
    """Return the order in which the dimensions of the mesh cut, where newer files spell it out."""
    if not isinstance(said, tuple | list):
        return None
    found: list[int] = []
    for entry in said:
        args = entry.args if isinstance(entry, Call) else None
        listed = args[1] if isinstance(args, tuple) and len(args) == 2 else None
        if not isinstance(listed, tuple | list) or not all(is_size(axis) and axis < axes for axis in listed):
            return None
        found += listed
    return found


def _placements(said: Inert) -> list[Placement]:
    if not isinstance(said, tuple | list) or len(said) > 64:
        raise malformed("without its placements")
    found = []
    for one in said:
        cls = nodes.class_of(one)
        pairs = nodes.attribute_pairs(one)
        args = one.args if isinstance(one, Call) and isinstance(one.args, tuple) else ()
        said_dim, said_factor = (nodes.lookup(pairs, key) for key in ("dim", "split_factor"))
        dim = said_dim if said_dim is not None else args[0] if args and type(args[0]) is int else 0
        factor = said_factor if said_factor is not None else args[1] if len(args) > 1 else 1
        if cls is None or type(dim) is not int:
            raise malformed("with a placement that is none")
        found.append(Placement(cls.name, dim, factor if is_size(factor) else 1))
    return found


def _mesh(pairs: Pairs, rebuilder: Rebuilder, named: int | None) -> Mesh | None:
    """Return the mesh, and where in it the rank is that wrote the file; None where that is not known."""
    said = nodes.lookup(pairs, "_rank")
    rank = said if is_size(said) else None
    layout = _layout(nodes.lookup(pairs, "_layout"))
    mesh = rebuilder.tensor(nodes.lookup(pairs, "mesh"))  # before there were layouts
    shape = layout[0] if layout is not None else mesh.shape if mesh is not None else None
    if shape is None or not 0 < prod(shape) <= _MOST_RANKS:
        return None
    at = nodes.lookup(pairs, "_coordinate_on_dim")
    if not isinstance(at, tuple | list):
        ranks = mesh if mesh is not None else rebuilder.tensor(nodes.lookup(pairs, "_rank_map"))
        steps = layout[1] if layout is not None else row_major(shape)
        number = _number_of(named if rank is None else rank, ranks)
        if number is None:
            return None
        at = [number // step % size for step, size in zip(steps, shape, strict=True)]
    if len(at) != len(shape) or not all(is_size(one) and one < size for one, size in zip(at, shape, strict=True)):
        raise malformed(f"at {list(at)} of a mesh of {list(shape)}")
    return Mesh(shape, tuple(at), rank)


def _number_of(rank: int | None, ranks: TensorInfo | None) -> int | None:
    """Return the place of a rank in the list of all; None where it is not among them."""
    if rank is None or ranks is None or ranks.numel > _MOST_RANKS or ranks.dtype.name not in _INTEGERS:
        return None
    data = LazyTensor("mesh", ranks).read()
    listed = unpack(f"<{ranks.numel}{_INTEGERS[ranks.dtype.name]}", data)
    return listed.index(rank) if rank in listed else None


def _layout(node: Inert) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the sizes and the steps of a mesh from its layout, whose axes may stand for several each."""
    pairs = nodes.attribute_pairs(node)
    axes = nodes.lookup(pairs, "axes")
    if isinstance(axes, tuple | list):
        own = [nodes.attribute_pairs(axis) for axis in axes[:_MOST_AXES]]
        sizes, steps = ([nodes.lookup(one, key) for one in own] for key in ("shape", "stride"))
    else:
        given = node.args if isinstance(node, Call) and isinstance(node.args, tuple) else ()
        said = [nodes.lookup(pairs, key) for key in ("shape", "stride")] if pairs else list(given[:2])
        if len(said) != 2:
            return None
        sizes, steps = (list(one) if isinstance(one, tuple | list) else [one] for one in said)
    if len(sizes) != len(steps) or len(sizes) > _MOST_AXES:
        return None
    of_axes = [_axis(size, step) for size, step in zip(sizes, steps, strict=True)]
    known = [one for one in of_axes if one is not None]
    return (tuple(size for size, _ in known), tuple(step for _, step in known)) if len(known) == len(sizes) else None


def _axis(size: Inert, step: Inert) -> tuple[int, int] | None:
    """Return the size of an axis, and how far its ranks are apart; it may stand for several."""
    own, apart = (list(one) if isinstance(one, tuple | list) else [one] for one in (size, step))
    if len(own) != len(apart) or len(own) > _MOST_AXES or not all(map(is_size, (*own, *apart))):
        return None
    numel: int = prod(own)
    return numel, min((one for one in apart if one), default=1)


class Rank:
    """The file of one rank, and the distributed tensors in it."""

    def __init__(self, tree: FolderTree, file: str, number: int) -> None:
        self.file = file
        self.parsed = tree.open(file)
        rebuilder, cancellation = self.parsed.rebuilder, tree.folder.cancellation
        self.found: dict[Path, Found] = {}
        try:
            for one in distributed_in(self.parsed.root, rebuilder, cancellation, number) if rebuilder else ():
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
    tree = FolderTree(folder, probe, NAME, TRAITS)
    remarks: list[Remark] = []
    files: list[str] = []
    pairs: PairList = []
    why: str | None = None
    for one in sets:
        ranks = _ranks(tree, one, remarks, keyed=keyed)
        missing = _missing_ranks(ranks, one)
        files += [rank.file for rank in ranks]
        why_not = _why_not(ranks)
        why = why or why_not
        head = "" if one is sets[0] and not keyed else one.stem
        is_one = any(rank.found for rank in ranks) or (keyed and (one.world is not None or _are_copies(ranks)))
        if why_not is None and is_one:
            if keyed:
                _unite(tree, ranks)
            pairs.append((head, _merged(tree, ranks, missing, remarks)))
        else:
            remarks += _apart_remarks(ranks, missing)
            pairs += _apart(tree, ranks, f"{head}_" if head else "")
    root: Inert = pairs[0][1] if len(pairs) == 1 and not pairs[0][0] else Dict(pairs)
    return tree.parsed(root, files)._replace(unmerged=why, remarks=tuple(remarks))


def _are_copies(ranks: Sequence[Rank]) -> bool:
    """Say whether files hold the same, going by the checksums in them."""
    sums = {
        tuple(
            (*name.split("/")[1:], record.crc32) for archive in rank.parsed.archives for name, record in archive.items()
        )
        for rank in ranks
    }
    return len(sums) == 1 and all(sums)


def _unite(tree: FolderTree, ranks: Sequence[Rank]) -> None:
    """Give the tree of the first rank what only others have at their roots: those of another stage of a pipeline."""
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


def _ranks(tree: FolderTree, one: Set, remarks: list[Remark], *, keyed: bool) -> list[Rank]:
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


def _apart(tree: FolderTree, ranks: Sequence[Rank], head: str) -> Pairs:
    """Return the trees of the ranks side by side, each with its own parts."""
    found: PairList = []
    for rank in ranks:
        for one in rank.found.values():
            if len(one.part.boxes) == 1:
                one.put(tree.tensor(one.part.boxes[0][1]))
        found.append((f"{head}rank_{rank.number}", tree.root_of(rank.file)))
    return found


def _merged(tree: FolderTree, ranks: Sequence[Rank], missing: Missing, remarks: list[Remark]) -> Inert:
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
        remarks.append(Remark("CK157", missing.message, "The others have copies of its parts."))
    _note_differences(ranks, remarks)
    for found in first.found.values():
        found.put(leaves[id(found.node)])
    return tree.root_of(first.file)


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
    pieces = [Piece(*box, file, partial(given, info)) for box, (file, info) in boxes.items()]
    return joined(name, first.shape, first.dtype, pieces, folder.cancellation)


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
