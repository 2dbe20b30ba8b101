"""Copies of models, without memory or on the CPU, on which a load can be tried before the model itself is touched."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch


def is_lazy(tensor: object) -> bool:
    """Say whether a tensor of a lazy module has no shape yet."""
    return isinstance(tensor, torch.nn.UninitializedParameter | torch.nn.parameter.UninitializedBuffer)


def hollow_model(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a model whose parameters and buffers have no memory."""
    fresh: dict[int, Any] = {id(tensor): hollow(tensor) for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, fresh | {id(tensor): hollow(tensor) for tensor in computed_tensors(model)})


def model_on_cpu(model: torch.nn.Module) -> torch.nn.Module:
    """Return a whole copy of a model in memory of the CPU; what has no memory has none there either."""
    tensors = [*model.parameters(), *model.buffers()]
    far: dict[int, Any] = {id(one): _on_cpu(one) for one in tensors if not one.is_cpu and not one.is_meta}
    return copy.deepcopy(model, far | {id(tensor): _on_cpu(tensor) for tensor in computed_tensors(model)})


def computed_tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield plain attributes computed from parameters, as ``weight_norm``'s weight, which torch does not copy."""
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                yield value


def hollow(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same kind that has no memory."""
    with torch.no_grad():
        if isinstance(tensor, torch.nn.UninitializedParameter):
            return torch.nn.UninitializedParameter(tensor.requires_grad, device="meta")  # type: ignore[call-arg, arg-type]
        if isinstance(tensor, torch.nn.parameter.UninitializedBuffer):
            return torch.nn.parameter.UninitializedBuffer(device="meta")  # type: ignore[call-arg]
        made = tensor.detach().to("meta")
    return torch.nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else made


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        made = tensor.detach().to("cpu", copy=True)
    return torch.nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else made
