"""
What the file of one rank holds of distributed tensors: where each stands in its tree, and which boxes of it are there.

``ShardedTensor`` (FSDP1) lists the boxes of all ranks. ``DTensor`` (FSDP2, tensor parallelism) says how it was cut, and
where this rank is. Both give the same ``Part``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple, TypeAlias

from ckptool.cancellation import Cancellation, check_cancelled
from ckptool.formats.directories.rank_files import dtensor, sharded_tensor
from ckptool.formats.directories.rank_files.part import Part
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Call, Dict, Inert, PairList
from ckptool.tensors.rebuild import Rebuilder

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
        return sharded_tensor.part(state, rebuilder)
    if cls.name == "DTensor":
        return dtensor.part(state, rebuilder, rank)
    return None


def is_flat(found: Found) -> bool:
    """Say whether a distributed tensor is the flat one of a unit of FSDP, whose parameters have no names in it."""
    last = found.path[-1]
    return isinstance(last, str) and len(found.part.shape) == 1 and last.rpartition(".")[2].startswith(_FLAT)
