"""Which of the state dicts inside a checkpoint are weights, averages, or an optimizer's, and which one is the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from ckptool.checkpoints.contents import Contents, Group

Role: TypeAlias = Literal["model", "ema", "optimizer", "scheduler", "other"]

WEIGHT_KEYS = (
    "state_dict",
    "model_state_dict",
    "model",
    "net",
    "network",
    "module",
    "model_state",
    "params",
    "weights",
)
"""Keys under which trainers put the weights, best known first."""

_EMA_WORDS = {"ema", "averaged", "shadow", "swa"}
_OPTIMIZER_WORDS = {"optim", "optimizer", "optimizers", "opt"}
_SCHEDULER_WORDS = {"scheduler", "schedulers", "sched"}
_OTHER_WORDS = {"_extra_state", "callbacks", "loops", "metrics", "normalizer", "scaler", "rng", "rng_state"}

# fmt: off
_SIDE_BY_SIDE = {
    "generator", "discriminator", "gen", "disc", "dis", "netg", "netd", "g", "d", "actor", "critic",
    "encoder", "decoder", "student", "teacher",
}
# fmt: on
"""Words for one of several models that were trained together: the larger is not the one that is meant."""

_CLEAR_MAJORITY = 0.9


def role_of(group: Group, contents: Contents) -> Role:
    """Return what a group of tensors is for, going by where it stands and what it looks like."""
    words = _words(group.key)
    if group.kind == "optimizer" or words & _OPTIMIZER_WORDS:
        return "optimizer"
    if words & _EMA_WORDS:
        return "ema"
    if words & _SCHEDULER_WORDS:
        return "scheduler"
    if group.kind == "loose" or words & _OTHER_WORDS:
        return "other"
    if group.kind in ("module", "packed"):
        return "model"
    # A table of single numbers (scores of the best epochs, means and deviations) is nobody's weights.
    if group.key and all(not contents.tensors[name].shape for name in group.names):
        return "other"
    return "model"


def _words(key: str) -> set[str]:
    return {word for component in key.lower().split(".") for word in (component, *component.split("_"))}


def choose_weights(candidates: Sequence[tuple[str, Role]], numel: Callable[[int], int]) -> int | None:
    """
    Return the index of the model's weights among ``(key, role)``, or None if no one stands out.

    ``numel`` gives the elements of the candidate with an index; it is asked only where nothing else tells.

    The only one there is, else the one under the best known key, else the one with nine tenths of all elements, but
    not where one is called a generator, say: then several are somebody's. Averaged weights stand in where there are
    no others.
    """
    for role in ("model", "ema"):
        found = [index for index, candidate in enumerate(candidates) if candidate[1] == role]
        if not found:
            continue
        if len(found) == 1:
            return found[0]
        for key in WEIGHT_KEYS:
            named = [index for index in found if candidates[index][0].rpartition(".")[2] == key]
            if len(named) == 1:
                return named[0]
        if any(_words(candidates[index][0]) & _SIDE_BY_SIDE for index in found):
            return None
        sizes = {index: numel(index) for index in found}
        largest = max(found, key=lambda index: sizes[index])
        return largest if sizes[largest] > _CLEAR_MAJORITY * sum(sizes.values()) else None
    return None
