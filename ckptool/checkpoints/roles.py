"""
Which dicts in a checkpoint are state dicts: weights, averages or an optimizer's; and which is the model.

``collect_weights`` also decides which tensors of a tree are weights:

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
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final, Literal, TypeAlias

from ckptool.cancellation import check_cancelled
from ckptool.checkpoints.contents import Contents, Group, collect
from ckptool.checkpoints.modules import ModuleGraph
from ckptool.limits import Limits
from ckptool.names.wrappers import COMPANIONS, beside_wrapped, is_averaged_pair, may_be_averaged_pair
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Inert
from ckptool.tensors.rebuild import Rebuilder
from ckptool.tensors.tensor import TensorInfo

Role: TypeAlias = Literal["model", "ema", "optimizer", "scheduler", "rng", "other"]
NO_WEIGHTS: Final = frozenset[Role]({"optimizer", "scheduler", "rng"})
"""Roles that never count as weights, even on request."""

WEIGHT_KEYS = (
    *("state_dict", "model_state_dict", "model", "net", "network", "module", "model_state", "params", "weights"),
)
"""Keys under which trainers store the weights, best known first."""

_EMA_WORDS = {"ema", "averaged", "average", "avg", "shadow", "swa", "g_running"}
_OPTIMIZER_WORDS = {"optim", "optimizer", "optimizers", "opt"}
_SCHEDULER_WORDS = {"scheduler", "schedulers", "sched"}
_OTHER_WORDS = {
    "_extra_state", "callbacks", "loops", "loss", "losses", "metrics", "normalizer", "scaler", "rng", "rng_state"
}  # fmt: skip
_OF_TRAINING: Final = re.compile(r".*exp_avg.*|exp_inf|momentum(_buffers?)?|grads?|gradients?|square_avg|acc_delta")
"""Matches names for a parameter's gradient, and for what optimizers keep of it."""
_BESIDE_WEIGHTS: Final = {"activations", "delta", "deltas", "fisher", "masks", "scales", "update", "updates"}
"""Keys at the top of a file for measurements of each parameter or layer, or for changes to be added."""
_RNG_WORDS = {"rng", "rng_state", "rng_states", "random", "seed", "torch", "cuda", "cpu", "xpu", "mps", "generator"}
_CPU_GENERATOR = (5056,)
_GENERATORS = {_CPU_GENERATOR, (16,), (816,)}
"""Shapes of the state of a ``torch.Generator``: on the CPU; on CUDA; on CUDA before PyTorch 1.7."""
_MOST_GENERATORS = 1024

_RANDOM_STATE = {"key", "counter", "state", "buffer"}
"""Names of arrays in the state of a numpy generator."""

_COMPUTED_WITH: Final = "module"
_DATA_WORDS = {
    "data", "dataset", "examples", "feature", "features", "image", "images", "img", "imgs", "input", "inputs", "label",
    "labels", "sample", "samples", "target", "targets", "test", "train", "val", "valid", "x", "y"
}  # fmt: skip
_PLAIN_WEIGHTS = r"(w|b|weights?|bias(es)?|kernel|gamma|beta)_?\d*"
"""Matches names of numpy arrays that are weights, if layers have no names."""

_SIDE_BY_SIDE = (
    *({"generator", "gen", "netg", "g"}, {"discriminator", "disc", "dis", "netd", "d"}),
    *({one} for one in ("actor", "critic", "encoder", "decoder", "student", "teacher")),
)
"""Words for models that were trained together, of which none is the main one."""

_TRAINING_WORDS = _OPTIMIZER_WORDS | _SCHEDULER_WORDS | _OTHER_WORDS
_SETTINGS_WORDS = {
    "args", "arguments", "cfg", "config", "configuration", "hparams", "hyper_parameters", "hyperparameters", "kwargs",
    "settings"
}  # fmt: skip
"""Names of settings of a model or its training, or the last words of such names."""
_BESIDE_WORDS = _DATA_WORDS | {
    "acc", "accuracy", "count", "counts", "criterion", "epoch", "epochs", "error", "history", "idx", "index",
    "indices", "iter", "iteration", "iterations", "log", "logs", "lr", "max", "mean", "means", "metric", "min",
    "result", "results", "score", "scores", "split", "splits", "statistics", "stats", "std", "stds", "step", "steps",
    "var", "variance"
}  # fmt: skip
"""Last words of counters, scores, statistics and examples."""


def role_of(group: Group, contents: Contents) -> Role:
    """Return the role of a group of tensors, by its key, its names and its shapes."""
    words = _words(group.key)
    if group.key.endswith((".weight", ".bias")):  # parts of one parameter, such as codes and their scale
        return "other"
    if group.kind == "optimizer" or words & _OPTIMIZER_WORDS:
        return "optimizer"
    if is_of_training(group.key, group.names, group.class_name):
        return "other"
    if _is_rng(group, contents) or _is_random_state(group, contents):
        return "rng"
    if words & _EMA_WORDS or _is_averaged(group):
        return "ema"
    if words & _SCHEDULER_WORDS:
        return "scheduler"
    if group.kind == "loose" or words & _OTHER_WORDS or _is_data_set(group, contents) or _is_rounded(group, contents):
        return "other"
    if group.kind in ("module", "packed"):
        return "model"
    # A mapping of single numbers (scores of the best epochs, means and deviations) is not weights.
    if group.key and all(not contents.tensors[name].shape for name in group.names):
        return "other"
    return "model"


def is_of_training(key: str, names: Iterable[str], class_name: str | None = None) -> bool:
    """
    Return whether tensors under ``key`` are named like weights but are gradients, an optimizer's state or the like.

    ``names`` are full names. The state of an optimizer may be flat, as ``a.weight.exp_avg``; a model has other names,
    too.
    """
    if class_name is not None:
        return False
    components = key.lower().split(".")
    if components[0] in _BESIDE_WEIGHTS or any(map(_OF_TRAINING.fullmatch, components)):
        return True
    found = False
    for name in names:
        last = name.rpartition(".")[2]
        if not (is_one := bool(_OF_TRAINING.fullmatch(last.lower()))) and last != "step":
            return False
        found |= is_one
    return found


def _is_rounded(group: Group, contents: Contents) -> bool:
    """Return whether these are rounded weights that DeepSpeed computed with; the exact ones have the key ``""``."""
    if group.key.partition(".")[0] != _COMPUTED_WITH:
        return False
    kept = next((one for one in contents.groups if not one.key and one.names), None)
    pairs = nodes.mapping_pairs(kept.node) if kept is not None else None
    return bool(pairs) and all(key != _COMPUTED_WITH for key, _ in pairs or ())


def _is_random_state(group: Group, contents: Contents) -> bool:
    """Return whether a group is the state of a numpy generator: ``{"key": …, "pos": …}`` under ``state``."""
    if group.key.rpartition(".")[2] != "state":
        return False
    names = {name.rpartition(".")[2] for name in group.names}
    return names <= _RANDOM_STATE and all(contents.tensors[name].is_array for name in group.names)


def _is_data_set(group: Group, contents: Contents) -> bool:
    """Return whether numpy arrays are examples for a model, not weights: ``{"data": …, "labels": …}``."""
    is_named = group.key.rpartition(".")[2] in WEIGHT_KEYS
    if is_named or not all(contents.tensors[name].is_array for name in group.names):
        return False
    start = len(group.head)
    names = [name[start:].lower() for name in group.names]
    if any("." in name or re.fullmatch(_PLAIN_WEIGHTS, name) for name in names):
        return False
    return any(word in _DATA_WORDS for name in names for word in name.split("_"))


def _is_averaged(group: Group) -> bool:
    """Return whether a group has averaged weights by its names, with or without those that are not averaged."""
    start = len(group.head)
    few = [name[start:] for name in (*group.names[:1], *group.names[-1:])]  # counters are first or last
    if not (all(map(may_be_averaged_pair, few)) or COMPANIONS.intersection(few)):
        return False
    names = [name[start:] for name in group.names]
    return is_averaged_pair(names) or bool(beside_wrapped(names))


def _is_rng(group: Group, contents: Contents) -> bool:
    """Return whether all tensors of a group are states of random number generators, by their shapes and names."""
    if len(group.names) > _MOST_GENERATORS:
        return False
    infos = [contents.tensors[name] for name in group.names]
    if not all(map(is_generator, infos)):
        return False
    words = {word for name in group.names for word in _words(name)}
    return bool(infos) and (any(info.shape == _CPU_GENERATOR for info in infos) or not words.isdisjoint(_RNG_WORDS))


def _words(key: str) -> set[str]:
    return {word for component in key.lower().split(".") for word in (component, *component.split("_"))}


def choose_weights(candidates: Sequence[tuple[str, Role]]) -> int | None:
    """
    Return the index of the model's weights among ``(key, role)``, or None if that is not clear.

    They are the only candidate, or else the one under the best known key; never the largest one, because the others may
    be parts of the model. Averaged weights are chosen if there are no others.
    """
    for role in ("model", "ema"):
        found = [index for index, candidate in enumerate(candidates) if candidate[1] == role]
        if not found:
            continue
        if len(found) == 1:
            own = _parts(candidates[found[0]][0])  # a discriminator whose generator is only averaged is not the model
            is_one = bool(own) and any(other == "ema" and _parts(key) - own for key, other in candidates)
            return found[0] if role == "ema" or not is_one else None
        for key in WEIGHT_KEYS:
            named = [index for index in found if candidates[index][0].rpartition(".")[2] == key]
            if len(named) == 1:
                return named[0]
        return None
    return None


def is_explained(path: str, names: Sequence[str] = ()) -> bool:
    """
    Return whether something beside the weights is shown by its name to be settings, scores, statistics or examples.

    ``path`` is of a tensor, or of a mapping with ``names``. A name like those of a layer's parameters (``weight``)
    prevails over words for examples: a module may be called ``images``.
    """
    components = path.lower().split(".")
    # The last word of each component, without numbers: "error" of "best_mae_error".
    heads = {one.rstrip("_0123456789").rpartition("_")[2] for one in components}.union(components)
    if is_of_training(path, names) or heads & _SETTINGS_WORDS or _words(path) & _TRAINING_WORDS:
        return True
    lasts = [name.lower().rpartition(".")[2] for name in names or (path,)]
    if any(re.fullmatch(_PLAIN_WEIGHTS, last) for last in lasts):
        return False
    return not heads.isdisjoint(_BESIDE_WORDS) or (bool(names) and all(map(is_explained, names)))


def is_generator(info: TensorInfo) -> bool:
    """Return whether a tensor can be the state of a ``torch.Generator``, by its dtype and shape."""
    return info.dtype.name == "uint8" and info.shape in _GENERATORS


def _parts(key: str) -> set[int]:
    """Return the indices in ``_SIDE_BY_SIDE`` that a key names."""
    words = _words(key)
    return {place for place, names in enumerate(_SIDE_BY_SIDE) if words & names}


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
    contents = collect(root, rebuilder, limits, graph)
    if not contents.walks and not any(_weights(contents)) and _has_arrays(contents, limits):
        rebuilder.take_arrays()
        with_arrays = collect(root, rebuilder, limits, graph)
        infos = with_arrays.tensors.items()
        # Arrays are the weights only of a mapping that has no tensor of torch at any depth.
        alone = (
            all(info.is_array for name, info in infos if name.startswith(group.head)) for group in _weights(with_arrays)
        )
        if not contents.tensors or any(alone):
            contents = with_arrays
        else:
            rebuilder.take_arrays(take=False)
    if beside is not None or len(contents.groups) > 1 or len(contents.extras) > 1:  # else it is a state dict
        tell_apart(contents, beside)
    return contents


def _weights(contents: Contents) -> Iterator[Group]:
    """Yield the groups that are weights, by their place and their names."""
    return (group for group in contents.groups if group.names and role_of(group, contents) in ("model", "ema"))


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
    # The name of a parameter is between the head of a flat key and its last component.
    trained = {key[len(_SETTINGS) :].rpartition(".")[0] for key in keys if key.startswith(_SETTINGS)}
    for key in keys:
        match = _OF_OPTIMIZER.match(key)
        if match is not None:
            found.setdefault(match[1], {})[key] = None
        elif key.startswith(_SETTINGS) or (
            key.startswith(_STATES) and key[len(_STATES) :].rpartition(".")[0] in trained
        ):
            found.setdefault("state", {})[key] = None
    return found
