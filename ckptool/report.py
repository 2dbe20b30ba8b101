"""What a migration did, or would do: one record, with the file before and the file after beside each other."""

from __future__ import annotations

from typing import NamedTuple

from ckptool.casting import Cast
from ckptool.checkpoint import Checkpoint
from ckptool.summary import Summary, count, summarise
from ckptool.targets import TargetForm
from ckptool.tensors import LazyTensor, TensorInfo
from ckptool.to_torch import TorchPlan


class Side(NamedTuple):
    """One of the two files, in the words of ``inspect``."""

    format: str
    form: str
    file_nbytes: int
    summary: Summary


class MigrationReport(NamedTuple):
    """What was done, or would be."""

    source: str
    target: str
    form: TargetForm
    source_format: str
    tensors: int
    nbytes: int
    """Size of what was written, in bytes; of a dry run too, but where torch is to save a model that it builds."""
    retagged: dict[str, int]
    """Storages and devices that got the new device tag, by the tag that they had."""
    location: str | None
    renamed: tuple[tuple[str, str], ...]
    dropped: tuple[str, ...]
    """Entries that the source has and the target has not."""
    casts: tuple[Cast, ...]
    """Tensors that got another type, and the largest error of each."""
    tied: dict[str, str]
    """Names that a safetensors file leaves out, and the name that stands for each."""
    loses_training: bool
    """The source holds an optimizer's state and the target does not: training cannot be resumed from it."""
    weights_key: str | None
    """Where in the source the weights stand that were taken; None if everything was."""
    verified: bool
    written: bool
    """False for a dry run."""
    before: Side
    after: Side
    notes: tuple[str, ...]
    """What cannot be done with the target any more, or was asked for without effect."""


def side_of(checkpoint: Checkpoint) -> Side:
    """Return the side of a file that is there."""
    return Side(checkpoint.format, checkpoint.form, checkpoint.file_nbytes, summarise(checkpoint))


def planned_torch(form: str, plan: TorchPlan, location: str | None, weights: list[str]) -> Side:
    """Return the side of a torch zip that is not written yet; ``weights`` are the names of the weights in it."""
    found = [LazyTensor(name or "", _tagged(info, location)) for name, info in plan.expected]
    return Side("torch_zip", form, plan.nbytes, count(found, weights))


def planned_safetensors(infos: dict[str, TensorInfo], nbytes: int) -> Side:
    """Return the side of a safetensors file of ``nbytes`` that is not written yet: it keeps no devices and no ties."""
    found = [LazyTensor(name, info._replace(location="cpu")) for name, info in infos.items()]
    numel, packed = sum(info.numel for info in infos.values()), sum(info.nbytes for info in infos.values())
    summary = count(found, list(infos))._replace(tied=0, numel=numel, nbytes=packed)
    return Side("safetensors", "state_dict" if infos else "data", nbytes, summary)


def _tagged(info: TensorInfo, location: str | None) -> TensorInfo:
    if location is None or (info.storage is None and not info.parts):  # a meta tensor has no storage to be tagged
        return info
    return info._replace(location=location)
