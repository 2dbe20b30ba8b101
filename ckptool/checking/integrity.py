"""
Read every byte of a checkpoint, and compare it with its checksums where there are some.

Large records are read by two threads through small buffers, so memory does not grow with the file. Only looking at
values needs torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from ckptool.archives.archive import Archive, Record, inflated_crc32
from ckptool.checking.finding import Finding
from ckptool.checking.stored_pieces import StoredPieces
from ckptool.checking.value_survey import _MOST_FINDINGS
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.errors import Cancelled, CkptoolError
from ckptool.limits import Limits
from ckptool.messages import counted, some
from ckptool.sources.checksums import checksums_of_file
from ckptool.tensors.tensor import TensorInfo

_AGAIN: Final = "Download the file again, or take it from a backup."


class Integrity(NamedTuple):
    """The result of reading everything. Sizes in bytes."""

    findings: tuple[Finding, ...]
    nbytes: int
    """That were read: the whole file, or all of them."""
    records: int
    """Members of its archives; 0 if it is not an archive."""
    matching: int
    """Of them, those that match their checksums."""


def verify(checkpoint: Checkpoint, limits: Limits) -> Integrity:
    """
    Read every byte of the file, and compare each record that has a checksum with it.

    Raises:
        CkptoolError: The file cannot be read any more, or changed meanwhile.
    """
    findings: list[Finding] = []
    records = matching = 0
    pieces = StoredPieces(checkpoint)
    for source in (checkpoint.source, *(shard.source for shard in checkpoint.shards)):
        if not any(archive.source is source for archive in checkpoint.archives):
            pieces.read(source)  # in any case: a disk that cannot says so
    pieces.read_rest()
    findings += [Finding("CK105", "error", fact, _AGAIN) for fact in pieces.damaged[:_MOST_FINDINGS]]
    findings += _further(len(pieces.damaged))
    bare: list[Record] = []
    for archive in checkpoint.archives:
        damaged, without = _check_records(archive, limits)
        findings += [_damaged(checkpoint, archive, record, fact) for record, fact in damaged[:_MOST_FINDINGS]]
        findings += _further(len(damaged))
        bare += without
        records += len(archive)
        matching += len(archive) - len(damaged) - len(without)
    checkpoint.check_unchanged()
    sizes = [*(record.nbytes for record in bare), *pieces.bare]
    if sizes:
        which = f"{counted(len(sizes), 'record')} of {sum(sizes):,} bytes"
        what = f"no checksum for {which}: a changed byte there would not show"
        findings.append(Finding("CK104", "info", what))
    return Integrity(tuple(findings), checkpoint.file_nbytes, records + pieces.count, matching + pieces.matching)


def _further(damaged: int) -> list[Finding]:
    """CK105: how many more there are than are listed."""
    if damaged <= _MOST_FINDINGS:
        return []
    more = f"{counted(damaged - _MOST_FINDINGS, 'record')} more do not match their checksums"
    return [Finding("CK105", "error", more, _AGAIN)]


def _check_records(archive: Archive, limits: Limits) -> tuple[list[tuple[Record, str]], list[Record]]:
    """Return the records that are damaged, with how, and those without a checksum."""
    records = [record for record in archive.values() if record.crc32 is not None]
    stored = [record for record in records if record.compression == "stored"]
    ranges = [(record.offset, record.offset + record.nbytes) for record in stored]
    found, _ = checksums_of_file(archive.source, ranges)
    computed = dict(zip((record.name for record in stored), found, strict=True))
    damaged: list[tuple[Record, str]] = []
    bare: list[Record] = [record for record in archive.values() if record.crc32 is None]
    for record in records:
        try:
            actual = computed.get(record.name)
            if actual is None:
                actual = inflated_crc32(archive.source, record, limits)
        except Cancelled:
            raise
        except CkptoolError as error:  # damaged, or it would grow beyond what is allowed
            damaged.append((record, error.message))
            continue
        if actual == record.crc32:
            continue
        if not record.crc32:  # what writers put that were asked not to compute it
            bare.append(record)
        else:
            fact = f"record {record.name!r} is damaged: its CRC-32 is {actual:08x}, not {record.crc32:08x}"
            damaged.append((record, fact))
    return damaged, bare


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
    return Finding("CK105", "error", f"{where}{fact}{'; it holds ' + some(inside) if inside else ''}", _AGAIN)


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
