"""
Device, element type and layout that a saved tensor gets: what ``map_location`` means.

Also makes tensors that are more than strided memory: sparse and quantised ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch

from ckptool.errors import DeviceUnavailable, MalformedFile, MigrationRefused, UnsupportedFeature, first_line
from ckptool.loading.memory.threads import translate_out_of_memory
from ckptool.tensors.tensor import SPARSE_PARTS, TensorInfo
from ckptool.torch_ops.devices import cuda_missing, device_there

MapLocation: TypeAlias = (
    str | torch.device | Mapping[str, str | torch.device] | Callable[[torch.UntypedStorage, str], Any] | None
)
Mover: TypeAlias = Callable[[torch.UntypedStorage, str], Any]

CPU = torch.device("cpu")
META = torch.device("meta")


class Placement(NamedTuple):
    """The devices that storages go to, by the location tags that they were saved with."""

    everywhere: torch.device | None
    """The device for all storages; None if ``by_tag`` decides."""
    by_tag: Mapping[str, torch.device]
    mover: Mover | None = None
    """A function that is given each storage, on the CPU, and its tag; it returns the storage to use, or None."""

    def device(self, tag: str) -> torch.device:
        """Return the device for a storage that was saved with ``tag``; the CPU if none was given for it."""
        return self.everywhere if self.everywhere is not None else self.by_tag.get(tag, CPU)


def placement(map_location: MapLocation, device: str | torch.device | None = None) -> Placement:
    """
    Return what ``map_location`` means; as for ``torch.load``, it is a device, a mapping of tags, or a function.

    None is the CPU. ``device`` is another word for it. Only devices that it names are initialised.

    Raises:
        DeviceUnavailable: It names no device, or one that this machine does not have.
        ValueError: It and ``device`` differ.
    """
    if device is not None and map_location not in ("cpu", device):
        raise ValueError(f"map_location={map_location!r} and device={device!r} are two words for one thing: give one")
    map_location = map_location if device is None else device
    if map_location is None:
        return Placement(CPU, {})
    if isinstance(map_location, str | torch.device):
        return Placement(available(map_location), {})
    if isinstance(map_location, Mapping):
        for tag in map_location:
            try:
                device_there(tag)
            except MigrationRefused as error:
                fact = f"in map_location, {error.message}"
                raise DeviceUnavailable(fact, kind="unknown-device", hint=error.hint) from error
        return Placement(None, {tag: available(device) for tag, device in map_location.items()})
    return Placement(CPU, {}, map_location)


def available(device: str | torch.device) -> torch.device:
    """
    Return the device, initialised if that is needed.

    Raises:
        DeviceUnavailable: There is no such device, or not here; the message says why.
    """
    try:
        wanted = torch.device(device.lower() if isinstance(device, str) else device)
    except (RuntimeError, TypeError) as error:
        raise DeviceUnavailable(
            f"{str(device)!r} is not a device",
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
        # The rest of torch's message lists all backends that it was built for.
        reason = first_line(error).partition(". ")[0]
        raise DeviceUnavailable(
            f"device '{wanted}' is not here: {reason}", hint="List the devices that are with 'ckptool devices'."
        ) from error


def moved_by(mover: Mover, memory: torch.Tensor, tag: str) -> torch.Tensor:
    """Return ``memory``, of uint8, moved by the caller's function; ``tag`` is the location it was saved with."""
    moved = mover(memory.untyped_storage(), tag)
    if moved is None:
        return memory
    if isinstance(moved, torch.storage.TypedStorage):
        moved = moved._untyped_storage
    if not isinstance(moved, torch.UntypedStorage):
        raise TypeError(f"map_location returned {type(moved).__name__}, not a storage")
    return torch.empty(0, dtype=torch.uint8, device=moved.device).set_(moved, 0, (memory.numel(),), (1,))


QUANTIZED = ("per_tensor_affine", "per_channel_affine", "per_channel_affine_float_qparams")


def special_tensor(
    name: str, info: TensorInfo, parts: Mapping[str, torch.Tensor], integers: torch.Tensor | None
) -> torch.Tensor:
    """
    Return a sparse or quantised tensor made of its parts; ``integers`` is the memory of a quantised one, in its type.

    Raises:
        MalformedFile: The parts do not belong together. torch does not check that later, and would read elsewhere.
    """
    device = next((part.device for part in parts.values()), CPU) if integers is None else integers.device
    try:
        with translate_out_of_memory(info.total_nbytes, device):
            if info.layout in SPARSE_PARTS:
                return _sparse(info, parts)
            if integers is None:
                raise MalformedFile(f"tensor {name!r} is quantised and has no integers", kind="malformed-tensor")
            return _quantized(info, parts, integers)
    except NotImplementedError as error:  # no kernel
        raise UnsupportedFeature(
            f"torch has no {info.layout} tensors of {info.dtype} on {device}",
            kind="no-such-layout",
            hint="Load it to the CPU, or leave it out.",
        ) from error
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError) as error:
        raise MalformedFile(f"tensor {name!r}: {first_line(error)}", kind="malformed-tensor") from error


def _sparse(info: TensorInfo, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if info.layout == "sparse_coo":
        made = torch.sparse_coo_tensor(
            parts["indices"], parts["values"], info.shape, device=parts["values"].device, check_invariants=True
        )
        return made._coalesced_(True) if dict(info.details).get("is_coalesced") == 1 else made
    compressed, plain, values = parts.values()
    layout = getattr(torch, info.layout)
    return torch.sparse_compressed_tensor(
        compressed, plain, values, info.shape, layout=layout, device=values.device, check_invariants=True
    )


def _quantized(info: TensorInfo, parts: Mapping[str, torch.Tensor], integers: torch.Tensor) -> torch.Tensor:
    """Return a quantised tensor; the calls are those of torch._utils._rebuild_qtensor, as none is public."""
    details = dict(info.details)
    made: torch.Tensor
    if info.layout == "per_tensor_affine":
        made = torch._empty_affine_quantized(
            info.shape,
            scale=details["scale"],
            zero_point=int(details["zero_point"]),
            dtype=integers.dtype,
            device=integers.device,
        )
    else:
        made = torch._empty_per_channel_affine_quantized(
            info.shape,
            scales=parts["scales"],
            zero_points=parts["zero_points"],
            axis=int(details["axis"]),
            dtype=integers.dtype,
            device=integers.device,
        )
    return made.set_(integers.untyped_storage(), integers.storage_offset(), info.shape, info.stride)


def torch_dtype(info: TensorInfo) -> torch.dtype:
    """
    Return torch's element type for a tensor.

    Raises:
        UnsupportedFeature: This torch is older than the type; or the type needs scales, and the tensor has none, so its
            first use would end the process.
    """
    if info.dtype.is_quantised and info.layout == "strided":
        raise UnsupportedFeature(
            f"a tensor of {info.dtype} without a scale", kind="no-scale", hint="Leave it out, or read its bytes."
        )
    found = getattr(torch, info.dtype.name, None)
    if not isinstance(found, torch.dtype):
        raise UnsupportedFeature(
            f"torch {torch.__version__} has no type {info.dtype}", kind="no-such-dtype", hint="Update torch."
        )
    return found
