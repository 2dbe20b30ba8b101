"""
Runs torch's arithmetic in threads after which a process can still fork.

Also translates errors about full memory, and casts tensors with a report of the values that are lost.
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
from ckptool.torch_ops.devices import accelerator, accelerators
from ckptool.torch_ops.values import Lost, lost_in_cast, narrows

T = TypeVar("T")
_SAID: Final = ("out of memory", "can't allocate memory", "not enough memory", "invalid buffer size")
"""Texts of errors of CUDA's driver (when it loads a kernel, say), of torch on the CPU, also on Windows, of Metal."""

logger = logging.getLogger("ckptool")


def wait_for(devices: Iterable[torch.device], *, own: bool = False) -> None:
    """Wait until devices have finished the work of all threads so far; or this thread's ``own`` on current streams."""
    for device in devices:
        if (found := accelerator(device.type)) is not None:
            (found.wait_for_own if own else found.wait_for_all)(device)


def in_own_thread(function: Callable[[], T]) -> T:
    """
    Run ``function`` in a thread of its own and return its result.

    torch's pool of threads belongs to the thread that first needs it; a child of a fork inherits the pool's state
    without its threads, and waits for them for ever. A thread of our own takes its pool with it when it ends.

    Its work on a device runs after what the caller launched there before, and before what the caller launches next.
    """
    started = [one for one in accelerators() if one.has_streams and one.is_started]
    streams = [(one, stream) for one in started for stream in one.streams()]
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            for one, stream in streams:  # those of the calling thread, which waits meanwhile
                one.api.set_stream(stream)
            with torch.no_grad():  # a setting of each thread
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
    """Return whether ``dtype=`` casts tensors of this type: floating, and neither packed nor scaled."""
    return spelled(dtype) in CASTABLE


def castable(dtype: object) -> torch.dtype | None:
    """Return a type or its name as the type to cast floating tensors to; raise ValueError if torch cannot do that."""
    if dtype is None:
        return None
    refusal = f"dtype={dtype!r} is nothing to cast weights to: name a floating type, as torch.bfloat16"
    found = getattr(torch, spelled(dtype), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(refusal)
    try:
        torch.zeros(1, device="cpu").to(found)
    except RuntimeError as error:  # torch has types that it cannot compute with
        raise ValueError(refusal) from error
    return found


class translate_out_of_memory:  # noqa: N801 - it is used like a function
    """
    Raise OutOfMemory for a block that runs out of memory on a device.

    It is not a generator: an error would keep the generator's frame alive, and so the block's memory on the device.

    Raises:
        OutOfMemory: It names ``nbytes``, the bytes that the block needs. Other errors pass unchanged.
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
"""By the new type and the name of a tensor: the share of its nonzero values that became zero, 0 to 1."""


def cast_tensor(values: torch.Tensor, dtype: torch.dtype, named: Callable[[], Named], zeroed: Zeroed) -> torch.Tensor:
    """
    Return values cast to another type, on their device. ``named`` returns the tensors that share these values, with
    their names; in ``zeroed``, those are noted of which many values became zero.

    Raises:
        UnsupportedFeature: A tensor has finite values that the type cannot hold.
    """

    def cast() -> torch.Tensor:
        if narrows(values.dtype, dtype):
            own = list(named())
            # If tensors share memory, each is only inspected after one pass over all of it found something.
            if sum(tensor.numel() for _, tensor in own) <= values.numel() or lost_in_cast(values, dtype) != Lost():
                note_losses(((name, tensor, dtype) for name, tensor in own), zeroed)
        return values.to(dtype)

    with translate_out_of_memory(values.numel() * dtype.itemsize, values.device):
        return apart_on_cpu(values.device, cast)


def refuse_overflows(found: Iterable[tuple[str, torch.Tensor, torch.dtype]]) -> None:
    """
    Raise UnsupportedFeature if a tensor has values that its new type cannot hold: too large, or not its integers.

    Log a warning of tensors of which many nonzero values would become zero.
    """
    warn_of_zeros(note_losses(found, {}))


def note_losses(found: Iterable[tuple[str, torch.Tensor, torch.dtype]], zeroed: Zeroed, what: str = "tensor") -> Zeroed:
    """Raise as ``refuse_overflows``, and note in ``zeroed`` the tensors of which many values would become zero."""
    for name, values, dtype in found:
        lost = lost_in_cast(values, dtype)
        if lost.numel:
            raise _overflow(f"{what} {name!r}", values, dtype, lost)
        if lost.zeroed > MANY_ZEROED:
            zeroed.setdefault(dtype, {})[name] = lost.zeroed
    return zeroed


def warn_of_zeros(zeroed: Zeroed) -> None:
    """Log which tensors had many values become zero, by the type that they were cast to."""
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
    """Run ``function``; in a thread of its own if it computes on the CPU, whose thread pool breaks forks."""
    return in_own_thread(function) if device.type == "cpu" else function()
