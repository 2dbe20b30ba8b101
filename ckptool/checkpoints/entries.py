"""
Entries of a checkpoint by path or role, to drop them; averaged weights (EMA) among others.

A path is full, or relative to a state dict, without its key. Dotted keys have paths of several components, and a common
prefix of keys is an entry, too: ``model_ema`` of ``{"model_ema.conv": …, "model_ema.norm": …}``.

Averaged weights (EMA) may be in the same state dict as the weights: they are taken, or left out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Final

from ckptool.checkpoints.checkpoint import Checkpoint, StateDict
from ckptool.checkpoints.roles import NO_WEIGHTS, Role
from ckptool.checkpoints.training import states
from ckptool.errors import MigrationRefused, WeightsNotFound
from ckptool.messages import counted, for_shell, some
from ckptool.names.renaming import by_likeness, strip_wrappers, two_readings
from ckptool.names.wrappers import COMPANIONS
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Inert
from ckptool.tensors.reading import LazyTensor

_LISTED: Final = 12


def to_drop(checkpoint: Checkpoint, what: str) -> tuple[str, ...]:
    """Return the full paths of the entries that a path or a role names; raise MigrationRefused if there are none."""
    # A role in place of a path stands for all entries with that role.
    if what in ("ema", *NO_WEIGHTS):
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
        # The state of an optimizer may have no tensors yet, and then no path.
        keys = [{own for own, _ in nodes.mapping_pairs(one) or () if isinstance(own, str)} for one in items]
        are_states = [{"state", "param_groups"} <= own for own in keys]
        if items and all(f"{above}.{number}" in paths or is_one for number, is_one in enumerate(are_states)):
            return above
    return path


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


_EMA: Final = "ema"
_COUNTERS: Final = COMPANIONS | {"decay", "num_updates", "updates"}
"""Names of counters that averaging wrappers save."""
_INSIDE: Final = "module."
"""A prefix that some averaging wrappers add."""


def averaged_heads(state_dict: Mapping[str, object]) -> dict[str, str]:
    """Return the prefixes of averaged weights in a state dict, each with the prefix of the weights themselves."""
    found: dict[str, str] = {}
    for name in state_dict:
        if _EMA not in name.lower():
            continue
        components = name.split(".")[:-1]
        for place, component in enumerate(components):
            own = "_".join(word for word in component.split("_") if word.lower() != _EMA)
            if own and own != component:
                found.setdefault(".".join(components[: place + 1]), ".".join([*components[:place], own]))
                break
    heads = {f"{own}." for own in found.values()}
    there = {head for head in heads if any(name.startswith(head) for name in state_dict)} if heads else set()
    return {head: own for head, own in found.items() if f"{own}." in there}


def averaged(state_dict: StateDict) -> StateDict | None:
    """
    Return a state dict in which averages replace the weights, under their names and in their order; None if there are
    no averages.

    After its prefix, an average has the name of the weight, unchanged or without dots, as in Stable Diffusion.

    Raises:
        WeightsNotFound: It is not certain which weights the averages belong to.
    """
    heads = _heads_of_averages(state_dict)
    if not heads:
        return None
    tensors = dict(state_dict.items())
    for head, own in heads.items():
        tails = [name[len(head) + 1 :] for name in state_dict if name.startswith(f"{head}.")]
        dotless: dict[str, list[str]] = {}
        for name in state_dict:
            if name.startswith(f"{own}."):
                dotless.setdefault(name[len(own) + 1 :].replace(".", ""), []).append(name)
        left = [tail for tail in tails if tail not in _COUNTERS or tail in dotless]
        start = len(_INSIDE) if all(tail.startswith(_INSIDE) for tail in left) else 0
        for tail in left:
            meant, average = dotless.get(tail[start:].replace(".", ""), []), state_dict[f"{head}.{tail}"]
            meant = [name for name in meant if name == f"{own}.{tail[start:]}"] or meant
            place = state_dict[meant[0]] if len(meant) == 1 else None
            if place is None or place.shape != average.shape or tensors[meant[0]] is not place:
                raise WeightsNotFound(
                    f"it is not certain of which weights those under {head!r} are averages: {tail!r} has the name and "
                    f"the shape of {'several' if len(meant) > 1 else 'none'} under {own!r}",
                    kind="which-weights",
                    hint=f"Migrate it with `include='{head}.*'` to have them under their own names.",
                )
            tensors[meant[0]] = average
    return _without(state_dict, heads, _EMA, tensors)


def not_averaged_in(state_dict: StateDict) -> StateDict:
    """Return a state dict without averaged weights; raise WeightsNotFound if it is not certain which these are."""
    heads = _heads_of_averages(state_dict)
    return _without(state_dict, heads, state_dict.role, state_dict) if heads else state_dict


def _heads_of_averages(state_dict: StateDict) -> dict[str, str]:
    """
    Return ``averaged_heads`` of a state dict; empty for a whole model.

    Raises:
        WeightsNotFound: Some names begin with a word for averages, but it is not certain which weights they belong to.
    """
    heads = averaged_heads(state_dict) if state_dict.class_name is None else {}
    first = dict.fromkeys(name.partition(".")[0] for name in state_dict if "." in name) if not heads else {}
    called = [one for one in first if _EMA in one.lower().split("_")]
    if called and state_dict.class_name is None:
        raise WeightsNotFound(
            f"it is not certain if those under {called[0]!r} are averaged weights, nor of which",
            kind="which-weights",
            hint=f"Leave `weights=` out, or migrate it with `include='{called[0]}.*'` or `exclude='{called[0]}.*'`.",
        )
    return heads


def _without(state_dict: StateDict, heads: Collection[str], role: Role, tensors: Mapping[str, LazyTensor]) -> StateDict:
    """Return a state dict of ``tensors``, without entries that begin with ``heads``."""
    starts = tuple(f"{head}." for head in heads)
    pairs = nodes.mapping_pairs(state_dict.node)
    kept = [(key, value) for key, value in pairs or () if not (isinstance(key, str) and key.startswith(starts))]
    node = None if pairs is None else nodes.mapping_like(state_dict.node, kept)
    own = {name: one for name, one in tensors.items() if not name.startswith(starts)}
    return StateDict(state_dict.key, role, own, None, node, state_dict.own_keys)


def not_averaged(checkpoint: Checkpoint, averages: StateDict) -> str | None:
    """Return a text about tensors of the model without an average; None if all have one, or the model is not known."""
    model = checkpoint.weights
    if averages.role != "ema" or model is None or model.role != "model":
        return None
    if model.key == averages.key:  # averages in the same state dict: the model's tensors fill the gaps
        lacking = [name for name, tensor in model.items() if averages.get(name) is tensor]
        then = "and are taken as they are"
    else:
        there = {strip_wrappers([name])[0] for name in averages}
        lacking = [name for name in model if strip_wrappers([name])[0] not in {*there, None}]
        then = "and are not taken"
    many = len(averages) if model.key == averages.key else len(model)
    whole = f"{len(lacking):,} of {counted(many, 'tensor')} of the model"
    return f"{whole} have no average, {then}: {some(lacking)}" if lacking else None
