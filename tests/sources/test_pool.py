"""Many files of a folder, and few descriptors."""

from __future__ import annotations

import os
import threading
from contextlib import nullcontext
from pathlib import Path
from resource import RLIM_INFINITY

import pytest

from ckptool.errors import CkptoolError, SourceChanged
from ckptool.sources.files import PooledFile, check_names
from ckptool.sources.folder import FolderSource
from ckptool.sources.pool import POOL, Pool, PooledFolder, most_open, refuse_many_mappings
from ckptool.sources.siblings import NO_DESCRIPTOR, open_folder

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


def test_a_folder_may_have_descriptor_zero(tmp_path: Path) -> None:
    kept = os.dup(0)
    os.close(0)
    try:
        folder = PooledFolder(str(tmp_path), lambda: open_folder(str(tmp_path)))
        assert not folder.is_resting
        with folder.descriptor() as fd:
            assert fd == 0
        folder.rest()
        assert folder.is_resting
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(0)
        folder.close()
    finally:
        os.dup2(kept, 0)
        os.close(kept)


class Fake:
    """Something that is open or not."""

    users = 0
    is_resting = False

    def reopen(self) -> int:
        return 5

    def open_again(self, _: int) -> None:
        self.is_resting = False

    def rest(self) -> None:
        self.is_resting = True


def test_no_more_are_closed_than_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (20, RLIM_INFINITY))
    pool, fakes = Pool(), [Fake() for _ in range(8)]
    for number, one in enumerate(fakes):
        pool.add(one)
        assert [fake.is_resting for fake in fakes] == [fake <= number - 5 for fake in range(8)]
    with pool.using(fakes[0]):
        assert [fake.is_resting for fake in fakes] == [False, True, True, True, False, False, False, False]


def test_what_is_used_stays_open_when_others_need_its_place(folder: FolderSource) -> None:
    first = folder.open("0.bin")
    assert isinstance(first, PooledFile)
    with POOL.using(first):
        assert [_number(folder, number) for number in range(_MANY)] == list(range(_MANY))
        assert not first.is_resting
    assert [_number(folder, number) for number in range(1, _MANY)] == list(range(1, _MANY))
    assert first.is_resting
    folder.close()


def test_without_a_descriptor_left_those_at_rest_give_theirs(folder: FolderSource) -> None:
    files = [folder.open(f"{number}.bin") for number in range(20)]
    told: list[str] = []

    def opening() -> str:
        told.append("asked")
        if len(told) == 1:
            raise CkptoolError("too many open files", kind=NO_DESCRIPTOR)
        return "opened"

    assert POOL.opened(opening) == "opened"
    assert all(one.is_resting for one in files if isinstance(one, PooledFile))
    folder.close()


def test_an_error_that_is_none_of_descriptors_is_raised_at_once() -> None:
    def opening() -> None:
        raise CkptoolError("no such file", kind="missing")

    with pytest.raises(CkptoolError, match="no such file"):
        POOL.opened(opening)


def test_a_folder_whose_name_another_has_by_now_is_not_opened_again(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    path = str(tmp_path / "one")
    folder = PooledFolder(path, lambda: open_folder(path))
    with folder.descriptor() as fd:
        assert os.fstat(fd).st_ino == (tmp_path / "one").stat().st_ino
    folder.rest()
    (tmp_path / "one").rename(tmp_path / "old")
    (tmp_path / "one").mkdir()
    with pytest.raises(SourceChanged, match="another folder"), folder.descriptor():
        pass
    (tmp_path / "one").rmdir()
    with pytest.raises(SourceChanged, match="not any more"), folder.descriptor():
        pass
    folder.close()


@pytest.mark.parametrize(("limit", "most"), [(RLIM_INFINITY, 128), (4096, 128), (100, 25), (8, 4)])
def test_the_pool_has_its_share_of_descriptors(limit: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (limit, RLIM_INFINITY))
    assert most_open() == most


def test_mappings_leave_half_of_the_descriptors_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    lowest = os.dup(fd)
    os.close(lowest)
    try:
        refuse_many_mappings(fd)
        monkeypatch.setattr("resource.getrlimit", lambda _: (2 * lowest, RLIM_INFINITY))
        refuse_many_mappings(fd)
        monkeypatch.setattr("resource.getrlimit", lambda _: (2 * lowest - 1, RLIM_INFINITY))
        with pytest.raises(OSError, match="Too many open files"):
            refuse_many_mappings(fd)
        monkeypatch.setattr("resource.getrlimit", lambda _: (4, RLIM_INFINITY))
        with pytest.raises(OSError, match="Too many open files"):
            refuse_many_mappings(fd)
        monkeypatch.setattr("resource.getrlimit", lambda _: (RLIM_INFINITY, RLIM_INFINITY))
        refuse_many_mappings(fd)
    finally:
        os.close(fd)
