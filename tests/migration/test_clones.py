"""Clones on file systems that have them: in a loop device, where one may be mounted; and copies everywhere else."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptool import check, migrate, open_checkpoint
from tests.migration.in_place import readings
from tests.scale import exhaustive

MAKERS = {"xfs": ("mkfs.xfs", 320 << 20), "btrfs": ("mkfs.btrfs", 256 << 20)}


def call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture(params=MAKERS, scope="module")
def disk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a folder on a file system that clones."""
    maker, nbytes = MAKERS[request.param]
    if os.geteuid() or shutil.which(maker) is None:
        pytest.skip(f"no {maker}, or not root")
    image, mounted = tmp_path_factory.mktemp("disk") / "image", tmp_path_factory.mktemp("mounted")
    with image.open("wb") as stream:
        stream.truncate(nbytes)  # it takes no space
    try:
        call(maker, "-q", str(image))
        call("mount", "-o", "loop", str(image), str(mounted))
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no loop device may be mounted here: {error.stderr!r}")
    try:
        yield mounted
    finally:
        call("umount", "-l", str(mounted))  # torch may have a file of it mapped


def write(folder: Path, suffix: str) -> Path:
    path = folder / f"model{suffix}"
    tensors = OrderedDict((f"module.{name}.weight", torch.full((1 << 18,), float(ord(name)))) for name in "abcde")
    if suffix == ".pth":
        torch.save(tensors, path)
    else:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    return path


def used(folder: Path) -> int:
    os.sync()
    status = os.statvfs(folder)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


@exhaustive
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_clone_is_what_a_copy_is_and_takes_no_space(disk: Path, suffix: str) -> None:
    path = write(disk, suffix)
    data, before = path.read_bytes(), used(disk)
    target, copy = disk / f"clone{suffix}", disk / f"copy{suffix}"
    changes: Any = {"strip_module": True, "force": True} | ({"to": "cuda:1"} if suffix == ".pth" else {})
    start = time.process_time()
    done = migrate(path, target, **changes)
    spent = time.process_time() - start

    assert (done.how, done.verified, done.nbytes) == ("clone", True, target.stat().st_size)
    assert "shares its tensors" in str(done)
    assert used(disk) - before < len(data) / 4
    assert done.written_nbytes < 10_000
    assert spent < 1.5
    assert path.read_bytes() == data
    copied = migrate(path, copy, reflink=False, **changes)
    assert (copied.how, copied.written_nbytes) == ("copy", copy.stat().st_size)
    assert contents(target) == contents(copy)
    assert len(dict(readings(target))) == (4 if suffix == ".pth" else 1)
    assert not [one for one in check(target, deep=True).findings if one.severity == "error"]
    with pytest.raises(Exception, match="exists already"):
        migrate(path, target, **{**changes, "force": False})
    assert sorted(one.name for one in disk.iterdir() if one.is_file()) == sorted([path.name, target.name, copy.name])
    for one in (path, target, copy):
        one.unlink()


def contents(path: Path) -> list[tuple[str, str, bytes]]:
    with open_checkpoint(path) as found:
        assert not found.notes
        return [(name, one.info.location, one.read()) for name, one in found.tensors.items()]


@exhaustive
def test_what_a_clone_cannot_be_is_a_copy(disk: Path) -> None:
    path = write(disk, ".pth")
    others: list[tuple[str, dict[str, Any]]] = [
        ("a.pth", {"dtype": "float16"}),
        ("b.pth", {"exclude": ["*.a.*"]}),
        ("c.pth", {"form": "state_dict"}),
        ("d.safetensors", {}),
    ]
    for name, changes in others:
        assert migrate(path, disk / name, **changes).how == "copy"
    longer = migrate(path, disk / "long.pth", rename=[("^", "much.longer.names.than.before.")])
    assert longer.how == "clone"
    assert next(iter(torch.load(disk / "long.pth"))).startswith("much.longer")
    plain = write(disk, ".safetensors")
    grown = migrate(plain, disk / "long.safetensors", rename=[("^", "much.longer.names.than.before.")])
    assert grown.how == "copy"  # there is no room in the header
    assert len(load_file(disk / "long.safetensors")) == 5


@exhaustive
def test_a_clone_replaces_its_source_in_one_step(disk: Path) -> None:
    path = write(disk, ".pth")
    inode = path.stat().st_ino
    with path.open("rb") as before:
        old = path.read_bytes()
        assert migrate(path, path, strip_module=True, force=True).how == "clone"
        assert before.read() == old
    assert path.stat().st_ino != inode
    assert list(torch.load(path)) == [f"{name}.weight" for name in "abcde"]


def test_a_file_system_that_does_not_clone_gets_a_copy(tmp_path: Path) -> None:
    path = write(tmp_path, ".pth")
    done = migrate(path, tmp_path / "new.pth", strip_module=True)

    assert done.how in ("clone", "copy")
    assert migrate(path, tmp_path / "other.pth", strip_module=True, reflink=False).how == "copy"
    assert contents(tmp_path / "new.pth") == contents(tmp_path / "other.pth")
