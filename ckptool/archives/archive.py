"""``Archive``: the members of a zip or tar as byte ranges. Nothing is decompressed before it is read."""

import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import reduce
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias
from zlib import crc32

from ckptool.errors import DamagedFile, Failure, LimitExceeded
from ckptool.limits import Limits
from ckptool.sources.source import BytesSource, SliceSource, Source

if TYPE_CHECKING:
    from ckptool.sources.checksums import Take
    from ckptool.sources.source import Meter

Compression: TypeAlias = Literal["stored", "deflate", "gzip"]

NUMPY: Final = b"\x93NUMPY"
"""The first bytes of a file of numpy."""
_CHUNK = 1 << 20
_HEAD_NBYTES = 1 << 12


class Record(NamedTuple):
    """An archive member as a byte range of its source."""

    name: str
    offset: int
    """Offset of the first byte of the payload."""
    nbytes: int
    """Size of the content; also of the payload, unless it is compressed."""
    stored_nbytes: int
    compression: Compression = "stored"
    crc32: int | None = None
    """None if the format has no checksum; 0 may also mean that the writer was configured not to compute it."""
    is_array: bool = False
    """Whether a stored payload begins as numpy's arrays do; only known for zips in local files."""


class Archive(Mapping[str, Record]):
    """Records by name, in file order, and the source that contains them."""

    def __init__(
        self,
        source: Source,
        records: dict[str, Record],
        limits: Limits,
        notes: tuple[str, ...] = (),
        unused: tuple[range, ...] = (),
    ) -> None:
        self.source = source
        self.limits = limits
        self.notes = notes
        """Oddities of the archive that cannot be misread."""
        self.unused = unused
        """Ranges that belong to no member, between members or after the end, which other programs may read."""
        self.records = records
        self._inflatable = limits.inflated(source.nbytes)

    def __getitem__(self, name: str) -> Record:
        return self.records[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    def called(self, last: str) -> list[str]:
        """Return the names of the members whose last path component is ``last``."""
        ending = f"/{last}"
        return [name for name in self.records if name.endswith(ending) or name == last]

    def content(self, name: str) -> Source:
        """Return a member's content as a source: a slice of the file, or its bytes inflated on each read."""
        record = self.records[name]
        if record.compression == "stored":
            return SliceSource(self.source, record.offset, record.nbytes)
        return InflatedSource(self.source, record, self.limits)

    def head(self, name: str, nbytes: int) -> bytes:
        """Return the first ``nbytes`` bytes of a member's content; no more is inflated than that takes."""
        record = self.records[name]
        if record.compression == "stored":
            return self.source.read(record.offset, min(nbytes, record.nbytes))
        found = b""
        for chunk in _unpacked(self.source, record, self.limits, _HEAD_NBYTES):  # a chunk may be empty
            found += chunk
            if len(found) >= nbytes:
                break
        return found[:nbytes]

    def open(self, name: str) -> Source:
        """
        Return a member's content for reading all of it: a slice of the file, or inflated once into memory.

        Raises:
            LimitExceeded: All members inflated so far would exceed what ``limits`` allow for the archive's size.
        """
        record = self.records[name]
        if record.compression == "stored":
            return SliceSource(self.source, record.offset, record.nbytes)
        if record.nbytes > self._inflatable:
            raise too_large(record.name, record.nbytes, self._inflatable)
        self._inflatable -= record.nbytes
        content = inflate(self.source, record, self.limits)
        return BytesSource(content, self.source.cancellation, packed_nbytes=self.source.nbytes)

    def may_hold_objects(self, name: str) -> bool:
        """Return whether a member is a file of numpy, whose array may be of pickled objects."""
        record = self.records[name]
        with suppress(DamagedFile):  # no reader can open it
            return record.is_array or (record.compression != "stored" and self.head(name, len(NUMPY)) == NUMPY)
        return False

    def prefetch(self, names: Iterable[str]) -> None:
        """Announce which members will be read next: from a remote file, they are fetched together."""
        records = [record for record in map(self.records.get, names) if record is not None]
        self.source.prefetch([(record.offset, record.offset + record.stored_nbytes) for record in records])

    def damage(self, names: Iterable[str]) -> str | None:
        """Return a message about the first of these small members that does not match its checksum; None if all do."""
        for name in names:
            record = self.records.get(name)
            if record is None or not record.crc32 or record.compression != "stored":
                continue  # inflating checks the checksum
            content = self.open(name)
            if crc32(content.read(0, content.nbytes)) != record.crc32:
                return f"record {name!r} is damaged: its CRC-32 does not match"
        return None

    def text(self, name: str, most: int = 64) -> str:
        """Return a small member as text, stripped of white space; an empty string if there is no such member."""
        record = self.records.get(name)
        if record is None or record.nbytes > most:
            return ""
        return str(self.open(name).read(0, record.nbytes), "utf-8", "replace").strip()


class InflatedSource(Source):
    """A compressed member, inflated anew on each read: reading tensor by tensor needs memory for one at a time."""

    is_compressed = True

    def __init__(self, source: Source, record: Record, limits: Limits) -> None:
        self.cancellation = source.cancellation
        self._source = source
        self._record = record
        self.limits = limits
        self.nbytes = record.nbytes

    def read(self, offset: int, nbytes: int) -> bytes:
        return inflate(self._source, self._record, self.limits)[offset : offset + nbytes]


def inflate(source: Source, record: Record, limits: Limits) -> bytes:
    """
    Return a compressed member's content, checked against its size and checksum.

    Raises:
        LimitExceeded: Its announced size is more than ``limits`` allow for the size of the archive.
        DamagedFile: It is damaged, or longer or shorter than announced.
    """
    content = b"".join(_inflated(source, record, limits))
    if record.crc32 and crc32(content) != record.crc32:
        raise DamagedFile(f"record {record.name!r} is damaged: its CRC-32 does not match")
    return content


def check_records(
    archive: Archive, limits: Limits, meter: "Meter", watch: "Take | None" = None
) -> tuple[list[tuple[Record, str]], list[Record]]:
    """
    Return the damaged records, each with a message, and the records without a checksum.

    ``meter`` and ``watch`` are those of ``checksums_of_file``.
    """
    from ckptool.sources.checksums import checksums_of_file  # most archives are only listed

    records = [record for record in archive.values() if record.crc32 is not None]
    stored = [record for record in records if record.compression == "stored"]
    ranges = [(record.offset, record.offset + record.nbytes) for record in stored]
    found, _ = checksums_of_file(archive.source, ranges, meter, watch)
    computed = dict(zip((record.name for record in stored), found, strict=True))
    damaged: list[tuple[Record, str]] = []
    bare: list[Record] = [record for record in archive.values() if record.crc32 is None]
    for record in records:
        try:
            actual = computed.get(record.name)
            if actual is None:
                actual = reduce(lambda found, part: crc32(part, found), _inflated(archive.source, record, limits), 0)
        except Failure as error:  # damaged, or larger than the limits allow
            damaged.append((record, error.message))
            continue
        if actual == record.crc32:
            continue
        if not record.crc32:  # writers put 0 if they are configured not to compute it
            bare.append(record)
        else:
            fact = f"record {record.name!r} is damaged: its CRC-32 is {actual:08x}, not {record.crc32:08x}"
            damaged.append((record, fact))
    return damaged, bare


def _inflated(source: Source, record: Record, limits: Limits) -> Iterator[bytes]:
    """Yield the content of a compressed member in pieces of up to 1 MiB; raise LimitExceeded if it is too large."""
    allowed = limits.inflated(source.nbytes)
    if record.nbytes > allowed:
        raise too_large(record.name, record.nbytes, allowed)
    yield from _unpacked(source, record, limits, _CHUNK)


def _unpacked(source: Source, record: Record, limits: Limits, step: int) -> Iterator[bytes]:
    """Yield the content in pieces of up to ``step`` bytes, without a check of the limits."""
    unpacker = zlib.decompressobj(-15)
    done = position = 0
    pending = b""
    try:
        while not unpacker.eof and done <= record.nbytes:
            if limits.cancellation is not None:  # a small input may have a large output
                limits.cancellation.check()
            if not pending and position < record.stored_nbytes:
                pending = source.read(record.offset + position, min(step, record.stored_nbytes - position))
                position += len(pending)
            chunk = unpacker.decompress(pending, min(step, record.nbytes + 1 - done))
            exhausted = not chunk and position == record.stored_nbytes and not unpacker.unconsumed_tail
            pending = unpacker.unconsumed_tail
            done += len(chunk)
            yield chunk
            if exhausted:
                break
    except zlib.error as error:
        raise DamagedFile(f"record {record.name!r} cannot be inflated: {error}") from error
    left = position < record.stored_nbytes or unpacker.unused_data
    if done != record.nbytes or not unpacker.eof or left:
        raise DamagedFile(f"record {record.name!r} does not inflate to the {record.nbytes:,} bytes that it claims")


def too_large(name: str, needed: int, allowed: int) -> LimitExceeded:
    return LimitExceeded(
        f"the content {name} grows to at least {needed:,} bytes; {allowed:,} are allowed for a file of this size",
        hint="Unpack it with another tool and open what comes out.",
        needed=needed,
        actual=allowed,
    )
