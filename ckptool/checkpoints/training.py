"""
The training states in a file: optimizers, schedulers, scalers and random number generators.

They are recognised by their keys, as objects and as state dicts. An object names its class. A state dict is named by
the class of torch that has the same settings and values.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Final, Literal, NamedTuple, TypeAlias

from ckptool.checkpoints.checkpoint import Checkpoint, once
from ckptool.checkpoints.contents import groups_of, parameter_numbers
from ckptool.errors import Failure
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Call, Dict, Inert, Pairs
from ckptool.pickles.values import scalar_of
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import identity

TrainingRole: TypeAlias = Literal["optimizer", "scheduler", "scaler", "rng"]

_DEEPEST: Final = 3
_MOST_VISITED: Final = 10_000
_MOST_ENTRIES: Final = 1 << 22
"""Limit of entries of all optimizers together, shared ones each time: one of a large model has ten thousands."""
_MOST_STEPS: Final = 16
"""How many parameters' states are searched for the number of steps, of which the largest counts."""


class ParameterGroup(NamedTuple):
    """A parameter group of an optimizer, or of its scheduler."""

    parameters: int | None
    lr: float | None


class TrainingState(NamedTuple):
    """The state of one optimizer, scheduler or scaler, or of random number generators."""

    key: str
    """Its path; empty for the root."""
    role: TrainingRole
    kind: str | None = None
    """Name of the class: ``Adam``. For a state dict, the class of torch with the same settings and values."""
    class_name: str | None = None
    """The full name of the class, if the file contains the object."""
    steps: int | None = None
    """How many steps an optimizer, or its scheduler, has made."""
    groups: tuple[ParameterGroup, ...] = ()
    node: Inert = None


_OPTIMIZERS: Final = (
    ("AdamW", "betas eps amsgrad decoupled_weight_decay", "step exp_avg exp_avg_sq max_exp_avg_sq"),
    ("Adam or AdamW", "betas eps amsgrad", "step exp_avg exp_avg_sq max_exp_avg_sq"),
    ("NAdam", "betas eps momentum_decay", "step exp_avg exp_avg_sq mu_product"),
    ("RAdam", "betas eps decoupled_weight_decay", "step exp_avg exp_avg_sq"),
    ("Adamax", "betas eps foreach", "step exp_avg exp_inf"),
    ("Adadelta", "rho eps", "step square_avg acc_delta"),
    ("Adagrad", "lr_decay eps initial_accumulator_value", "step sum"),
    ("Adafactor", "beta2_decay d eps", "step row_var col_var variance"),
    ("ASGD", "lambd alpha t0", "step eta mu ax"),
    ("LBFGS", "max_iter max_eval tolerance_grad tolerance_change history_size line_search_fn",
     "d t al ro n_iter func_evals H_diag old_dirs old_stps prev_flat_grad prev_loss"),
    ("Muon", "momentum nesterov ns_coefficients eps ns_steps adjust_lr_fn", "momentum_buffer"),
    ("RMSprop", "alpha centered momentum eps", "step square_avg momentum_buffer grad_avg"),
    ("Rprop", "etas step_sizes", "step prev step_size"),
    ("SGD", "momentum dampening nesterov", "momentum_buffer"),
)  # fmt: skip
"""Classes of optimizers: settings that their groups must have, and the only values that they may keep."""
ELEMENTWISE: Final = frozenset({
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "acc_delta", "sum",
    "exp_inf", "prev", "step_size",
})  # fmt: skip
"""Values of torch's own optimizers that have the shape of the parameter."""
BUFFERS: Final = ("running_mean", "running_var", "num_batches_tracked")
"""Last components of entries for which optimizers have no state."""
_COMMON: Final = frozenset({"params", "param_names", "lr", "initial_lr", "weight_decay", "maximize"})
"""Settings that most classes have."""
_SCHEDULERS: Final = {
    "StepLR": {"step_size", "gamma"},
    "MultiStepLR": {"milestones", "gamma"},
    "ConstantLR": {"factor", "total_iters"},
    "LinearLR": {"start_factor", "end_factor"},
    "PolynomialLR": {"total_iters", "power"},
    "CosineAnnealingLR": {"T_max", "eta_min"},
    "CosineAnnealingWarmRestarts": {"T_0", "T_mult"},
    "CyclicLR": {"max_lrs", "step_ratio"},
    "OneCycleLR": {"total_steps", "_schedule_phases"},
    "ReduceLROnPlateau": {"patience", "num_bad_epochs"},
    "SequentialLR": {"_schedulers", "_milestones"},
    "ChainedScheduler": {"_schedulers"},
    "LambdaLR or MultiplicativeLR": {"lr_lambdas"},
    "ExponentialLR": {"gamma"},
}
"""Keys of torch's schedulers; the first class whose keys all exist counts."""
_UNPACKED: Final = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i"}


@once
def training_states(checkpoint: Checkpoint) -> list[TrainingState]:
    """Return the training states of a checkpoint, in file order. Numbers that are tensors are read."""
    found = [_described(checkpoint, path, node, pairs, role) for path, node, pairs, role in states(checkpoint)]
    found += [TrainingState(one.key, "rng", node=one.node) for one in checkpoint.state_dicts if one.role == "rng"]
    return found


def parameter_names(checkpoint: Checkpoint) -> dict[str, str]:
    """
    Return the parameter's name by the name of each tensor of an optimizer's state, if the file has it.

    An optimizer saved as an object refers to its parameters; a state dict may have their names (``param_names``).
    """
    models = [one for one in checkpoint.state_dicts if one.role == "model"]
    tensors: dict[object, str] = {}
    for tensor in (tensor for one in models for tensor in one.values()):
        tensors.setdefault(identity(tensor.info), tensor.name)
    head = checkpoint.weights.head if checkpoint.weights is not None else ""
    of_optimizer = {one.key: one for one in checkpoint.state_dicts if one.role == "optimizer"}
    found: dict[str, str] = {}
    left = _MOST_ENTRIES
    for path, _, pairs, role in states(checkpoint):
        kept = of_optimizer.get(path)
        if role != "optimizer" or kept is None:
            continue
        groups = nodes.lookup(pairs, "param_groups")
        left -= parameter_count(groups)
        named = names_by_number(checkpoint, groups, tensors) if left >= 0 else {}
        for name, tensor in kept.items():
            parameter = named.get(name.removeprefix("state.").partition(".")[0])
            if parameter is not None and name.startswith("state."):
                found[tensor.name] = f"{head}{parameter}" if f"{head}{parameter}" in checkpoint.tensors else parameter
    return found


def by_number(optimizer: Pairs) -> Dict:
    """Return the state_dict() of an optimizer object: its state and its groups, by the numbers of parameters."""
    groups, state = (nodes.lookup(optimizer, key) for key in ("param_groups", "state"))
    numbers = parameter_numbers(groups)
    kept = [(numbers.get(id(key), key), value) for key, value in nodes.mapping_pairs(state) or []]
    plain = []
    for pairs, parameters in groups_of(groups):
        listed = [numbers.get(id(one), one) for one in parameters]
        plain.append(Dict([(key, listed if key == "params" and listed else value) for key, value in pairs]))
    return Dict([("state", Dict(kept)), ("param_groups", plain)])


def parameter_count(groups: Inert) -> int:
    """Return the number of parameters in all groups of an optimizer."""
    return sum(len(parameters) for _, parameters in groups_of(groups))


def names_in(optimizer: Pairs) -> Iterator[str]:
    """Yield the names of parameters in an optimizer's state and groups, if it has names."""
    yield from (key for key, _ in nodes.mapping_pairs(nodes.lookup(optimizer, "state")) or [] if isinstance(key, str))
    for group, parameters in groups_of(nodes.lookup(optimizer, "param_groups")):
        names = nodes.lookup(group, "param_names")
        yield from (one for one in (*parameters, *(names if isinstance(names, list) else ())) if isinstance(one, str))


def names_by_number(checkpoint: Checkpoint, groups: Inert, tensors: Mapping[object, str]) -> dict[str, str]:
    """Return the known names of an optimizer's parameters, by number; ``tensors`` has names by identity."""
    found: dict[str, str] = {}
    start = 0
    for group, parameters in groups_of(groups):
        names = nodes.lookup(group, "param_names")
        if isinstance(names, list) and len(names) == len(parameters):
            found |= {str(start + place): name for place, name in enumerate(names) if isinstance(name, str)}
        else:
            infos = [checkpoint.rebuilder.tensor(one) if checkpoint.rebuilder else None for one in parameters]
            known = {str(start + place): tensors.get(identity(info)) for place, info in enumerate(infos) if info}
            found |= {number: name for number, name in known.items() if name is not None}
        start += len(parameters)
    return found


def states(checkpoint: Checkpoint) -> Iterator[tuple[str, Inert, Pairs, TrainingRole]]:
    """Yield the path, the node, the pairs and the role of each optimizer, scheduler and scaler, outermost first."""
    weights = {id(one.node) for one in checkpoint.state_dicts if one.role in ("model", "ema") and one.node is not None}
    seen = {id(checkpoint.root), *weights}
    todo = [("", checkpoint.root, 0)] if id(checkpoint.root) not in weights else []
    left = _MOST_ENTRIES
    tensor = checkpoint.rebuilder.tensor if checkpoint.rebuilder else lambda _: None
    for path, node, depth in todo:  # the list grows: what is outermost comes first
        is_list = isinstance(node, list | tuple)
        pairs = list(enumerate(node[:_MOST_VISITED])) if is_list else nodes.mapping_pairs(node)
        pairs = pairs or nodes.attribute_pairs(node)
        left -= len(pairs)
        role = _role(pairs)
        if role is not None:
            held = (nodes.lookup(pairs, key) for key in ("state", "param_groups"))
            left -= sum(len(one) if isinstance(one, list) else len(nodes.mapping_pairs(one) or ()) for one in held)
        if left < 0:
            return
        if role is not None:
            yield path, node, pairs, role
        for key, child in pairs if len(seen) < _MOST_VISITED and depth < _DEEPEST else ():
            if type(child) not in nodes.CONTAINERS or not isinstance(key, str | int) or id(child) in seen:
                continue
            if type(child) in (list, tuple) and nodes.CONTAINERS.isdisjoint(map(type, child)):
                continue
            if role is not None and key in ("state", "param_groups"):
                continue
            seen.add(id(child))
            if tensor(child) is None:
                todo.append((f"{path}.{key}" if path else str(key), child, depth + 1))


def _role(pairs: Pairs) -> TrainingRole | None:
    if len(pairs) < 2:
        return None
    keys = {key for key, _ in pairs if isinstance(key, str)}
    if keys >= {"state", "param_groups"}:
        return "optimizer"
    if len(keys & {"last_epoch", "_step_count", "base_lrs", "_last_lr"}) > 1 or keys >= {"_schedulers", "_last_lr"}:
        return "scheduler"
    return "scaler" if keys >= {"scale", "growth_factor", "backoff_factor", "growth_interval"} else None


def _described(checkpoint: Checkpoint, path: str, node: Inert, pairs: Pairs, role: TrainingRole) -> TrainingState:
    class_name = nodes.class_name(node) if isinstance(node, Call) and not node.pairs else None
    kind = class_name.rpartition(".")[2] if class_name else None
    found = TrainingState(path, role, kind, class_name, node=node)
    if role == "scheduler":
        keys = {key for key, _ in pairs if isinstance(key, str)}
        rates = nodes.lookup(pairs, "_last_lr")
        rates = rates if isinstance(rates, list) else []
        return found._replace(
            kind=kind or next((name for name, signs in _SCHEDULERS.items() if keys >= signs), None),
            steps=_whole(_float_in(checkpoint, nodes.lookup(pairs, "last_epoch"))),
            groups=tuple(ParameterGroup(None, _float_in(checkpoint, one)) for one in rates),
        )
    if role != "optimizer":
        return found
    groups = [group for group, _ in groups_of(nodes.lookup(pairs, "param_groups"))]
    entries = nodes.mapping_pairs(nodes.lookup(pairs, "state")) or []
    kept = [values for _, node in entries if (values := nodes.mapping_pairs(node))]
    counted = [*kept[:_MOST_STEPS], *groups[:_MOST_STEPS]]
    steps = [nodes.lookup(one, name) for one in counted for name in ("step", "n_iter")]
    numbers = [number for one in steps if (number := _float_in(checkpoint, one)) is not None]
    listed = [(nodes.lookup(group, "params"), nodes.lookup(group, "lr")) for group in groups]
    return found._replace(
        kind=kind or (_kind(groups[0], kept) if groups else None),
        steps=_whole(max(numbers, default=None)),
        groups=tuple(
            ParameterGroup(len(own) if isinstance(own, list) else None, _float_in(checkpoint, rate))
            for own, rate in listed
        ),
    )


def _kind(group: Pairs, kept: list[Pairs]) -> str | None:
    names = {key for key, _ in group if isinstance(key, str)}
    values = {key for one in kept for key, _ in one if isinstance(key, str)}
    if "foreach" not in names:  # an old release, or not a class of torch: then no other settings may exist
        names -= _COMMON
    known = ((kind, set(settings.split()), set(keeps.split())) for kind, settings, keeps in _OPTIMIZERS)
    fitting = ((kind, own) for kind, own, keeps in known if names >= own and values <= keeps)
    found = next((kind for kind, own in fitting if "foreach" in names or names == own), None)
    # Since torch 2.7 an AdamW is an Adam with this setting.
    return "Adam" if found == "AdamW" and not nodes.lookup(group, "decoupled_weight_decay") else found


def _float_in(checkpoint: Checkpoint, node: Inert) -> float | None:
    """Return a number, or the element of a tensor with one element; None for everything else, and on damage."""
    value = scalar_of(node)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    info = checkpoint.rebuilder.tensor(node) if checkpoint.rebuilder is not None else None
    if info is None or info.numel != 1 or info.dtype.name not in _UNPACKED:
        return None
    try:
        number = float(struct.unpack(_UNPACKED[info.dtype.name], LazyTensor("", info).read())[0])
    except Failure:
        return None
    return number if isfinite(number) else None


def _whole(number: float | None) -> int | None:
    return int(number) if number is not None and abs(number) < 1 << 63 else None
