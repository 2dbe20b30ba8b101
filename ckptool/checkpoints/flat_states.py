"""
What stands at the root of a tree beside weights: states of an optimizer under flat names, and values of a training.

    decoder.final_norm.weight                        weights, which have no name of their own
    optimizer.state.exp_avg.decoder.final_norm.weight    Megatron-core; of several optimizers, chained_0.optimizer…
    state.norm.weight.exp_avg, param_groups.norm.weight.lr    torch, with flatten_optimizer_state_dict
    iteration, rng_state/shard_0_1                    what Megatron-core keeps in common.pt, and objects

See megatron/core/dist_checkpointing/optimizer.py, and torch/distributed/checkpoint/state_dict.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Final

from ckptool.checkpoints.contents import Contents, Group
from ckptool.checkpoints.roles import role_of
from ckptool.pickles import nodes

_OF_OPTIMIZER: Final = re.compile(
    r"((?:[^.]+\.){0,2}?(?:optim|optimizer)s?(?:_\d+)?)\.(?:state|param_state|param_groups|distributed)\."
)
_STATES: Final = "state."
_SETTINGS: Final = "param_groups."
_EXTRA_STATE: Final = re.compile(r"(?:.*\.)?_extra_state(?:/shard_[0-9._]+)?")
"""What modules put beside their tensors; Megatron-core says which part of how many an object is."""


def tell_apart(contents: Contents, beside: Collection[str | int] | None) -> None:
    """
    Leave the weights alone in the state dict at the root, if there are states of an optimizer, or values, among them.

    ``beside`` are the keys at the root that came from files of their own, where a folder is read; else None.
    """
    root = next((one for one in contents.groups if not one.key and one.kind in ("mapping", "loose")), None)
    keys = [key for key, _ in nodes.mapping_pairs(root.node) or []] if root is not None else []
    texts = [key for key in keys if isinstance(key, str)]
    if root is None or len(texts) < len(keys):
        return
    optimizers = _optimizers(texts)
    nested = beside is not None and any(one.key and role_of(one, contents) == "optimizer" for one in contents.groups)
    if not optimizers and not beside and not nested:
        return
    taken = {*(beside or ()), *(key for own in optimizers.values() for key in own)}
    for head, own in optimizers.items():
        group = Group(head, "optimizer", [name for name in root.names if name in own], node=root.node)
        group.own_keys = frozenset(own)
        contents.groups.append(group)
    root.names = [name for name in root.names if name not in taken]
    root.own_keys = frozenset(root.names).union(filter(_EXTRA_STATE.fullmatch, texts))
    if optimizers or (nested and any("." in name for name in root.names)):  # others were counted with them
        root.kind = "mapping"


def _optimizers(keys: Sequence[str]) -> dict[str, dict[str, None]]:
    """Return the flat keys of each optimizer, by how they begin."""
    found: dict[str, dict[str, None]] = {}
    trained = {_parameter(key, _SETTINGS) for key in keys if key.startswith(_SETTINGS)}
    for key in keys:
        match = _OF_OPTIMIZER.match(key)
        if match is not None:
            found.setdefault(match[1], {})[key] = None
        elif key.startswith(_SETTINGS) or (key.startswith(_STATES) and _parameter(key, _STATES) in trained):
            found.setdefault("state", {})[key] = None
    return found


def _parameter(key: str, head: str) -> str:
    """Return the parameter whose setting, or state, is under a key."""
    return key[len(head) :].rpartition(".")[0]
