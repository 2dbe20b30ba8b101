"""
Find the entries of a checkpoint that a path or a role names, to drop them.

A path is full, or relative to a state dict, without its key. Dotted keys have paths of several components, and a common
prefix of keys is an entry, too: ``model_ema`` of ``{"model_ema.conv": …, "model_ema.norm": …}``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

from ckptool.checkpoints.averages import averaged_heads
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.roles import NO_WEIGHTS
from ckptool.checkpoints.training import states
from ckptool.errors import MigrationRefused
from ckptool.messages import for_shell, some
from ckptool.names.missing import by_likeness
from ckptool.names.renaming import two_readings
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Inert

_LISTED: Final = 12
_DROPPED: Final = ("ema", *NO_WEIGHTS)
"""Roles that can be given instead of a path, for all entries with that role."""


def to_drop(checkpoint: Checkpoint, what: str) -> tuple[str, ...]:
    """Return the full paths of the entries that a path or a role names; raise MigrationRefused if there are none."""
    if what in _DROPPED:
        of_role = [one for one in checkpoint.state_dicts if one.role == what and one.key]
        paths = [path for one in of_role for path in (sorted(one.own_keys) if one.own_keys else [one.key])]
        if what == "ema":
            weights = (one for one in checkpoint.state_dicts if one.role == "model")
            paths += [_joined(one.key, head) for one in weights for head in averaged_heads(one)]
        if what == "optimizer" and not paths:  # before its first step, an optimizer has no tensors
            paths = [path for path, _, _, role in states(checkpoint) if role == what and path]
        if paths:
            return tuple(dict.fromkeys(_list_of(checkpoint, path, paths) for path in paths))
    if what.startswith(".") and _is_there(checkpoint, what[1:]):
        return (what[1:],)
    inside = [_joined(one.key, what) for one in checkpoint.state_dicts if one.key and one.role not in NO_WEIGHTS]
    inside = [path for path in inside if _is_there(checkpoint, path)]
    if _is_there(checkpoint, what):
        if inside:
            raise two_readings(what, [what], inside)
        return (what,)
    if not inside:
        raise _nothing_to_drop(checkpoint, what)
    return tuple(inside)


def _list_of(checkpoint: Checkpoint, path: str, paths: Collection[str]) -> str:
    """Return the path of the list that a path leads into, if all items are of the same role; else the path."""
    above = path.rpartition(".")[0]
    if not above or next(entries_at(checkpoint.root, path), None) is not None:
        return path
    for mapping, key in entries_at(checkpoint.root, above):
        found = next((value for own, value in reversed(nodes.mapping_pairs(mapping) or ()) if own == key), None)
        items = found if isinstance(found, list | tuple) else ()
        if items and all(f"{above}.{number}" in paths or _steps(one) for number, one in enumerate(items)):
            return above
    return path


def _steps(node: Inert) -> bool:
    """Return whether a value is the state of an optimizer, which may have no tensors yet."""
    return {"state", "param_groups"} <= {key for key, _ in nodes.mapping_pairs(node) or () if isinstance(key, str)}


def entries_at(node: Inert, path: str) -> Iterator[tuple[Inert, str | int]]:
    """Yield each mapping and its key that has this full path, or a dotted key that begins with it."""
    for key, value in nodes.mapping_pairs(node) or ():
        text = str(key) if type(key) in (str, int) else None
        if text is None:
            continue
        if f"{text}.".startswith(f"{path}."):
            yield node, key
        elif path.startswith(f"{text}."):
            yield from entries_at(value, path[len(text) + 1 :])


def _is_there(checkpoint: Checkpoint, path: str) -> bool:
    head = f"{path}."
    names = (*checkpoint.tensors, *(name for name, _ in checkpoint.extras))
    return any(f"{name}.".startswith(head) for name in names) or any(True for _ in entries_at(checkpoint.root, path))


def _nothing_to_drop(checkpoint: Checkpoint, path: str) -> MigrationRefused:
    """Return the error for a path that names nothing; the hint lists what exists there, the most similar first."""
    names = [*checkpoint.tensors, *(name for name, _ in checkpoint.extras)]
    names += [_joined(name, str(key)) for name, node in checkpoint.extras for key, _ in nodes.mapping_pairs(node) or ()]
    head = path
    while head and not any(name.startswith(f"{head}.") for name in names):
        head = head.rpartition(".")[0]
    start = len(head) + 1 if head else 0
    below = dict.fromkeys(name[start:].partition(".")[0] for name in names if not head or name.startswith(f"{head}."))
    there = {_joined(head, name): _joined(head, name) for name in below if name not in ("", "_metadata")}
    for one in () if head else checkpoint.state_dicts:
        inside = dict.fromkeys(name.partition(".")[0] for name in one if one.role not in NO_WEIGHTS)
        there |= {name: _joined(one.key, name) for name in inside if name not in there}
    listed = some([for_shell(there[name]) for name in by_likeness(path, there)], _LISTED)
    apart = "Name each by itself. " if "," in path else ""
    return MigrationRefused(
        f"there is nothing called {path!r} to drop",
        kind="nothing-to-drop",
        hint=f"{apart}{f'In {for_shell(head)}' if head else 'At its top'} there are: {listed}" if listed else None,
    )


def _joined(head: str, name: str) -> str:
    return f"{head}.{name}" if head else name
