"""
The plan of an edit in place, made as for every migration: only the place of the bytes differs.

What cannot be done without a tensor being moved, or not so that every reader takes the result, is refused.

- safetensors: a header of the same length, padded with spaces, which the format allows.
- A legacy stream: other pickles of the same length in front of the storages, which stay where they are. Its tree is
  padded. Where one byte is missing, or three, which no padding has, the keys behind it are written shorter: without
  the memo that nothing in them uses.
- A torch zip: ``zip_edit``.
"""

from __future__ import annotations

from struct import pack
from typing import Final, NamedTuple, NoReturn

from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.errors import MigrationRefused
from ckptool.messages import counted, show
from ckptool.migration.changes import Changes
from ckptool.migration.device_tags import new_tag
from ckptool.migration.in_place.zip_edit import plan_zip
from ckptool.migration.output.editing import FileEdit, no_room, not_in_place, too_long
from ckptool.migration.plan import Plan, make_plan
from ckptool.migration.safetensors_plan import SafetensorsPlan
from ckptool.migration.torch_plan import Kept, TorchPlan
from ckptool.migration.tree_rewriter import StorageId, TreeRewriter
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Call, Global, Inert, PersistentId
from ckptool.sources.files import FileSource
from ckptool.sources.journal import Run
from ckptool.sources.source import Source
from ckptool.tensors.payloads import StoragePayload
from ckptool.tensors.tensor import StorageRef

_WRITES_ALL: Final = ("max_shard_size", "key", "dtype", "expand_tied", "model")
"""Changes after which tensors have other bytes, or others are beside them."""

_LENGTH_NBYTES: Final = 8
_GUARD_NBYTES: Final = 4


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
    start = _LENGTH_NBYTES + int.from_bytes(source.read(0, _LENGTH_NBYTES), "little")
    plan = make_plan(checkpoint, None, changes, kept=Kept(tensors_at=start))
    if plan.form != "safetensors" or not isinstance(plan.file, SafetensorsPlan):
        raise _refused(f"form {plan.form!r} of a safetensors file")
    return EditPlan(plan, _plan_header(source, plan.file), 0)


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
    return EditPlan(plan, _plan_stream(checkpoint, _tree_of(plan)), 0)


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


def _plan_header(source: Source, plan: SafetensorsPlan) -> FileEdit:
    """
    Return the edit that gives a file another header.

    Raises:
        MigrationRefused: The header is too long, or some bytes would be no tensor's, which the format does not allow.
    """
    length = source.read(0, _LENGTH_NBYTES)
    room = int.from_bytes(length, "little")
    _refuse_gaps(plan, _LENGTH_NBYTES + room, source.nbytes)
    header = plan.header.rstrip(b" ")
    if len(header) > room:
        raise too_long("the header", len(header), room)
    runs = (Run(_LENGTH_NBYTES, header.ljust(room)),)
    return FileEdit(source.nbytes, runs, Run(0, length), Run(0, length))


def _refuse_gaps(plan: SafetensorsPlan, start: int, end: int) -> None:
    stored = [info.storage for _, info in plan.expected if info.storage is not None]
    position = start
    for begin, stop in sorted((storage.offset, storage.offset + storage.nbytes) for storage in stored):
        if begin == position:
            position = stop
    if position != end:
        raise not_in_place("what is left out would leave bytes that are no tensor's, which safetensors does not allow")


def tree_room(checkpoint: Checkpoint, *, whole: bool) -> int:
    """Return how long the pickle of the tree may be; with ``whole``, where the keys behind it are written shorter."""
    *_, tree, keys = checkpoint.pickles
    return keys.end - tree.start - len(_keys(checkpoint)) if whole else tree.end - tree.start


def _plan_stream(checkpoint: Checkpoint, plan: TorchPlan) -> FileEdit:
    """
    Return the edit that gives a stream another tree.

    Raises:
        MigrationRefused: The tree is too long, or does not refer to all storages any more.
    """
    *_, tree, keys = checkpoint.pickles
    stored = {payload.storage.key for payload in plan.storages}
    listed = [str(key) for key in keys.root] if isinstance(keys.root, list) else []
    if stored != set(listed):
        left = len(set(listed) - stored)
        raise not_in_place(
            f"{left:,} of its {len(listed):,} storages would be in the file and be nobody's, which torch refuses"
        )
    new = plan.pickled
    if len(new) != tree.end - tree.start:
        new += _keys(checkpoint)
    room = (keys.end if len(new) > len(plan.pickled) else tree.end) - tree.start
    if len(new) < room:
        few = f"its pickles would have {counted(room - len(new), 'byte')} too few, and no padding is so short"
        raise no_room(few, room, len(new), "A name that is longer or shorter by one character fits.")
    if len(new) > room:
        raise too_long("its pickles", len(new), room)
    guard = Run(0, checkpoint.source.read(0, _GUARD_NBYTES))
    return FileEdit(checkpoint.source.nbytes, (Run(tree.start, new),), guard, guard)


def _keys(checkpoint: Checkpoint) -> bytes:
    """Return the pickle of the list of keys, as short as it can be."""
    keys = checkpoint.pickles[-1]
    texts = keys.root if isinstance(keys.root, list) else []
    encoded = [one.encode() for one in texts if isinstance(one, str)]
    if len(encoded) != len(texts):
        return checkpoint.source.read(keys.start, keys.end - keys.start)
    return b"\x80\x02](" + b"".join(pack("<cI", b"X", len(one)) + one for one in encoded) + b"e."


class KeepsMembers(TreeRewriter):
    """For a zip whose members stay."""

    def _storage(self, storage: StorageRef, cls: Global, itemsize: int, unit: int) -> StorageId:
        key, new = storage.key, new_tag(self._location, storage.location)
        if key not in self._units:
            if not isinstance(storage.source, FileSource):  # deflated, or in the pickle itself
                _refuse_inner()
            self._units[key] = unit
            self.storages.append(StoragePayload(storage, unit))
            self._count(storage.location, new)
        return cls, key, new, storage.nbytes // itemsize


class KeepsStream(TreeRewriter):
    """For a legacy stream whose storages stay: everything in its tree stays as well, but for what names a device."""

    def _persistent_id(self, node: PersistentId) -> Inert:
        found = None if nodes.sourced_class(node.pid) else self._rebuilder.storage(node)
        if found is None or not isinstance(node.pid, tuple):
            return node
        storage = found.ref.whole or found.ref
        new = new_tag(self._location, storage.location)
        if storage.key not in self._units:
            self._units[storage.key] = 1
            self.storages.append(StoragePayload(storage, 1))
            self._count(storage.location, new)
        if new == storage.location:
            return node
        return self._finish(PersistentId((*node.pid[:3], new, *node.pid[4:])))

    def _call(self, node: Call) -> Inert:
        func = nodes.global_of(node.func)
        if func is None:
            return node
        if (func.module, func.name) == ("torch.storage", "_load_from_bytes"):
            _refuse_inner()
        return self._moved(node, func)


def _refuse_inner() -> NoReturn:
    raise not_in_place("it has tensors that are not stored as they are: compressed, or in the pickle itself")
