"""Sources: whatever is opened never hangs, never gives wrong bytes, and is closed again."""

from __future__ import annotations

import errno
import io
import mmap
import os
import pkgutil
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import pytest

import ckptool.system as system
from ckptool import CkptoolError, FileUnavailable, Source, SourceChanged, open_checkpoint
from ckptool.sources import descriptors
from ckptool.sources.files import FileSource, open_source
from ckptool.sources.paths import directory_entries
from ckptool.sources.source import BytesSource, SliceSource, StreamSource
from tests import build
from tests.each import each
from tests.missing import on_windows, replace_open
from tests.process import open_descriptors
from tests.scale import exhaustive

DATA = bytes(range(256)) * 4
CHECKPOINT = build.torch_zip({"w": build.tensor(build.storage(numel=4096), (4096,))}, {"0": build.floats(4096)})

posix = on_windows("it has no pipes, links and modes as POSIX has them")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "data.bin").write_bytes(DATA)
    return tmp_path / "data.bin"


@pytest.fixture
def checkpoint_path(tmp_path: Path) -> Path:
    (tmp_path / "model.pth").write_bytes(CHECKPOINT)
    return tmp_path / "model.pth"


def unavailable(origin: str | os.PathLike[str]) -> FileUnavailable:
    """Return the error for a path, which must come at once."""
    box: list[FileUnavailable] = []

    def attempt() -> None:
        try:
            open_checkpoint(origin).close()
        except FileUnavailable as error:
            box.append(error)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(timeout=10)
    assert not thread.is_alive(), "it hangs"
    return box[0]


# What is not a file


@posix
def test_a_pipe_never_hangs(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pth")

    error = unavailable(tmp_path / "pipe.pth")
    assert (error.kind, error.path) == ("not-a-file", str(tmp_path / "pipe.pth"))


DEVICES = ["NUL", "nul.pth", r"\\.\NUL"] if os.name == "nt" else ["/dev/zero", "/dev/null", "/dev/urandom"]


@each("device", DEVICES)
def test_a_device_is_named(device: str) -> None:
    assert unavailable(device).kind == "not-a-file"


def test_a_terminal_is_no_file() -> None:
    if os.name == "nt":  # there may be no console
        assert unavailable("CON").kind in ("not-a-file", "unavailable")
        return
    leader, follower = os.openpty()
    try:
        assert unavailable(os.ttyname(follower)).kind == "not-a-file"
    finally:
        os.close(leader)
        os.close(follower)


@posix
def test_a_socket_is_no_file() -> None:
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:  # a short path
        server.bind(f"{folder}/s")
        assert unavailable(f"{folder}/s").kind in ("not-a-file", "unavailable")


def test_a_directory_without_a_checkpoint_says_what_is_in_it(tmp_path: Path) -> None:
    for number in range(6):
        (tmp_path / f"{number}.bin").touch()
    (tmp_path / "folder").mkdir()

    error = unavailable(tmp_path)
    assert (error.kind, "6 files" in error.message) == ("directory", True)
    assert unavailable(tmp_path / "folder").hint == "Copy the folder again, with its files."
    (tmp_path / "folder" / "alone.txt").touch()
    assert "one file" in unavailable(tmp_path / "folder").message


def test_a_folder_names_up_to_four_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "1.pt").touch()  # alone, it would be opened
    for count in range(2, 7):
        (tmp_path / f"{count}.pt").touch()
        shown = ", ".join(f"{number}.pt" for number in range(1, min(count, 4) + 1))
        more = f" and {count - 4} more" if count > 4 else ""
        assert unavailable(tmp_path).hint == f"Name a file in it: {shown}{more}"


@pytest.mark.parametrize("name", ["missing.pth", "missing/model.pth", "nul\0.pth", "a.zip::member", ""])
def test_a_missing_file_is_told_of(tmp_path: Path, name: str) -> None:
    assert unavailable(f"{tmp_path}/{name}" if name else "").kind == "missing"


def test_a_path_through_a_file_is_unavailable(path: Path) -> None:
    assert unavailable(path / "below").kind == ("missing" if sys.platform == "win32" else "unavailable")


@posix
def test_links_are_followed_and_loops_are_not(tmp_path: Path, checkpoint_path: Path) -> None:
    (tmp_path / "link.pth").symlink_to(checkpoint_path)
    (tmp_path / "loop.pth").symlink_to("loop.pth")
    (tmp_path / "dangling.pth").symlink_to("nowhere")

    with open_checkpoint(tmp_path / "link.pth") as checkpoint:
        assert list(checkpoint.tensors) == ["w"]
    assert unavailable(tmp_path / "loop.pth").kind == "unavailable"
    assert unavailable(tmp_path / "dangling.pth").kind == "missing"


@posix
@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_told_of(path: Path) -> None:
    path.chmod(0)

    assert unavailable(path).kind == "permission"


def test_where_a_folder_cannot_be_opened_it_is_a_folder_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(13, "denied")

    (tmp_path / "x").touch()
    monkeypatch.setattr(system, "open_reading", refuse)
    for path, kind in ((tmp_path, "directory"), (tmp_path / "x", "permission")):
        with pytest.raises(FileUnavailable) as caught:
            FileSource(str(path))
        assert caught.value.kind == kind


# Reading


def sources(path: Path) -> dict[str, Source]:
    return {
        "file": FileSource(str(path)),
        "stream": StreamSource(io.BytesIO(DATA)),
        "open file": StreamSource(path.open("rb"), owned=True),
        "bytes": BytesSource(DATA),
        "bytearray": BytesSource(bytearray(DATA)),
        "array": BytesSource(memoryview(DATA).cast("I")),
        "slice": SliceSource(BytesSource(b"before" + DATA + b"behind"), 6, len(DATA)),
        "slice of a slice": SliceSource(SliceSource(BytesSource(b"ab" + DATA + b"c"), 1, 1026), 1, len(DATA)),
    }


def test_every_source_gives_the_bytes_that_are_asked_for(path: Path) -> None:
    for kind, source in sources(path).items():
        assert source.nbytes == len(DATA), kind
        for offset, nbytes in ((0, 0), (0, 1), (5, 300), (1023, 1), (1024, 0), (0, 1024)):
            found = source.read(offset, nbytes)
            assert (type(found), found) == (bytes, DATA[offset : offset + nbytes]), kind
        source.close()


def test_a_file_is_read_to_its_end_in_however_many_pieces_it_comes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, read, read_into = FileSource(str(path)), system.read_at, system.read_into_at
    for most in (1, 100, len(DATA) - 1, len(DATA)):
        monkeypatch.setattr(system, "read_at", lambda fd, n, at, most=most: read(fd, min(n, most), at))
        monkeypatch.setattr(system, "read_into_at", lambda fd, view, at, most=most: read_into(fd, view[:most], at))
        assert source.read(5, 1000) == DATA[5:1005]
        buffer = memoryview(bytearray(1000))
        source.read_into(5, buffer)
        assert buffer == DATA[5:1005]
    assert source.read(0, len(DATA)) == DATA


def test_sources_say_where_their_bytes_stand_in_the_file(path: Path) -> None:
    for source in (FileSource(str(path)), StreamSource(io.BytesIO(DATA)), BytesSource(DATA, is_file=True)):
        assert source.file_offset(7) == 7
        assert SliceSource(source, 100, 10).file_offset(7) == 107
        source.close()
    assert SliceSource(BytesSource(DATA), 100, 10).file_offset(7) is None


class Dribble(io.RawIOBase):
    """A stream that gives three bytes at a time."""

    def __init__(self, data: bytes) -> None:
        self._inner = io.BytesIO(data)

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._inner.seek(offset, whence)

    def read(self, size: int | None = -1) -> bytes:
        return self._inner.read(min(3, size if size is not None and size >= 0 else 3))


class Unseekable(io.BytesIO):
    def seekable(self) -> bool:
        return False

    def seek(self, offset: int, whence: int = 0) -> int:
        raise io.UnsupportedOperation("seek")


def test_a_stream_is_read_to_its_end_and_no_further() -> None:
    with pytest.raises(SourceChanged) as caught:
        StreamSource(Dribble(DATA)).read(len(DATA) - 100, 101)
    assert (caught.value.needed, caught.value.actual) == (101, 100)


@pytest.mark.parametrize(
    "origin",
    [
        CHECKPOINT,
        bytearray(CHECKPOINT),
        memoryview(CHECKPOINT),
        io.BytesIO(CHECKPOINT),
        io.BufferedReader(io.BytesIO(CHECKPOINT)),  # type: ignore[arg-type]
        Dribble(CHECKPOINT),
        Unseekable(CHECKPOINT),
    ],
    ids=lambda origin: type(origin).__name__,
)
def test_checkpoints_open_from_bytes_and_file_objects(origin: BinaryIO) -> None:
    with open_checkpoint(origin) as checkpoint:
        assert checkpoint.tensors["w"].read() == build.floats(4096)
        assert checkpoint.file_nbytes == len(CHECKPOINT)
        assert checkpoint.path in ("<bytes>", "<stream>")


def test_text_is_a_path_bytes_are_contents_and_a_file_object_shows_its_name_and_stays_open(
    checkpoint_path: Path,
) -> None:
    with pytest.raises(CkptoolError):
        open_checkpoint(os.fsencode(checkpoint_path))
    with checkpoint_path.open("rb") as file:
        for origin in (str(checkpoint_path), checkpoint_path, file):
            with open_checkpoint(origin) as checkpoint:
                assert checkpoint.path == str(checkpoint_path)
                checkpoint.tensors["w"].read()
        assert not file.closed


# Files that change


def test_a_file_that_shrinks_at_any_point_gives_no_wrong_bytes(checkpoint_path: Path) -> None:
    for length in range(0, len(CHECKPOINT), 311):
        checkpoint_path.write_bytes(CHECKPOINT)
        with open_checkpoint(checkpoint_path) as checkpoint:
            os.truncate(checkpoint_path, length)
            with suppress(SourceChanged):
                assert checkpoint.tensors["w"].read() == build.floats(4096)


@pytest.mark.parametrize("over", [0, 1, 300])
def test_a_file_that_shrank_is_told_of_with_its_numbers(path: Path, over: int) -> None:
    source, begin, buffer = FileSource(str(path)), len(DATA) - 200 + over, memoryview(bytearray(200))
    if not over:
        assert source.read(begin, 200) == DATA[begin:]
        source.read_into(begin, buffer)
        assert buffer == DATA[begin:]
        return
    for read in (lambda: source.read(begin, 200), lambda: source.read_into(begin, buffer)):
        with pytest.raises(SourceChanged) as caught:
            read()
        assert (caught.value.offset, caught.value.needed, caught.value.actual) == (begin, 200, max(0, 200 - over))


@on_windows("the status of a file has no time of its last change of any kind")
def test_a_change_of_a_file_that_keeps_its_name_and_times_is_told_of(path: Path, tmp_path: Path) -> None:
    source, before = FileSource(str(path)), path.stat()
    os.link(path, tmp_path / "y")
    path.write_bytes(DATA[::-1])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    (tmp_path / "y").unlink()
    with pytest.raises(SourceChanged):
        source.check_unchanged()


class Meddling(FileSource):
    """A file that is written to while its index is read."""

    meddle: Callable[[], object]

    def read(self, offset: int, nbytes: int) -> bytes:
        data = super().read(offset, nbytes)
        type(self).meddle()
        return data


@pytest.mark.parametrize("how", ["append", "overwrite", "truncate"])
def test_a_file_that_changes_while_its_index_is_read_is_refused(
    checkpoint_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meddle() -> None:
        with checkpoint_path.open("r+b") as file:
            if how == "truncate":
                file.truncate(len(CHECKPOINT) - 1)
            else:
                file.seek(0, os.SEEK_END if how == "append" else os.SEEK_SET)
                file.write(b"PK\x03\x04")

    os.utime(checkpoint_path, (1, 1))  # so that a change shows, however coarse the clock
    Meddling.meddle = staticmethod(meddle)
    monkeypatch.setattr("ckptool.sources.files.FileSource", Meddling)

    with pytest.raises(SourceChanged):
        open_checkpoint(checkpoint_path)


def test_a_file_that_is_replaced_is_read_on_as_it_was(checkpoint_path: Path) -> None:
    with open_checkpoint(checkpoint_path) as checkpoint:
        other = checkpoint_path.with_suffix(".new")
        other.write_bytes(b"something else")
        replace_open(checkpoint_path, other)
        assert checkpoint_path.read_bytes() == b"something else"
        assert checkpoint.tensors["w"].read() == build.floats(4096)
        if sys.platform != "win32":  # where it was renamed, which counts as a change
            checkpoint.check_unchanged()  # nobody wrote to it


def test_a_disk_that_fails_is_an_error_like_any_other(checkpoint_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(checkpoint_path)

    def fail(*_: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    source = FileSource(str(checkpoint_path))
    monkeypatch.setattr(system, "read_at", fail)
    monkeypatch.setattr(system, "read_into_at", fail)
    for attempt in (
        checkpoint.tensors["w"].read,
        lambda: open_checkpoint(checkpoint_path),
        lambda: source.read_into(9, memoryview(bytearray(10))),
    ):
        with pytest.raises(FileUnavailable) as caught:
            attempt()
        assert caught.value.kind == "io"
        assert isinstance(caught.value.__cause__, OSError)


# Closing


def test_a_file_beside_one_that_is_closed_meanwhile_is_closed(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = FileSource(str(path))
    (tmp_path / "y").write_bytes(b"y")
    open_sibling, opened = descriptors.open_sibling, list[int]()

    def slow(*asked: Any) -> int:
        opened.append(open_sibling(*asked))
        source.close()
        return opened[0]

    monkeypatch.setattr(descriptors, "open_sibling", slow)
    with pytest.raises(ValueError, match="closed"):
        source.open_sibling("y")
    with pytest.raises(OSError) as caught:
        os.fstat(opened[0])
    assert caught.value.errno == errno.EBADF


def test_nothing_can_be_read_after_closing(checkpoint_path: Path) -> None:
    for origin in (checkpoint_path, io.BytesIO(CHECKPOINT), CHECKPOINT):
        with pytest.raises(KeyError), open_checkpoint(origin) as checkpoint:
            raise KeyError
        checkpoint.close()
        with pytest.raises(ValueError, match="closed"):
            checkpoint.tensors["w"].read()


def test_bytes_that_were_lent_can_be_changed_after_closing() -> None:
    data = bytearray(CHECKPOINT)
    with open_checkpoint(data), pytest.raises(BufferError):
        data.append(0)
    data.append(0)


def broken(folder: Path) -> Iterator[Path]:
    """Yield files that cannot be read, for every reason."""
    for name, data in build.one_of_each().items():
        for length in (0, 9, len(data) // 2, len(data) - 1):
            path = folder / f"{name}-{length}"
            path.write_bytes(data[:length])
            yield path
    (folder / "html").write_bytes(b"<!DOCTYPE html><html><title>404</title>")
    (folder / "noise").write_bytes(bytes(range(7, 250)))
    yield from (folder / "html", folder / "noise", folder)


def test_no_descriptor_is_left_open(tmp_path: Path, checkpoint_path: Path) -> None:
    paths = list(broken(tmp_path))
    before = open_descriptors()

    for path in paths:
        with suppress(CkptoolError):
            open_checkpoint(path).close()
    for _ in range(3):
        open_checkpoint(checkpoint_path)  # nobody closes it: the last reference does
        with open_checkpoint(checkpoint_path):
            pass
    assert open_descriptors() == before


# Threads


USES: dict[str, tuple[str, Callable[[FileSource], object]]] = {
    "read": ("ckptool.system.read_at", lambda source: source.read(0, len(DATA))),
    "read into": ("ckptool.system.read_into_at", lambda source: source.read_into(0, memoryview(bytearray(len(DATA))))),
    "map": ("ckptool.system.map_private", FileSource.map),
    "status": ("os.fstat", FileSource.check_unchanged),
}


@pytest.mark.parametrize("other", [b"x" * len(DATA), b"short", None], ids=["as long", "shorter", "no file"])
@pytest.mark.parametrize("use", USES)
def test_a_file_that_is_closed_during_a_call_never_gives_the_bytes_of_the_next_one(
    use: str, other: bytes | None, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called, call = USES[use]
    real: Callable[..., Any] = pkgutil.resolve_name(":".join(called.rsplit(".", 1)))
    source = FileSource(str(path))
    number = source.fileno()
    opened: list[int] = []

    def closed_before(*arguments: Any, **options: Any) -> Any:
        monkeypatch.undo()
        source.close()
        if other is not None:
            (path.parent / "other.bin").write_bytes(other)
            opened.append(os.open(path.parent / "other.bin", os.O_RDONLY))
            assert opened == [number]
        return real(*arguments, **options)

    monkeypatch.setattr(called, closed_before)
    try:
        with pytest.raises(ValueError, match="the checkpoint is closed"):
            call(source)
    finally:
        for one in opened:
            os.close(one)


@posix
def test_a_map_of_the_next_file_is_given_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = FileSource(str(path))
    real, made = mmap.mmap, []

    class Seen(real):  # type: ignore[misc, valid-type]
        def __new__(cls, *arguments: Any, **options: Any) -> Any:
            found = super().__new__(cls, *arguments, **options)
            made.append(weakref.ref(found))
            source.close()
            return found

    monkeypatch.setattr(mmap, "mmap", Seen)
    with pytest.raises(ValueError, match="closed"):
        source.map()
    assert [one() for one in made] == [None]


def test_closing_from_two_threads_closes_one_descriptor(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = FileSource(str(path))
    real, closed, answers = os.close, [], []

    def close(number: int) -> None:
        closed.append(number)
        real(number)
        answers.append(os.open(path, os.O_RDONLY))  # somebody opens another file at once
        thread = threading.Thread(target=source.close)
        thread.start()
        thread.join()

    number = source.fileno()
    assert not os.get_inheritable(number)  # child processes do not get it
    monkeypatch.setattr(os, "close", close)
    source.close()
    monkeypatch.undo()
    assert closed == answers == [number]
    real(number)


@pytest.mark.parametrize("kind", ["path", "stream", "bytes"])
def test_threads_that_share_a_checkpoint_get_the_same_bytes(tmp_path: Path, kind: str) -> None:
    storages = {str(number): build.floats(2000 + number) for number in range(24)}
    tree = {
        f"t{number}": build.tensor(build.storage(str(number), 2000 + number), (40, 25), (1, 40 + number % 3))
        for number in range(24)
    }
    data = build.torch_zip(tree, storages)
    (tmp_path / "x.pth").write_bytes(data)
    origin = {"path": tmp_path / "x.pth", "stream": io.BytesIO(data), "bytes": data}[kind]

    with open_checkpoint(origin) as checkpoint, ThreadPoolExecutor(16) as pool:
        expected = {name: tensor.read() for name, tensor in checkpoint.tensors.items()}
        names = list(expected) * 40
        assert all(pool.map(lambda name: checkpoint.tensors[name].read() == expected[name], names))


# The small helpers


def test_the_entries_of_a_directory_are_its_files_sorted(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        (tmp_path / name).touch()
    (tmp_path / "folder").mkdir()

    assert directory_entries(str(tmp_path)) == ("a", "b", "c")
    assert directory_entries(str(tmp_path / "missing")) == ()


@posix
def test_a_path_with_the_member_mark_that_exists_is_a_path(tmp_path: Path) -> None:
    odd = tmp_path / "a::b.pth"
    odd.write_bytes(CHECKPOINT)

    assert os.path.lexists(odd)
    with open_checkpoint(odd) as checkpoint:
        assert (checkpoint.member, list(checkpoint.tensors)) == (None, ["w"])


@pytest.mark.parametrize("origin", [None, 3, io.StringIO("text")], ids=["none", "number", "text"])
def test_what_cannot_be_read_from_is_told_apart_from_a_bad_file(origin: Any) -> None:
    with pytest.raises(TypeError, match=f"opened with 'rb', not {type(origin).__name__}"):
        open_source(origin)


def test_a_folder_that_may_not_be_entered_is_named_and_not_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    may = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(closed) and may(path, mode))

    def denied(*_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied")  # root may enter what it likes

    with monkeypatch.context() as patched:
        patched.setattr(system, "open_reading", denied)
        inside, beside = unavailable(closed / "a.pth"), unavailable(tmp_path / "b.pth")
    assert inside.message == f"permission denied: you may not enter the folder {str(closed)!r}"
    assert "that folder" in str(inside.hint)
    assert beside.message == "permission denied"
    commands = (None, None) if os.name == "nt" else (f"chmod u+rx -- {closed}", f"chmod u+r -- {tmp_path}/b.pth")
    assert (inside.command, beside.command) == commands


@exhaustive
def test_what_is_open_where_python_ends_says_nothing() -> None:
    pytest.importorskip("torch")
    fixture = Path(__file__).parents[2] / "fixtures" / "valid" / "lenet-model-forged-cuda0-legacy.pth"
    code = (
        "import ckptool, torch\n"
        f"found = ckptool.open_checkpoint({str(fixture)!r})\n"
        "tensor = next(iter(found.tensors.values()))\n"
        "keep = lambda: found\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stderr == ""


def folder(tmp_path: Path, names: Sequence[str]) -> Path:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    return tmp_path


@each("address", ["ftp://x/model.safetensors", "hdfs://b/k.pth", "rsync://o/n", "sftp://b"])
def test_addresses_of_other_kinds_and_pipes_are_not_read(address: str) -> None:
    assert (unavailable("-").kind, unavailable("-").hint) == ("not-a-file", "Save the stream to a file first.")
    found = unavailable(address)
    assert (found.kind, found.hint) == ("address", "Download the file first, and give its path.")
    assert "/tmp/x.pth" in (unavailable("file:///tmp/x.pth").hint or "")


@pytest.mark.parametrize(
    ("name", "is_hub"),
    [("bert-base/uncased", True), ("meta-llama/Llama-3.1-8B", True), ("models/net.pth", False), ("a/b/c", False),
     ("net", False), ("ci/policy.toml", False), ("../x", False), ("here/net", False), ("~/net", False)],
)  # fmt: skip
def test_names_on_the_hub_are_to_be_downloaded(
    name: str, is_hub: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()

    assert unavailable(name).kind == "missing"
    assert ("hf download" in (unavailable(name).hint or "")) is is_hub


def test_a_directory_of_folders_and_a_distributed_checkpoint_that_was_not_finished_are_named(tmp_path: Path) -> None:
    assert "unet" in (unavailable(folder(tmp_path, ["unet/x.txt", "vae/x.txt"])).hint or "")
    (tmp_path / "dcp").mkdir()
    error = unavailable(folder(tmp_path / "dcp", ["meta.pt", "__0_0.distcp", "__1_0.distcp"]))

    assert error.kind == "distributed-checkpoint"
    assert "2 files without its index" in error.message
