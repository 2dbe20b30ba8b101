"""Migrate a file in place: plan → lock → journal → edit → read back → commit."""

from __future__ import annotations

from functools import partial

from ckptool.cancellation import check_cancelled
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.errors import Cancelled, CkptoolError, OutputFailed, about
from ckptool.formats import open_checkpoint
from ckptool.limits import Limits
from ckptool.messages import show_nbytes
from ckptool.migration import report, selection
from ckptool.migration.changes import Changes
from ckptool.migration.device_tags import retagged
from ckptool.migration.in_place.file_plan import EditPlan, plan_edit
from ckptool.migration.kept_calls import kept_calls
from ckptool.migration.output.editing import edit_in_place, open_for_editing, reader_of
from ckptool.migration.output.operations import OPERATIONS, Operations
from ckptool.migration.report import MigrationReport
from ckptool.migration.verify import are_unlike
from ckptool.pickles.gc_pause import gc_paused
from ckptool.tensors.payloads import check_storages
from ckptool.tensors.reading import LazyTensor


def migrate_in_place(
    path: str,
    changes: Changes,
    *,
    dry_run: bool,
    deep: bool,
    limits: Limits,
    operations: Operations = OPERATIONS,
) -> MigrationReport:
    """
    Make changes in the file itself; see ``migrate``. With ``deep``, the checksums of all tensors are compared first.

    Raises what ``migrate`` raises, and:
        MigrationRefused: It cannot be done in place.
        UnfinishedEdit: The file has a journal.
    """
    with open_for_editing(path) as fd:
        opened = partial(open_checkpoint, path, limits=limits)
        with opened() as checkpoint, about(path):
            checkpoint.check_index()
            with gc_paused():
                edit = plan_edit(checkpoint, changes)
                edit = edit._replace(plan=edit.plan._replace(target=path))
                selection.refuse_nothing(checkpoint, edit.plan.weights, edit.plan.file, changes)
            planned = report_of(checkpoint, edit, changes)
            planned = planned._replace(calls=kept_calls(checkpoint, edit.plan, changes, opened), how="in place")
            check_cancelled(limits.cancellation)
            if dry_run or edit.changes_nothing:
                return planned
            checkpoint.release_tree()
            if deep:
                check_storages([*checkpoint.tensors.values(), *checkpoint.attributes.values()], ())
            checkpoint.check_unchanged()
            verify = partial(verify_edit, fd, edit, limits)
            written = edit_in_place(path, fd, edit.edit, verify, operations)
    return planned._replace(written=True, verified=True, read_back_by=("ckptool",), written_nbytes=written)


def report_of(checkpoint: Checkpoint, edit: EditPlan, changes: Changes) -> MigrationReport:
    """Return the report of an edit that is planned, and not carried out yet."""
    planned = report.planned(checkpoint, edit.plan, changes)
    nbytes, unused = edit.edit.nbytes, show_nbytes(edit.unused_nbytes)
    note = f"{unused} of what is left out stay in the file, unused; with `compact=True` they go"
    return planned._replace(
        nbytes=nbytes,
        written_nbytes=0 if edit.changes_nothing else edit.edit.written_nbytes,
        after=planned.after._replace(file_nbytes=nbytes),
        notes=(*planned.notes, note) if edit.unused_nbytes else planned.notes,
        unused_nbytes=edit.unused_nbytes,
    )


def verify_edit(fd: int, edit: EditPlan, limits: Limits) -> None:
    """
    Read an edited file back, and compare all that its index says with the plan.

    Raises:
        OutputFailed: It is not what was planned.
    """
    with reader_of(fd) as reader:
        try:
            with gc_paused(), open_checkpoint(reader, limits=limits) as found:
                _compare(found, edit)
        except (Cancelled, OutputFailed):
            raise
        except CkptoolError as error:
            raise _failed(f"cannot be read back: {error.message}") from error


def _compare(found: Checkpoint, edit: EditPlan) -> None:
    plan = edit.plan
    expected = plan.file.expected
    if found.notes or found.damage:
        raise _failed(f"is not as usual: {found.damage or found.notes[0]}")
    if len(_stored(found)) != len(expected):
        raise _failed("the tensors in it are not those that were to be there")
    for (name, tensor), (new, info) in zip(_stored(found), expected, strict=True):
        is_other = new not in (None, name) or are_unlike(tensor.info, info, of_files=True)
        if is_other or (found.traits.keeps_devices and tensor.info.location != retagged(info, plan.location)):
            raise _failed(f"tensor {name!r} is not as it was to be")


def _stored(found: Checkpoint) -> list[tuple[str, LazyTensor]]:
    """Return the tensors of a file, without the names that its text alone ties to others."""
    return [(name, tensor) for name, tensor in found.tensors.items() if name not in found.recorded.ties]


def _failed(what: str) -> OutputFailed:
    return OutputFailed(what, kind="verification-failed", hint="The file is what it was before.")
