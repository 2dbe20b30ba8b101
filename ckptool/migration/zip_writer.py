"""
A zip as ``torch.save`` writes it, on an output that only grows.

    <root>/data.pkl, .format_version, .storage_alignment, byteorder, data/0 …, version

Members are stored, payloads begin at multiples of 64 bytes (an extra field "FB" holds the padding), sizes and CRC-32
follow each payload in a descriptor, and the zip64 records are always there. See
caffe2/serialize/inline_container.cc, PyTorchStreamWriter.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import pack
from typing import Final, NamedTuple
from zlib import crc32

from ckptool.archives.zip_layout import (
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
from ckptool.migration.output.sink import Sink
from ckptool.migration.transfer import Transfer
from ckptool.tensors.payloads import BytesPayload, Payload

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
    members = [("data.pkl", pickled_nbytes), (".format_version", 1), (".storage_alignment", 2), ("byteorder", 6)]
    members += [(f"data/{index}", nbytes) for index, nbytes in enumerate(storages_nbytes)]
    members.append(("version", 2))
    position = directory = 0
    for name, nbytes in members:
        length, long, far = len(f"{root}/{name}".encode()), nbytes >= FULL32, position >= FULL32
        wide = 4 + 8 * (2 * long + far) if long or far else 0
        directory += ENTRY.size + length + wide
        start = position + LOCAL.size + length + wide + 4
        position = start + -start % _ALIGNMENT + nbytes + (0 if not nbytes else 24 if long or far else 16)
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
        header = self._output.position - self._begin
        encoded = name.encode()
        nbytes = payload.nbytes
        flags = FLAG_UTF8 | (FLAG_DESCRIPTOR if nbytes else 0)
        wide = _wide_field(nbytes, header) if nbytes >= FULL32 or header >= FULL32 else b""
        start = header + LOCAL.size + len(encoded) + len(wide) + 4
        padding = b"Z" * (-start % _ALIGNMENT)
        extra = wide + pack("<2sH", b"FB", len(padding)) + padding
        local = LOCAL.pack(LOCAL_MAGIC, 0, flags, 0, 0, 0, 0, 0, 0, len(encoded), len(extra))
        self._write(local + encoded + extra)
        offset = self._output.position
        checksum = self._transfer.send(payload, checksum=True)
        if nbytes:
            layout = DESCRIPTOR64 if wide else DESCRIPTOR
            self._write(DESCRIPTOR_MAGIC + layout.pack(checksum, nbytes, nbytes))
        self._members.append(Written(name, nbytes, checksum, header, offset))
        size = min(nbytes, FULL32)
        entry = (ENTRY_MAGIC, 0, 0, flags, 0, 0, 0, checksum, size, size, len(encoded), len(wide))
        self._directory += ENTRY.pack(*entry, 0, 0, 0, 0, min(header, FULL32)) + encoded + wide

    def end(self) -> WrittenZip:
        start = self._output.position - self._begin
        nbytes, count = len(self._directory), len(self._members)
        self._write(self._directory)
        self._write(END64.pack(END64_MAGIC, 44, _MADE_BY, _NEEDED, 0, 0, count, count, nbytes, start))
        self._write(LOCATOR.pack(LOCATOR_MAGIC, 0, start + nbytes, 1))
        short = (min(count, FULL16), min(count, FULL16), min(nbytes, FULL32), min(start, FULL32))
        self._write(END.pack(END_MAGIC, 0, 0, *short, 0))
        return WrittenZip(self._members, start, self._frame_crc32)

    def _write(self, frame: bytes | bytearray) -> None:
        self._frame_crc32 = crc32(frame, self._frame_crc32)
        self._output.write(frame)


def _wide_field(nbytes: int, header: int) -> bytes:
    """Return the zip64 extra field with the values that do not fit into 32 bits."""
    values = [nbytes, nbytes] if nbytes >= FULL32 else []
    values += [header] if header >= FULL32 else []
    return pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values)
