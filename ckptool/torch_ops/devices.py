"""
Device tags, the devices that torch can compute on here, and why CUDA is missing.

Each kind of accelerator is used by what its module in torch can do. `torch.cuda` has streams, events, and numbers of
free memory; `torch.mps` has one queue for everybody; other modules have some of these. Where one is missing, the safe
way is taken: all work is waited for, and copies are plain.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import ckptool.system as system
from ckptool.errors import MigrationRefused, MissingPackage, first_line
from ckptool.torch_ops import needed

if TYPE_CHECKING:
    import torch

_OF_TORCH: Final = ("cuda", "xpu", "mps", "mtia", "hpu")

_DEVICE: Final = re.compile(r"\s*([A-Za-z]*):?\s*(\d{0,9})\s*")
_LAST: Final = 127  # torch counts them in eight bits
_KINDS: Final = ("cpu", "cuda", "hpu", "ipu", "meta", "mlu", "mps", "mtia", "npu", "privateuseone", "xla", "xpu")
_OTHER: Final = re.compile(r"([A-Za-z_]\w*)(?::(0|[1-9]\d{0,8}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device that torch can compute on. Memory is in bytes, None where nothing reports it."""

    tag: str
    """As in a checkpoint: ``cpu``, ``cuda:0``, ``mps``."""
    name: str
    free_nbytes: int | None = None
    total_nbytes: int | None = None
    compute_capability: str | None = None


@dataclass(frozen=True, slots=True)
class CudaMissing:
    """Why torch sees no CUDA device: ``kind`` for programs, a fact, and what to do about it."""

    kind: str
    message: str
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """The devices of this machine, CPU first, and why CUDA is not among them (None if it is)."""

    torch_version: str
    cuda_build: str | None
    """The CUDA or ROCm release that torch was built for."""
    devices: tuple[Device, ...]
    cuda_missing: CudaMissing | None


def devices(cuda_visible_devices: str | None = None) -> DeviceReport:
    """
    Return every device that torch has here, and the reason if CUDA is missing.

    ``cuda_visible_devices`` is the environment variable's value, used only for the reason: torch has obeyed it
    already. Free memory is known only after CUDA is initialised, so this initialises it on every device.

    Raises:
        MissingPackage: torch is not installed.
    """
    needed()
    import platform

    import torch

    missing = cuda_missing(cuda_visible_devices)
    free, total = system.physical_memory()
    name = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    found = [Device(tag="cpu", name=name, free_nbytes=free, total_nbytes=total)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning about an old driver, which is the reason given below
        for one in accelerators():
            for index in range(one.device_count()):
                free, total = one.memory(index)
                capability = torch.cuda.get_device_capability(index) if one.kind == "cuda" else None
                device = Device(
                    tag=one.kind if one.is_single else f"{one.kind}:{index}",
                    name=one.name(index),
                    free_nbytes=free,
                    total_nbytes=total,
                    compute_capability=".".join(map(str, capability)) if capability else None,
                )
                found.append(device)
    return DeviceReport(
        torch_version=str(torch.__version__),
        cuda_build=torch.version.cuda or torch.version.hip,
        devices=tuple(found),
        cuda_missing=missing,
    )


def cuda_missing(visible: str | None = None) -> CudaMissing | None:
    """Return why torch sees no CUDA device; None if it sees one. ``visible`` is the value of CUDA_VISIBLE_DEVICES."""
    import torch

    with warnings.catch_warnings():
        # With an old driver is_available() warns and says no; the reason is asked for below.
        warnings.simplefilter("ignore")
        if torch.cuda.is_available():
            return None
    version, build = torch.__version__, torch.version.cuda or torch.version.hip
    if build is None:
        return CudaMissing(
            "cpu-only-build",
            f"torch {version} is a CPU-only build",
            "Install a CUDA build of torch: https://pytorch.org/get-started/locally/ has the command.",
        )
    if visible is not None and visible.split(",")[0].strip() in ("", "-1", "NoDevFiles"):
        return CudaMissing(
            "hidden",
            f"CUDA_VISIBLE_DEVICES is '{visible}', which hides every CUDA device",
            "Unset CUDA_VISIBLE_DEVICES, or set it to the numbers of the devices to use.",
        )
    reason = "no CUDA device answers"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call] # only its error tells the remaining reasons apart
    except (RuntimeError, AssertionError) as error:
        reason = first_line(error)
    if "too old" in reason.lower():
        return CudaMissing(
            "old-driver",
            f"the NVIDIA driver is too old for torch {version}, built for CUDA {build} ({reason})",
            "Update the NVIDIA driver, or install a torch built for an older CUDA.",
        )
    if "no nvidia driver" in reason.lower():
        return CudaMissing(
            "no-driver",
            "no NVIDIA driver is installed or loaded",
            "Install the NVIDIA driver, or start the container with its GPUs passed through.",
        )
    if visible is not None:
        return CudaMissing(
            "hidden",
            f"CUDA_VISIBLE_DEVICES is '{visible}' and CUDA finds no such device ({reason})",
            "Set CUDA_VISIBLE_DEVICES to the numbers that 'nvidia-smi -L' lists.",
        )
    return CudaMissing("no-device", f"CUDA does not start ({reason})", "Check that 'nvidia-smi' lists a device.")


class Accelerator(NamedTuple):
    """A kind of device: its name in torch, and torch's module for it."""

    kind: str
    api: Any

    @property
    def is_started(self) -> bool:
        """Whether it was used in this process: only then is there work to wait for. Asking does not start it."""
        is_initialized = getattr(self.api, "is_initialized", None)
        return True if is_initialized is None else bool(is_initialized())

    @property
    def has_streams(self) -> bool:
        """Whether work can be put on streams, and each stream waited for."""
        return all(hasattr(self.api, name) for name in ("Stream", "current_stream", "set_stream"))

    @property
    def is_single(self) -> bool:
        """Whether there is at most one device of the kind, so that its module takes no device as an argument."""
        return self.kind == "mps"

    def device_count(self) -> int:
        """Return how many devices of the kind are here."""
        if self.is_single:
            import torch

            return int(torch.backends.mps.is_available())
        return int(self._call("is_available", default=True) and self._call("device_count", default=1))

    def name(self, index: int) -> str:
        """Return the product name of a device."""
        return "Apple GPU" if self.is_single else str(self._call("get_device_name", index, default=self.kind))

    def memory(self, index: int) -> tuple[int | None, int | None]:
        """Return the free and the total memory of a device in bytes, each None if it is not known."""
        if self.is_single:
            total = int(self.api.recommended_max_memory())
            return total - int(self.api.driver_allocated_memory()), total
        found = self._call("mem_get_info", index, default=None)
        if found is None:  # a full device does not answer this, but has a size
            properties = self._call("get_device_properties", index, default=None)
            return None, getattr(properties, "total_memory", None)
        return int(found[0]), int(found[1])

    def room(self, device: torch.device) -> int | None:
        """Return how many bytes can be allocated, with those that torch keeps for new tensors; None if not known."""
        index = device.index or 0
        free = self.memory(index)[0]
        reserved, used = (self._call(f"memory_{what}", index, default=0) for what in ("reserved", "allocated"))
        return None if free is None else free + max(0, reserved - used)

    def _call(self, name: str, *given: Any, default: Any) -> Any:
        ask = getattr(self.api, name, None)
        try:
            return default if ask is None else ask(*given)
        except (RuntimeError, NotImplementedError, TypeError):
            return default

    def streams(self) -> list[Any]:
        """Return this thread's streams: of other devices if it has set one there, then that of its current device."""
        current = self.api.current_stream()
        count = self.device_count()
        here = self.api.current_device() if count > 1 else 0
        others = [self.api.current_stream(index) for index in range(count) if index != here]
        return [*(stream for stream in others if stream.stream_id), current]

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Let this thread work on a stream for a block."""
        if hasattr(self.api, "stream"):
            with self.api.stream(stream):
                yield
            return
        before = self.api.current_stream(stream.device)
        self.api.set_stream(stream)
        try:
            yield
        finally:
            self.api.set_stream(before)

    def wait_for_all(self, device: torch.device) -> None:
        """Wait until a device has finished the work of all threads so far."""
        if self.is_single:
            self.api.synchronize()
        elif hasattr(self.api, "synchronize"):
            self.api.synchronize(device)

    def wait_for_own(self, device: torch.device) -> None:
        """Wait until a device has finished this thread's work on its current stream."""
        if self.has_streams:
            self.api.current_stream(device).synchronize()
        else:
            self.wait_for_all(device)


def accelerators() -> list[Accelerator]:
    """Return the kinds that this torch has modules for, whether or not there is such a device."""
    import torch

    kinds = dict.fromkeys((*_OF_TORCH, torch._C._get_privateuse1_backend_name()))
    return [found for found in map(accelerator, kinds) if found is not None]


def accelerator(kind: str) -> Accelerator | None:
    """Return the accelerator of a kind, as ``cuda``; None for ``cpu``, ``meta``, and those torch has no module for."""
    import torch

    api = None if kind in ("cpu", "meta") else getattr(torch, kind, None)
    return None if api is None else Accelerator(kind, api)


def device_tag(text: str) -> str:
    """
    Return the tag of a device as torch writes it, ``cuda:0`` for ``CUDA:0``; also of an extension of torch here.

    Raises:
        MigrationRefused: It is not one; the hint says what may have been meant, or which there are.
    """
    meant = device_meant(text)
    if meant == text.lower():
        return meant
    other = _OTHER.fullmatch(text)
    if meant:
        hint = f"Did you mean {meant!r}?"
    elif text.partition(":")[0].lower() in _KINDS:
        hint = f"Devices of a kind are numbered from 0 to {_LAST}, as in 'cuda:0'."
    elif other:
        try:
            here = needed()._C._get_privateuse1_backend_name()  # importing torch loads it
            here = None if here == "privateuseone" else here
            which = f"an extension of torch here adds {here}" if here else "no extension of torch here adds another"
        except MissingPackage:
            here, which = None, "what extensions of torch add is known only where torch is"
        if other[1] == here and int(other[2] or 0) <= _LAST:
            return text
        hint = f"Devices are {', '.join(_KINDS)}, with a number as in 'cuda:0'; {which}."
    else:
        hint = "Devices are written like 'cpu' or 'cuda:0'."
    raise MigrationRefused(f"not a device: {text!r}", kind="not-a-device", hint=hint)


def device_there(text: str) -> str:
    """
    Return the tag of a device of another machine, which may have other extensions of torch.

    Raises:
        MigrationRefused: It is not one, or reads like a misspelt one of torch's own.
    """
    kind = text.partition(":")[0]
    if _OTHER.fullmatch(text) and not get_close_matches(kind.lower(), (*_KINDS, "gpu")):
        return text
    return device_tag(text)


def device_meant(text: str) -> str | None:
    """Return the tag of torch's own device that a text means, or None."""
    match = _DEVICE.fullmatch(text)
    kind, number = (match[1].lower(), match[2]) if match else ("", "")
    kind = "cuda" if kind == "gpu" else kind
    if kind not in _KINDS or int(number or 0) > _LAST:
        return None
    return f"{kind}:{int(number)}" if number and kind not in ("cpu", "meta") else kind
