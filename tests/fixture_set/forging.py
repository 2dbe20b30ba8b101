"""Makes ``torch.save`` write device tags of devices that this machine does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

TagOf: TypeAlias = Callable[[Any], str]
"""Gives the location tag that a storage is, or would be, saved with."""


def true_tag(storage: Any) -> str:
    """Return the tag that ``torch.save`` writes of its own accord."""
    tag: str = torch.serialization.location_tag(storage)
    return tag


def tagged(tag: str, *, on_cpu: Iterable[Tensor] = ()) -> TagOf:
    """Tag every storage alike, except those of ``on_cpu``: tensors that would not have left the CPU."""
    return mixed([], otherwise=tag, on_cpu=on_cpu)


def mixed(tensors: Iterable[tuple[Tensor, str]], *, otherwise: str = "cpu", on_cpu: Iterable[Tensor] = ()) -> TagOf:
    """Tag the storage of each tensor as it says."""
    tags = {_address(tensor): "cpu" for tensor in on_cpu}
    tags.update((_address(tensor), tag) for tensor, tag in tensors)
    return lambda storage: tags.get(storage.data_ptr(), otherwise)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextmanager
def forged(tag_of: TagOf) -> Iterator[None]:
    """
    Let ``torch.save`` ask ``tag_of`` for its tags.

    torch puts a tag with a number together anew for each storage, which a pickle shows: it holds them all.

    ``torch.serialization.register_package`` could do it too, but nothing can be unregistered again.
    """
    real = torch.serialization.location_tag
    torch.serialization.location_tag = lambda storage: _as_torch_does(tag_of(storage))
    try:
        yield
    finally:
        torch.serialization.location_tag = real


def _as_torch_does(tag: str) -> str:
    kind, colon, number = tag.partition(":")
    return kind + colon + number if colon else tag


def pretend(wrapped: nn.Module, device: torch.device) -> None:
    """Give the data-parallel wrappers in a module the attributes that they would have on a CUDA device."""
    number = device.index or 0
    for module in wrapped.modules():
        if isinstance(module, nn.DataParallel):
            # Attributes are pickled in the order in which they were set.
            del module.device_ids
            module.dim = 0
            module.device_ids = [number]
            module.output_device = number
            module.src_device_obj = device
        elif isinstance(module, nn.parallel.DistributedDataParallel):
            module.device_type = device.type
            module.device_ids = [number]
            module.output_device = number
            module.device = device
