"""
What loading a checkpoint requires: devices, a release of torch, packages with its classes.

Nothing is looked up on this machine. Which devices it has is for the caller to say; packages are only named.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ckptool.checking.advice import migration
from ckptool.checking.finding import Advice, Finding
from ckptool.checking.structure import foreign
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.summary import Summary
from ckptool.messages import some

_HARDWARE = {
    "cuda": "a CUDA or ROCm device",
    "mps": "an Apple GPU",
    "xpu": "an Intel GPU",
    "npu": "an Ascend NPU, and torch_npu",
    "hpu": "a Gaudi device, and its build of torch",
    "xla": "a TPU or another XLA device, and torch_xla",
    "mlu": "a Cambricon MLU, and torch_mlu",
    "privateuseone": "a device of another kind, and its package",
}
_ANYWHERE = ("cpu", "meta")

_TO_CPU = {
    "torch.jit.load": "Load it with torch.jit.load(path, map_location='cpu').",
    "torch.export.load": "Export it again on the device that is to run it; its weights alone can be migrated.",
}
"""How to get a program to the CPU, by what loads it. Everything else can be migrated."""

_SINCE = {
    "float8_e4m3fn": (2, 1),
    "float8_e5m2": (2, 1),
    "float8_e4m3fnuz": (2, 2),
    "float8_e5m2fnuz": (2, 2),
    "uint16": (2, 3),
    "uint32": (2, 3),
    "uint64": (2, 3),
    "float8_e8m0fnu": (2, 7),
    "float4_e2m1fn_x2": (2, 8),
}
"""The first release that has an element type, where that is younger than the oldest torch that is supported."""


def examine(checkpoint: Checkpoint, summary: Summary, devices: Collection[str] | None) -> Iterator[Finding]:
    """Yield the required devices, torch release and packages; with ``devices``, those that are missing."""
    yield from _devices(checkpoint, devices)
    yield from _release(summary)
    yield from _packages(checkpoint)


def _devices(checkpoint: Checkpoint, devices: Collection[str] | None) -> Iterator[Finding]:
    """CK503: saved on a device that loading asks for again."""
    infos = [tensor.info for tensor in (*checkpoint.tensors.values(), *checkpoint.attributes.values())]
    tags = dict.fromkeys(info.location for info in infos if info.location not in _ANYWHERE)
    if not tags:
        return
    listed = [f"{tag} ({_HARDWARE[kind]})" if (kind := tag.partition(":")[0]) in _HARDWARE else tag for tag in tags]
    advice = _to_cpu(checkpoint)
    if devices is None:
        what = f"saved on {some(listed)}: loading asks for that device again unless map_location says otherwise"
        yield Finding("CK503", "info", what, *advice)
        return
    lacking = [tag for tag in tags if not _is_there(tag, devices)]
    if lacking:
        what = f"saved on {some(lacking)}, which this machine does not have; it has {', '.join(devices)}"
        yield Finding("CK503", "warning", what, *advice)


def _to_cpu(checkpoint: Checkpoint) -> Advice:
    hint = _TO_CPU.get(checkpoint.traits.loader)
    return Advice(hint) if hint is not None else migration(checkpoint, to="cpu") or Advice()


def _is_there(tag: str, devices: Collection[str]) -> bool:
    """Say whether a tag is one of these devices; one without a number is the first of its kind."""
    return tag in devices or (":" not in tag and any(device.partition(":")[0] == tag for device in devices))


def _release(summary: Summary) -> Iterator[Finding]:
    """CK504: element types that came with a later release of torch."""
    needed = [(_SINCE[name], name) for name in summary.dtypes if name in _SINCE]
    if needed:
        (major, minor), _ = max(needed)
        names = ", ".join(name for _, name in needed)
        yield Finding("CK504", "info", f"needs torch {major}.{minor} or later, for {names}")


def _packages(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK505: a whole model is only loaded as one where its classes can be imported."""
    if not checkpoint.walks or checkpoint.traits.program is not None:
        return
    modules = dict.fromkeys(name.partition(".")[0] for name in foreign(checkpoint))
    if not modules:
        return
    wants = [
        "the script that defined its class" if module == "__main__" else f"package {module!r}" for module in modules
    ]
    yield Finding("CK505", "info", f"to load as a model it needs {some(wants)}, in the version that saved it")
