"""What a migration did, or would do: one record, with the file before and the file after beside each other."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.summary import count, prefixes_of
from ckptool.migration.casting import Cast
from ckptool.migration.targets import TargetForm
from ckptool.migration.torch_plan import TorchPlan
from ckptool.sources.cancellable import cancellation_of
from ckptool.tensors.tensor import TensorInfo


class Side(NamedTuple):
    """One of the two files, in the words of ``inspect``."""

    format: str
    form: str
    file_nbytes: int
    tensors: int
    tied: int
    numel: int
    devices: dict[str, int]
    dtypes: dict[str, int]
    prefixes: tuple[str, ...]


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
    read_back_by: tuple[str, ...]
    """What read the result back: ``ckptool`` and, for safetensors with numpy or torch here, ``safetensors …``."""
    written: bool
    """False for a dry run."""
    before: Side
    after: Side
    notes: tuple[str, ...]
    """What cannot be done with the target any more, or was asked for without effect."""


def side_of(checkpoint: Checkpoint) -> Side:
    """Return the side of a file that is there."""
    cancellation = cancellation_of(checkpoint.source)
    counts = count([tensor.info for tensor in checkpoint.tensors.values()], cancellation=cancellation)
    prefixes = prefixes_of(checkpoint.weights or ())
    return Side(checkpoint.format, checkpoint.form, checkpoint.file_nbytes, *counts, prefixes)


def planned_torch(form: str, plan: TorchPlan, nbytes: int, location: str | None, weights: Collection[str]) -> Side:
    """Return the side of a torch zip that is not written yet; ``weights`` are the names of the weights in it."""
    counts = count([info for _, info in plan.expected], location)
    return Side("torch_zip", form, nbytes, *counts, prefixes_of(weights))


def planned_safetensors(infos: dict[str, TensorInfo], nbytes: int) -> Side:
    """Return the side of a safetensors file that is not written yet: it keeps no devices and no ties."""
    counts = count(list(infos.values()), "cpu")
    numel = sum(info.numel for info in infos.values())
    form = "state_dict" if infos else "data"
    return Side("safetensors", form, nbytes, *counts._replace(tied=0, numel=numel), prefixes_of(infos))
