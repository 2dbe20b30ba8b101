"""
List which opcodes a pickle uses, and the pickles in its strings.

The walk goes from opcode to opcode by their lengths; it builds nothing. It is for streams that were interpreted
before, so every length has been compared with the source.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from itertools import chain
from typing import Final, NamedTuple

from ckptool.sources.source import Source

_WINDOW: Final = 1 << 18
_LONGEST_FIXED: Final = 9
_PROTO: Final = 0x80
_MAX_PROTOCOL: Final = 5

_FIXED: Final = {
    0x80: 1,  # PROTO
    0x95: 8,  # FRAME
    ord("K"): 1,
    ord("M"): 2,
    ord("J"): 4,
    ord("G"): 8,
    ord("h"): 1,
    ord("j"): 4,
    ord("q"): 1,
    ord("r"): 4,
    0x82: 1,
    0x83: 2,
    0x84: 4,
}
"""Bytes of argument, for opcodes that have a fixed number of them; those not named anywhere here have none."""
_COUNTED: Final = {
    0x8A: 1,
    0x8B: 4,
    ord("T"): 4,
    ord("U"): 1,
    ord("X"): 4,
    0x8C: 1,
    0x8D: 8,
    ord("B"): 4,
    0x8E: 8,
    ord("C"): 1,
    0x96: 8,
}
"""Size in bytes of the count before as many bytes of argument."""
_LINES: Final = {**dict.fromkeys(b"ILFSVPgp", 1), **dict.fromkeys(b"ci", 2)}
_TEXT: Final = frozenset((ord("X"), 0x8C, 0x8D))
_BYTES: Final = frozenset((ord("T"), ord("U"), ord("B"), 0x8E, ord("C"), 0x96))
FIRST: Final = b"\x80\xc2\xc3\x93\xfdP\x1fBxc("
"""What strings begin with that may hold pickles: see below. The first two bytes of UTF-8 stand for any from 0x80 on."""
_TEXT_OF_PROTOCOL_2: Final = ord("X")
_FREQUENT: Final = b"X\x8c"
"""Opcodes of strings that readers have no table for."""
_OF_RARE_STRINGS: Final = (_TEXT | _BYTES).difference(_FREQUENT)
_HOLDERS: Final = (
    *(b"PK\x03\x04", b"\x1f\x8b\x08", b"BZh", b"\xfd7zX", b"\x93NUM"),
    *(b"x\x01", b"x\x5e", b"x\x9c", b"x\xda"),
)
"""Zip, gzip, bzip2, xz, an array of numpy, zlib."""
_TEXT_PICKLE: Final = b"c("
"""What a pickle without PROTO begins with, mostly; then there is an end of line in it."""
_LONGEST_TEXT: Final = 512
"""Bytes in which a pickle without PROTO has the end of a line: of its first name, mostly."""
_LINE: Final = rb"c[^\0-\x08\x0b\x0c\x0e-\x1f]{0,510}?\n"
"""The module of a name: none has control characters in it."""
_BEGINS_WITH_LINE: Final = re.compile(rb"\(|%b" % _LINE, re.DOTALL).match
_STOPS_AT_ONCE: Final = re.compile(
    rb"(?:\(+|c[^\n]*\n[^\n]*\n)[^().012BCFGIJKLMNPQRSTUVX\]ab-eghijlopqrstu}?\x80-\xff]"
).match
"""
A name or a bracket, and then a character that is no opcode, at which every unpickler stops: source code, mostly.
A question mark may stand for any character.
"""
_HEADS: Final = rb"(?:[\x80\xc2\xc3\x93\xfdP\x1fBx(]|%b)" % _LINE
"""What strings begin with that may hold pickles, roughly."""
_SIZES: Final = {1: rb".", 4: rb"..[\0-\4]\0", 8: rb"..[\0-\4]\0{5}"}
"""Of strings in a window, by how many bytes say it."""
_FRAME: Final = 0x95
_STOP: Final = 0x2E
_STEPS: Final = [
    1 + _FIXED.get(op, 0) if op not in _COUNTED and op not in _LINES and op not in (_FRAME, _STOP) else 0
    for op in range(256)
]
"""From an opcode to the next; 0 where that takes a look at its argument."""


_TEXTS: Final = b"|".join(
    rb"\x%02x\0{3}[\x20-AC-OQ-wy-\x7e][\x20-\x7e]{%d}" % (count, count - 1) for count in range(1, 33)
)
"""Short texts that can be no pickles, each with its size in front: a key of digits, a device."""
_DULL: Final = re.compile(
    rb"(?:[()\]}NRQtbuaes\x81\x85-\x89]+|[Khq].|[Jjr].{4}|M.{2}|G.{8}|X(?:%b)){1,1000}" % _TEXTS, re.DOTALL
).match
"""Opcodes of protocol 2 and short texts: they make up nearly all of a pickle, and nothing is to be kept of them."""


class Carrier(NamedTuple):
    """A string that may be a pickle, or an archive of some, by its first bytes."""

    offset: int
    nbytes: int
    is_text: bool


class Scan(NamedTuple):
    """What was seen on the way through."""

    opcodes: dict[int, int]
    """Every opcode that is used, and the offset of its first use; but for those of protocol 2."""
    carriers: tuple[Carrier, ...] = ()
    """All strings that begin like one, or like an archive."""
    split_frame: int | None = None
    """Where a frame ends inside an opcode, or goes on after its pickle: loaders disagree about what follows."""


def may_hold_pickles(value: str | bytes | bytearray) -> bool:
    """Say whether a string may be a pickle, or hold some, by its first bytes. Characters of text stand for bytes."""
    if not value:
        return False
    if isinstance(value, str):
        first = ord(value[0])
        if first > 0xFF or first not in FIRST:
            return False
        value = value[:_LONGEST_TEXT].encode("latin-1", "replace")
    if value[0] in _TEXT_PICKLE:
        return _may_be_lines(value[:_LONGEST_TEXT])
    return (value[0] == _PROTO and len(value) > 1 and value[1] <= _MAX_PROTOCOL) or value.startswith(_HOLDERS)


def _may_be_lines(text: bytes | bytearray) -> bool:
    """Say whether text that begins as a pickle without PROTO may be one."""
    return b"\n" in text and _BEGINS_WITH_LINE(text) is not None and _STOPS_AT_ONCE(text) is None


def holds_none(source: Source, start: int, end: int, rare: Collection[int] = _OF_RARE_STRINGS) -> bool:
    """
    Say whether it is certain, without a walk, that no string in ``source[start:end]`` may hold pickles.

    ``rare`` are the opcodes of other strings than the usual ones that may be there. Those that end with their line are
    not looked at, and where opcodes are in frames, that takes a walk. So do long pickles.
    """
    if end - start > _WINDOW or _FRAME in rare:
        return False
    data = source.read(start, end - start)
    for op in (*_FREQUENT, *filter(_OF_RARE_STRINGS.__contains__, rare)):
        width = _COUNTED[op]
        for found in _beginnings(op)(data) if op in data else ():
            begin = found.start() + 1 + width
            count = int.from_bytes(data[found.start() + 1 : begin], "little")
            # Where it is longer than what is left, these are other bytes than those of a string.
            if begin + count <= len(data) and _may_carry(source, start, data, begin, count, is_text=op in _TEXT):
                return False
    return True


@cache
def _beginnings(op: int) -> Callable[[bytes], Iterator[re.Match[bytes]]]:
    """Compile, when it is needed, what finds an opcode before a size and such a beginning, or other bytes like it."""
    return re.compile(rb"%b(?=%b%b)" % (re.escape(bytes((op,))), _SIZES[_COUNTED[op]], _HEADS), re.DOTALL).finditer


def scan(source: Source, start: int, end: int) -> Scan:  # noqa: C901 - a hot loop: calls would double its time
    """
    Walk the pickles that fill ``source[start:end]``, one after the other.

    What stands in the strings is not looked at, but for the first bytes of each.
    """
    opcodes: dict[int, int] = {}
    carriers: list[Carrier] = []
    steps = _STEPS
    base = start
    data = source.read(base, min(_WINDOW, end - base))
    pos = 0
    frame_end: int | None = None
    split: int | None = None
    stop = end
    while base + pos < end:
        if base + pos >= stop and frame_end is not None:
            if base + pos > frame_end and split is None:
                split = frame_end
            frame_end, stop = None, end
        if pos + _LONGEST_FIXED > len(data) and base + len(data) < end:
            base += pos
            pos, data = 0, source.read(base, min(_WINDOW, end - base))
        dull = _DULL(data, pos, stop - base)
        if dull is not None:
            pos = dull.end()
            if pos + _LONGEST_FIXED > len(data) or base + pos >= stop or steps[data[pos]]:
                continue
        op = data[pos]
        if op not in opcodes:
            opcodes[op] = base + pos
        step = steps[op]
        if not step:
            if op in _COUNTED:
                width = _COUNTED[op]
                at = pos + 1 + width
                count = int.from_bytes(data[pos + 1 : at], "little")
                step = 1 + width + count
                if (
                    count > 1
                    and (at >= len(data) or data[at] in FIRST)
                    and (op in _TEXT or op in _BYTES)
                    and _may_carry(source, base, data, at, count, is_text=op in _TEXT)
                ):
                    carriers.append(Carrier(base + at, count, op in _TEXT))
            elif op == _FRAME:
                step = 9
                if frame_end is not None and split is None:
                    split = base + pos
                frame_end = base + pos + 9 + int.from_bytes(data[pos + 1 : pos + 9], "little")
                stop = min(frame_end, end)
            elif op == _STOP:
                step = 1
                if frame_end not in (None, base + pos + 1) and split is None:
                    split = base + pos
                frame_end, stop = None, end
            else:
                step = (
                    _lines(data, pos, _LINES[op]) or _to_end_of_lines(source, base + pos, end, _LINES[op]) - base - pos
                )
        pos += step
        if pos >= len(data) and base + pos < end:
            base += pos
            pos, data = 0, source.read(base, min(_WINDOW, end - base))
    if frame_end is not None and base + pos > frame_end and split is None:
        split = frame_end
    opcodes.pop(_TEXT_OF_PROTOCOL_2, None)
    return Scan(opcodes, tuple(carriers), split)


def scan_around(source: Source, start: int, end: int, blocks: Sequence[range]) -> Scan:
    """Walk ``source[start:end]`` as ``scan`` does, but for blocks of bytes in it that are no opcodes."""
    if not blocks:
        return scan(source, start, end)
    opcodes: dict[int, int] = {}
    parts = []
    for block in (*blocks, range(end, end)):
        if start < block.start:
            parts.append(scan(source, start, block.start))
            opcodes = parts[-1].opcodes | opcodes
        start = block.stop
    return Scan(
        opcodes,
        tuple(chain.from_iterable(part.carriers for part in parts)),
        next((part.split_frame for part in parts if part.split_frame is not None), None),
    )


def end_of_opcode(source: Source, position: int) -> int:
    """Return where the opcode at ``position`` ends, with its argument, which the source may not have."""
    data = source.read(position, min(_LONGEST_FIXED, source.nbytes - position))
    op = data[0]
    if op in _LINES:
        return _to_end_of_lines(source, position, source.nbytes, _LINES[op])
    if op in _COUNTED:
        behind = 1 + _COUNTED[op]
        return position + behind + int.from_bytes(data[1:behind], "little")
    return position + 1 + _FIXED.get(op, 0)


def _may_carry(source: Source, base: int, data: bytes, at: int, nbytes: int, *, is_text: bool) -> bool:
    """Say whether the string at ``at`` in ``data``, which begins at ``base``, may be a pickle by its first bytes."""
    length = min(_LONGEST_TEXT, nbytes)
    head = data[at : at + length] if at + length <= len(data) else source.read(base + at, length)
    return may_hold_pickles(str(head, "utf-8", "replace") if is_text and not head.isascii() else head)


def _lines(data: bytes, pos: int, count: int) -> int:
    """Return the length of an opcode at ``pos`` with its lines; 0 if they go beyond what was read."""
    at = pos
    for _ in range(count):
        at = data.find(b"\n", at) + 1
        if not at:
            return 0
    return at - pos


def _to_end_of_lines(source: Source, position: int, end: int, count: int) -> int:
    """Return where the lines end that an opcode at ``position`` has for its argument."""
    begin = position
    while begin < end:
        block = source.read(begin, min(_WINDOW, end - begin))
        at = 0
        while count and (found := block.find(b"\n", at)) >= 0:
            at, count = found + 1, count - 1
        if not count:
            return begin + at
        begin += len(block)
    return end
