"""Migrate a file in place: plan → lock → journal → edit → read back → commit."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from ckptool.cancellation import check_cancelled
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.errors import Failure, OutputFailed, about
from ckptool.formats import open_checkpoint
from ckptool.limits import Limits
from ckptool.messages import show_nbytes
from ckptool.migration import report, selection
from ckptool.migration.changes import Changes
from ckptool.migration.device_tags import retagged
from ckptool.migration.in_place.file_plan import EditPlan, plan_edit
from ckptool.migration.kept_calls import kept_calls
from ckptool.migration.output.editing import FileEdit, edit_in_place, open_for_editing, reader_of
from ckptool.migration.output.operations import OPERATIONS, Operations
from ckptool.migration.plan import Plan
from ckptool.migration.report import MigrationReport
from ckptool.migration.verify import are_unlike, begin_of, kind_of
from ckptool.pickles.gc_pause import gc_paused
from ckptool.tensors.payloads import check_storages
from ckptool.tensors.tensor import TensorInfo


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
    with open_for_editing(path) as fd, about(path):
        planned, edit, expected = _planned(path, changes, limits, dry_run=dry_run, deep=deep)
        if expected is None:
            return planned
        written = edit_in_place(path, fd, edit, partial(verify_edit, fd, expected, limits), operations)
    return planned._replace(written=True, verified=True, read_back_by=("ckptool",), written_nbytes=written)


def _planned(
    path: str, changes: Changes, limits: Limits, *, dry_run: bool, deep: bool
) -> tuple[MigrationReport, FileEdit, Expected | None]:
    """
    Return what is to be done, and the tensors that are to be in the file; None where nothing is done.

    What was read for it is let go.
    """
    opened = partial(open_checkpoint, path, limits=limits)
    with opened() as checkpoint:
        checkpoint.check_index()
        with gc_paused():
            edit = plan_edit(checkpoint, changes)
            edit = edit._replace(plan=edit.plan._replace(target=path))
            selection.refuse_nothing(checkpoint, edit.plan, changes)
        planned = report_of(checkpoint, edit, changes)
        planned = planned._replace(calls=kept_calls(edit.plan, changes, opened), how="in place")
        check_cancelled(limits.cancellation)
        if dry_run or edit.changes_nothing:
            return planned, edit.edit, None
        checkpoint.release_tree()
        if deep:
            check_storages([*checkpoint.tensors.values(), *checkpoint.attributes.values()], ())
        checkpoint.check_unchanged()
        return planned, edit.edit, expected_of(edit.plan)


def report_of(checkpoint: Checkpoint, edit: EditPlan, changes: Changes) -> MigrationReport:
    """Return the report of an edit that is planned, and not carried out yet."""
    planned = report.planned(checkpoint, edit.plan, changes, edit.edit.nbytes)
    unused = show_nbytes(edit.unused_nbytes)
    note = f"{unused} of what is left out stay in the file, unused; with `compact=True` they go"
    return planned._replace(
        written_nbytes=0 if edit.changes_nothing else edit.edit.written_nbytes,
        notes=(*planned.notes, note) if edit.unused_nbytes else planned.notes,
        unused_nbytes=edit.unused_nbytes,
    )


class Expected(NamedTuple):
    """The tensors that an edited file is to have, in order; kept while it is opened, so they are to take little."""

    names: list[str | None]
    tags: list[str]
    like: list[TensorInfo]
    """For each, one that differs from it in nothing but where it begins; the same for many."""
    begins: list[int | None]
    """Where the first element is in the file; None for what is not only elements in the file."""


def expected_of(plan: Plan) -> Expected:
    """Return the tensors that a file is to have."""
    found = Expected([], [], [], [])
    known: dict[object, TensorInfo] = {}
    for name, info in plan.file.expected:
        begin = _begin(info)
        found.names.append(name)
        found.tags.append(retagged(info, plan.location))
        found.like.append(known.setdefault(str(kind_of(info)), info) if begin is not None else info)
        found.begins.append(begin)
    return found


def verify_edit(fd: int, expected: Expected, limits: Limits) -> None:
    """
    Read an edited file back, and compare all that its index says with the plan.

    Raises:
        OutputFailed: It is not what was planned.
    """
    with reader_of(fd) as reader:
        try:
            with gc_paused(), open_checkpoint(reader, limits=limits) as found:
                _compare(found, expected)
        except OutputFailed:
            raise
        except Failure as error:
            raise _failed(f"cannot be read back: {error.message}") from error


def _compare(found: Checkpoint, expected: Expected) -> None:
    if found.notes or found.damage:
        raise _failed(f"is not as usual: {found.damage or found.notes[0]}")
    ties = found.recorded.ties  # names that its text alone ties to others: they are no tensors of their own
    stored = [name for name in found.tensors if name not in ties]
    if len(stored) != len(expected.names):
        raise _failed("the tensors in it are not those that were to be there")
    for name, new, tag, like, begin in zip(stored, *expected, strict=True):
        info = found.tensors[name].info
        if begin is None:
            is_other = are_unlike(info, like, of_files=True)
        else:
            is_other = kind_of(info) != kind_of(like) or _begin(info) != begin
        if is_other or new not in (None, name) or (found.traits.keeps_devices and info.location != tag):
            raise _failed(f"tensor {name!r} is not as it was to be")


def _begin(info: TensorInfo) -> int | None:
    """Return where the first element is in the file; None for what is not only elements in the file."""
    begin = begin_of(info, of_files=True) if info.layout == "strided" else None
    return None if begin is None or begin[0] else begin[1]


def _failed(what: str) -> OutputFailed:
    return OutputFailed(what, kind="verification-failed", hint="The file is what it was before.")
