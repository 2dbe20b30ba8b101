"""
Inert nodes to contents by name: tensors, the groups they form, and everything else.

Strategy: two walks, neither recursive. The first visits every container once, by identity, and marks those that have
a tensor anywhere below; the second follows only the marked ones, in file order, and gives each tensor its full dotted
name. A subtree without tensors is one extra, whatever its size. So a tree that shares its parts a billion times over
costs as much as it stores, unless it has tensors, and then the limit on names stops it.

No key makes a file unreadable: ``key_names`` names keys that are not text, and equal names get a number.
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

# A shared part has a path for each way to it. The total memory of paths is limited: a fixed amount for any file, more
# for each node in it; and each path counts with the overhead of its object.
_PATHS_NBYTES: Final = 1 << 24
_PATH_NBYTES: Final = 256
_OVERHEAD_NBYTES: Final = 64

Form: TypeAlias = Literal["state_dict", "checkpoint", "model", "training", "tensors", "data", "archive"]
"""The kind of a file's contents as a whole."""
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
    """The mapping or model in the tree; None if the format has no tree."""
    own_keys: frozenset[str] | None = None
    """The keys of the mapping that belong to it; None if all do."""

    @property
    def head(self) -> str:
        """The prefix of its full names: its key and a dot; empty at the root."""
        return f"{self.key}." if self.key else ""


@dataclass(eq=False, slots=True)
class Contents:
    """Everything in a tree of objects, by full dotted name, in file order."""

    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)
    attributes: dict[str, TensorInfo] = field(default_factory=dict)
    """Tensors inside whole models that a state_dict() would not give: plain attributes, non-persistent buffers."""
    extras: list[tuple[str, Inert]] = field(default_factory=list)
    """The largest subtrees without tensors, with their paths."""
    walks: list[tuple[str, modules.StateDictWalk]] = field(default_factory=list)
    """For each whole model: its path, and the entries and unknowns of its state_dict()."""
    unreadable: list[tuple[str, str]] = field(default_factory=list)
    """Parameters and buffers that are not tensors of a known kind: the name, and the class."""
    clashes: dict[str, str] = field(default_factory=dict)
    """New names of tensors whose own name was taken already, and that own name."""
    bound_method: bool = False

    def remarks(self) -> Contents:
        """Return a copy without the fields that a Checkpoint has as attributes of its own."""
        return replace(self, tensors={}, groups=[], attributes={}, extras=[])


_Place: TypeAlias = "tuple[Inert, str, Group | None]"
"""A node to visit, its dotted path, and the group that its direct tensors belong to."""


def collect(root: Inert, rebuilder: Rebuilder, limits: Limits, graph: ModuleGraph | None = None) -> Contents:
    """
    Return the contents of the tree below ``root``.

    Raises:
        MalformedFile: A tensor contradicts its storage.
        AmbiguousFile: A mapping or a model has two tensors under the same key.
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
        """Bytes that paths may still take."""
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
            elif id(node) not in inside:  # a container inside itself is not entered again
                inside.add(id(node))
                todo.append((_LEAVE, str(id(node)), None))
                todo.extend(reversed(self._open(node, path, group)))

    def _open(self, node: Inert, path: str, group: Group | None) -> list[_Place]:
        """Return a container's children to visit, each with its path and its group."""
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
        # A few tensors among other things (best_acc, rng_state beside "model") are not a state dict.
        nested = any(id(child) in self._holding for child in others)
        named = len(texts) == len(below)
        kind: GroupKind = "mapping" if named and (2 * direct >= len(below) or not nested) else "loose"
        # Quantised modules have weights in tuples and numbers beside them: by counting, they would be "loose".
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
        # Tensors that are not in its state_dict() get one name, where they are first met.
        attributes = self._contents.attributes
        for name, info, inner in () if again else self._below(node, path):
            if id(inner) not in self._told:
                self._told.add(id(inner))
                attributes[self._apart(name, attributes) if name in attributes else name] = info

    def _below(self, root: Inert, path: str) -> Iterator[tuple[str, TensorInfo, Inert]]:
        """Yield each tensor inside a part of a model once: the first name of it, its facts, and its node."""
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
        """Return the children of a container by components of names."""
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
        """Raise AmbiguousFile for a key that a mapping has twice with tensors: readers differ in which they take."""
        seen: set[str] = set()
        for key, child in mapping:
            if isinstance(key, str) and (id(child) in self._holding or self._tensor(child) is not None):
                if key in seen:
                    raise AmbiguousFile(f"a mapping has two tensors under the key {key!r}", kind="ambiguous-name")
                seen.add(key)

    def _join(self, path: str, component: str) -> str:
        """Return the path of a component, and count its memory."""
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
"""Last component of the tuple with the weight and the bias of a quantised layer."""
_PLAIN: Final = frozenset((list, tuple))
_TENSORS: Final = frozenset((Call, PersistentId))
"""Types of nodes that may be tensors."""
_SMALL_DEPTH: Final = 16
"""Levels that a small container may have."""
_MODULE_DICTS = ("_parameters", "_buffers", "_modules", modules.BOUND_TO)


def _mark_holding(root: Inert, tensor: Callable[[Inert], TensorInfo | None], limits: Limits) -> tuple[set[int], int]:
    """Return the ids of the containers below ``root`` with a tensor at any depth, and how many nodes were visited."""
    count = depth = 0
    parents: dict[int, int] = {id(root): 0}
    others: list[tuple[int, int]] = []  # further parents of shared nodes
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
    """Return the ids of ``direct`` and of all their ancestors."""
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
