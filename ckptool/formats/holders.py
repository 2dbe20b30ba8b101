"""
Pickles inside files of numpy and inside text as base64, for those who search for pickles.

    \\x93NUMPY, version, length, {'descr': '<f4', …}, elements, \\x93NUMPY, …      numpy.save, several times
    {"policy": {":serialized:": "gASV…"}}                                         stable-baselines3
    id,model⏎1,gASV…                                                               a table of any program
"""

from __future__ import annotations

import re
from base64 import b64encode
from binascii import a2b_base64
from collections.abc import Iterator
from math import prod
from typing import Final

from ckptool.archives.archive import NUMPY
from ckptool.errors import LimitExceeded
from ckptool.pickles.machine import may_hold_pickles
from ckptool.sources.source import Source

_SHORTEST: Final = 12
_LONGEST_HEADER: Final = 1 << 16
_TYPE: Final = rb"'[<>|=]([biufcUSVmM])(\d{1,9})(?:\[\w+\])?'"
_PART: Final = re.compile(rb"\('[^'\\]*', " + _TYPE + rb"(?:, \(([\d, ]*)\))?\)")
_HEADER: Final = re.compile(
    rb"\{'descr': (?:(" + _TYPE + rb")|\[((?:" + _PART.pattern + rb"(?:, )?)*)\]), "
    rb"'fortran_order': (?:True|False), 'shape': \(((?:\d{1,18}(?:, ?)?)*)\), *\}\s*"
)
"""The header of an array whose element type gives the size in bytes, in one part or several."""
_OF_CHARACTER: Final = 4
_BLOCK: Final = 1 << 24
"""Bytes that are searched at a time; a text of more than that is not decoded."""
_BASE64: Final = re.compile(rb'"([\w+/=\n-]{20,})"').finditer
_RUN: Final = re.compile(rb"([\w+/-]{20,}(?:(?<=[\w+/-]{60})\r?\n[\w+/-]+)*)").match
"""Base64 in any other text; long lines of it continue in the next."""
_IN_RUNS: Final = bytes(re.match(rb"[\w+/-]", bytes([one])) is not None for one in range(256))
_LEAST_RUN: Final = b"\1" * 20
_MARKED: Final = re.compile(rb'serialized[^"]{0,8}"\s*:\s*"([^"]*)"').finditer
"""Text that stable-baselines3 decodes whatever else is in it: it ignores other characters."""
_UNSURE: Final = re.compile(rb'serialized[^"]{0,8}"(?!\s{0,99}:\s{0,99}[\d\-tfn\[{])').search
"""The same where a part may be in the next block; not a key with a number, as a vocabulary has it."""
_CONTROL: Final = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")
_PRINTABLE: Final = re.compile(rb"\\u00[2-7][0-9A-Fa-f]").finditer
_NUMBERED: Final = re.compile(rb"\\u[0-9A-Fa-f]{4}").sub
_URL_SAFE: Final = bytes.maketrans(b"-_", b"+/")
_OTHERS: Final = bytes(one for one in range(256) if one not in b64encode(bytes(range(256)))) + b"="


def array_at(source: Source, at: int) -> tuple[int, int | None] | None:
    """
    Return the offset of the elements of a numpy array that begins at ``at``, and their size in bytes, which is None if
    they may be objects, which are a pickle. Return None if no array begins there.
    """
    head = source.read(at, min(_SHORTEST, source.nbytes - at))
    if not head.startswith(NUMPY) or len(head) < _SHORTEST:
        return None
    width = 2 if head[len(NUMPY)] == 1 else 4
    first = len(NUMPY) + 2
    length = int.from_bytes(head[first : first + width], "little")
    begin = at + first + width
    header = source.read(begin, max(0, min(length, _LONGEST_HEADER, source.nbytes - begin)))
    found = _HEADER.fullmatch(header)
    if found is None:
        return begin + length, None
    whole, parts, shape = found[1], found[4], found[8]
    sizes = (
        int(size) * (_OF_CHARACTER if kind == b"U" else 1) * _product(inner)
        for kind, size, inner in _PART.findall(parts if whole is None else b"('', " + whole + b")")
    )
    return begin + length, sum(sizes) * _product(shape)


def _product(shape: bytes) -> int:
    return prod(map(int, re.findall(rb"\d{1,18}", shape)))


def is_json(head: bytes) -> bool:
    """Return whether a file that begins so may be JSON."""
    return head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] in (b"{", b"[")


def is_text(head: bytes) -> bool:
    """Return whether a file that begins so may be text, with one byte for each plain character."""
    return _CONTROL.search(head) is None


def base64_texts(source: Source, *, is_json: bool = True) -> Iterator[tuple[int, bytes]]:
    """
    Yield the base64 texts in JSON, or in any text, that may be pickles: the offset of each, and the decoded bytes.

    Raises:
        LimitExceeded: A text is longer than what is decoded.
    """
    at = 0
    while at < source.nbytes:
        block = source.read(at, min(_BLOCK, source.nbytes - at))
        found = _unescaped(block) if b"\\" in block else block
        marked = _MARKED(found) if is_json and b"serialized" in found else ()
        for text in (*(_BASE64 if is_json else _runs)(found), *marked):
            for plain in {text[1], text[1].translate(_URL_SAFE)}:
                data = plain.translate(None, _OTHERS)
                if may_hold_pickles(decoded := a2b_base64(data[: len(data) - (len(data) % 4 == 1)] + b"==")):
                    yield at + text.start(1), decoded
        ends = b'"' if is_json else b'"\n,'
        last = max(block.rfind(bytes([end])) for end in ends) if at + len(block) < source.nbytes else -1
        if is_json and source.nbytes > _BLOCK and _UNSURE(found):
            raise LimitExceeded(f"objects in JSON of more than {_BLOCK:,} bytes, which may be base64")
        if last == 0:
            raise LimitExceeded(f"a text in it of more than {_BLOCK:,} bytes, which may be base64")
        at += last if last > 0 else len(block)


def _runs(block: bytes) -> Iterator[re.Match[bytes]]:
    """Yield the runs of characters of base64; finding those of 20 and more is far faster than matching them."""
    marks, at = block.translate(_IN_RUNS), 0
    while (at := marks.find(_LEAST_RUN, at)) >= 0 and (found := _RUN(block, at)):
        yield found
        at = found.end()


def _unescaped(block: bytes) -> bytes:
    """
    Return JSON with escapes replaced by their characters, or by zeros where these would end a text.

    The length stays the same, except where characters are given by their numbers.
    """
    found = block.replace(b"\\\\", b"\0\0").replace(b"\\/", b"\n/")
    for escape in b'"tbfnr':
        found = found.replace(b"\\%c" % escape, b"\n\n" if escape in b"nr" else b"\0\0")
    for escaped in {one[0] for one in _PRINTABLE(found)}:
        plain = bytes([int(escaped[4:], 16)])
        found = found.replace(escaped, b"\0" if plain in b'"\\' else plain)
    return _NUMBERED(b"\0" * 6, found)
