"""The state of an optimizer in a checkpoint, checked against a given optimizer and made loadable."""

from __future__ import annotations

from typing import Any, Final

import torch

from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.training import ELEMENTWISE, by_number, states
from ckptool.errors import KeyMismatch, ShapeMismatch, UnsupportedFeature
from ckptool.loading.extra_state import values_with_tensors
from ckptool.loading.memory.assembly import Assembly
from ckptool.loading.memory.filling import Mmap
from ckptool.loading.memory.placement import CPU, placement
from ckptool.loading.memory.threads import in_own_thread, note_losses
from ckptool.messages import some, zero_now
from ckptool.names.matching import ANY_SHAPE, match
from ckptool.pickles import nodes
from ckptool.tensors.dtypes import spelled
from ckptool.torch_ops.values import narrows

_DEFAULTED: Final = frozenset({"amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused", "nesterov"})
"""Settings of a group that torch adds itself to a state of an older release."""
_NEEDED: Final = {
    **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam"), ("step", "exp_avg", "exp_avg_sq")),
    "Adadelta": ("step", "square_avg", "acc_delta"),
    "Adagrad": ("step", "sum"),
    "Adamax": ("step", "exp_avg", "exp_inf"),
    "ASGD": ("step", "eta", "mu", "ax"),
    "RMSprop": ("step", "square_avg"),
    "Rprop": ("step", "prev", "step_size"),
}
"""Entries that torch's own optimizers read from the state of a parameter, by class."""
_BY_SETTING: Final = {"amsgrad": "max_exp_avg_sq", "momentum": "momentum_buffer", "centered": "grad_avg"}
"""Further entries that they read if a group has a setting, by setting."""


def read_optimizer(
    checkpoint: Checkpoint, model: torch.nn.Module, optimizer: torch.optim.Optimizer, mmap: Mmap
) -> dict[str, Any]:
    """
    Return the state that a checkpoint has for the optimizer of a model; ``mmap`` says whether its tensors may be views
    of the file.

    Raises:
        KeyMismatch: The file has none, or several, or one for other groups of parameters; or it is another model's.
        ShapeMismatch: It is the state of parameters of other shapes.
        UnsupportedFeature: It holds values that only code could make.
    """
    found = [
        (path, node if nodes.mapping_pairs(node) else by_number(pairs))  # an object: the content of its state_dict()
        for path, node, pairs, role in states(checkpoint)
        if role == "optimizer"
    ]
    if len(found) != 1:
        listed = f": {', '.join(path or '(root)' for path, _ in found)}" if found else ""
        raise KeyMismatch(
            f"{len(found)} optimizer states in the file{listed}",
            kind="which-optimizer",
            hint="Load the weights alone, without optimizer=." if not found else "Load the state by hand.",
        )
    assembly = Assembly(placement(CPU), mmap=mmap, cancellation=checkpoint.source.cancellation)
    state = values_with_tensors({"optimizer": found[0][1]}, checkpoint.rebuilder, assembly)["optimizer"]
    if isinstance(state, UnsupportedFeature):
        raise state
    _check(model, optimizer, state)
    own = {id(one) for one in model.parameters()}
    if not any(id(one) in own for group in optimizer.param_groups for one in group["params"]):
        what = "the optimizer has no parameter of the model"
        raise KeyMismatch(what, kind="which-optimizer", hint="Build it over the parameters of this model.")
    return dict(state)


def _check(model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Check a state, also where torch does not: names, shapes, values; put its groups into the optimizer's order."""
    groups, mine = state["param_groups"], optimizer.param_groups
    is_plain = isinstance(groups, list) and isinstance(state["state"], dict)
    if not is_plain or not all(_is_group(group) for group in groups):
        raise KeyMismatch("the optimizer state in the file is not one that torch writes", kind="which-optimizer")
    groups = state["param_groups"] = _by_name(model, mine, groups)
    sizes, wanted = [len(group["params"]) for group in groups], [len(group["params"]) for group in mine]
    if sizes != wanted:
        raise KeyMismatch(
            f"the optimizer has groups of {wanted} parameters, the file's of {sizes}",
            hint="Build the optimizer over the same parameters as in training.",
        )
    smaller = []
    for saved, group in zip(groups, mine, strict=True):
        lost, strange = group.keys() - saved.keys() - _DEFAULTED, saved.keys() - group.keys()
        if lost and strange:
            raise KeyMismatch(
                f"the state is of another optimizer: it has {', '.join(sorted(map(str, strange)))}, "
                f"and not {', '.join(sorted(lost))}",
                kind="which-optimizer",
                hint=f"Build the optimizer of the training, or load without optimizer={type(optimizer).__name__}.",
            )
        held = ((number, state["state"].get(number)) for number in saved["params"])
        entries = {number: entry for number, entry in held if isinstance(entry, dict) and entry}
        _refuse_lacking(optimizer, saved, entries)
        for number, parameter in zip(saved["params"], group["params"], strict=True):
            if parameter.is_meta:
                raise KeyMismatch(
                    "the optimizer holds parameters on the meta device, which loading replaces",
                    kind="meta-optimizer",
                    hint="Load the weights first, build the optimizer, then load its state.",
                )
            for name, value in entries.get(number, {}).items():
                if not isinstance(value, torch.Tensor):
                    continue
                what = f"{name} of parameter {number}"
                if value.dim() and (name in ELEMENTWISE or value.dim() == parameter.dim()):
                    _check_shape(name, what, value, parameter)
                if name != "step" and parameter.is_floating_point() and narrows(value.dtype, parameter.dtype):
                    smaller.append((what, value, parameter.dtype))
    for dtype, names in in_own_thread(lambda: note_losses(smaller, {}, "optimizer state")).items():
        fact = zero_now(names, spelled(dtype))
        raise UnsupportedFeature(fact, kind="underflow", hint="Build the model in the type that the state has.")


def _by_name(model: torch.nn.Module, mine: list[dict[str, Any]], groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """
    Return the file's groups in the optimizer's order, if the file names its parameters; else unchanged, because
    positions count then, as in torch. Names may differ by wrappers and prefixes, as those of weights may.

    torch records ``param_names``, but does not use them. If the optimizer has none, and those of the file are not
    names of the model, positions count, too.
    """
    is_named = all(isinstance(one, str) for group in groups for one in group["params"])
    listed: list[Any] = [group["params"] if is_named else group.get("param_names") for group in groups]
    counts = [len(group["params"]) for group in groups]
    if [len(names) if isinstance(names, list) else None for names in listed] != counts:
        return groups
    if not all(isinstance(name, str) for names in listed for name in names):
        return groups
    numbers = {
        name: number
        for names, group in zip(listed, groups, strict=True)
        for name, number in zip(names, group["params"], strict=True)
    }
    names_of: dict[int, list[str]] = {}
    named = [pair for group in mine for pair in zip(group.get("param_names", ()), group["params"], strict=False)]
    for name, parameter in (*named, *model.named_parameters(remove_duplicate=False)):
        names_of.setdefault(id(parameter), []).append(name)
    own = [[names_of.get(id(one), [""]) for one in group["params"]] for group in mine]
    chosen = [[next((name for name in names if name in numbers), names[0]) for names in group] for group in own]
    wanted = {name for group in chosen for name in group}
    pairs = match(dict.fromkeys(sorted(wanted), ANY_SHAPE), dict.fromkeys(numbers, ANY_SHAPE)).pairs
    if len(pairs) == len(wanted) == len(numbers):
        found = []
        for names in chosen:
            olds = [pairs[name] for name in names]
            group = next((one for one, there in zip(groups, listed, strict=True) if set(there) == set(olds)), None)
            if group is None:
                raise KeyMismatch(
                    f"the optimizer has {some(names)} in one group, and the file in several, or with others",
                    hint="Build the optimizer with the groups of the training.",
                )
            renamed = {"param_names": names} if "param_names" in group else {}
            found.append({**group, "params": [numbers[old] for old in olds], **renamed})
        return found
    if not is_named and not named:
        return groups
    lacking, left = sorted(wanted - pairs.keys()), [name for name in numbers if name not in pairs.values()]
    error = KeyMismatch(
        f"the optimizer state names other parameters: missing {some(lacking)}; unexpected {some(left)}",
        hint="Build the optimizer over the parameters that it had in training.",
    )
    error.missing, error.unexpected = tuple(lacking), tuple(left)
    raise error


def _refuse_lacking(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], entries: dict[Any, dict[Any, Any]]
) -> None:
    """Raise KeyMismatch if the state of a parameter lacks an entry that the optimizer, or others of its group, need."""
    kind = type(optimizer)
    needed = set(_NEEDED.get(kind.__name__, ()) if kind.__module__.startswith("torch.optim.") else ())
    needed |= {entry for setting, entry in _BY_SETTING.items() if needed and group.get(setting)}
    # Factored and quantised states have other entries: only a subset of the largest state is judged by it.
    most: set[Any] = max(map(set, entries.values()), key=len, default=set())
    for number, entry in entries.items():
        have = set(entry)
        lost = (needed - have) | ((most - have) & {"step", *ELEMENTWISE} if have < most else set())
        if lost:
            raise KeyMismatch(
                f"the state of parameter {number} has no {', '.join(sorted(lost))}",
                kind="which-optimizer",
                hint=f"Load the weights alone, or build the optimizer of the training: this is {kind.__name__}.",
            )


def _is_group(group: Any) -> bool:
    numbers = group.get("params") if isinstance(group, dict) else None
    return isinstance(numbers, list) and all(isinstance(number, int | str) for number in numbers)


def _check_shape(name: str, what: str, value: torch.Tensor, parameter: torch.Tensor) -> None:
    # Factored states (Adafactor) have fewer elements; none has more.
    is_factored = value.numel() < parameter.numel() and name not in ELEMENTWISE
    if value.shape != parameter.shape and not is_factored:
        raise ShapeMismatch(
            f"{what} is {list(value.shape)}, the parameter {list(parameter.shape)}",
            hint="Build the optimizer over the parameters in the order of training.",
        )
