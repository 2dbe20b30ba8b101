"""File objects of fsspec: read by ranges through their file system, not by the blocks that they keep."""

from __future__ import annotations

from typing import Any

import pytest

from ckptool import CkptoolError, FileUnavailable, SourceChanged, migrate, open_checkpoint
from ckptool.errors import MalformedFile
from tests.remote.test_requests import NUMEL, legacy, tensors, zipped

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")


class Far(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """A file system that counts the ranges that are fetched from it."""

    protocol = "far"
    cachable = False

    def __init__(self, files: dict[str, bytes], *, has_ranges: bool = True) -> None:
        super().__init__()
        self.files = files
        self.fetched: list[tuple[int, int]] = []
        self.has_ranges = has_ranges

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        data = self.files[path]
        return {"name": path, "size": len(data), "type": "file", "ETag": str(hash(data))}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        assert start is not None
        assert end is not None
        self.fetched.append((start, end))
        return self.files[path][start:end] if self.has_ranges else self.files[path]

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        return FarFile(self, path, mode, **options)


class FarFile(fsspec.spec.AbstractBufferedFile):  # type: ignore[misc]
    def _fetch_range(self, start: int, end: int) -> bytes:
        return bytes(self.fs.cat_file(self.path, start, end))


@pytest.mark.parametrize("save", [zipped, legacy])
def test_an_index_takes_few_ranges(save: Any) -> None:
    data = save(tensors(288, NUMEL))
    files = Far({"x": data})
    with files.open("x") as stream, open_checkpoint(stream) as found:
        assert (len(found.tensors), found.path) == (288, "x")
        assert len(files.fetched) <= 6
        assert sum(stop - start for start, stop in files.fetched) < 1_000_000
        assert found.tensors["layers.5.weight"].read() == tensors(288, NUMEL)["layers.5.weight"].numpy().tobytes()
        assert stream.tell() == 0


@pytest.mark.parametrize("behind", [b"", b"more"])
def test_the_size_in_front_of_a_storage_is_compared_when_it_is_read(behind: bytes) -> None:
    data = bytearray(legacy(tensors(288, NUMEL)))
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
    files = Far({"x": zipped(tensors(3, 4))})
    with files.open("x") as stream, open_checkpoint(stream) as found:
        assert len(found.tensors) == 3
    assert len(files.fetched) == 1


def test_a_file_that_changed_is_an_error_in_the_end() -> None:
    files = Far({"x": zipped(tensors(288, NUMEL))})
    with files.open("x") as stream, open_checkpoint(stream) as found:
        files.files["x"] = zipped({name: one + 1 for name, one in tensors(288, NUMEL).items()})
        with pytest.raises(SourceChanged):
            found.check_unchanged()


def test_a_file_system_that_ignores_ranges_is_refused() -> None:
    files = Far({"x": zipped(tensors(288, NUMEL))}, has_ranges=False)
    with files.open("x") as stream, pytest.raises(FileUnavailable, match="no ranges"):
        open_checkpoint(stream)


def test_other_objects_with_such_names_are_read_as_streams(tmp_path) -> None:
    (tmp_path / "x.pth").write_bytes(zipped(tensors(3, 4)))
    local = fsspec.filesystem("file")
    with local.open(str(tmp_path / "x.pth")) as stream, open_checkpoint(stream) as found:
        assert len(found.tensors) == 3
    assert migrate(tmp_path / "x.pth", tmp_path / "y.pth").verified


class Refusing(Far):
    """A file system whose every second answer is an error, or short."""

    def __init__(self, files: dict[str, bytes], answer: Exception | bytes) -> None:
        super().__init__(files)
        self.answer = answer

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        if isinstance(self.answer, bytes):
            return self.answer
        raise self.answer


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (FileNotFoundError("x"), FileUnavailable, "no such file"),
        (PermissionError("x"), FileUnavailable, "refuses access"),
        (OSError("a secret"), FileUnavailable, "cannot be read (OSError)"),
        (SourceChanged("another one"), SourceChanged, "another one"),
        (b"short", SourceChanged, ""),
    ],
)
def test_what_the_file_system_raises_is_said(answer: Exception | bytes, kind: type[Exception], words: str) -> None:
    files = Refusing({"x": zipped(tensors(3, 4))}, answer)
    with files.open("x") as stream, pytest.raises(kind) as caught:
        open_checkpoint(stream)
    assert words in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_file_that_is_gone_in_the_end_is_said() -> None:
    files = Far({"x": zipped(tensors(288, NUMEL))})
    with files.open("x") as stream, open_checkpoint(stream) as found:
        files.info = lambda path, **_: {}[path]
        with pytest.raises(FileUnavailable, match=r"cannot be read \(KeyError\)"):
            found.check_unchanged()


def test_without_facts_of_the_file_system_no_change_is_seen() -> None:
    class Factless(FarFile):
        details = None

    files = Far({"x": zipped(tensors(288, NUMEL))})
    with open_checkpoint(Factless(files, "x", size=len(files.files["x"]))) as found:
        files.files["x"] = b"another one"
        found.check_unchanged()


def test_an_empty_file_is_empty() -> None:
    files = Far({"x": b""})
    with files.open("x") as stream, pytest.raises(CkptoolError, match="empty"):
        open_checkpoint(stream)
