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
    return _copied(model, fresh | {id(tensor): hollow(tensor) for tensor in computed_tensors(model)})


def model_on_cpu(model: torch.nn.Module) -> torch.nn.Module:
    """Return a whole copy of a model in memory of the CPU; what has no memory has none there either."""
    tensors = [*model.parameters(), *model.buffers()]
    far: dict[int, Any] = {id(one): _on_cpu(one) for one in tensors if not one.is_cpu and not one.is_meta}
    return _copied(model, copies_of_tensors(model) | far)


def _copied(model: torch.nn.Module, fresh: dict[int, Any]) -> torch.nn.Module:
    """Return a copy of a model with these objects, by the ``id`` of the old; it shares what cannot be copied."""
    try:
        return copy.deepcopy(model, dict(fresh))
    except Exception:  # noqa: BLE001 - a lock, a file, a handle of a library
        return copy.deepcopy(model, fresh | {id(one): one for one in _uncopyable(model, fresh)})


def _uncopyable(model: torch.nn.Module, fresh: dict[int, Any]) -> Iterator[Any]:
    # What refers to modules must not fail for what those hold.
    known: dict[int, Any] = fresh | {id(module): module for module in model.modules()}
    for module in model.modules():
        own = (module._parameters, module._buffers, module._modules)
        for value in vars(module).values():
            if any(value is one for one in own):
                continue
            try:
                copy.deepcopy(value, dict(known))
            except Exception:  # noqa: BLE001
                yield value


def copies_of_tensors(model: torch.nn.Module) -> dict[int, Any]:
    """Return copies of the tensors of a model that torch does not copy, by their ``id``: ``copy.deepcopy`` takes it."""
    found: dict[int, Any] = {id(one): _on_cpu(one) if one.is_cpu else one for one in computed_tensors(model)}
    for tensor in (*model.parameters(), *model.buffers()):
        if is_lazy(tensor):
            found[id(tensor)] = _lazy(tensor, tensor.device)
    return found


def views_of_weights(model: torch.nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield plain attributes that show memory of a weight, as ``spectral_norm`` makes one, and that weight."""
    weights = {id(one): one for one in (*model.parameters(), *model.buffers()) if _has_memory(one)}
    at: dict[int, list[torch.Tensor]] = {}
    for weight in weights.values():
        at.setdefault(weight.untyped_storage().data_ptr(), []).append(weight)
    for module in model.modules():
        for value in vars(module).values():
            if not isinstance(value, torch.Tensor) or id(value) in weights or not _has_memory(value):
                continue
            for weight in at.get(value.untyped_storage().data_ptr(), ()):
                begin, end = _extent(weight)
                first, last = _extent(value)
                if weight.dtype == value.dtype and begin <= first and last <= end:
                    yield value, weight
                    break


def _has_memory(tensor: torch.Tensor) -> bool:
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return plain and tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 0


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first and the last element of its storage that a tensor has."""
    begin = int(tensor.storage_offset())
    steps = ((size - 1) * step for size, step in zip(tensor.size(), tensor.stride(), strict=True))
    return begin, begin + sum(steps)


def computed_tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield plain attributes computed from parameters, as ``weight_norm``'s weight, which torch does not copy."""
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                yield value


def hollow(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same kind that has no memory."""
    with torch.no_grad():
        if is_lazy(tensor):
            return _lazy(tensor, torch.device("meta"))
        made = tensor.detach().to("meta")
    return torch.nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else made


def _lazy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    kind: Any = type(tensor)
    made: torch.Tensor = kind(requires_grad=tensor.requires_grad, device=device, dtype=tensor.dtype)
    return made


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    if is_lazy(tensor):
        return _lazy(tensor, torch.device("cpu"))
    with torch.no_grad():
        made = tensor.detach().to("cpu", copy=True)
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    return torch.nn.Parameter(made, tensor.requires_grad) if is_parameter else made.requires_grad_(tensor.requires_grad)
