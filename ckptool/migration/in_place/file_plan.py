"""
The plan of an edit in place, made as for every migration: only the place of the bytes differs.

What cannot be done without a tensor being moved, or not so that every reader takes the result, is refused.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.errors import MigrationRefused
from ckptool.messages import show
from ckptool.migration.changes import Changes
from ckptool.migration.in_place.header_edit import LENGTH_NBYTES, plan_header
from ckptool.migration.in_place.rewriters import KeepsMembers, KeepsStream
from ckptool.migration.in_place.stream_edit import plan_stream, tree_room
from ckptool.migration.in_place.zip_edit import plan_zip
from ckptool.migration.output.editing import FileEdit, not_in_place
from ckptool.migration.plan import Plan, make_plan
from ckptool.migration.safetensors_plan import SafetensorsPlan
from ckptool.migration.torch_plan import Kept, TorchPlan
from ckptool.sources.files import FileSource
from ckptool.tensors.tensor import StorageRef

_WRITES_ALL: Final = ("max_shard_size", "key", "dtype", "expand_tied", "model")
"""Changes after which tensors have other bytes, or others are beside them."""


class EditPlan(NamedTuple):
    """An edit of a file, and the migration that it carries out."""

    plan: Plan
    edit: FileEdit
    unused_nbytes: int
    """Bytes of tensors that stay in the file though nothing refers to them any more."""

    @property
    def changes_nothing(self) -> bool:
        """Whether the file has all that was asked for already."""
        file = self.plan.file
        return not (file.retagged or file.renamed or file.dropped)


def plan_edit(checkpoint: Checkpoint, changes: Changes) -> EditPlan:
    """
    Return the edit of a file that makes the changes.

    Raises:
        MigrationRefused: They cannot be made in place, or in no way.
        WeightsNotFound: No state dict is the one that was asked for.
    """
    _refuse_changes(changes)
    _refuse_file(checkpoint)
    index = checkpoint.traits.edited_by
    if index == "header":
        return _of_header(checkpoint, changes)
    return _of_member(checkpoint, changes) if index == "member" else _of_stream(checkpoint, changes)


def _of_header(checkpoint: Checkpoint, changes: Changes) -> EditPlan:
    source = checkpoint.source
    start = LENGTH_NBYTES + int.from_bytes(source.read(0, LENGTH_NBYTES), "little")
    plan = make_plan(checkpoint, None, changes, kept=Kept(tensors_at=start))
    if plan.form != "safetensors" or not isinstance(plan.file, SafetensorsPlan):
        raise _refused(f"form {plan.form!r} of a safetensors file")
    return EditPlan(plan, plan_header(source, plan.file), 0)


def _of_member(checkpoint: Checkpoint, changes: Changes) -> EditPlan:
    archive, name = checkpoint.archives[0], checkpoint.streams[0].record
    deflated = [record.name for record in archive.values() if record.compression != "stored"]
    if deflated:
        raise _refused(f"{len(deflated):,} members are deflated, {show(deflated[0])} among them")
    plan = make_plan(checkpoint, None, changes, kept=Kept(KeepsMembers, archive[name].nbytes))
    file = _tree_of(plan)
    unused = _unused_nbytes(checkpoint, file) if file.dropped else 0
    return EditPlan(plan, plan_zip(archive, name, file.pickled), unused)


def _of_stream(checkpoint: Checkpoint, changes: Changes) -> EditPlan:
    for whole in (False, True):
        room = tree_room(checkpoint, whole=whole)
        plan = make_plan(checkpoint, None, changes, kept=Kept(KeepsStream, room))
        if len(_tree_of(plan).pickled) == room:
            break
    return EditPlan(plan, plan_stream(checkpoint, _tree_of(plan)), 0)


def _tree_of(plan: Plan) -> TorchPlan:
    if plan.form != "same" or not isinstance(plan.file, TorchPlan):
        raise _refused(f"form {plan.form!r}")
    return plan.file


def _unused_nbytes(checkpoint: Checkpoint, file: TorchPlan) -> int:
    """Return how many bytes of tensors nothing in the edited file refers to."""
    used = {payload.storage.offset for payload in file.storages}
    known = {storage.offset: storage.nbytes for storage in _stored(checkpoint)}
    return sum(nbytes for offset, nbytes in known.items() if offset not in used)


def _stored(checkpoint: Checkpoint) -> list[StorageRef]:
    """Return every storage that the tree refers to."""
    rebuilder = checkpoint.rebuilder
    found = [rebuilder.storage(node) for one in checkpoint.pickles for node in one.persistent_ids] if rebuilder else []
    return [one.ref for one in found if one is not None]


def _refuse_changes(changes: Changes) -> None:
    given = {name: value for name, value in changes._asdict().items() if name in _WRITES_ALL and value}
    for name, value in given.items():
        raise _refused(f"`{name}={value!r}` changes more than names, devices and metadata")
    if changes.form not in (None, "same", "safetensors"):
        raise _refused(f"`form={changes.form!r}` changes more than names, devices and metadata")
    if changes.weights != "auto":
        raise _refused(f"`weights={changes.weights!r}` takes a part")


def _refuse_file(checkpoint: Checkpoint) -> None:
    if checkpoint.traits.edited_by is None or checkpoint.member or not isinstance(checkpoint.source, FileSource):
        what = f"a member of a file of {checkpoint.format}" if checkpoint.member else f"a file of {checkpoint.format}"
        raise _refused(f"{what}, and torch zips, legacy streams and safetensors files are edited in place")
    for note in checkpoint.notes:
        raise _refused(f"it is not as usual, so that readers may differ: {note}")


def _refused(fact: str) -> MigrationRefused:
    return not_in_place(f"cannot be done in place: {fact}")
