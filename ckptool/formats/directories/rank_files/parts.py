"""
What the file of one rank holds of distributed tensors: where each stands in its tree, and which boxes of it are there.

``ShardedTensor`` (FSDP1) lists the boxes of all ranks. ``DTensor`` (FSDP2, tensor parallelism) says how it was cut, and
where this rank is. Both give the same ``Part``.

The state of a ``ShardedTensor`` is the shards of this rank, the boxes of all, and the process group:

    (local shards, ShardedTensorMetadata, {"global_rank": …, "global_world_size": …}, sharding spec, …)

See torch/distributed/_shard/sharded_tensor/api.py, ``__getstate__``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple, TypeAlias

from ckptool.cancellation import Cancellation, check_cancelled
from ckptool.formats.directories.rank_files import dtensor
from ckptool.formats.directories.rank_files.dtensor import Part, malformed
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Call, Dict, Inert, PairList, Pairs
from ckptool.tensors.rebuild import Rebuilder, as_dtype, as_sizes
from ckptool.tensors.tensor import TensorInfo, is_size
from ckptool.tensors.tiling import Box

Path: TypeAlias = tuple[str | int, ...]

_FROM_TYPE: Final = ("_rebuild_from_type", "_rebuild_from_type_v2")
_PARAMETER: Final = ("_rebuild_parameter", "_rebuild_parameter_with_state")
_FLAT: Final = ("_flat_param", "flat_param")


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
        return dtensor.part(state, rebuilder, rank)
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
