"""Which device to train on, and why that one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ckptool.errors import CkptoolError
from ckptool.torch_ops.devices import CudaMissing, Device, DeviceReport

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Choice:
    """A device and the reason for it, in words that complete "training on …:"."""

    device: torch.device
    why: str


def choose(request: str, report: DeviceReport, *, local_rank: int | None = None) -> Choice:
    """
    Turn ``auto``, a kind of device or a tag, as ``cuda`` or ``cuda:1``, into a device of the report.

    ``auto`` takes CUDA, else what else the machine has beside the CPU, else the CPU. Of a kind the device with the most
    free memory is taken. Under torchrun ``local_rank`` takes the place of that choice, so that no two processes share
    a device.

    Raises:
        CkptoolError: The machine has no such device; the message says why.
    """
    kinds: dict[str, list[Device]] = {"cuda": []}
    for device in report.devices:
        kinds.setdefault(device.tag.partition(":")[0], []).append(device)
    if request == "cpu":
        return Choice(torch.device("cpu"), "asked for")
    if request == "auto" and not kinds["cuda"]:
        why = report.cuda_missing.message if report.cuda_missing else "torch lists no CUDA device"
        others = [kind for kind in kinds if kind not in ("cuda", "cpu")]
        return Choice(_of_kind(kinds[others[0]], local_rank).device if others else torch.device("cpu"), why)
    kind = "cuda" if request == "auto" else request.partition(":")[0]
    if (kind not in kinds and kind != "mps") or not re.fullmatch(r"[a-z]+(:\d+)?", request):
        raise CkptoolError(
            f"'{request}' is not a device to train on",
            kind="unknown-device",
            hint=f"Use auto, cpu, cuda, cuda:N or another device that 'ckptool devices' lists; "
            f"this machine has {', '.join(device.tag for device in report.devices)}.",
        )
    found = kinds.get(kind, [])
    if not found:
        reason = report.cuda_missing if kind == "cuda" else None
        reason = reason or CudaMissing("no-device", f"torch finds no device of kind {kind}", "Use --device auto.")
        raise _unavailable(request, reason.message, reason.hint)
    if ":" in request:
        if request not in [device.tag for device in found]:
            raise _unavailable(request, f"torch sees {found[0].tag} to {found[-1].tag}", "Run 'ckptool devices'.")
        return Choice(torch.device(request), "asked for")
    return _of_kind(found, local_rank)


def _of_kind(found: Sequence[Device], local_rank: int | None) -> Choice:
    """Return the device of this process's rank, or that with the most free memory."""
    if local_rank is not None:
        if local_rank >= len(found):
            raise _unavailable(
                f"{found[0].tag.partition(':')[0]}:{local_rank}",
                f"{len(found)} devices of this kind, and a process for each of at least {local_rank + 1}",
                f"Start at most {len(found)} processes: torchrun --nproc-per-node {len(found)}.",
            )
        return Choice(torch.device(found[local_rank].tag), f"local rank {local_rank}")
    best = max(found, key=lambda device: device.free_nbytes or 0)
    if best.free_nbytes is None:
        return Choice(torch.device(best.tag), best.name)
    free = f"{best.free_nbytes / 2**30:,.1f} GiB free"
    return Choice(torch.device(best.tag), f"{best.name}, {free}, the most of {len(found)} device(s) of its kind")


def _unavailable(tag: str, reason: str, hint: str) -> CkptoolError:
    return CkptoolError(f"no device '{tag}' to train on: {reason}", kind="no-such-device", hint=hint)
