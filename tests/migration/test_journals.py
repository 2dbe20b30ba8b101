"""Journals of edits in place that nobody should believe, and files that were saved over: they are never written to."""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckptool import load, migrate, open_checkpoint, recover
from ckptool.errors import CkptoolError, DamagedFile, MigrationRefused, UnfinishedEdit
from ckptool.sources.journal import Change, Journal, Run
from tests import build
from tests.each import each
from tests.migration.disk import Disk, Files
from tests.migration.in_place import LAYOUTS, after_each_operation, edit, journal_of, put, states, torn, weights, write
from tests.program import invoke
from tests.scale import step, times

LAYOUT = pytest.mark.parametrize("layout", LAYOUTS)
NOBODY = 65534
as_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root is two users")


def run(*args: object) -> tuple[int, str]:
    done = invoke([str(one) for one in args])
    return done.exit_code, done.output


def goes_on(path: Path) -> None:
    """Read, check and migrate a file that has something beside it that is said, and say nothing else of it."""
    before = path.read_bytes()
    with open_checkpoint(path) as found:
        assert found.tensors
    load(path)
    code, shown = run("check", "--json", path)
    codes = [one["code"] for one in json.loads(shown)["findings"]]
    assert (code, codes.count("CK179")) == (0, 1), shown
    assert "CK179" in run("inspect", path)[1]
    migrate(path, path.with_name("copy.pth"), force=True)
    path.with_name("copy.pth").unlink()
    assert path.read_bytes() == before


def refused(path: Path, kind: str) -> str:
    """Return what ``recover`` says that does not touch a file."""
    before, status = path.read_bytes(), path.stat()
    with pytest.raises(MigrationRefused) as error:
        recover(path)
    code, shown = run("recover", path)
    assert (error.value.kind, code) == (kind, 1)
    assert (path.read_bytes(), path.stat().st_mtime_ns) == (before, status.st_mtime_ns)
    assert os.path.lexists(journal_of(path))
    return shown


# Journals that do not count


def forged(path: Path, data: bytes) -> bytes:
    """Return a journal that makes the file these bytes."""
    old = path.read_bytes()
    end = Run(len(data) - 22, data[-22:-18])
    changes = (Change(0, data, old.ljust(len(data), b"\0")),)
    return Journal(path.stat().st_ino, len(data), max(len(old), len(data)), end, end, changes).encoded()


@pytest.fixture
def shared() -> Iterator[Path]:
    """Return a folder that others may go into, as they may not into those of tests."""
    folder = Path(tempfile.mkdtemp())
    yield folder
    shutil.rmtree(folder)


def as_nobody(do: Callable[[], object]) -> int:
    """Return the exit code of a process of another user: 1 where it met a file that is being edited."""
    child = os.fork()
    if child == 0:
        code = 3
        try:
            os.setuid(NOBODY)
            do()
            code = 0
        except UnfinishedEdit:
            code = 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@as_root
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_who_may_only_add_files_to_a_folder_changes_none_by_a_journal(shared: Path) -> None:
    shared.chmod(0o1777)
    path = shared / "model.pth"
    torch.save(weights(), path)
    path.chmod(0o644)
    journal = forged(path, build.torch_zip(build.ops({"w": build.tensor(build.storage())}), {"0": build.floats()}))
    assert as_nobody(lambda: journal_of(path).write_bytes(journal)) == 0

    assert journal_of(path).stat().st_uid == NOBODY
    goes_on(path)
    assert f"of user {NOBODY}" in refused(path, "foreign-journal")


def _link(there: Path) -> None:
    there.rename(there.with_name("elsewhere"))
    there.symlink_to(there.with_name("elsewhere"))


def _nothing(make: Callable[[Path], object]) -> Callable[[Path], object]:
    def instead(there: Path) -> None:
        there.unlink()
        make(there)

    return instead


def _socket(there: Path) -> None:
    os.chdir(there.parent)
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(there.name)


WRONG: dict[str, Callable[[Path], object]] = {
    "others may write": lambda there: there.chmod(0o646),
    "its group may write": lambda there: there.chmod(0o660),
    "another name": lambda there: os.link(there, there.with_name("other-name")),
    "a link": _link,
    "a link to nothing": _nothing(lambda there: there.symlink_to("nothing")),
    "a pipe": _nothing(os.mkfifo),
    "a folder": _nothing(Path.mkdir),
    "a socket": _nothing(_socket),
    "garbage": lambda there: there.write_bytes(b"garbage" * 99),
    "nothing": lambda there: there.write_bytes(b""),
    "a checkpoint": lambda there: torch.save(weights(), there),
}


@each("wrong", WRONG)
def test_what_is_no_journal_is_said_and_blocks_nobody(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = torn("slot", tmp_path)
    WRONG[wrong](journal_of(path))
    refused(path, "foreign-journal")  # though but for that it would be the right one
    with pytest.raises(CkptoolError) as unread:
        open_checkpoint(path)
    assert not isinstance(unread.value, UnfinishedEdit)

    torch.save(weights(), path)
    goes_on(path)
    refused(path, "foreign-journal")
    with pytest.raises(MigrationRefused) as edited:
        migrate(path, in_place=True, to="cuda")
    assert edited.value.kind == "foreign-journal"


@as_root
@each(("owner", "of_journal", "counts"), [(0, NOBODY, False), (NOBODY, NOBODY, True), (NOBODY, 0, True), (1, 2, False)])
def test_a_journal_is_of_root_or_of_the_owner(owner: int, of_journal: int, counts: bool, tmp_path: Path) -> None:
    path = torn("slot", tmp_path)
    os.chown(path, owner, -1)
    os.chown(journal_of(path), of_journal, -1)
    if counts:
        assert recover(path) > 0
        open_checkpoint(path).close()
    else:
        refused(path, "foreign-journal")


@as_root
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_journal_that_may_not_be_read_keeps_nobody_from_what_is_whole(shared: Path) -> None:
    shared.chmod(0o755)
    path = torn("slot", shared)
    journal_of(path).chmod(0o600)

    assert as_nobody(lambda: open_checkpoint(path).close()) == 1
    torch.save(weights(), path)
    assert as_nobody(lambda: open_checkpoint(path).close()) == 0


def test_a_journal_of_another_file_is_stale(tmp_path: Path) -> None:
    path = torn("slot", tmp_path)
    other = write("slot", tmp_path / "..").rename(tmp_path / "other.pth")
    journal_of(path).rename(journal_of(other))
    goes_on(other)
    shown = refused(other, "another-file")

    assert "is stale" in shown
    assert f"rm -- {journal_of(other)}" in shown
    with pytest.raises(MigrationRefused):
        migrate(other, in_place=True, to="cuda")
    journal_of(other).unlink()
    assert migrate(other, in_place=True, to="cuda").written


@LAYOUT
def test_every_byte_of_a_journal_is_compared(layout: str, tmp_path: Path) -> None:
    path = torn(layout, tmp_path)
    data, before = journal_of(path).read_bytes(), path.read_bytes()
    dice = random.Random(layout)
    for at in [*range(16, 120), *(dice.randrange(16, len(data)) for _ in range(60))]:
        journal_of(path).write_bytes(data[:at] + bytes([data[at] ^ 1 << dice.randrange(8)]) + data[at + 1 :])
        with pytest.raises(DamagedFile):
            recover(path)
        with pytest.raises(UnfinishedEdit):
            open_checkpoint(path)
    for cut in (0, 15, 16, 60, len(data) - 1):
        journal_of(path).write_bytes(data[:cut])
        with pytest.raises(CkptoolError):
            recover(path)
    assert path.read_bytes() == before
    journal_of(path).write_bytes(data)
    assert recover(path) > 0


HUGE = (1 << 63) - 1


@each(
    "changed",
    [
        {"nbytes": 0, "new_nbytes": HUGE, "guard": Run(HUGE, b"\xff" * 4), "new_guard": Run(HUGE, b"\xff" * 4)},
        {"nbytes": 0, "new_nbytes": HUGE, "changes": (Change(HUGE - 1, b"", b"x" * 70_000),)},
        {"nbytes": -1, "changes": (Change(-5, b"", b"x"),)},
        {"nbytes": 0, "new_nbytes": HUGE, "changes": (Change(HUGE - 70_000, b"", b"x" * 70_000),)},
        {"guard": Run(0, b""), "new_guard": Run(0, b"")},
        {"nbytes": HUGE},
        {"new_nbytes": 0},
        {"changes": ()},
    ],
)
def test_journals_with_a_right_checksum_and_wrong_numbers_change_nothing(
    changed: dict[str, Any], tmp_path: Path
) -> None:
    path = write("slot", tmp_path)
    before = path.read_bytes()
    size, end = len(before), Run(len(before) - 22, before[-22:-18])
    right = Journal(path.stat().st_ino, size, size, end, end, (Change(0, before, bytes(size)),))
    journal_of(path).write_bytes(right._replace(**changed).encoded())
    with suppress(CkptoolError):
        recover(path)
    assert path.read_bytes() == before
    open_checkpoint(path).close()


@LAYOUT
@each("what", ["mode", "bytes"])
def test_nothing_is_edited_where_a_journal_would_not_count(what: str, layout: str, tmp_path: Path) -> None:
    class Other(Disk):
        def rename(self, src: str, dst: str) -> None:
            if what == "mode":  # as on a file system without modes
                Path(src).chmod(0o666)
            else:
                *whole, last = Path(src).read_bytes()
                Path(src).write_bytes(bytes([*whole, last ^ 1]))
            super().rename(src, dst)

    path = write(layout, tmp_path)
    before = path.read_bytes()
    with pytest.raises(MigrationRefused, match="its journal would not count") as refusal:
        edit(path, LAYOUTS[layout].changes, Other())

    assert refusal.value.kind == "not-in-place"
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


# Files that were saved over


def saved(layout: str, path: Path, *, epoch: int, count: int) -> None:
    """Save over a file, as a training would: it stays the same file."""
    tensors = {name: tensor + 100 * epoch for name, tensor in weights(count).items()}
    if layout == "header":
        found = path.with_name("new")
        save_file(tensors, found, metadata={"format": "pt"})
        path.write_bytes(found.read_bytes())
        found.unlink()
    else:
        torch.save(tensors, path, _use_new_zipfile_serialization=layout != "stream")


def values(path: Path) -> dict[str, list[float]]:
    with open_checkpoint(path) as found:
        return {name: tensor.torch().tolist() for name, tensor in found.tensors.items()}


@pytest.mark.parametrize(
    ("layout", "count"), [*((layout, 8) for layout in LAYOUTS), (next(iter(LAYOUTS)), 9), (list(LAYOUTS)[-1], 3)]
)
def test_a_file_that_was_saved_over_is_read_and_never_written_to(layout: str, count: int, tmp_path: Path) -> None:
    met = set()
    for number, (path, _) in enumerate(states(layout, tmp_path)):
        if number % step(5):
            continue
        inode = path.stat().st_ino
        saved(layout, path, epoch=2, count=count)
        new = path.read_bytes()
        assert path.stat().st_ino == inode
        there = journal_of(path).exists()

        assert values(path)["module.block0.weight"] == [200.0] * 5
        assert len(load(path)) == count
        code, shown = run("check", "--deep", path)
        assert code == 0, shown
        assert ("CK179" in shown) == there
        code, shown = run("recover", path)
        assert path.read_bytes() == new
        assert "written back" not in shown
        if there:
            met.add((code, journal_of(path).exists()))

    assert met <= {(0, False), (1, True)}  # as it was, or stale
    assert count == 8 or met == {(1, True)}


def mixed(old: bytes, new: bytes, dice: random.Random) -> bytearray:
    """Return a file of any size between two, each byte of one of them by chance; or 0, where the old one had ended."""
    size = dice.randint(min(len(old), len(new)), max(len(old), len(new)))
    texts = old.ljust(size, b"\0"), new.ljust(size, b"\0")
    return bytearray(texts[dice.randrange(2)][at] for at in range(size))


@LAYOUT
def test_what_is_torn_byte_by_byte_is_made_what_it_was(layout: str, tmp_path: Path) -> None:
    every: list[Files] = [dict(files) for _, files in after_each_operation(layout, tmp_path)]
    path = tmp_path / f"model{LAYOUTS[layout].suffix}"
    old, new = every[0][path.name], every[-1][path.name]
    half = next(one for one in every if journal_of(path).name in one and one[path.name] not in (old, new))
    dice = random.Random(layout)
    guard = {"header": (0, 8), "stream": (0, 4)}.get(layout)
    for _ in range(times(12, 300)):
        put(half, path)
        found = mixed(old, new, dice)
        for end in (len(old) - 22, len(new) - 22):  # neither of the guards is whole
            start, stop = guard or (end, end + 4)
            if start < len(found):
                found[start:stop] = b"\xff" * len(found[start:stop])
        path.write_bytes(found)
        with pytest.raises(UnfinishedEdit):
            open_checkpoint(path)
        assert recover(path) > 0
        assert path.read_bytes() == old
        assert not journal_of(path).exists()


@LAYOUT
def test_one_byte_that_the_edit_cannot_have_left_is_enough(layout: str, tmp_path: Path) -> None:
    path = torn(layout, tmp_path)
    before = path.read_bytes()
    journal = journal_of(path).read_bytes()
    index = before.index(b"longer" if layout == "tail" else b"block", 8)
    for at in (index, index + 1, index + 4):
        path.write_bytes(before[:at] + b"\x7f" + before[at + 1 :])
        refused(path, "another-file")
    path.write_bytes(before)
    journal_of(path).write_bytes(journal)
    assert recover(path) > 0


@LAYOUT
def test_a_mixture_with_a_whole_guard_is_of_no_edit(layout: str, tmp_path: Path) -> None:
    """A file that another program wrote may agree with the old one or the new one in each of its bytes, by chance."""
    every = [files for _, files in after_each_operation(layout, tmp_path)]
    path = tmp_path / f"model{LAYOUTS[layout].suffix}"
    old, new = every[0][path.name], every[-1][path.name]
    put(next(one for one in every if len(one) == 2 and journal_of(path).name in one), path)
    differs = [at for at, (one, other) in enumerate(zip(old, new, strict=False)) if one != other]
    for at in differs[:: max(1, len(differs) // 7)]:
        path.write_bytes(old[:at] + new[at : at + 1] + old[at + 1 :])
        refused(path, "another-file")


# The mode of a result


def modes(path: Path) -> Iterator[int]:
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    yield from {one.stat().st_mode & 0o777 for one in files if one.is_file()}


@pytest.mark.parametrize("mode", [0o600, 0o460])
def test_a_result_is_as_private_as_its_source(mode: int, tmp_path: Path) -> None:
    path = write("slot", tmp_path)
    path.chmod(mode)
    old = os.umask(0o022)
    try:
        migrate(path, tmp_path / "out.pth", to="cpu")
        migrate(path, tmp_path / "out.safetensors")
        migrate(path, tmp_path / "shards", form="safetensors", max_shard_size="100B")
        migrate(path, tmp_path / "dcp", form="dcp")
        code, shown = run("migrate", path, tmp_path / "worked", "--form", "dcp", "--jobs", "2")
        assert code == 0, shown
        migrate(tmp_path / "shards", tmp_path / "again.safetensors")
        expected = {"out.pth", "out.safetensors", "shards", "dcp", "worked", "again.safetensors"}
        for name in expected:
            assert list(modes(tmp_path / name)) == [mode & ~0o022], name
    finally:
        os.umask(old)


def test_several_sources_are_as_private_as_the_most_private(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.ones(2)}, tmp_path / "two.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_bytes(build.index_of_shards({"a": "one.safetensors", "b": "two.safetensors"}))
    (tmp_path / "one.safetensors").chmod(0o644)
    (tmp_path / "two.safetensors").chmod(0o600)
    migrate(index, tmp_path / "out.safetensors")
    migrate(index, tmp_path / "whole.pth", form="state_dict")
    migrate(tmp_path / "whole.pth", tmp_path / "folder", form="dcp")
    (next((tmp_path / "folder").glob("*.distcp"))).chmod(0o640)
    migrate(tmp_path / "folder", tmp_path / "of-folder.safetensors")
    names = ("out.safetensors", "whole.pth", "of-folder.safetensors")
    assert [list(modes(tmp_path / name)) for name in names] == [[0o600]] * 3
    for name in ("one.safetensors", "two.safetensors"):
        (tmp_path / name).chmod(0o644)
    migrate(index, tmp_path / "open.pth", form="state_dict")
    migrate(tmp_path / "open.pth", tmp_path / "other", form="dcp")
    (next((tmp_path / "other").glob("*.distcp"))).chmod(0o640)
    migrate(tmp_path / "other", tmp_path / "of-other.safetensors")
    assert list(modes(tmp_path / "of-other.safetensors")) == [0o640]


@pytest.mark.parametrize("layout", ["slot", "tail", "header", "stream"])
def test_recover_says_that_it_does_not_know_what_others_wrote(tmp_path: Path, layout: str) -> None:
    path = torn(layout, tmp_path)
    values = weights()["module.block7.weight"].numpy().tobytes()
    data = path.read_bytes()
    assert data.count(values) == 1
    with path.open("r+b") as file:  # half a save by somebody else, who has not come to the index
        file.seek(data.index(values))
        file.write(b"\x77" * len(values))

    done = invoke(["recover", str(path)])

    assert done.exit_code == 0, done.output
    assert "whether anybody else wrote to the rest of the file meanwhile is not known" in done.stdout
    run = done.stdout.splitlines()[-1].removeprefix("Run: ckptool ")
    # Zips have checksums.
    assert invoke(shlex.split(run)).exit_code == int(layout in ("slot", "tail"))
