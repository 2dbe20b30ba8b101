"""Files and folders of Windows: what is opened is in nobody's way, and no name or link leads out of a folder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from ckptool import CkptoolError, FileUnavailable, SourceChanged, open_checkpoint
from ckptool.sources.folder import FolderSource
from tests import build

if sys.platform != "win32":
    pytest.skip("Windows alone has these", allow_module_level=True)

import _winapi

from ckptool.system import nt

SYMLINK, JUNCTION, CLOUD, DEDUPLICATED = 0xA000000C, 0xA0000003, 0x9000001A, 0x80000013


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tree = {"w": build.tensor(build.storage(numel=4096), (4096,))}
    (tmp_path / "model.pth").write_bytes(build.torch_zip(tree, {"0": build.floats(4096)}))
    return tmp_path / "model.pth"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[FolderSource]:
    (tmp_path / "below").mkdir()
    for name in ("a.bin", "below/b.bin"):
        (tmp_path / name).write_bytes(b"bytes\r\n\x1a")
    found = FolderSource(str(tmp_path))
    yield found
    found.close()


def elsewhere(code: str, *arguments: Path) -> None:
    """Run code in another process."""
    subprocess.run([sys.executable, "-c", f"import os, sys; {code}", *map(str, arguments)], check=True)


@pytest.mark.parametrize(
    "code",
    [
        "os.remove(sys.argv[1])",
        "os.rename(sys.argv[1], sys.argv[2])",
        "os.rename(sys.argv[1], sys.argv[2]); os.rename(sys.argv[3], sys.argv[1])",
    ],
)
def test_another_process_can_take_the_name_of_a_file_that_is_open(code: str, path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"other")
    with open_checkpoint(path) as checkpoint:
        elsewhere(code, path, path.with_name("old"), other)
        assert checkpoint.tensors["w"].read() == build.floats(4096)


def test_another_process_can_save_over_a_file_that_is_open_which_is_a_change(path: Path) -> None:
    with open_checkpoint(path) as checkpoint:
        elsewhere("open(sys.argv[1], 'wb').write(b'other')", path)
        with pytest.raises(SourceChanged, match="shrank"):
            checkpoint.tensors["w"].read()
        with pytest.raises(SourceChanged, match="was changed"):
            checkpoint.check_unchanged()


def test_a_long_path_is_read_where_the_system_takes_it(path: Path) -> None:
    folder = Path("\\\\?\\" + str(path.parent), *["d" * 60] * 5)
    folder.mkdir(parents=True)
    path.rename(folder / "model.pth")
    plain = str(folder / "model.pth").removeprefix("\\\\?\\")
    assert len(plain) > 300
    for one in (str(folder / "model.pth"), plain):  # which Windows takes if it is set up so, and Wine always
        with open_checkpoint(one) as checkpoint:
            assert checkpoint.tensors["w"].read() == build.floats(4096)


@pytest.mark.parametrize("tag", [SYMLINK, JUNCTION])
@pytest.mark.parametrize("name", ["a.bin", "below/b.bin", "below"])
def test_a_link_of_any_kind_is_refused(
    name: str, tag: int, folder: FolderSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    inode = (Path(folder.path) / name).stat().st_ino
    monkeypatch.setattr(nt, "_tag_of", lambda fd: tag if os.fstat(fd).st_ino == inode else 0)

    for opening in [folder.below] if name == "below" else [folder.open]:
        with pytest.raises(FileUnavailable) as caught:
            opening(name)
        assert caught.value.kind == "shard-link"
    if name == "below":
        with pytest.raises(FileUnavailable) as caught:
            folder.open("below/b.bin")
        assert caught.value.kind == "shard-link"


def test_a_link_of_the_hub_leads_to_the_blob_of_its_repository_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = tmp_path / "blobs" / ("0f" * 32)
    snapshot = tmp_path / "snapshots" / ("1" * 40)
    for place in (blob.parent, snapshot, tmp_path / "elsewhere" / ("1" * 40)):
        place.mkdir(parents=True)
        (place / "x").touch()
    blob.write_bytes(b"blob")
    monkeypatch.setattr(
        nt, "_tag_of", lambda fd: 0 if os.fstat(fd).st_size or nt.path_of(fd)[-2:] != r"\x" else SYMLINK
    )
    monkeypatch.setattr(os, "readlink", lambda _: rf"..\..\blobs\{blob.name}")

    with closing(FolderSource(str(snapshot))) as folder:
        assert folder.open("x").read(0, 4) == b"blob"
    with closing(FolderSource(str(tmp_path / "elsewhere"))) as folder, pytest.raises(FileUnavailable) as caught:
        folder.open("1" * 40 + "/x")
    assert caught.value.kind == "shard-link"


@pytest.mark.parametrize("tag", [CLOUD, DEDUPLICATED])
def test_a_file_that_the_system_keeps_in_another_way_is_one(
    tag: int, folder: FolderSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nt, "_tag_of", lambda _: tag)

    assert folder.open("below/b.bin").read(0, 8) == b"bytes\r\n\x1a"


@pytest.mark.parametrize(
    "name", ["a.bin:stream", "a.bin::$DATA", "C:a.bin", "a.bin.", "a.bin ", "NUL", "CON", "below\\b.bin", "../a.bin"]
)
def test_a_name_that_windows_would_read_in_its_own_way_is_none_of_a_file(name: str, folder: FolderSource) -> None:
    with pytest.raises(CkptoolError) as caught:
        folder.open(name)
    assert caught.value.kind in ("missing", "shard-name")


def test_case_is_not_told_apart(folder: FolderSource) -> None:
    assert folder.open("BELOW/B.BIN").read(0, 5) == b"bytes"


def test_a_pipe_never_hangs() -> None:
    path = rf"\\.\pipe\ckptool-{os.getpid()}"
    handle = _winapi.CreateNamedPipe(path, 3, 0, 1, 4096, 4096, 0, 0)
    try:
        with pytest.raises(FileUnavailable, match="a pipe, not a file"):
            open_checkpoint(path)
    finally:
        _winapi.CloseHandle(handle)
