"""
Read the items in the files of a directory (pieces of tensors, and values), and compare each with its checksums.

They are opened one by one in the order of the files, compared with what the index says of them, and let go.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ckptool.archives.archive import check_records
from ckptool.cancellation import each
from ckptool.checking.finding import MOST_FINDINGS, Finding
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.parsed import Parsed, Part, Stream
from ckptool.errors import CkptoolError, Failure, FileUnavailable
from ckptool.limits import Limits
from ckptool.messages import counted
from ckptool.sources.checksums import checksum_of_range
from ckptool.sources.meter import Meter
from ckptool.tensors.reading import LazyTensor

_AGAIN = "Copy the file again, or take the folder from a backup."


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
        findings[MOST_FINDINGS:] = [Finding("CK105", "error", more, _AGAIN)]
    if bare:
        what = f"no checksum for {counted(bare, 'item')}: a changed byte there would not show"
        findings.append(Finding("CK104", "info", what))
    return Parts(tuple(findings), parts, intact, records, matching, frozenset(files))


def _comparisons(part: Part, parsed: Parsed) -> Iterator[Finding]:
    what = part.contradiction(parsed) if part.contradiction is not None else None
    if what is not None:
        yield _finding("CK143", part, f"it {what}, as the index says")
    elif part.twin is not None and not _are_equal(parsed, part.twin()):
        yield Finding(
            "CK144",
            "warning",
            f"{part.what}: the copy in {part.file!r} is not equal to that of the first rank, which is taken",
            "Each rank may have had values of its own: compare them where the model is.",
        )


def _are_equal(one: Parsed, other: Parsed) -> bool:
    first, second = one.tensor(), other.tensor()
    if first is None or second is None:
        return [_content(stream) for stream in one.streams] == [_content(stream) for stream in other.streams]
    return first.shape == second.shape and LazyTensor("", first).read() == LazyTensor("", second).read()


def _content(stream: Stream) -> bytes:
    return stream.source.read(stream.start, stream.end - stream.start)


def _unread(part: Part, error: CkptoolError) -> Finding:
    if error.kind == "missing-package":
        return Finding("CK113", "info", error.message, error.hint, error.command)
    return _finding("CK143", part, f"it cannot be read: {error.message}")


def _finding(code: str, part: Part, fact: str) -> Finding:
    return Finding(code, "error", f"the item of {part.what} in {part.file!r}: {fact}", _AGAIN)
