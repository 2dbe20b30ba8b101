"""
``python -m tests.fuzz.calls --programs 1000000 --seed 1``: whatever Python's own unpickler calls is on our list.
``python -m tests.fuzz.calls --files FOLDER``: the same for every pickle in the files of a folder, as scanners publish
them for their tests; zips, tars, arrays of numpy and compressed files are unpacked without our code.

Programs of all opcodes are made from a seed and given to Python's unpickler, in C and in Python, with recorders in the
place of every name: inert classes that note what is called and give further recorders. Nothing real is ever looked up
or called. What they noted has to be recorded by ``read_as_far``. Exits 1 if something is missing.
"""

from __future__ import annotations

import argparse
import bz2
import copyreg
import gzip
import io
import lzma
import pickle
import random
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from struct import pack
from typing import Any

from ckptool import Global, check
from ckptool.pickles.alarms import canonical
from ckptool.pickles.judge import is_listed
from ckptool.pickles.nodes import Call, PersistentId
from ckptool.pickles.reader import read_as_far
from ckptool.sources.source import BytesSource
from tests.build import call, named, ops
from tests.fuzz.trees import Changer, read, written

Noted = tuple[str, str]
MEMORY = 1 << 30
SPLIT = "split frame"
"""From where on there are two readings, one of them from memory and one from a file. We say so, and no more."""
EXTENSIONS = (7, 300, 70_000)
FOLLOWED = {"builtins.getattr", "copyreg._reconstructor", "copyreg.__newobj__", "torch.storage._load_from_bytes"}
"""What these find, build or load is said, not that they are called."""


# What Python's unpickler does


class Recorder(type):
    """A class whose calls are noted; what they give is another one."""

    label: str
    noted: list[Noted]

    def __call__(cls, *_: object, **__: object) -> Any:
        return made(cls, "calls")

    def __setstate__(cls, _: object) -> None:
        cls.noted.append(("sets", cls.label))

    def extend(cls, _: object) -> None:
        cls.noted.append(("adds", cls.label))

    append = add = extend

    def __setitem__(cls, _: object, __: object) -> None:
        cls.noted.append(("adds", cls.label))


def recorder(label: str, noted: list[Noted]) -> Recorder:
    def new(cls: Recorder, *_: object, **__: object) -> Recorder:
        return made(cls, "calls")

    return Recorder("recorder", (), {"label": label, "noted": noted, "__new__": new})


def made(cls: Recorder, kind: str) -> Recorder:
    cls.noted.append((kind, cls.label))
    return recorder(f"{cls.label}()", cls.noted)


def unpickled(data: bytes, base: Any) -> list[Noted]:
    """Return what an unpickler does with a stream, up to where it ends or breaks off."""
    noted: list[Noted] = []

    class Unpickler(base):  # type: ignore[misc]
        def find_class(self, module: str, name: str) -> Recorder:
            noted.append(("refers", f"{module}.{name}"))
            return recorder(f"{module}.{name}", noted)

        def persistent_load(self, _: object) -> Recorder:
            noted.append(("asks", "pid"))
            return recorder("pid", noted)

    copyreg.clear_extension_cache()
    with suppress(Exception):  # what was called before counts
        Unpickler(io.BytesIO(data)).load()
    return noted


# What we say


def label(node: Any) -> str:
    calls = 0
    while isinstance(node, Call):
        node, calls = node.func, calls + 1
    name = str(node) if isinstance(node, Global) else "pid" if isinstance(node, PersistentId) else _other(node)
    return name + "()" * calls


def _other(node: Any) -> str:
    code = str(getattr(node, "why", "")).rpartition(" ")[2].replace(",", "")
    return f"evil.ext{code}" if code.isdigit() else "?"


def told(data: bytes) -> set[Noted]:
    read = read_as_far(BytesSource(data))
    found = {("refers", label(one)) for one in read.globals}
    found |= {("calls", label(one.func)) for one in read.calls}
    found |= {("sets", label(one)) for one in read.builds}
    found |= {("adds", label(one)) for one in read.calls}  # of no items, too
    found |= {("asks", "pid") for _ in read.persistent_ids}
    found |= {(odd.how, label(odd.target)) for odd in read.oddities}
    return found | ({("refers", SPLIT)} if read.split_frame is not None else set())


def missing(data: bytes) -> Noted | None:
    """Return the first thing that an unpickler does and we do not tell, or None."""
    ours = told(data)
    if ("refers", SPLIT) in ours:
        return None
    for base in (pickle.Unpickler, pickle._Unpickler):  # type: ignore[attr-defined]
        for one in unpickled(data, base):
            if one not in ours:
                return one
    return None


# Programs


NAMES = [("evil", "f"), ("evil", "C"), ("os", "system"), ("builtins", "x.y"), ("a.b", "f")]
EVIL = named("evil", "C")
PARTS = (
    call(named("evil", "f"), 1, "a"),
    call(call(EVIL, [1]), (2,)),
    EVIL + b")\x81" + ops({"a": 1}) + b"b",
    EVIL + b")}X\1\0\0\0kK\1s\x92",
    b"(K\1ios\nsystem\n",
    b"(" + EVIL + ops([1]) + b"o",
    EVIL + ops(1) + b"a",
    EVIL + ops("k") + ops(2) + b"s",
    EVIL + b"(K\1\x90",
    b"](K\1" + EVIL + b"e",
    ops({"k": (1, 2.5, None, True), "more": b"}X\1\0\0\0a" + EVIL + b"s"}),
    b"\x8f(K\1K\2\x90",
    ops("pid") + b"Q",
    b"Pkey\n",
)
CHANGER = Changer([read(b"\x80\4" + part + b".") for part in PARTS], NAMES)
WORDS = (
    *(b"I12\n", b"I0x10\n", b"L7L\n", b"F1.5\n", b"I01\n", b"S'ab'\n", b"G" + pack(">d", 1.5), b"2", b"0", b"(0"),
    *(b"\x82\7", b"\x83\x2c\1", b"\x84" + pack("<I", 70_000), b"\x80\2", b"\x80\4", b"\x95" + bytes(8), b"(1"),
    *(b"p300\n", b"r\5\0\0\0", b"h\1", b"g0\n"),
    *(bytes([one]) for one in b"\x85R\x81bo(0t.e2NQaus\x93\x90\x94"),
)
"""What is put into some programs at any place, mostly where it makes another one of what follows."""


def program(chance: random.Random) -> bytes:
    """Return a pickle that calls what is not there: whole mostly, else damaged, cut, or with more than one value."""
    values = [written(CHANGER.tree(chance), chance, 4)[2:-1] for _ in range(chance.choice((1, 1, 2, 3)))]
    frame = b"\x95" + pack("<Q", chance.choice((0, 1 << 20, chance.randrange(60))))
    data = chance.choice((b"\x80\2", b"\x80\4", b"", b"\x80\4" + frame)) + b"".join(values) + b"."
    for _ in range(chance.choice((0, 0, 0, 1, 1, 2))):
        at = chance.randrange(len(data))
        data = data[:at] + chance.choice(WORDS) + data[at + chance.randrange(2) :]
    return data[: chance.randrange(1, len(data))] if chance.random() < 0.1 else data


def registered() -> None:
    """Give the extension codes names, as a process may have done."""
    for code in EXTENSIONS:
        if ("evil", f"ext{code}") not in copyreg._extension_registry:  # type: ignore[attr-defined]
            copyreg.add_extension("evil", f"ext{code}", code)


# Files


def contents(data: bytes, depth: int = 0) -> Iterator[bytes]:
    """Yield what may be pickles in a file: all of it, what archives hold, what follows the header of an array."""
    yield data
    if depth == 4:
        return
    inner: list[bytes] = []
    with suppress(Exception), zipfile.ZipFile(io.BytesIO(data)) as found:
        for member in found.namelist():
            with suppress(Exception):  # a checksum that is wrong, a method that this Python lacks
                inner.append(found.read(member))
    with suppress(Exception), tarfile.open(fileobj=io.BytesIO(data)) as tar:
        inner += [file.read() for member in tar if (file := tar.extractfile(member)) is not None]
    for unpack in (gzip.decompress, bz2.decompress, lzma.decompress, zlib.decompress):
        with suppress(Exception):
            inner.append(unpack(data))
    if data.startswith(b"\x93NUMPY"):
        width = 2 if data[6] == 1 else 4
        inner.append(data[8 + width + int.from_bytes(data[8 : 8 + width], "little") :])
    for one in inner:
        yield from contents(one, depth + 1)


def unlisted(data: bytes) -> Iterator[Noted]:
    """Yield what an unpickler calls in the pickles of a file, and is not among what ``check`` says of the file."""
    listed = {act.name for act in check(data).acts}
    for content in contents(data):
        for kind, name in unpickled(content, pickle._Unpickler):  # type: ignore[attr-defined]
            module, _, last = name.rpartition(".")
            full = canonical(module, last)
            plain = is_listed(full) or full in FOLLOWED or module.startswith("__torch__")
            if kind == "calls" and module and not plain and full not in listed and "(" not in name:
                yield kind, name
        lost = missing(content)
        if lost is not None:
            yield lost


def run_files(folder: Path) -> tuple[int, int, list[tuple[str, Noted]]]:
    """Try the files of a folder; return how many there are, how much was called, and what is not told."""
    registered()
    files, calls, bugs = 0, 0, []
    for path in sorted(one for one in folder.rglob("*") if one.is_file()):
        data = path.read_bytes()
        files += 1
        calls += sum(kind == "calls" for one in contents(data) for kind, _ in unpickled(one, pickle.Unpickler))
        bugs += [(str(path), one) for one in dict.fromkeys(unlisted(data))]
    return files, calls, bugs


def run(seed: int, programs: int) -> tuple[int, list[tuple[bytes, Noted]]]:
    """Try so many programs; return how many things were called in them, and those of which something is missing."""
    registered()
    chance = random.Random(seed)
    calls, bugs = 0, []
    for _ in range(programs):
        data = program(chance)
        found = missing(data)
        if found is not None:
            bugs.append((data, found))
        calls += b"R" in data
    return calls, bugs


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.calls", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--programs", type=int, default=100_000)
    parser.add_argument("--files", type=Path)
    asked = parser.parse_args()
    import resource  # POSIX

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))  # lengths that lie make the unpickler ask for much
    if asked.files is not None:
        files, calls, lost = run_files(asked.files)
        print(f"{files:,} files, {calls:,} calls, {len(lost)} that are not told")
        for path, what in lost[:50]:
            print(f"  {path}: {what}")
        return 1 if lost or not files else 0
    _, bugs = run(asked.seed, asked.programs)
    print(f"seed {asked.seed}: {asked.programs:,} programs, {len(bugs)} with a call that is not told")
    for data, what in bugs[:20]:
        print(f"  {what}: {data!r}")
    return 1 if bugs else 0


if __name__ == "__main__":
    sys.exit(main())
