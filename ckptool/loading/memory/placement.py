"""Which device each storage goes to: what ``map_location`` means, and whether that device is here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch

from ckptool.errors import DeviceUnavailable
from ckptool.torch_ops.devices import cuda_missing

MapLocation: TypeAlias = (
    str | torch.device | Mapping[str, str | torch.device] | Callable[[torch.UntypedStorage, str], Any] | None
)
Mover: TypeAlias = Callable[[torch.UntypedStorage, str], Any]

CPU = torch.device("cpu")
META = torch.device("meta")


class Placement(NamedTuple):
    """Where storages go, by the tag that they were saved with."""

    everywhere: torch.device | None
    """The device for all of them, where there is one."""
    by_tag: Mapping[str, torch.device]
    mover: Mover | None = None
    """A function that is given each storage, on the CPU, and its tag; it returns the storage to use, or None."""

    def device(self, tag: str) -> torch.device:
        """Return where a storage goes that was saved with ``tag``: to the CPU, if nothing else was said of it."""
        return self.everywhere if self.everywhere is not None else self.by_tag.get(tag, CPU)


def placement(map_location: MapLocation) -> Placement:
    """
    Return what ``map_location`` says; it may be what ``torch.load`` takes: a device, a mapping of tags, a function.

    None is the CPU. No device is started here but those that it names.

    Raises:
        DeviceUnavailable: It names no device, or one that this machine does not have.
    """
    if map_location is None:
        return Placement(CPU, {})
    if isinstance(map_location, str | torch.device):
        return Placement(available(map_location), {})
    if isinstance(map_location, Mapping):
        return Placement(None, {tag: available(device) for tag, device in map_location.items()})
    return Placement(CPU, {}, map_location)


def available(device: str | torch.device) -> torch.device:
    """
    Return the device, initialised if that is needed.

    Raises:
        DeviceUnavailable: There is no such device, or not here; the message says why.
    """
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise DeviceUnavailable(
            f"{str(device)!r} is no device",
            kind="unknown-device",
            hint="Name one as torch does: cpu, cuda:0, mps; 'ckptool devices' lists those here.",
        ) from error
    if wanted.type == "cpu":
        return CPU
    missing = cuda_missing() if wanted.type == "cuda" else None
    if missing is not None:
        raise DeviceUnavailable(f"device '{wanted}' is not here: {missing.message}", hint=missing.hint)
    try:
        return torch.empty(0, device=wanted).device
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        # torch goes on with a list of all that it was built for.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].partition(". ")[0]
        raise DeviceUnavailable(
            f"device '{wanted}' is not here: {reason}", hint="List the devices that are with 'ckptool devices'."
        ) from error


def moved_by(mover: Mover, memory: torch.Tensor, tag: str) -> torch.Tensor:
    """Return the bytes where the user's function moves them."""
    moved = mover(memory.untyped_storage(), tag)
    if moved is None:
        return memory
    if isinstance(moved, torch.storage.TypedStorage):
        moved = moved._untyped_storage
    if not isinstance(moved, torch.UntypedStorage):
        raise TypeError(f"map_location returned {type(moved).__name__}, not a storage")
    return torch.empty(0, dtype=torch.uint8, device=moved.device).set_(moved, 0, (memory.numel(),), (1,))
