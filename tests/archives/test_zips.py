"""Honest zips, whoever wrote them: torch, Python, other programs, with and without sizes in front, beyond 4 GiB."""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from dataclasses import replace
from typing import IO, TYPE_CHECKING

import pytest
import torch

from ckptool import open_checkpoint
from ckptool.archives.archive import Archive
from ckptool.archives.zips import read_zip
from ckptool.sources.source import BytesSource
from tests import build
from tests.against_torch import oracle
from tests.each import each
from tests.scale import exhaustive, in_turn
from tests.zip_bytes import (
    FULL32,
    Member,
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

if TYPE_CHECKING:
    from pathlib import Path

TENSORS = {"w": torch.arange(1000.0).reshape(50, 20), "b": torch.arange(50, dtype=torch.int16)}
VIEWS = {"all": TENSORS["w"], "turned": TENSORS["w"].t(), "part": TENSORS["w"][3:9, 1::4], "b": TENSORS["b"]}


def contents(archive: Archive) -> dict[str, bytes]:
    return {name: archive.open(name).read(0, record.nbytes) for name, record in archive.items()}


def saved(content: object = VIEWS) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


def rezipped(data: bytes, method: int, *, seekable: bool = True, extra: dict[str, bytes] | None = None) -> bytes:
    """Return the same members packed again by Python."""
    stream = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(data)) as old,
        zipfile.ZipFile(stream if seekable else _Pipe(stream), "w", method) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
        for name, junk in (extra or {}).items():
            new.writestr(name, junk)
    return stream.getvalue()


class _Pipe(io.RawIOBase):
    """A file that can only be written from front to back."""

    def __init__(self, target: IO[bytes]) -> None:
        self._target = target

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        return self._target.write(bytes(data))  # type: ignore[call-overload]


def test_what_torch_writes_is_what_python_finds_in_it() -> None:
    data = saved()
    with zipfile.ZipFile(io.BytesIO(data)) as expected:
        names = expected.namelist()
        archive = read(data)
        assert list(archive) == names
        assert contents(archive) == {name: expected.read(name) for name in names}
        assert archive.notes == ()


def test_only_the_index_is_read() -> None:
    class Counting(BytesSource):
        taken = 0

        def read(self, offset: int, nbytes: int) -> bytes:
            Counting.taken += nbytes
            return super().read(offset, nbytes)

    data = saved({str(number): torch.zeros(50_000) for number in range(100)})
    read_zip(Counting(data))

    assert Counting.taken < len(data) / 100


@pytest.mark.parametrize(("method", "seekable"), in_turn([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED], [True, False]))
def test_a_checkpoint_packed_again_reads_the_same(method: int, seekable: bool) -> None:
    with open_checkpoint(rezipped(saved(), method, seekable=seekable)) as checkpoint:
        oracle.assert_same(checkpoint, VIEWS)
        offsets = [tensor.info.storage.file_offset for tensor in checkpoint.tensors.values() if tensor.info.storage]
        assert all((offset is None) == (method == zipfile.ZIP_DEFLATED) for offset in offsets)


def test_a_checkpoint_packed_again_on_a_mac_reads_the_same() -> None:
    junk = {
        "__MACOSX/archive/._data.pkl": b"\0\5\x16\7" + bytes(100),
        "__MACOSX/._archive": b"\0\5\x16\7",
        "archive/.DS_Store": b"\0\0\0\1Bud1",
    }

    with open_checkpoint(rezipped(saved(), zipfile.ZIP_DEFLATED, extra=junk)) as checkpoint:
        oracle.assert_same(checkpoint, VIEWS)


def test_a_checkpoint_one_folder_deeper_reads_the_same_and_is_told_of() -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved())) as old, zipfile.ZipFile(stream, "w") as new:
        for name in old.namelist():
            new.writestr(f"my model/{name}", old.read(name))

    with open_checkpoint(stream) as checkpoint:
        oracle.assert_same(checkpoint, VIEWS)
        assert len(checkpoint.notes) == 1


def test_compressed_storages_are_read_in_part() -> None:
    archive = read(whole([deflated("x", bytes(range(256)) * 64)]))
    content = archive.content("x")

    assert content.nbytes == 16_384
    assert content.read(300, 5) == bytes(range(44, 49))
    assert content.read(16_380, 4) == b"\xfc\xfd\xfe\xff"
    assert content.read(0, 0) == b""
    assert content.file_offset(0) is None


@each("magic", [True, False])
@each("width", [4, 8])
@each("pack", [stored, deflated])
def test_sizes_behind_the_payload_are_understood_in_every_form(magic: bool, width: int, pack: object) -> None:
    members = [streamed(pack(name, data), magic=magic, width=width) for name, data in (("a", b"x" * 70), ("b", b"yy"))]  # type: ignore[operator]
    members.append(stored("empty"))

    assert contents(read(whole(members))) == {"a": b"x" * 70, "b": b"yy", "empty": b""}


def test_a_payload_that_looks_like_zip_records_is_a_payload() -> None:
    tricky = local_header(stored("ghost", b"boo")) + b"PK\x07\x08" + b"PK\x01\x02" + b"PK\x05\x06" + b"PK\x06\x07"

    assert contents(read(whole([stored("a", tricky), stored("b", b"x")]))) == {"a": tricky, "b": b"x"}


@exhaustive
def test_more_members_than_sixteen_bits_can_count_are_read() -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for number in range(66_000):
            archive.writestr(f"x/{number}", b"")

    assert len(read(stream.getvalue())) == 66_000


def test_files_without_checksums_are_read() -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        data = saved()
    finally:
        torch.serialization.set_crc32_options(before)

    with open_checkpoint(data) as checkpoint:
        oracle.assert_same(checkpoint, VIEWS)
    assert {record.crc32 for name, record in read(data).items() if "/data/" in name} == {0}


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="sparse files are POSIX's")
def test_a_file_beyond_4_gib_reads_at_both_ends(tmp_path: Path) -> None:
    """Its storages are holes: five GiB that take up a few blocks."""
    path = tmp_path / "large.pth"
    first, second = large_file(path)
    assert path.stat().st_blocks * 512 < 1 << 20

    expected = torch.load(path, mmap=True, weights_only=True)
    with open_checkpoint(path) as checkpoint:
        assert list(checkpoint.tensors) == ["head", "tail", "column", "whole", "second"]
        assert checkpoint.tensors["whole"].info.nbytes == first
        for name in ("head", "tail", "column", "second"):
            oracle.assert_same_tensor(checkpoint.tensors[name], expected[name])
        storage = checkpoint.tensors["second"].info.storage
        assert storage is not None
        assert storage.file_offset is not None
        assert storage.file_offset > first
        assert storage.nbytes == second


def large_file(path: Path) -> tuple[int, int]:
    """Write a checkpoint as torch does when a storage, and an offset, need more than 32 bits."""
    numel, nbytes = (5 << 30) // 4, 5 << 30
    stored_numbers = build.floats(8)
    first, second = build.storage("0", numel), build.storage("1", 8)
    tree = {
        "head": build.tensor(first, (8,), (1,)),
        "tail": build.tensor(first, (2, 4), (4, 1), numel - 8),
        "column": build.tensor(first, (3,), ((numel - 1) // 2,)),
        "whole": build.tensor(first, (numel,), (1,)),
        "second": build.tensor(second, (8,), (1,)),
    }
    small = [stored("large/data.pkl", build.pickled(tree)), stored("large/byteorder", b"little")]
    huge = {"stored": FULL32, "nbytes": FULL32, "extra": zip64_field(nbytes, nbytes)}
    hole = Member(name=b"large/data/0", local=huge, central=huge)
    later = [stored("large/data/1", stored_numbers), stored("large/version", b"3\n")]

    with path.open("wb") as file:
        directory = b""
        for member in small:
            directory += entry(member, file.tell())
            file.write(local_header(member) + member.payload)
        directory += entry(hole, file.tell())
        file.write(local_header(hole))
        start = file.tell()
        file.write(stored_numbers)
        file.seek(start + nbytes - len(stored_numbers))
        file.write(stored_numbers)
        for member in later:
            far = {"header": FULL32, "extra": zip64_field(file.tell())}
            directory += entry(
                Member(name=member.name, payload=member.payload, nbytes=member.nbytes, crc32=member.crc32, central=far),
                0,
            )
            file.write(local_header(member) + member.payload)
        place = (5, len(directory), file.tell())
        file.write(directory)
        file.write(end64(*place, file.tell()) + end(*place, offset=FULL32))
    return nbytes, len(stored_numbers)


@pytest.mark.parametrize("count", [0, 1 << 18], ids=["as packed", "behind blocks of nothing"])
def test_the_head_of_a_packed_member_is_how_its_content_begins(count: int) -> None:
    content = bytes(range(256)) * (1 << 14)
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = b"\0\0\0\xff\xff" * count + packer.compress(content) + packer.flush()
    packed_member = replace(stored("d", content), payload=packed, method=8)
    archive = read(whole([stored("s", content), packed_member]))
    assert [archive.head(name, 300) for name in "sd"] == [content[:300]] * 2
    assert [archive.head(name, 1 << 23) for name in "sd"] == [content] * 2
