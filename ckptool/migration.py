"""
Migrate: plan → write → verify → publish.

The plan says what goes into the new file and costs no reading of tensors. Writing copies bytes in bounded pieces;
verifying reads the new file back; only then does it get its name. The source is opened for reading alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

from ckptool import modules, to_safetensors, to_torch, transforms
from ckptool.casting import Cast, Casting
from ckptool.checkpoint import Checkpoint, StateDict
from ckptool.errors import CkptoolError, MalformedFile, MigrationRefused, OutputFailed
from ckptool.formats import open_checkpoint
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.outputs import Output
from ckptool.payloads import Payload
from ckptool.to_safetensors import SafetensorsPlan
from ckptool.to_torch import TorchPlan
from ckptool.transfer import check_others
from ckptool.weights import NameChanges, Weights, Which, choose, prepare

TargetForm: TypeAlias = Literal["same", "state_dict", "safetensors", "model"]

_DEVICE = re.compile(r"\s*([A-Za-z]*):?\s*(\d{0,9})\s*")
_LAST_DEVICE = 127  # torch counts them in eight bits
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


class Changes(NamedTuple):
    """What is to be different in the target. Everything else stays as it is."""

    form: TargetForm | None = None
    """None goes by the target's suffix."""
    to: str | None = None
    """The device tag that every storage gets."""
    key: str | None = None
    """Which state dict to take, by its path in the source."""
    weights: Which = "auto"
    strip_module: bool = False
    strip_wrappers: bool = False
    rules: tuple[transforms.Rule, ...] = ()
    """Changes of names, applied in order after the wrappers are stripped."""
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    """Globs: which names of the weights to take, as they were before."""
    drop: tuple[str, ...] = ()
    """Paths or roles (``optimizer``, ``ema``) to leave out of form ``same``."""
    dtype: str | None = None
    """Floating type that the weights are cast to."""
    keep_dtype: tuple[str, ...] = ()
    saturate: bool = False
    expand_tied: bool = False
    drop_unsupported: bool = False
    model: str | None = None
    """``package.module:Class`` to build for form ``model``; imported because the caller named it."""
    model_arguments: Mapping[str, object] = {}


class _Job(NamedTuple):
    """One migration, planned."""

    form: TargetForm
    target: str
    plan: TorchPlan | SafetensorsPlan
    weights: Weights | None
    """None where everything is taken."""
    casting: Casting | None


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
    dtype: str | None = None,
    keep_dtype: Sequence[str] = (),
    saturate: bool = False,
    expand_tied: bool = False,
    drop_unsupported: bool = False,
    model: str | None = None,
    model_arguments: Mapping[str, object] | None = None,
    force: bool = False,
    verify: bool = True,
    dry_run: bool = False,
    progress: Callable[[int, int], None] | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> MigrationReport:
    """
    Write a checkpoint again: in another form, for another device, under other names. Nothing in it runs.

    ``dst`` is by default a name beside the source. ``form`` is ``state_dict`` or ``safetensors`` for the weights alone,
    ``model`` for a whole model, ``same`` for everything the source holds; by default it goes by the suffix of ``dst``.
    What else can be changed is described at ``Changes``. ``progress`` is called with the bytes written and to come.
    Memory stays bounded whatever the size, and torch is not imported, unless values are cast or a model is built.

    Guarantees: ``src`` is never changed; ``dst`` is never half written, and appears only after what was written was
    read back and compared (``verify=False`` leaves that out); nothing is overwritten without ``force``.

    Raises:
        MigrationRefused: It would lose or confuse something; the hint names the option that allows it.
        OutputExists: ``dst`` exists.
        OutputFailed: It could not be written, or is not what was to be written.
        CkptoolError: ``src`` cannot be read, or is damaged.
    """
    changes = Changes(
        form=form,
        to=to,
        key=key,
        weights=weights,
        strip_module=strip_module,
        strip_wrappers=strip_wrappers,
        rules=tuple(rules),
        include=tuple(include),
        exclude=tuple(exclude),
        drop=tuple(drop),
        dtype=dtype,
        keep_dtype=tuple(keep_dtype),
        saturate=saturate,
        expand_tied=expand_tied,
        drop_unsupported=drop_unsupported,
        model=model,
        model_arguments=model_arguments or {},
    )
    target = None if dst is None else os.fspath(dst)
    if to is not None:
        _check_device(to)
    with open_checkpoint(os.fspath(src), limits=limits) as checkpoint:
        return _carry_out(checkpoint, target, changes, force=force, verify=verify, dry_run=dry_run, progress=progress)


def _carry_out(
    checkpoint: Checkpoint,
    dst: str | None,
    changes: Changes,
    *,
    force: bool,
    verify: bool,
    dry_run: bool,
    progress: Callable[[int, int], None] | None,
) -> MigrationReport:
    try:
        if checkpoint.damage:
            raise MalformedFile(checkpoint.damage, kind="damaged-record", hint="Download the file again.")
        job = _plan(checkpoint, dst, changes)
        report = _report(checkpoint, job, changes)
        if dry_run:
            return report
        checkpoint.release_tree()  # it is in the plan by now, as bytes
        with Output(job.target, force=force, progress=progress) as output:
            nbytes = _write(checkpoint, job, changes, output, verify=verify)
            casts = job.casting.casts if job.casting else ()
            return report._replace(verified=verify, written=True, nbytes=nbytes, casts=casts)
    except CkptoolError as error:
        error.path = error.path or checkpoint.path
        raise


def _plan(checkpoint: Checkpoint, dst: str | None, changes: Changes) -> _Job:
    form = changes.form or _form_of(dst, checkpoint, changes)
    if form == "same" and checkpoint.format == "safetensors":
        form = "safetensors"
    target = dst if dst is not None else _default_name(checkpoint.path, form, changes.to)
    wrappers: tuple[transforms.Rule, ...] = ()
    peel: frozenset[str] = frozenset()
    if changes.strip_wrappers:
        wrappers, peel = (transforms.strip_wrappers,), frozenset(modules.WRAPPERS)
    elif changes.strip_module:
        wrappers, peel = (transforms.strip_module,), modules.DATA_PARALLEL
    names = NameChanges((*wrappers, *changes.rules), changes.include, changes.exclude)
    root = _archive_root(target)
    if form == "same" or (form == "model" and changes.model is None):
        if changes.dtype is not None:
            raise MigrationRefused(
                "values are cast in weights alone",
                kind="cast-needs-weights",
                hint="Add --form state_dict or safetensors.",
            )
        tree = _model_in(checkpoint, changes) if form == "model" else None
        plan = to_torch.plan_same(checkpoint, names, changes.to, root, peel=peel, drop=changes.drop, model=tree)
        return _Job(form, target, plan, None, None)
    weights = prepare(checkpoint, choose(checkpoint, changes.key, changes.weights), names)
    casting = Casting(changes.dtype, changes.keep_dtype, saturate=changes.saturate) if changes.dtype else None
    if casting is not None:
        weights = casting.apply(weights)
    if form == "safetensors":
        options = {"expand_tied": changes.expand_tied, "drop_unsupported": changes.drop_unsupported}
        return _Job(form, target, to_safetensors.plan(weights, **options), weights, casting)
    return _Job(form, target, to_torch.plan_weights(checkpoint, weights, changes.to, root), weights, casting)


def _write(checkpoint: Checkpoint, job: _Job, changes: Changes, output: Output, *, verify: bool) -> int:
    output.reserve(job.plan.nbytes)
    path = output.reading_path()
    check: Callable[[], None]
    copied: tuple[Payload, ...] = ()
    if job.form == "model" and job.weights is not None and changes.model is not None:
        from ckptool import torch_bridge

        torch_bridge.save_model(changes.model, changes.model_arguments, job.weights.tensors, path)
        check = partial(to_torch.verify_model, path, job.weights)
    elif isinstance(job.plan, TorchPlan):
        check = partial(job.plan.verify, path, job.plan.write(output, checksums=verify))
        copied = job.plan.storages
    else:
        check = partial(job.plan.verify, path, job.plan.write(output, checksums=verify))
        copied = tuple(payload for _, payload in job.plan.tensors)
    if verify and job.weights is not None:
        taken = job.weights.state_dict
        check_others([taken[name] for name in job.weights.old_names.values() if name in taken], copied)
    checkpoint.check_unchanged()
    if verify:
        _verify(checkpoint, output, check)
    nbytes = output.nbytes
    output.publish()
    return nbytes


def _verify(checkpoint: Checkpoint, output: Output, check: Callable[[], None]) -> None:
    try:
        check()
    except CkptoolError as error:
        checkpoint.check_unchanged()  # a model is held against the source itself
        what = error.message if isinstance(error, OutputFailed) else f"cannot be read back: {error.message}"
        raise OutputFailed(
            what,
            kind="verification-failed",
            path=output.path,
            hint="Try again, or write to another disk: this one, or the memory, does not keep what it is given.",
        ) from error
    checkpoint.check_unchanged()


def _model_in(checkpoint: Checkpoint, changes: Changes) -> StateDict:
    """Return the whole model that a checkpoint holds."""
    chosen = choose(checkpoint, changes.key, changes.weights)
    if chosen.class_name is None:
        raise MigrationRefused(
            f"{checkpoint.format} holds weights and no model",
            kind="no-model",
            hint="Name the class to build with --model package.module:Class.",
        )
    return chosen


def _report(checkpoint: Checkpoint, job: _Job, changes: Changes) -> MigrationReport:
    plan = job.plan
    dropped = list(plan.dropped)
    key = None if job.weights is None else job.weights.state_dict.key
    if key:  # what stands beside the weights stays behind
        beside = [*checkpoint.tensors, *(path for path, _ in checkpoint.extras)]
        dropped += [path for path in beside if path and not path.startswith(f"{key}.")]
    return MigrationReport(
        source=checkpoint.path,
        target=job.target,
        form=job.form,
        source_format=checkpoint.format,
        tensors=plan.tensor_count,
        nbytes=plan.nbytes,
        retagged=plan.retagged,
        location=changes.to,
        renamed=plan.renamed,
        dropped=tuple(dropped),
        casts=job.casting.casts if job.casting else (),
        tied=plan.tied,
        loses_training=_loses_training(checkpoint, job, dropped),
        weights_key=key,
        verified=False,
        written=False,
    )


def _loses_training(checkpoint: Checkpoint, job: _Job, dropped: list[str]) -> bool:
    optimizers = [one.key for one in checkpoint.state_dicts if one.role == "optimizer"]
    return bool(optimizers) and (job.weights is not None or any(key in dropped for key in optimizers))


def _form_of(dst: str | None, checkpoint: Checkpoint, changes: Changes) -> TargetForm:
    suffix = os.path.splitext(dst)[1].lower() if dst else ""  # noqa: PTH122 - a name, not a path
    if changes.model is not None:
        return "model"
    if suffix == ".safetensors" or (dst is None and checkpoint.format == "safetensors"):
        return "safetensors"
    if changes.dtype is not None and checkpoint.form == "state_dict":
        return "state_dict"
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
    kind = f".{form}" if form in ("state_dict", "model") else "" if device else ".migrated"
    return f"{stem}{kind}{device}{suffix if suffix in ('.pth', '.pt', '.bin', '.ckpt', '.th', '.pkl') else '.pth'}"


def _archive_root(target: str) -> str:
    """Return the folder that everything in a zip stands in: torch takes the file's name for it, where it is ASCII."""
    stem = os.path.splitext(os.path.basename(target))[0]  # noqa: PTH119, PTH122
    return stem if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*", stem) else "archive"


def _check_device(device: str) -> None:
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
