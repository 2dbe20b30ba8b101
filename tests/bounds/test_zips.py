"""Zips: the last size that is right, and the first that is wrong."""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptool import AmbiguousFile, LimitExceeded, Limits, MalformedFile, Source, TruncatedFile, UnsupportedFeature
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


# Names


def test_no_two_names_differ_in_case_alone() -> None:
    found = refused(whole([A, B, stored("X/a", b"other")]))

    assert "also as" in found.message
    assert list(read(whole([A, B, stored("x/aa", b"other")]))) == ["x/a", "x/b", "x/aa"]


# The end


def test_the_end_record_is_looked_for_where_it_may_be_and_no_further() -> None:
    members = whole([stored("x/a", bytes(200_000))])
    source = Asked(members)
    find_directory(source)
    assert max(source.sizes) == END_SEARCH

    longest = {"comment": bytes(FULL16)}
    assert list(read(whole([A], last=longest))) == ["x/a"]
    refused(whole([A], last=longest, suffix=b"\0"), TruncatedFile)


@pytest.mark.parametrize("length", [0, 3, 21, 22, 1000])
def test_a_file_without_an_end_record_is_truncated(length: int) -> None:
    refused(bytes(length), TruncatedFile)


def test_an_end_record_of_which_a_byte_is_missing_is_none() -> None:
    refused(end(0, 0, 0)[:-1], TruncatedFile)
    assert len(read(end(0, 0, 0))) == 0


@pytest.mark.parametrize("here", [1, 3])
def test_fewer_or_more_members_on_this_volume_than_in_all_are_refused(here: int) -> None:
    refused(whole([A, B], last={"here": here}), UnsupportedFeature)
    refused(whole([A, B], zip64=True, last64={"here": here}), MalformedFile)


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


@pytest.mark.parametrize("size", [43, 45])
def test_a_zip64_record_of_another_length_than_it_has_is_refused(size: int) -> None:
    refused(whole([A], zip64=True, last64={"size": size}), MalformedFile)


def test_a_zip64_record_may_end_where_its_locator_begins_and_no_later() -> None:
    record = whole([A], zip64=True).rindex(b"PK\x06\x06")

    assert list(read(whole([A], zip64=True, last64={"record": record}))) == ["x/a"]
    error = refused(whole([A], zip64=True, last64={"record": record + 1}), MalformedFile)
    assert "outside" in str(error)


@pytest.mark.parametrize("length", [7, 15])
def test_a_zip64_field_of_which_a_byte_is_missing_is_malformed(length: int) -> None:
    sizes = {"stored": FULL32, "nbytes": FULL32} if length > 8 else {"nbytes": FULL32}
    short = zip64_field(5, 5)[:2] + length.to_bytes(2, "little") + bytes(length)

    refused(whole([replace(A, central=sizes | {"extra": short})]), MalformedFile)


# Extra fields, names, sizes


def test_a_field_without_content_may_be_the_last() -> None:
    assert list(read(whole([replace(A, extra=b"FB\0\0")]))) == ["x/a"]
    assert list(read(whole([replace(A, extra=b"FB\1\0x")]))) == ["x/a"]
    refused(whole([replace(A, extra=b"FB\2\0x")]), MalformedFile)


@each("length", range(9))
def test_zeros_behind_the_fields_are_padding_whatever_their_number(length: int) -> None:
    assert list(read(whole([replace(A, extra=b"FB\1\0x" + bytes(length))]))) == ["x/a"]


def test_a_member_without_a_name_is_malformed() -> None:
    assert "no path may have" in str(refused(whole([stored("")]), MalformedFile))


@pytest.mark.parametrize("nbytes", [4, 6])
def test_a_stored_member_smaller_or_larger_than_its_payload_is_refused(nbytes: int) -> None:
    assert "two sizes" in str(refused(whole([replace(A, nbytes=nbytes)])))


def test_an_entry_may_end_with_the_directory_and_no_later() -> None:
    refused(whole([replace(A, central={"comment": b"abc"})], last={"nbytes": 46 + 3 + 2}))
    body, directory = local_header(A) + A.payload, entry(A, 0)
    for cut in (1, 3, 4):  # of the name, and of the entry itself
        refused(
            body + directory[:-cut] + end(1, len(directory) - cut, len(body)),
            MalformedFile if cut > 3 else AmbiguousFile,
        )


def test_as_many_members_as_allowed_are_read() -> None:
    assert len(read(whole([A, B]), entries=2)) == 2
    with pytest.raises(LimitExceeded):
        read(whole([A, B]), entries=1)


# Gaps


# Members


@pytest.mark.parametrize("length", [68, 200, 40_000, FULL16 - 4])
def test_extra_fields_longer_than_usual_are_read_whole(length: int) -> None:
    data = whole([replace(A, local={"extra": b"FB" + length.to_bytes(2, "little") + bytes(length)}), B])

    assert list(read(data)) == ["x/a", "x/b"]


def test_a_local_header_may_end_where_the_directory_begins() -> None:
    assert "disagree" in str(refused(whole([stored("x", local={"name": b""})])))


@pytest.mark.parametrize("local", [{"name": b"x/", "extra": b"a\0\0\0"}, {"name": b"x/ab"}])
def test_a_local_name_that_only_begins_like_the_other_is_refused(local: dict[str, Any]) -> None:
    refused(whole([replace(A, local=local)]))


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


@pytest.mark.parametrize("magic", [True, False])
@pytest.mark.parametrize("width", [4, 8])
def test_a_descriptor_may_end_where_the_directory_begins_and_no_later(magic: bool, width: int) -> None:
    member = streamed(A, magic=magic, width=width)
    assert list(read(whole([member]))) == ["x/a"]

    cut = replace(member, descriptor=member.descriptor[:-1])
    refused(whole([cut]))


@each("length", [*range(160, 260, 3), *range(1960, 2060)])
def test_a_descriptor_is_found_wherever_a_block_ends(length: int) -> None:
    for width, magic in ((4, True), (8, True), (8, False)):
        assert list(read(whole([streamed(stored("x", bytes(length)), width=width, magic=magic), B]))) == ["x", "x/b"]


# Compressed members


@pytest.mark.parametrize("cut", [1, 2, 5])
def test_a_compressed_payload_that_ends_early_is_refused(cut: int) -> None:
    member = deflated("x", bytes(range(256)) * 3)
    archive = read(whole([replace(member, payload=member.payload[:-cut])]))

    with pytest.raises(MalformedFile):
        archive.open("x")


def test_inflating_stops_one_byte_behind_what_is_claimed() -> None:
    archive = read(whole([deflated("x", bytes(1 << 20), nbytes=10)]))
    taken: list[bytes] = []

    with pytest.raises(MalformedFile):
        taken.extend(archive_pieces(archive.source, archive["x"]))  # what came before the error counts
    assert sum(map(len, taken)) == 11


def archive_pieces(source: Source, record: Any) -> Any:
    from ckptool.archives.archive import _inflated

    return _inflated(source, record, Limits())


def test_a_member_may_grow_to_what_is_allowed_and_no_further() -> None:
    data = whole([deflated("x", bytes(1000))])

    archive = read(data, inflated_nbytes=1000, inflation_ratio=0)
    assert archive.content("x").read(0, 5) == bytes(5)
    assert archive.open("x").nbytes == 1000
    archive = read(data, inflated_nbytes=999, inflation_ratio=0)
    for look in (archive.open, lambda name: archive.content(name).read(0, 5)):
        with pytest.raises(LimitExceeded):
            look("x")


def test_a_small_text_is_read_up_to_its_limit() -> None:
    archive = read(whole([stored("x", b"y" * 64), stored("z", b"y" * 65)]))

    assert (archive.text("x"), archive.text("z"), archive.text("none")) == ("y" * 64, "", "")
    assert archive.text("x", 63) == ""


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
