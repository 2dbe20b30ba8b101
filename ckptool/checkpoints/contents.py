"""
Nodes to contents: gives every tensor of a tree its dotted name, and groups them by their containers.

Strategy: two walks, neither recursive. The first visits every container once, by identity, and marks those that have
a tensor anywhere below; the second follows only the marked ones, in file order, and gives each tensor its full dotted
name. A subtree without tensors is one extra, whatever its size. So a tree that shares its parts a billion times over
costs as much as it stores, unless it has tensors, and then the limit on names stops it.

No key makes a file unreadable: equal names get a number, and keys that are not text are named, too:

- A key with a short plain value by that, whatever its class: a numpy scalar, an enum member, bytes, a namedtuple.
- Parameters that are keys of an optimizer's state by the number that its state_dict() would give them.
- All others by their number in the mapping.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Final, Literal, TypeAlias

from ckptool.cancellation import check_cancelled, each
from ckptool.checkpoints import modules
from ckptool.checkpoints.modules import ModuleGraph
from ckptool.errors import AmbiguousFile, LimitExceeded
from ckptool.limits import Limits
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Call, Global, Inert, Pairs, PersistentId
from ckptool.tensors.rebuild import Rebuilder
from ckptool.tensors.tensor import TensorInfo

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
    collector = _Collector(root, rebuilder, limits, graph or ModuleGraph())
    collector.walk(root, "")
    return collector.contents


class _Collector:
    def __init__(self, root: Inert, rebuilder: Rebuilder, limits: Limits, graph: ModuleGraph) -> None:
        self._graph = graph
        self._tensor = rebuilder.tensor
        self._limits = limits
        self.contents = Contents(bound_method=modules.unbound(root) is not root)
        self._holding, count = _mark_holding(root, self._tensor, limits)
        self._paths_nbytes = _PATHS_NBYTES + _PATH_NBYTES * count
        """Bytes that paths may still take."""
        self._keys = KeyNames(root)
        self._walks: dict[int, modules.StateDictWalk] = {}
        self._last_number: dict[str, int] = {}
        self._told: set[int] = set()  # tensors inside models that already have a name

    def walk(self, root: Inert, start: str) -> None:
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
                self.contents.extras.append((path, node))
            elif id(node) in self._walks or self._graph.is_module(node):
                self._add_model(node, path)
            elif id(node) not in inside:  # a container inside itself is not entered again
                inside.add(id(node))
                # Shared containers are entered once for each way to them, so it matters when this one is left.
                todo.append((_LEAVE, str(id(node)), None))
                todo.extend(reversed(self._open(node, path, group)))

    def _open(self, node: Inert, path: str, group: Group | None) -> list[_Place]:
        """Return a container's children to visit, each with its path and its group."""
        below = list(nodes.children(node))
        infos = [self._tensor(child) for _, child in each(below, self._limits.cancellation)]
        if group is None or group.kind != "optimizer":
            group = self._group(node, path, below, infos)
            self.contents.groups += [group] if group is not None else []
        below = self._named(node, below)
        if nodes.lookup(below, "param_groups") is not None:
            self._keys.number_parameters(below)
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
        if named and nested and any(key.endswith("_packed_params") for key in texts):
            kind = "packed"
        return Group(path, kind, node=node)

    def _add_tensor(self, name: str, info: TensorInfo, group: Group | None) -> None:
        tensors = self.contents.tensors
        if name in tensors:
            wanted, name = name, self._apart(name, tensors)
            self.contents.clashes[name] = wanted
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
        self.contents.walks.append((path, walk))
        group = Group(path, "module", class_name=self._graph.class_name(node), node=node)
        self.contents.groups.append(group)
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
                self.walk(entry.node, name)
                self._told.update(id(node) for _, _, node in self._below(entry.node, name))
            else:
                self.contents.unreadable.append((name, nodes.class_name(entry.node)))
        # Tensors that are not in its state_dict() get one name, where they are first met.
        attributes = self.contents.attributes
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
        named: set[str] = set()
        for key, child in below if nodes.mapping_pairs(node) is not None else ():
            if isinstance(key, str) and (id(child) in self._holding or self._tensor(child) is not None):
                if key in named:  # readers differ in which of them they take
                    raise AmbiguousFile(f"a mapping has two tensors under the key {key!r}", kind="ambiguous-name")
                named.add(key)
        return list(zip(self._keys.components(node, keys), (child for _, child in below), strict=True))

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
    # Level by level, so that the depth is known: a file may nest deeper than functions of Python can recurse.
    level = [] if tensor(root) is not None else [root]
    containers, deepest, cancellation = nodes.CONTAINERS, limits.depth, limits.cancellation
    while level:
        depth += 1
        if depth > deepest:
            raise LimitExceeded(f"things in each other, more than {deepest:,} deep", kind="too-deep", actual=deepest)
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
                    pass  # no calls, so no tensors: visiting it again costs less than recording it
                elif key in parents:
                    others.append((key, own))
                else:
                    parents[key] = own
                    below.append(child)
        level = below
    more: dict[int, list[int]] = {}
    for key, own in others if direct else ():
        more.setdefault(key, []).append(own)
    found: set[int] = set()
    while direct:  # upwards from those that have a tensor directly
        own = direct.pop()
        while own and own not in found:
            found.add(own)
            direct.extend(more.get(own, ()))
            own = parents[own]
    return found, count


_MOST_PARTS: Final = 16
_MOST_TEXT: Final = 256
_DEEPEST: Final = 3
_MOST_BITS: Final = 128


class KeyNames:
    """Names the keys of the mappings of one tree, which must live as long as this object."""

    def __init__(self, root: Inert) -> None:
        self._root = root
        self._texts: dict[int, str | None] = {}
        """The text of each visited node, by its id: many keys may share their parts."""
        self._own: dict[int, dict[int, int]] = {}
        """The numbers of the parameters, by the id of each optimizer's state."""
        self._of_groups: dict[int, dict[int, int]] = {}

    def number_parameters(self, pairs: Pairs) -> None:
        """Record the numbers of an optimizer's parameters, if these pairs are an optimizer's."""
        groups = nodes.lookup(pairs, "param_groups")
        if not isinstance(groups, list):
            return
        if id(groups) not in self._of_groups:
            self._of_groups[id(groups)] = parameter_numbers(groups)
        self._own[id(nodes.lookup(pairs, "state"))] = self._of_groups[id(groups)]

    def components(self, mapping: Inert, keys: Sequence[Inert]) -> list[str]:
        """Return the component for each key of a mapping."""
        own = self._own.get(id(mapping), {})
        texts = [str(own[id(key)]) if id(key) in own else self._text(key) for key in keys]
        taken, unnamed = set(texts), [id(key) for key, text in zip(keys, texts, strict=True) if text is None]
        if unnamed and not own:  # a wrapper of an optimizer has a state by parameter, too, but no groups
            wrapped = {key: str(self._everywhere[key]) for key in unnamed if key in self._everywhere}
            if len(wrapped) == len(unnamed) == len({*wrapped.values()} - taken):  # all have distinct ones
                return [wrapped[id(key)] if text is None else text for key, text in zip(keys, texts, strict=True)]
        free = (text for text in map(str, count()) if text not in taken)
        return [next(free) if text is None else text for text in texts]

    @cached_property
    def _everywhere(self) -> dict[int, int]:
        """The numbers of the parameters of all optimizers in the tree, except those with different numbers."""
        found: dict[int, int] = {}
        several: set[int] = set()
        seen = {id(self._root)}
        todo = [self._root]
        while todo:
            node = todo.pop()
            groups = nodes.item(node, "param_groups")
            if isinstance(groups, list) and id(groups) not in seen:
                for parameter, number in parameter_numbers(groups).items():
                    if found.setdefault(parameter, number) != number:
                        several.add(parameter)
            below = {id(child): child for child in nodes.held(node) if nodes.is_container(child)}
            todo += [child for key, child in below.items() if key not in seen]
            seen.update(below)
        return {parameter: number for parameter, number in found.items() if parameter not in several}

    def _text(self, key: Inert, depth: int = 0) -> str | None:
        """Return the value of a key as text, or None if it is not plain and short."""
        if isinstance(key, str) and not depth:
            return key
        if not nodes.is_container(key):
            return _plain_text(key)
        if id(key) not in self._texts:
            self._texts[id(key)] = None  # a container may hold itself
            self._texts[id(key)] = self._container_text(key, depth) if depth < _DEEPEST else None
        return self._texts[id(key)]

    def _container_text(self, key: Inert, depth: int) -> str | None:
        from ckptool.pickles.numpy_values import numpy_scalar, raw_bytes  # most keys are text

        if isinstance(key, tuple):
            return self._joined("({})", key, depth)
        if (members := nodes.members(key)) is not None:
            return self._joined("{{{}}}", members, depth)
        if not isinstance(key, Call):
            return None
        scalar, raw = numpy_scalar(key), raw_bytes(key)
        if scalar is not None:
            return None if scalar[1] is None else _plain_text(scalar[1])
        if raw is not None:
            return _plain_text(raw)
        is_of_plain = key.state is key.items is key.pairs is key.kwargs is None
        if not is_of_plain or not isinstance(key.args, tuple) or not key.args:
            return None
        if nodes.class_name(key) == "torch.device":
            return self._joined("{}", key.args, depth, ":")
        return self._joined("({})" if len(key.args) > 1 else "{}", key.args, depth)

    def _joined(self, pattern: str, parts: Sequence[Inert], depth: int, separator: str = ", ") -> str | None:
        if len(parts) > _MOST_PARTS:
            return None
        texts = [text for part in parts if (text := self._text(part, depth + 1)) is not None]
        whole = pattern.format(separator.join(texts))
        return whole if len(texts) == len(parts) and len(whole) < _MOST_TEXT else None


def _plain_text(value: Inert) -> str | None:
    if isinstance(value, str):
        return value if len(value) < _MOST_TEXT else None
    if isinstance(value, Global):
        return _plain_text(str(value))
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value) if value.bit_length() < _MOST_BITS else None
    if value is None or isinstance(value, bool | float):
        return str(value)
    if not isinstance(value, bytes | bytearray) or len(value) >= _MOST_TEXT:
        return None
    return str(value, "utf-8", "replace")


def groups_of(groups: Inert) -> list[tuple[Pairs, list[Inert]]]:
    """Return the pairs of each optimizer group, and its parameters; empty if the node is not a list of groups."""
    found = [nodes.mapping_pairs(one) or [] for one in groups] if isinstance(groups, list) else []
    listed = [nodes.lookup(pairs, "params") for pairs in found]
    return [(pairs, one if isinstance(one, list) else []) for pairs, one in zip(found, listed, strict=True)]


def parameter_numbers(groups: Inert) -> dict[int, int]:
    """
    Return the number of each parameter of an optimizer's groups in its state_dict(), by the identity of its node.

    It is the position among the parameters of all groups; one that is twice in a group has the later position.
    See torch/optim/optimizer.py, Optimizer.state_dict.
    """
    found: dict[int, int] = {}
    seen: set[int] = set()
    start = 0
    for _, parameters in groups_of(groups):
        if id(parameters) not in seen:
            seen.add(id(parameters))
            places = {id(one): start + place for place, one in enumerate(parameters) if isinstance(one, Call)}
            for parameter, place in places.items():
                found.setdefault(parameter, place)
        start += len(parameters)
    return found
