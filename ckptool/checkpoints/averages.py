"""Averaged weights (EMA) in the same state dict as the weights: find them by name, take them or leave them out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from ckptool.checkpoints.checkpoint import Checkpoint, StateDict
from ckptool.checkpoints.roles import Role
from ckptool.errors import WeightsNotFound
from ckptool.messages import counted, some
from ckptool.names.renaming import strip_wrappers
from ckptool.names.wrappers import COMPANIONS
from ckptool.pickles import nodes
from ckptool.tensors.reading import LazyTensor

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
            words = component.split("_")
            own = "_".join(word for word in words if word.lower() != _EMA)
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
