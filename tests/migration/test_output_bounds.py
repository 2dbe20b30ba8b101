"""Folders that are written, and journals of edits, at their bounds: the first descriptor, none at all, no bytes."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from ckptool.errors import OutputFailed
from ckptool.migration.output.opening import OutputFolder
from ckptool.sources.journal import journal_name
from tests.each import each

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc, modes")


@pytest.fixture(params=["usual", "first", "none"])
def descriptor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The descriptor that a folder gets: any, the first, as in a process without standard input, or none at all."""
    if request.param == "none":
        monkeypatch.delattr(os, "O_DIRECTORY")  # as on Windows
    if request.param != "first":
        yield -1 if request.param == "none" else 1
        return
    kept = os.dup(0)
    os.close(0)
    yield 0
    os.dup2(kept, 0)
    os.close(kept)


def test_a_folder_is_written_whatever_its_descriptor(descriptor: int, tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.mkdir(0o710)
    (path / "old").write_bytes(b"")
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    folder = OutputFolder(str(path), force=True)
    assert len(os.listdir("/proc/self/fd")) == before + (descriptor >= 0)  # noqa: PTH208
    if descriptor == 0:
        assert os.path.samestat(os.fstat(0), os.stat(folder.reading_path()))  # noqa: PTH116
    with folder:
        folder.reserve(10)
        if descriptor >= 0:
            with pytest.raises(OutputFailed, match="not enough space"):
                folder.reserve(1 << 62)
        with folder.file("new") as output:
            output.write(b"new")
            output.publish()
        folder.publish()
    folder.close()

    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    assert os.listdir(path) == ["new"]  # noqa: PTH208
    if descriptor >= 0:
        assert stat.S_IMODE(path.stat().st_mode) == 0o710


def test_progress_never_stands_still(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    with OutputFolder(str(tmp_path / "out"), progress=lambda *numbers: told.append(numbers)) as folder:
        folder.reserve(9)
        for name in ("a", "b", "c"):
            with folder.file(name) as output:
                output.write(name.encode() * 3)
                output.flush()
                output.flush()
                output.publish()
        folder.publish()

    assert told == [(3, 9), (6, 9), (9, 9)]


@each("character", ["a", "\u00e9", "\u20ac", "\U0001f600", "\udc80"])
def test_journals_have_names_that_fit_and_are_plain_where_they_can_be(character: str) -> None:
    for length in range(1, 256):
        plain = f".{character * length}.ckptool-undo"
        found = journal_name(character * length)
        if len(os.fsencode(plain)) <= 255 - len(".new"):
            assert found == plain
        else:
            assert found == f".{sha256(os.fsencode(character * length)).hexdigest()}.ckptool-undo"
