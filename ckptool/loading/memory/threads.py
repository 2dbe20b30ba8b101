"""
How torch's work is done: on the caller's streams, in threads after which a process can still fork, with errors that say
what ran out, and with a look at what a cast loses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from threading import Thread
from types import TracebackType
from typing import Final, TypeAlias, TypeVar

import torch

from ckptool.checkpoints.quantized import CASTABLE
from ckptool.errors import OutOfMemory, UnsupportedFeature
from ckptool.messages import MANY_ZEROED, show, zero_now
from ckptool.tensors.dtypes import spelled
from ckptool.torch_ops.accelerators import accelerator, accelerators
from ckptool.torch_ops.values import Lost, lost_in_cast, narrows

T = TypeVar("T")
_SAID: Final = ("out of memory", "can't allocate memory", "not enough memory", "invalid buffer size")
"""By the driver of CUDA (when it loads a kernel, say), by torch of the CPU, there and on Windows, by Metal."""

logger = logging.getLogger("ckptool")


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


def in_own_thread(function: Callable[[], T]) -> T:
    """
    Run ``function`` in a thread of its own and return its result.

    torch's pool of threads belongs to the thread that first needs it; a child of a fork inherits the pool's state
    without its threads, and waits for them for ever. A thread of our own takes its pool with it when it ends.

    What it does on a device comes after what the caller did there, and before what the caller does next.
    """
    started = [one for one in accelerators() if one.has_streams and one.is_started]
    streams = [(one, stream) for one in started for stream in one.streams()]
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            for one, stream in streams:  # of this thread, which waits meanwhile
                one.api.set_stream(stream)
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
    return spelled(dtype) in CASTABLE


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


class translate_out_of_memory:  # noqa: N801 - it is used like a function
    """
    Raise OutOfMemory for a block that runs out of memory on a device.

    No generator: the error would keep its frame alive, and with it the error and the block's memory on the device.

    Raises:
        OutOfMemory: They are not there. Any other error comes out as it is.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self.device = device

    def __enter__(self) -> None:
        """Do nothing yet."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_full = isinstance(error, torch.cuda.OutOfMemoryError)
        if is_full or (isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _SAID)):
            raise OutOfMemory(
                f"no {self.nbytes:,} bytes are free on {self.device}",
                hint="Choose another device, or a smaller dtype=.",
                needed=self.nbytes,
            ) from error


Named: TypeAlias = Iterable[tuple[str, torch.Tensor]]
Zeroed: TypeAlias = dict[torch.dtype, dict[str, float]]
"""Which share of the values of tensors a type takes for zero, of those that are not: by type and name."""


def cast_tensor(values: torch.Tensor, dtype: torch.dtype, named: Callable[[], Named], zeroed: Zeroed) -> torch.Tensor:
    """
    Return values as another type, on the device where they are; ``named`` gives the tensors that have them, by name.
    In ``zeroed``, those are noted of which many values are zero now.

    Raises:
        UnsupportedFeature: A tensor has finite values that the type cannot hold.
    """

    def cast() -> torch.Tensor:
        if narrows(values.dtype, dtype):
            own = list(named())
            # One pass: of tensors that share memory, each is looked at only where something is found in all of it.
            if sum(tensor.numel() for _, tensor in own) <= values.numel() or lost_in_cast(values, dtype) != Lost():
                note_losses(((name, tensor, dtype) for name, tensor in own), zeroed)
        return values.to(dtype)

    with translate_out_of_memory(values.numel() * dtype.itemsize, values.device):
        return apart_on_cpu(values.device, cast)


def refuse_overflows(found: Iterable[tuple[str, torch.Tensor, torch.dtype]]) -> None:
    """
    Raise UnsupportedFeature if a tensor has values that its new type cannot hold: too large, or no integers for it.

    Of tensors of which many values would be zero, and are not, it warns.
    """
    warn_of_zeros(note_losses(found, {}))


def note_losses(found: Iterable[tuple[str, torch.Tensor, torch.dtype]], zeroed: Zeroed, what: str = "tensor") -> Zeroed:
    """Raise the same, and note in ``zeroed`` the tensors of which many values would be zero."""
    for name, values, dtype in found:
        lost = lost_in_cast(values, dtype)
        if lost.numel:
            raise _overflow(f"{what} {name!r}", values, dtype, lost)
        if lost.zeroed > MANY_ZEROED:
            zeroed.setdefault(dtype, {})[name] = lost.zeroed
    return zeroed


def warn_of_zeros(zeroed: Zeroed) -> None:
    """Log which tensors have lost many values, and for which type."""
    for dtype, names in zeroed.items():
        logger.warning("%s", show(zero_now(names, spelled(dtype))))


def _overflow(name: str, values: torch.Tensor, dtype: torch.dtype, lost: Lost) -> UnsupportedFeature:
    into, kept = (spelled(one) for one in (dtype, values.dtype))
    has_wider = dtype == torch.float16 and values.dtype not in (torch.float64, torch.complex128)
    what, hint = f"are too large for {into}", f"Take {'bfloat16 or ' * has_wider}the file's own type, {kept}, as"
    hint = f"{hint} dtype= or in the model."
    if lost.first is not None:
        what, hint = f"{into} cannot hold, as {lost.first}", f"Make it {kept} in the model, as it is in the file."
    fact = f"{name} has values that {what}: {lost.numel:,} of {values.numel():,}"
    return UnsupportedFeature(fact, kind="overflow", hint=hint)


def apart_on_cpu(device: torch.device, function: Callable[[], T]) -> T:
    """Run ``function``, in a thread of its own if it computes on the CPU, whose thread pool a fork would break."""
    return in_own_thread(function) if device.type == "cpu" else function()
