"""
Read every byte of a checkpoint, and compare it with its checksums where there are some.

Large records are read by two threads through small buffers, so memory does not grow with the file. Only looking at
values needs torch.

The items in the files of a directory (pieces of tensors, and values) are opened one by one in the order of the files,
compared with what the index says of them, and let go.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from ckptool.archives.archive import Archive, Record, check_records
from ckptool.cancellation import each
from ckptool.checking.finding import MOST_FINDINGS, Finding, note
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.parsed import Parsed, Part, Stream
from ckptool.errors import CkptoolError, Failure, FileUnavailable
from ckptool.limits import Limits
from ckptool.messages import counted, some
from ckptool.sources.checksums import Take, checksum_of_range, checksums_of_file
from ckptool.sources.source import Meter, prefetch
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import TensorInfo

_AGAIN: Final = "Download the file again, or take it from a backup."
_ONCE_MORE = "Copy the file again, or take the folder from a backup."


class Integrity(NamedTuple):
    """The result of reading everything. Sizes in bytes."""

    findings: tuple[Finding, ...]
    nbytes: int
    """That were read: the whole file, or all of them."""
    records: int
    """Members of its archives; 0 if it is not an archive."""
    matching: int
    """Of them, those that match their checksums."""
    parts: int = 0
    """Pieces and values in the files of a directory, each with checksums of its own; their records count, too."""
    intact: int = 0
    """Of them, those that are what was saved."""


def verify(checkpoint: Checkpoint, limits: Limits, meter: Meter, watch: Take | None = None) -> Integrity:
    """
    Read every byte of the file, and compare each record that has a checksum with it. ``watch`` gets each of its bytes.

    Raises:
        CkptoolError: The file cannot be read any more, or changed meanwhile.
    """
    findings: list[Finding] = []
    records = matching = 0
    for one in (checkpoint.source, *(shard.source for shard in checkpoint.shards)):
        prefetch(one, [(0, one.nbytes)])
    inside = check(checkpoint, limits, meter)
    findings += inside.findings
    for source in (checkpoint.source, *(shard.source for shard in checkpoint.shards if shard.name not in inside.files)):
        if not any(archive.source is source for archive in checkpoint.archives):
            own = watch if source is checkpoint.source else None
            checksums_of_file(source, [(0, source.nbytes)], meter, own)  # for the reading: a disk that cannot says so
    bare: list[Record] = []
    for archive in checkpoint.archives:
        own = watch if archive.source is checkpoint.source else None
        damaged, without = check_records(archive, limits, meter, own)
        findings += [_damaged(checkpoint, archive, record, fact) for record, fact in damaged[:MOST_FINDINGS]]
        if len(damaged) > MOST_FINDINGS:
            more = f"{counted(len(damaged) - MOST_FINDINGS, 'record')} more do not match their checksums"
            findings.append(note("CK105", more, _AGAIN))
        bare += without
        records += len(archive)
        matching += len(archive) - len(damaged) - len(without)
    checkpoint.check_unchanged()
    if bare:
        nbytes = sum(record.nbytes for record in bare)
        which = f"{counted(len(bare), 'record')} of {nbytes:,} bytes"
        what = f"no checksum for {which}: a changed byte there would not show"
        findings.append(note("CK104", what))
    records, matching = records + inside.records, matching + inside.matching
    return Integrity(tuple(findings), checkpoint.file_nbytes, records, matching, inside.parts, inside.intact)


def _damaged(checkpoint: Checkpoint, archive: Archive, record: Record, fact: str) -> Finding:
    """CK105: a record that is not what was saved."""
    shard = next((one.name for one in checkpoint.shards if one.source is archive.source), None)
    inside = [
        tensor.name
        for tensor in (*checkpoint.tensors.values(), *checkpoint.attributes.values())
        if checkpoint.shard_of.get(tensor.name) == shard
        and any(_lies_in(info, archive, record) for info in _all_parts(tensor.info))
    ]
    where = f"shard {shard!r}: " if shard is not None else ""
    return note("CK105", f"{where}{fact}{'; it holds ' + some(inside) if inside else ''}", _AGAIN)


def _lies_in(info: TensorInfo, archive: Archive, record: Record) -> bool:
    storage = info.storage
    if storage is None:
        return False
    if record.compression != "stored":
        return storage.crc32 == record.crc32 and storage.nbytes == record.nbytes
    return storage.source is archive.source and storage.offset == record.offset


def _all_parts(info: TensorInfo) -> Iterator[TensorInfo]:
    todo = [info]
    while todo:
        current = todo.pop()
        yield current
        todo.extend(part for _, part in current.parts)


class Parts(NamedTuple):
    """The result of reading all parts."""

    findings: tuple[Finding, ...]
    parts: int
    """Those with checksums."""
    intact: int
    """Of them, those that were read, match their checksums, and are what the index says."""
    records: int
    matching: int
    files: frozenset[str]
    """Those that parts are in."""


def check(checkpoint: Checkpoint, limits: Limits, meter: Meter) -> Parts:
    """
    Read every part, and compare its records with their checksums and its tensor with the index.

    Raises:
        Cancelled: ``limits`` have a cancellation, and it was.
    """
    findings: list[Finding] = []
    files: dict[str, None] = {}
    parts = intact = records = matching = bare = 0
    for part in each(checkpoint.parts, limits.cancellation):
        files[part.file] = None
        parts += 1
        try:
            parsed = part.open()
        except FileUnavailable:
            continue  # that the file is missing is known
        except Failure as error:
            findings.append(_unread(part, error))
            continue
        found: list[Finding] = []
        for archive in parsed.archives:
            damaged, without = check_records(archive, limits, meter)
            found += [_finding("CK105", part, fact) for _, fact in damaged]
            records += len(archive)
            matching += len(archive) - len(damaged) - len(without)
        storage = info.storage if not parsed.archives and (info := parsed.tensor()) is not None else None
        if storage is not None:  # for the reading: a disk that cannot says so
            checksum_of_range(storage.source, storage.offset, storage.offset + storage.nbytes)
            bare, parts = bare + 1, parts - 1
        found += () if found else _comparisons(part, parsed)
        intact += storage is None and (not found or found[0].code == "CK144")
        findings += found
    if len(findings) > MOST_FINDINGS:
        more = f"{counted(len(findings) - MOST_FINDINGS, 'item')} more are damaged, or not what the index says"
        findings[MOST_FINDINGS:] = [note("CK105", more, _ONCE_MORE)]
    if bare:
        what = f"no checksum for {counted(bare, 'item')}: a changed byte there would not show"
        findings.append(note("CK104", what))
    return Parts(tuple(findings), parts, intact, records, matching, frozenset(files))


def _comparisons(part: Part, parsed: Parsed) -> Iterator[Finding]:
    what = part.contradiction(parsed) if part.contradiction is not None else None
    if what is not None:
        yield _finding("CK143", part, f"it {what}, as the index says")
    elif part.twin is not None and not _are_equal(parsed, part.twin()):
        fact = f"{part.what}: the copy in {part.file!r} is not equal to that of the first rank, which is taken"
        yield note("CK144", fact, "Each rank may have had values of its own: compare them where the model is.")


def _are_equal(one: Parsed, other: Parsed) -> bool:
    first, second = one.tensor(), other.tensor()
    if first is None or second is None:
        return [_content(stream) for stream in one.streams] == [_content(stream) for stream in other.streams]
    return first.shape == second.shape and LazyTensor("", first).read() == LazyTensor("", second).read()


def _content(stream: Stream) -> bytes:
    return stream.source.read(stream.start, stream.end - stream.start)


def _unread(part: Part, error: CkptoolError) -> Finding:
    if error.kind == "missing-package":
        return note("CK113", error.message, error.hint, error.command)
    return _finding("CK143", part, f"it cannot be read: {error.message}")


def _finding(code: str, part: Part, fact: str) -> Finding:
    return note(code, f"the item of {part.what} in {part.file!r}: {fact}", _ONCE_MORE)
