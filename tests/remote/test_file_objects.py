"""File objects of fsspec: read by ranges through their file system, not by the blocks that they keep."""

from __future__ import annotations

from typing import Any

import pytest

from ckptool import CkptoolError, FileUnavailable, SourceChanged, migrate, open_checkpoint
from ckptool.errors import MalformedFile
from tests.remote.test_requests import NUMEL, SMALL, legacy, tensors, zipped

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")


ZIP, LEGACY = (save(tensors(288, NUMEL)) for save in (zipped, legacy))


class Far(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """A file system that counts the ranges that are fetched from it; an ``answer`` is its only one, or is raised."""

    protocol = "far"
    cachable = False

    def __init__(self, files: dict[str, bytes], answer: Exception | bytes | None = None) -> None:
        super().__init__()
        self.files = files
        self.fetched: list[tuple[int, int]] = []
        self.answer = answer

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        data = self.files[path]
        return {"name": path, "size": len(data), "type": "file", "ETag": str(hash(data))}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        assert start is not None
        assert end is not None
        self.fetched.append((start, end))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.files[path][start:end] if self.answer is None else self.answer

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        return FarFile(self, path, mode, **options)


class FarFile(fsspec.spec.AbstractBufferedFile):  # type: ignore[misc]
    def _fetch_range(self, start: int, end: int) -> bytes:
        return bytes(self.fs.cat_file(self.path, start, end))


@pytest.mark.parametrize("data", [ZIP, LEGACY], ids=["zip", "legacy"])
def test_an_index_takes_few_ranges(data: bytes) -> None:
    files = Far({"x": data})
    with files.open("x") as stream, open_checkpoint(stream) as found:
        assert (len(found.tensors), found.path) == (288, "x")
        assert len(files.fetched) <= 6
        assert sum(stop - start for start, stop in files.fetched) < 1_000_000
        assert found.tensors["layers.5.weight"].read() == tensors(288, NUMEL)["layers.5.weight"].numpy().tobytes()
        assert stream.tell() == 0


@pytest.mark.parametrize("behind", [b"", b"more"])
def test_the_size_in_front_of_a_storage_is_compared_when_it_is_read(behind: bytes) -> None:
    data = bytearray(LEGACY)
    with open_checkpoint(bytes(data)) as found:
        storage = found.tensors["layers.5.weight"].info.storage
        assert storage is not None
    data[storage.file_offset - 8] += 1
    files = Far({"x": bytes(data) + behind})

    with files.open("x") as stream:
        if behind:  # is that there no sign that the storages are where they should be?
            with pytest.raises(MalformedFile, match="the tree says"):
                open_checkpoint(stream)
            return
        with open_checkpoint(stream) as opened:
            assert len(opened.tensors["layers.6.weight"].read()) == storage.nbytes
            with pytest.raises(MalformedFile, match="the tree says"):
                opened.tensors["layers.5.weight"].read()


def test_a_small_file_is_read_as_a_whole() -> None:
    files = Far({"x": SMALL})
    with files.open("x") as stream, open_checkpoint(stream) as found:
        assert len(found.tensors) == 3
    assert len(files.fetched) == 1


def test_a_file_that_changed_or_is_gone_is_an_error_in_the_end() -> None:
    files = Far({"x": ZIP})
    with files.open("x") as stream, open_checkpoint(stream) as found:
        files.files["x"] = LEGACY
        with pytest.raises(SourceChanged):
            found.check_unchanged()
        files.info = lambda path, **_: {}[path]
        with pytest.raises(FileUnavailable, match=r"cannot be read \(KeyError\)"):
            found.check_unchanged()


def test_other_objects_with_such_names_are_read_as_streams(tmp_path) -> None:
    (tmp_path / "x.pth").write_bytes(SMALL)
    local = fsspec.filesystem("file")
    with local.open(str(tmp_path / "x.pth")) as stream, open_checkpoint(stream) as found:
        assert len(found.tensors) == 3
    assert migrate(tmp_path / "x.pth", tmp_path / "y.pth").verified


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (FileNotFoundError("x"), FileUnavailable, "no such file"),
        (PermissionError("x"), FileUnavailable, "refuses access"),
        (OSError("a secret"), FileUnavailable, "cannot be read (OSError)"),
        (SourceChanged("another one"), SourceChanged, "another one"),
        (b"short", SourceChanged, ""),
        (ZIP, FileUnavailable, "no ranges"),
    ],
    ids=["gone", "closed", "broken", "changed", "short", "whole"],
)
def test_what_the_file_system_raises_or_gives_is_said(
    answer: Exception | bytes, kind: type[Exception], words: str
) -> None:
    files = Far({"x": ZIP}, answer)
    with files.open("x") as stream, pytest.raises(kind) as caught:
        open_checkpoint(stream)
    assert words in str(caught.value)
    assert "secret" not in str(caught.value)


def test_without_facts_of_the_file_system_no_change_is_seen() -> None:
    class Factless(FarFile):
        details = None

    files = Far({"x": ZIP})
    with open_checkpoint(Factless(files, "x", size=len(files.files["x"]))) as found:
        files.files["x"] = b"another one"
        found.check_unchanged()


def test_an_empty_file_is_empty() -> None:
    files = Far({"x": b""})
    with files.open("x") as stream, pytest.raises(CkptoolError, match="empty"):
        open_checkpoint(stream)
