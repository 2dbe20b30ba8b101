"""
What lies in files that are neither archives nor pickles: arrays of numpy, and bytes that a text has as base64.

    \\x93NUMPY, version, length, {'descr': '<f4', …}, elements, \\x93NUMPY, …      numpy.save, several times
    {"policy": {":serialized:": "gASV…"}}                                         stable-baselines3
    id,model⏎1,gASV…                                                               a table of any program
"""

from __future__ import annotations

import re
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
_PLAIN: Final = re.compile(
    rb"\{'descr': '[<>|=]([biufcUSVmM])(\d{1,9})(?:\[\w+\])?', 'fortran_order': (?:True|False), "
    rb"'shape': \(((?:\d{1,18}(?:, ?)?)*)\), *\}\s*"
)
"""The header of an array whose elements say by themselves how many bytes they take."""
_FIELDS: Final = re.compile(
    rb"\{'descr': \[(?:\('[^'\\]*', '[<>|=][biufcUSVmM]\d{1,9}(?:\[\w+\])?'(?:, \([\d, ]*\))?\)(?:, )?)*\], "
    rb"'fortran_order': (?:True|False), 'shape': \([\d, ]*\), *\}\s*"
)
"""That of one whose elements have several parts, none of them an object."""
_OF_CHARACTER: Final = 4
_STEP: Final = 1 << 12
_BLOCK: Final = 1 << 24
"""Bytes that are searched at a time; a text of more than that is not decoded."""
_BASE64: Final = re.compile(rb'"(?=(?:[\w+/=-]|\\[nr/]){20})([\w+/=-]*(?:\\[nr/][\w+/=-]*)*)"').finditer
_RUN: Final = re.compile(rb"([\w+/-]{20,}(?:(?<=[\w+/-]{60})\r?\n[\w+/-]+)*)").finditer
"""In any other text; long lines of it go on in the next."""
_MARKED: Final = re.compile(rb'serialized[^"]{0,8}"\s*:\s*"([^"\\]*(?:\\.[^"\\]*)*)"').finditer
"""What stable-baselines3 decodes whatever else is in it: other characters are passed over."""
_UNSURE: Final = re.compile(rb'serialized[^"]{0,8}"(?!\s{0,99}:\s{0,99}[\d\-tfn\[{])').search
"""The same where a part of it may lie in what is read next: not a key of numbers, as a vocabulary has it."""
_CONTROL: Final = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")
_ESCAPE: Final = re.compile(rb"\\(?:u00([2-7][0-9A-Fa-f])|.)", re.DOTALL)
_OTHERS: Final = re.compile(rb"\\u[0-9A-Fa-f]{4}|\\(?:(/)|.)|[^A-Za-z0-9+/]")
_URL_SAFE: Final = bytes.maketrans(b"-_", b"+/")


def arrays(source: Source) -> Iterator[tuple[int, bool]]:
    """
    Yield where the elements of each array begin that a file of numpy has, and what is no array behind them; and whether
    it may be one of objects, for which a pickle stands.

    Not those of numbers or texts: their loader takes them as they are.
    """
    at = 0
    while 0 <= at < source.nbytes:
        head = source.read(at, min(_SHORTEST, source.nbytes - at))
        if not head.startswith(NUMPY) or len(head) < _SHORTEST:
            if not head.startswith(b"PK"):  # of a cut zip, the next member
                yield at, False
            return
        width = 2 if head[len(NUMPY)] == 1 else 4
        first = len(NUMPY) + 2
        length = int.from_bytes(head[first : first + width], "little")
        begin = at + first + width
        at = begin + length
        if at >= source.nbytes:
            return
        header = source.read(begin, min(length, _LONGEST_HEADER))
        plain = _PLAIN.fullmatch(header)
        if plain is not None:
            at += _nbytes(*plain.groups())
        else:
            yield at, _FIELDS.fullmatch(header) is None
            at = _find(source, NUMPY, at)


def _nbytes(kind: bytes, size: bytes, shape: bytes) -> int:
    return int(size) * (_OF_CHARACTER if kind == b"U" else 1) * prod(map(int, re.findall(rb"\d+", shape)))


def _find(source: Source, mark: bytes, start: int) -> int:
    at, step = start, _STEP  # more each time: there may be many, and each near the one before
    while at < source.nbytes:
        found = source.read(at, min(step + len(mark) - 1, source.nbytes - at)).find(mark)
        if found >= 0:
            return at + found
        at, step = at + step, min(2 * step, _BLOCK)
    return -1


def is_json(head: bytes) -> bool:
    """Say whether a file that begins so may be JSON."""
    return head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] in (b"{", b"[")


def is_text(head: bytes) -> bool:
    """Say whether a file that begins so may be text, of one byte for each plain character."""
    return _CONTROL.search(head) is None


def base64_texts(source: Source, *, is_json: bool = True) -> Iterator[tuple[int, bytes]]:
    """
    Yield what the texts in JSON, or in any text, are that are base64 and may be pickles, each with its place.

    Raises:
        LimitExceeded: One is longer than is decoded.
    """
    at = 0
    while at < source.nbytes:
        block = source.read(at, min(_BLOCK, source.nbytes - at))
        found = block if b"\\u00" not in block else _ESCAPE.sub(_unescaped, block)
        marked = _MARKED(found) if is_json and b"serialized" in found else ()
        for text in (*(_BASE64 if is_json else _RUN)(found), *marked):
            for plain in {text[1], text[1].translate(_URL_SAFE)}:
                data = _OTHERS.sub(lambda one: one[1] or b"", plain)
                if may_hold_pickles(decoded := a2b_base64(data[: len(data) - (len(data) % 4 == 1)] + b"==")):
                    yield at + text.start(1), decoded
        ends = b'"' if is_json else b'"\n,'
        last = max(block.rfind(bytes([end])) for end in ends) if at + len(block) < source.nbytes else -1
        if is_json and source.nbytes > _BLOCK and _UNSURE(found):
            raise LimitExceeded(f"objects in JSON of more than {_BLOCK:,} bytes, which may be base64")
        if last == 0:
            raise LimitExceeded(f"a text in it of more than {_BLOCK:,} bytes, which may be base64")
        at += last if last > 0 else len(block)


def _unescaped(one: re.Match[bytes]) -> bytes:
    """Return the character that an escape stands for; as it is where that would end the text, or begin another."""
    plain = bytes([int(one[1], 16)]) if one[1] else b"\\"
    return one[0] if plain in b'"\\' else plain
