"""Files to be edited in place, of each layout; what stock readers find in a file; what an edit does to a disk."""

from __future__ import annotations

import os
import stat
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ckptool import Changes, MigrationReport, migrate
from ckptool.migration import output
from ckptool.migration.output import editing
from ckptool.sources.journal import journal_path
from tests.migration.disk import Disk, Files, State
from tests.missing import SYSTEM

SHORTER: Final = Changes(strip_module=True)
LONGER: Final = Changes(rename=[("^", "wrapped.in.longer.names.")], to="cuda:1")


class Layout(NamedTuple):
    """One way in which the bytes of an edit lie in a file."""

    suffix: str
    changes: Changes
    save: Callable[[Any, Path], None]


def _legacy(tensors: Any, path: Path) -> None:
    torch.save(tensors, path, _use_new_zipfile_serialization=False)


def _safetensors(tensors: Any, path: Path) -> None:
    save_file(dict(tensors), path, metadata={"format": "pt"})


LAYOUTS: Final = {
    "slot": Layout(".pth", SHORTER, torch.save),
    "tail": Layout(".pth", LONGER, torch.save),
    "header": Layout(".safetensors", SHORTER, _safetensors),
    "stream": Layout(".pth", SHORTER._replace(to="cuda:1"), _legacy),
}


def weights(count: int = 8) -> OrderedDict[str, torch.Tensor]:
    """Return the weights of a wrapped model."""
    return OrderedDict((f"module.block{number}.weight", torch.full((5,), float(number))) for number in range(count))


def write(layout: str, folder: Path, count: int = 8) -> Path:
    """Write a file that is to be edited."""
    path = folder / f"model{LAYOUTS[layout].suffix}"
    LAYOUTS[layout].save(weights(count), path)
    return path


@contextmanager
def on(disk: Disk) -> Iterator[None]:
    """Let files be edited on a disk."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (editing, output, SYSTEM):
            patch.setattr(module, "os", disk)
        yield


def edit(path: Path, changes: Changes, disk: Disk | None = None) -> MigrationReport:
    """Edit a file in place."""
    with on(disk or Disk()):
        return migrate(path, None, changes, in_place=True)


def journal_of(path: Path) -> Path:
    """Return where the journal of an edit of a file stands."""
    return Path(journal_path(str(path)))


def readings(path: Path) -> Iterator[object]:
    """Yield what each stock reader makes of a file; nothing of one that refuses it."""
    readers: list[Callable[[Path], object]] = [_plain, _trusting, _mapped, _zip]
    for reader in [_reference] if path.suffix == ".safetensors" else readers:
        with suppress(Exception):
            yield reader.__name__, reader(path)


def _loaded(path: Path, **named: Any) -> object:
    found = torch.load(path, map_location="cpu", **named)
    assert type(found) is OrderedDict
    return [(name, tensor.tolist()) for name, tensor in found.items()], sorted(vars(found))


def _plain(path: Path) -> object:
    return _loaded(path, weights_only=True)


def _trusting(path: Path) -> object:
    return _loaded(path, weights_only=False)


def _mapped(path: Path) -> object:
    return _loaded(path, weights_only=True, mmap=True)


def _zip(path: Path) -> object:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name) for name in archive.namelist()}


def _reference(path: Path) -> object:
    with safe_open(path, framework="pt") as opened:
        return opened.metadata(), {name: opened.get_tensor(name).tolist() for name in opened.keys()}  # noqa: SIM118


class Stepped(Disk):
    """Asks ``before`` each call that changes something; half way through it, where it writes."""

    def before(self, what: str) -> None:
        """Do something first."""

    def open(self, path: str, flags: int, *mode: int, **named: Any) -> int:
        if flags & os.O_CREAT:
            self.before("create")
        return super().open(path, flags, *mode, **named)

    def pwrite(self, fd: int, data: Any, position: int) -> int:
        os.pwrite(fd, data[: len(data) // 2], position)
        self.before("write")
        return super().pwrite(fd, data, position)

    def fsync(self, fd: int) -> None:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            self.before("sync")
        super().fsync(fd)

    def rename(self, src: str, dst: str) -> None:
        self.before("rename")
        super().rename(src, dst)

    def unlink(self, path: str) -> None:
        self.before("unlink")
        super().unlink(path)


def start_of(path: Path) -> State:
    """Return what a disk holds that has one file."""
    number = path.stat().st_ino
    return State({path.name: number}, {number: path.read_bytes()})


def put(files: Files, path: Path) -> None:
    """Make a folder hold these files; the one that is edited stays the same file."""
    journal = journal_of(path)
    for one in (journal, journal.with_name(f"{journal.name}.new")):
        one.unlink(missing_ok=True)
    for name, data in files.items():
        there = path.parent / name
        with there.open("r+b" if there.exists() else "wb") as stream:
            stream.truncate(0)
            stream.write(data)


def states(layout: str, folder: Path, count: int = 8) -> Iterator[tuple[Path, Files]]:
    """Edit a file, then put what its folder holds after each operation of that back, and yield it with its files."""
    for path, files in after_each_operation(layout, folder, count):
        put(files, path)
        yield path, files


def after_each_operation(layout: str, folder: Path, count: int = 8) -> Iterator[tuple[Path, Files]]:
    """Edit a file, and yield it with what its folder held after each operation, and half way through it."""
    path = write(layout, folder, count)
    state, disk = start_of(path), Disk()
    edit(path, LAYOUTS[layout].changes, disk)
    for entry in disk.log:
        half = entry._replace(data=entry.data[: len(entry.data) // 2])
        halfway = [state.after(half)] if len(entry.data) > 8 else []
        state = state.after(entry)
        for one in (*halfway, state):
            yield path, one.content


def torn(layout: str, folder: Path) -> Path:
    """Write a file whose edit was cut off when its index was half written."""
    every = [files for _, files in after_each_operation(layout, folder)]
    name = f"model{LAYOUTS[layout].suffix}"
    old, new = every[0][name], every[-1][name]
    *_, half, _ = [one for one in every if len(one) == 2 and one[name] not in (old, new)]
    put(half, folder / name)
    return folder / name
