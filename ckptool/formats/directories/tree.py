"""
A tree of objects that is put together from several files, under the names that they have as one checkpoint.

It reads as the tree of a pickle does, so that state dicts, optimizers and names are found in it in the one way that
there is.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TypeAlias

from ckptool.formats import torch_legacy
from ckptool.limits import Limits
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Dict, Inert, PersistentId
from ckptool.pickles.reader import Pickle
from ckptool.tensors.rebuild import Rebuilder
from ckptool.tensors.tensor import TensorInfo, TypedStorage

Path: TypeAlias = tuple[str | int, ...]


class TreeBuilder:
    """Makes the leaves of a tree, and knows afterwards what they are: ``rebuilder`` recognises its tensors."""

    def __init__(self, limits: Limits) -> None:
        self._leaves = _Leaves()
        self.rebuilder = Rebuilder(self._leaves.resolve, partial(torch_legacy.nested_storage, limits=limits))

    def tensor(self, info: TensorInfo) -> Inert:
        """Return the leaf that is a tensor. One leaf under two names is one tensor under two names."""
        leaf = PersistentId(("tensor", len(self._leaves.tensors)))
        self._leaves.kept.append(leaf)
        self._leaves.tensors[id(leaf.pid)] = info
        return leaf

    def graft(self, pickled: Pickle, rebuilder: Rebuilder) -> Inert:
        """Return what a pickle gave, to be a part of the tree: its tensors are those of its own rebuilder."""
        for node in pickled.persistent_ids:
            self._leaves.take(node, rebuilder)
        return pickled.root

    def transplant(self, node: Inert, rebuilder: Rebuilder) -> Inert:
        """Return a part of another tree, to be a part of this one: its tensors are those of its own rebuilder."""
        todo = [node]
        seen: set[int] = set()
        while todo:
            one = todo.pop()
            if id(one) in seen or not nodes.is_container(one):
                continue
            seen.add(id(one))
            if isinstance(one, PersistentId):
                self._leaves.take(one, rebuilder)
            todo.extend(nodes.held(one))
        return node


class _Leaves:
    """What the leaves of a tree are. It refers to no builder: with the rebuilder, which has it, it goes at once."""

    def __init__(self) -> None:
        self.tensors: dict[int, TensorInfo] = {}
        self.others: dict[int, Rebuilder] = {}
        self.kept: list[Inert] = []
        """Ids are compared: they must not be used again."""

    def take(self, node: PersistentId, rebuilder: Rebuilder) -> None:
        """Note whose a leaf of another tree is."""
        self.kept.append(node)
        self.others[id(node.pid)] = rebuilder

    def resolve(self, pid: Inert) -> TypedStorage | TensorInfo | None:
        """Return what a persistent id of the tree refers to."""
        info = self.tensors.get(id(pid))
        if info is not None:
            return info
        other = self.others.get(id(pid))
        return None if other is None else other.resolve(pid)


def nested(leaves: Iterable[tuple[Path, Inert]]) -> Dict:
    """
    Return dicts in each other that hold leaves at their paths; where all keys of one are 0, 1, 2…, it is a list.

    A path that is both a leaf and a folder of others keeps the leaf, under an empty name among them.
    """
    root: dict[str | int, Inert] = {}
    for path, leaf in leaves:
        inside = root
        for key in path[:-1]:
            below = inside.get(key)
            if not isinstance(below, _Branch):
                below = inside[key] = _Branch({} if below is None else {"": below})
            inside = below.children
        own = inside.get(path[-1])
        if isinstance(own, _Branch):
            own.children[""] = leaf
        else:
            inside[path[-1]] = leaf
    return Dict([(key, _finished(value)) for key, value in root.items()])


class _Branch:
    __slots__ = ("children",)

    def __init__(self, children: dict[str | int, Inert]) -> None:
        self.children = children


def _finished(value: Inert) -> Inert:
    """Return a branch as the node that it is; paths are as long as names are, so this does not go deep."""
    if not isinstance(value, _Branch):
        return value
    children = value.children
    if all(type(key) is int for key in children) and sorted(map(int, children)) == list(range(len(children))):
        return [_finished(children[index]) for index in range(len(children))]
    return Dict([(key, _finished(child)) for key, child in children.items()])
