"""
Devices: how their tags are written, which ones torch can compute on here, and why CUDA is missing, if it is.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Final

import ckptool.system as system
from ckptool.errors import MigrationRefused, MissingPackage, first_line
from ckptool.torch_ops.packages import needed

if TYPE_CHECKING:
    from collections.abc import Iterator


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
    import torch

    missing = cuda_missing(cuda_visible_devices)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning about an old driver, which is the reason given below
        found = [_cpu(), *_accelerated()]
    return DeviceReport(
        torch_version=str(torch.__version__),
        cuda_build=torch.version.cuda or torch.version.hip,
        devices=tuple(found),
        cuda_missing=missing,
    )


def _cpu() -> Device:
    import platform

    import torch

    name = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    free, total = system.physical_memory()
    return Device(tag="cpu", name=name, free_nbytes=free, total_nbytes=total)


def _accelerated() -> Iterator[Device]:
    import torch

    from ckptool.torch_ops.accelerators import accelerators

    for one in accelerators():
        for index in range(one.device_count()):
            free, total = one.memory(index)
            capability = torch.cuda.get_device_capability(index) if one.kind == "cuda" else None
            yield Device(
                tag=one.kind if one.is_single else f"{one.kind}:{index}",
                name=one.name(index),
                free_nbytes=free,
                total_nbytes=total,
                compute_capability=".".join(map(str, capability)) if capability else None,
            )


def cuda_missing(visible: str | None = None) -> CudaMissing | None:
    import torch

    with warnings.catch_warnings():
        # With an old driver is_available() warns and says no; the reason is asked for below.
        warnings.simplefilter("ignore")
        if torch.cuda.is_available():
            return None
    version = str(torch.__version__)
    if torch.version.cuda is None and torch.version.hip is None:
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
    return _failed_start(visible)


def _failed_start(visible: str | None) -> CudaMissing:
    """Start CUDA for its error message: only that tells the remaining reasons apart."""
    import torch

    reason = "no CUDA device answers"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        reason = first_line(error)
    lowered = reason.lower()
    build = torch.version.cuda or torch.version.hip
    if "too old" in lowered:
        return CudaMissing(
            "old-driver",
            f"the NVIDIA driver is too old for torch {torch.__version__}, built for CUDA {build} ({reason})",
            "Update the NVIDIA driver, or install a torch built for an older CUDA.",
        )
    if "no nvidia driver" in lowered:
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
            needed()
            from ckptool.torch_ops.accelerators import of_extension

            here = of_extension()  # importing torch loads it
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
