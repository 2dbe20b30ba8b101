"""Copies of models and tensors without memory, on which code of a model can be tried before anything is loaded."""

from __future__ import annotations

import copy
from typing import Any

import torch


def hollow_model(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a model whose parameters and buffers have no memory."""
    fresh: dict[int, Any] = {id(tensor): hollow(tensor) for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, fresh)


def hollow(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same kind that has no memory."""
    with torch.no_grad():
        if isinstance(tensor, torch.nn.UninitializedParameter):
            return torch.nn.UninitializedParameter(tensor.requires_grad, device="meta")  # type: ignore[call-arg, arg-type]
        if isinstance(tensor, torch.nn.parameter.UninitializedBuffer):
            return torch.nn.parameter.UninitializedBuffer(device="meta")  # type: ignore[call-arg]
        made = tensor.detach().to("meta")
    return torch.nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else made
