"""
A zip as ``torch.save`` writes it, as parts in their order.

    <root>/data.pkl, .format_version, .storage_alignment, byteorder, data/0 …, version

Members are stored, payloads begin at multiples of 64 bytes (an extra field "FB" holds the padding), sizes and CRC-32
follow each payload in a descriptor, and the zip64 records are always there. See
caffe2/serialize/inline_container.cc, PyTorchStreamWriter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from struct import pack
from typing import Final, NamedTuple, TypeVar
from zlib import crc32

from ckptool.archives.zips import (
    DESCRIPTOR,
    DESCRIPTOR64,
    DESCRIPTOR_MAGIC,
    END,
    END64,
    END64_MAGIC,
    END_MAGIC,
    ENTRY,
    ENTRY_MAGIC,
    FLAG_DESCRIPTOR,
    FLAG_UTF8,
    FULL16,
    FULL32,
    LOCAL,
    LOCAL_MAGIC,
    LOCATOR,
    LOCATOR_MAGIC,
)
from ckptool.tensors.payloads import Payload

_T = TypeVar("_T")
_ALIGNMENT: Final = 64
_SMALL: Final = 5
"""Number of members beside the storages."""
_MADE_BY, _NEEDED = 798, 45  # what torch's writer puts into the zip64 record


def torch_zip(
    root: str, pickled: bytes, storages: Sequence[Payload], found: Sequence[int]
) -> Iterator[bytes | Payload]:
    """
    Yield the parts of a zip whose storages ``0``, ``1``… are the payloads; offsets count from its first byte.

    The caller adds each payload's CRC-32 to ``found`` before it takes the next part.
    """
    position, directory = 0, bytearray()
    for name, part in _members(pickled, storages):
        nbytes = len(part) if isinstance(part, bytes) else part.nbytes
        frame = Frame(f"{root}/{name}".encode(), nbytes, position)
        local = frame.local()
        yield local
        yield part
        checksum = crc32(part) if isinstance(part, bytes) else found[-1]
        descriptor = frame.descriptor(checksum)
        yield descriptor
        directory += frame.entry(checksum)
        position += len(local) + nbytes + len(descriptor)
    yield bytes(directory) + end_records(position, len(directory), len(storages) + _SMALL)


def _members(pickled: bytes | _T, storages: Iterable[_T]) -> Iterator[tuple[str, bytes | _T]]:
    yield "data.pkl", pickled
    yield ".format_version", b"1"
    yield ".storage_alignment", str(_ALIGNMENT).encode()
    yield "byteorder", b"little"
    yield from ((f"data/{index}", payload) for index, payload in enumerate(storages))
    yield "version", b"3\n"


def torch_zip_nbytes(root: str, pickled_nbytes: int, storages_nbytes: Sequence[int]) -> int:
    """Return the size in bytes of what ``torch_zip`` yields."""
    position = directory = 0
    for name, part in _members(pickled_nbytes, storages_nbytes):
        frame = Frame(f"{root}/{name}".encode(), part if isinstance(part, int) else len(part), position)
        position += len(frame.local()) + frame.nbytes + len(frame.descriptor(0))
        directory += len(frame.entry(0))
    return position + directory + len(end_records(0, 0, 0))


class Frame(NamedTuple):
    """The records around a payload of ``nbytes`` bytes whose local header begins at ``header``."""

    name: bytes
    nbytes: int
    header: int

    def local(self) -> bytes:
        """Return the local header, padded so that the payload begins at a multiple of 64."""
        wide = self._wide()
        start = self.header + LOCAL.size + len(self.name) + len(wide) + 4
        padding = b"Z" * (-start % _ALIGNMENT)
        extra = wide + pack("<2sH", b"FB", len(padding)) + padding
        local = LOCAL.pack(LOCAL_MAGIC, 0, self._flags(), 0, 0, 0, 0, 0, 0, len(self.name), len(extra))
        return local + self.name + extra

    def descriptor(self, checksum: int) -> bytes:
        """Return the descriptor that follows the payload."""
        if not self.nbytes:
            return b""
        layout = DESCRIPTOR64 if self._wide() else DESCRIPTOR
        return DESCRIPTOR_MAGIC + layout.pack(checksum, self.nbytes, self.nbytes)

    def entry(self, checksum: int) -> bytes:
        """Return the entry in the central directory."""
        wide, size = self._wide(), min(self.nbytes, FULL32)
        entry = (ENTRY_MAGIC, 0, 0, self._flags(), 0, 0, 0, checksum, size, size, len(self.name), len(wide))
        return ENTRY.pack(*entry, 0, 0, 0, 0, min(self.header, FULL32)) + self.name + wide

    def _flags(self) -> int:
        return FLAG_UTF8 | (FLAG_DESCRIPTOR if self.nbytes else 0)

    def _wide(self) -> bytes:
        is_wide = self.nbytes >= FULL32 or self.header >= FULL32
        return _wide_field(self.nbytes, self.header) if is_wide else b""


def end_records(start: int, nbytes: int, count: int, comment: bytes = b"") -> bytes:
    """Return the records after a directory that begins at ``start`` and has ``count`` entries in ``nbytes`` bytes."""
    end64 = END64.pack(END64_MAGIC, 44, _MADE_BY, _NEEDED, 0, 0, count, count, nbytes, start)
    locator = LOCATOR.pack(LOCATOR_MAGIC, 0, start + nbytes, 1)
    short = (min(count, FULL16), min(count, FULL16), min(nbytes, FULL32), min(start, FULL32))
    return end64 + locator + END.pack(END_MAGIC, 0, 0, *short, len(comment)) + comment


def _wide_field(nbytes: int, header: int) -> bytes:
    """Return the zip64 extra field with the values that do not fit into 32 bits."""
    values = [nbytes, nbytes] if nbytes >= FULL32 else []
    values += [header] if header >= FULL32 else []
    return pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values)
