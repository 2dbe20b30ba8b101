"""
Migrate by way of a clone: a new file that shares the source's bytes, of which the index is edited.

All that ``migrate`` promises holds, for the clone has no name until it is read back and on the disk; but what is not
copied is not read, so no checksum of a tensor is compared.
"""

from __future__ import annotations

from typing import Final

from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.errors import MigrationRefused
from ckptool.migration.changes import Changes
from ckptool.migration.in_place.file_plan import EditPlan, plan_edit
from ckptool.migration.in_place.run import expected_of, verify_edit
from ckptool.migration.output import Output
from ckptool.migration.output.cloning import clones_to
from ckptool.migration.plan import Plan
from ckptool.migration.writing import Done, Work
from ckptool.sources.files import FileSource
from ckptool.sources.naming import is_far

WORTH_A_CLONE: Final = 1 << 20
"""Bytes from which on a copy takes longer."""


def clone_plan(checkpoint: Checkpoint, plan: Plan, changes: Changes) -> EditPlan | None:
    """Return how a clone becomes what is planned; None where a copy has to be written, or is no slower."""
    source = checkpoint.source
    form = {"member": "same", "header": "safetensors"}.get(checkpoint.traits.edited_by or "")
    if form != plan.form or plan.file.dropped or plan.casting is not None or not isinstance(source, FileSource):
        return None
    if is_far(plan.target) or source.nbytes < WORTH_A_CLONE or not clones_to(source.fileno(), plan.target):
        return None
    try:
        edit = plan_edit(checkpoint, changes)
    except MigrationRefused:  # a copy does more
        return None
    return edit._replace(plan=edit.plan._replace(target=plan.target))


def write_clone(work: Work, edit: EditPlan, output: Output) -> Done:
    """Write the clone, read it back if it is to be verified, and publish it."""
    source, limits = work.checkpoint.source, work.limits
    assert isinstance(source, FileSource)  # clone_plan looked
    output.clone(source.fileno())
    for run in edit.edit.runs:
        output.fill(run.offset, memoryview(run.data))
    work.checkpoint.check_unchanged()
    if limits is not None:
        output.sync()
        verify_edit(output.fileno(), expected_of(edit.plan), limits)
    nbytes = output.nbytes
    output.publish()
    return Done(nbytes, ("ckptool",) if limits is not None else (), ())
