"""How much a process grows at pickles that are nothing but small objects, each of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.build import call, named
from tests.process import ROOT

MIB = 1 << 20
PER_BYTE = 40
"""Bytes of memory for each byte of the file, and with them 64 MiB for all, or 16 of a small one; diff has two files."""

SHAPES = {
    "empty lists": b"]",
    "empty dicts": b"}",
    "empty dicts, noted": b"}\x94",
    "empty lists, noted": b"]\x94",
    "tuples of one": b"N\x85",
    "lists of one": b"]Na",
    "dicts of one": b"}NNs",
    "objects of one argument": b"h\0N\x85R",
    "objects with a state": b"h\0)R}b",
    "calls of nothing": b"NNR",
    "empty lists of a mark": b"(l",
    "empty dicts of a mark": b"(d",
    "empty frozensets": b"(\x91",
    "what is noted under far indices": b"Nr\xff\xff\xff\0" + b"\x94" * 1000,
    "nothing": b"N",
    "calls": b"h\0)R",
    "persistent ids": b"NQ",
    "floats": b"F1\n",
    "texts": b"\x8c\2ab",
    "empty sets": b"\x8f",
    "marks": b"(",
    "compressed strings": b"C\3\x1f\x8b\x08",
}
_GROWN = """
import contextlib, gc, io, json, os, sys
from ckptool.cli import cli
from tests.process import peak_nbytes
gc.set_threshold(1_000_000)
def run(arguments):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        with contextlib.suppress(SystemExit):
            cli.main(arguments)
    return peak_nbytes()
for verb in json.loads(sys.argv[1]):
    if not hasattr(os, "fork") or os.fork() == 0:
        small, large = ([part.replace("{}", path) for part in verb] for path in sys.argv[2:])
        print(-run(small) + run(large), flush=True)
        os._exit(0)
    os.wait()
"""


def pickle_of(values: bytes) -> bytes:
    return b"\x80\4" + call(named("m", "C")) + b"0" + named("m", "C") + b"q\0](" + values + b"e."


def grown(verbs: list[tuple[str, ...]], tmp_path: Path, data: bytes) -> list[int]:
    """Return by how many bytes a process grows in each verb, at a file that is like one that it was at, but large."""
    small, large = tmp_path / "small", tmp_path / "large"
    small.write_bytes(pickle_of(b"N"))
    large.write_bytes(data)
    found = []
    for some in [verbs] if hasattr(os, "fork") else [[verb] for verb in verbs]:
        command = [sys.executable, "-c", _GROWN, json.dumps(some), str(small), str(large)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        found += map(int, done.stdout.split())
    return found


def too_large(verbs: dict[str, tuple[str, ...]], tmp_path: Path, data: bytes) -> dict[str, int]:
    """Return the verbs in which a process grows by more than is allowed at a file, and by how many bytes."""
    found = grown(list(verbs.values()), tmp_path, data)
    assert len(found) == len(verbs)
    # Two trees of a few hundred kilobytes have room in what is there for all.
    has_both = len(data) <= MIB // 4 or len(data) > MIB // 2
    allowed = {verb: 2 * len(data) if verb == "diff" and has_both else len(data) for verb in verbs}
    room = (64 if len(data) > MIB // 4 else 16) * MIB
    return {verb: size for verb, size in zip(verbs, found, strict=True) if size >= room + PER_BYTE * allowed[verb]}
