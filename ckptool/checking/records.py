"""Compare the records of an archive with their checksums."""

from __future__ import annotations

from ckptool.archives.archive import Archive, Record, inflated_crc32
from ckptool.errors import Cancelled, CkptoolError
from ckptool.limits import Limits
from ckptool.sources.checksums import checksums_of_file
from ckptool.sources.meter import Meter


def check_records(archive: Archive, limits: Limits, meter: Meter) -> tuple[list[tuple[Record, str]], list[Record]]:
    """Return the records that are damaged, with how, and those without a checksum."""
    records = [record for record in archive.values() if record.crc32 is not None]
    stored = [record for record in records if record.compression == "stored"]
    ranges = [(record.offset, record.offset + record.nbytes) for record in stored]
    found, _ = checksums_of_file(archive.source, ranges, meter)
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
