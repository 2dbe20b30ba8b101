"""
A zip as ``torch.save`` writes it, on an output that only grows.

    <root>/data.pkl, .format_version, .storage_alignment, byteorder, data/0 …, version

Members are stored, payloads begin at multiples of 64 bytes (an extra field "FB" holds the padding), sizes and CRC-32
follow each payload in a descriptor, and the zip64 records are always there. See
caffe2/serialize/inline_container.cc, PyTorchStreamWriter.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from struct import pack
from typing import TYPE_CHECKING, Final, NamedTuple
from zlib import crc32

from ckptool.archives.zip_directory import (
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
from ckptool.tensors.payloads import BytesPayload, Payload

if TYPE_CHECKING:
    from ckptool.migration.output.sink import Sink
    from ckptool.migration.transfer import Transfer

_ALIGNMENT: Final = 64
_MADE_BY, _NEEDED = 798, 45  # what torch's writer puts into the zip64 record


class Written(NamedTuple):
    """A member as it was written."""

    name: str
    nbytes: int
    crc32: int
    header: int
    """Offset of its local header, in the zip."""
    offset: int
    """Offset of its payload, in the file."""


class WrittenZip(NamedTuple):
    """A zip as it was written: each of its bytes is counted in one of these checksums."""

    members: list[Written]
    directory: int
    """Offset of the central directory, in the zip."""
    frame_crc32: int
    """The checksum of everything that is not a payload: headers, padding, descriptors, the directory."""


def write_torch_zip(
    output: Sink, root: str, pickled: bytes, storages: Sequence[Payload], *, checksums: bool = True
) -> WrittenZip:
    """
    Write a checkpoint whose storages ``0``, ``1``… are the payloads in order, and return what was written.

    Without ``checksums``, a source's own are taken over unread.
    """
    from ckptool.migration.transfer import Transfer  # sizes alone need none

    with Transfer(output, checksums=checksums) as transfer:
        return append_torch_zip(output, transfer, root, pickled, storages)


def append_torch_zip(
    output: Sink, transfer: Transfer, root: str, pickled: bytes, storages: Sequence[Payload], frame_crc32: int = 0
) -> WrittenZip:
    """
    Write a checkpoint behind what an output holds already: its own offsets count from its first byte.

    ``frame_crc32`` is the checksum of the frames before, which that of this one goes on with.
    """
    archive = _Archive(output, transfer, frame_crc32)
    archive.add(f"{root}/data.pkl", BytesPayload(pickled))
    archive.add(f"{root}/.format_version", BytesPayload(b"1"))
    archive.add(f"{root}/.storage_alignment", BytesPayload(str(_ALIGNMENT).encode()))
    archive.add(f"{root}/byteorder", BytesPayload(b"little"))
    for index, payload in enumerate(storages):
        archive.add(f"{root}/data/{index}", payload)
    archive.add(f"{root}/version", BytesPayload(b"3\n"))
    return archive.end()


def torch_zip_nbytes(root: str, pickled_nbytes: int, storages_nbytes: Sequence[int]) -> int:
    """Return the size in bytes of what ``write_torch_zip`` would write."""
    begin = [("data.pkl", pickled_nbytes), (".format_version", 1), (".storage_alignment", 2), ("byteorder", 6)]
    storages = ((f"data/{index}", nbytes) for index, nbytes in enumerate(storages_nbytes))
    members = chain(begin, storages, [("version", 2)])
    position = directory = 0
    folder = len(f"{root}/".encode())
    for name, nbytes in members:
        length, wide, descriptor = folder + len(name), 0, 16 if nbytes else 0
        if nbytes >= FULL32 or position >= FULL32:
            wide = 4 + 8 * (2 * (nbytes >= FULL32) + (position >= FULL32))
            descriptor = 24 if nbytes else 0
        directory += ENTRY.size + length + wide
        start = position + LOCAL.size + length + wide + 4
        position = start + -start % _ALIGNMENT + nbytes + descriptor
    return position + directory + END64.size + LOCATOR.size + END.size


class _Archive:
    """Writes members one after the other, and the directory after them."""

    def __init__(self, output: Sink, transfer: Transfer, frame_crc32: int = 0) -> None:
        self._output = output
        self._begin = output.position
        self._transfer = transfer
        self._members: list[Written] = []
        self._directory = bytearray()
        self._frame_crc32 = frame_crc32

    def add(self, name: str, payload: Payload) -> None:
        frame = Frame(name.encode(), payload.nbytes, self._output.position - self._begin)
        self._write(frame.local())
        offset = self._output.position
        checksum = self._transfer.send(payload, checksum=True)
        self._write(frame.descriptor(checksum))
        self._members.append(Written(name, payload.nbytes, checksum, frame.header, offset))
        self._directory += frame.entry(checksum)

    def end(self) -> WrittenZip:
        start = self._output.position - self._begin
        self._write(self._directory)
        self._write(end_records(start, len(self._directory), len(self._members)))
        return WrittenZip(self._members, start, self._frame_crc32)

    def _write(self, frame: bytes | bytearray) -> None:
        self._frame_crc32 = crc32(frame, self._frame_crc32)
        self._output.write(frame)


class Frame(NamedTuple):
    """What is around a payload of ``nbytes``, for a local header at ``header``."""

    name: bytes
    nbytes: int
    header: int

    def local(self) -> bytes:
        """Return the local header; it ends where a payload may begin."""
        wide = self._wide()
        start = self.header + LOCAL.size + len(self.name) + len(wide) + 4
        padding = b"Z" * (-start % _ALIGNMENT)
        extra = wide + pack("<2sH", b"FB", len(padding)) + padding
        local = LOCAL.pack(LOCAL_MAGIC, 0, self._flags(), 0, 0, 0, 0, 0, 0, len(self.name), len(extra))
        return local + self.name + extra

    def descriptor(self, checksum: int) -> bytes:
        """Return what follows the payload."""
        if not self.nbytes:
            return b""
        layout = DESCRIPTOR64 if self._wide() else DESCRIPTOR
        return DESCRIPTOR_MAGIC + layout.pack(checksum, self.nbytes, self.nbytes)

    def entry(self, checksum: int) -> bytes:
        """Return the entry in the directory."""
        wide, size = self._wide(), min(self.nbytes, FULL32)
        entry = (ENTRY_MAGIC, 0, 0, self._flags(), 0, 0, 0, checksum, size, size, len(self.name), len(wide))
        return ENTRY.pack(*entry, 0, 0, 0, 0, min(self.header, FULL32)) + self.name + wide

    def _flags(self) -> int:
        return FLAG_UTF8 | (FLAG_DESCRIPTOR if self.nbytes else 0)

    def _wide(self) -> bytes:
        is_wide = self.nbytes >= FULL32 or self.header >= FULL32
        return _wide_field(self.nbytes, self.header) if is_wide else b""


def end_records(start: int, nbytes: int, count: int, comment: bytes = b"") -> bytes:
    """Return what follows a directory that begins at ``start``, and has ``count`` entries in ``nbytes``."""
    end64 = END64.pack(END64_MAGIC, 44, _MADE_BY, _NEEDED, 0, 0, count, count, nbytes, start)
    locator = LOCATOR.pack(LOCATOR_MAGIC, 0, start + nbytes, 1)
    short = (min(count, FULL16), min(count, FULL16), min(nbytes, FULL32), min(start, FULL32))
    return end64 + locator + END.pack(END_MAGIC, 0, 0, *short, len(comment)) + comment


def _wide_field(nbytes: int, header: int) -> bytes:
    """Return the zip64 extra field with the values that do not fit into 32 bits."""
    values = [nbytes, nbytes] if nbytes >= FULL32 else []
    values += [header] if header >= FULL32 else []
    return pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values)
