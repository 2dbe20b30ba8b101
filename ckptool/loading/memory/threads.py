"""Threads for torch's work: on the caller's streams, and so that a process can fork later without hanging."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from threading import Thread
from typing import Any, TypeAlias, TypeVar

import torch

from ckptool.checkpoints.quantized import CASTABLE
from ckptool.errors import UnsupportedFeature
from ckptool.loading.memory.available import translate_out_of_memory
from ckptool.messages import show, zero_now
from ckptool.tensors.dtypes import spelled
from ckptool.torch_ops.accelerators import Accelerator, accelerator, accelerators
from ckptool.torch_ops.values import Lost, lost_in_cast, narrows

logger = logging.getLogger("ckptool")


def streams_here() -> list[tuple[Accelerator, Any]]:
    """Return the streams that this thread works on now, of devices that are started, for ``work_on``."""
    started = [one for one in accelerators() if one.has_streams and one.is_started]
    return [(one, stream) for one in started for stream in one.streams()]


def work_on(streams: list[tuple[Accelerator, Any]]) -> None:
    """Let this thread work on the streams of another, which has to wait for it meanwhile."""
    for one, stream in streams:
        one.api.set_stream(stream)


def wait_for_all(devices: Iterable[torch.device]) -> None:
    """Wait until devices have finished the work of all threads so far."""
    for device in devices:
        if (found := accelerator(device.type)) is not None:
            found.wait_for_all(device)


def wait_for_own(devices: Iterable[torch.device]) -> None:
    """Wait until devices have finished this thread's work on its current streams."""
    for device in devices:
        if (found := accelerator(device.type)) is not None:
            found.wait_for_own(device)


T = TypeVar("T")


def in_own_thread(function: Callable[[], T]) -> T:
    """
    Run ``function`` in a thread of its own and return its result.

    torch's pool of threads belongs to the thread that first needs it; a child of a fork inherits the pool's state
    without its threads, and waits for them for ever. A thread of our own takes its pool with it when it ends.

    What it does on a device comes after what the caller did there, and before what the caller does next.
    """
    streams = streams_here()
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work_on(streams)
            with torch.no_grad():  # which is each thread's own
                results.append(function())
        except BaseException as error:  # noqa: BLE001 - raised again, in the caller's thread
            errors.append(error)

    thread = Thread(target=run, name="ckptool-arithmetic")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def is_castable(dtype: torch.dtype) -> bool:
    """Say whether ``dtype=`` is about tensors of this type: floating, and neither packed nor scaled."""
    return str(dtype).removeprefix("torch.") in CASTABLE


def castable(dtype: object) -> torch.dtype | None:
    """Return the type that floating tensors are cast to, be it given as text; raise ValueError if they cannot be."""
    if dtype is None:
        return None
    refusal = f"dtype={dtype!r} is nothing to cast weights to: name a floating type, as torch.bfloat16"
    found = getattr(torch, spelled(dtype), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(refusal)
    try:
        torch.zeros(1, device="cpu").to(found)
    except RuntimeError as error:  # torch has types that it cannot compute
        raise ValueError(refusal) from error
    return found


Named: TypeAlias = Iterable[tuple[str, torch.Tensor]]


def cast_tensor(values: torch.Tensor, dtype: torch.dtype, named: Callable[[], Named]) -> torch.Tensor:
    """
    Return values as another type, on the device where they are; ``named`` gives the tensors that have them, by name.

    Raises:
        UnsupportedFeature: A tensor has finite values that the type cannot hold.
    """

    def cast() -> torch.Tensor:
        if narrows(values.dtype, dtype):
            own = list(named())
            # One pass: of tensors that share memory, each is looked at only where something is found in all of it.
            if sum(tensor.numel() for _, tensor in own) <= values.numel() or lost_in_cast(values, dtype) != Lost():
                refuse_overflows((name, tensor, dtype) for name, tensor in own)
        return values.to(dtype)

    with translate_out_of_memory(values.numel() * dtype.itemsize, values.device):
        return apart_on_cpu(values.device, cast)


def refuse_overflows(found: Iterable[tuple[str, torch.Tensor, torch.dtype]]) -> None:
    """
    Raise UnsupportedFeature if a tensor has values that its new type cannot hold: too large, or no integers for it.

    Of tensors that would be all zero, and are not, it warns.
    """
    emptied: dict[torch.dtype, list[str]] = {}
    for name, values, dtype in found:
        if _refuse_overflow(name, values, dtype):
            emptied.setdefault(dtype, []).append(name)
    for dtype, names in emptied.items():
        logger.warning("%s", show(zero_now(names, str(dtype).removeprefix("torch."))))


def _refuse_overflow(name: str, values: torch.Tensor, dtype: torch.dtype) -> bool:
    """Raise UnsupportedFeature if a tensor has values that are lost; return whether it would be all zero."""
    lost = lost_in_cast(values, dtype)
    if lost.numel:
        into, kept = (str(one).removeprefix("torch.") for one in (dtype, values.dtype))
        has_wider = dtype == torch.float16 and values.dtype != torch.float64
        what, hint = f"are too large for {into}", f"Take {'bfloat16 or ' * has_wider}the file's own type, {kept}, as"
        hint = f"{hint} dtype= or in the model."
        if lost.first is not None:
            what, hint = f"{into} cannot hold, as {lost.first}", f"Make it {kept} in the model, as it is in the file."
        raise UnsupportedFeature(
            f"tensor {name!r} has values that {what}: {lost.numel:,} of {values.numel():,}", kind="overflow", hint=hint
        )
    return lost.all_zero


def apart_on_cpu(device: torch.device, function: Callable[[], T]) -> T:
    """Run ``function``, in a thread of its own if it computes on the CPU, whose thread pool a fork would break."""
    return in_own_thread(function) if device.type == "cpu" else function()
