"""
``migrate``: plan, write, verify, publish.

The plan states what goes into the new file, and reads no tensors. Writing copies bytes in bounded pieces; verifying
reads the new file back; only then does the file get its name. The source is only opened for reading.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ckptool.arguments import Unpack, checked
from ckptool.cancellation import Cancellation, check_cancelled
from ckptool.errors import MigrationRefused, about
from ckptool.formats import open_checkpoint
from ckptool.limits import DEFAULT_LIMITS, Limits, refuse_repeated
from ckptool.migration import report, selection
from ckptool.migration.changes import Changes, MigrateOptions, changes_of
from ckptool.migration.in_place import as_clone, migrate_in_place
from ckptool.migration.make_plan import Merge, make_plan
from ckptool.migration.output import mode_of, open_sink
from ckptool.migration.output.editing import open_for_editing
from ckptool.migration.report import MigrationReport
from ckptool.migration.target import refuse_address
from ckptool.migration.writing import Writing
from ckptool.pickles.reader import gc_paused
from ckptool.sources.paths import is_remote
from ckptool.sources.source import Meter, Progress
from ckptool.tensors.tensor import storages_nbytes
from ckptool.torch_ops import check_installed
from ckptool.torch_ops.devices import device_tag

if TYPE_CHECKING:
    from ckptool.checkpoints.checkpoint import Checkpoint
    from ckptool.migration.file_jobs import Writers
    from ckptool.recipes.slices import Joined


class WriteOptions(NamedTuple):
    """Options for writing a result, whatever its content; see ``migrate``."""

    force: bool = False
    verify: bool = True
    dry_run: bool = False
    reflink: bool = False
    progress: Progress | None = None
    read_back: Progress | None = None
    limits: Limits = DEFAULT_LIMITS


@checked(options=Changes._fields)
def migrate(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str] | None = None,
    changes: Changes | None = None,
    *,
    force: bool = False,
    verify: bool = True,
    dry_run: bool = False,
    in_place: bool = False,
    deep: bool = False,
    compact: bool = False,
    reflink: bool = True,
    progress: Progress | None = None,
    read_back: Progress | None = None,
    limits: Limits = DEFAULT_LIMITS,
    **options: Unpack[MigrateOptions],
) -> MigrationReport:
    """
    Write a checkpoint again: in another form, for another device, under other names. Nothing in it runs.

    ``dst`` is by default a name beside the source; if it is a folder, the result in it has the source's own name. It
    may be an address in a store (``s3://``, ``gs://``, ``az://``), with the same guarantees. Pass the changes as
    ``Changes``, or its fields as keywords: ``migrate(src, dst, to="cpu")``. ``form`` is ``state_dict`` or
    ``safetensors`` for the weights alone, ``model`` for a whole model, ``same`` for everything in the source; by
    default the suffix of ``dst`` decides. With ``max_shard_size``, ``dst`` is a folder of shards; with ``form="dcp"``,
    one of torch.distributed.checkpoint. ``progress`` is called with the bytes written so far and in all, ``read_back``
    with the bytes read back so far and in all. Memory stays bounded whatever the size, and torch is not imported unless
    values are cast or a model is built.

    With ``in_place``, ``src`` itself is edited, and there is no ``dst``: names, devices, metadata and entries may
    change, but no tensor is read or moved. ``deep`` compares the checksums of the tensors first. Readers meet the old
    file, the new one or an error; after a crash, ``recover`` restores the old file. Bytes that nothing refers to any
    more stay in the file. With ``compact`` they go: the file is copied, and the copy replaces it, as with ``dst=src``
    and ``force``.

    Where the file system clones files, a large result that differs only in its index is a clone of the source: it
    shares the bytes of the tensors, which are not read. ``reflink=False`` copies them.

    Guarantees: ``src`` is only read, and replaced only if it is ``dst`` too, with ``force``; ``dst`` is never half
    written: it appears only after the result was read back and compared, and is on the disk; nothing is overwritten
    without ``force``. ``verify=False`` neither reads back nor checks the source's checksums, and waits for the disk
    only if it replaces an old file.

    Raises:
        WeightsNotFound: No state dict matches the request, or several do; the hint lists them.
        IncompleteWeights: The file does not have all that the ``state_dict()`` of these weights would hold.
        MigrationRefused: It would lose or confuse something, or leave no tensor; the hint names the option that allows
            it.
        OutputExists: ``dst`` exists.
        OutputFailed: It could not be written, or is not what was to be written.
        MissingPackage: Values are to be cast or a model built, and torch is not installed.
        Cancelled: The cancellation in ``limits`` was triggered. ``dst`` is what it was before.
        CkptoolError: ``src`` cannot be read, or is damaged.
        UnfinishedEdit: An edit of ``src`` in place was cut off, and ``src`` is not complete.
        ValueError: There is no such ``form`` or ``weights``; changes were given both as a whole and as keywords;
            ``in_place`` was given with ``dst`` or an option for new files; or ``deep`` or ``compact`` without
            ``in_place``.
    """
    asked = changes_of(changes, options)
    path, target = os.fspath(src), None if dst is None else os.fspath(dst)
    how = WriteOptions(force, verify, dry_run, reflink, progress, read_back, limits)
    if not in_place:
        if deep or compact:
            option = "deep" if deep else "compact"
            raise ValueError(
                f"{option} is for in_place: what is copied is compared in any case, and has nothing unused"
            )
        return migrate_by(None, path, target, asked, how)
    if target is not None:
        raise ValueError("in_place edits src itself: there is no dst")
    if force or not verify or not reflink:
        raise ValueError("force, verify=False and reflink=False are for what is written anew, not for in_place")
    if not compact:
        return migrate_in_place(path, _checked(asked, None), dry_run=dry_run, deep=deep, limits=limits)
    with open_for_editing(path):  # the copy is not a clone, which would keep all bytes of its source
        asked = asked._replace(form=asked.form or "same")
        return migrate_by(None, path, path, asked, how._replace(force=True, reflink=False))


def unmatched(src: str, dst: str | None, changes: Changes) -> list[selection.Unmatched]:
    """
    Return the globs and patterns of a migration that match no name in its source. Reads no tensor.

    Raises:
        CkptoolError: It cannot be planned.
    """
    asked = _checked(changes, dst)
    joining, asked = _joined(src, asked, DEFAULT_LIMITS)
    with joining.checkpoint if joining else open_checkpoint(src) as checkpoint, gc_paused():
        return selection.unmatched(checkpoint, make_plan(checkpoint, dst, asked), asked)


def migrate_by(
    writers: Writers | None,
    src: str,
    dst: str | None,
    changes: Changes,
    how: WriteOptions = WriteOptions(),  # noqa: B008 - it never changes
    *,
    opened: Checkpoint | None = None,
    merge: Merge | None = None,
) -> MigrationReport:
    """
    Do what ``migrate`` does, with the same guarantees and byte for byte the same result. ``writers``, if given, writes
    the files of a folder: a function that has each of a list of jobs done, by other processes or machines. ``opened``
    is the source where not all of its tensors are in the files of ``src``; ``merge`` puts weights of other files into
    the source's.

    Raises:
        SourceChanged: The jobs did not all find the same source.
        CkptoolError: What ``migrate`` raises.
    """
    asked, limits = _checked(changes, dst), how.limits
    if asked.joins and opened is not None:
        raise MigrationRefused("only files are joined", kind="contradiction", hint="Leave out `join=`, or say `cut=`.")
    joining, asked = _joined(src, asked, limits)
    whole = joining.checkpoint if joining else opened or open_checkpoint(src, limits=limits)
    with whole as checkpoint, about(checkpoint.path):
        checkpoint.check_index()
        with gc_paused():
            plan = make_plan(checkpoint, dst, asked, merge=merge)
            selection.refuse_nothing(checkpoint, plan, asked)
        held = (tensor.info for tensor in checkpoint.tensors.values())
        refuse_repeated(plan.nbytes, storages_nbytes(held) if opened or joining else checkpoint.file_nbytes, limits)
        check_cancelled(checkpoint.source.cancellation)
        clone = as_clone(checkpoint, plan, asked) if how.reflink else None
        plan = clone or plan
        planned = report.planned(checkpoint, plan, asked)
        checkpoint.release_tree()  # the plan holds it as bytes by now
        planned = planned._replace(calls=selection.kept_calls(plan, asked), how="clone" if clone else "copy")
        if joining is not None:
            moved, notes = (*joining.moves, *planned.moved), (*joining.notes, *planned.notes)
            planned = planned._replace(moved=moved, notes=notes)
        check_cancelled(checkpoint.source.cancellation)
        if how.dry_run:
            if not is_remote(plan.target):
                with open_sink(plan.target, is_folder=plan.is_folder, force=how.force, progress=None, mode=0o600) as at:
                    at.reserve(plan.nbytes)  # raises where nothing could be written, and leaves nothing
            if plan.builds_model and plan.weights is not None:
                from ckptool.torch_ops.models import model_tensors, refuse_mismatch

                places = model_tensors(str(asked.model), asked.model_arguments)
                refuse_mismatch(str(asked.model), plan.weights.tensors, places)
            unread = "values are looked at only when it is written: what the new type cannot hold is refused then"
            return planned._replace(notes=(*planned.notes, unread)) if planned.casts and not asked.saturate else planned
        every = (*checkpoint.tensors.values(), *checkpoint.attributes.values())
        checkpoint.announce(every if plan.weights is None else plan.weights.tensors.values())
        on_written, mode = _cancellable(how.progress, limits.cancellation), mode_of(checkpoint.source)
        elsewhere = None
        if writers is not None and plan.is_folder and not asked.join:
            from ckptool.migration.file_jobs import hand_out  # most folders are written here

            elsewhere = partial(hand_out, writers, src, dst, on_written, how.read_back)
        meter = Meter(how.read_back, plan.nbytes)
        writing = Writing(checkpoint, plan, asked, limits if how.verify else None, meter)
        with open_sink(plan.target, is_folder=plan.is_folder, force=how.force, progress=on_written, mode=mode) as sink:
            nbytes = writing.run(sink, elsewhere)
            notes = (*planned.notes, *(plan.casting.notes if plan.casting else ()), *sink.notes)
    return planned._replace(
        written=True,
        verified=how.verify,
        read_back_by=tuple(writing.readers),
        notes=notes,
        nbytes=nbytes,
        casts=plan.casting.casts if plan.casting else (),  # their errors are known once they are written
        after=planned.after._replace(file_nbytes=nbytes),
        written_nbytes=planned.written_nbytes if clone else nbytes,
    )


def _joined(src: str, changes: Changes, limits: Limits) -> tuple[Joined | None, Changes]:
    """Return the joined slices, or None if the source is not slices, and the changes that are left to make."""
    if not changes.joins:
        return None, changes
    from ckptool.recipes.slices import SliceRules, open_joined  # most are not in slices

    rules = SliceRules(changes.join)
    joining = open_joined(src, rules, changes.key, changes.weights, changes.recipe_arguments, limits)
    wholes = {name: one.shape for name, one in joining.checkpoint.tensors.items()}
    first = wholes | {move.after[0][0]: move.before[0][1] for move in joining.moves}
    selection.refuse_cut_apart(joining.checkpoint, wholes, first, changes)
    return joining, changes._replace(key=None, weights="auto")


def _checked(changes: Changes, target: str | None) -> Changes:
    """Refuse changes that no source allows, before any is read; return them with devices as torch writes them."""
    refuse_address(target)
    changes = changes.in_full()
    if changes.model is not None and target is not None and is_remote(target):
        hint = "Write it to a path, and upload what is there."
        raise MigrationRefused("a whole model is built here, and saved by torch", kind="model-far-away", hint=hint)
    if changes.dtype is not None or changes.model is not None:
        check_installed()
    if changes.to is None:
        return changes
    if isinstance(changes.to, str):
        return changes._replace(to=device_tag(changes.to))
    return changes._replace(to={old: device_tag(new) for old, new in changes.to.items()})


def _cancellable(progress: Progress | None, cancellation: Cancellation | None) -> Progress | None:
    """Return ``progress`` with a check of the cancellation: writing from memory reads no source that would check it."""
    if cancellation is None:
        return progress

    def on_written(written: int, expected: int) -> None:
        cancellation.check()
        if progress is not None:
            progress(written, expected)

    return on_written
