"""
Migrations in place: plans the edit, and compares the edited file with the plan; also edits of clones.

A clone is a new file that shares the source's bytes, of which the index is edited. All guarantees of ``migrate`` hold,
as it has no name until it is read back and on the disk; but tensors are not read, so their checksums are not compared.

The plan is made as for every migration: only the place of the bytes differs. An edit that would move a tensor, or whose
result some readers would not accept, is refused.

- safetensors: a header of the same length, padded with spaces, which the format allows.
- A legacy stream: new pickles of the same length before the storages, which stay in place. Its tree is padded. Padding
  of one byte, or of three, does not exist: then the list of keys that follows is written shorter, without its memo,
  which nothing uses.
- A torch zip: a new ``data.pkl``, in the place of the old one or before the directory.

It is in the old place if it can be padded to the same length. The headers stay, except for the checksums.

Else it is a new member where the directory began, followed by a new directory. The old one stays a member, under a name
with ``.unused``: bytes of no member, or a name twice, would make readers disagree.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from string import ascii_lowercase, digits
from struct import pack
from typing import Final, NoReturn
from zlib import crc32

import ckptool.system as system
from ckptool.archives.archive import Archive
from ckptool.archives.zips import (
    DESCRIPTOR_MAGIC,
    END,
    END_MAGIC,
    END_SEARCH,
    ENTRY,
    FLAG_DESCRIPTOR,
    LOCAL,
    find_directory,
    read_entries,
)
from ckptool.cancellation import check_cancelled
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.errors import MigrationRefused, OutputFailed, about
from ckptool.formats import open_checkpoint
from ckptool.limits import Limits
from ckptool.messages import counted, show, show_nbytes
from ckptool.migration import report, selection
from ckptool.migration.changes import Changes, TargetForm
from ckptool.migration.make_plan import make_plan
from ckptool.migration.output import real_path
from ckptool.migration.output.editing import FileEdit, edit_in_place, not_in_place, open_for_editing, reader_of
from ckptool.migration.plan import METADATA, Plan
from ckptool.migration.report import MigrationReport
from ckptool.migration.torch_plan import Frame, KeptLayout, end_records
from ckptool.migration.tree_rewriter import UNTYPED, TreeRewriter
from ckptool.migration.verify import Expected, compare_tensors, expected_tensors, in_its_file, reading_back
from ckptool.pickles.nodes import Call, Inert, PersistentId, global_of, sourced_class
from ckptool.pickles.reader import gc_paused
from ckptool.sources.files import FileSource
from ckptool.sources.journal import Run, poisoned_at
from ckptool.sources.paths import is_remote
from ckptool.sources.source import Source
from ckptool.tensors.payloads import StoragePayload, check_storages
from ckptool.tensors.tensor import StorageRef

_UNUSED: Final = ".unused"
_MARKS: Final = digits + ascii_lowercase
"""Last characters of the names of old pickles: ``.unused`` with one of these is as long as ``data.pkl``."""


def plan_zip(archive: Archive, name: str, pickled: bytes) -> FileEdit:
    """
    Return the edit that replaces a pickle in a zip that ends the file.

    A pickle of the same size takes the place of the old one; its checksum is written into the local header, the
    descriptor and the directory, where there is one. The directory is written whole: by its other checksums, the
    journal tells the file from one that was saved over it. A pickle of another size is written where the directory
    began, with a new directory after it, and the old pickle gets a new name.
    """
    source, record, old, checksum = archive.source, archive[name], name.encode(), crc32(pickled)
    directory = find_directory(source)
    entries, start = bytearray(source.read(directory.offset, directory.nbytes)), max(0, source.nbytes - END_SEARCH)
    end = start + source.read(start, source.nbytes - start).rfind(END_MAGIC)  # that which gives the directory
    comment = source.read(end + END.size, source.nbytes - end - END.size)
    at = _entry(entries, old)
    header = next(one.header for one in read_entries(source, directory) if one.name == old)
    if source.read(header + LOCAL.size, len(old)) != old:
        raise not_in_place("its data.pkl has an unusual local header")
    in_slot = len(pickled) == record.nbytes
    if in_slot:
        entries[at + 16 : at + 20] = encoded = checksum.to_bytes(4, "little")  # where an entry has its CRC-32
        runs = [Run(record.offset, pickled), Run(directory.offset, bytes(entries))]
        local = source.read(header, LOCAL.size)  # its flags are at 6, its CRC-32 is at 14: 0 where a descriptor has it
        if int.from_bytes(local[6:8], "little") & FLAG_DESCRIPTOR:
            behind = record.offset + record.nbytes
            has_magic = source.read(behind, 4) == DESCRIPTOR_MAGIC
            runs.append(Run(behind + 4 * has_magic, encoded))
        if any(local[14:18]):
            runs.append(Run(header + 14, encoded))
    else:
        taken = {one.lower() for one in archive}
        names = (f"{name[: -len('data.pkl')]}{_UNUSED}{mark}" for mark in _MARKS)
        unused = next((one.encode() for one in names if one.lower() not in taken), None)
        if unused is None:
            raise not_in_place(f"it holds {len(_MARKS)} old pickles by now")
        entries[at + ENTRY.size : at + ENTRY.size + len(old)] = unused
        frame = Frame(old, len(pickled), directory.offset)
        member = frame.local() + pickled + frame.descriptor(checksum)
        entries += frame.entry(checksum)
        ends = end_records(directory.offset + len(member), len(entries), directory.members + 1, comment)
        runs = [Run(header + LOCAL.size, unused), Run(directory.offset, b"".join((member, entries, ends)))]
    nbytes = max(source.nbytes, *(run.end for run in runs))
    new_end = end if in_slot else nbytes - len(comment) - END.size
    edit = FileEdit(nbytes, tuple(sorted(runs)), Run(end, END_MAGIC), Run(new_end, END_MAGIC))
    _refuse_other_ends(source, edit)
    return edit


def _entry(entries: bytearray, name: bytes) -> int:
    """Return the offset of a member's entry in a directory."""
    at = 0
    while at < len(entries):
        name_n, extra_n, comment_n = ENTRY.unpack_from(entries, at)[10:13]
        begin = at + ENTRY.size
        if name_n == len(name) and entries.startswith(name, begin):
            return at
        at = begin + name_n + extra_n + comment_n
    raise not_in_place("its data.pkl has another name in the directory")


def _refuse_other_ends(source: Source, edit: FileEdit) -> None:
    """
    Raise MigrationRefused where a reader could find another end record while the guard is poisoned.

    It may be that of a zip inside the zip, in the last bytes of the old file, or in what is written.
    """
    start = max(0, edit.guard.offset - END_SEARCH)
    old = poisoned_at(edit.guard, Run(start, source.read(start, source.nbytes - start)))
    if END_MAGIC in old or any(END_MAGIC in poisoned_at(edit.new_guard, run) for run in edit.runs):
        raise not_in_place("something in it looks like the end of a zip, which readers would find meanwhile")


WORTH_A_CLONE: Final = 1 << 20
"""Number of bytes from which a copy takes longer."""
_WRITES_ALL: Final = (
    *("recipe", "reverse", "recipe_arguments", "max_shard_size", "key", "dtype", "expand_tied", "model", "join", "cut"),
)
"""Changes that alter bytes of tensors, or which tensors are stored."""
_LENGTH_NBYTES: Final = 8
_GUARD_NBYTES: Final = 4


def migrate_in_place(path: str, changes: Changes, *, dry_run: bool, deep: bool, limits: Limits) -> MigrationReport:
    """
    Make changes in the file itself; see ``migrate``. With ``deep``, the checksums of all tensors are compared first.

    Raises what ``migrate`` raises, and:
        MigrationRefused: It cannot be done in place.
        UnfinishedEdit: The file has a journal.
    """
    with open_for_editing(path) as fd, about(path):
        with open_checkpoint(path, limits=limits) as checkpoint:
            checkpoint.check_index()
            with gc_paused():
                plan, edit = plan_edit(checkpoint, changes)
                plan = replace(plan, target=path)
                selection.refuse_nothing(checkpoint, plan, changes)
            planned = report.planned(checkpoint, plan, changes, edit.nbytes)
            if checkpoint.rebuilder is not None and plan.dropped:
                used = {storage.offset for storage in _storages(plan)}
                references = (node for one in checkpoint.pickles for node in one.persistent_ids)
                stored = [one.ref for one in map(checkpoint.rebuilder.storage, references) if one is not None]
                unused = sum({one.offset: one.nbytes for one in stored if one.offset not in used}.values())
                note = (
                    f"{show_nbytes(unused)} of what is left out stay in the file, unused; with `compact=True` they go"
                )
                notes = (*planned.notes, note) if unused else planned.notes
                planned = planned._replace(unused_nbytes=unused, notes=notes)
            is_done = not (plan.retagged or plan.renamed or plan.dropped or plan.metadata)
            written, calls = 0 if is_done else edit.written_nbytes, selection.kept_calls(plan, changes)
            planned = planned._replace(calls=calls, how="in place", written_nbytes=written)
            check_cancelled(limits.cancellation)
            if dry_run or is_done:
                return planned
            checkpoint.release_tree()
            if deep:
                check_storages([*checkpoint.tensors.values(), *checkpoint.attributes.values()], ())
            checkpoint.check_unchanged()
            expected = list(expected_tensors(plan, in_its_file))
        del checkpoint, plan  # opening the edited file takes memory, too
        written = edit_in_place(path, fd, edit, partial(_verify, fd, edit, expected, limits))
    return planned._replace(written=True, verified=True, read_back_by=("ckptool",), written_nbytes=written)


def _verify(fd: int, edit: FileEdit, expected: Sequence[Expected], limits: Limits) -> None:
    """Read the index of an edited file back, and compare it and all tensors in it with the plan."""
    with (
        reading_back(None, "The file is what it was before."),
        reader_of(fd) as reader,
        gc_paused(),
        open_checkpoint(reader, limits=limits) as found,
    ):
        if any(found.source.read(run.offset, len(run.data)) != run.data for run in edit.runs):
            raise OutputFailed("its index is not what was to be written", kind="verification-failed")
        compare_tensors(found, expected, in_its_file)


def as_clone(checkpoint: Checkpoint, plan: Plan, changes: Changes) -> Plan | None:
    """Return the plan as a clone with an edit; None where a copy has to be written, or is no slower."""
    source = checkpoint.source
    form = {"member": "same", "header": "safetensors"}.get(checkpoint.traits.edited_by or "")
    drops = any(not one.startswith(METADATA) for one in plan.dropped)
    if form != plan.form or drops or plan.casting is not None or not isinstance(source, FileSource):
        return None
    if is_remote(plan.target) or source.nbytes < WORTH_A_CLONE:
        return None
    if not system.clones_to(source.fileno(), os.path.dirname(real_path(plan.target))):
        return None
    try:
        planned, edit = plan_edit(checkpoint, changes)
    except MigrationRefused:  # a copy may still be possible
        return None
    clone = plan.files[0]._replace(nbytes=edit.nbytes, payloads=(), base=source, edits=edit.runs, reader=None)
    return replace(planned, target=plan.target, files=[clone])


def plan_edit(checkpoint: Checkpoint, changes: Changes) -> tuple[Plan, FileEdit]:
    """Return the plan that an edit of a file carries out, and the edit."""
    given = {name: value for name, value in changes._asdict().items() if name in _WRITES_ALL and value}
    given |= {"form": changes.form} if changes.form not in (None, "same", "safetensors") else {}
    given |= {"weights": changes.weights} if changes.weights != "auto" else {}
    for name, value in given.items():
        raise _refused(f"`{name}={value!r}` changes more than names, devices and metadata")
    if checkpoint.shards:
        raise _refused(f"it is in {counted(len(checkpoint.shards), 'file')}")
    index = checkpoint.traits.edited_by
    if index is None or checkpoint.member or not isinstance(checkpoint.source, FileSource):
        what = f"a member of a file of {checkpoint.format}" if checkpoint.member else f"a file of {checkpoint.format}"
        raise _refused(f"{what}, and torch zips, legacy streams and safetensors files are edited in place")
    for note in checkpoint.notes:
        raise _refused(f"it is not as usual, so that readers may differ: {note}")
    return {"header": _of_header, "member": _of_member, "pickles": _of_stream}[index](checkpoint, changes)


def _plan_of(checkpoint: Checkpoint, changes: Changes, form: TargetForm, kept: KeptLayout) -> Plan:
    plan = make_plan(checkpoint, None, changes, kept=kept)
    if plan.form != form:
        raise _refused(f"form {plan.form!r} of a file of {checkpoint.format}")
    return plan


def _refused(fact: str) -> MigrationRefused:
    return not_in_place(f"cannot be done in place: {fact}")


def _too_long(what: str, needed: int, room: int) -> MigrationRefused:
    """Return the error for an index that would be longer than the old one."""
    fact = f"{what} would have {needed:,} bytes, and there is room for {room:,}"
    hint = "Shorter names and texts fit. Else write a copy instead."
    return MigrationRefused(fact, kind="no-room", hint=hint, needed=needed, actual=room)


def _of_header(checkpoint: Checkpoint, changes: Changes) -> tuple[Plan, FileEdit]:
    """Return the plan and the edit for another header of a safetensors file; all other bytes must be some tensor's."""
    source = checkpoint.source
    length = source.read(0, _LENGTH_NBYTES)
    room = int.from_bytes(length, "little")
    plan = _plan_of(checkpoint, changes, "safetensors", KeptLayout(tensors_at=_LENGTH_NBYTES + room))
    stored = [info.storage for _, info in plan.expected if info.storage is not None]
    position = _LENGTH_NBYTES + room
    for begin, nbytes in sorted((storage.offset, storage.nbytes) for storage in stored):
        position += nbytes * (begin == position)
    if position != source.nbytes:
        raise not_in_place(
            "what is left out would leave bytes that are not a tensor's, which safetensors does not allow"
        )
    header = plan.header.rstrip(b" ")
    if len(header) > room:
        raise _too_long("the header", len(header), room)
    runs = (Run(_LENGTH_NBYTES, header.ljust(room)),)
    return plan, FileEdit(source.nbytes, runs, Run(0, length), Run(0, length))


def _of_member(checkpoint: Checkpoint, changes: Changes) -> tuple[Plan, FileEdit]:
    """Return the plan and the edit for another pickle in a zip."""
    archive, name = checkpoint.archives[0], checkpoint.streams[0].record
    deflated = [record.name for record in archive.values() if record.compression != "stored"]
    if deflated:
        raise _refused(f"{len(deflated):,} members are deflated, {show(deflated[0])} among them")
    plan = _plan_of(checkpoint, changes, "same", KeptLayout(KeepsMembers, archive[name].nbytes))
    return plan, plan_zip(archive, name, plan.pickles[0])


def _of_stream(checkpoint: Checkpoint, changes: Changes) -> tuple[Plan, FileEdit]:
    """Return the plan and the edit for a legacy stream: a tree of the old length, or with shorter keys."""
    *_, tree, keys = checkpoint.pickles
    behind, room = b"", tree.end - tree.start
    plan = _plan_of(checkpoint, changes, "same", KeptLayout(KeepsStream, room))
    if len(plan.pickles[0]) != room:
        texts, room = keys.root if isinstance(keys.root, list) else [], keys.end - tree.start
        encoded = [one.encode() for one in texts if isinstance(one, str)]
        behind = b"\x80\x02](" + b"".join(pack("<cI", b"X", len(one)) + one for one in encoded) + b"e."  # the shortest
        if len(encoded) != len(texts):
            behind = checkpoint.source.read(keys.start, keys.end - keys.start)
        plan = _plan_of(checkpoint, changes, "same", KeptLayout(KeepsStream, room - len(behind)))
    stored = {storage.key for storage in _storages(plan)}
    listed = {str(key) for key in keys.root} if isinstance(keys.root, list) else set()
    if stored != listed:
        left = f"{len(listed - stored):,} of its {len(listed):,} storages"
        raise not_in_place(f"{left} would be in the file and be nobody's, which torch refuses")
    new = plan.pickles[0] + behind
    if len(new) > room:
        raise _too_long("its pickles", len(new), room)
    if len(new) < room:
        what = f"its pickles would have {counted(room - len(new), 'byte')} too few, and no padding is so short"
        hint = "A name that is longer or shorter by one character fits. Else write a copy instead."
        raise MigrationRefused(what, kind="no-room", hint=hint, needed=len(new), actual=room)
    guard = Run(0, checkpoint.source.read(0, _GUARD_NBYTES))
    return plan, FileEdit(checkpoint.source.nbytes, (Run(tree.start, new),), guard, guard)


def _storages(plan: Plan) -> list[StorageRef]:
    return [one.storage for one in plan.payloads if isinstance(one, StoragePayload)]


class KeepsMembers(TreeRewriter):
    """For a zip whose members stay: storages keep their keys and bytes."""

    swaps_bytes = False

    def _new_key(self, storage: StorageRef) -> str:
        if not isinstance(storage.source, FileSource):  # deflated, or in the pickle itself
            _refuse_inner()
        return storage.key


class KeepsStream(KeepsMembers):
    """For a legacy stream whose storages stay: calls and storages in its tree stay as well, except their devices."""

    def _persistent_id(self, node: PersistentId) -> Inert:
        found = None if sourced_class(node.pid) else self._rebuilder.storage(node)
        if found is None or not isinstance(node.pid, tuple):
            return node
        storage = found.ref.whole or found.ref
        new = self._storage(storage, UNTYPED, 1, 1)[2]
        if new == storage.location:
            return node
        return self._finish(PersistentId((*node.pid[:3], new, *node.pid[4:])))

    def _call(self, node: Call) -> Inert:
        func = global_of(node.func)
        if func is None:
            return node
        if (func.module, func.name) == ("torch.storage", "_load_from_bytes"):
            _refuse_inner()
        return self._moved(node, func)


def _refuse_inner() -> NoReturn:
    raise not_in_place("it has tensors that are not stored as they are: compressed, or in the pickle itself")
