"""
What was asked for → the form to write, the path to write to, and the plan of the file.

A plan reads no tensors. What would lose or confuse something is refused here, before anything is written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from ckptool.checkpoints.checkpoint import Checkpoint, StateDict
from ckptool.checkpoints.weights import NameChanges, Weights, choose, prepare
from ckptool.errors import MigrationRefused
from ckptool.migration import safetensors_plan, selection, torch_plan
from ckptool.migration.casting import Casting
from ckptool.migration.changes import Changes, TargetForm
from ckptool.migration.device_tags import DeviceTags, label
from ckptool.migration.safetensors_plan import SafetensorsPlan
from ckptool.migration.torch_plan import TorchPlan
from ckptool.names import renaming
from ckptool.names.filter import Filter
from ckptool.names.wrappers import COMPONENTS, DATA_PARALLEL

_DEVICE = re.compile(r"\s*([A-Za-z]*):?\s*(\d{0,9})\s*")
_LAST_DEVICE = 127  # torch counts them in eight bits
_DEVICE_KINDS = ("cpu", "cuda", "mps", "meta", "xpu", "hpu", "npu", "xla", "mtia", "mlu", "ipu", "privateuseone")
_SUFFIXES = (".pth", ".pt", ".bin", ".ckpt", ".th", ".pkl")
"""File suffixes of torch checkpoints."""


class Plan(NamedTuple):
    """One migration, ready to be carried out."""

    form: TargetForm
    target: str
    file: TorchPlan | SafetensorsPlan
    """What the new file holds."""
    location: DeviceTags | None
    """The device tags that what is in it gets; None leaves them as they are."""
    names: NameChanges
    weights: Weights | None = None
    """None where everything is taken."""
    casting: Casting | None = None

    @property
    def builds_model(self) -> bool:
        """Whether torch builds a model and saves it."""
        return self.form == "model" and self.weights is not None


def make_plan(checkpoint: Checkpoint, dst: str | None, changes: Changes) -> Plan:
    """
    Return the plan of a migration.

    Raises:
        WeightsNotFound: No state dict is the one that was asked for, or several could be.
        MigrationRefused: It would lose or confuse something.
    """
    _refuse_archive(checkpoint)
    form = _form(dst, checkpoint, changes)
    marks = [mark for mark in (changes.dtype, label(changes.to) if form != "safetensors" else None) if mark]
    target = _target_path(dst, checkpoint, form, marks)
    names, wrappers = _name_changes(changes)
    casting = Casting(changes.dtype, tuple(changes.keep_dtype), saturate=changes.saturate) if changes.dtype else None
    root = _archive_root(target)
    if form == "same" or (form == "model" and changes.model is None):
        model = _model_in(checkpoint, changes) if form == "model" else None
        drop = tuple(changes.drop)
        whole = torch_plan.plan_same(
            checkpoint, names, changes.to, root, wrappers=wrappers, drop=drop, model=model, casting=casting
        )
        return Plan(form, target, whole, changes.to, names, casting=casting)
    weights = prepare(checkpoint, choose(checkpoint, changes.key, changes.weights), names, drop=changes.drop)
    if casting is not None:
        weights = casting.apply(weights)
    if form == "safetensors":
        options = {"expand_tied": changes.expand_tied, "drop_unsupported": changes.drop_unsupported}
        packed = safetensors_plan.plan(weights, **options, cancellation=checkpoint.source.cancellation)
        return Plan(form, target, packed, changes.to, names, weights, casting)
    location: DeviceTags | None = "cpu" if form == "model" else changes.to  # a model is built there
    plain = torch_plan.plan_weights(checkpoint, weights, location, root)
    return Plan(form, target, plain, location, names, weights, casting)


def _refuse_archive(checkpoint: Checkpoint) -> None:
    if checkpoint.form == "archive":
        members = [f"{checkpoint.path}::{member.name}" for member in checkpoint.members]
        raise MigrationRefused(
            f"an archive of {len(members):,} checkpoints", kind="archive", hint=f"Pick one: {', '.join(members[:12])}"
        )


def _form(dst: str | None, checkpoint: Checkpoint, changes: Changes) -> TargetForm:
    """Return the form to write: the one that was asked for, as far as the source can take it."""
    picks = changes.key is not None or changes.weights != "auto"
    form = changes.form or _default_form(dst, checkpoint, builds=changes.model is not None, picks=picks)
    if form == "same" and checkpoint.traits.is_plain:
        form = "safetensors"
    elif form == "same" and checkpoint.shards:  # each shard is a tree of its own
        form = "state_dict"
    _refuse_contradictions(form, changes, picks=picks)
    return form


def _name_changes(changes: Changes) -> tuple[NameChanges, frozenset[str]]:
    """Return what happens to names, and the classes of wrappers that whole models are taken out of."""
    strip: tuple[renaming.Rule, ...] = ()
    classes: frozenset[str] = frozenset()
    if changes.strip_wrappers:
        strip, classes = (renaming.strip_wrappers,), frozenset(COMPONENTS)
    elif changes.strip_module:
        strip, classes = (renaming.strip_module,), frozenset(DATA_PARALLEL.classes)
    rules = (*strip, *selection.noted(changes.rename))
    return NameChanges(rules, Filter(tuple(changes.include), tuple(changes.exclude))), classes


def _default_form(dst: str | None, checkpoint: Checkpoint, *, builds: bool, picks: bool) -> TargetForm:
    """
    Return the form to write where none is named: by the target's suffix, else by the other changes.

    ``builds`` says that a model is to be built, ``picks`` that certain weights were picked.
    """
    suffix = "" if dst is None or _is_folder(dst) else os.path.splitext(dst)[1].lower()  # noqa: PTH122 - a name
    if builds:
        return "model"
    if suffix == ".safetensors" or (not suffix and checkpoint.traits.is_plain):
        return "safetensors"
    if picks or (suffix and not checkpoint.traits.has_tree):
        return "state_dict"
    return "same"


def _target_path(dst: str | None, checkpoint: Checkpoint, form: TargetForm, marks: Sequence[str]) -> str:
    """
    Return the path of the result: ``dst``, or in a folder, or beside the source.

    In a folder it has the source's own name. Beside the source, the name says what was done, by the form and the
    ``marks``: ``model.cpu.pth``.
    """
    if dst is not None and not _is_folder(dst):
        return dst
    stem, suffix = os.path.splitext(checkpoint.path)  # noqa: PTH122
    if checkpoint.shards:  # model.safetensors.index.json
        stem, suffix = os.path.splitext(stem.removesuffix(".index"))  # noqa: PTH122
    if checkpoint.member:
        inner, suffix = os.path.splitext(checkpoint.member)  # noqa: PTH122
        stem = f"{stem}.{os.path.basename(inner)}"  # noqa: PTH119
    suffix = ".safetensors" if form == "safetensors" else suffix if suffix.lower() in _SUFFIXES else ".pth"
    if dst is not None:
        return os.path.join(dst, os.path.basename(stem) + suffix)  # noqa: PTH118, PTH119
    done: list[str] = [form] if form in ("state_dict", "model") else []
    done += [mark.replace(":", "") for mark in marks]
    path = ".".join((stem, *done)) + suffix
    return path if path != checkpoint.path else f"{stem}.migrated{suffix}"


def _is_folder(path: str) -> bool:
    """Say whether a target is a folder to write into: one that is there, or a path with a separator at its end."""
    return path.endswith((os.sep, os.altsep or os.sep)) or os.path.isdir(path)  # noqa: PTH112


def _archive_root(target: str) -> str:
    """Return the folder that holds every member of a zip: torch names it after the file, where that name is ASCII."""
    stem = os.path.splitext(os.path.basename(target))[0]  # noqa: PTH119, PTH122
    return stem if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*", stem) else "archive"


def _model_in(checkpoint: Checkpoint, changes: Changes) -> StateDict:
    """Return the whole model that a checkpoint holds."""
    chosen = choose(checkpoint, changes.key, changes.weights)
    if chosen.class_name is None:
        raise MigrationRefused(
            f"{checkpoint.format} holds weights and no model",
            kind="no-model",
            hint="Name the class to build with `model='package.module:Class'`.",
        )
    return chosen


def _refuse_contradictions(form: TargetForm, changes: Changes, *, picks: bool) -> None:
    """Raise MigrationRefused where one change would make another have no effect."""
    if changes.model is not None and form != "model":
        _refuse(f"form {form!r} builds no model", "Leave out `form=`, or `model=`.")
    if changes.model is not None and changes.to not in (None, "cpu"):
        _refuse("a model that is built is saved from the CPU", "Migrate what comes out once more, with `to=`.")
    if form == "same" and picks:
        _refuse("form 'same' takes everything", "Leave out `form=` to take those weights alone.")
    if (changes.keep_dtype or changes.saturate) and changes.dtype is None:
        _refuse("nothing is cast", "Say to which type with `dtype=`.")
    if changes.model_arguments and changes.model is None:
        _refuse("no model is built", "Name its class with `model='package.module:Class'`.")


def _refuse(fact: str, hint: str) -> NoReturn:
    raise MigrationRefused(fact, kind="contradiction", hint=hint)


def check_device(device: str) -> None:
    """Raise MigrationRefused unless torch accepts ``device``; the hint says what may have been meant."""
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
