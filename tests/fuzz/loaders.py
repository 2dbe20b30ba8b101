"""
Files that are loaded by every loader that takes them, in processes that notice what happens: for ``data_promise``.

A child is forked from a process that has loaded one honest file of each kind. It loads file after file under an audit
hook; what it was loading when it died is known from memory that both see. Its processor time and memory are limited.
"""

from __future__ import annotations

import contextlib
import gc
import io
import mmap
import os
import pickle
import signal
import struct
import sys
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import joblib
import numpy as np
import torch

from tests import build

HARMLESS = frozenset(("pickle.find_class", "array.__new__", "builtins.id"))
"""Events of making a value, and no more. Every other one counts."""
SECONDS = 2.0
"""Of the processor for one file and one loader."""
MEMORY = 2 << 30
"""Bytes of address space beyond what the child begins with."""
ARRAY_HEAD = b"\x93NUMPY\1\0\x76\0" + b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(117) + b"\n"


class File(NamedTuple):
    """A file, and what kind it is: ``pickle``, ``zip`` or ``legacy``."""

    data: bytes
    kind: str
    pickled: bytes = b""
    """The pickle in it, if it is not one itself."""


class Fault(NamedTuple):
    """What a file did that was graded ``data``."""

    file: File
    loader: str
    what: str

    @property
    def kind(self) -> str:
        """What it did, in short: the event and the module or file, or what changed."""
        words = self.what.replace("(", " ").replace("'", " ").split()
        return " ".join(words[:2])


LOADERS: dict[str, dict[str, Callable[[bytes], Any]]] = {
    "pickle": {
        "pickle.load": pickle.loads,
        "pickle.load in Python": lambda data: pickle._loads(data),  # type: ignore[attr-defined]
        "pickle.load of latin1": partial(pickle.loads, encoding="latin1"),
        "pickle.load of bytes": partial(pickle.loads, encoding="bytes"),
        "joblib.load": lambda data: joblib.load(io.BytesIO(data)),
        "numpy.load": lambda data: np.load(io.BytesIO(data), allow_pickle=True),
        "numpy.load of an array": lambda data: np.load(io.BytesIO(ARRAY_HEAD + data), allow_pickle=True),
    },
    **{
        kind: {
            "torch.load": lambda data: torch.load(io.BytesIO(data), weights_only=False),
            "torch.load with weights_only": lambda data: torch.load(io.BytesIO(data), weights_only=True),
        }
        for kind in ("zip", "legacy")
    },
}


def loaders_of(file: File) -> dict[str, Callable[[bytes], Any]]:
    """Return the loaders of a file by their names; an encoding matters where there are texts of Python 2."""
    loaders = LOADERS[file.kind]
    if file.kind == "pickle" and not any(code in file.data for code in b"STU"):
        return {
            name: loader for name, loader in loaders.items() if " of latin1" not in name and " of bytes" not in name
        }
    return loaders


class Watcher:
    """Notes what the audit hook hears while a file is loaded. There is one for a process, as hooks stay."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.on = False
        sys.addaudithook(self.hook)

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self.on and event not in HARMLESS and not (event == "import" and finds_nothing(args[0])):
            self.on = False
            self.heard.append(f"{event} {args!r:.150}")
            self.on = True

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        self.heard.clear()
        self.on = True
        try:
            yield
        finally:
            self.on = False


def finds_nothing(module: str) -> bool:
    """Say whether a module is asked for below one that is not a package, so that none is looked for."""
    above = sys.modules.get(module.rpartition(".")[0])
    return above is not None and not hasattr(above, "__path__")


def state_of(modules: Iterable[str]) -> dict[str, Any]:
    """Return what must not change: the dicts of modules, of their classes, and what functions keep."""
    found: dict[str, Any] = {
        "sys.modules": tuple(sys.modules),
        "sys.path": tuple(sys.path),
        "environment": tuple(sorted(os.environ.items())),
        "extensions": tuple(sorted(__import__("copyreg")._extension_registry.items())),
        "reducers": tuple(map(id, __import__("copyreg").dispatch_table.values())),
        "readers of torch": tuple(map(id, torch.serialization._package_registry)),
        "generator of torch": bytes(torch.get_rng_state().numpy()[:64]),
        "generator of numpy": str(np.random.get_state()),  # noqa: NPY002
        "errors of numpy": str(np.geterr()),
        "type of tensors": str(torch.get_default_dtype()),
        "gradients": torch.is_grad_enabled(),
    }
    for module in modules:
        content = getattr(sys.modules.get(module), "__dict__", None)
        if content is None:
            continue
        found[module] = tuple((name, id(value)) for name, value in content.items() if name not in CACHES)
        for name, value in content.items():
            if isinstance(value, type) and f"{module}.{name}" not in CACHES:
                found[f"{module}.{name}"] = tuple((key, id(one)) for key, one in list(vars(value).items()))
            elif isinstance(value, types.FunctionType):
                kept = (value.__defaults__, value.__kwdefaults__, value.__code__)
                own = tuple(str(one) for one in value.__dict__.items() if one[0] not in CACHES)
                found[f"{module}.{name}"] = tuple(map(id, kept)), own
    return found


CACHES = frozenset(("__warningregistry__", "has_warned", "cache"))
"""What functions of torch keep: that they have warned, and what they have found."""


def used(value: Any, depth: int = 0) -> None:
    """Do with a value what anybody does first: show it, measure it, copy its bytes."""
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided and not value.is_meta and not value.is_nested and value.numel() < 1 << 16:
            with contextlib.suppress(RuntimeError, NotImplementedError, TypeError, ValueError):
                value.detach().clone().flatten().tolist()
    elif isinstance(value, np.ndarray | np.generic):
        if getattr(value, "size", 1) < 1 << 16:
            with contextlib.suppress(Exception):
                value.tolist()
                str(value)
    elif isinstance(value, dict | list | tuple | set | frozenset):
        if depth < 8 and len(value) < 1000:
            for one in list(value):
                used(one, depth + 1)
            for one in list(value.values()) if isinstance(value, dict) else ():
                used(one, depth + 1)
    elif depth < 8:
        with contextlib.suppress(Exception):
            str(value)


class Children:
    """Loads files in processes that are forked one after the other."""

    def __init__(self, modules: Iterable[str], honest: Sequence[File]) -> None:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        for module in modules:
            with contextlib.suppress(ImportError):
                __import__(module)
        self.modules = sorted(modules)
        self.watcher = Watcher()
        self.loads: Counter[str] = Counter()
        self.at = mmap.mmap(-1, 16)
        state_of(self.modules)
        for _ in range(2):  # the first time, modules are imported and tables filled
            for file in honest:
                for loader in loaders_of(file).values():
                    used(self.load(file, loader)[0])
        self.usual = {name: self.heard_of(name) for loaders in LOADERS.values() for name in loaders}
        gc.collect()
        gc.freeze()

    def heard_of(self, name: str) -> Counter[str]:
        """Return what a loader does of itself, with a file of nothing."""
        kind, loaders = next(one for one in LOADERS.items() if name in one[1])
        nothing = {"pickle": b"N.", "zip": build.torch_zip(None), "legacy": build.legacy(None)}
        for _ in range(2):
            self.load(File(nothing.get(kind, b"N."), kind), loaders[name])
        return self.heard()

    def heard(self) -> Counter[str]:
        return Counter(one.partition(" ")[0] for one in self.watcher.heard)

    def load(self, file: File, loader: Callable[[bytes], Any]) -> tuple[Any, str]:
        """Load a file; return its value, and what ended it."""
        with self.watcher.watching():
            try:
                return loader(file.data), ""
            except MemoryError:
                return None, "MemoryError"
            except Exception as error:  # noqa: BLE001 - whatever it is, the loader refused
                is_memory = "DefaultCPUAllocator" in str(error)
                return None, "MemoryError" if is_memory else type(error).__name__
            except BaseException as error:  # noqa: BLE001
                return None, f"BaseException {type(error).__name__}"

    def faults(self, files: Sequence[File]) -> Iterator[Fault]:
        """Yield what these files do."""
        start = 0
        while start < len(files):
            done, found, changed = self._child(files[start:])
            yield from found
            if changed:
                yield from self._changers(files[start : start + done], changed)
            start += done

    def _changers(self, files: Sequence[File], changed: str) -> Iterator[Fault]:
        """Find which of the files changed something: half by half."""
        if len(files) == 1:
            yield Fault(files[0], "one of them", f"changed {changed}")
            return
        middle = len(files) // 2
        any_found = False
        for half in (files[:middle], files[middle:]):
            _, _, what = self._child(half)
            if what:
                any_found = True
                yield from self._changers(half, what)
        if not any_found:
            yield Fault(files[0], "all of them together", f"changed {changed}")

    def _child(self, files: Sequence[File]) -> tuple[int, list[Fault], str]:
        """Load files in a child; return how many it came through, what they did, and what is changed at its end."""
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            status = 1
            try:
                os.close(reader)
                self._serve(files, writer)
                status = 0
            finally:
                os._exit(status)
        os.close(writer)
        with os.fdopen(reader, "rb") as stream:
            said = stream.read()
        _, status = os.waitpid(pid, 0)
        number, which = struct.unpack("<qq", self.at[:16])
        # What the child says is numbers and text; nothing of the files is unpickled here.
        lines = said.decode("utf-8", "replace").split("\0")[:-1]
        found, changed = [], ""
        for line in lines:
            kind, _, rest = line.partition(" ")
            if kind == "fault":
                index, loader, what = rest.split("|", 2)
                found.append(Fault(files[int(index)], loader, what))
            elif kind == "changed":
                changed = rest
            elif kind == "loads":
                name, _, count = rest.rpartition(" ")
                self.loads[name] += int(count)
        if status == 0:
            return len(files), found, changed
        loaders = [*loaders_of(files[number]), "the use of the value"]
        code = os.waitstatus_to_exitcode(status)
        name = signal.Signals(-code).name if code < 0 else f"exit {code}"
        what = "takes too long" if name == "SIGPROF" else f"ends with {name}"
        return number + 1, [*found, Fault(files[number], loaders[which], what)], ""

    def _serve(self, files: Sequence[File], writer: int) -> None:
        import resource  # POSIX

        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        before = state_of(self.modules)
        loads: Counter[str] = Counter()

        def say(text: str) -> None:
            os.write(writer, text.encode("utf-8", "replace").replace(b"\0", b"?") + b"\0")

        for number, file in enumerate(files):
            loaders = loaders_of(file)
            for which, (name, loader) in enumerate(loaders.items()):
                self.at[:16] = struct.pack("<qq", number, which)
                signal.setitimer(signal.ITIMER_PROF, SECONDS)
                value, ended = self.load(file, loader)
                loads[f"{name}: {ended or 'loaded'}"] += 1
                if odd := self.heard() - self.usual[name]:
                    what = next(one for one in reversed(self.watcher.heard) if one.partition(" ")[0] in odd)
                    say(f"fault {number}|{name}|{what}")
                if ended == "MemoryError" or ended.startswith("BaseException"):
                    say(f"fault {number}|{name}|{ended}")
                self.at[:16] = struct.pack("<qq", number, len(loaders))
                if not ended:
                    used(value)
                del value
            signal.setitimer(signal.ITIMER_PROF, 0)
        self.at[:16] = struct.pack("<qq", len(files) - 1, len(loaders_of(files[-1])))
        gc.collect()
        after = state_of(self.modules)
        if before != after:
            say("changed " + ", ".join(_differences(before, after))[:300])
        for what, count in loads.items():
            say(f"loads {what} {count}")


def _differences(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    for name in {**before, **after}:
        if before.get(name) != after.get(name):
            old, new = before.get(name), after.get(name)
            if isinstance(old, tuple) and isinstance(new, tuple):
                yield f"{name}: {[one for one in new if one not in old][:3]!r}"
            else:
                yield name
