"""Where the result of a migration goes, under which name, in which form, and for which device: by what was asked."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Literal, TypeAlias

from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.errors import MigrationRefused
from ckptool.sources.paths import TORCH_SUFFIXES

TargetForm: TypeAlias = Literal["same", "state_dict", "safetensors", "model"]

_DEVICE = re.compile(r"\s*([A-Za-z]*):?\s*(\d{0,9})\s*")
_LAST_DEVICE = 127  # torch counts them in eight bits
_DEVICE_KINDS = ("cpu", "cuda", "mps", "meta", "xpu", "hpu", "npu", "xla", "mtia", "mlu", "ipu", "privateuseone")


def form_of(dst: str | None, checkpoint: Checkpoint, *, builds: bool, picks: bool) -> TargetForm:
    """
    Return the form that is meant where none is named: by the target's suffix, else by what else was asked.

    ``builds`` says that a model is to be built, ``picks`` that certain weights were picked.
    """
    suffix = "" if dst is None or is_folder(dst) else os.path.splitext(dst)[1].lower()  # noqa: PTH122 - a name
    if builds:
        return "model"
    if suffix == ".safetensors" or (not suffix and checkpoint.traits.is_plain):
        return "safetensors"
    if picks or (suffix and not checkpoint.traits.has_tree):
        return "state_dict"
    return "same"


def place_of(dst: str | None, checkpoint: Checkpoint, form: TargetForm, marks: Sequence[str]) -> str:
    """
    Return the path of the result: ``dst``, or in a folder, or beside the source.

    In a folder it has the source's own name. Beside the source, the name says what was done, by the form and the
    ``marks``: ``model.cpu.pth``.
    """
    if dst is not None and not is_folder(dst):
        return dst
    stem, suffix = os.path.splitext(checkpoint.path)  # noqa: PTH122
    if checkpoint.shards:  # model.safetensors.index.json
        stem, suffix = os.path.splitext(stem.removesuffix(".index"))  # noqa: PTH122
    if checkpoint.member:
        inner, suffix = os.path.splitext(checkpoint.member)  # noqa: PTH122
        stem = f"{stem}.{os.path.basename(inner)}"  # noqa: PTH119
    suffix = ".safetensors" if form == "safetensors" else suffix if suffix.lower() in TORCH_SUFFIXES else ".pth"
    if dst is not None:
        return os.path.join(dst, os.path.basename(stem) + suffix)  # noqa: PTH118, PTH119
    done: list[str] = [form] if form in ("state_dict", "model") else []
    done += [mark.replace(":", "") for mark in marks]
    place = ".".join((stem, *done)) + suffix
    return place if place != checkpoint.path else f"{stem}.migrated{suffix}"


def is_folder(path: str) -> bool:
    """Say whether a target is a folder to write into: one that is there, or a path with a separator at its end."""
    return path.endswith((os.sep, os.altsep or os.sep)) or os.path.isdir(path)  # noqa: PTH112


def archive_root(target: str) -> str:
    """Return the folder that everything in a zip stands in: torch takes the file's name for it, where it is ASCII."""
    stem = os.path.splitext(os.path.basename(target))[0]  # noqa: PTH119, PTH122
    return stem if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*", stem) else "archive"


def check_device(device: str) -> None:
    """Raise MigrationRefused unless ``device`` is what torch takes for one; the hint says what may have been meant."""
    match = _DEVICE.fullmatch(device)
    kind, number = (match[1].lower(), match[2]) if match else ("", "")
    kind = "cuda" if kind == "gpu" else kind
    meant = f"{kind}:{int(number)}" if number and kind not in ("cpu", "meta") else kind
    known = kind in _DEVICE_KINDS and int(number or 0) <= _LAST_DEVICE
    if known and meant == device:
        return
    raise MigrationRefused(
        f"not a device: {device!r}",
        kind="not-a-device",
        hint=f"Did you mean {meant!r}?" if known else "Devices are written like 'cpu' or 'cuda:0'.",
    )
