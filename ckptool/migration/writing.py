"""Write what was planned, read it back, and give it its name: a file, or a folder with all its files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple, TypeAlias

from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.errors import Failure, OutputFailed
from ckptool.limits import Limits
from ckptool.messages import counted, some
from ckptool.migration.changes import Changes
from ckptool.migration.output.sink import Sink, SinkFolder
from ckptool.migration.plan import Plan
from ckptool.migration.planned import BytesFile, FolderPlan, PlannedFile
from ckptool.migration.verify import verify_model
from ckptool.sources.source import Meter
from ckptool.tensors.payloads import Payload, check_storages
from ckptool.tensors.reading import LazyTensor


class Work(NamedTuple):
    """What is to be written, and from where."""

    checkpoint: Checkpoint
    plan: Plan
    changes: Changes
    limits: Limits | None
    """Those for reading it back; None where it is not to be verified."""
    meter: Meter
    """Counts what is read back."""


Elsewhere: TypeAlias = Callable[[Work, FolderPlan, SinkFolder], Iterable[str]]
"""Has those files of a folder written that have payloads, and returns which libraries read them back."""


class Done(NamedTuple):
    """What was written."""

    nbytes: int
    readers: tuple[str, ...]
    """What read it back."""
    notes: tuple[str, ...]


def write_file(work: Work, output: Sink) -> Done:
    """Write the file, read it back if it is to be verified, and publish it."""
    plan, limits = work.plan, work.limits
    verifies = limits is not None
    output.reserve(plan.file.nbytes)
    path = output.reading_path()
    check: Callable[[Limits, Meter], str | None]
    copied: Sequence[Payload] = ()
    readers: tuple[str, ...] = ()
    if plan.builds_model and plan.weights is not None and work.changes.model is not None:
        from ckptool.torch_ops.models import save_model

        save_model(work.changes.model, work.changes.model_arguments, plan.weights.tensors, path)
        check = partial(verify_model, path, plan.weights)
    else:
        assert not isinstance(plan.file, FolderPlan)  # that is written below
        file: PlannedFile = plan.file
        check = partial(file.verify, path, file.write(output, checksums=verifies))
        copied = file.copied
    if verifies:
        check_storages(_not_copied(plan), copied)
    work.checkpoint.check_unchanged()
    if limits is not None:
        output.sync()
        other = _verify(work.checkpoint, output.path, partial(check, limits, work.meter))
        readers = ("ckptool", other) if other else ("ckptool",)
    nbytes = output.nbytes
    output.publish()
    return Done(nbytes, readers, tuple(_parted(output)))


def write_folder(work: Work, plan: FolderPlan, folder: SinkFolder, elsewhere: Elsewhere | None = None) -> Done:
    """
    Write the files one after the other, read each back if it is to be verified, and publish the folder.

    What has payloads may be written ``elsewhere``; the index comes after all that it is of.
    """
    checkpoint, limits = work.checkpoint, work.limits
    readers = {"ckptool": None} if limits is not None else {}
    folder.reserve(plan.nbytes)
    files = plan.files
    if elsewhere is not None:
        readers |= dict.fromkeys(elsewhere(work, plan, folder))
        files = [one for one in files if isinstance(one[1], BytesFile)]
    with ExitStack() as opened:
        before: Sink | None = None
        for name, file in files:
            output = opened.enter_context(folder.file(name))
            other = write_planned(work, file, output, syncs=syncs(work, folder), about=folder.path)
            readers |= {other: None} if other else {}
            if before is not None:  # the disk had the time of this file for it
                before.publish()
                before.close()
            before = output
        if before is not None:
            before.publish()
    if limits is not None:
        check_storages([*_not_copied(work.plan), *plan.partly], plan.copied)
        _verify(checkpoint, folder.path, partial(plan.verify, folder.path_of(""), limits))
    folder.publish()
    return Done(plan.nbytes, tuple(readers), tuple(_replaced(folder, [name for name, _ in plan.files])))


def syncs(work: Work, folder: SinkFolder) -> bool:
    """Say whether files must be on the disk: what is replaced goes, and was there."""
    return work.limits is not None or bool(folder.replaced)


def write_planned(work: Work, file: PlannedFile, output: Sink, *, syncs: bool, about: str) -> str | None:
    """
    Write a file of a folder, and read it back if it is to be verified; return which library did beside our own reader.

    It has no name yet. ``about`` is what an error of reading back is about.

    Raises:
        OutputFailed: It could not be written, is not of the size that was planned, or not what was to be written.
        SourceChanged: The source changed meanwhile.
    """
    limits = work.limits
    output.reserve(file.nbytes)
    written = file.write(output, checksums=limits is not None)
    work.checkpoint.check_unchanged()
    if output.nbytes != file.nbytes:
        what = f"{output.nbytes:,} bytes were written, and {file.nbytes:,} were planned"
        raise OutputFailed(what, kind="verification-failed", path=about)
    if syncs:
        output.sync()
    if limits is None:
        return None
    return _verify(work.checkpoint, about, partial(file.verify, output.reading_path(), written, limits, work.meter))


def _not_copied(plan: Plan) -> list[LazyTensor]:
    """Return the tensors of the source that may have been read in pieces, and so without their storage's checksum."""
    if plan.weights is None:
        return plan.casting.tensors if plan.casting else []
    taken = plan.weights.state_dict
    return [taken[name] for name in plan.weights.old_names.values() if name in taken]


def _verify(checkpoint: Checkpoint, path: str, check: Callable[[], str | None]) -> str | None:
    """Read the file back, and return which library read it beside our own reader."""
    try:
        other = check()
    except Failure as error:
        checkpoint.check_unchanged()  # a model is compared with the source itself
        what = error.message if isinstance(error, OutputFailed) else f"cannot be read back: {error.message}"
        raise OutputFailed(
            what,
            kind="verification-failed",
            path=path,
            hint="Try again, or write to another disk: this one, or the memory, does not keep what it is given.",
        ) from error
    checkpoint.check_unchanged()
    return other


def _parted(output: Sink) -> Iterator[str]:
    if output.other_names:
        many = counted(output.other_names, "other name")
        yield f"the file that was replaced has {many} (a hard link), which still leads to what it was"


def _replaced(folder: SinkFolder, names: Sequence[str]) -> Iterator[str]:
    gone = [name for name in folder.replaced if name not in names]
    if gone:
        yield f"the folder that was replaced had {counted(len(gone), 'other file')}, now removed: {some(gone)}"
