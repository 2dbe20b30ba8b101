"""
Migrate: plan → write → verify → publish.

The plan says what goes into the new file and costs no reading of tensors. Writing copies bytes in bounded pieces;
verifying reads the new file back; only then does it get its name. The source is opened for reading alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias, get_args

from ckptool.cancellation import Cancellation
from ckptool.checkpoints import modules
from ckptool.checkpoints.checkpoint import Checkpoint, StateDict
from ckptool.checkpoints.weights import NameChanges, Weights, Which, choose, prepare
from ckptool.errors import Cancelled, CkptoolError, MigrationRefused, OutputFailed
from ckptool.formats import open_checkpoint
from ckptool.limits import DEFAULT_LIMITS, Limits, check_choice, refuse_repeated
from ckptool.migration import safetensors_plan, selection, torch_plan
from ckptool.migration import verify as verify_torch
from ckptool.migration.casting import Casting
from ckptool.migration.changes import Changes, refuse_contradictions
from ckptool.migration.output import Output
from ckptool.migration.report import MigrationReport, Side, planned_safetensors, planned_torch, side_of
from ckptool.migration.safetensors_plan import SafetensorsPlan
from ckptool.migration.targets import TargetForm, archive_root, check_device, form_of, place_of
from ckptool.migration.torch_plan import TorchPlan
from ckptool.names import renaming
from ckptool.pickles.nodes import collector_paused
from ckptool.sources.cancellable import cancellation_of, check_cancelled
from ckptool.tensors.payloads import Payload, check_storages
from ckptool.tensors.reading import LazyTensor
from ckptool.torch_ops.needed import check_installed

_Told: TypeAlias = Callable[[int, int], None] | None


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
    rules: Sequence[renaming.Rule] = (),
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    drop: Sequence[str] = (),
    dtype: str | None = None,
    keep_dtype: Sequence[str] = (),
    saturate: bool = False,
    expand_tied: bool = False,
    drop_unsupported: bool = False,
    allow_empty: bool = False,
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

    ``dst`` is by default a name beside the source; in a folder, the result has the source's own name. ``form`` is
    ``state_dict`` or ``safetensors`` for the weights alone, ``model`` for a whole model, ``same`` for everything the
    source holds; by default it goes by the suffix of ``dst``. What else can be changed is described at ``Changes``.
    ``progress`` is called with the bytes written and to come.
    Memory stays bounded whatever the size, and torch is not imported, unless values are cast or a model is built.

    Guarantees: ``src`` is never changed; ``dst`` is never half written, and appears only after what was written was
    read back and compared, and is on the disk; nothing is overwritten without ``force``. ``verify=False`` neither reads
    back, nor checks the source's checksums, nor waits for the disk unless an old file is replaced.

    Raises:
        WeightsNotFound: No state dict is the one that was asked for, or several could be; the hint lists them.
        MigrationRefused: It would lose or confuse something, leave no tensor say; the hint names the option that allows
            it.
        OutputExists: ``dst`` exists.
        OutputFailed: It could not be written, or is not what was to be written.
        MissingPackage: Values are to be cast or a model built, and torch is not installed.
        Cancelled: ``limits`` have a cancellation, and it was. What stood under ``dst`` still stands there.
        CkptoolError: ``src`` cannot be read, or is damaged.
        ValueError: ``form`` or ``weights`` is none that there is.
    """
    check_choice("form", form, (None, *get_args(TargetForm)))
    check_choice("weights", weights, get_args(Which))
    changes = Changes(
        form=form,
        to=to,
        key=key,
        weights=weights,
        strip_module=strip_module,
        strip_wrappers=strip_wrappers,
        rules=selection.noted(rules),
        include=tuple(include),
        exclude=tuple(exclude),
        drop=tuple(drop),
        dtype=dtype,
        keep_dtype=tuple(keep_dtype),
        saturate=saturate,
        expand_tied=expand_tied,
        drop_unsupported=drop_unsupported,
        allow_empty=allow_empty,
        model=model,
        model_arguments=model_arguments or {},
    )
    target = None if dst is None else os.fspath(dst)
    _check_possible(changes)
    with open_checkpoint(os.fspath(src), limits=limits) as checkpoint:
        return _carry_out(
            checkpoint, target, changes, limits, force=force, verify=verify, dry_run=dry_run, progress=progress
        )


def _check_possible(changes: Changes) -> None:
    """Refuse what no source could make possible, before any is read."""
    if changes.to is not None:
        check_device(changes.to)
    if changes.dtype is not None or changes.model is not None:
        check_installed()


def _carry_out(
    checkpoint: Checkpoint,
    dst: str | None,
    changes: Changes,
    limits: Limits,
    *,
    force: bool,
    verify: bool,
    dry_run: bool,
    progress: Callable[[int, int], None] | None,
) -> MigrationReport:
    try:
        checkpoint.check_index()
        with collector_paused():
            job = _plan(checkpoint, dst, changes)
            selection.refuse_nothing(checkpoint, job.weights, job.plan, changes)
        refuse_repeated(job.plan.nbytes, checkpoint.file_nbytes, limits)
        check_cancelled(checkpoint.source)
        report = _report(checkpoint, job, changes)
        check_cancelled(checkpoint.source)
        if dry_run:
            return report
        checkpoint.release_tree()  # it is in the plan by now, as bytes
        told = _checking(progress, limits.cancellation)
        with Output(job.target, force=force, progress=told) as output:
            nbytes, readers = _write(checkpoint, job, changes, output, limits if verify else None)
            casts = job.casting.casts if job.casting else ()
            after = report.after._replace(file_nbytes=nbytes)
            report = report._replace(written=True, verified=verify, read_back_by=readers)
            return report._replace(nbytes=nbytes, casts=casts, after=after)
    except CkptoolError as error:
        error.path = error.path or checkpoint.path
        raise


def _checking(progress: _Told, cancellation: Cancellation | None) -> _Told:
    """Return what is called with every piece that was written, for what is written from memory, too."""

    def told(written: int, expected: int) -> None:
        if cancellation is not None:
            cancellation.check()
        if progress is not None:
            progress(written, expected)

    return progress if cancellation is None else told


def _plan(checkpoint: Checkpoint, dst: str | None, changes: Changes) -> _Job:
    if checkpoint.form == "archive":
        members = [f"{checkpoint.path}::{member.name}" for member in checkpoint.members]
        raise MigrationRefused(
            f"an archive of {len(members):,} checkpoints", kind="archive", hint=f"Pick one: {', '.join(members[:12])}"
        )
    picks = changes.key is not None or changes.weights != "auto"
    form = changes.form or form_of(dst, checkpoint, builds=changes.model is not None, picks=picks)
    if form == "same" and checkpoint.format == "safetensors":
        form = "safetensors"
    elif form == "same" and checkpoint.shards:  # each is a tree of its own
        form = "state_dict"
    refuse_contradictions(form, changes, picks=picks)
    marks = [mark for mark in (changes.dtype, changes.to if form != "safetensors" else None) if mark]
    target = place_of(dst, checkpoint, form, marks)
    wrappers: tuple[renaming.Rule, ...] = ()
    peel: frozenset[str] = frozenset()
    if changes.strip_wrappers:
        wrappers, peel = (renaming.strip_wrappers,), frozenset(modules.WRAPPERS)
    elif changes.strip_module:
        wrappers, peel = (renaming.strip_module,), modules.DATA_PARALLEL
    names = NameChanges((*wrappers, *changes.rules), changes.include, changes.exclude)
    casting = Casting(changes.dtype, changes.keep_dtype, saturate=changes.saturate) if changes.dtype else None
    root = archive_root(target)
    if form == "same" or (form == "model" and changes.model is None):
        tree = _model_in(checkpoint, changes) if form == "model" else None
        whole = torch_plan.plan_same(
            checkpoint, names, changes.to, root, peel=peel, drop=changes.drop, model=tree, casting=casting
        )
        return _Job(form, target, whole, None, casting)
    chosen = choose(checkpoint, changes.key, changes.weights)
    weights = prepare(checkpoint, chosen, names, drop=changes.drop)
    if casting is not None:
        weights = casting.apply(weights)
    if form == "safetensors":
        options = {"expand_tied": changes.expand_tied, "drop_unsupported": changes.drop_unsupported}
        planned = safetensors_plan.plan(weights, **options, cancellation=cancellation_of(checkpoint.source))
        return _Job(form, target, planned, weights, casting)
    location = "cpu" if form == "model" else changes.to  # a model is built there
    return _Job(form, target, torch_plan.plan_weights(checkpoint, weights, location, root), weights, casting)


def _write(
    checkpoint: Checkpoint, job: _Job, changes: Changes, output: Output, verify: Limits | None
) -> tuple[int, tuple[str, ...]]:
    """Write the file, read it back within the limits of ``verify``; return its size in bytes, and what read it."""
    output.reserve(job.plan.nbytes)
    path = output.reading_path()
    check: Callable[[Limits], str | None]
    copied: tuple[Payload, ...] = ()
    if job.form == "model" and job.weights is not None and changes.model is not None:
        from ckptool.torch_ops import models as torch_models

        torch_models.save_model(changes.model, changes.model_arguments, job.weights.tensors, path)
        check = partial(verify_torch.verify_model, path, job.weights)
    elif isinstance(job.plan, TorchPlan):
        check = partial(job.plan.verify, path, job.plan.write(output, checksums=verify is not None))
        copied = job.plan.storages
    else:
        check = partial(job.plan.verify, path, job.plan.write(output, checksums=verify is not None))
        copied = tuple(payload for _, payload in job.plan.tensors)
    if verify is not None:
        check_storages(_read_apart(job), copied)
    checkpoint.check_unchanged()
    readers: tuple[str, ...] = ()
    if verify is not None:
        output.sync()
        other = _verify(checkpoint, output, partial(check, verify))
        readers = ("ckptool", other) if other else ("ckptool",)
    nbytes = output.nbytes
    output.publish()
    return nbytes, readers


def _read_apart(job: _Job) -> list[LazyTensor]:
    """Return the tensors of the source that may have been read otherwise than from end to end."""
    if job.weights is None:
        return job.casting.tensors if job.casting else []
    taken = job.weights.state_dict
    return [taken[name] for name in job.weights.old_names.values() if name in taken]


def _verify(checkpoint: Checkpoint, output: Output, check: Callable[[], str | None]) -> str | None:
    """Read the file back, and return which library read it beside our own reader."""
    try:
        other = check()
    except Cancelled:
        raise
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
    return other


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
    key = None if job.weights is None else job.weights.state_dict.key
    dropped = [f"{key}.{name}" if key else name for name in plan.dropped]
    if key:  # what stands beside the weights stays behind
        beside = [*checkpoint.tensors, *(path for path, _ in checkpoint.extras)]
        dropped += [path for path in beside if path and not path.startswith(f"{key}.")]
    loses_training = _loses_training(checkpoint, job, dropped)
    nbytes = plan.nbytes
    return MigrationReport(
        source=f"{checkpoint.path}::{checkpoint.member}" if checkpoint.member else checkpoint.path,
        target=job.target,
        form=job.form,
        source_format=checkpoint.format,
        tensors=plan.tensor_count,
        nbytes=nbytes,
        retagged=plan.retagged,
        location="cpu" if job.form == "model" and job.weights is not None else changes.to,
        renamed=plan.renamed,
        dropped=tuple(dropped),
        casts=job.casting.casts if job.casting else (),
        tied=plan.tied,
        loses_training=loses_training,
        weights_key=key,
        verified=False,
        read_back_by=(),
        written=False,
        before=side_of(checkpoint),
        after=_after(checkpoint, job, changes, nbytes),
        notes=tuple(_notes(checkpoint, job, changes, loses_training=loses_training)),
    )


def _after(checkpoint: Checkpoint, job: _Job, changes: Changes, nbytes: int) -> Side:
    plan, weights = job.plan, job.weights
    if isinstance(plan, SafetensorsPlan):
        assert weights is not None  # noqa: S101 - it holds nothing else
        return planned_safetensors({name: weights.tensors[name].info for name, _ in plan.tensors}, nbytes)
    if weights is not None:
        location = "cpu" if job.form == "model" else changes.to
        plain = "state_dict" if len(plan.expected) == len(weights.tensors) else "checkpoint"
        return planned_torch("model" if job.form == "model" else plain, plan, nbytes, location, weights.tensors)
    chosen, new = checkpoint.weights, dict(plan.renamed)
    head = f"{chosen.key}." if chosen is not None and chosen.key else ""
    names = [new.get(head + name, head + name)[len(head) :] for name in chosen or ()]
    return planned_torch("model" if job.form == "model" else checkpoint.form, plan, nbytes, changes.to, names)


def _notes(checkpoint: Checkpoint, job: _Job, changes: Changes, *, loses_training: bool) -> Iterator[str]:
    if loses_training:
        yield "training cannot be resumed from it: the optimizer's state is left out"
    if job.weights is not None and job.form != "model":
        if checkpoint.format in ("torchscript", "pt2"):
            yield f"it holds weights alone: the program in the {checkpoint.format} file is left out"
        elif job.weights.state_dict.class_name is not None:
            yield f"it holds weights alone: to load them, build {job.weights.state_dict.class_name} first"
    if checkpoint.member:
        yield "the other files of the archive are left out"
    if checkpoint.class_sources:
        count = len(checkpoint.class_sources)
        yield f"the source of {count:,} class{'es' * (count > 1)} is left out: inspect --source prints it"
    if job.form == "safetensors" and changes.to is not None:
        yield "safetensors keeps no device tags: there is none to set"
    if (changes.strip_module or changes.strip_wrappers) and not job.plan.renamed:
        yield "no name begins with what a wrapper adds: nothing was stripped"
    yield from selection.notes(checkpoint, job.weights, changes)


def _loses_training(checkpoint: Checkpoint, job: _Job, dropped: list[str]) -> bool:
    optimizers = [one.key for one in checkpoint.state_dicts if one.role == "optimizer"]
    return bool(optimizers) and (job.weights is not None or any(key in dropped for key in optimizers))
