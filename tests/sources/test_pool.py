"""Many files of a folder, and few descriptors."""

from __future__ import annotations

import os
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest

from ckptool.errors import SourceChanged
from ckptool.sources.files import PooledFile, check_names
from ckptool.sources.folder import FolderSource

_MANY = 400


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def folder(tmp_path: Path) -> FolderSource:
    for number in range(_MANY):
        (tmp_path / f"{number}.bin").write_bytes(number.to_bytes(4, "little") * 8)
    return FolderSource(str(tmp_path))


def _number(folder: FolderSource, number: int) -> int:
    return int.from_bytes(folder.open(f"{number}.bin").read(4, 4), "little")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no /proc")
def test_descriptors_are_bounded_and_all_files_can_be_read_again(folder: FolderSource) -> None:
    before = _descriptors()
    for _ in range(2):
        assert [_number(folder, number) for number in range(_MANY)] == list(range(_MANY))
        assert _descriptors() - before <= 130
    folder.check_unchanged()
    folder.close()
    assert _descriptors() < before


def test_threads_read_what_they_ask_for(folder: FolderSource) -> None:
    wrong: list[int] = []

    def read(first: int) -> None:
        for step in range(2 * _MANY):
            number = (first + step * 37) % _MANY
            if _number(folder, number) != number:
                wrong.append(number)

    for number in range(_MANY):
        folder.open(f"{number}.bin")
    threads = [threading.Thread(target=read, args=(first,)) for first in (0, 100, 200, 300)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    folder.close()
    assert not wrong


def test_another_file_under_the_name_is_no_replacement(folder: FolderSource, tmp_path: Path) -> None:
    for number in range(_MANY):
        _number(folder, number)
    other = tmp_path / "other"
    other.write_bytes(bytes(32))
    other.rename(tmp_path / "0.bin")
    with pytest.raises(SourceChanged):
        _number(folder, 0)
    (tmp_path / "1.bin").unlink()
    with pytest.raises(SourceChanged):
        _number(folder, 1)
    folder.close()


def test_nothing_opens_again_what_was_closed(folder: FolderSource) -> None:
    files = [folder.open(f"{number}.bin") for number in range(_MANY)]
    folder.close()
    for file in (files[0], files[-1]):
        with pytest.raises(ValueError, match="closed"):
            file.read(0, 4)


@pytest.mark.parametrize("replaced", range(4))
def test_a_folder_of_which_only_some_files_were_replaced_is_refused(
    folder: FolderSource, tmp_path: Path, replaced: int
) -> None:
    files = [folder.open(f"{number}.bin") for number in range(3)]
    for number in range(replaced):
        (tmp_path / "other").write_bytes(bytes(32))
        (tmp_path / "other").rename(tmp_path / f"{number}.bin")

    with pytest.raises(SourceChanged) if 0 < replaced < 3 else nullcontext():
        check_names(files)
    folder.close()


def test_descriptor_zero_is_one_like_any_other(folder: FolderSource) -> None:
    kept = os.dup(0)
    os.close(0)
    try:
        first = folder.open("0.bin")
        assert first.fileno() == 0
        assert isinstance(first, PooledFile)
        assert not first.is_resting
        assert [_number(folder, number) for number in range(_MANY)] == list(range(_MANY))
        assert first.is_resting
        folder.close()
    finally:
        os.dup2(kept, 0)
        os.close(kept)
