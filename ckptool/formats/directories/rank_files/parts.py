"""``DTensor`` and ``ShardedTensor`` in the file of a rank, of which it has boxes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod
from operator import mul
from struct import unpack
from typing import Final, NamedTuple

from ckptool.cancellation import Cancellation, check_cancelled
from ckptool.errors import MalformedFile
from ckptool.formats.directories.side_by_side import Path
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Call, Dict, Inert, PairList, Pairs
from ckptool.tensors.dtypes import DType
from ckptool.tensors.pieces import Box
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.rebuild import Rebuilder, as_dtype, as_sizes
from ckptool.tensors.tensor import TensorInfo, is_size, row_major

_FROM_TYPE: Final = ("_rebuild_from_type", "_rebuild_from_type_v2")
_PARAMETER: Final = ("_rebuild_parameter", "_rebuild_parameter_with_state")
_FLAT: Final = ("_flat_param", "flat_param")
MOST_RANKS: Final = 1 << 20
_MOST_AXES: Final = 64
_INTEGERS: Final = {"int32": "i", "int64": "q"}


class Found(NamedTuple):
    """A distributed tensor in a tree."""

    path: Path
    siblings: PairList | list[Inert]
    """Its container: pairs of a mapping, or a list."""
    place: int
    """Its index in the container."""
    node: Inert
    part: Part

    @property
    def name(self) -> str:
        """Its dotted name."""
        return ".".join(map(str, self.path))

    def put(self, leaf: Inert) -> None:
        """Put another node in its place in the container."""
        old = self.siblings[self.place]
        self.siblings[self.place] = (old[0], leaf) if isinstance(old, tuple) and old[1] is self.node else leaf


def distributed_in(
    root: Inert, rebuilder: Rebuilder, cancellation: Cancellation | None, rank: int | None = None
) -> Iterator[Found]:
    """Yield the distributed tensors in the mappings and lists of a tree, in order; ``rank`` is in the file's name."""
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
    """Return the children of a node, not a copy, so that they can be changed."""
    if isinstance(node, Call):
        return node.pairs if node.pairs is not None else []
    if isinstance(node, Dict):
        pairs = node.pairs = node.pairs if isinstance(node.pairs, list) else list(node.pairs)
        return pairs
    return node if isinstance(node, list) else []


def part_of(node: Call, rebuilder: Rebuilder, rank: int | None = None) -> Part | None:
    """Return the part of a distributed tensor that a call makes; None if it makes none."""
    func = nodes.global_of(node.func)
    if func is None or not isinstance(node.args, tuple):
        return None
    if func.name in _PARAMETER and node.args and isinstance(node.args[0], Call):
        return part_of(node.args[0], rebuilder, rank)
    cls, state = func, node.state
    if func.name in _FROM_TYPE and len(node.args) == 4:
        cls, state = nodes.global_of(node.args[1]) or func, node.args[3]
    is_torchs = cls.module.startswith("torch.distributed.")
    if is_torchs and cls.name == "ShardedTensor":
        return part(state, rebuilder)
    return part_of_dtensor(state, rebuilder, rank) if is_torchs and cls.name == "DTensor" else None


def is_flat(found: Found) -> bool:
    """Return whether a distributed tensor is the flat one of a unit of FSDP, which has no names of its parameters."""
    last = found.path[-1]
    return isinstance(last, str) and len(found.part.shape) == 1 and last.rpartition(".")[2].startswith(_FLAT)


def part(state: Inert, rebuilder: Rebuilder) -> Part:
    """
    Return the part that the state of a ``ShardedTensor`` describes.

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
        if info is None:
            raise malformed("with a shard that is not a tensor")
        local.append((_box(nodes.attribute_pairs(nodes.lookup(own, "metadata"))), info))
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


class Part(NamedTuple):
    """What one rank holds of a distributed tensor."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: DType
    boxes: tuple[tuple[Box, TensorInfo], ...]
    """The boxes in this file, as tensors of their own."""
    all_boxes: tuple[Box, ...] | None
    """The boxes of all ranks, if the file lists them."""
    rank: int | None
    """The rank of the process that wrote it, if the file records it."""
    world: int | None
    """How many processes there were, if the file records it."""
    why_not: str | None = None
    """Why it cannot be joined with others; None if it can."""


def malformed(what: str) -> MalformedFile:
    """Return the error for a distributed tensor that contradicts itself."""
    return MalformedFile(f"a distributed tensor {what}", kind="malformed-tensor", hint="Get the file again.")


class Placement(NamedTuple):
    """How one dimension of the mesh cuts a tensor."""

    kind: str
    dim: int = 0
    split_factor: int = 1


class Mesh(NamedTuple):
    """The ranks in rows and columns, and the coordinate of this one."""

    shape: tuple[int, ...]
    coordinate: tuple[int, ...]
    rank: int | None


def part_of_dtensor(state: Inert, rebuilder: Rebuilder, named: int | None = None) -> Part:
    """
    Return the part that the state of a ``DTensor`` describes; ``named`` is the rank in the name of its file.

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

    if unknown := [one.kind for one in placements if one.kind not in ("Shard", "_StridedShard", "Replicate")]:
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
    """Return the dimensions of the mesh that cut, in the order of the cuts, by dimension of the tensor."""
    found: list[int] = []
    for dim in sorted({one.dim for one in placements if one.kind != "Replicate"}):
        own: list[int] = []
        for axis in reversed(range(len(placements))):
            kind, cut, split_factor = placements[axis]
            if kind == "Replicate" or cut != dim:
                continue
            # A strided shard is cut after the later dimensions whose parts its split factor counts; others before them.
            before = [1, *accumulate((mesh.shape[one] for one in own), mul)]
            factor = split_factor if kind == "_StridedShard" else 1
            if factor not in before:
                return None
            own.insert(before.index(factor), axis)
        found += own
    return found


def _shard_order(said: Inert, axes: int) -> list[int] | None:
    """Return the order in which the dimensions of the mesh cut, if the file has it, as newer ones do."""
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
    """Return the mesh, with the coordinate of the rank that wrote the file; None if that is not known."""
    said = nodes.lookup(pairs, "_rank")
    rank = said if is_size(said) else None
    layout = _layout(nodes.lookup(pairs, "_layout"))
    mesh = rebuilder.tensor(nodes.lookup(pairs, "mesh"))  # before there were layouts
    shape = layout[0] if layout is not None else mesh.shape if mesh is not None else None
    if shape is None or not 0 < prod(shape) <= MOST_RANKS:
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
    """Return the index of a rank in the list of all; None if it is not in it."""
    if rank is None or ranks is None or ranks.numel > MOST_RANKS or ranks.dtype.name not in _INTEGERS:
        return None
    data = LazyTensor("mesh", ranks).read()
    listed = unpack(f"<{ranks.numel}{_INTEGERS[ranks.dtype.name]}", data)
    return listed.index(rank) if rank in listed else None


def _layout(node: Inert) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the sizes and the steps of a mesh from its layout; an axis may stand for several."""
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
    """Return the size of an axis, and the distance between its ranks; it may stand for several axes."""
    own, apart = (list(one) if isinstance(one, tuple | list) else [one] for one in (size, step))
    if len(own) != len(apart) or len(own) > _MOST_AXES or not all(map(is_size, (*own, *apart))):
        return None
    numel: int = prod(own)
    return numel, min((one for one in apart if one), default=1)
