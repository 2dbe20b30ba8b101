"""
Power that fails: what may be on the disk afterwards is, under the target's name, the old file or the whole new one.

A migration runs on a disk that keeps a log of what it is asked to do. After each entry, the power fails: what was not
synced may be there or not, block by block, and names that were not synced may be there or not, in the order in which
they were given. A block of which some write is kept and a later one is not has what stood in it in between.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ckptool import migrate
from ckptool.migration import output as outputs
from ckptool.migration.output import Output
from tests.migration.test_outputs import OLD, checkpoint
from tests.scale import scaled, times

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc, O_TMPFILE")

BLOCK = 4096
CHOICES = times(3, 8)
FOLDER = -1
"""Stands for the folder where files have their numbers."""


class Entry(NamedTuple):
    """One thing that a disk was asked to do: ``write``, ``sync``, ``name`` or ``unname``."""

    what: str
    file: int
    """Its number, which it has whatever its name."""
    position: int = 0
    """Of a sync: how many entries of the log it covers."""
    data: bytes = b""
    name: str = ""


class Disk:
    """``os`` as ``outputs`` sees it, and the log of what it was asked to do to files in one folder."""

    def __init__(self, folder: Path) -> None:
        self.log: list[Entry] = []
        self._folder = str(folder)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, fd: int, data: Any) -> int:
        position = os.lseek(fd, 0, os.SEEK_CUR)
        count = os.write(fd, data)
        self.log.append(Entry("write", os.fstat(fd).st_ino, position, bytes(data[:count])))
        return count

    def pwrite(self, fd: int, data: Any, position: int) -> int:
        count = os.pwrite(fd, data, position)
        self.log.append(Entry("write", os.fstat(fd).st_ino, position, bytes(data[:count])))
        return count

    def fsync(self, fd: int) -> None:
        before = len(self.log)  # what other threads write from now on, it may miss
        os.fsync(fd)
        is_folder = os.path.samestat(os.fstat(fd), os.stat(self._folder))  # noqa: PTH116
        self.log.append(Entry("sync", FOLDER if is_folder else os.fstat(fd).st_ino, before))

    def link(self, src: str, dst: str, **named: Any) -> None:
        os.link(src, dst, **named)
        self._name(dst)

    def rename(self, src: str, dst: str) -> None:
        os.rename(src, dst)  # noqa: PTH104
        self._name(dst)
        self.log[-1] = self.log[-1]._replace(what="rename", data=os.fsencode(Path(src).name))

    replace = rename

    def unlink(self, path: str) -> None:
        number = os.stat(path).st_ino  # noqa: PTH116
        os.unlink(path)  # noqa: PTH108
        self.log.append(Entry("unname", number, name=Path(path).name))

    def _name(self, path: str) -> None:
        self.log.append(Entry("name", os.stat(path).st_ino, name=Path(path).name))  # noqa: PTH116

    def open(self, path: str, flags: int, *mode: int) -> int:
        fd = os.open(path, flags, *mode)
        if flags & os.O_CREAT:
            self._name(path)
        return fd


def after_power_loss(log: list[Entry], old: dict[str, bytes], dice: random.Random, choice: str) -> dict[str, bytes]:
    """Return the files by name that a disk may have that was asked for no more than this."""
    numbers = {name: -2 - index for index, name in enumerate(old)}
    files = {numbers[name]: bytearray(data) for name, data in old.items()}
    synced = {entry.file: entry.position for entry in log if entry.what == "sync"}
    namings = [index for index, entry in enumerate(log) if entry.what in ("name", "rename", "unname")]
    certain = sum(index < synced.get(FOLDER, 0) for index in namings)
    kept = {"none": certain, "all": len(namings)}.get(choice, dice.randint(certain, len(namings)))
    for index in namings[:kept]:
        entry = log[index]
        if entry.what == "unname":
            numbers.pop(entry.name, None)
            continue
        numbers[entry.name] = entry.file
        if entry.what == "rename":
            numbers.pop(os.fsdecode(entry.data), None)
    for index, entry in enumerate(log):
        if entry.what == "write":
            sure = index < synced.get(entry.file, 0)
            _write(files.setdefault(entry.file, bytearray()), entry, dice, "all" if sure else choice)
    return {name: bytes(files.get(number, b"")) for name, number in numbers.items()}


def _write(file: bytearray, entry: Entry, dice: random.Random, choice: str) -> None:
    """Write what is kept of an entry, block by block; where later blocks are kept alone, there are zeros."""
    end = entry.position + len(entry.data)
    position = entry.position
    while position < end:
        stop = min(end, (position // BLOCK + 1) * BLOCK)
        if choice == "all" or (choice == "some" and dice.random() < 0.5):
            if len(file) < stop:
                file.extend(bytes(stop - len(file)))
            file[position:stop] = entry.data[position - entry.position : stop - entry.position]
        position = stop


def states(log: list[Entry], old: dict[str, bytes]) -> Iterator[tuple[int, dict[str, bytes]]]:
    """Yield, for each moment at which the power may fail, some of the disks that there may be afterwards."""
    for length in range(len(log) + 1):
        for number in range(CHOICES):
            dice = random.Random(f"{length} {number}")
            choice = ("none", "all", "some")[min(number, 2)]
            yield length, after_power_loss(log[:length], old, dice, choice)


def logged(folder: Path, monkeypatch: pytest.MonkeyPatch, target: str, numel: int, *, old: bool) -> list[Entry]:
    """Return what a migration asks of the disk."""
    (folder / "source.pth").write_bytes(checkpoint(numel))
    if old:
        (folder / target).write_bytes(OLD)
    disk = Disk(folder)
    monkeypatch.setattr(outputs, "os", disk)
    migrate(folder / "source.pth", folder / target, to="cpu", force=old)
    return disk.log


def lost(folder: Path, log: list[Entry], target: str, *, old: bool) -> list[str]:
    """Return what is wrong, at which moments, on which disks."""
    new = (folder / target).read_bytes()
    whole = {OLD: "old", new: "new", None: "nothing"}
    allowed = {"old", "new"} if old else {"nothing", "new"}
    found = []
    for length, files in states(log, {target: OLD} if old else {}):
        what = whole.get(files.get(target), "broken")
        if what not in allowed:
            found.append(f"{what} after {length} of {len(log)}")
    return found


WAYS = [("out.pth", 64), ("out.safetensors", 64), ("out.pth", 40_000), ("out.pth", 1 << 20)]


@scaled
@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(("target", "numel"), WAYS)
def test_power_that_fails(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, numel: int, old: bool
) -> None:
    log = logged(tmp_path, monkeypatch, target, numel, old=old)

    assert {entry.what for entry in log} >= {"write", "sync"}
    assert lost(tmp_path, log, target, old=old) == []
    # Once it is over: over an old file, for certain.
    disks = [after_power_loss(log, {target: OLD} if old else {}, random.Random(1), how) for how in ("none", "all")]
    assert disks[1][target] == (tmp_path / target).read_bytes()
    assert not old or disks[0][target] == disks[1][target]


@pytest.mark.parametrize("old", [False, True])
def test_it_is_the_sync_that_does_it(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bool) -> None:
    log = logged(tmp_path, monkeypatch, "out.pth", 40_000, old=old)
    careless = [entry for entry in log if entry.what != "sync" or entry.file == FOLDER]

    assert any("broken" in one for one in lost(tmp_path, careless, "out.pth", old=old))


def test_a_replacement_that_is_not_verified(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "source.pth").write_bytes(checkpoint())
    (tmp_path / "out.pth").write_bytes(OLD)
    disk = Disk(tmp_path)
    monkeypatch.setattr(outputs, "os", disk)
    migrate(tmp_path / "source.pth", tmp_path / "out.pth", force=True, verify=False)

    assert lost(tmp_path, disk.log, "out.pth", old=True) == []


def test_what_is_written_behind_a_sync_is_synced_again(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out.pth").write_bytes(OLD)
    disk = Disk(tmp_path)
    monkeypatch.setattr(outputs, "os", disk)
    with Output(str(tmp_path / "out.pth"), force=True) as output:
        output.write(b"a" * 10_000)
        output.flush()
        output.sync()
        output.write(b"b" * 10_000)
        output.publish()

    assert lost(tmp_path, disk.log, "out.pth", old=True) == []
