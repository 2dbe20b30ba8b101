"""
The one door to torch: which devices there are, arithmetic on values, and models that the user names.

torch is imported inside the functions, so that importing this module costs nothing.
"""

from __future__ import annotations

import os
import platform
import warnings
from ctypes import string_at
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptool.errors import MigrationRefused, OutputFailed
from ckptool.tensors import LazyTensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


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
    Ask torch for every device, and for the reason where CUDA is missing.

    ``cuda_visible_devices`` is the environment variable's value, which only explains: torch has obeyed it
    already. Free memory is known only after CUDA is initialised, so this initialises it on every device.
    """
    import torch

    missing = _cuda_missing(cuda_visible_devices)
    found = [_cpu()]
    if missing is None:
        found.extend(_cuda())
    found.extend(_mps())
    found.extend(_xpu())
    return DeviceReport(
        torch_version=str(torch.__version__),
        cuda_build=torch.version.cuda or torch.version.hip,
        devices=tuple(found),
        cuda_missing=missing,
    )


def _cpu() -> Device:
    import torch

    name = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    return Device(
        tag="cpu",
        name=name,
        free_nbytes=_physical_memory("SC_AVPHYS_PAGES"),
        total_nbytes=_physical_memory("SC_PHYS_PAGES"),
    )


def _physical_memory(pages: str) -> int | None:
    # Not on Windows; macOS knows the total but not what is available.
    try:
        return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _cuda() -> Iterator[Device]:
    import torch

    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        try:
            free, total = torch.cuda.mem_get_info(index)
        except RuntimeError:
            # A device in exclusive mode, or full to the last byte, has a name and a size all the same.
            free, total = None, properties.total_memory
        yield Device(
            tag=f"cuda:{index}",
            name=properties.name,
            free_nbytes=free,
            total_nbytes=total,
            compute_capability=f"{properties.major}.{properties.minor}",
        )


def _mps() -> Iterator[Device]:
    import torch

    if torch.backends.mps.is_available():
        total = torch.mps.recommended_max_memory()
        free = total - torch.mps.driver_allocated_memory()
        yield Device(tag="mps", name="Apple GPU", free_nbytes=free, total_nbytes=total)


def _xpu() -> Iterator[Device]:
    import torch

    # torch.xpu is younger than the oldest torch that is supported.
    if not hasattr(torch, "xpu") or not torch.xpu.is_available():
        return
    for index in range(torch.xpu.device_count()):
        properties = torch.xpu.get_device_properties(index)
        yield Device(tag=f"xpu:{index}", name=properties.name, total_nbytes=properties.total_memory)


def _cuda_missing(visible: str | None) -> CudaMissing | None:
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
    """Start CUDA for the sake of its error: only that tells the remaining reasons apart."""
    import torch

    reason = "no CUDA device answers"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().partition("\n")[0]
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


class CastBytes(NamedTuple):
    """Elements in another type, and what the cast cost."""

    data: bytes
    max_error: float
    overflowed: int


def cast(data: bytes, source: str, target: str) -> CastBytes:
    """
    Return packed elements of one floating type as another, rounded as torch rounds.

    Finite values that ``target`` cannot hold become its largest, and are counted.
    """
    import torch

    if not data:
        return CastBytes(b"", 0.0, 0)
    values = torch.frombuffer(bytearray(data), dtype=getattr(torch, source))
    wanted = getattr(torch, target)
    exact = values.to(torch.float64)
    result = values.to(wanted)
    lost = exact.isfinite() & ~result.to(torch.float64).isfinite()
    overflowed = int(lost.sum())
    if overflowed:
        largest = torch.finfo(wanted).max
        result = torch.where(lost, exact.clamp(-largest, largest).to(wanted), result)
    finite = exact.isfinite() & ~lost
    errors = (result.to(torch.float64) - exact)[finite].abs()
    return CastBytes(
        string_at(result.data_ptr(), result.nbytes),
        float(errors.max()) if errors.numel() else 0.0,
        overflowed,
    )


def save_model(spec: str, arguments: Mapping[str, object], tensors: Mapping[str, LazyTensor], path: str) -> None:
    """
    Build the model that the *user* names, load the tensors into it, and save it whole to ``path``.

    ``spec`` is ``package.module:Class``. Keys must match exactly.

    Raises:
        MigrationRefused: The class cannot be imported or built, or its keys are not those of the tensors.
    """
    import torch

    model = _build(spec, arguments)
    state = {name: _tensor(tensor) for name, tensor in tensors.items()}
    expected = model.state_dict()
    missing = [name for name in expected if name not in state]
    unexpected = [name for name in state if name not in expected]
    reshaped = [name for name in state if name in expected and state[name].shape != expected[name].shape]
    if missing or unexpected or reshaped:
        listed = (("missing", missing), ("unexpected", unexpected), ("of another shape", reshaped))
        parts = [f"{what}: {', '.join(names[:8])}{' …' if len(names) > 8 else ''}" for what, names in listed if names]
        raise MigrationRefused(
            f"{spec} does not take these weights; {'; '.join(parts)}",
            kind="key-mismatch",
            hint="Change names with --strip-module, --strip-prefix or --rename, or pass other --model-arg values.",
        )
    model.load_state_dict(state, strict=True)
    try:
        with open(path, "wb") as stream:  # noqa: PTH123 - a path of ours, to what has no name yet
            torch.save(model, stream)
    except (OSError, RuntimeError) as error:  # torch's writer turns a full disk into a RuntimeError
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise OutputFailed(f"torch cannot save the model: {reason}", kind="output-failed") from error


def _build(spec: str, arguments: Mapping[str, object]) -> Any:
    module_name, _, class_name = spec.partition(":")
    try:
        cls = import_module(module_name)
        for part in class_name.split("."):
            cls = getattr(cls, part)
        return cls(**arguments)  # type: ignore[operator]
    except Exception as error:
        raise MigrationRefused(
            f"{spec!r} cannot be built: {type(error).__name__}: {error}",
            kind="model-not-built",
            hint="Name it as package.module:Class, importable from here, with its --model-arg values.",
        ) from error


def _tensor(tensor: LazyTensor) -> Any:
    import torch

    info = tensor.info
    data = tensor.read()
    dtype = getattr(torch, info.dtype.name)
    return (
        torch.frombuffer(bytearray(data), dtype=dtype).reshape(info.shape)
        if data
        else torch.empty(info.shape, dtype=dtype)
    )


def model_shapes(spec: str, arguments: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    """
    Build the model that the *user* names, and return the shape of each tensor of its state_dict(), by name.

    Raises:
        MigrationRefused: The class cannot be imported or built.
    """
    import torch

    state = _build(spec, arguments).state_dict()
    return {name: tuple(value.shape) for name, value in state.items() if isinstance(value, torch.Tensor)}


class ValueFacts(NamedTuple):
    """What the elements of a tensor come to. Counts are of elements."""

    nan: int
    infinite: int
    all_zero: bool
    only_minus_infinity_and_zero: bool


def survey(pieces: Iterable[bytes], dtype: str) -> ValueFacts:
    """Return what is odd about the elements of a tensor, given packed and in order, in pieces of whole elements."""
    import torch

    of_type = getattr(torch, dtype)
    nan = infinite = 0
    all_zero = only_masks = True
    for piece in pieces:
        if not of_type.is_floating_point and not of_type.is_complex:
            all_zero = all_zero and not any(piece)
            continue
        values = torch.frombuffer(bytearray(piece), dtype=of_type)
        values = torch.view_as_real(values) if of_type.is_complex else values
        if values.dtype.itemsize == 1 or values.dtype == torch.float16:  # few operations know these
            values = values.to(torch.float32)
        nan += int(values.isnan().sum())
        infinite += int(values.isinf().sum())
        all_zero = all_zero and not bool(values.count_nonzero())
        only_masks = only_masks and bool(((values == 0) | (values == -torch.inf)).all())
    return ValueFacts(nan, infinite, all_zero, only_masks)
