"""
A process that is given hostile files: each is inspected, checked, migrated and loaded in a fork of its own.

``python -m tests.hostile.child`` reads one job a line and answers each with a line. Everything that the four import is
imported before the first job, by running them on harmless files; from then on an audit hook reports what none of them
needs. A fork may take so much address space more than it has, and so much time.
"""

from __future__ import annotations

import encodings.cp437
import encodings.raw_unicode_escape
import encodings.unicode_escape  # noqa: F401 - what names may need
import gc
import hashlib
import io
import json
import logging
import os
import pickle
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import ckptool
from ckptool.cli.text import error_text
from tests import build
from tests.formats.dcp_folder import columns, rows, save
from tests.process import in_a_fork, peak_nbytes
from tests.program import invoke

MIB = 1 << 20
MEMORY = {"inspect": 512 * MIB, "check": 512 * MIB, "migrate": 512 * MIB, "load": 1024 * MIB}
"""Address space that each may add to what the process has."""
LARGE = 64 * MIB
PATIENCE = 300
"""Seconds on the clock, on a machine that may have much else to do, after which a fork is killed: it hangs."""

# What reading a file and writing another needs, and no more. Paths are looked at below.
HARMLESS = {
    "builtins.id", "array.__new__", "mmap.__new__", "_thread.start_new_thread", "_thread.start_joinable_thread",
    "os.listdir", "os.scandir", "os.kill", "os.putenv", "object.__getattr__", "sys._getframe", "gc.get_objects",
    "signal.pthread_kill", "resource.setrlimit", "fcntl.fcntl", "ctypes.cdata", "os.getxattr", "os.listxattr",
    "object.__setattr__",
}  # fmt: skip
ON_OUTPUT = {"os.link", "os.rename", "os.remove", "os.chmod", "os.chown", "os.setxattr", "os.truncate"}
CLONING = (0x40049409, 0x4020940D)
"""FICLONE and FICLONERANGE of Linux: share the bytes of another file, from then on copied where one is written."""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Watch:
    """An audit hook that notes what should not happen. It cannot be taken off again, only told to look away."""

    def __init__(self, source: str, folder: str, beside: Sequence[str] = ()) -> None:
        self.happened: list[str] = []
        self.armed = False
        self._folder = folder
        # A component without a slash is opened in a folder that was opened: relative to where we are, it would be, too,
        # but only ``beside`` opens without following links, and what it is asked for is what the case says.
        self._beside = frozenset((*beside, Path(source).name) if beside else ())  # itself: is it still there
        self._source_folder = str(Path(source).parent) if beside else None
        self._is_folder = os.path.isdir(source)  # noqa: PTH112 - any text
        self._readable = (source.partition("::")[0] or folder, folder, "/proc/", "/sys/")

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        # What is asked first is asked for each object: reading calls id(), and time here counts as the reader's.
        if event not in HARMLESS and self.armed and not self._allows(event, args):
            self.happened.append(f"{event} {args!r}"[:200])

    def _allows(self, event: str, args: tuple[Any, ...]) -> bool:
        if event == "open":
            path, _, flags = args
            if not flags & WRITING:
                if path in self._beside and (flags & os.O_NOFOLLOW or path == ".."):
                    return True
                if self._is_folder and isinstance(path, str) and "/" not in path and flags & os.O_NOFOLLOW:
                    return True  # below the folder that is the source
                if path == self._source_folder:
                    return bool(flags & os.O_DIRECTORY)
                # Nothing beside the source is read, but for what was written and what the system says of itself.
                return path == "" or isinstance(path, int) or _within(path, *self._readable)
            return _within(path, self._folder)
        # A writer holds a lock on the part that it writes, and asks if it could share bytes with the source.
        if event == "fcntl.flock" or (event == "fcntl.ioctl" and args[1] in CLONING):
            return _within(Path(f"/proc/self/fd/{args[0]}").readlink(), self._folder)
        if event == "compile" and args[1] == "":
            return True  # ast.parse makes a tree and no code; whatever ran would be another event
        return event in ON_OUTPUT and any(_within(arg, self._folder) for arg in args)


def _within(path: object, *places: str) -> bool:
    return isinstance(path, str | bytes | os.PathLike) and os.fsdecode(path).startswith(places)


TIMES: list[float] = []
"""Seconds of the processor that each call took."""


def timed(work: Callable[[], Any]) -> Any:
    start = time.process_time()
    try:
        return work()
    finally:
        TIMES.append(time.process_time() - start)


def command(*arguments: str) -> dict[str, Any]:
    """Run a verb as the shell would; what is not an exit code is an untyped error."""
    done = timed(lambda: invoke(list(arguments)))
    error = done.exception
    if error is not None and not isinstance(error, SystemExit):
        return {"untyped": "".join(traceback.format_exception(error))[-2000:], "said": done.output}
    return {"code": done.exit_code, "said": done.output}


def inspect(path: str, folder: str) -> dict[str, Any]:
    found = command("inspect", "--all", path)
    if "untyped" in found:
        return found
    listed = command("inspect", "--json", path)
    return {**listed, "said": found["said"] + listed["said"]}


def check(path: str, folder: str) -> dict[str, Any]:
    found = command("check", "--deep", "--strict", "--globals", "--json", path)
    if "untyped" not in found:
        said = json.loads(found["said"])
        error = said.get("error")
        found["error"] = error and error["kind"]
        found["grade"] = said.get("grade")
    return found


def migrate(path: str, folder: str) -> dict[str, Any]:
    """
    Migrate to a state dict by the call and to safetensors by the command; digests are of what was written.

    What is refused for a call that reaches the system, is written with it then.
    """
    targets = [f"{folder}/out.pth", f"{folder}/out.safetensors"]
    found = caught(lambda: str(ckptool.migrate(path, targets[0])))
    if found.get("error") == "kept-calls":
        found = {**caught(lambda: str(ckptool.migrate(path, targets[0], keep_calls=True))), "has_calls": True}
    if "result" in found:
        shown = command("migrate", path, targets[1])
        found = {"untyped": shown.get("untyped"), **found} if "untyped" in shown else found
        found["said"] = shown["said"]
    for target in map(Path, targets):
        if target.exists():
            with ckptool.open_checkpoint(target) as written:
                found.setdefault("digests", []).append(digests(written))
            target.unlink()
    return found


def load(path: str, folder: str) -> dict[str, Any]:
    found = caught(lambda: ckptool.load(path))
    if "result" in found:
        found["digests"] = [{name: digest_of(tensor) for name, tensor in found.pop("result").items()}]
    return found


def digests(checkpoint: ckptool.Checkpoint) -> dict[str, str]:
    weights = checkpoint.weights
    return {
        name: hashlib.sha256(tensor.read()).hexdigest()
        if tensor.info.storage is not None and tensor.info.layout == "strided" and tensor.info.nbytes <= LARGE
        else "none"
        for name, tensor in (weights or {}).items()
    }


def digest_of(value: Any) -> str:
    if (
        not isinstance(value, torch.Tensor)
        or value.layout != torch.strided
        or value.is_quantized
        or value.is_meta
        or value.numel() * value.element_size() > LARGE  # torch counts the bytes in 64 bits
    ):
        return "none"
    flat = value.detach().contiguous().flatten()
    return hashlib.sha256(bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b"").hexdigest()


def caught(work: Callable[[], Any]) -> dict[str, Any]:
    """Run a library call; an error of ours is a kind and a message."""
    try:
        return {"result": timed(work)}
    except ckptool.CkptoolError as error:
        return {"error": error.kind, "class": type(error).__name__, "said": error_text(error)}
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is told of
        return {"untyped": "".join(traceback.format_exception(error))[-2000:]}


VERBS = {"inspect": inspect, "check": check, "migrate": migrate, "load": load}


@contextmanager
def capped(nbytes: int) -> Iterator[None]:
    """Lend so much address space more than there is in use."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def work(path: str, folder: str, verbs: list[str], beside: list[str], *, watched: bool = True) -> dict[str, Any]:
    """Give one file to each verb, and tell how it went."""
    watch = Watch(path, folder, beside)
    if watched:
        sys.addaudithook(watch)
    outcome: dict[str, Any] = {}
    before = state_of(path)
    begun = peak_nbytes()
    for name in verbs:
        TIMES.clear()
        with capped(MEMORY[name]):
            watch.armed = True
            found = VERBS[name](path, folder)
            watch.armed = False
        found["said"] = found.get("said", "") + logged()
        outcome[name] = {
            **found,
            "seconds": max(TIMES),
            "grown": peak_nbytes() - begun,
            "left": [entry.name for entry in Path(folder).iterdir()],
        }
    nbytes = before[1] if before else 0
    return {"nbytes": nbytes, "verbs": outcome, "happened": watch.happened, "changed": state_of(path) != before}


LOG = io.StringIO()


def logged() -> str:
    """Return what was logged since the last time."""
    said = LOG.getvalue()
    LOG.seek(0)
    LOG.truncate()
    return said


def state_of(path: str) -> list[int]:
    try:
        found = os.lstat(path)
    except (OSError, ValueError):
        return []
    return [found.st_ino, found.st_size, found.st_mtime_ns, found.st_mode]


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """
    Do a job; what seems slow is timed again without the watch, which is asked for each object.

    Twice, if need be: a neighbour on the machine makes a process slower, and nothing makes it faster than it is. Where
    one makes all Python slower at that time, less is held against the call.
    """
    found = forked(job)
    for name, one in found.get("verbs", {}).items():
        for _ in range(2):
            if one["seconds"] > job["patience"]:
                slower = slowness()
                again = forked({**job, "verbs": [name]}, watched=False)
                if name in again.get("verbs", {}):
                    one["seconds"] = again["verbs"][name]["seconds"] / min(slower, slowness())
    return found


KNOWN = pickle.dumps([{"name": str(number), "shape": (number, number)} for number in range(10_000)], 2)
KNOWN_SECONDS = 0.04
"""What Python's own unpickler in Python takes for that on a machine with nothing else to do: bounds are as of it."""


def slowness() -> float:
    """Return how many times as long as there Python takes here now, from once to four times."""
    times = []
    gc.disable()
    for _ in range(3):
        start = time.process_time()
        pickle._Unpickler(io.BytesIO(KNOWN)).load()  # type: ignore[attr-defined]
        times.append(time.process_time() - start)
    gc.enable()
    return min(4.0, max(1.0, min(times) / KNOWN_SECONDS))


def forked(job: dict[str, Any], *, watched: bool = True) -> dict[str, Any]:
    return in_a_fork(lambda: work(job["path"], job["folder"], job["verbs"], job["beside"], watched=watched), PATIENCE)


def warm_up() -> None:
    """Run everything on files without harm, so that nothing is left to import."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "harmless")
        for data in (*build.one_of_each().values(), b"no checkpoint", b"", build.torch_zip({"\x1b": 1})[:-9]):
            path.write_bytes(data)
            for verb in VERBS.values():
                verb(str(path), folder)
        Path(folder, "a").write_bytes(build.safetensors({"a": build.floats()}))
        for name, shard in (("harmless", "a"), ("model.safetensors.index.json", "none")):
            index = Path(folder, name)
            index.write_bytes(build.index_of_shards({"a": shard}))
            for verb in VERBS.values():
                verb(str(index), folder)
        for names in (("a",), ("x.txt",), ("x.txt", "model.safetensors"), ("snapshots/a", "refs/main")):
            other = Path(folder, "folders", "-".join(names).replace("/", "_"))
            for name in names:
                (other / name).parent.mkdir(parents=True, exist_ok=True)
                (other / name).write_bytes(b"no checkpoint")
            for verb in VERBS.values():
                verb(str(other), folder)
        values = torch.arange(6.0).reshape(2, 3)
        for cut in (rows((2, 3), 2), columns((2, 3), 2)):
            path = save(
                Path(folder, f"cut-along-{cut[1][0].index(max(cut[1][0]))}"), {"model.w": values}, {"model.w": cut}
            )
            (path / "__1_0.distcp").unlink()  # an error has a hint
            for verb in VERBS.values():
                verb(str(path), folder)
            save(path, {"model.w": values}, {"model.w": cut})
            for verb in VERBS.values():
                verb(str(path), folder)


def main() -> None:
    gc.set_threshold(1_000_000)  # as the command line does
    logging.basicConfig(level=logging.INFO, stream=LOG)
    warm_up()
    logged()
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
