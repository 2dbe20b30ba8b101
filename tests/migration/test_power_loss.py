"""
Power that fails: what may be on the disk afterwards is, under the target's name, the old file or the whole new one.

A migration runs on a disk that keeps a log of what it is asked to do. After each entry, the power fails.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptool import migrate, system
from ckptool.migration import output as outputs
from ckptool.migration.output import Output
from tests.migration.disk import FOLDER, Disk, Entry, Files, State, after_power_loss
from tests.migration.test_outputs import OLD, checkpoint
from tests.missing import SYSTEM
from tests.scale import in_turn, scaled, times

BLOCK = 4096
CHOICES = times(3, 8)


def states(log: list[Entry], old: Files) -> Iterator[tuple[int, Files]]:
    """Yield, for each moment at which the power may fail, some of the disks that there may be afterwards."""
    for length in range(len(log) + 1):
        for number in range(CHOICES):
            dice = random.Random(f"{length} {number}")
            yield length, power_fails(log[:length], old, dice, ("none", "all", "some")[min(number, 2)])


def power_fails(log: list[Entry], old: Files, dice: random.Random, choice: str) -> Files:
    numbers = {name: -2 - index for index, name in enumerate(old)}
    start = State(numbers, {numbers[name]: data for name, data in old.items()})
    return after_power_loss(log, start, dice, choice, BLOCK)


def mounted(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    for module in (outputs, SYSTEM):
        monkeypatch.setattr(module, "os", disk)
    if sys.platform == "win32":  # which is not asked through `os`
        for name in ("open_new", "write_at"):
            monkeypatch.setattr(system, name, getattr(disk, name))
    return disk


def logged(
    folder: Path, monkeypatch: pytest.MonkeyPatch, target: str, numel: int, *, old: bool, verify: bool = True
) -> list[Entry]:
    """Return what a migration asks of the disk."""
    (folder / "source.pth").write_bytes(checkpoint(numel))
    if old:
        (folder / target).write_bytes(OLD)
    disk = mounted(monkeypatch)
    migrate(folder / "source.pth", folder / target, to="cpu", force=old, verify=verify)
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
@pytest.mark.parametrize(("made", "old"), in_turn(WAYS, [False, True]))
def test_power_that_fails(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: tuple[str, int], old: bool
) -> None:
    target, numel = made
    log = logged(tmp_path, monkeypatch, target, numel, old=old)

    assert {entry.what for entry in log} >= {"write", "sync"}
    assert lost(tmp_path, log, target, old=old) == []
    # Once it is over: over an old file, for certain.
    disks = [power_fails(log, {target: OLD} if old else {}, random.Random(1), how) for how in ("none", "all")]
    assert disks[1][target] == (tmp_path / target).read_bytes()
    if old and sys.platform != "win32":  # where names are on the disk when it likes, one after the other
        assert disks[0][target] == disks[1][target]


@pytest.mark.parametrize("old", [False, True])
def test_it_is_the_sync_that_does_it(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bool) -> None:
    log = logged(tmp_path, monkeypatch, "out.pth", 40_000, old=old)
    careless = [entry for entry in log if entry.what != "sync" or entry.file == FOLDER]

    assert any("broken" in one for one in lost(tmp_path, careless, "out.pth", old=old))


def test_a_replacement_that_is_not_verified(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = logged(tmp_path, monkeypatch, "out.pth", 64, old=True, verify=False)

    assert lost(tmp_path, log, "out.pth", old=True) == []


def test_what_is_written_behind_a_sync_is_synced_again(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out.pth").write_bytes(OLD)
    disk = mounted(monkeypatch)
    with Output(str(tmp_path / "out.pth"), force=True) as output:
        output.write(b"a" * 10_000)
        output.flush()
        output.sync()
        output.write(b"b" * 10_000)
        output.publish()

    assert lost(tmp_path, disk.log, "out.pth", old=True) == []
