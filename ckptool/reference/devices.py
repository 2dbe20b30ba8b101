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
    Turn ``auto``, ``cpu``, ``cuda``, ``cuda:N`` or ``mps`` into a device of the report.

    ``auto`` takes the CUDA device with the most free memory, else MPS, else the CPU; so does ``cuda``, among
    CUDA devices. Under torchrun ``local_rank`` takes the place of that choice, so that no two processes share
    a device.

    Raises:
        CkptoolError: The machine has no such device; the message says why.
    """
    cuda = [device for device in report.devices if device.tag.startswith("cuda:")]
    tags = [device.tag for device in report.devices]
    if request == "cpu":
        return Choice(torch.device("cpu"), "asked for")
    if request == "mps":
        if "mps" not in tags:
            raise _unavailable("mps", "torch finds no Apple GPU", "Use --device auto.")
        return Choice(torch.device("mps"), "asked for")
    if request == "auto" and not cuda:
        why = report.cuda_missing.message if report.cuda_missing else "torch lists no CUDA device"
        tag = "mps" if "mps" in tags else "cpu"
        return Choice(torch.device(tag), why)
    if request in ("auto", "cuda") or re.fullmatch(r"cuda:\d+", request):
        return _choose_cuda(request, cuda, report.cuda_missing, local_rank)
    raise CkptoolError(
        f"'{request}' is not a device to train on",
        kind="unknown-device",
        hint="Use auto, cpu, cuda, cuda:N or mps.",
    )


def _choose_cuda(request: str, cuda: Sequence[Device], missing: CudaMissing | None, local_rank: int | None) -> Choice:
    if not cuda:
        reason = missing or CudaMissing("no-device", "torch lists no CUDA device", "Use --device cpu.")
        raise _unavailable(request, reason.message, reason.hint)
    if ":" in request:
        if request not in [device.tag for device in cuda]:
            raise _unavailable(request, f"torch sees cuda:0 to cuda:{len(cuda) - 1}", "Run 'ckptool devices'.")
        return Choice(torch.device(request), "asked for")
    if local_rank is not None:
        if local_rank >= len(cuda):
            raise _unavailable(
                f"cuda:{local_rank}",
                f"{len(cuda)} CUDA devices, and a process for each of at least {local_rank + 1}",
                f"Start at most {len(cuda)} processes: torchrun --nproc-per-node {len(cuda)}.",
            )
        return Choice(torch.device("cuda", local_rank), f"local rank {local_rank}")
    best = max(cuda, key=lambda device: device.free_nbytes or 0)
    free = f"{(best.free_nbytes or 0) / 2**30:,.1f} GiB free"
    return Choice(torch.device(best.tag), f"{best.name}, {free}, the most of {len(cuda)} CUDA device(s)")


def _unavailable(tag: str, reason: str, hint: str) -> CkptoolError:
    return CkptoolError(f"no device '{tag}' to train on: {reason}", kind="no-such-device", hint=hint)
