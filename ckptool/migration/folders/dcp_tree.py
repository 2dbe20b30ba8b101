"""
A pickled tree → its leaves, as DCP flattens a state dict: dicts, and those lists that have dicts or tensors in them.

Keys that are no text become text, as there. See torch/distributed/checkpoint/_traverse.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from ckptool.cancellation import Cancellation, check_cancelled
from ckptool.errors import LimitExceeded, MigrationRefused
from ckptool.migration.folders.dcp_index import Path
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Global, Inert

_DEEPEST: Final = 500
"""Torch follows them by calls of functions in each other, of which Python allows a thousand."""
_MOST_REPEATED: Final = 10_000


class Leaf(NamedTuple):
    """What becomes an item, or an empty dict, which has none."""

    path: Path
    node: Inert
    is_empty: bool = False
    has_number: bool = False
    """A key on its path was no text."""


def leaves(
    root: Inert,
    replaced: Callable[[Inert], Inert],
    is_tensor: Callable[[Inert], bool],
    cancellation: Cancellation | None = None,
) -> Iterator[Leaf]:
    """
    Yield the leaves in the order of the tree.

    Raises:
        MigrationRefused: A key has no plain text, or things are nested too deep for torch.
        LimitExceeded: The same things are held again and again.
    """
    seen: set[int] = set()
    repeated = 0
    todo: list[Leaf] = [Leaf((), root)]
    while todo:
        check_cancelled(cancellation)
        path, node, _, has_number = todo.pop()
        node = replaced(node)
        below = _below(node, replaced, is_tensor)
        if below is None:
            yield Leaf(path, node, has_number=has_number)
            continue
        repeated += id(node) in seen
        seen.add(id(node))
        if repeated > _MOST_REPEATED:
            raise LimitExceeded(
                f"dicts and lists that are held more than {_MOST_REPEATED:,} times over",
                kind="repeated",
                actual=_MOST_REPEATED,
            )
        if len(path) > _DEEPEST:
            raise MigrationRefused(
                f"dicts and lists in each other, more than {_DEEPEST} deep, which torch could not read",
                kind="too-deep",
                hint="Take the weights alone: `weights='raw'`.",
            )
        if not below:
            yield Leaf(path, node, is_empty=True)
        children = []
        for key, child in below:
            component = key if isinstance(node, list) else _text(key, path)
            children.append(Leaf((*path, component), child, has_number=has_number or component is not key))
        todo.extend(reversed(children))


def _below(node: Inert, replaced: Callable[[Inert], Inert], is_tensor: Callable[[Inert], bool]) -> nodes.Pairs | None:
    """Return what a node is taken apart into; None if it is a leaf."""
    if isinstance(node, list):
        return list(enumerate(node)) if _has_more(node, replaced, is_tensor) else None
    return nodes.mapping_pairs(node)


def _has_more(items: list[Inert], replaced: Callable[[Inert], Inert], is_tensor: Callable[[Inert], bool]) -> bool:
    """Say whether a list, or a list in it, has a dict or a tensor."""
    todo, seen = [items], {id(items)}
    while todo:
        for one in map(replaced, todo.pop()):
            if isinstance(one, list):
                if id(one) not in seen:
                    seen.add(id(one))
                    todo.append(one)
            elif nodes.mapping_pairs(one) is not None or is_tensor(one):
                return True
    return False


def _text(key: Inert, path: Path) -> str:
    """Return the text of a key, as Python writes it."""
    if isinstance(key, str):
        return key
    parts = key if isinstance(key, tuple) else (key,)
    if all(part is None or isinstance(part, bool | int | float | str | bytes) for part in parts):
        return str(key)
    if isinstance(key, Global) and key.module == "torch":
        return str(key)
    where = ".".join(map(str, path)) or "the root"
    raise MigrationRefused(
        f"a key of {where} that is neither text nor a number: {nodes.class_name(key)}",
        kind="unsupported-key",
        hint="Leave that out with `drop=`, or take the weights alone: `weights='raw'`.",
    )
