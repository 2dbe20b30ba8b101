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
import resource
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from struct import pack
from typing import Any

from ckptool import check
from ckptool.pickles.alarms import canonical
from ckptool.pickles.judge import is_listed
from ckptool.pickles.nodes import Call, Global, PersistentId
from ckptool.pickles.reader import read_as_far
from ckptool.sources.source import BytesSource

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


def text(chance: random.Random, value: str) -> bytes:
    data = value.encode()
    return chance.choice(
        (
            b"X" + pack("<I", len(data)) + data,
            b"\x8c" + bytes([len(data)]) + data,
            b"\x8d" + pack("<Q", len(data)) + data,
            b"V" + data + b"\n",
            b"S'" + data + b"'\n",
            b"U" + bytes([len(data)]) + data,
        )
    )


def name(chance: random.Random) -> bytes:
    """Return opcodes that look a name up."""
    module = chance.choice(("evil", "os", "builtins", "a.b"))
    found = chance.choice(("system", "f", "C", "x.y"))
    kind = chance.randrange(8)
    if kind == 0:
        code = chance.choice(EXTENSIONS)
        return (
            b"\x82" + bytes([code])
            if code < 256
            else b"\x83" + pack("<H", code)
            if code < 65_536
            else b"\x84" + pack("<I", code)
        )
    if kind < 4:
        return text(chance, module) + text(chance, found) + b"\x93"
    return f"c{module}\n{found}\n".encode()


def value(chance: random.Random, depth: int) -> bytes:
    """Return opcodes that push one value, some of which call something on the way."""
    if depth <= 0 or chance.random() < 0.2:
        return chance.choice(ATOMS)(chance)
    return chance.choice(COMPOUND)(chance, depth - 1)


def several(chance: random.Random, depth: int, most: int = 3) -> bytes:
    return b"".join(value(chance, depth) for _ in range(chance.randrange(most + 1)))


def args(chance: random.Random, depth: int) -> bytes:
    return chance.choice(
        (
            lambda: b")",
            lambda: value(chance, depth) + b"\x85",
            lambda: value(chance, depth) + value(chance, depth) + b"\x86",
            lambda: value(chance, depth) + value(chance, depth) + value(chance, depth) + b"\x87",
            lambda: b"(" + several(chance, depth) + b"t",
            lambda: b"(" + several(chance, depth) + b"l",
        )
    )()


def target(chance: random.Random, depth: int) -> bytes:
    """Return opcodes for what is called: a name, or the result of a call."""
    return name(chance) if depth <= 0 or chance.random() < 0.7 else called(chance, depth)


def called(chance: random.Random, depth: int) -> bytes:
    depth -= 1
    inst = chance.choice((b"ievil\nf\n", b"ios\nsystem\n"))
    return chance.choice(
        (
            lambda: target(chance, depth) + args(chance, depth) + b"R",
            lambda: target(chance, depth) + args(chance, depth) + b"\x81",
            lambda: target(chance, depth) + args(chance, depth) + pairs(chance, depth) + b"\x92",
            lambda: b"(" + several(chance, depth) + inst,
            lambda: b"(" + target(chance, depth) + several(chance, depth) + b"o",
        )
    )()


def pairs(chance: random.Random, depth: int) -> bytes:
    inside = b"".join(text(chance, "k") + value(chance, depth) for _ in range(chance.randrange(3)))
    return chance.choice((b"}(" + inside + b"u", b"(" + inside + b"d", b"}"))


def memoized(chance: random.Random, depth: int) -> bytes:
    index = chance.randrange(6)
    put = chance.choice((b"q" + bytes([index]), b"p%d\n" % index, b"r" + pack("<I", index), b"\x94"))
    got = chance.choice((b"h" + bytes([index]), b"g%d\n" % index, b"j" + pack("<I", index)))
    return value(chance, depth) + put + chance.choice((b"", got + b"\x86", b"0" + got, got + b"0", b"20"))


def changed(chance: random.Random, depth: int) -> bytes:
    """Return opcodes that give something a state, or items."""
    holder = target(chance, depth) if chance.random() < 0.8 else value(chance, depth)
    for _ in range(chance.choice((1, 1, 2))):
        holder += chance.choice(
            (
                lambda: value(chance, depth) + b"b",
                lambda: value(chance, depth) + b"a",
                lambda: b"(" + several(chance, depth) + b"e",
                lambda: b"(" + several(chance, depth) + b"\x90",
                lambda: text(chance, "k") + value(chance, depth) + b"s",
                lambda: b"(" + text(chance, "k") + value(chance, depth) + b"u",
            )
        )()
    return holder


ATOMS: list[Callable[[random.Random], bytes]] = [
    lambda _: b"N",
    lambda _: b"K\x07",
    lambda _: b"I12\n",
    lambda _: b"I0x10\n",
    lambda _: b"L7L\n",
    lambda _: b"F1.5\n",
    lambda _: b"I01\n",
    lambda _: b"J\1\0\0\0M\1\0\x86",
    lambda _: b"\x8a\1\x05",
    lambda _: b"G" + pack(">d", 1.5),
    lambda _: b"\x88",
    lambda _: b"C\x02ab",
    lambda _: b"B\x01\0\0\0a",
    lambda _: b"\x96\x01\0\0\0\0\0\0\0a",
    lambda _: b"\x80" + bytes([_.randrange(6)]) + b"N",
    lambda _: b"\x95\0\0\0\0\0\0\0\0N",
    lambda _: b"\x8f",
    lambda _: b"]",
    lambda chance: text(chance, "text"),
    name,
]
COMPOUND: list[Callable[[random.Random, int], bytes]] = [
    called,
    called,
    called,
    changed,
    changed,
    memoized,
    args,
    pairs,
    lambda chance, depth: b"](" + several(chance, depth) + b"e",
    lambda chance, depth: b"\x8f(" + several(chance, depth) + b"\x90",
    lambda chance, depth: b"(" + several(chance, depth) + b"\x91",
    lambda chance, depth: value(chance, depth) + b"Q",
    lambda _, __: b"Pkey\n",
    lambda chance, depth: value(chance, depth) + value(chance, depth) + b"0",
    lambda chance, depth: value(chance, depth) + b"(" + several(chance, depth) + b"1",
    lambda chance, depth: b"(" + b"0" + value(chance, depth),
    lambda chance, depth: value(chance, depth) + b"20",
]


def program(chance: random.Random) -> bytes:
    """Return a pickle that calls what is not there: whole mostly, else damaged, cut, or with more than one value."""
    frame = b"\x95" + pack("<Q", chance.choice((0, 1 << 20, chance.randrange(60))))
    head = chance.choice((b"\x80\2", b"\x80\4", b"", b"\x80\4" + frame))
    data = head + b"".join(value(chance, chance.randrange(1, 5)) for _ in range(chance.choice((1, 1, 2, 3)))) + b"."
    kind = chance.randrange(10)
    if kind == 0:
        return data[: chance.randrange(len(data))]
    if kind == 1:
        at = chance.randrange(len(data))
        return data[:at] + bytes([chance.choice(b"\x85R\x81bo(0t.e2NQaus\x93\x90")]) + data[at + chance.randrange(2) :]
    return data


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
