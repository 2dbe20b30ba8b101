"""Many files of a folder, and few descriptors."""

from __future__ import annotations

import os
import threading
from contextlib import closing, nullcontext
from pathlib import Path

import pytest

from ckptool.errors import CkptoolError, FileUnavailable, SourceChanged
from ckptool.sources.descriptors import NO_DESCRIPTOR, POOL, most_open, refuse_many_mappings
from ckptool.sources.folder import FolderSource
from ckptool.sources.versions import check_names
from tests.missing import links, replace_open
from tests.process import open_descriptors

_MANY = 400


@pytest.fixture
def folder(tmp_path: Path) -> FolderSource:
    for number in range(_MANY):
        (tmp_path / f"{number}.bin").write_bytes(number.to_bytes(4, "little") * 8)
    return FolderSource(str(tmp_path))


def _number(folder: FolderSource, number: int) -> int:
    return int.from_bytes(folder.open(f"{number}.bin").read(4, 4), "little")


def test_descriptors_are_bounded_and_all_files_can_be_read_again(folder: FolderSource) -> None:
    before = open_descriptors()
    for _ in range(2):
        assert [_number(folder, number) for number in range(_MANY)] == list(range(_MANY))
        assert open_descriptors() - before <= 130
    folder.check_unchanged()
    folder.close()
    assert open_descriptors() < before


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
    other.replace(tmp_path / "0.bin")
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
        replace_open(tmp_path / f"{number}.bin", tmp_path / "other")

    with pytest.raises(SourceChanged) if 0 < replaced < 3 else nullcontext():
        check_names(files)
    folder.close()


def test_descriptor_zero_is_one_like_any_other(folder: FolderSource) -> None:
    kept = os.dup(0)
    os.close(0)
    try:
        first = folder.open("0.bin")
        assert first.fileno() == 0
        assert [_number(folder, number) for number in range(_MANY)] == list(range(_MANY))
        assert first._held.fd < 0
        folder.close()
    finally:
        os.dup2(kept, 0)
        os.close(kept)


def test_no_more_are_closed_than_must_be(folder: FolderSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptool.system.most_descriptors", lambda: 20)
    files = [folder.open(f"{number}.bin")._held for number in range(8)]
    assert [one.fd < 0 for one in files] == [False if number == 7 else number < 4 for number in range(8)]
    with files[0]:
        assert [one.fd < 0 for one in files].count(False) <= most_open()
        assert files[0].fd >= 0
        folder.open("9.bin").read(0, 4)
        assert files[0].fd >= 0
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
    assert all(one._held.fd < 0 for one in files)
    folder.close()
    with pytest.raises(FileNotFoundError):  # any other error is raised at once
        POOL.opened(lambda: os.open("/nowhere", os.O_RDONLY))


def test_a_folder_whose_name_another_has_by_now_is_not_opened_again(tmp_path: Path) -> None:
    for name in ("one", "many"):
        (tmp_path / name).mkdir()
    for number in range(_MANY):
        (tmp_path / "many" / str(number)).touch()
    folder = FolderSource(str(tmp_path / "one"))
    (tmp_path / "one" / "x").write_bytes(b"x")

    def push_out() -> None:
        many = FolderSource(str(tmp_path / "many"))
        for name in many.files:
            many.open(name)
        many.close()

    push_out()
    assert folder.open("x").read(0, 1) == b"x"
    push_out()
    (tmp_path / "one").rename(tmp_path / "old")
    (tmp_path / "one").mkdir()
    with pytest.raises(SourceChanged, match="another folder"):
        folder.open("y")
    (tmp_path / "one").rmdir()
    with pytest.raises(SourceChanged, match="not any more"):
        folder.open("y")
    folder.close()


@pytest.mark.parametrize(("limit", "most"), [(None, 128), (4096, 128), (100, 25), (8, 4)])
def test_the_pool_has_its_share_of_descriptors(limit: int | None, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptool.system.most_descriptors", lambda: limit)
    assert most_open() == most


def test_mappings_leave_half_of_the_descriptors_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    lowest = os.dup(fd)
    os.close(lowest)
    refuse_many_mappings(fd)
    for limit, is_refused in ((2 * lowest, False), (2 * lowest - 1, True), (4, True), (None, False)):
        monkeypatch.setattr("ckptool.system.most_descriptors", lambda limit=limit: limit)
        with pytest.raises(OSError, match="Too many open files") if is_refused else nullcontext():
            refuse_many_mappings(fd)
    os.close(fd)


@links
def test_a_link_on_the_way_to_a_folder_below_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "below").mkdir(parents=True)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "link").symlink_to(tmp_path / "elsewhere")
    with closing(FolderSource(str(tmp_path / "folder"))) as folder:
        with pytest.raises(FileUnavailable) as caught:
            folder.below("link/below")
        assert caught.value.kind == "shard-link"
