"""The edit of a safetensors file: a header of the same length, padded with spaces, which the format allows."""

from __future__ import annotations

from ckptool.migration.output.editing import FileEdit, not_in_place, too_long
from ckptool.migration.safetensors_plan import SafetensorsPlan
from ckptool.sources.journal import Run
from ckptool.sources.source import Source

LENGTH_NBYTES = 8


def plan_header(source: Source, plan: SafetensorsPlan) -> FileEdit:
    """
    Return the edit that gives a file another header.

    Raises:
        MigrationRefused: The header is too long, or some bytes would be no tensor's, which the format does not allow.
    """
    length = source.read(0, LENGTH_NBYTES)
    room = int.from_bytes(length, "little")
    _refuse_gaps(plan, LENGTH_NBYTES + room, source.nbytes)
    header = plan.header.rstrip(b" ")
    if len(header) > room:
        raise too_long("the header", len(header), room)
    runs = (Run(LENGTH_NBYTES, header.ljust(room)),)
    return FileEdit(source.nbytes, runs, Run(0, length), Run(0, length))


def _refuse_gaps(plan: SafetensorsPlan, start: int, end: int) -> None:
    stored = [info.storage for info in plan.infos if info.storage is not None]
    position = start
    for begin, stop in sorted((storage.offset, storage.offset + storage.nbytes) for storage in stored):
        if begin == position:
            position = stop
    if position != end:
        raise not_in_place("what is left out would leave bytes that are no tensor's, which safetensors does not allow")
