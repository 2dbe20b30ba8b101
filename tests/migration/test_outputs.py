"""
Names: what may stand where a migration wants to write, and what stands there afterwards.

``nameless`` and ``named`` are the two ways in which an output is written: without a name (Linux's O_TMPFILE), and
under one of its own beside its place, where the system cannot do that.
"""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptool import migrate, system
from ckptool.errors import OutputExists, OutputFailed
from ckptool.migration import output as outputs
from ckptool.migration.output import Output
from tests import build
from tests.migration.refused import refused
from tests.missing import LINKS, NO_LINKS, links, on_windows, only_linux
from tests.process import open_descriptors
from tests.scale import in_turn

ROOT = Path(__file__).parents[2]
OLD = b"what stood here before" * 40


def checkpoint(numel: int = 64) -> bytes:
    """Return a zip with a whole storage, a transposed one, and two views of a third, all on a GPU."""
    tree = {
        "whole": build.tensor(build.storage("0", numel, "FloatStorage", "cuda:0"), (numel,)),
        "turned": build.tensor(build.storage("1", 64, "FloatStorage", "cuda:0"), (8, 8), (1, 8)),
        "head": build.tensor(build.storage("2", 64, "FloatStorage", "cuda:0"), (16,), (1,), 8),
        "tail": build.tensor(build.storage("2", 64, "FloatStorage", "cuda:0"), (16,), (1,), 24),
    }
    return build.torch_zip(tree, {"0": build.floats(numel), "1": build.floats(64), "2": build.floats(64)[::-1]})


def migrated(data: bytes, tmp_path: Path, name: str = "out.pth", **options: Any) -> bytes:
    """Return what a migration of ``data`` to a file of that name writes, undisturbed."""
    folder = tmp_path / "undisturbed"
    folder.mkdir(exist_ok=True)
    (folder / "source").write_bytes(data)
    migrate(folder / "source", folder / name, to="cpu", force=True, **options)
    return (folder / name).read_bytes()


def names_in(folder: Path) -> set[str]:
    return {place.name for place in folder.iterdir()}


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a checkpoint in it, ``model.pth``."""
    made = tmp_path / "work"
    made.mkdir()
    (made / "model.pth").write_bytes(checkpoint())
    return made


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


# Nothing is overwritten


def test_what_exists_stays_and_is_replaced_when_asked(way: str, folder: Path, tmp_path: Path) -> None:
    (folder / "out.pth").write_bytes(OLD)
    (folder / "out.pth").chmod(0o640)

    error = refused(folder / "model.pth", folder / "out.pth", error=OutputExists)
    assert (error.kind, error.path, error.option) == ("output-exists", str(folder / "out.pth"), "force")
    assert (folder / "out.pth").read_bytes() == OLD
    assert names_in(folder) == {"model.pth", "out.pth"}

    report = migrate(folder / "model.pth", folder / "out.pth", to="cpu", force=True)

    assert report.written
    assert report.verified
    assert (folder / "out.pth").read_bytes() == migrated(checkpoint(), tmp_path)
    assert (folder / "model.pth").read_bytes() == checkpoint()
    assert stat.S_IMODE((folder / "out.pth").stat().st_mode) == (0o640 if os.name == "posix" else 0o666)
    assert names_in(folder) == {"model.pth", "out.pth"}


@pytest.mark.parametrize("what", ["file", pytest.param("link", marks=links), "folder"])
def test_what_appears_while_we_write_stays(way: str, what: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish = Output.publish

    def late(self: Output) -> None:
        if what == "file":
            Path(self.path).write_bytes(OLD)
        elif what == "link":
            Path(self.path).symlink_to("nowhere")
        else:
            Path(self.path).mkdir()
        publish(self)

    monkeypatch.setattr(Output, "publish", late)

    with pytest.raises(OutputExists):
        migrate(folder / "model.pth", folder / "out.pth")

    assert names_in(folder) == {"model.pth", "out.pth"}
    place = folder / "out.pth"
    assert place.is_symlink() if what == "link" else place.is_dir() if what == "folder" else place.read_bytes() == OLD


def test_what_appears_while_we_write_is_replaced_when_asked(
    way: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_name = system.give_name

    def late(fd: int, old: str | None, path: str) -> None:  # somebody else was faster by an instant
        if Path(path).name == "out.pth":
            Path(path).write_bytes(OLD)
        give_name(fd, old, path)

    monkeypatch.setattr(system, "give_name", late)
    migrate(folder / "model.pth", folder / "out.pth", to="cpu", force=True)

    assert (folder / "out.pth").read_bytes() == migrated(checkpoint(), tmp_path)
    assert names_in(folder) == {"model.pth", "out.pth"}


@pytest.mark.parametrize("errno_", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_links_will_do(
    errno_: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "O_TMPFILE", raising=False)  # which only Linux has

    def no_links(*_: Any, **__: Any) -> None:
        raise OSError(errno_, "no links here")

    monkeypatch.setattr(os, "link", no_links)
    migrate(folder / "model.pth", folder / "out.pth", to="cpu")

    monkeypatch.undo()
    assert (folder / "out.pth").read_bytes() == migrated(checkpoint(), tmp_path)
    assert names_in(folder) == {"model.pth", "out.pth"}
    refused(folder / "model.pth", folder / "out.pth", error=OutputExists)


def test_gaps_are_filled_in_any_order_and_what_follows_stands_behind_them(way: str, folder: Path) -> None:
    with Output(str(folder / "out")) as output:
        output.write(b"aa")
        gap = output.leave(6)
        for at, data in ((4, b"dd"), (0, b"bb"), (2, b"cc")):
            output.fill(gap + at, memoryview(data))
        output.filled(6)
        output.write(b"ee")
        output.publish()

    assert (folder / "out").read_bytes() == b"aabbccddee"


# The source is the target

opened: list[int] = []


@pytest.fixture(autouse=True)
def close_opened() -> Iterator[None]:
    yield
    while opened:
        os.close(opened.pop())


ALIASES = ("itself", "with a dot", "with dots", "relative", "a link", "a folder that is a link", "a descriptor")


def called(alias: str, folder: Path) -> str:
    """Return another name of the checkpoint in a folder."""
    if "link" in alias and not LINKS:
        pytest.skip(NO_LINKS)
    if alias == "a link":
        (folder / "link.pth").symlink_to("model.pth")
    elif "link" in alias:
        (folder.parent / "elsewhere").symlink_to(folder)
    elif alias == "a descriptor":
        if sys.platform != "linux":
            pytest.skip(f"{sys.platform}: an open file has no path")
        opened.append(os.open(folder / "model.pth", os.O_RDONLY))
        return f"/proc/self/fd/{opened[-1]}"
    return {
        "with a dot": f"{folder}/./model.pth",
        "with dots": f"{folder}/../{folder.name}/model.pth",
        "relative": os.path.relpath(folder / "model.pth"),
        "a link": f"{folder}/link.pth",
        "a folder that is a link": f"{folder.parent}/elsewhere/model.pth",
    }.get(alias, f"{folder}/model.pth")


@pytest.mark.parametrize(("alias", "turned_round"), in_turn(ALIASES, [False, True]))
def test_the_source_is_replaced_by_its_result_under_any_name_only_if_asked(
    way: str, alias: str, turned_round: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    one, other = str(folder / "model.pth"), called(alias, folder)
    before = names_in(folder)
    root = Path(other if not turned_round else one).name.partition(".")[0]
    expected = migrated(checkpoint(), tmp_path, f"{root}.pth" if root != "self" else "model.pth", form="same")

    pair = (other, one) if turned_round else (one, other)
    refused(*pair, to="cpu", form="same", error=OutputExists)
    assert (folder / "model.pth").read_bytes() == checkpoint()

    assert migrate(*pair, to="cpu", form="same", force=True).verified
    assert (folder / "model.pth").read_bytes() == expected
    assert names_in(folder) == before
    assert not (folder / "model.pth").is_symlink()
    assert (folder / "link.pth").is_symlink() == ("link.pth" in before)


def test_the_other_name_of_a_hard_link_keeps_the_old_bytes(way: str, folder: Path, tmp_path: Path) -> None:
    os.link(folder / "model.pth", folder / "other.pth")

    refused(folder / "model.pth", folder / "other.pth", to="cpu", error=OutputExists)
    assert (folder / "model.pth").read_bytes() == (folder / "other.pth").read_bytes() == checkpoint()

    migrate(folder / "model.pth", folder / "other.pth", to="cpu", force=True)
    assert (folder / "model.pth").read_bytes() == checkpoint()
    assert (folder / "other.pth").read_bytes() == migrated(checkpoint(), tmp_path, "other.pth")


# Links, folders, and what else is not a place for a file


@links
def test_a_link_stays_and_its_target_is_replaced_or_made(way: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "blob").write_bytes(OLD)
    (folder / "out.pth").symlink_to("../store/blob")

    refused(folder / "model.pth", folder / "out.pth", to="cpu", form="same", error=OutputExists)
    migrate(folder / "model.pth", folder / "out.pth", to="cpu", form="same", force=True)

    assert (folder / "out.pth").readlink() == Path("../store/blob")
    assert (tmp_path / "store" / "blob").read_bytes() == (folder / "out.pth").read_bytes() != OLD
    assert names_in(folder) == {"model.pth", "out.pth"}
    assert names_in(tmp_path / "store") == {"blob"}
    (folder / "new.pth").symlink_to("blob")  # which is not there
    migrate(folder / "model.pth", folder / "new.pth", to="cpu", form="same")
    assert (folder / "new.pth").is_symlink()
    assert (folder / "blob").is_file()


SHARDS: dict[str, Any] = {"max_shard_size": 300}
DEVICE = "/dev/full" if os.name == "posix" else r"\\.\nul"
NO_PLACE: list[tuple[str, str, dict[str, Any]]] = [
    *(("folder", "not-a-file", {}), ("loop", "not-a-file", {}), ("pipe", "not-a-file", {})),
    *((DEVICE, "not-a-file", {}), ("missing/out.pth", "no-folder", {}), ("missing/", "no-folder", {})),
    *(("model.pth/out.pth", "output-failed", {}), ("n" * 256, "output-failed", {}), ("nul\0.pth", "not-a-path", {})),
    *(("file", "not-a-folder", SHARDS), ("pipe", "not-a-folder", SHARDS), ("loop", "not-a-folder", SHARDS)),
    *(("missing/out", "no-folder", SHARDS), ("model.pth/out", "output-failed", SHARDS)),
    *(("n" * 256, "output-failed", SHARDS), ("nul\0", "not-a-path", SHARDS)),
]


@pytest.mark.parametrize(("place", "force"), in_turn(NO_PLACE, [False, True]))
def test_no_place_for_a_file_or_a_folder(place: tuple[str, str, dict[str, Any]], force: bool, folder: Path) -> None:
    name, kind, options = place
    (folder / "folder" / "model.pth").mkdir(parents=True)
    (folder / "file").write_bytes(b"stays")
    if os.name == "posix":
        (folder / "loop").symlink_to("loop")
        os.mkfifo(folder / "pipe")
    elif name in ("loop", "pipe"):
        pytest.skip("Windows: it has no pipes in folders, and links for few")
    elif name.startswith("model.pth/"):
        kind = "no-folder"

    refused(folder / "model.pth", name if name == DEVICE else f"{folder}/{name}", force=force, kind=kind, **options)
    assert names_in(folder / "folder") == {"model.pth"}
    assert (folder / "file").read_bytes() == b"stays"


@pytest.mark.parametrize(
    "place", ["folder", "folder/", *(pytest.param(name, marks=links) for name in ("link", "link/")), "./", ".."]
)
def test_a_folder_gets_a_file_of_the_sources_name(place: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "folder").mkdir()
    if place.startswith("link"):
        (folder / "link").symlink_to("folder")
    (folder / "source").mkdir()
    (folder / "model.pth").rename(folder / "source" / "model.pth")
    monkeypatch.chdir(folder / "folder" if place == ".." else folder)

    report = migrate(folder / "source" / "model.pth", place)

    assert Path(report.target) == Path(place, "model.pth")
    expected = folder if place in ("./", "..") else folder / "folder"
    assert (expected / "model.pth").read_bytes() == Path(report.target).read_bytes()
    assert not any(name.startswith(".") for name in names_in(expected))


def test_the_folder_of_the_source_holds_the_source_already(folder: Path) -> None:
    before = (folder / "model.pth").read_bytes()
    refused(folder / "model.pth", folder, to="cpu", error=OutputExists)
    assert (folder / "model.pth").read_bytes() == before

    migrate(folder / "model.pth", folder, to="cpu", force=True)
    assert (folder / "model.pth").read_bytes() != before


def test_a_folder_that_may_not_be_written_to(folder: Path) -> None:
    (folder / "locked").mkdir(mode=0o500)
    if os.access(folder / "locked", os.W_OK):
        pytest.skip("root may write anywhere")

    error = refused(folder / "model.pth", folder / "locked" / "out.pth", match="permission denied", error=OutputFailed)

    assert error.path == str(folder / "locked" / "out.pth")


def test_a_folder_that_may_not_be_listed(folder: Path) -> None:
    (folder / "drop").mkdir(mode=0o300)
    if os.access(folder / "drop", os.R_OK):
        pytest.skip("root may read anything")

    migrate(folder / "model.pth", folder / "drop" / "out.pth")
    migrate(folder / "model.pth", folder / "drop" / "out.pth", force=True)

    (folder / "drop").chmod(0o700)
    assert names_in(folder / "drop") == {"out.pth"}


# Modes


@on_windows("it has no modes for groups and others")
@pytest.mark.parametrize("mask", [0o000, 0o027])
def test_a_new_file_has_the_mode_of_its_source_less_the_umask(
    mask: int, folder: Path, umask: Callable[[int], int]
) -> None:
    umask(mask)
    for mode in (0o666, 0o644, 0o600):
        (folder / "model.pth").chmod(mode)
        migrate(folder / "model.pth", folder / "new.pth")
        migrate(folder / "model.pth", folder / "forced.pth", force=True)

        for name in ("new.pth", "forced.pth"):
            assert stat.S_IMODE((folder / name).stat().st_mode) == mode & ~mask
            (folder / name).unlink()


@pytest.mark.skipif(os.name == "nt" or os.geteuid() != 0, reason="only root gives files away")
def test_an_old_file_keeps_its_owner(way: str, folder: Path) -> None:
    (folder / "out.pth").write_bytes(OLD)
    os.chown(folder / "out.pth", 1234, 2345)
    (folder / "out.pth").chmod(0o640)

    (folder / "model.pth").chmod(0o600)
    migrate(folder / "model.pth", folder / "out.pth", force=True)

    found = (folder / "out.pth").stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (1234, 2345, 0o640)


def test_an_owner_that_cannot_be_kept_is_no_error(way: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object) -> None:
        raise PermissionError(errno.EPERM, "not yours")

    (folder / "out.pth").write_bytes(OLD)
    for name in ("fchown", "setxattr", "getxattr", "listxattr"):
        monkeypatch.setattr(os, name, refuse, raising=False)
    migrate(folder / "model.pth", folder / "out.pth", force=True)

    assert (folder / "out.pth").read_bytes() != OLD


@only_linux("Python has extended attributes on Linux alone")
def test_an_old_file_keeps_its_extended_attributes(way: str, folder: Path) -> None:
    (folder / "out.pth").write_bytes(OLD)
    try:
        os.setxattr(folder / "out.pth", "user.origin", b"https://example.org")
    except OSError:
        pytest.skip("this file system has no extended attributes")

    migrate(folder / "model.pth", folder / "out.pth", force=True)
    migrate(folder / "model.pth", folder / "new.pth")

    assert os.getxattr(folder / "out.pth", "user.origin") == b"https://example.org"
    assert os.listxattr(folder / "new.pth") == []


# Parts that killed processes left


def test_what_a_dead_process_left_is_removed(way: str, folder: Path) -> None:
    pid = dead_pid()
    left = folder / f".out.pth.ckptool-{pid}-00c0ffee.part"
    left.write_bytes(OLD)
    long = "n" * 251 + ".pth"
    (folder / f".{long[:48]}.ckptool-{pid}-00c0ffee.part").write_bytes(OLD)

    migrate(folder / "model.pth", folder / "out.pth")
    assert not left.exists()
    migrate(folder / "model.pth", folder / long)
    assert names_in(folder) == {"model.pth", "out.pth", long}


def test_nothing_else_is_removed(way: str, folder: Path) -> None:
    pid = dead_pid()
    kept = {
        f".out.pth.ckptool-{os.getpid()}-00c0ffee.part",  # somebody writes it now
        f".other.pth.ckptool-{pid}-00c0ffee.part",
        f".out.pth.ckptool-{pid}-00c0ffee.parts",
        f"out.pth.ckptool-{pid}-00c0ffee.part",
        f".out.pth.ckptool-{'9' * 30}-00c0ffee.part",
        ".out.pth.ckptool-²-00c0ffee.part",
        ".out.pth.ckptool--1-00c0ffee.part",
        ".out.pth.ckptool-.part",
    }
    if os.name == "posix":  # Wine does not know whose child a process is
        kept |= {f".out.pth.ckptool-{number}-00c0ffee.part" for number in (0, os.getppid())}
    for name in kept:
        (folder / name).write_bytes(b"")
    (folder / f".out.pth.ckptool-{pid}-f01de400.part").mkdir()

    migrate(folder / "model.pth", folder / "out.pth")

    assert names_in(folder) - {"model.pth", "out.pth", f".out.pth.ckptool-{pid}-f01de400.part"} == kept


# What stays behind in the process


def test_failures_leave_no_descriptor_open(way: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "out.pth").write_bytes(OLD)
    (folder / "damaged.pth").write_bytes(checkpoint().replace(build.floats(64), b"\0" * 256))
    before = open_descriptors()

    def fail(*options: Any, **named: Any) -> None:
        refused(*options, **named)

    for _ in range(5):
        fail(folder / "model.pth", folder / "out.pth")
        fail(folder / "model.pth", folder / "missing" / "out.pth")
        fail(folder / "missing.pth", folder / "new.pth")
        fail(folder / "out.pth", folder / "new.pth")
        fail(folder / "model.pth", folder / "new.pth", key="missing", form="state_dict")
        for form in ("same", "safetensors"):
            fail(folder / "damaged.pth", folder / "new.pth", form=form)
        with monkeypatch.context() as patch:
            patch.setattr(Output, "publish", outputs.Output.reserve)  # which fails for want of an argument
            with pytest.raises(TypeError):
                migrate(folder / "model.pth", folder / "new.pth")

    assert open_descriptors() == before
    assert names_in(folder) == {"model.pth", "out.pth", "damaged.pth"}


def test_what_somebody_elsewhere_writes_is_not_removed(folder: Path) -> None:
    part = folder / f".out.pth.ckptool-{dead_pid()}-00c0ffee.part"  # of another host, where the number is alive
    part.touch()
    writer = system.open_writing(str(part))
    try:
        system.lock(writer)
        Output(str(folder / "out.pth")).close()
        assert part.exists()
    finally:
        os.close(writer)
    Output(str(folder / "out.pth")).close()
    assert not part.exists()


def test_a_part_is_held_while_it_is_written(way: str, folder: Path) -> None:
    held = "import os, sys; from ckptool import system; print(system.lock(os.open(sys.argv[1], os.O_RDWR)))"
    if os.name == "nt":
        held = held.replace("os.open(sys.argv[1], os.O_RDWR)", "system.open_writing(sys.argv[1])")
    with Output(str(folder / "out.pth")) as output:
        path = output.reading_path().replace("self", str(os.getpid()))
        done = subprocess.run([sys.executable, "-c", held, path], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "False"


def test_without_locks_only_an_old_part_is_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "lock", lambda _: None)
    new, old = (folder / f".out.pth.ckptool-{dead_pid()}-{digits}.part" for digits in ("00c0ffee", "00c0ffef"))
    new.touch()
    old.touch()
    os.utime(old, (0, time.time() - 100_000))
    Output(str(folder / "out.pth")).close()

    assert (new.exists(), old.exists()) == (True, False)


def test_another_name_of_what_is_replaced_is_told_of(folder: Path) -> None:
    target, other = folder / "target.pth", folder / "other.pth"
    target.write_bytes(OLD)
    os.link(target, other)
    report = migrate(folder / "model.pth", target, force=True)

    assert other.read_bytes() == OLD
    assert "the file that was replaced has 1 other name (a hard link), which still leads to what it was" in report.notes
    assert not [note for note in migrate(folder / "model.pth", target, force=True).notes if "hard link" in note]
