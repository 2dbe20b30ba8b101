"""
Folders as targets: what may stand where one is to be written, what stands there afterwards, and what kills leave.
"""

from __future__ import annotations

import os
import shutil
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from ckptool import migrate, system
from ckptool.errors import OutputExists, OutputFailed
from ckptool.migration import output as folders
from ckptool.migration.output import OutputFolder
from tests import build
from tests.each import each
from tests.migration import test_faults, test_outputs
from tests.migration.refused import refused
from tests.migration.test_faults import BIG, Processes, job
from tests.migration.test_outputs import SHARDS, checkpoint, dead_pid, names_in
from tests.missing import links, on_windows
from tests.process import open_descriptors
from tests.scale import scaled, step

processes = test_faults.processes


folder = test_outputs.folder


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def old_one(folder: Path) -> Path:
    """Make a folder with two files where the new one is to be."""
    (folder / "out").mkdir()
    (folder / "out" / "model.safetensors").write_bytes(b"what stood here")
    (folder / "out" / "config.json").write_bytes(b"{}")
    return folder / "out"


def new_one(folder: Path) -> dict[str, bytes]:
    """Return what is written, undisturbed."""
    migrate(folder / "model.pth", folder.parent / "undisturbed", **SHARDS)
    return content(folder.parent / "undisturbed")


def long_ago(folder: Path) -> None:
    """Let a folder be old: on Windows, where folders have no locks, a new one may still be somebody's."""
    os.utime(folder, (0, time.time() - 100_000))


# What stands there


def test_what_exists_stays(folder: Path) -> None:
    before = content(old_one(folder))

    error = refused(folder / "model.pth", folder / "out", **SHARDS, error=OutputExists)

    assert (error.path, error.option) == (str(folder / "out"), "force")
    assert content(folder / "out") == before


@pytest.mark.parametrize("verify", [True, False])
def test_what_exists_is_replaced_when_asked(verify: bool, folder: Path) -> None:
    old_one(folder).chmod(0o750)

    report = migrate(folder / "model.pth", folder / "out", force=True, verify=verify, **SHARDS)

    assert report.target == str(folder / "out")
    assert names_in(folder / "out") == {file.name for file in report.files}
    assert content(folder / "out") == new_one(folder)
    assert os.name == "nt" or stat.S_IMODE((folder / "out").stat().st_mode) == 0o750
    assert names_in(folder) == {"model.pth", "out"}
    assert any("other file" in note and "config.json" in note for note in report.notes)


@links
def test_a_link_stays_and_its_target_is_replaced(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (folder / "link").symlink_to(old_one(tmp_path / "store"))

    migrate(folder / "model.pth", folder / "link", force=True, **SHARDS)

    assert (folder / "link").is_symlink()
    assert content(tmp_path / "store" / "out") == new_one(folder)


def test_a_folder_with_folders_in_it_is_never_replaced(folder: Path) -> None:
    (old_one(folder) / "epoch 3").mkdir()

    refused(
        folder / "model.pth",
        folder / "out",
        force=True,
        **SHARDS,
        kind="not-replaced",
        match=r"1 folder in it: epoch 3",
    )
    assert names_in(folder / "out") == {"model.safetensors", "config.json", "epoch 3"}


def test_the_current_folder_is_never_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(old_one(folder))

    refused(folder / "model.pth", ".", force=True, **SHARDS, match="the current folder", error=OutputFailed)

    assert names_in(folder / "out") == {"model.safetensors", "config.json"}


@pytest.mark.parametrize("linked", [False, pytest.param(True, marks=links)])
def test_the_folder_of_the_source_is_never_replaced(linked: bool, folder: Path) -> None:
    source = folder / "model.pth"
    if linked:
        (folder / "links").mkdir()
        source = folder / "links" / "model.pth"
        source.symlink_to(folder / "model.pth")

    refused(source, source.parent, force=True, **SHARDS, kind="part-of-source")


@each("name", ["out.safetensors", "out.pth", "out.pt", "out.json", "model.safetensors.index.json"])
def test_the_name_of_a_file_is_refused(name: str, folder: Path) -> None:
    refused(folder / "model.pth", folder / name, **SHARDS, kind="another-suffix")


def test_without_a_name_it_stands_beside_the_source(folder: Path) -> None:
    report = migrate(folder / "model.pth", **SHARDS)

    assert Path(report.target).parent == folder
    assert content(Path(report.target)) == new_one(folder)
    refused(folder / "model.pth", **SHARDS, error=OutputExists)


@pytest.mark.parametrize("happens", ["goes", "comes", "changes"])
def test_another_process_meanwhile(happens: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old_one(folder)
    rename, left = os.rename, [3]

    def renamed(src: str, dst: str) -> None:
        if dst == str(folder / "out") and left[0]:
            left[0] -= 1
            if happens == "goes":
                shutil.rmtree(dst)
            elif happens == "comes":
                Path(dst).mkdir(exist_ok=True)
                (Path(dst) / "theirs").write_bytes(b"")
        rename(src, dst)
        if happens == "changes" and src == str(folder / "out"):
            old_one(folder)  # its name was free for an instant

    monkeypatch.setattr(os, "rename", renamed)
    if happens == "changes":
        left[0] = 0
        changed = iter([True, True])
        monkeypatch.setattr(
            os, "rename", lambda src, dst: renamed(src, dst) if next(changed, False) else rename(src, dst)
        )
    migrate(folder / "model.pth", folder / "out", force=True, **SHARDS)
    monkeypatch.undo()

    assert content(folder / "out") == new_one(folder)
    assert names_in(folder) == {"model.pth", "out"}


# What is left, and what is never left


@pytest.mark.parametrize("stage", ["write", "sync", "publish"])
def test_a_failure_leaves_nothing_and_names_the_target(
    stage: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = content(old_one(folder))
    calls = [0]
    real = getattr(folders.Output, stage)

    def fail(self: Any, *args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            raise OutputFailed("no more", path=self._shown)
        return real(self, *args)

    monkeypatch.setattr(folders.Output, stage, fail)
    error = refused(folder / "model.pth", folder / "out", force=True, **SHARDS, error=OutputFailed)

    assert Path(str(error.path)).parent == folder / "out"
    assert content(folder / "out") == before
    assert names_in(folder) == {"model.pth", "out"}


def test_what_is_on_the_disk_is_not_what_was_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = folders.Output.sync

    def spoil(self: Any) -> None:
        at = os.fstat(self._fd).st_size // 2
        system.write_at(self._fd, bytes([system.read_at(self._fd, 1, at)[0] ^ 1]), at)
        sync(self)

    monkeypatch.setattr(folders.Output, "sync", spoil)
    refused(folder / "model.pth", folder / "out", **SHARDS, kind="verification-failed")


def test_what_killed_processes_left_is_removed(folder: Path) -> None:
    head = f".out.ckptool-{dead_pid()}-0123abcd"
    old_one(folder)
    for end in (".part", ".old"):
        (folder / (head + end)).mkdir()
        (folder / (head + end) / "file").write_bytes(b"left")
        long_ago(folder / (head + end))
    (folder / f".other.ckptool-{dead_pid()}-0123abcd.part").mkdir()
    mine = folder / f".out.ckptool-{os.getpid()}-0123abcd.part"
    mine.mkdir()

    migrate(folder / "model.pth", folder / "out", force=True, **SHARDS)
    left = names_in(folder) - {"model.pth", "out"}

    assert left == {mine.name, next(name for name in left if name.startswith(".other"))}
    assert content(folder / "out") == new_one(folder)


@pytest.mark.parametrize("name", ["out", "n" * 48])
def test_what_was_moved_aside_gets_its_name_back(folder: Path, name: str) -> None:
    before = content(old_one(folder))
    aside = folder / f".{name}.ckptool-{dead_pid()}-0123abcd.old"
    (folder / "out").rename(aside)
    long_ago(aside)

    with pytest.raises(OutputExists):
        migrate(folder / "model.pth", folder / name, **SHARDS)

    assert content(folder / name) == before
    assert names_in(folder) == {"model.pth", name}


def test_what_was_moved_aside_stays_where_it_may_be_anothers(folder: Path) -> None:
    name = "n" * 60
    aside = folder / f".{name[:48]}.ckptool-{dead_pid()}-0123abcd.old"
    aside.mkdir()

    migrate(folder / "model.pth", folder / name, **SHARDS)

    assert names_in(folder) == {"model.pth", name, aside.name}


@on_windows("it has no locks on folders")
def test_what_another_process_holds_stays(folder: Path) -> None:
    held = folder / f".out.ckptool-{dead_pid()}-0123abcd.part"
    held.mkdir()
    fd = system.open_at(None, str(held))
    system.lock(fd)
    try:
        migrate(folder / "model.pth", folder / "out", **SHARDS)
    finally:
        os.close(fd)

    assert names_in(folder) == {"model.pth", "out", held.name}


@pytest.mark.parametrize("happens", ["comes", "goes"])
def test_nothing_is_left_where_a_process_that_is_being_ended_still_writes(
    folder: Path, happens: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with OutputFolder(str(folder / "out")) as output:
        temporary = Path(output.reading_path("one")).parent
        for name in ("one", "two"):
            (temporary / name).write_bytes(b"")
        remove, left = getattr(os, "rmdir" if happens == "comes" else "unlink"), [3]

        def meanwhile(path: str) -> None:
            left[0] -= 1
            if happens == "comes" and left[0] >= 0:
                (temporary / f"{left[0]}").write_bytes(b"")
            elif happens == "goes":
                Path(path).replace(temporary / "three")  # as what gets its name in two steps
            remove(path)

        monkeypatch.setattr(os, remove.__name__, meanwhile)

    monkeypatch.undo()
    assert names_in(folder) == {"model.pth"}


def test_what_nobody_wrote_is_not_published(folder: Path) -> None:
    with OutputFolder(str(folder / "out")) as output:
        (Path(output.reading_path("one")).parent / "inside").mkdir()
        with pytest.raises(OutputFailed, match=r"directory|denied"):
            output.publish()

    assert "out" not in names_in(folder)


def test_a_folder_that_is_removed_keeps_the_folders_in_it(folder: Path) -> None:
    (folder / "inside").mkdir()
    with pytest.raises(OSError, match="not empty"):
        folders.remove_folder(str(folder))

    assert names_in(folder) == {"inside"}


def test_descriptors_are_few_however_many_files_there_are(folder: Path) -> None:
    tree = {f"{number}": build.tensor(build.storage(f"{number}", 9), (9,)) for number in range(60)}
    (folder / "model.pth").write_bytes(build.torch_zip(tree, {f"{number}": build.floats(9) for number in range(60)}))
    before, seen = open_descriptors(), []

    report = migrate(
        folder / "model.pth", folder / "out", max_shard_size=36, progress=lambda _, __: seen.append(open_descriptors())
    )

    assert len(report.files) == 61
    assert max(seen) <= before + 5
    assert open_descriptors() == before


# Processes that are killed


def found_in(place: Path, old: dict[str, bytes] | None, new: dict[str, bytes]) -> str:
    there = content(place) if place.is_dir() else None
    return "old" if there == old else "new" if there == new else "nothing" if there is None else "BROKEN"


@scaled
@pytest.mark.parametrize(("old", "after"), [(True, False), (False, True)])
def test_killed_at_every_system_call(folder: Path, processes: Processes, old: bool, after: bool) -> None:
    source, target = folder / "model.pth", folder / "out"
    source.write_bytes(checkpoint(numel=256))
    new = new_one(folder)
    whole = processes.run(job(source, target, kill_at=0, after=False, options=SHARDS))[0]
    assert whole.error is None
    folders.remove_folder(str(target))
    seen = []
    times = 1 if hasattr(os, "fork") else 5  # elsewhere each process begins anew, which takes seconds
    for at in [
        *range(1, whole.calls - 5, step(50, 3) * times),
        *range(whole.calls - 5, whole.calls + 20, step(2) * times),
    ]:
        before = content(old_one(folder)) if old else None
        outcome = processes.run(job(source, target, kill_at=at, after=after, force=old, options=SHARDS))[0]
        found = found_in(target, before, new)
        left = names_in(folder) - {source.name, target.name}
        assert all(name.startswith(f".out.ckptool-{outcome.pid}-") for name in left)
        if found == "nothing":  # between the two names
            aside = next(name for name in left if name.endswith(".old"))
            assert content(folder / aside) == before
            assert [content(folder / name) for name in left - {aside}] == [new]
            found = "old"
        else:
            assert found in ("old", "new")
            assert len(left) <= 1
        assert outcome.error in ("killed", None)
        assert outcome.error or (found == "new" and not left)
        seen.append(found)
        folders.remove_orphans(str(folder), target.name)  # as the next run does before anything else
        assert found_in(target, before, new) == found  # what was moved aside has its name again
        assert names_in(folder) <= {source.name, target.name}
        if target.exists():
            folders.remove_folder(str(target))
    assert seen == sorted(seen, reverse=True)  # there is one moment at which it gets its name
    assert {"old", "new"} == set(seen)


@scaled
@pytest.mark.parametrize("force", [True, False][:: step(2)])
def test_eight_write_one_folder(folder: Path, processes: Processes, force: bool) -> None:
    target, sources = folder / "out", []
    for number in range(8):
        sources.append(folder / f"source{number}.pth")
        sources[-1].write_bytes(checkpoint(numel=(BIG // 4 if number % 4 == 0 else 4096) + number))
    results = []
    for number, source in enumerate(sources):
        migrate(source, folder.parent / f"{number}", **SHARDS)
        results.append(content(folder.parent / f"{number}"))
    kept = names_in(folder)

    outcomes = processes.run(*(job(source, target, force=force, options=SHARDS) for source in sources))

    errors = [outcome.error for outcome in outcomes]
    assert errors == [None] * 8 if force else sorted(errors, key=str) == [None] + ["OutputExists"] * 7
    assert content(target) in results
    assert names_in(folder) == kept | {"out"}
