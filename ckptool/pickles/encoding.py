"""Numbers, truth values and tuples as opcodes of a pickle."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator
from struct import pack
from typing import Final


def encode_get(index: int) -> bytes:
    """Return the opcode that gets what the memo has under a number."""
    return b"h" + bytes([index]) if index < 256 else pack("<cI", b"j", index)


def encode_int(value: int) -> bytes:
    """Return the shortest opcode for a whole number, as ``pickle`` itself has it."""
    if 0 <= value < 1 << 8:
        return _BYTES[value]
    if 0 <= value < 1 << 16:
        return pack("<cH", b"M", value)
    if -(1 << 31) <= value < 1 << 31:
        return pack("<ci", b"J", value)
    digits = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return (pack("<cB", b"\x8a", len(digits)) if len(digits) < 256 else pack("<ci", b"\x8b", len(digits))) + digits


def encode_padding(nbytes: int, index: int, protocol: int) -> Iterator[bytes]:
    """
    Yield opcodes that change nothing of the value on the stack, or nothing where none have that length.

    The version again has two bytes. To put the value into the memo once more has five, which is faster to read where
    it is long. torch's own unpickler refuses what takes something from the stack; and memory for a memo up to an index
    is taken, so they follow ``index``.
    """
    if nbytes < 2 or nbytes == 3:
        return
    versions = (nbytes - nbytes % 2 * 5) // 2 if nbytes < _LONG else 3 * nbytes % 5  # the fewest that leave fives
    yield bytes([0x80, protocol]) * versions
    stop = index + (nbytes - 2 * versions) // 5
    for start in range(index, stop, _LONG):
        indices = array("I", range(start, min(start + _LONG, stop)))
        if sys.byteorder == "big":
            indices.byteswap()
        puts, numbers = bytearray(b"r\0\0\0\0") * len(indices), indices.tobytes()
        for place in range(4):
            puts[1 + place :: 5] = numbers[place::4]
        yield bytes(puts)


_LONG: Final = 1 << 12
_BYTES: Final = [b"K" + bytes([value]) for value in range(256)]
BOOLS: Final = (b"\x89", b"\x88")
TUPLES: Final = (b")", b"\x85", b"\x86", b"\x87")
"""The opcode that makes a tuple of so many items on the stack."""
