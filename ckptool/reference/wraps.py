"""The wrappers that people train in, and the process group that DistributedDataParallel wants."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator

WRAPS = ("none", "data-parallel", "ddp", "compile")


@contextmanager
def process_group(device: torch.device) -> Iterator[int]:
    """
    Join the processes that torchrun started, or be a group of one where it started none; yield their number.

    Does nothing where a group exists already.
    """
    if dist.is_initialized():
        yield dist.get_world_size()
        return
    backend = _backend_for(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if dist.is_torchelastic_launched():
        dist.init_process_group(backend)
    else:
        # A store in this process: no port, no file. torch does not list it among its exports.
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield dist.get_world_size()
    finally:
        dist.destroy_process_group()


def _backend_for(device: torch.device) -> str:
    """Return what processes talk through for a device: what torch, or the maker of the device, names for it."""
    named: dict[str, str] = getattr(dist.Backend, "default_device_backend_map", {"cuda": "nccl"})
    return named.get(device.type, "gloo")


def wrap(model: nn.Module, how: str, device: torch.device) -> nn.Module:
    """Wrap a model that is on ``device`` already. ``ddp`` needs a process group."""
    numbers = None if device.type != "cuda" else [device.index or 0]
    if how == "none":
        return model
    if how == "data-parallel":
        return nn.DataParallel(model, device_ids=numbers)
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model, device_ids=numbers)
    with warnings.catch_warnings():
        # Importing the compiler uses torch's own deprecated functions.
        warnings.simplefilter("ignore", DeprecationWarning)
        return cast("nn.Module", torch.compile(model))
