"""Walking through pickles: the opcodes that Python's own walk finds, and frames that only some readers obey."""

from __future__ import annotations

import datetime as dt
import io
import pickle
import pickletools
import random
import sys
import time
import zipfile
from collections import OrderedDict
from struct import pack
from typing import Any

import pytest

from ckptool.pickles.scanner import Scan, holds_none, may_hold_pickles, scan, scan_around
from ckptool.sources.source import BytesSource
from tests.each import each

VALUES: list[Any] = [
    None,
    [1, 2.5, 1 << 70, -1 << 3000, "text", b"bytes", bytearray(b"more"), (True, False), {1, 2}, frozenset("ab")],
    OrderedDict(when=dt.date(2020, 1, 2), where={"a": [0] * 300}),
    list(range(70_000)),  # longer than a window
    ["x" * 600_000, b"y" * 600_000, "é" * 200_000, 10**1000],
]


DULL = frozenset(b"()]}NRQtbuaes\x81\x85\x86\x87\x88\x89KhqJjrMGX")
"""Opcodes of protocol 2, of which nothing is kept."""


def scanned(data: bytes) -> Scan:
    return scan(BytesSource(data), 0, len(data))


def by_python(data: bytes) -> dict[int, int]:
    """Return each opcode that is kept, and where it is used first, as Python's own walk has it."""
    found: dict[int, int] = {}
    for opcode, _, position in pickletools.genops(data):
        if ord(opcode.code) not in DULL:
            found.setdefault(ord(opcode.code), position or 0)
    return found


@each("protocol", range(6))
@each("value", VALUES)
def test_opcodes_are_those_that_pickletools_finds(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    found = scanned(data)
    assert found.opcodes == by_python(data)
    assert found.split_frame is None


@each("length", [1, (1 << 18) - 12, (1 << 18) - 1, 1 << 18, 3 << 18])
def test_lines_may_end_anywhere(length: int) -> None:
    for data in (b"V" + b"x" * length + b"\n.", b"c" + b"m" * length + b"\n" + b"n" * length + b"\n."):
        assert scanned(data).opcodes == by_python(data)


def test_several_pickles_stand_one_behind_the_other() -> None:
    first, second = pickle.dumps([1.5], 4), pickle.dumps({"a": {2}}, 2)
    found = scanned(first + second).opcodes
    assert found == {code: at + len(first) for code, at in by_python(second).items()} | by_python(first)


def test_blocks_that_are_no_opcodes_are_passed_over() -> None:
    parts = [b"I1\n", b"\xff" * 9, b"0K1", b"\xfe", b"."]
    data = b"".join(parts)
    blocks = [range(3, 12), range(15, 16)]
    assert scan_around(BytesSource(data), 0, len(data), blocks).opcodes == {73: 0, 48: 12, 46: 16}
    assert scan_around(BytesSource(data[12:15]), 0, 3, []).opcodes == {48: 0}


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
    found = [(data[one.offset :][: one.nbytes], one.is_text) for one in scanned(data).carriers]
    raw = value.encode() if isinstance(value, str) else value
    assert found == ([(raw, isinstance(value, str))] if holds else [])


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


BEGINNINGS = (b"\x80\x04", b"cos\n", b"(i\n", b"PK\3\4", b"\x1f\x8b\x08", b"BZh", b"\xfd7zX", b"\x93NUM", b"x\x9c")


@pytest.mark.parametrize("protocol", [2, 4])
def test_without_a_walk_no_string_that_may_be_a_pickle_is_missed(protocol: int) -> None:
    chance = random.Random(protocol)
    said = []
    for _ in range(300):
        strings: list[Any] = [
            chance.choice([*BEGINNINGS, b"conv", b"X\1\0\0\0", b"\x80"])
            + bytes(chance.choices(range(256), k=chance.randrange(9)))
            for _ in range(3)
        ]
        strings = [one.decode("latin-1") if chance.random() < 0.6 else one for one in strings]
        data = pickle.dumps([strings, {"classifier.weight": 384}], protocol)
        none = holds_none(BytesSource(data), 0, len(data))
        carried = scanned(data).carriers
        assert not (none and carried)
        said.append((none, bool(carried)))

    assert {(True, False), (False, True)} <= set(said)


def test_what_could_begin_a_string_everywhere_is_looked_at_in_time() -> None:
    data = b"\x80\x02" + b"Uac" * 80_000 + b"."
    start = time.process_time()

    assert holds_none(BytesSource(data), 0, len(data))
    assert time.process_time() - start < 6  # a walk from each place: hours
