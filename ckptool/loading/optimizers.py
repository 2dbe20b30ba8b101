"""The state of an optimizer in a checkpoint: found, checked against the optimizer, and put in."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch

from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.training import by_number, states
from ckptool.errors import KeyMismatch, ShapeMismatch, UnsupportedFeature
from ckptool.loading.extra_state import values_with_tensors
from ckptool.loading.memory.assembly import Assembly
from ckptool.loading.memory.host import Mmap
from ckptool.loading.memory.placement import CPU, placement
from ckptool.loading.memory.threads import in_own_thread
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Inert

_DEFAULTED: Final = frozenset({"amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused", "nesterov"})
"""Settings of a group that torch puts in itself where the state of an older release has none."""
_ELEMENTWISE: Final = frozenset({
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "acc_delta", "sum",
    "exp_inf", "prev", "step_size",
})  # fmt: skip
"""What torch's own optimizers keep of each element of a parameter."""


class OptimizerState(NamedTuple):
    """A state that fits an optimizer."""

    optimizer: torch.optim.Optimizer
    state: dict[str, Any]
    parameters: int
    """How many parameters it has something of."""

    def apply(self) -> None:
        """Put it in; torch moves each tensor to the device and type of its parameter."""
        in_own_thread(lambda: self.optimizer.load_state_dict(self.state))


def read_optimizer(
    checkpoint: Checkpoint, model: torch.nn.Module, optimizer: torch.optim.Optimizer, mmap: Mmap
) -> OptimizerState:
    """
    Return the state that a checkpoint has for the optimizer of a model; ``mmap`` says whether its tensors may be views
    of the file.

    Raises:
        KeyMismatch: The file has none, or several, or one for other groups of parameters; or it is another model's.
        ShapeMismatch: It is the state of parameters of other shapes.
        UnsupportedFeature: It holds values that only code could make.
    """
    found = [
        (path, node if nodes.mapping_pairs(node) else by_number(pairs))  # of an object, what its state_dict() holds
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
    state = _values(checkpoint, found[0][1], mmap)
    _check(optimizer, state)
    own = {id(one) for one in model.parameters()}
    if not any(id(one) in own for group in optimizer.param_groups for one in group["params"]):
        what = "the optimizer has no parameter of the model"
        raise KeyMismatch(what, kind="which-optimizer", hint="Build it over the parameters of this model.")
    return OptimizerState(optimizer, state, len(state["state"]))


def _values(checkpoint: Checkpoint, node: Inert, mmap: Mmap) -> dict[str, Any]:
    assembly = Assembly(placement(CPU), mmap=mmap, cancellation=checkpoint.source.cancellation)
    state = values_with_tensors({"optimizer": node}, checkpoint.rebuilder, assembly)["optimizer"]
    if isinstance(state, UnsupportedFeature):
        raise state
    found: dict[str, Any] = state
    return found


def _check(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Check what torch checks, and the shapes, which it does not."""
    groups, mine = state["param_groups"], optimizer.param_groups
    is_plain = isinstance(groups, list) and isinstance(state["state"], dict)
    if not is_plain or not all(_is_group(group) for group in groups):
        raise KeyMismatch("the optimizer state in the file is not one that torch writes", kind="which-optimizer")
    sizes, wanted = [len(group["params"]) for group in groups], [len(group["params"]) for group in mine]
    if sizes != wanted:
        raise KeyMismatch(
            f"the optimizer has groups of {wanted} parameters, the file's of {sizes}",
            hint="Build the optimizer over the same parameters as in training.",
        )
    for saved, group in zip(groups, mine, strict=True):
        lost, strange = group.keys() - saved.keys() - _DEFAULTED, saved.keys() - group.keys()
        if lost and strange:
            raise KeyMismatch(
                f"the state is of another optimizer: it has {', '.join(sorted(map(str, strange)))}, "
                f"and not {', '.join(sorted(lost))}",
                kind="which-optimizer",
                hint=f"Build the optimizer of the training, or load without optimizer={type(optimizer).__name__}.",
            )
        for number, parameter in zip(saved["params"], group["params"], strict=True):
            if parameter.is_meta:
                raise KeyMismatch(
                    "the optimizer holds parameters on the meta device, which loading replaces",
                    kind="meta-optimizer",
                    hint="Load the weights first, build the optimizer, then load its state.",
                )
            entry = state["state"].get(number, {})
            for name, value in entry.items() if isinstance(entry, dict) else ():
                is_tensor = isinstance(value, torch.Tensor) and value.dim()
                if is_tensor and (name in _ELEMENTWISE or value.dim() == parameter.dim()):
                    _check_shape(name, f"{name} of parameter {number}", value, parameter)


def _is_group(group: Any) -> bool:
    numbers = group.get("params") if isinstance(group, dict) else None
    return isinstance(numbers, list) and all(isinstance(number, int | str) for number in numbers)


def _check_shape(name: str, what: str, value: torch.Tensor, parameter: torch.Tensor) -> None:
    # Factored states (Adafactor) have fewer elements; none has more.
    is_factored = value.numel() < parameter.numel() and name not in _ELEMENTWISE
    if value.shape != parameter.shape and not is_factored:
        raise ShapeMismatch(
            f"{what} is {list(value.shape)}, the parameter {list(parameter.shape)}",
            hint="Build the optimizer over the parameters in the order of training.",
        )
