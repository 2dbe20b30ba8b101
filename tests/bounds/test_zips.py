"""Zips: the last size that is right, and the first that is wrong."""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptool import AmbiguousFile, LimitExceeded, Limits, MalformedFile, Source, TruncatedFile
from ckptool.archives.zip_directory import END_SEARCH, find_directory
from ckptool.errors import CkptoolError
from ckptool.sources.files import FileSource
from ckptool.sources.source import BytesSource
from tests.bounds.sources import Asked, Holed
from tests.each import each
from tests.zip_bytes import (
    FULL16,
    FULL32,
    deflated,
    end,
    end64,
    entry,
    local_header,
    read,
    stored,
    streamed,
    whole,
    zip64_field,
)

A, B = stored("x/a", b"first"), stored("x/b", b"second one")


def refused(data: bytes | Source, cls: type[CkptoolError] = AmbiguousFile) -> CkptoolError:
    with pytest.raises(cls) as caught:
        read(data)
    assert type(caught.value) is cls
    return caught.value


# The end


def test_the_end_record_is_looked_for_where_it_may_be_and_no_further() -> None:
    members = whole([stored("x/a", bytes(200_000))])
    source = Asked(members)
    find_directory(source)
    assert max(source.sizes) == END_SEARCH

    longest = {"comment": bytes(FULL16)}
    assert list(read(whole([A], last=longest))) == ["x/a"]
    refused(whole([A], last=longest, suffix=b"\0"), TruncatedFile)


def test_a_comment_of_which_a_byte_is_missing_is_refused() -> None:
    refused(whole([A], last={"comment": b"abc", "comment_n": 4}))
    assert read(whole([A], last={"comment": b"abc", "comment_n": 3})).notes == ()
    assert len(read(whole([A], last={"comment": b"abc", "comment_n": 2})).notes) == 1


def test_a_second_end_record_is_found_from_the_first_byte_of_the_directory_on() -> None:
    with pytest.raises(AmbiguousFile):
        find_directory(BytesSource(end(0, 0, 0) + end(0, 22, 0)))
    directory, _ = find_directory(BytesSource(end(0, 0, 0) + end(0, 0, 22)))
    assert directory.offset == 22


# Zip64 records


@pytest.mark.parametrize("length", range(18, 23))
def test_a_file_may_have_less_in_front_of_its_end_than_a_locator_takes(tmp_path: Path, length: int) -> None:
    (tmp_path / "x.zip").write_bytes(bytes(length) + end(0, 0, length))
    source = FileSource(str(tmp_path / "x.zip"))

    assert find_directory(source)[0].offset == length
    source.close()


def test_a_locator_may_begin_at_the_first_byte() -> None:
    locator = end64(0, 0, 0, 0)[56:]

    with pytest.raises(MalformedFile):
        find_directory(BytesSource(locator + end(0, 20, 0)))


# Members


@pytest.mark.parametrize("length", [68, 200, 40_000, FULL16 - 4])
def test_extra_fields_longer_than_usual_are_read_whole(length: int) -> None:
    data = whole([replace(A, local={"extra": b"FB" + length.to_bytes(2, "little") + bytes(length)}), B])

    assert list(read(data)) == ["x/a", "x/b"]


def test_a_size_that_says_see_zip64_has_to_be_there() -> None:
    far = {"nbytes": FULL32, "extra": zip64_field(FULL32)}
    claim = deflated("x/a", b"content", central=far, local={"nbytes": FULL32})
    refused(whole([claim]), MalformedFile)

    far = {"stored": FULL32, "extra": zip64_field(FULL32)}
    large = replace(deflated("x/a", b"", central=far, local={"stored": FULL32}), payload=b"")
    refused(holed(large, FULL32), MalformedFile)


def holed(member: Any, nbytes: int) -> Holed:
    """Return a zip of one member whose payload is a hole."""
    head, directory = local_header(member), entry(member, 0)
    at = len(head) + nbytes + len(member.descriptor)
    tail = end64(1, len(directory), at, at + len(directory)) + end(1, len(directory), 0, offset=FULL32)
    return Holed(head, nbytes, member.descriptor + directory + tail)


@pytest.mark.parametrize("nbytes", [FULL32 - 1, FULL32])
def test_a_descriptor_of_four_bytes_each_holds_what_four_bytes_hold(nbytes: int) -> None:
    member = streamed(deflated("x/a", b"content"))
    sizes = len(member.payload).to_bytes(4, "little") + nbytes.to_bytes(4, "little")
    far = {"nbytes": FULL32, "extra": zip64_field(nbytes)} if nbytes == FULL32 else {"nbytes": nbytes}
    descriptor = member.crc32.to_bytes(4, "little") + sizes

    for magic in (b"PK\7\x08", b""):
        member = replace(member, central=far, descriptor=magic + descriptor)
        assert read(whole([member]))["x/a"].nbytes == nbytes


@each("length", [*range(160, 260, 3), *range(1960, 2060)])
def test_a_descriptor_is_found_wherever_a_block_ends(length: int) -> None:
    for width, magic in ((4, True), (8, True), (8, False)):
        assert list(read(whole([streamed(stored("x", bytes(length)), width=width, magic=magic), B]))) == ["x", "x/b"]


# Compressed members


def test_a_gzip_may_grow_to_what_is_allowed_and_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptool.archives.compressed import GZIP, decompress

    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    data = packer.compress(bytes(1000) + bytes(range(256))) + packer.flush()
    for chunk in (1, 7, 1 << 20):
        monkeypatch.setattr("ckptool.archives.compressed._CHUNK", chunk)
        source = Asked(data)
        assert len(decompress(source, GZIP, Limits(inflated_nbytes=1256, inflation_ratio=0))) == 1256
        assert max(source.sizes) <= chunk
        with pytest.raises(LimitExceeded) as caught:
            decompress(source, GZIP, Limits(inflated_nbytes=1255, inflation_ratio=0))
        assert caught.value.needed == 1256
