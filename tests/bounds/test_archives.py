"""Zips and tars, read and written: the last size that is right, and the first that is wrong."""

from __future__ import annotations

import zlib
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptool import AmbiguousFile, LimitExceeded, Limits, MalformedFile, TruncatedFile
from ckptool.archives.tars import is_tar
from ckptool.archives.zips import END_SEARCH, find_directory, read_zip
from ckptool.errors import CkptoolError
from ckptool.migration import torch_plan
from ckptool.migration.torch_plan import torch_zip, torch_zip_nbytes
from ckptool.sources.files import FileSource
from ckptool.sources.source import BytesSource, Source
from tests.archives.test_tars import archive_of, contents, extended, member, packed
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
    directory = find_directory(BytesSource(end(0, 0, 0) + end(0, 0, 22)))
    assert directory.offset == 22


def test_a_file_may_have_less_in_front_of_its_end_than_a_locator_takes_which_may_begin_it(tmp_path: Path) -> None:
    for length in range(18, 23):
        (tmp_path / "x.zip").write_bytes(bytes(length) + end(0, 0, length))
        with closing(FileSource(str(tmp_path / "x.zip"))) as source:
            assert find_directory(source).offset == length
    with pytest.raises(MalformedFile):
        find_directory(BytesSource(end64(0, 0, 0, 0)[56:] + end(0, 20, 0)))


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
        assert len(decompress(source, GZIP, Limits(inflated_nbytes=1256, inflation_ratio=0))[0]) == 1256
        assert max(source.sizes) <= chunk
        with pytest.raises(LimitExceeded) as caught:
            decompress(source, GZIP, Limits(inflated_nbytes=1255, inflation_ratio=0))
        assert caught.value.needed == 1256


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


def test_a_header_is_512_bytes_and_a_member_may_end_with_the_file_and_no_later() -> None:
    header, data = packed(member("a"))[:512], packed(member("a", b"x" * 700))[: 512 + 700]
    assert [is_tar(one) for one in (header, header + b"x", header[:511])] == [True, True, False]
    assert contents(data) == {"a": b"x" * 700}
    with pytest.raises(TruncatedFile) as caught:
        archive_of(data[:-1])
    assert (caught.value.needed, caught.value.actual) == (1212, 1211)


# Zips round 4 GiB, of which only the frame is written


class Frame(Source):
    """A source, of which the parts of a file were written: payloads are holes of zeros in it."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.parts: list[tuple[int, bytes]] = []
        self.payloads: list[tuple[int, int]] = []

    def take(self, part: Any) -> None:
        if isinstance(part, bytes):
            self.parts.append((self.nbytes, part))
        else:
            self.payloads.append((self.nbytes, part.nbytes))
        self.nbytes += len(part) if isinstance(part, bytes) else part.nbytes

    def read(self, offset: int, nbytes: int) -> bytes:
        found = bytearray(nbytes)
        for begin, data in self.parts:
            low, high = max(begin, offset), min(begin + len(data), offset + nbytes)
            if low < high:
                found[low - offset : high - offset] = data[low - begin : high - begin]
        return bytes(found)


def written(root: str, *sizes: int) -> Frame:
    """Return what is written for a checkpoint with storages of these sizes."""
    frame = Frame()
    storages: Any = [SimpleNamespace(nbytes=nbytes) for nbytes in sizes]
    for part in torch_zip(root, b"\x80\x02K\x01.", storages, [0]):
        frame.take(part)
    return frame


HEAD = 448
"""Where the payload of the first storage begins; sixteen bytes of descriptor stand behind it."""


@each(
    "sizes",
    [
        (FULL32 - 1,),
        (FULL32,),
        (FULL32 + 1,),
        (FULL32 - 1 - HEAD - 16, 0, 7),
        (FULL32 - HEAD - 16, 0, 7),
        (FULL32 + 1 - HEAD - 16, 0, 7),
        (FULL32 - 1 - HEAD - 16, FULL32),
        (FULL32 - HEAD - 16, FULL32 - 1),
        (0, 0),
    ],
)
def test_members_and_offsets_round_4_gib_are_read_as_they_were_written(sizes: tuple[int, ...]) -> None:
    frame = written("x", *sizes)
    archive = read_zip(frame)

    stored = [archive[f"x/data/{number}"] for number in range(len(sizes))]
    assert [(one.offset, one.nbytes) for one in stored] == frame.payloads
    assert archive.notes == ()
    assert frame.payloads[0][0] == HEAD + (64 if sizes[0] >= FULL32 else 0)
    assert torch_zip_nbytes("x", 5, sizes) == frame.nbytes


@pytest.mark.parametrize("start", [FULL32 - 1, FULL32, FULL32 + 1])
def test_a_directory_may_begin_round_4_gib(start: int) -> None:
    frame, around = Frame(), torch_plan.Frame(b"x", start - 64 - 16, 0)
    for part in (around.local(), SimpleNamespace(nbytes=around.nbytes), around.descriptor(0), around.entry(0)):
        frame.take(part)
    frame.take(torch_plan.end_records(start, len(around.entry(0)), 1))

    assert list(read_zip(frame)) == ["x"]
    assert end_record(frame)[3] == min(start, FULL32)


def end_record(frame: Frame) -> tuple[int, ...]:
    data = frame.read(frame.nbytes - 22, 22)
    return tuple(int.from_bytes(data[at : at + size], "little") for at, size in ((8, 2), (10, 2), (12, 4), (16, 4)))
