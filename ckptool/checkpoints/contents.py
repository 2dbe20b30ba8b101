"""
Inert tree → what is in it by name: tensors, the groups they form, and everything else.

Strategy: two walks, neither recursive. The first visits every container once, by identity, and marks those that hold
a tensor anywhere below; the second follows only the marked ones, in file order, and gives each tensor its full dotted
name. A subtree without tensors is one extra, whatever its size. So a tree that shares its parts a billion times over
costs what it stores, unless it holds tensors, and then the limit on names stops it.

No name makes a file unreadable: keys that are no text are named in ``key_names``, and equal names get a number.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from ckptool.cancellation import check_cancelled, each
from ckptool.checkpoints import modules
from ckptool.checkpoints.modules import ModuleGraph
from ckptool.errors import AmbiguousFile, LimitExceeded
from ckptool.limits import Limits
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Call, Inert, PersistentId
from ckptool.tensors.rebuild import Rebuilder
from ckptool.tensors.tensor import TensorInfo

if TYPE_CHECKING:
    from ckptool.checkpoints.key_names import KeyNames

# A part that is shared has a path for each way to it. These count what the paths may cost: so much for any file, so
# much more for each thing that stands in it, and this for the object round a path.
_PATHS_NBYTES: Final = 1 << 24
_PATH_NBYTES: Final = 256
_OVERHEAD_NBYTES: Final = 64

Form: TypeAlias = Literal["state_dict", "checkpoint", "model", "training", "tensors", "data", "archive"]
"""What a file is as a whole."""
GroupKind: TypeAlias = Literal["mapping", "packed", "module", "optimizer", "loose"]


@dataclass(eq=False, slots=True)
class Group:
    """Tensors that belong together: a state dict, a whole model, an optimizer, or the rest of a mapping."""

    key: str
    """Full dotted path of the mapping or object; empty for the root."""
    kind: GroupKind
    names: list[str] = field(default_factory=list)
    class_name: str | None = None
    node: Inert = None
    """The mapping or model in the tree; None where the format has no tree."""
    own_keys: frozenset[str] | None = None
    """The keys of the mapping that belong to it; None if all do."""

    @property
    def head(self) -> str:
        """The prefix of its full names: its key and a dot, or nothing at the root."""
        return f"{self.key}." if self.key else ""


@dataclass(eq=False, slots=True)
class Contents:
    """Everything in a tree of objects, by full dotted name, in file order."""

    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)
    attributes: dict[str, TensorInfo] = field(default_factory=dict)
    """Tensors inside whole models that a state_dict() would not give: plain attributes, non-persistent buffers."""
    extras: list[tuple[str, Inert]] = field(default_factory=list)
    """The largest subtrees that hold no tensor, under the path where they stand."""
    walks: list[tuple[str, modules.StateDictWalk]] = field(default_factory=list)
    """For each whole model: its path, and what could not be known about its state_dict()."""
    unreadable: list[tuple[str, str]] = field(default_factory=list)
    """Parameters and buffers that are no tensors we know: the name, and what the pickle calls to make one."""
    clashes: dict[str, str] = field(default_factory=dict)
    """Names that were given to tensors whose own name another has already, and that own name."""
    bound_method: bool = False

    def remarks(self) -> Contents:
        """Return what there is to say of it, without all that a checkpoint has under names of its own."""
        return replace(self, tensors={}, groups=[], attributes={}, extras=[])


_Place: TypeAlias = "tuple[Inert, str, Group | None]"
"""A node on the way down, its dotted path, and the group that its direct tensors belong to."""


def collect(root: Inert, rebuilder: Rebuilder, limits: Limits, graph: ModuleGraph | None = None) -> Contents:
    """
    Return what is in the tree below ``root``.

    Raises:
        MalformedFile: A tensor contradicts its storage.
        AmbiguousFile: A mapping or a model holds two tensors under one and the same key.
        LimitExceeded: There are more names than ``limits`` allow, or longer ones.
    """
    return _Collector(root, rebuilder, limits, graph or ModuleGraph()).collect()


class _Collector:
    def __init__(self, root: Inert, rebuilder: Rebuilder, limits: Limits, graph: ModuleGraph) -> None:
        self._root = root
        self._graph = graph
        self._tensor = rebuilder.tensor
        self._limits = limits
        self._contents = Contents(bound_method=modules.unbound(root) is not root)
        self._holding, count = _mark_holding(root, self._tensor, limits)
        self._paths_nbytes = _PATHS_NBYTES + _PATH_NBYTES * count
        """What is left for paths."""
        self._keys: KeyNames | None = None
        self._walks: dict[int, modules.StateDictWalk] = {}
        self._last_number: dict[str, int] = {}
        self._told: set[int] = set()  # tensors inside models that already have a name

    def collect(self) -> Contents:
        self._walk(self._root, "")
        return self._contents

    def _walk(self, root: Inert, start: str) -> None:
        todo: list[_Place] = [(root, start, None)]
        inside: set[int] = set()
        while todo:
            check_cancelled(self._limits.cancellation)
            node, path, group = todo.pop()
            if node is _LEAVE:
                inside.discard(int(path))
                continue
            info = self._tensor(node)
            if info is not None:
                self._add_tensor(path, info, group)
                continue
            if id(node) not in self._holding:
                self._contents.extras.append((path, node))
            elif id(node) in self._walks or self._graph.is_module(node):
                self._add_model(node, path)
            elif id(node) not in inside:  # a container inside itself is not followed twice
                inside.add(id(node))
                todo.append((_LEAVE, str(id(node)), None))
                todo.extend(reversed(self._open(node, path, group)))

    def _open(self, node: Inert, path: str, group: Group | None) -> list[_Place]:
        """Return a container's children, with the group that they belong to."""
        below = list(nodes.children(node))
        infos = [self._tensor(child) for _, child in each(below, self._limits.cancellation)]
        if group is None or group.kind != "optimizer":
            group = self._group(node, path, below, infos)
            self._contents.groups += [group] if group is not None else []
        below = self._named(node, below)
        if nodes.lookup(below, "param_groups") is not None:
            self._key_names().number_parameters(below)
        return [(child, self._join(path, component), group) for component, child in below]

    def _group(
        self, node: Inert, path: str, below: list[tuple[Inert, Inert]], infos: list[TensorInfo | None]
    ) -> Group | None:
        texts = [key for key, _ in below if isinstance(key, str)]
        if "state" in texts and "param_groups" in texts:
            return Group(path, "optimizer", node=node)
        others = [child for (_, child), info in zip(below, infos, strict=True) if info is None]
        direct = len(below) - len(others)
        if not direct or nodes.mapping_pairs(node) is None:
            return None
        # Some tensors among other things (best_acc, rng_state beside "model") are no state dict.
        nested = any(id(child) in self._holding for child in others)
        named = len(texts) == len(below)
        kind: GroupKind = "mapping" if named and (2 * direct >= len(below) or not nested) else "loose"
        # Their weights are in tuples, and what stands beside them is numbers: by counting, no state dict either.
        if named and nested and any(key.endswith(_PACKED) for key in texts):
            kind = "packed"
        return Group(path, kind, node=node)

    def _add_tensor(self, name: str, info: TensorInfo, group: Group | None) -> None:
        tensors = self._contents.tensors
        if name in tensors:
            wanted, name = name, self._apart(name, tensors)
            self._contents.clashes[name] = wanted
        if len(tensors) >= self._limits.tensors:
            raise LimitExceeded(f"more than {self._limits.tensors:,} names of tensors", actual=self._limits.tensors)
        tensors[name] = info
        if group is not None:
            group.names.append(name)

    def _apart(self, name: str, taken: Container[str]) -> str:
        """Return a free name for a tensor whose own name is taken."""
        number = self._last_number.get(name, 1) + 1
        while f"{name}#{number}" in taken:
            number += 1
        self._last_number[name] = number
        return self._join("", f"{name}#{number}")

    def _add_model(self, node: Inert, path: str) -> None:
        walk = self._walks.get(id(node))
        again = walk is not None
        if walk is None:
            walk = self._walks[id(node)] = self._graph.walk(node, self._limits)
        self._contents.walks.append((path, walk))
        group = Group(path, "module", class_name=self._graph.class_name(node), node=node)
        self._contents.groups.append(group)
        own = {entry.name for entry in walk.entries}
        if len(own) < len(walk.entries):
            raise AmbiguousFile("a model has two tensors of one name", kind="ambiguous-name")
        for entry in each(walk.entries, self._limits.cancellation):
            name = self._join(path, entry.name)
            info = self._tensor(entry.node)
            if info is not None:
                self._told.add(id(entry.node))
                self._add_tensor(name, info if info.kind == entry.kind else info._replace(kind=entry.kind), group)
            elif entry.kind is None:
                self._walk(entry.node, name)
                self._told.update(id(node) for _, _, node in self._below(entry.node, name))
            else:
                self._contents.unreadable.append((name, nodes.class_name(entry.node)))
        # What its state_dict() would not give has a name once, where it is first met.
        attributes = self._contents.attributes
        for name, info, inner in () if again else self._below(node, path):
            if id(inner) not in self._told:
                self._told.add(id(inner))
                attributes[self._apart(name, attributes) if name in attributes else name] = info

    def _below(self, root: Inert, path: str) -> Iterator[tuple[str, TensorInfo, Inert]]:
        """Yield the tensors inside a part of a model, each once: the name under which it is met first, and its node."""
        todo = [(root, path)]
        seen: set[int] = set()
        while todo:
            check_cancelled(self._limits.cancellation)
            node, name = todo.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            info = self._tensor(node)
            if info is not None:
                yield name, info, node
            elif id(node) in self._holding:
                below = [
                    (child, name if component in _MODULE_DICTS else self._join(name, component))
                    for component, child in self._named(node, list(self._graph.children(node)))
                ]
                todo.extend(reversed(below))

    def _named(self, node: Inert, below: list[tuple[Inert, Inert]]) -> list[tuple[str, Inert]]:
        """Return what a container holds, by components of names."""
        keys = [key for key, _ in below]
        texts = {key for key in keys if isinstance(key, str)}
        if len(texts) == len(below):  # most mappings
            return below
        if nodes.mapping_pairs(node) is not None:
            self._refuse_repeated(below)
        return list(zip(self._key_names().components(node, keys), (child for _, child in below), strict=True))

    def _key_names(self) -> KeyNames:
        from ckptool.checkpoints.key_names import KeyNames  # most keys are text

        if self._keys is None:
            self._keys = KeyNames(self._root)
        return self._keys

    def _refuse_repeated(self, mapping: list[tuple[Inert, Inert]]) -> None:
        """Refuse a key that a mapping has twice, each time for a tensor: which one it is depends on the reader."""
        seen: set[str] = set()
        for key, child in mapping:
            if isinstance(key, str) and (id(child) in self._holding or self._tensor(child) is not None):
                if key in seen:
                    raise AmbiguousFile(f"a mapping has two tensors under the key {key!r}", kind="ambiguous-name")
                seen.add(key)

    def _join(self, path: str, component: str) -> str:
        """Return the path of a component, and count what it costs."""
        joined = f"{path}.{component}" if path else component
        if len(joined) > self._limits.name_nbytes:
            raise LimitExceeded(
                f"a name of {len(joined):,} characters; {self._limits.name_nbytes:,} are allowed",
                kind="name-too-long",
                needed=len(joined),
                actual=self._limits.name_nbytes,
            )
        self._paths_nbytes -= len(joined) + _OVERHEAD_NBYTES
        if self._paths_nbytes < 0:
            raise LimitExceeded(
                "the paths of everything in the file are far longer than the file: its parts hold each other"
            )
        return joined


_LEAVE = Call(None, ())
_PACKED = "_packed_params"
"""Last component of what holds the weight and the bias of a quantised layer, in a tuple."""
_PLAIN: Final = frozenset((list, tuple))
_TENSORS: Final = frozenset((Call, PersistentId))
"""Types of nodes that may stand for a tensor."""
_SMALL_DEPTH: Final = 16
"""Levels that what is small may have."""
_MODULE_DICTS = ("_parameters", "_buffers", "_modules", modules.BOUND_TO)


def _mark_holding(root: Inert, tensor: Callable[[Inert], TensorInfo | None], limits: Limits) -> tuple[set[int], int]:
    """Return the ids of the containers below ``root`` that hold a tensor at any depth, and how much all hold."""
    count = depth = 0
    parents: dict[int, int] = {id(root): 0}
    others: list[tuple[int, int]] = []  # further parents, of what is shared
    direct: list[int] = []
    level = [] if tensor(root) is not None else [root]
    containers, deepest, cancellation = nodes.CONTAINERS, limits.depth, limits.cancellation
    while level:
        depth += 1
        if depth > deepest:
            fact = f"things in each other, more than {deepest:,} deep"
            raise LimitExceeded(fact, kind="too-deep", actual=deepest)
        below: list[Inert] = []
        is_shallow = depth + _SMALL_DEPTH < deepest
        for node in each(level, cancellation):
            own = id(node)
            for child in node if type(node) in _PLAIN else nodes.held(node):
                count += 1
                kind = type(child)
                if kind not in containers:
                    continue
                if cancellation is not None:
                    cancellation.check()
                key = id(child)
                if kind in _TENSORS and tensor(child) is not None:
                    direct.append(own)
                elif is_shallow and nodes.is_small(child):
                    pass
                elif key in parents:
                    others.append((key, own))
                else:
                    parents[key] = own
                    below.append(child)
        level = below
    return _upwards(direct, parents, others), count


def _upwards(direct: list[int], parents: dict[int, int], others: list[tuple[int, int]]) -> set[int]:
    """Return all that is reached from ``direct`` by going from child to parent."""
    more: dict[int, list[int]] = {}
    for key, own in others if direct else ():
        more.setdefault(key, []).append(own)
    found: set[int] = set()
    while direct:
        own = direct.pop()
        while own and own not in found:
            found.add(own)
            direct.extend(more.get(own, ()))
            own = parents[own]
    return found
