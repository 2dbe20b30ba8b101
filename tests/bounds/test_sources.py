"""Sources and read-ahead: the last byte that is there, the first that is not, and how much is asked for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ckptool import FileUnavailable, SourceChanged, open_checkpoint
from ckptool.sources import descriptors
from ckptool.sources.files import FileSource, open_source
from ckptool.sources.source import StreamSource
from tests import build

DATA = bytes(range(256)) * 1024


@pytest.fixture
def source(tmp_path: Path) -> Any:
    (tmp_path / "x").write_bytes(DATA)
    found = FileSource(str(tmp_path / "x"))
    yield found
    found.close()


def test_a_file_is_read_to_its_end_in_however_many_pieces_it_comes(
    source: FileSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    pread, preadv = os.pread, os.preadv
    for most in (1, 100, len(DATA) - 1, len(DATA)):
        monkeypatch.setattr(os, "pread", lambda fd, n, at, most=most: pread(fd, min(n, most), at))
        monkeypatch.setattr(os, "preadv", lambda fd, views, at, most=most: preadv(fd, [views[0][:most]], at))
        assert source.read(5, 1000) == DATA[5:1005]
        buffer = memoryview(bytearray(1000))
        source.read_into(5, buffer)
        assert buffer == DATA[5:1005]
    assert source.read(0, len(DATA)) == DATA


@pytest.mark.parametrize("over", [0, 1, 300])
def test_a_file_that_shrank_is_told_of_with_its_numbers(source: FileSource, over: int) -> None:
    begin, buffer = len(DATA) - 200 + over, memoryview(bytearray(200))
    if not over:
        assert source.read(begin, 200) == DATA[begin:]
        source.read_into(begin, buffer)
        assert buffer == DATA[begin:]
        return
    for read in (lambda: source.read(begin, 200), lambda: source.read_into(begin, buffer)):
        with pytest.raises(SourceChanged) as caught:
            read()
        assert (caught.value.offset, caught.value.needed, caught.value.actual) == (begin, 200, max(0, 200 - over))


def test_a_change_of_a_file_that_keeps_its_name_and_times_is_told_of(source: FileSource, tmp_path: Path) -> None:
    path, before = tmp_path / "x", (tmp_path / "x").stat()
    os.link(path, tmp_path / "y")
    path.write_bytes(DATA[::-1])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    (tmp_path / "y").unlink()
    with pytest.raises(SourceChanged):
        source.check_unchanged()


def test_a_file_beside_one_that_is_closed_meanwhile_is_closed(
    source: FileSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "y").write_bytes(b"y")
    open_sibling, opened = descriptors.open_sibling, list[int]()

    def slow(*asked: Any) -> int:
        opened.append(open_sibling(*asked))
        source.close()
        return opened[0]

    monkeypatch.setattr(descriptors, "open_sibling", slow)
    with pytest.raises(ValueError, match="closed"):
        source.open_sibling("y")
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(opened[0])


def test_a_source_that_is_forgotten_is_closed(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(DATA)
    found = FileSource(str(tmp_path / "x"))
    number = found.fileno()
    del found

    with pytest.raises(OSError, match="descriptor"):
        os.fstat(number)


def test_a_file_that_cannot_be_read_into_memory_is_told_of(source: FileSource, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, "bad disk")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(FileUnavailable) as caught:
        source.read_into(9, memoryview(bytearray(10)))
    assert (caught.value.kind, caught.value.offset) == ("io", 9)


def test_a_stream_is_read_to_its_end_and_no_further() -> None:
    import io

    class Slow(io.BytesIO):
        def read(self, nbytes: int | None = -1) -> bytes:
            return super().read(min(nbytes or 0, 7))

    stream = StreamSource(Slow(DATA))
    assert stream.nbytes == len(DATA)
    assert stream.read(len(DATA) - 100, 100) == DATA[-100:]
    assert stream.read(3, 0) == b""
    with pytest.raises(SourceChanged) as caught:
        stream.read(len(DATA) - 100, 101)
    assert (caught.value.needed, caught.value.actual) == (101, 100)


def test_where_files_cannot_be_read_by_position_they_are_read_as_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_bytes(build.pickled({"w": 1}))
    monkeypatch.delattr(os, "pread")

    found, shown = open_source(tmp_path / "x")
    assert isinstance(found, StreamSource)
    assert shown == str(tmp_path / "x")
    found.close()
    with open_checkpoint(tmp_path / "x") as checkpoint:
        assert checkpoint.format == "pickle"


def test_a_folder_names_up_to_four_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "1.pt").touch()  # alone, it would be opened
    for count in range(2, 7):
        (tmp_path / f"{count}.pt").touch()
        with pytest.raises(FileUnavailable) as caught:
            open_checkpoint(tmp_path)
        shown = ", ".join(f"{number}.pt" for number in range(1, min(count, 4) + 1))
        more = f" and {count - 4} more" if count > 4 else ""
        assert caught.value.hint == f"Name a file in it: {shown}{more}"


def test_where_a_folder_cannot_be_opened_it_is_a_folder_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(13, "denied")

    (tmp_path / "x").touch()
    monkeypatch.setattr(os, "open", refuse)
    for path, kind in ((tmp_path, "directory"), (tmp_path / "x", "permission")):
        with pytest.raises(FileUnavailable) as caught:
            FileSource(str(path))
        assert caught.value.kind == kind
