"""Pickles: the last size that is right, the first that is wrong, and how much is read for them."""

from __future__ import annotations

import pickle
from struct import pack

import pytest

from ckptool import LimitExceeded, MalformedFile, TruncatedFile
from ckptool.pickles.reader import Pickle, read_pickle
from ckptool.sources.source import BytesSource
from tests.bounds.sources import Asked
from tests.each import each

WINDOW, WIDEST = 1 << 16, 1 << 18


def read(data: bytes) -> Pickle:
    return read_pickle(Asked(data))


def refused(data: bytes) -> MalformedFile | TruncatedFile:
    with pytest.raises((MalformedFile, TruncatedFile)) as caught:
        read(data)
    return caught.value


# The loop


@pytest.mark.parametrize("data", [b".", b"0.", b"K\1(.", b"h\0.", b"\x85."])
def test_a_whole_pickle_that_makes_no_sense_is_malformed_and_not_truncated(data: bytes) -> None:
    assert type(refused(data)) is MalformedFile


@each("data", [b"", b"N", b"0", b"K", b"N0N", b"h", b"(", b"X\1\0\0\0"])
def test_a_pickle_without_its_end_is_truncated(data: bytes) -> None:
    assert type(refused(data)) is TruncatedFile


def test_a_value_put_in_place_of_another_takes_its_place() -> None:
    put = b"r\0\0\0\0"
    assert read(b"K\1" + put + b"K\2" + put + b"j\0\0\0\0\x87.").root == (1, 2, 2)


def test_memo_indices_reach_from_0_to_32_bits() -> None:
    for index in (0, 1, (1 << 31) - 1, 1 << 31, (1 << 32) - 1):
        assert read(b"K\1p%d\n0g%d\n." % (index, index)).root == 1
    for index in (-1, 1 << 32):
        assert type(refused(b"K\1p0\n0g%d\n." % index)) is MalformedFile
        assert type(refused(b"K\1p%d\n." % index)) is MalformedFile


# Lengths


@pytest.mark.parametrize(
    ("code", "head"), [("X", "<I"), ("B", "<I"), ("T", "<i"), ("\x8d", "<Q"), ("\x8e", "<Q"), ("\x96", "<Q")]
)
def test_a_string_may_reach_to_the_end_and_no_further(code: str, head: str) -> None:
    opcode = code.encode("latin-1")
    for text in (b"", b"x", b"xyz"):
        found = read(opcode + pack(head, len(text)) + text + b".").root
        assert found in (text, text.decode())
        error = refused(opcode + pack(head, len(text) + 2) + text + b".")
        assert type(error) is TruncatedFile
        assert error.needed == 1 + len(pack(head, 0)) + len(text) + 2


def test_a_length_may_be_nothing_and_not_less() -> None:
    assert read(b"\x8b\0\0\0\0.").root == 0
    assert read(b"T\0\0\0\0.").root == ""
    assert type(refused(b"\x8b\xff\xff\xff\xff.")) is MalformedFile
    assert type(refused(b"T\xff\xff\xff\xff.")) is MalformedFile


def test_a_frame_may_reach_to_the_end_and_no_further() -> None:
    assert read(b"\x80\4\x95" + pack("<Q", 2) + b"N.").root is None
    error = refused(b"\x80\4\x95" + pack("<Q", 3) + b"N.")
    assert (type(error), error.needed, error.actual) == (TruncatedFile, 12, 11)


def test_numbers_of_up_to_1024_digits_are_numbers_and_longer_ones_are_refused() -> None:
    for digits in (1023, 1024, 1025):
        for number in (
            b"L" + b"7" * digits + b"L\n.",
            b"I" + b"7" * digits + b"\n.",
            b"\x8b" + pack("<i", digits) + b"\1" * digits + b".",
        ):
            if digits <= 1024:
                assert read(number).root == pickle.loads(number)
            else:
                with pytest.raises(LimitExceeded, match="1,025"):
                    read(number)


def test_the_protocol_may_be_five_and_not_more() -> None:
    assert read(b"\x80\5N.").protocol == 5
    assert type(refused(b"\x80\6N.")) is MalformedFile


# The window


def sizes(data: bytes) -> list[int]:
    """Return how many bytes each read asked for that it takes to read a pickle at the head of some bytes."""
    source = Asked(data)
    read_pickle(source)
    return source.sizes


@each("rest", [b"", b".", b"0"])
@each("length", range(WINDOW - 5, WINDOW + 3))
def test_a_line_may_end_anywhere_round_the_end_of_a_window(length: int, rest: bytes) -> None:
    data = b"V" + b"x" * length + b"\n" + rest
    if rest == b".":
        assert len(read(data).root) == length
    else:
        error = refused(data)
        assert (error.needed, error.actual) == (1, 0)


@each("before", range(WINDOW - 16, WINDOW + 3))
def test_an_opcode_may_stand_anywhere_round_the_end_of_a_window(before: int) -> None:
    fill = b"".join(
        b"B" + pack("<I", size - 6) + bytes(size - 6) + b"0" for size in (before // 2, before - before // 2)
    )
    for opcode, value in (
        (b"G" + pack(">d", 0.5), 0.5),
        (b"J\7\0\0\0", 7),
        (b"M\7\0", 7),
        (b"X\3\0\0\0abc", "abc"),
        (b"\x8c\3abc", "abc"),
        (b"\x95" + pack("<Q", 2) + b"N", None),
        (b"C\3abc", b"abc"),
        (b"K\7r\0\0\0\0", 7),
        (b"K\7", 7),
    ):
        whole = read(fill + opcode + b".")
        assert whole.root == value


def test_a_pickle_that_begins_later_is_read_from_there() -> None:
    data = b"x" * 70_000 + b"K\7."
    assert read_pickle(BytesSource(data), 70_000).root == 7
