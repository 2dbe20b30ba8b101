"""
A zip as ``torch.save`` writes it, on an output that only grows.

    <root>/data.pkl, .format_version, .storage_alignment, byteorder, data/0 …, version

Members are stored, payloads begin at multiples of 64 bytes (padding stands in an extra field "FB"), sizes and CRC-32
follow each payload in a descriptor, and the zip64 records are always there. See
caffe2/serialize/inline_container.cc, PyTorchStreamWriter.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import pack
from typing import Final, NamedTuple

from ckptool.outputs import Output
from ckptool.payloads import BytesPayload, Payload
from ckptool.transfer import Transfer

_ALIGNMENT: Final = 64
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF
_UTF8, _DESCRIPTOR = 0x0800, 0x0008
_MADE_BY, _NEEDED = 798, 45  # what torch's writer puts into the zip64 record


class Written(NamedTuple):
    """A member as it was written."""

    name: str
    nbytes: int
    crc32: int
    header: int
    """Offset of its local header."""
    offset: int
    """Of its payload."""


class WrittenZip(NamedTuple):
    """A zip as it was written: every byte of it stands under one of these checksums."""

    members: list[Written]
    frame_crc32: int
    """Of all that is no payload: headers, padding, descriptors, the directory."""


class _Frame:
    """The way to an output for what is no payload."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self.crc32 = 0

    def write(self, data: bytes | bytearray) -> None:
        from zlib import crc32

        self.crc32 = crc32(data, self.crc32)
        self._output.write(data)


def write_torch_zip(
    output: Output, root: str, pickled: bytes, storages: Sequence[Payload], *, checksums: bool = True
) -> WrittenZip:
    """
    Write a checkpoint whose storages ``0``, ``1``… are the payloads in order, and return what was written.

    Without ``checksums``, a source's own are taken over unread.
    """
    members: list[tuple[str, Payload]] = [
        ("data.pkl", BytesPayload(pickled)),
        (".format_version", BytesPayload(b"1")),
        (".storage_alignment", BytesPayload(str(_ALIGNMENT).encode())),
        ("byteorder", BytesPayload(b"little")),
        *((f"data/{index}", payload) for index, payload in enumerate(storages)),
        ("version", BytesPayload(b"3\n")),
    ]
    frame = _Frame(output)
    with Transfer(output, checksums=checksums) as transfer:
        written = [_write_member(output, frame, transfer, f"{root}/{name}", payload) for name, payload in members]
    _write_directory(frame, written, output.position)
    return WrittenZip(written, frame.crc32)


def torch_zip_nbytes(root: str, pickled_nbytes: int, storages_nbytes: Sequence[int]) -> int:
    """Return the size in bytes of what ``write_torch_zip`` would write."""
    members = [("data.pkl", pickled_nbytes), (".format_version", 1), (".storage_alignment", 2), ("byteorder", 6)]
    members += [(f"data/{index}", nbytes) for index, nbytes in enumerate(storages_nbytes)]
    members.append(("version", 2))
    position = directory = 0
    for name, nbytes in members:
        length, long, far = len(f"{root}/{name}".encode()), nbytes >= _FULL32, position >= _FULL32
        wide = 4 + 8 * (2 * long + far) if long or far else 0
        directory += 46 + length + wide
        start = position + 30 + length + wide + 4
        position = start + -start % _ALIGNMENT + nbytes + (0 if not nbytes else 24 if long or far else 16)
    return position + directory + 56 + 20 + 22


def _write_member(output: Output, frame: _Frame, transfer: Transfer, name: str, payload: Payload) -> Written:
    header = output.position
    encoded = name.encode()
    nbytes = payload.nbytes
    flags = _UTF8 | (_DESCRIPTOR if nbytes else 0)
    wide = _wide_field([nbytes, nbytes] if nbytes >= _FULL32 else [], [header] if header >= _FULL32 else [])
    start = header + 30 + len(encoded) + len(wide) + 4
    padding = b"Z" * (-start % _ALIGNMENT)
    extra = wide + pack("<2sH", b"FB", len(padding)) + padding
    local = pack("<4s5H3L2H", b"PK\x03\x04", 0, flags, 0, 0, 0, 0, 0, 0, len(encoded), len(extra))
    frame.write(local + encoded + extra)
    offset = output.position
    checksum = transfer.send(payload, checksum=True)
    if nbytes:
        sizes = "<4sLQQ" if nbytes >= _FULL32 or header >= _FULL32 else "<4sLLL"
        frame.write(pack(sizes, b"PK\x07\x08", checksum, nbytes, nbytes))
    return Written(name, nbytes, checksum, header, offset)


def _write_directory(frame: _Frame, members: list[Written], start: int) -> None:
    entries = bytearray()
    for name, nbytes, checksum, header, _ in members:
        encoded = name.encode()
        flags = _UTF8 | (_DESCRIPTOR if nbytes else 0)
        wide = _wide_field([nbytes, nbytes] if nbytes >= _FULL32 else [], [header] if header >= _FULL32 else [])
        size, offset = min(nbytes, _FULL32), min(header, _FULL32)
        fixed = (b"PK\x01\x02", 0, 0, flags, 0, 0, 0, checksum, size, size, len(encoded), len(wide), 0, 0, 0, 0, offset)
        entries += pack("<4s6H3L5H2L", *fixed) + encoded + wide
    end = start + len(entries)
    count = len(members)
    frame.write(entries)
    frame.write(
        pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, _MADE_BY, _NEEDED, 0, 0, count, count, len(entries), start)
        + pack("<4sLQL", b"PK\x06\x07", 0, end, 1)
        + pack(
            "<4s4H2LH",
            b"PK\x05\x06",
            0,
            0,
            min(count, _FULL16),
            min(count, _FULL16),
            min(len(entries), _FULL32),
            min(start, _FULL32),
            0,
        )
    )


def _wide_field(sizes: list[int], header: list[int]) -> bytes:
    """Return the zip64 extra field with the values that do not fit into 32 bits; nothing if all do."""
    values = sizes + header
    return pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values) if values else b""
