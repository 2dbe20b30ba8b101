"""
Migrate a file in place, or by way of a clone: plan → lock → journal → edit → read back → commit.

A clone is a new file that shares the source's bytes, of which the index is edited. All that ``migrate`` promises holds,
for it has no name until it is read back and on the disk; but what is not copied is not read, so no checksum of a tensor
is compared.

The plan is made as for every migration: only the place of the bytes differs. What cannot be done without a tensor being
moved, or not so that every reader takes the result, is refused.

- safetensors: a header of the same length, padded with spaces, which the format allows.
- A legacy stream: other pickles of the same length in front of the storages, which stay where they are. Its tree is
  padded. Where one byte is missing, or three, which no padding has, the keys behind it are written shorter: without
  the memo that nothing in them uses.
- A torch zip: ``zip_edit``.

The edit of a torch zip: a new ``data.pkl``, in the place of the old one or in front of the directory.

In its place, where it is no longer: a pickle can be padded to any length. The headers stay, but for the checksums.

Else it is a new member where the directory began, with a new directory behind it, and the old one stays a member under
a name that says so: what belongs to no member, or has a name twice, would make readers disagree.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from string import ascii_lowercase, digits
from struct import pack
from typing import Final, NamedTuple, NoReturn
from zlib import crc32

from ckptool.archives.archive import Archive, Record
from ckptool.archives.zip_directory import (
    DESCRIPTOR_MAGIC,
    END,
    END_MAGIC,
    END_SEARCH,
    ENTRY,
    FLAG_DESCRIPTOR,
    FULL16,
    LOCAL,
    Directory,
    find_directory,
)
from ckptool.cancellation import check_cancelled
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.errors import Failure, MigrationRefused, OutputFailed, about
from ckptool.formats import open_checkpoint
from ckptool.limits import Limits
from ckptool.messages import counted, show, show_nbytes
from ckptool.migration import report, selection
from ckptool.migration.changes import Changes, new_tag
from ckptool.migration.kept_calls import kept_calls
from ckptool.migration.output import clones_to
from ckptool.migration.output.editing import (
    OPERATIONS,
    FileEdit,
    Operations,
    edit_in_place,
    no_room,
    not_in_place,
    open_for_editing,
    reader_of,
    too_long,
)
from ckptool.migration.plan import make_plan
from ckptool.migration.planned import Plan, Planned
from ckptool.migration.report import MigrationReport
from ckptool.migration.torch_plan import Kept
from ckptool.migration.tree_rewriter import StorageId, TreeRewriter
from ckptool.migration.verify import Expected, compare_tensors, expected_tensors, in_its_file
from ckptool.migration.zip_writer import Frame, end_records
from ckptool.pickles import nodes
from ckptool.pickles.gc_pause import gc_paused
from ckptool.pickles.nodes import Call, Global, Inert, PersistentId
from ckptool.sources.files import FileSource
from ckptool.sources.journal import Run, poisoned_at
from ckptool.sources.naming import is_far
from ckptool.sources.source import ReadAhead, Source
from ckptool.tensors.payloads import StoragePayload, check_storages
from ckptool.tensors.tensor import StorageRef

_UNUSED: Final = ".unused"
_PIECE: Final = 1 << 16
_BITS: Final = bytes(1 << END_MAGIC.index(byte) if byte in END_MAGIC else 0 for byte in range(256))
_END_IN: Final = re.compile(b"".join(b"[%s]" % bytes(n for n in range(16) if n >> place & 1) for place in range(4)))
"""Finds where each byte of the magic is in its place, of either text."""
_MARKS: Final = digits + ascii_lowercase
"""What the names of old pickles end in: with one of these, a name is as long as that of data.pkl."""


def plan_zip(archive: Archive, name: str, pickled: bytes) -> FileEdit:
    """
    Return the edit that gives a zip another pickle under a name.

    Raises:
        MigrationRefused: It has been edited too often, or something in it looks like the end of a zip.
    """
    source = archive.source
    directory, _ = find_directory(source)
    record = archive[name]
    in_slot = len(pickled) == record.nbytes
    end = _end_of(source)
    planned = _in_slot(source, directory, record, pickled) if in_slot else _in_tail(archive, directory, name, pickled)
    runs = tuple(sorted(planned))
    nbytes = max(source.nbytes, runs[-1].end)
    new_end = end if in_slot else nbytes - _comment(source, end) - END.size
    edit = FileEdit(nbytes, runs, Run(end, END_MAGIC), Run(new_end, END_MAGIC))
    _refuse_other_ends(source, edit)
    return edit


def _in_slot(source: Source, directory: Directory, record: Record, pickled: bytes) -> Iterator[Run]:
    """
    Yield the pickle, and its checksum where there is one: in the header, behind the pickle, in the directory.

    The directory is written whole: by its other checksums, the journal tells the file from one that was saved over it.
    """
    checksum = crc32(pickled).to_bytes(4, "little")
    yield Run(record.offset, pickled)
    at = _entry(source, directory, record.name) + 16
    entries = source.read(directory.offset, directory.nbytes)
    yield Run(directory.offset, entries[:at] + checksum + entries[at + 4 :])
    header = _name_at(source, record) - LOCAL.size
    local = source.read(header, LOCAL.size)
    if int.from_bytes(local[6:8], "little") & FLAG_DESCRIPTOR:
        behind = record.offset + record.nbytes
        has_magic = source.read(behind, 4) == DESCRIPTOR_MAGIC
        yield Run(behind + 4 * has_magic, checksum)
    if any(local[14:18]):
        yield Run(header + 14, checksum)


def _in_tail(archive: Archive, directory: Directory, name: str, pickled: bytes) -> Iterator[Run]:
    """Yield the new name of the old pickle, and all that comes where the directory began."""
    source = archive.source
    at = _entry(source, directory, name)
    old = name.encode()
    unused = _free_name(archive, name).encode()
    yield Run(_name_at(source, archive[name]), unused)
    entries = bytearray(source.read(directory.offset, directory.nbytes))
    entries[at + ENTRY.size : at + ENTRY.size + len(old)] = unused
    frame = Frame(old, len(pickled), directory.offset)
    checksum = crc32(pickled)
    member = frame.local() + pickled + frame.descriptor(checksum)
    entries += frame.entry(checksum)
    end = _end_of(source)
    comment = source.read(end + END.size, _comment(source, end))
    start = directory.offset + len(member)
    yield Run(
        directory.offset, b"".join((member, entries, end_records(start, len(entries), directory.members + 1, comment)))
    )


def _name_at(source: Source, record: Record) -> int:
    """Return where the name in the local header of a member begins: only extra fields follow it there."""
    name = record.name.encode()
    start = max(0, record.offset - FULL16 - LOCAL.size - len(name))
    before = source.read(start, record.offset - start)
    at = len(before)
    while (at := before.rfind(name, 0, at)) >= LOCAL.size:
        _, _, _, _, _, _, _, _, _, name_n, extra_n = LOCAL.unpack_from(before, at - LOCAL.size)
        if name_n == len(name) and at + name_n + extra_n == len(before):
            return start + at
    raise not_in_place("its data.pkl has an unusual local header")


def _entry(source: Source, directory: Directory, name: str) -> int:
    """Return where in the directory the entry of a member begins."""
    ahead = ReadAhead(source)
    wanted = name.encode()
    position = directory.offset
    while position < directory.end:
        data, begin = ahead.window(position, ENTRY.size + len(wanted))
        name_n, extra_n, comment_n = ENTRY.unpack_from(data, begin)[10:13]
        begin += ENTRY.size
        if name_n == len(wanted) and data.startswith(wanted, begin):
            return position - directory.offset
        position += ENTRY.size + name_n + extra_n + comment_n
    raise not_in_place("its data.pkl has another name in the directory")


def _free_name(archive: Archive, name: str) -> str:
    """Return a name for the old pickle that is as long as its own, so that nothing else of its header changes."""
    folder = name[: -len("data.pkl")]
    taken = {one.lower() for one in archive}
    for mark in _MARKS:
        if f"{folder}{_UNUSED}{mark}".lower() not in taken:
            return f"{folder}{_UNUSED}{mark}"
    raise not_in_place(f"it holds {len(_MARKS)} old pickles by now")


def _end_of(source: Source) -> int:
    """Return where the end record begins, which ``find_directory`` found."""
    start = max(0, source.nbytes - END_SEARCH)
    return start + source.read(start, source.nbytes - start).rfind(END_MAGIC)


def _comment(source: Source, end: int) -> int:
    """Return the size of the comment behind the end record."""
    return int.from_bytes(source.read(end + 20, 2), "little")


def _refuse_other_ends(source: Source, edit: FileEdit) -> None:
    """
    Raise MigrationRefused where a reader could find another end record while the guard is poisoned.

    One of a zip inside the zip, in the last bytes of the old or the new file; or one that is made of old bytes and new
    ones, where a write is torn.
    """
    start = max(0, edit.guard.offset - END_SEARCH)
    found = END_MAGIC in poisoned_at(edit.guard, Run(start, source.read(start, source.nbytes - start)))
    if found or any(_END_IN.search(either) for either in _pieces(source, edit)):
        raise not_in_place("something in it looks like the end of a zip, which readers would find meanwhile")


def _pieces(source: Source, edit: FileEdit) -> Iterator[bytes]:
    """
    Yield, where something is written, which bytes of the magic the old bytes or the new ones are: a bit for each.

    With as much around it as a magic reaches.
    """
    for run in edit.runs:
        data = poisoned_at(edit.new_guard, run)
        for start in range(run.offset - 3, run.end, _PIECE):  # a local header stands in front of all that is edited
            stop = min(start + _PIECE, run.end) + 3
            around = source.read(start, max(0, min(stop, source.nbytes) - start))
            begin = start - run.offset
            new = around[: max(0, -begin)] + data[max(0, begin) : stop - run.offset]
            new += around[len(new) :]
            old = poisoned_at(edit.guard, Run(start, around)).translate(_BITS)
            either = int.from_bytes(old, "little") | int.from_bytes(new.translate(_BITS), "little")
            yield either.to_bytes(max(len(old), len(new)), "little")


WORTH_A_CLONE: Final = 1 << 20
"""Bytes from which on a copy takes longer."""
_WRITES_ALL: Final = ("max_shard_size", "key", "dtype", "expand_tied", "model")
"""Changes after which tensors have other bytes, or others are beside them."""
_LENGTH_NBYTES: Final = 8
_GUARD_NBYTES: Final = 4


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
) -> tuple[MigrationReport, FileEdit, list[Expected] | None]:
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
        return planned, edit.edit, list(expected_tensors(edit.plan, in_its_file))


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


def verify_edit(fd: int, expected: Sequence[Expected], limits: Limits) -> None:
    """
    Read an edited file back, and compare all that its index says with the plan.

    Raises:
        OutputFailed: It is not what was planned.
    """
    with reader_of(fd) as reader:
        try:
            with gc_paused(), open_checkpoint(reader, limits=limits) as found:
                compare_tensors(found, expected, in_its_file)
        except Failure as error:
            what = error.message if isinstance(error, OutputFailed) else f"cannot be read back: {error.message}"
            raise OutputFailed(what, kind="verification-failed", hint="The file is what it was before.") from error


def as_clone(checkpoint: Checkpoint, plan: Plan, changes: Changes) -> Plan | None:
    """Return how a clone becomes what is planned; None where a copy has to be written, or is no slower."""
    source = checkpoint.source
    form = {"member": "same", "header": "safetensors"}.get(checkpoint.traits.edited_by or "")
    if form != plan.form or plan.file.dropped or plan.casting is not None or not isinstance(source, FileSource):
        return None
    if is_far(plan.target) or source.nbytes < WORTH_A_CLONE or not clones_to(source.fileno(), plan.target):
        return None
    try:
        planned, edit, _ = plan_edit(checkpoint, changes)
    except MigrationRefused:  # a copy does more
        return None
    clone = plan.file.files[0]._replace(nbytes=edit.nbytes, payloads=(), base=source, edits=edit.runs, reader=None)
    return planned._replace(target=plan.target, file=replace(planned.file, files=[clone]))


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
    if plan.form != "safetensors":
        raise _refused(f"form {plan.form!r} of a safetensors file")
    return EditPlan(plan, _plan_header(source, plan.file), 0)


def _of_member(checkpoint: Checkpoint, changes: Changes) -> EditPlan:
    archive, name = checkpoint.archives[0], checkpoint.streams[0].record
    deflated = [record.name for record in archive.values() if record.compression != "stored"]
    if deflated:
        raise _refused(f"{len(deflated):,} members are deflated, {show(deflated[0])} among them")
    plan = make_plan(checkpoint, None, changes, kept=Kept(KeepsMembers, archive[name].nbytes))
    _refuse_other_form(plan)
    unused = _unused_nbytes(checkpoint, plan.file) if plan.file.dropped else 0
    return EditPlan(plan, plan_zip(archive, name, plan.file.pickles[0]), unused)


def _of_stream(checkpoint: Checkpoint, changes: Changes) -> EditPlan:
    for whole in (False, True):
        room = tree_room(checkpoint, whole=whole)
        plan = make_plan(checkpoint, None, changes, kept=Kept(KeepsStream, room))
        _refuse_other_form(plan)
        if len(plan.file.pickles[0]) == room:
            break
    return EditPlan(plan, _plan_stream(checkpoint, plan.file), 0)


def _refuse_other_form(plan: Plan) -> None:
    if plan.form != "same":
        raise _refused(f"form {plan.form!r}")


def _unused_nbytes(checkpoint: Checkpoint, file: Planned) -> int:
    """Return how many bytes of tensors nothing in the edited file refers to."""
    used = {storage.offset for storage in _storages(file)}
    known = {storage.offset: storage.nbytes for storage in _stored(checkpoint)}
    return sum(nbytes for offset, nbytes in known.items() if offset not in used)


def _storages(file: Planned) -> list[StorageRef]:
    return [one.storage for one in file.payloads if isinstance(one, StoragePayload)]


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


def _plan_header(source: Source, plan: Planned) -> FileEdit:
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


def _refuse_gaps(plan: Planned, start: int, end: int) -> None:
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


def _plan_stream(checkpoint: Checkpoint, plan: Planned) -> FileEdit:
    """
    Return the edit that gives a stream another tree.

    Raises:
        MigrationRefused: The tree is too long, or does not refer to all storages any more.
    """
    *_, tree, keys = checkpoint.pickles
    stored = {storage.key for storage in _storages(plan)}
    listed = [str(key) for key in keys.root] if isinstance(keys.root, list) else []
    if stored != set(listed):
        left = len(set(listed) - stored)
        raise not_in_place(
            f"{left:,} of its {len(listed):,} storages would be in the file and be nobody's, which torch refuses"
        )
    new = tree_pickle = plan.pickles[0]
    if len(new) != tree.end - tree.start:
        new += _keys(checkpoint)
    room = (keys.end if len(new) > len(tree_pickle) else tree.end) - tree.start
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
