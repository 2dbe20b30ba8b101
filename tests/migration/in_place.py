"""Files to be edited in place, of each layout; what stock readers find in a file; a record of what an edit does."""

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


class Disk:
    """``os`` as what edits a file sees it; subclasses do more in some of its calls."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


@contextmanager
def on(disk: Disk) -> Iterator[None]:
    """Let files be edited on a disk."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (editing, output):
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


class Entry(NamedTuple):
    """One operation; ``file`` is the name of what it is about."""

    what: str
    file: str
    offset: int = 0
    data: bytes = b""
    other: str = ""


class Stepped(Disk):
    """Asks ``before`` each call that changes something; half way through it, where it writes."""

    def before(self, what: str) -> None:
        """Do something first."""

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT:
            self.before("create")
        return os.open(path, flags, mode)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        os.pwrite(fd, data[: len(data) // 2], offset)
        self.before("write")
        return os.pwrite(fd, data, offset)

    def fsync(self, fd: int) -> None:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            self.before("sync")
        os.fsync(fd)

    def rename(self, old: str, new: str) -> None:
        self.before("rename")
        os.rename(old, new)  # noqa: PTH104

    def unlink(self, path: str) -> None:
        self.before("unlink")
        os.unlink(path)  # noqa: PTH108


class Recorder(Disk):
    """Does everything, and keeps a log."""

    def __init__(self, path: Path) -> None:
        self.log: list[Entry] = []
        self._path = path
        self._created: dict[int, str] = {}

    def _note(self, what: str, fd: int, offset: int = 0, data: bytes = b"") -> None:
        is_folder = stat.S_ISDIR(os.fstat(fd).st_mode)
        name = "" if is_folder else self._created.get(fd, self._path.name)
        self.log.append(Entry(f"{what}_folder" if is_folder else what, name, offset, data))

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        fd = os.open(path, flags, mode)
        if flags & os.O_CREAT:
            self._created[fd] = Path(path).name
            self._note("create", fd)
        return fd

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        count = os.pwrite(fd, data, offset)
        self._note("write", fd, offset, bytes(data[:count]))
        return count

    def ftruncate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)
        self._note("truncate", fd, nbytes)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)
        self._note("sync", fd)

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new)  # noqa: PTH104
        self._created.clear()  # closed by now: another file may have its number
        self.log.append(Entry("rename", Path(old).name, other=Path(new).name))

    def unlink(self, path: str) -> None:
        os.unlink(path)  # noqa: PTH108
        self.log.append(Entry("unlink", Path(path).name))


Files = dict[str, bytes]
"""What is in a folder, by name."""


def done(files: Files, entry: Entry) -> Files:
    """Return what is in a folder after an operation."""
    files = dict(files)
    if entry.what == "create":
        files[entry.file] = b""
    elif entry.what == "write":
        old = files[entry.file].ljust(entry.offset, b"\0")
        files[entry.file] = old[: entry.offset] + entry.data + old[entry.offset + len(entry.data) :]
    elif entry.what == "truncate":
        files[entry.file] = files[entry.file][: entry.offset].ljust(entry.offset, b"\0")
    elif entry.what == "rename":
        files[entry.other] = files.pop(entry.file)
    elif entry.what == "unlink":
        del files[entry.file]
    return files


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
    path = write(layout, folder, count)
    files = {path.name: path.read_bytes()}
    recorder = Recorder(path)
    edit(path, LAYOUTS[layout].changes, recorder)
    for entry in recorder.log:
        if entry.what == "write" and len(entry.data) > 8:
            half = done(files, entry._replace(data=entry.data[: len(entry.data) // 2]))
            put(half, path)
            yield path, half
        files = done(files, entry)
        put(files, path)
        yield path, files


def torn(layout: str, folder: Path) -> Path:
    """Write a file whose edit was cut off when its index was half written."""
    every = [files for _, files in states(layout, folder)]
    name = f"model{LAYOUTS[layout].suffix}"
    old, new = every[0][name], every[-1][name]
    *_, half, _ = [one for one in every if len(one) == 2 and one[name] not in (old, new)]
    put(half, folder / name)
    return folder / name
