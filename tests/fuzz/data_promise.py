"""
``python -m tests.fuzz.data_promise --count 10000000 --seed 1``: what is graded ``data`` only makes data.

Pickles of all opcodes are made from a seed: honest ones of many kinds whose trees are changed, with the names that data
may ask for and others, at all protocols, alone and in torch's files. Each that is graded ``data`` is loaded by every
loader that takes it, in a child under an audit hook. It may open, import, compile and call nothing, must change no
class, function or module, and has to end, without a signal, within limits of time and memory. Exits 1 if one does not.
``--processes`` share the count. Faulty files are written to ``--save``.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from ckptool import check
from ckptool.errors import Failure
from ckptool.pickles.judge import Judge
from ckptool.pickles.reader import read_pickle
from ckptool.sources.source import BytesSource
from tests import build
from tests.fuzz.loaders import SECONDS, Children, Fault, File
from tests.fuzz.mutants import likely
from tests.fuzz.seeds import WIDTHS, Seed, names, seeds
from tests.fuzz.trees import Changer, Node, walk, written

BATCH = 2000
ASKED = 50
"""Of files whose pickle alone is more than data, each so manyth is graded whole, to see that it is not data, too."""
LARGEST = 160
"""Nodes of a seed, at most: larger ones take long, and have nothing that smaller ones lack."""


def is_data(data: bytes) -> bool:
    """Return whether a file is graded ``data``."""
    return check(data).grade == "data"


def may_be_data(file: File) -> bool:
    """Return whether the pickle of a file is data by itself, without which the file is not: this takes less time."""
    try:
        pickled = read_pickle(BytesSource(file.pickled or file.data))
    except Failure:
        return False
    return next(Judge().verdicts(pickled), None) is None


class Maker:
    """Makes files, always the same for the same seed."""

    def __init__(self) -> None:
        found = [seed for seed in seeds() if len(walk(seed.root)) < LARGEST]
        self.honest = found
        self.storages = {key: data for seed in found for key, data in seed.storages.items()}
        self.names = names()
        plain = [seed.root for seed in found if not seed.storages and not seed.is_legacy]
        zipped = [seed.root for seed in found if seed.storages and not seed.is_legacy]
        streamed = [seed.root for seed in found if seed.storages and seed.is_legacy]
        self.changers = {
            "pickle": Changer(plain, self.names),
            "zip": Changer(zipped, self.names, plain),
            "legacy": Changer(streamed, self.names, plain),
        }

    def files(self, seed: str) -> Iterator[File]:
        """Yield files without end."""
        chance = random.Random(seed)
        while True:
            yield self.file(chance)

    def file(self, chance: random.Random) -> File:
        kind = chance.choices(("pickle", "zip", "legacy", "program"), (55, 25, 15, 5))[0]
        if kind == "program":
            return File(self.program(chance), "pickle")
        root = self.changers[kind].tree(chance)
        for node in walk(root):
            if node.kind == "name" and node.said[1] == "_load_from_bytes" and chance.random() < 0.5:
                self.nest(root, chance)
                break
        if kind == "pickle" and not any(node.kind == "pid" for node in walk(root)):
            return File(written(root, chance), "pickle")
        return self.packed(root, chance, "zip" if kind == "pickle" else kind)

    def packed(self, root: Node, chance: random.Random, kind: str) -> File:
        """Return torch's file of a tree, with the storages that it refers to."""
        protocol = chance.choice((2, 2, 2, 2, 3, 4, 5))
        whole = written(root, chance, protocol)
        used = {node.said: 1 for node in walk(root) if node.kind == "value" and isinstance(node.said, str)}
        keys = [key for key in used if key in self.storages]
        if kind == "zip":
            members = {"archive/data.pkl": whole, "archive/byteorder": b"little"}
            members |= {f"archive/data/{key}": self.storages[key] for key in keys}
            return File(build.zip_file({**members, "archive/version": b"3\n"}), kind, whole)
        widths = dict(self.widths(root))
        storages = [(key, len(self.storages[key]) // widths.get(key, 1), self.storages[key]) for key in keys]
        return File(build.legacy(whole[2:-1], storages, protocol=protocol), kind, whole)

    @staticmethod
    def widths(root: Node) -> Iterator[tuple[str, int]]:
        for node in walk(root):
            if node.kind == "tuple" and len(node.nodes) > 2 and node.nodes[1].kind == "name":
                key = node.nodes[2].said
                if isinstance(key, str):
                    yield key, WIDTHS.get(node.nodes[1].said[1], 1)

    def nest(self, root: Node, chance: random.Random) -> None:
        """Put another stream where one lies in bytes."""
        for node in walk(root):
            if node.kind == "value" and isinstance(node.said, bytes) and len(node.said) > 100:
                inner = self.changers["legacy"].tree(chance)
                node.said = self.packed(inner, chance, "legacy").data

    def program(self, chance: random.Random) -> bytes:
        """Return any opcodes, with parts of honest trees among them."""
        pieces = []
        for piece in likely(chance, chance.randrange(1, 12)):
            is_name = piece[:1] in b"ci" and len(piece) > 1
            if chance.random() < 0.3:
                pieces.append(written(chance.choice(self.changers["pickle"].parts), chance, 0)[:-1])
            elif is_name:
                pieces.append(piece[:1] + "\n".join(chance.choice(self.names)).encode() + b"\n")
            else:
                pieces.append(piece)
        head = chance.choice((b"", b"\x80\2", b"\x80\2", b"\x80\4", b"\x80\5"))
        return head + b"(" + b"".join(pieces) + b"l."


def honest(maker: Maker) -> list[File]:
    """Return a file of each seed, as it was."""
    chance = random.Random(1)
    found: dict[bytes, File] = {}
    for seed in maker.honest:
        file = as_it_was(maker, seed, chance)
        found.setdefault(file.data, file)
    return list(found.values())


def as_it_was(maker: Maker, seed: Seed, chance: random.Random) -> File:
    if any(node.kind == "pid" for node in walk(seed.root)):
        return maker.packed(seed.root, chance, "legacy" if seed.is_legacy else "zip")
    return File(written(seed.root, chance, chance.choice((2, 4))), "pickle")


class Result:
    """How much was tried, and what was found."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.loads: Counter[str] = Counter()
        self.faults: list[Fault] = []


def _too_long(*_: object) -> None:
    raise TimeoutError("takes too long")


def run(seed: int, count: int, seconds: float = float("inf"), *, most_faults: int = 1 << 30) -> Result:
    """Make so many files, or for so long, and load those that are graded ``data``."""
    maker, result = Maker(), Result()
    known = [one for one in honest(maker) if is_data(one.data)]
    children = Children({module for module, _ in maker.names}, known)
    files = maker.files(str(seed))
    batch: list[File] = []
    tried: set[bytes] = set()
    end = time.monotonic() + seconds
    signal.signal(signal.SIGPROF, _too_long)
    result.faults += children.faults(known)

    def flush() -> None:
        if batch:
            result.faults += children.faults(batch)
            batch.clear()

    for number in range(count):
        if time.monotonic() > end or len(result.faults) >= most_faults:
            break
        file = next(files)
        result.seen["made"] += 1
        signal.setitimer(signal.ITIMER_PROF, 2 * SECONDS)
        try:
            is_promising = file.data not in tried and (number % ASKED == 0 or may_be_data(file))
            is_tried = is_promising and is_data(file.data)
        except Exception as error:  # noqa: BLE001 - check() ends in a report
            is_tried = False
            result.faults.append(Fault(file, "ckptool", f"{type(error).__name__} {error}"))
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        if is_tried:
            tried.add(file.data)
            if len(tried) > 100_000:
                tried.clear()
            result.seen[f"data, {file.kind}"] += 1
            batch.append(file)
        if len(batch) == BATCH or number == count - 1:
            flush()
    flush()
    result.loads = children.loads
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.data_promise", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--save", type=Path)
    asked = parser.parse_args(arguments)
    if asked.processes > 1:
        return _share(asked)
    begin = time.monotonic()
    result = run(asked.seed, asked.count, asked.seconds)
    kinds: dict[str, list[Fault]] = {}
    for fault in result.faults:
        kinds.setdefault(fault.kind, []).append(fault)
    print(
        f"seed {asked.seed}: {result.seen['made']:,} files in {time.monotonic() - begin:.0f} s, "
        f"{sum(count for kind, count in result.seen.items() if kind.startswith('data')):,} of them data, "
        f"{sum(result.loads.values()):,} loads, {len(result.faults)} faults of {len(kinds)} kinds"
    )
    print("  " + ", ".join(f"{kind} {count:,}" for kind, count in sorted(result.seen.items())))
    print("  " + ", ".join(f"{what} {count:,}" for what, count in result.loads.most_common(60)))
    for number, (kind, faults) in enumerate(kinds.items()):
        smallest = min(faults, key=lambda one: len(one.file.data))
        loaders = ", ".join(sorted({one.loader for one in faults}))
        print(f"  {len(faults)} x {kind} ({loaders}): {smallest.what}: {smallest.file.data[:600]!r}")
        if asked.save:
            asked.save.mkdir(parents=True, exist_ok=True)
            (asked.save / f"{asked.seed}-{number}.{smallest.file.kind}").write_bytes(smallest.file.data)
    return 1 if result.faults else 0


def _share(asked: argparse.Namespace) -> int:
    command = [sys.executable, "-m", "tests.fuzz.data_promise", "--count", str(asked.count // asked.processes)]
    command += ["--seconds", str(asked.seconds), *(["--save", str(asked.save)] if asked.save else [])]
    started = [subprocess.Popen([*command, "--seed", str(asked.seed + number)]) for number in range(asked.processes)]
    return max(one.wait() for one in started)


if __name__ == "__main__":
    sys.exit(main())
