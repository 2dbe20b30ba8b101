"""Compressed files: all of what is whole, to the byte, and no more work than that takes."""

from __future__ import annotations

import bz2
import gzip
import lzma
import random
import zlib
from collections.abc import Callable
from time import process_time
from typing import Any

import pytest

from ckptool import Limits
from ckptool.archives.compressed import GZIP, compression_of, decompress_as_far
from ckptool.sources.source import BytesSource
from tests.build import COMPRESSED
from tests.scale import in_turn

UNPACKERS: dict[str, Callable[[], Any]] = {
    "gzip": lambda: zlib.decompressobj(31),
    "zlib": zlib.decompressobj,
    "bzip2": bz2.BZ2Decompressor,
    "xz": lzma.LZMADecompressor,
    "lzma": lzma.LZMADecompressor,
}


def values(nbytes: int) -> bytes:
    return random.Random(0).randbytes(nbytes // 2) * 2


def to_the_byte(kind: str, data: bytes, whole: int = 1) -> bytes:
    """Return what the unpacker of Python gives of damaged data, one byte at a time after those that are whole."""
    unpacker = UNPACKERS[kind]()
    output = bytearray(unpacker.decompress(data, whole))
    data = getattr(unpacker, "unconsumed_tail", b"")
    try:
        while not unpacker.eof:
            piece = unpacker.decompress(data, 1)
            data = getattr(unpacker, "unconsumed_tail", b"")
            if not piece and not data:
                break
            output += piece
    except (zlib.error, lzma.LZMAError, OSError, EOFError):
        pass
    return bytes(output)


@pytest.mark.parametrize(("kind", "at"), in_turn(COMPRESSED, [0.3, 0.9]))
def test_what_stands_before_the_damage_is_unpacked_to_the_byte(kind: str, at: float) -> None:
    data = bytearray(COMPRESSED[kind](values(60_000)))
    data[int(len(data) * at)] ^= 0xFF
    compression = compression_of(bytes(data[:64]))
    assert compression is not None

    found, why = decompress_as_far(BytesSource(bytes(data)), compression, Limits())

    assert bytes(found) == to_the_byte(kind, bytes(data))
    assert why is not None or found == values(60_000)


def test_damage_behind_much_that_is_whole_takes_no_more_time_than_that() -> None:
    data = bytearray(gzip.compress(bytes(32 << 20) + values(60_000)))
    data[-30_000] ^= 0xFF
    start = process_time()
    found, why = decompress_as_far(BytesSource(bytes(data)), GZIP, Limits())

    assert bytes(found) == to_the_byte("gzip", bytes(data), 32 << 20)
    assert why is not None
    assert process_time() - start < 4  # by single bytes, it takes minutes
