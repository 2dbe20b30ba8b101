"""What reading notes on the way: rare opcodes, strings that may be pickles, frames that only some readers obey."""

from __future__ import annotations

import datetime as dt
import io
import pickle
import pickletools
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Iterable
from struct import pack
from typing import Any

import pytest

from ckptool.pickles.machine import may_hold_pickles
from ckptool.pickles.reader import Pickle, read_pickle
from ckptool.pickles.weights_only import OPCODES
from ckptool.sources.source import BytesSource
from tests.each import each

VALUES: list[Any] = [
    None,
    [1, 2.5, 1 << 70, -1 << 3000, "text", b"bytes", bytearray(b"more"), (True, False), {1, 2}, frozenset("ab")],
    OrderedDict(when=dt.date(2020, 1, 2), where={"a": [0] * 300}),
    list(range(70_000)),  # longer than a window
    ["x" * 600_000, b"y" * 600_000, "é" * 200_000, 10**1000],
]


def scanned(data: bytes) -> Pickle:
    return read_pickle(BytesSource(data))


def unknown(found: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Return the first place of each opcode that torch's own unpickler does not know."""
    return {op: at for op, at in sorted(found, key=lambda one: -one[1]) if op not in OPCODES}


@each("protocol", range(6))
@each("value", VALUES)
def test_opcodes_are_those_that_pickletools_finds(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    found = scanned(data)
    used = ((ord(opcode.code), position or 0) for opcode, _, position in pickletools.genops(data))
    assert unknown(found.opcodes.items()) == unknown(used)
    assert found.split_frame is None


def zipped() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("a", b"b")
    return stream.getvalue()


@each("protocol", [3, 4, 5])
@each(
    ("value", "holds"),
    [
        (pickle.dumps([1], 4), True),
        (pickle.dumps([1], 2).decode("latin-1"), True),
        (b"cos\nsystem\n.", True),
        (zipped(), True),
        (b"c and no line", False),
        (b"\x80\x09", False),
        ("\u20ac text", False),
        ("text", False),
        (b"", False),
    ],
)
def test_strings_that_may_hold_pickles_are_told_with_their_place(value: Any, holds: bool, protocol: int) -> None:
    assert may_hold_pickles(value) == holds
    data = pickle.dumps({"key": [1, value]}, protocol)
    raw = value.encode() if isinstance(value, str) else value
    assert scanned(data).carried == ([(data.index(raw), value)] if holds else [])


@pytest.mark.parametrize("before", [b"(", b"(((", b"cos\nsystem\n"])
def test_what_no_unpickler_goes_on_from_is_no_pickle(before: bytes) -> None:
    for byte in range(0x80):
        data = before + bytes([byte]) + b"\n more\n"
        if may_hold_pickles(data):
            continue
        with pytest.raises(pickle.UnpicklingError, match="invalid load key"):
            pickle.loads(data)
    assert not may_hold_pickles(before + b"x, y\n")
    opcodes = [code.encode("latin-1") for code in map(str, pickletools.code2op)]
    assert all(may_hold_pickles(before + code + b"0\n") for code in opcodes)


def framed(nbytes: int) -> bytes:
    return b"\x95" + pack("<Q", nbytes)


def is_read(data: bytes) -> bool:
    """Say whether Python's own unpickler that obeys frames reads all of a pickle."""
    try:
        pickle._Unpickler(io.BytesIO(data)).load()  # type: ignore[attr-defined]
    except pickle.UnpicklingError:
        return False
    return True


@pytest.mark.parametrize(
    ("body", "split"),
    [
        (framed(2) + b"N.", None),
        (framed(1) + b"N" + framed(1) + b".", None),
        (framed(1) + b"N.", None),
        (framed(2) + b"M\x05\0.", 13),  # ends inside an opcode
        (framed(11) + b"N" + framed(1) + b".", 12),  # a frame in a frame
    ],
)
def test_a_frame_that_ends_inside_an_opcode_is_told_of(body: bytes, split: int | None) -> None:
    data = b"\x80\x04" + body
    if split is None or sys.version_info < (3, 14):  # until then, what is in C does not look
        assert pickle.loads(data) in (None, 5)
    assert is_read(data) == (split is None)
    assert scanned(data).split_frame == split


def test_a_frame_that_goes_on_behind_its_pickle_is_told_of() -> None:
    data = b"\x80\x04" + framed(6) + b"N.\x80\x04N."
    assert scanned(data).split_frame == 12
