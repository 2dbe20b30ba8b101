"""
Collect the weights of a tree: also numpy arrays if no tensors are weights, and without flat states of optimizers.

1. numpy arrays beside torch's weights are data: curves, random states, means. If there are no such weights, arrays are
   the weights, under the names and in the groups that tensors would have.
2. At the root, weights may be mixed with states of optimizers under flat names, and with values of the training. These
   are separated:

    decoder.final_norm.weight                        weights, which have no name of their own
    optimizer.state.exp_avg.decoder.final_norm.weight    Megatron-core; of several optimizers, chained_0.optimizer…
    state.norm.weight.exp_avg, param_groups.norm.weight.lr    torch, with flatten_optimizer_state_dict
    iteration, rng_state/shard_0_1                    values in Megatron-core's common.pt, and objects

See megatron/core/dist_checkpointing/optimizer.py, and torch/distributed/checkpoint/state_dict.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Final

from ckptool.cancellation import check_cancelled
from ckptool.checkpoints.contents import Contents, Group, collect
from ckptool.checkpoints.modules import ModuleGraph
from ckptool.checkpoints.roles import role_of
from ckptool.limits import Limits
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Inert
from ckptool.tensors.rebuild import Rebuilder

_OF_OPTIMIZER: Final = re.compile(
    r"((?:[^.]+\.){0,2}?(?:optim|optimizer)s?(?:_\d+)?)\.(?:state|param_state|param_groups|distributed)\."
)
_STATES: Final = "state."
_SETTINGS: Final = "param_groups."
_EXTRA_STATE: Final = re.compile(r"(?:.*\.)?_extra_state(?:/shard_[0-9._]+)?")
"""Extra state of modules; Megatron-core adds the number of the part, and of how many."""


def collect_weights(
    root: Inert,
    rebuilder: Rebuilder,
    limits: Limits,
    graph: ModuleGraph | None = None,
    beside: Collection[str | int] | None = None,
) -> Contents:
    """
    Return the contents of the tree below ``root``, with arrays among the tensors if nothing else in it is weights.

    ``beside`` has the keys at the root that came from files of their own, if a folder is read, else it is None. Raises
    the errors of ``collect``.
    """
    contents = _with_arrays(root, rebuilder, limits, graph)
    if beside is not None or len(contents.groups) > 1 or len(contents.extras) > 1:  # else it is a state dict
        tell_apart(contents, beside)
    return contents


def _with_arrays(root: Inert, rebuilder: Rebuilder, limits: Limits, graph: ModuleGraph | None) -> Contents:
    contents = collect(root, rebuilder, limits, graph)
    if contents.walks or any(_weights(contents)) or not _has_arrays(contents, limits):
        return contents
    rebuilder.take_arrays()
    with_arrays = collect(root, rebuilder, limits, graph)
    if not contents.tensors or any(_has_arrays_alone(group, with_arrays) for group in _weights(with_arrays)):
        return with_arrays
    rebuilder.take_arrays(take=False)
    return contents


def _weights(contents: Contents) -> Iterator[Group]:
    """Yield the groups that are weights, by their place and their names."""
    return (group for group in contents.groups if group.names and role_of(group, contents) in ("model", "ema"))


def _has_arrays_alone(group: Group, contents: Contents) -> bool:
    """Return whether a mapping has no tensor of torch at any depth."""
    return all(info.is_array for name, info in contents.tensors.items() if name.startswith(group.head))


def _has_arrays(contents: Contents, limits: Limits) -> bool:
    """Return whether there is an array anywhere in the subtrees without tensors."""
    todo = [node for _, node in contents.extras]
    if not todo:
        return False
    from ckptool.pickles.numpy_values import is_array  # many files have nothing but tensors

    seen: set[int] = set()
    while todo:
        check_cancelled(limits.cancellation)
        node = todo.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if is_array(node):
            return True
        todo.extend(
            child
            for child in nodes.held(node)
            if nodes.is_container(child) and (is_array(child) or not nodes.is_small(child))
        )
    return False


def tell_apart(contents: Contents, beside: Collection[str | int] | None) -> None:
    """
    Remove states of optimizers, and values of the training, from the state dict at the root, which keeps the weights.

    ``beside`` is as in ``collect_weights``. The states of each optimizer become a group of their own.
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
    if optimizers or (nested and any("." in name for name in root.names)):  # the old kind was for all keys
        root.kind = "mapping"


def _optimizers(keys: Sequence[str]) -> dict[str, dict[str, None]]:
    """Return the flat keys of each optimizer, by their prefix."""
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
    """Return the name of the parameter in a flat key of its state or its settings."""
    return key[len(head) :].rpartition(".")[0]
