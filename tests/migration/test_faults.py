"""
Faults: whatever happens, and whenever, there is the old file or the whole new one, and nothing else.

A migration is killed, interrupted, starved of space, fed a source that changes under it or is damaged, given a disk
that keeps something else, and refused one system call after the other. A default run takes a part of it in some
seconds; ``--scale 10`` takes 200 kills for 20, in some minutes.
"""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ckptool import CkptoolError, MalformedFile, SourceChanged, check, migrate, system
from ckptool.errors import DamagedFile, OutputFailed
from ckptool.migration import output as outputs
from ckptool.migration import torch_plan
from ckptool.migration.output import Output
from ckptool.sources import files
from tests import build
from tests.migration.dying import OWN_CALLS
from tests.migration.refused import refused
from tests.migration.test_outputs import OLD, ROOT, checkpoint, migrated, names_in
from tests.missing import SYSTEM, replace_open
from tests.process import open_descriptors
from tests.scale import in_turn, scaled, some, step, times

BIG = 1 << 20  # from this size on, the system copies


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "work"
    made.mkdir()
    return made


def large(nbytes: int, storages: int = 4) -> bytes:
    """Return a zip with storages of random bytes, ``nbytes`` in all."""
    each = nbytes // storages // 4 * 4
    tree = {f"layer{i}": build.tensor(build.storage(str(i), each // 4), (each // 4,)) for i in range(storages)}
    return build.torch_zip(tree, {str(i): random.Random(i).randbytes(each) for i in range(storages)})


# Processes that can be killed

SERVER = """
import _thread, contextlib, json, os, sys, threading, time
sys.path.insert(0, sys.argv[1])
import safetensors, zlib, concurrent.futures.thread
with contextlib.suppress(ImportError):
    import numpy
import ckptool.archives.zips, ckptool.formats
from ckptool.errors import CkptoolError
from ckptool.migration.migrate import migrate
from tests.migration.dying import die_at

CALLS = (
    *("open", "write", "pwrite", "statvfs", "link", "replace", "rename", "fsync", "fchmod", "close", "unlink"),
    *("mkdir", "rmdir", "scandir"),
)

def work(job):
    if job.get("named") and hasattr(os, "O_TMPFILE"):
        del os.O_TMPFILE
    if job.get("limit") is not None:
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["limit"], resource.RLIM_INFINITY))
    numbers = die_at(job["kill_at"], CALLS, after=job["after"]) if job.get("kill_at") is not None else iter([1])
    try:
        options = {"to": "cpu", "form": job.get("form"), **job.get("options", {})}
        migrate(job["src"], job["dst"], force=job["force"], **options)
        return {"error": None, "calls": next(numbers) - 1}
    except CkptoolError as error:
        return {"error": type(error).__name__, "kind": error.kind, "needed": error.needed, "actual": error.actual}
    except BaseException as error:
        return {"error": repr(error)}

def start(job, gate):
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    os.close(gate[1])
    os.read(gate[0], 1)
    os.write(writing, json.dumps(work(job)).encode())
    os._exit(0)

def alone():
    print("ready", flush=True)
    job = json.loads(sys.stdin.readline())
    if job.get("delay") is not None:
        threading.Timer(job["delay"], _thread.interrupt_main).start()
    print(json.dumps(work(job)), flush=True)
    os._exit(0)

if not hasattr(os, "fork"):
    alone()
for line in sys.stdin:
    jobs = json.loads(line)
    gate = os.pipe()
    started = [start(job, gate) for job in jobs]
    os.close(gate[0])
    begin = time.perf_counter()
    os.close(gate[1])  # all of them, now
    done = []
    for job, (pid, reading) in zip(jobs, started):
        if job.get("delay") is not None:
            time.sleep(job["delay"])
            os.kill(pid, job["signal"])
        status = os.waitpid(pid, 0)[1]
        with os.fdopen(reading, "rb") as stream:
            said = stream.read()
        outcome = json.loads(said) if said else {"error": "killed"}
        done.append({**outcome, "pid": pid, "took": time.perf_counter() - begin, "signal": os.WTERMSIG(status)})
    print(json.dumps(done), flush=True)
"""


class Outcome(NamedTuple):
    error: str | None
    kind: str | None
    needed: int | None
    actual: int | None
    pid: int
    took: float
    signal: int
    calls: int


def _started() -> subprocess.Popen[str]:
    command = [sys.executable, "-I", "-c", SERVER, str(ROOT)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _tell(process: subprocess.Popen[str], what: object) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(what) + "\n")
    process.stdin.flush()


class Processes:
    """Migrations in processes of their own, forked from one that has imported everything."""

    def __init__(self) -> None:
        self._server = _started()

    def run(self, *jobs: dict[str, Any]) -> list[Outcome]:
        blank = dict.fromkeys(Outcome._fields)
        return [Outcome(**{**blank, "calls": 0, **done}) for done in self._done(jobs)]

    def _done(self, jobs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        _tell(self._server, jobs)
        assert self._server.stdout is not None
        done: list[dict[str, Any]] = json.loads(self._server.stdout.readline())
        return done

    def close(self) -> None:
        self._server.communicate()


class NewProcesses(Processes):
    """The same where no process becomes two: each imports everything itself, and waits for its job."""

    def __init__(self) -> None:
        pass

    def _done(self, jobs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        processes = [_started() for _ in jobs]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        begin, done = time.perf_counter(), []
        for process, one in zip(processes, jobs, strict=True):
            _tell(process, one)
        for process in processes:
            said, _ = process.communicate()
            outcome = json.loads(said) if said else {"error": "killed"}
            took = time.perf_counter() - begin
            done.append({**outcome, "pid": process.pid, "took": took, "signal": process.returncode})
        return done

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    made = Processes() if hasattr(os, "fork") else NewProcesses()
    yield made
    made.close()


def job(src: Path, dst: Path, *, force: bool = False, **options: Any) -> dict[str, Any]:
    return {"src": str(src), "dst": str(dst), "force": force, **options}


class Scene(NamedTuple):
    """A large source, what stands where it goes, and what will."""

    folder: Path
    source: Path
    target: Path
    new: bytes
    took: float

    def prepare(self, *, old: bool) -> None:
        self.target.unlink(missing_ok=True)
        if old:
            self.target.write_bytes(OLD)

    def found(self) -> str:
        """Say what stands under the target's name."""
        if not self.target.exists():
            return "nothing"
        data = self.target.read_bytes()
        return "old" if data == OLD else "new" if data == self.new else "BROKEN"

    def litter(self) -> set[str]:
        return names_in(self.folder) - {self.source.name, self.target.name}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, processes: Processes) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("scene")
    source, target = folder / "source.pth", folder / "target.pth"
    source.write_bytes(large(times(16, 64) << 20, 12))
    took = []
    for _ in range(3):
        took.append(processes.run(job(source, target, force=True))[0].took)
    yield Scene(folder, source, target, target.read_bytes(), sorted(took)[1])
    source.unlink()
    target.unlink(missing_ok=True)


WAYS = [(old, named) for old in (False, True) for named in ((False, True) if hasattr(os, "O_TMPFILE") else (True,))]


@scaled
@pytest.mark.parametrize(("old", "named", "after"), [(*way, way[0] == way[1]) for way in WAYS])
def test_killed_at_every_system_call(
    folder: Path, tmp_path: Path, processes: Processes, old: bool, named: bool, after: bool
) -> None:
    source, target = folder / "source.pth", folder / "target.pth"
    data = checkpoint(numel=BIG // 4)
    source.write_bytes(data)
    new = migrated(data, tmp_path, target.name)
    whole = processes.run(job(source, target, named=named, kill_at=0, after=False, force=old))[0]
    assert whole.error is None
    published = []
    for at in [*range(1, whole.calls + 11, step(8, 3)), whole.calls + 11]:  # over an old file, some more
        target.unlink(missing_ok=True)
        if old:
            target.write_bytes(OLD)
        outcome = processes.run(job(source, target, named=named, kill_at=at, after=after, force=old))[0]
        found = target.read_bytes() if target.exists() else None
        assert found in (OLD if old else None, new)
        assert source.read_bytes() == data
        published.append(found == new)
        left = names_in(folder) - {source.name, target.name}
        if outcome.error is None:
            assert found == new
            assert not left
        else:
            assert outcome.error == "killed"
            assert len(left) <= (1 if named or old else 0)
    assert published == sorted(published)  # there is one moment at which it gets its name
    assert published[-1]
    assert not published[0]


@scaled
@pytest.mark.parametrize(("old", "named"), WAYS)
def test_interrupted_at_any_moment(scene: Scene, processes: Processes, old: bool, named: bool) -> None:
    count = times(1, 2)
    dice = random.Random(f"{old}{named}")
    for number in range(count):
        scene.prepare(old=old)
        delay = scene.took * (number + dice.random()) / count
        outcome = processes.run(job(scene.source, scene.target, force=old, named=named, delay=delay, signal=2))[0]
        assert outcome.signal == 0
        assert outcome.error in ("KeyboardInterrupt()", None)
        assert scene.found() in ("old" if old else "nothing", "new")
        assert scene.found() == "new" or outcome.error
        assert not scene.litter()


# Many at once


@scaled
@pytest.mark.parametrize(("force", "named"), some(WAYS, 4))
def test_sixteen_write_one_file(folder: Path, tmp_path: Path, processes: Processes, force: bool, named: bool) -> None:
    target = folder / "target.pth"
    sources, results = [], set()
    for number in range(16):
        sources.append(folder / f"source{number}.pth")
        sources[-1].write_bytes(checkpoint(numel=(BIG // 4 if number % 4 == 0 else 4096) + number))
        results.add(migrated(sources[-1].read_bytes(), tmp_path, target.name))
    assert len(results) == 16
    kept = names_in(folder)
    wrong, watching = [], True

    def watch() -> None:
        while watching:
            with suppress(FileNotFoundError):
                if target.read_bytes() not in results:
                    wrong.append("half a file")
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        for _ in range(times(1, 2)):
            if not force:
                target.unlink(missing_ok=True)
            outcomes = processes.run(*(job(source, target, force=force, named=named) for source in sources))
            errors = [outcome.error for outcome in outcomes]
            if force:
                assert errors == [None] * 16
            else:
                assert sorted(errors, key=str) == [None] + ["OutputExists"] * 15
                assert target.read_bytes() == migrated(sources[errors.index(None)].read_bytes(), tmp_path, target.name)
            assert target.read_bytes() in results
            assert names_in(folder) == kept | {target.name}
    finally:
        watching = False
        thread.join()
    assert not wrong


# A full disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def free_nbytes(place: Path) -> int:
    status = os.statvfs(place)
    return status.f_bavail * status.f_frsize


@scaled
@pytest.mark.parametrize(
    ("checked", "old", "numel"),
    [(True, False, 4096), (False, True, 4096), (True, True, BIG // 4), (False, False, BIG // 4)],
)
def test_a_disk_that_is_full_to_some_level(
    way: str, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checked: bool, old: bool, numel: int
) -> None:
    source, target, filler = disk / "source.pth", disk / "target.pth", disk / "filler"
    data = checkpoint(numel=numel)
    source.write_bytes(data)
    new = migrated(data, tmp_path, target.name)
    if old:
        target.write_bytes(OLD)
    page = 4096
    pages = -(-len(new) // page)
    if not checked:  # the space went after the look

        def unknown(_: int) -> None:
            raise OSError(errno.ENOSYS, "unknown")

        monkeypatch.setattr(system, "free_room", unknown)
    kept = names_in(disk) | {"filler"}
    levels = sorted({round(level * (pages - 1) / 20) for level in range(0, 20, step(5))} | {pages - 1})
    for level in levels:
        filler.write_bytes(b"")
        filler.write_bytes(b"\0" * (free_nbytes(disk) - level * page))
        before = free_nbytes(disk)
        assert before == level * page
        error = refused(source, target, to="cpu", force=old, error=OutputFailed)
        assert (error.kind, error.path) == ("disk-full", str(target))
        assert error.needed is not None
        assert error.actual is not None
        assert f"{error.needed:,}" in str(error)
        assert f"{error.actual:,}" in str(error)
        assert error.hint
        assert (target.read_bytes() == OLD) if old else not target.exists()
        assert source.read_bytes() == data
        assert names_in(disk) == kept
        assert free_nbytes(disk) == before
    assert len(levels) >= min(20 // step(5), pages - 1)

    filler.write_bytes(b"")
    filler.write_bytes(b"\0" * (free_nbytes(disk) - (pages + 2) * page))
    migrate(source, target, to="cpu", force=old)
    assert target.read_bytes() == new


def test_space_is_looked_for_before_anything_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "model.pth").write_bytes(checkpoint())

    def never(*_: Any) -> None:
        pytest.fail("written to a disk that is too small")

    monkeypatch.setattr(system, "free_room", lambda _: 500)
    monkeypatch.setattr(Output, "write", never)
    monkeypatch.setattr(Output, "fill", never)

    for name in ("out.pth", "out.safetensors"):
        for dry_run in (True, False):
            error = refused(folder / "model.pth", folder / name, dry_run=dry_run, kind="disk-full", match="not enough")
            assert error.actual == 500
            assert error.needed is not None
            assert error.needed > 700


# A source that changes


def during(monkeypatch: pytest.MonkeyPatch, moment: int, happen: Callable[[], None]) -> list[int]:
    """Let something happen before the ``moment``-th time that anything is written; return the number of times."""
    times = [0]
    lock = threading.Lock()  # "fill" is called by several threads
    for name in ("write", "leave", "fill"):
        real = getattr(Output, name)

        def call(self: Output, *args: Any, real: Any = real) -> Any:
            with lock:
                if times[0] == moment:
                    happen()
                times[0] += 1
            return real(self, *args)

        monkeypatch.setattr(Output, name, call)
    return times


def happens(what: str, path: Path) -> None:
    """Let something happen to a file."""
    status = path.stat()
    if what in ("halved", "emptied"):
        os.truncate(path, status.st_size // 2 if what == "halved" else 0)
    elif what == "appended":
        with path.open("ab") as stream:
            stream.write(b"more")
    elif what == "replaced":
        path.with_name("other").write_bytes(checkpoint()[::-1])
        replace_open(path, path.with_name("other"))
    elif what == "rewritten":  # with zeros, behind the head, and the old time is put back
        with path.open("r+b") as stream:
            stream.seek(status.st_size // 2)
            stream.write(bytes(status.st_size - status.st_size // 2))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    else:
        path.unlink()


LEAVING = ("removed",) if os.name == "nt" else ("replaced", "removed")
"""What takes a file its name and no more: it is open, so its bytes are there to the end. On Windows, it is renamed."""


def formats(numel: int) -> dict[str, bytes]:
    data = build.floats(numel)
    streamed = {"w": build.tensor(build.storage("0", numel, rest=(None,)), (numel,))}
    return {
        "zip": checkpoint(numel=numel),
        "legacy": build.legacy(streamed, [("0", numel, data)]),
        "safetensors": build.safetensors({"w": data, "v": data}),
    }


CHANGES = product(
    ["zip", "legacy", "safetensors"],
    [64, BIG // 4],
    ["out.pth", "out.safetensors"],
    ["halved", "emptied", "appended", "replaced", "rewritten", "removed"],
    [True, False],
)


@scaled
@pytest.mark.parametrize(("format_", "numel", "target", "happen", "verify"), some(CHANGES, 11))
def test_a_source_that_changes_meanwhile(
    folder: Path, format_: str, numel: int, target: str, happen: str, verify: bool
) -> None:
    data = formats(numel)[format_]
    source, place = folder / "source", folder / target
    source.write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        times = during(patch, -1, lambda: None)
        migrate(source, place)
    total, new = times[0], place.read_bytes()
    for moment in range(0, total, step(3)) if numel == 64 else sorted({0, total - 1, *range(0, total, step(total))}):
        source.write_bytes(data)
        place.write_bytes(OLD)
        with pytest.MonkeyPatch.context() as patch:
            during(patch, moment, lambda: happens(happen, source))
            if happen in LEAVING:
                assert migrate(source, place, force=True, verify=verify).verified == verify
                assert place.read_bytes() == new
                continue
            with pytest.raises((SourceChanged, MalformedFile)) as caught:  # its own checksum may tell first
                migrate(source, place, force=True, verify=verify)
        assert caught.value.kind in ("source-changed", "damaged-record")
        assert caught.value.path == str(source)
        assert place.read_bytes() == OLD
        assert names_in(folder) - {"source.old"} <= {"source", target}


@pytest.mark.parametrize(
    ("happen", "target"),
    in_turn(["halved", "appended", "replaced", "rewritten", "removed"], ["out.pth", "out.safetensors"]),
)
def test_a_source_that_changes_while_we_read_back(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, happen: str, target: str
) -> None:
    (folder / "source").write_bytes(checkpoint())
    new = migrated(checkpoint(), tmp_path, target)
    opened, happened = files.open_source, list[None]()

    def open_source(origin: Any, cancellation: Any = None) -> Any:
        if str(origin) != str(folder / "source") and not happened:
            happened.append(happens(happen, folder / "source"))
        return opened(origin, cancellation)

    for reader in ("ckptool.formats", "ckptool.migration.verify"):
        monkeypatch.setattr(f"{reader}.open_source", open_source)

    if happen == "replaced" and os.name == "nt":
        pytest.skip("Windows: what is replaced while it is open gets another name beside it")
    if happen in LEAVING:
        assert migrate(folder / "source", folder / target, to="cpu").verified
        assert (folder / target).read_bytes() == new
        assert happened
        return
    refused(folder / "source", folder / target, error=SourceChanged)


# A source that is damaged


def damageable(kind: str) -> tuple[bytes, dict[str, bytes]]:
    """Return a zip, and the bytes of its storages."""
    dice = random.Random(kind)
    numel = BIG // 4 if kind == "large" else 256
    stored = {key: dice.randbytes(4 * numel) for key in "0123"}

    def view(key: str, *layout: Any) -> bytes:
        return build.tensor(build.storage(key, numel), *layout)

    tree = {
        "whole": view("0", (numel,)),
        "turned": view("1", (numel // 8, 8), (1, numel // 8)),
        "head": view("2", (8,), (1,), 0),
        "tail": view("2", (8,), (1,), 16),
        "column": view("3", (numel // 8,), (8,), 3),
    }
    members = {"archive/byteorder": b"big"} if kind == "big-endian" else {}
    return build.torch_zip(tree, stored, members=members), stored


@scaled
@pytest.mark.parametrize(
    ("kind", "form"), some(product(["small", "large", "big-endian"], ["same", "state_dict", "safetensors"]), 4)
)
def test_a_flipped_bit_in_any_storage(folder: Path, kind: str, form: Any) -> None:
    data, stored = damageable(kind)
    source, target = folder / "source.pth", folder / "out"
    source.write_bytes(data)
    migrate(source, target, form=form, to="cpu")
    target.unlink()
    for key, content in stored.items():
        start = data.index(content)
        for position in {0, 1, 40, len(content) // 2, len(content) - 1}:
            for bit in range(0, 8, step(8, 4)):
                damaged = bytearray(data)
                damaged[start + position] ^= 1 << bit
                source.write_bytes(damaged)
                error = refused(
                    source, target, form=form, to="cpu", kind="damaged-record", match=f"storage '{key}' is damaged"
                )
                assert error.path == str(source)


def test_damage_to_what_is_not_taken_is_no_hindrance(folder: Path) -> None:
    data, stored = damageable("small")
    damaged = bytearray(data)
    damaged[data.index(stored["3"])] ^= 1
    (folder / "source.pth").write_bytes(damaged)

    for form in ("state_dict", "safetensors"):
        assert migrate(folder / "source.pth", folder / form, form=form, exclude=["column"]).verified  # type: ignore[arg-type]


INDEXED = Path(__file__).parents[2] / "fixtures" / "valid" / "state-dict-plain-cpu-zip.pth"


def test_no_flipped_bit_of_the_index_gets_through(tmp_path: Path) -> None:
    data, damaged = INDEXED.read_bytes(), tmp_path / "damaged.pth"
    with zipfile.ZipFile(INDEXED) as archive:
        index = next(archive.read(name) for name in archive.namelist() if name.endswith("/data.pkl"))
    for bit in range(0, 4096, 67):
        flipped = bytearray(data)
        flipped[data.index(index) + bit // 8 % len(index)] ^= 1 << bit % 8
        damaged.write_bytes(flipped)
        refused(damaged, tmp_path / "out.pth", to="cpu")
        report = check(damaged)
        assert report.error or "CK103" in {finding.code for finding in report.findings}, bit
    assert "CK103" not in {finding.code for finding in check(INDEXED).findings}


# A disk that keeps something else


def flipping(monkeypatch: pytest.MonkeyPatch, position: int, bits: int) -> list[int]:
    """Let one byte of the output become another once it is written; return the positions at which that was done."""
    done: list[int] = []
    write, fill = Output.write, Output.fill

    def flip(output: Output, start: int, stop: int) -> None:
        if start <= position < stop:
            end = os.lseek(output._fd, 0, os.SEEK_CUR)
            byte = system.read_at(output._fd, 1, position)
            system.write_at(output._fd, bytes([byte[0] ^ bits]), position)
            os.lseek(output._fd, end, os.SEEK_SET)  # on Windows, it is moved
            done.append(position)

    def write_and_flip(self: Output, data: bytes) -> None:
        before = self.position
        write(self, data)
        if before <= position < self.position:
            self.flush()
        flip(self, before, self.position)

    def fill_and_flip(self: Output, place: int, view: memoryview) -> None:
        fill(self, place, view)
        flip(self, place, place + len(view))

    monkeypatch.setattr(Output, "write", write_and_flip)
    monkeypatch.setattr(Output, "fill", fill_and_flip)
    return done


@scaled
@pytest.mark.parametrize("target", ["out.pth", "out.safetensors"])
def test_a_byte_that_is_not_kept_is_noticed(way: str, folder: Path, tmp_path: Path, target: str) -> None:
    source, place = folder / "source.pth", folder / target
    data = checkpoint()
    source.write_bytes(data)
    total = len(migrated(data, tmp_path, target))
    dice = random.Random(target)
    count = times(25, 250)  # in each of two ways and two forms
    place.write_bytes(OLD)
    for number in range(count):
        position = number * total // count if count > total else dice.randrange(total)
        with pytest.MonkeyPatch.context() as patch:
            done = flipping(patch, position, 1 << dice.randrange(8) if number % 2 else dice.randrange(1, 256))
            error = refused(source, place, to="cpu", force=True, error=OutputFailed)
        assert done == [position]
        assert (error.kind, error.path) == ("verification-failed", str(place))
        assert place.read_bytes() == OLD


def pair(one: bytes, other: bytes) -> dict[str, bytes]:
    return {"w": one, "v": other}


W, V = build.tensor(build.storage()), build.tensor(build.storage("1"), (2,), (1,), 1)
TREES = {
    "another name": {"w": W, "u": V},
    "another order": {"v": V, "w": W},
    "another shape": pair(build.tensor(build.storage(), (2, 2), (2, 1)), V),
    "another stride": pair(W, build.tensor(build.storage("1"), (2,), (2,), 1)),
    "another offset": pair(W, build.tensor(build.storage("1"), (2,), (1,), 2)),
    "another type": pair(build.tensor(build.storage(dtype="IntStorage")), V),
    "another's storage": pair(build.tensor(build.storage("1")), V),
    "no such storage": pair(build.tensor(build.storage("2")), V),
    "a smaller storage": pair(W, build.tensor(build.storage("1", 3), (2,), (1,), 1)),
    "no tensor": {"w": W, "v": 1},
    "one less": {"w": W},
    "one more": {**pair(W, V), "x": V},
}


@pytest.mark.parametrize(("what", "form"), in_turn(["nothing", *TREES], ["same", "state_dict"]))
def test_a_pickle_that_says_something_else_is_noticed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, form: Any, what: str
) -> None:
    source, stored = folder / "source.pth", {"0": build.floats(), "1": build.floats()}
    source.write_bytes(build.torch_zip(pair(W, V), stored))
    write_pickle = torch_plan.write_pickle

    def wrong(*args: Any) -> bytes:
        write_pickle(*args)
        return build.pickled(TREES.get(what, pair(W, V)))

    monkeypatch.setattr(torch_plan, "write_pickle", wrong)

    if what == "nothing":
        assert migrate(source, folder / "out.pth", form=form).verified
        return
    refused(source, folder / "out.pth", form=form, kind="verification-failed")


def test_without_verification_it_would_not_be(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "source.pth").write_bytes(checkpoint())
    done = flipping(monkeypatch, 500, 1)

    assert not migrate(folder / "source.pth", folder / "out.pth", verify=False).verified
    assert done == [500]


@pytest.mark.parametrize(("how", "target"), in_turn(["cut", "longer", "zeros", "lost"], ["out.pth", "out.safetensors"]))
def test_an_output_that_is_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch, target: str, how: str) -> None:
    (folder / "source.pth").write_bytes(checkpoint())
    check = SourceChanged  # nothing of the kind may come out
    reading = files.open_source

    def open_source(origin: Any, cancellation: Any = None) -> Any:
        path = str(origin)
        if path != str(folder / "source.pth"):
            fd = os.open(path, os.O_RDWR) if path.startswith("/proc/") else system.open_writing(path)
            size = os.fstat(fd).st_size
            if how in ("cut", "lost"):
                os.ftruncate(fd, size - 1 if how == "cut" else 0)
            else:
                system.write_at(fd, bytes(16), size if how == "longer" else size // 2)
            os.close(fd)
        return reading(origin, cancellation)

    for reader in ("ckptool.formats", "ckptool.migration.verify"):
        monkeypatch.setattr(f"{reader}.open_source", open_source)
    error = refused(folder / "source.pth", folder / target, kind="verification-failed")
    assert not isinstance(error, check)


@pytest.mark.parametrize(("how", "target"), in_turn(["byte", "cut"], ["out.pth", "out.safetensors"]))
def test_a_large_tensor_that_is_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch, target: str, how: str) -> None:
    (folder / "source.pth").write_bytes(checkpoint(3 << 20))
    fill, sync = Output.fill, Output.sync

    def flipped(self: Output, position: int, view: memoryview) -> None:
        view[100] ^= 1
        fill(self, position, view)

    def cut(self: Output) -> None:
        os.ftruncate(self._fd, self.nbytes // 2)
        sync(self)

    monkeypatch.setattr(Output, *(("fill", flipped) if how == "byte" else ("sync", cut)))

    refused(folder / "source.pth", folder / target, kind="verification-failed")


def test_a_large_tensor_that_its_source_has_damaged(folder: Path) -> None:
    data = bytearray(checkpoint(3 << 20))
    data[len(data) // 2] ^= 1
    (folder / "source.pth").write_bytes(data)
    for target in ("out.pth", "out.safetensors"):
        refused(folder / "source.pth", folder / target, match="is damaged", error=DamagedFile)


# A system that refuses


CALLS = ("open", "write", "link", "replace", "rename", "fsync", "fchmod", "statvfs", "pwrite", "close")
CALLS += ("lstat", "stat", "fstat", "listdir", "pread", "preadv", "kill")


class System:
    """``os`` as a module of ours sees it: the ``at``-th call of those listed fails, or is interrupted."""

    def __init__(self, at: int, fault: BaseException, *, after: bool = False, short: bool = False) -> None:
        self.count = 0
        self.failed = ""
        self._at, self._fault, self._after, self._short = at, fault, after, short

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return self.watched(name, real) if name in CALLS else real

    def watched(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            self.count += 1
            fails = self.count == self._at
            if fails:
                self.failed = name
            if fails and not self._after and name != "close":  # what cannot be closed is closed all the same
                raise self._fault
            if self._short and name == "write":
                args = (args[0], args[1][:7])
            result = real(*args, **named)
            if fails:
                raise self._fault
            return result

        return call


FAULTS = {
    "EIO": (OSError(errno.EIO, "fault"), False),
    "EACCES": (OSError(errno.EACCES, "fault"), False),
    "ENOENT": (OSError(errno.ENOENT, "fault"), False),
    "ENOSPC": (OSError(errno.ENOSPC, "fault"), False),
    "interrupt": (KeyboardInterrupt(), False),
    "interrupt after": (KeyboardInterrupt(), True),
}


REFUSALS = product([("out.pth", 64), ("out.safetensors", 64), ("out.pth", BIG // 4)], [False, True], FAULTS)


@scaled
@pytest.mark.parametrize(("made", "old", "name"), some(REFUSALS, 9))
def test_every_system_call_may_fail(
    way: str, folder: Path, tmp_path: Path, made: tuple[str, int], old: bool, name: str
) -> None:
    (target, numel), (fault, after) = made, FAULTS[name]
    source, place = folder / "source.pth", folder / target
    data = checkpoint(numel=numel)
    source.write_bytes(data)
    new = migrated(data, tmp_path, target)
    descriptors = open_descriptors()
    failed, tolerated = [], []
    every = step(7 if numel > 64 else 3, 3)
    for at in range(1, 500, every):
        place.unlink(missing_ok=True)
        if old:
            place.write_bytes(OLD)
        machine = System(at, fault, after=after)
        raised: BaseException | None = None
        with pytest.MonkeyPatch.context() as patch:
            for module in (outputs, SYSTEM, files):
                patch.setattr(module, "os", machine)
            for call in OWN_CALLS:
                patch.setattr(system, call, machine.watched(call, getattr(system, call)))
            try:
                migrate(source, place, to="cpu", force=old)
            except (CkptoolError, KeyboardInterrupt) as error:  # and never anything else
                raised = error.with_traceback(None)
                raised.__cause__ = raised.__context__ = None
        fault.__traceback__ = fault.__context__ = None  # they would keep what is to be closed
        if machine.count < at:
            break
        found = place.read_bytes() if place.exists() else None
        before = OLD if old else None
        (failed if raised else tolerated).append(machine.failed)
        if raised is None:
            assert found == new, machine.failed
        elif isinstance(raised, KeyboardInterrupt):
            assert found in (before, new), machine.failed
        elif machine.failed != "close":
            assert found == before, machine.failed
        assert found in (before, new), machine.failed
        assert source.read_bytes() == data
        assert names_in(folder) <= {source.name, target}, machine.failed
        if not after:  # an interrupt can come between opening and noting it
            assert open_descriptors() == descriptors, (machine.failed, at)
    assert raised is None
    assert len(failed) > 8 // every
    assert every > 1 or {"open_new", "read_at"} <= set(failed) or {"open", "write", "pread"} <= set(failed)


def test_writes_that_take_a_little_each_time(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "source.pth").write_bytes(checkpoint())
    machine = System(0, OSError(), short=True)
    for module in (outputs, SYSTEM):
        monkeypatch.setattr(module, "os", machine)

    for name in ("out.pth", "out.safetensors"):
        migrate(folder / "source.pth", folder / name, to="cpu")
        assert (folder / name).read_bytes() == migrated(checkpoint(), tmp_path, name)


def test_a_disk_that_does_not_take_what_was_written(way: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_fd: int) -> None:
        raise OSError(errno.EIO, "fault")

    (folder / "source.pth").write_bytes(checkpoint())
    monkeypatch.setattr(os, "fsync", fail)
    refused(folder / "source.pth", folder / "out.pth", error=OutputFailed)
