"""
Migrate: plan → write → verify → publish.

The plan says what goes into the new file and costs no reading of tensors. Writing copies bytes in bounded pieces;
verifying reads the new file back; only then does it get its name. The source is opened for reading alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

from ckptool import modules, to_safetensors, to_torch, transforms
from ckptool.checkpoint import Checkpoint
from ckptool.errors import CkptoolError, MigrationRefused
from ckptool.formats import open_checkpoint
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.outputs import Output
from ckptool.to_safetensors import SafetensorsPlan
from ckptool.to_torch import TorchPlan
from ckptool.weights import NameChanges, Which, choose, prepare

TargetForm: TypeAlias = Literal["same", "state_dict", "safetensors"]

_DEVICE = re.compile(r"\s*([A-Za-z]*):?\s*(\d*)\s*")
_DEVICE_KINDS = ("cpu", "cuda", "mps", "meta", "xpu", "hpu", "npu", "xla", "mtia", "mlu", "ipu", "privateuseone")


class MigrationReport(NamedTuple):
    """What was done, or would be."""

    source: str
    target: str
    form: TargetForm
    source_format: str
    tensors: int
    nbytes: int
    """Size of what was written, in bytes."""
    retagged: dict[str, int]
    """Storages and devices that got the new device tag, by the tag that they had."""
    location: str | None
    renamed: tuple[tuple[str, str], ...]
    dropped: tuple[str, ...]
    """Entries that the source has and the target has not."""
    tied: dict[str, str]
    """Names that a safetensors file leaves out, and the name that stands for each."""
    weights_key: str | None
    """Where in the source the weights stand that were taken; None if everything was."""
    verified: bool
    written: bool
    """False for a dry run."""


def migrate(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str] | None = None,
    *,
    form: TargetForm | None = None,
    to: str | None = None,
    key: str | None = None,
    weights: Which = "auto",
    strip_module: bool = False,
    strip_wrappers: bool = False,
    rules: Sequence[transforms.Rule] = (),
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    drop: Sequence[str] = (),
    expand_tied: bool = False,
    drop_unsupported: bool = False,
    force: bool = False,
    verify: bool = True,
    dry_run: bool = False,
    limits: Limits = DEFAULT_LIMITS,
) -> MigrationReport:
    """
    Write a checkpoint again, in another form, for another device, under other names. Nothing in it runs.

    ``form`` is ``state_dict`` or ``safetensors`` for the weights alone, ``same`` for everything the source holds; by
    default it goes by the suffix of ``dst``. ``to`` is the device tag that every storage gets. ``dst`` is by default a
    name beside the source. Memory stays bounded whatever the size, and torch is not imported.

    Guarantees: ``src`` is never changed; ``dst`` is never half written, and appears only after what was written was
    read back and compared (``verify=False`` leaves that out); nothing is overwritten without ``force``.

    Raises:
        MigrationRefused: It would lose or confuse something; the hint names the option that allows it.
        OutputExists: ``dst`` exists.
        OutputFailed: It could not be written, or is not what was to be written.
        CkptoolError: ``src`` cannot be read, or is damaged.
    """
    source = os.fspath(src)
    location = None if to is None else _checked_device(to)
    wrappers = (transforms.strip_wrappers,) if strip_wrappers else (transforms.strip_module,) if strip_module else ()
    changes = NameChanges((*wrappers, *rules), tuple(include), tuple(exclude))
    peel = frozenset(modules.WRAPPERS) if strip_wrappers else modules.DATA_PARALLEL if strip_module else frozenset()
    with open_checkpoint(source, limits=limits) as checkpoint:
        try:
            chosen = form or _form_of(None if dst is None else os.fspath(dst), checkpoint)
            target = os.fspath(dst) if dst is not None else _default_name(source, chosen, location)
            weights_key = None
            plan: TorchPlan | SafetensorsPlan
            if chosen == "same":
                if checkpoint.format == "safetensors":
                    chosen = "safetensors"
                else:
                    plan = to_torch.plan_same(
                        checkpoint, changes, location, _archive_root(target), peel=peel, drop=tuple(drop)
                    )
            if chosen != "same":
                taken = prepare(checkpoint, choose(checkpoint, key, weights), changes)
                weights_key = taken.state_dict.key
                if chosen == "safetensors":
                    plan = to_safetensors.plan(taken, expand_tied=expand_tied, drop_unsupported=drop_unsupported)
                else:
                    plan = to_torch.plan_weights(checkpoint, taken, location, _archive_root(target))
            report = _report(checkpoint, plan, chosen, target, location, weights_key)
            if dry_run:
                return report
            with Output(target, force=force) as output:
                _write(checkpoint, plan, output, verify=verify)
                report = report._replace(verified=verify, written=True, nbytes=output.position)
        except CkptoolError as error:
            error.path = error.path or source
            raise
    return report


def _write(checkpoint: Checkpoint, plan: TorchPlan | SafetensorsPlan, output: Output, *, verify: bool) -> None:
    output.reserve(plan.nbytes)
    path = output.reading_path()
    if isinstance(plan, TorchPlan):
        members = plan.write(output)
        checkpoint.check_unchanged()
        if verify:
            plan.verify(path, members)
    else:
        checksums = plan.write(output)
        checkpoint.check_unchanged()
        if verify:
            plan.verify(path, checksums)
    output.publish()


def _report(
    checkpoint: Checkpoint,
    plan: TorchPlan | SafetensorsPlan,
    form: TargetForm,
    target: str,
    location: str | None,
    weights_key: str | None,
) -> MigrationReport:
    torch_plan = plan if isinstance(plan, TorchPlan) else None
    dropped = list(plan.dropped)
    if weights_key is not None:  # what stands beside the weights stays behind
        head = f"{weights_key}." if weights_key else ""
        inside = {head + name for name in (checkpoint.weights or {})} | {
            name for name in checkpoint.tensors if weights_key and name.startswith(head)
        }
        dropped += [name for name in checkpoint.tensors if weights_key and name not in inside]
        dropped += [path for path, _ in checkpoint.extras if path and weights_key and not path.startswith(head)]
    return MigrationReport(
        checkpoint.path,
        target,
        form,
        checkpoint.format,
        len(plan.expected) if isinstance(plan, TorchPlan) else len(plan.tensors),
        plan.nbytes,
        torch_plan.retagged if torch_plan else {},
        location,
        plan.renamed,
        tuple(dropped),
        {} if isinstance(plan, TorchPlan) else plan.tied,
        weights_key,
        verified=False,
        written=False,
    )


def _form_of(dst: str | None, checkpoint: Checkpoint) -> TargetForm:
    suffix = os.path.splitext(dst)[1].lower() if dst else ""  # noqa: PTH122 - a name, not a path
    if suffix == ".safetensors":
        return "safetensors"
    if checkpoint.format in ("safetensors", "torchscript", "pt2") and suffix:
        return "state_dict"
    return "same"


def _default_name(source: str, form: TargetForm, location: str | None) -> str:
    """Return a name beside the source that says what was done: ``model.cpu.pth``."""
    path = source.partition("::")[0]
    stem, suffix = os.path.splitext(path)  # noqa: PTH122
    if form == "safetensors":
        return f"{stem}.safetensors"
    device = f".{location.replace(':', '')}" if location else ""
    kind = ".state_dict" if form == "state_dict" else "" if device else ".migrated"
    return f"{stem}{kind}{device}{suffix if suffix in ('.pth', '.pt', '.bin', '.ckpt', '.th', '.pkl') else '.pth'}"


def _archive_root(target: str) -> str:
    """Return the folder that everything in a zip stands in: torch takes the file's name for it, where it is ASCII."""
    stem = os.path.splitext(os.path.basename(target))[0]  # noqa: PTH119, PTH122
    return stem if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*", stem) else "archive"


def _checked_device(device: str) -> str:
    match = _DEVICE.fullmatch(device)
    kind, number = (match[1].lower(), match[2]) if match else ("", "")
    kind = "cuda" if kind == "gpu" else kind
    meant = f"{kind}:{number}" if number and kind not in ("cpu", "meta") else kind
    if kind in _DEVICE_KINDS and meant == device:
        return device
    raise MigrationRefused(
        f"not a device: {device!r}",
        kind="not-a-device",
        hint=f"Did you mean {meant!r}?" if kind in _DEVICE_KINDS else "Devices are written like 'cpu' or 'cuda:0'.",
    )
