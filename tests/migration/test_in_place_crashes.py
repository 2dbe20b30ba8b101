"""
An edit in place that is cut off anywhere: the old file or the new one comes out, bit for bit, and no reader is fooled.

The operations of an edit are recorded, and every state of the folder that a stop could leave is made from them. Of
each: what stock readers make of it before anything is recovered, what ours do, and what ``recover`` makes of it.
"""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from ckptool import open_checkpoint, recover
from ckptool.errors import CkptoolError, OutputFailed, UnfinishedEdit
from tests.migration.disk import FOLDER, Disk, Entry, Files, State, after_power_loss
from tests.migration.in_place import LAYOUTS, Stepped, edit, journal_of, on, put, readings, start_of, write
from tests.missing import lock, only_linux
from tests.scale import in_turn, step, times

SECTOR = 512


LAYOUT = pytest.mark.parametrize("layout", LAYOUTS)


class Recorded:
    """An edit that was made, with its log, and the two files that may be met."""

    def __init__(self, layout: str, folder: Path, count: int = 8) -> None:
        self.path = write(layout, folder, count)
        self.old, self.start = self.path.read_bytes(), start_of(self.path)
        known, disk = dict(readings(self.path)), Disk()
        edit(self.path, LAYOUTS[layout].changes, disk)
        self.log = disk.log
        self.new = self.path.read_bytes()
        self.known = [known, dict(readings(self.path))]
        assert self.old != self.new
        assert all(len(one) == len(known) >= 1 for one in self.known)

    def states(self) -> list[State]:
        """Return what the disk holds before and after each thing that it was asked to do."""
        return list(accumulate(self.log, State.after, initial=self.start))

    def check(self, files: Files) -> str:
        """Look at a state through the eyes of every reader, recover it, and return what came out."""
        put(files, self.path)
        for reader, found in readings(self.path):
            assert found in (self.known[0][reader], self.known[1][reader]), reader
        journal = journal_of(self.path)
        if journal.exists():
            was = files[self.path.name]
            is_whole = was in (self.old, self.new)
            if is_whole:  # anybody may read it, and recovery only confirms it
                open_checkpoint(self.path).close()
            else:
                with pytest.raises(UnfinishedEdit, match="edited in place") as refused:
                    open_checkpoint(self.path)
                assert refused.value.command == f"ckptool recover {self.path}"
            assert self.path.read_bytes() == was
            assert bool(recover(self.path)) != is_whole
            assert self.path.read_bytes() == (was if is_whole else self.old)
        found = self.path.read_bytes()
        assert found in (self.old, self.new)
        assert not journal.exists()
        open_checkpoint(self.path).close()
        return "old" if found == self.old else "new"


def torn(entry: Entry, size: int) -> Iterator[Entry]:
    """Yield a write of which the first or the last blocks are missing, cut at each multiple of a size."""
    first = -entry.offset % size or size
    for cut in range(first, len(entry.data), size):
        yield entry._replace(data=entry.data[:cut])
        yield entry._replace(offset=entry.offset + cut, data=entry.data[cut:])


@LAYOUT
def test_a_stop_before_and_after_each_operation_leaves_the_old_file_or_the_new_one(layout: str, tmp_path: Path) -> None:
    edited = Recorded(layout, tmp_path)
    met = [edited.check(state.content) for state in edited.states()]

    assert met == sorted(met, reverse=True)  # first the old one, then the new one
    assert set(met) == {"old", "new"}
    assert [entry.what for entry in edited.log if entry.file != FOLDER].count("sync") == 4


@LAYOUT
def test_a_write_that_is_torn_at_a_byte_leaves_the_old_file_or_the_new_one(layout: str, tmp_path: Path) -> None:
    edited = Recorded(layout, tmp_path, count=3)
    for state, entry in zip(edited.states(), edited.log, strict=False):
        parts = list(torn(entry, 1)) if entry.what == "write" else []
        # A short write is of the guard: each of its bytes, always.
        for part in parts if len(parts) < 20 else parts[:: step(997, 23)]:
            edited.check(state.after(part).content)


@LAYOUT
def test_a_recovery_that_is_cut_off_is_taken_up_again(layout: str, tmp_path: Path) -> None:
    edited = Recorded(layout, tmp_path)
    *before, _ = edited.states()
    for state in [*before[:: step(13, 3)], before[-4]]:  # the last: all is written, but for the new guard
        put(state.content, edited.path)
        if not journal_of(edited.path).exists():
            continue
        state.names = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
        state.files = {path.stat().st_ino: bytearray(path.read_bytes()) for path in tmp_path.iterdir()}
        disk = Disk()
        with on(disk):
            recover(edited.path)
        for entry in disk.log:
            edited.check(state.content)
            for part in torn(entry, SECTOR) if entry.what == "write" else ():
                edited.check(state.after(part).content)
            state.do(entry)
        edited.check(state.content)


@LAYOUT
def test_power_that_fails_leaves_the_old_file_or_the_new_one(layout: str, tmp_path: Path) -> None:
    edited = Recorded(layout, tmp_path, count=12)
    chosen = random.Random(layout)
    for _ in range(times(1, 5)):
        for stop in range(len(edited.log) + 1):
            choice = chosen.choice(["none", "all", "some"])
            edited.check(after_power_loss(edited.log[:stop], edited.start, chosen, choice, SECTOR))


class Refusing(Stepped):
    """A disk on which one operation fails, and, where it is full for good, each one after it that needs room."""

    def __init__(self, number: int, error: int, *, for_good: bool) -> None:
        super().__init__()
        self._left = number
        self._error = error
        self._for_good = for_good
        self.failed = False

    def before(self, what: str) -> None:
        """Fail, or do not."""
        if what == "unlink" and self._for_good:
            return
        self._left -= 1
        if self._left == -1 or (self._left < 0 and self._for_good):
            self.failed = True
            raise OSError(self._error, os.strerror(self._error))


@pytest.mark.parametrize(("layout", "for_good"), in_turn(LAYOUTS, [False, True]))
def test_a_full_disk_leaves_the_old_file(layout: str, for_good: bool, tmp_path: Path) -> None:
    path = write(layout, tmp_path)
    old = path.read_bytes()
    edit(path, LAYOUTS[layout].changes)
    new = path.read_bytes()
    failures = 0
    for number in range(100):
        put({path.name: old}, path)
        disk = Refusing(number, errno.ENOSPC, for_good=for_good)
        kind = ""
        try:
            edit(path, LAYOUTS[layout].changes, disk)
        except CkptoolError as error:
            kind = error.kind
        if not disk.failed:
            break
        assert kind in ("disk-full", "unfinished-edit")
        if kind == "unfinished-edit":
            recover(path)
        failures += 1
        if kind == "unfinished-edit" and path.read_bytes() == new:  # all but to remove the journal was done
            put({path.name: old}, path)
        assert path.read_bytes() == old
        assert [one.name for one in tmp_path.iterdir()] == [path.name]

    assert failures >= 8
    assert path.read_bytes() != old


@LAYOUT
def test_a_disk_that_does_not_keep_what_it_is_given_leaves_the_old_file(layout: str, tmp_path: Path) -> None:
    class Flipping(Disk):
        def pwrite(self, fd: int, data: Any, position: int) -> int:
            is_edit = len(data) > 20 and os.fstat(fd).st_ino == inode and not self.has_flipped
            self.has_flipped = self.has_flipped or is_edit
            return os.pwrite(fd, bytes([data[0] ^ 1, *data[1:]]) if is_edit else data, position)

        has_flipped = False

    path = write(layout, tmp_path)
    old, inode = path.read_bytes(), path.stat().st_ino
    with pytest.raises(OutputFailed) as failed:
        edit(path, LAYOUTS[layout].changes, Flipping())

    assert failed.value.kind == "verification-failed"
    assert path.read_bytes() == old
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(("layout", "more"), in_turn(LAYOUTS, [1, -1]))
def test_a_file_that_gets_another_size_meanwhile_is_not_taken_for_the_new_one(
    layout: str, more: int, tmp_path: Path
) -> None:
    class Resizing(Disk):
        def pwrite(self, fd: int, data: Any, position: int) -> int:
            count = os.pwrite(fd, data, position)
            self.writes += os.fstat(fd).st_ino == inode
            if self.writes == writes:
                os.ftruncate(fd, os.fstat(fd).st_size + more)
            return count

        writes = 0

    counted = Resizing()
    inode, writes = write(layout, tmp_path).stat().st_ino, -1
    edit(tmp_path / f"model{LAYOUTS[layout].suffix}", LAYOUTS[layout].changes, counted)
    path = write(layout, tmp_path)
    old, inode, writes = path.read_bytes(), path.stat().st_ino, counted.writes

    with pytest.raises(OutputFailed) as failed:
        edit(path, LAYOUTS[layout].changes, Resizing())

    assert failed.value.kind == "verification-failed"
    assert more < 0 or path.read_bytes() == old


def test_an_edit_that_goes_on_is_not_recovered(tmp_path: Path) -> None:
    edited = Recorded("slot", tmp_path)
    files = edited.start.after(*edited.log[:7]).content
    put(files, edited.path)
    with edited.path.open("rb") as stream:
        lock(stream)
        with pytest.raises(CkptoolError) as refused:
            recover(edited.path)
    assert refused.value.kind == "locked"
    assert edited.path.read_bytes() == files[edited.path.name]


@only_linux("elsewhere such a lock ends with any descriptor of the file")
@pytest.mark.parametrize("lock", ["flock", "lockf"])
def test_nobody_gets_a_lock_while_a_file_is_edited(lock: str, tmp_path: Path) -> None:
    asks = f"import fcntl, sys; fcntl.{lock}(open(sys.argv[1], 'rb+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    answers = {}

    class Asked(Stepped):
        def before(self, what: str) -> None:
            if what in ("create", "write", "unlink"):
                asked = subprocess.run([sys.executable, "-ISc", asks, str(path)], stderr=subprocess.PIPE, check=False)
                answers[what] = b"BlockingIOError" in asked.stderr

    path = write("slot", tmp_path)
    edit(path, LAYOUTS["slot"].changes, Asked())

    assert answers == {"create": True, "write": True, "unlink": True}
    assert subprocess.run([sys.executable, "-ISc", asks, str(path)], check=False).returncode == 0
