"""Tars: the last size that is right, and the first that is wrong."""

from __future__ import annotations

import pytest

from ckptool import MalformedFile, TruncatedFile
from ckptool.archives.tars import is_tar
from tests.archives.test_tars import archive_of, contents, extended, member, packed


@pytest.mark.parametrize(("length", "read"), [(65_535, True), (65_536, True), (65_537, False)])
def test_a_name_may_be_64_kib_long(length: int, read: bool) -> None:
    data = packed(member("././@LongLink", b"n" * length, type=b"L"), member("a", b"x"))
    if read:
        assert contents(data) == {"n" * length: b"x"}
    else:
        with pytest.raises(MalformedFile):
            archive_of(data)


def line(size: str) -> bytes:
    length = len(size) + len("  size=\n")
    length += len(str(length))
    record = f"{length} size={size}\n".encode()
    return record if len(record) == length else f"{length - 1} size={size}\n".encode()


@pytest.mark.parametrize(("digits", "read"), [(18, True), (19, True), (20, False), (21, False)])
def test_a_size_may_have_nineteen_digits(digits: int, read: bool) -> None:
    data = extended(line("1".rjust(digits, "0"))) + packed(member("a", b"x"))
    if read:
        assert contents(data) == {"a": b"x"}
    else:
        with pytest.raises(MalformedFile):
            archive_of(data)


def test_a_header_is_512_bytes() -> None:
    header = packed(member("a"))[:512]

    assert is_tar(header)
    assert is_tar(header + b"x")
    assert not is_tar(header[:511])


def test_a_member_may_end_with_the_file_and_no_later() -> None:
    data = packed(member("a", b"x" * 700))[: 512 + 700]

    assert contents(data) == {"a": b"x" * 700}
    with pytest.raises(TruncatedFile) as caught:
        archive_of(data[:-1])
    assert (caught.value.needed, caught.value.actual) == (1212, 1211)
