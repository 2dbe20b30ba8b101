"""Memory that a call takes for each byte of a file: of pickles that are nothing but small objects, each of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.build import call, named
from tests.hostile.cases.pickles import BOMBS
from tests.scale import some, times

pytest.importorskip("resource", reason="the size of a process is told by POSIX's call")

MIB = 1 << 20
PER_BYTE = 40
"""Bytes of memory for each byte of the file, and with them 64 MiB for all."""
VERBS: dict[str, tuple[str, ...]] = {
    "inspect": ("inspect", "{}"),
    "inspect --json": ("inspect", "--json", "{}"),
    "check": ("check", "{}"),
    "migrate": ("migrate", "{}", "{}.pth"),
    "migrate --form same": ("migrate", "--form", "same", "--keep-calls", "{}", "{}.same.pth"),
    "migrate --form state_dict": ("migrate", "--form", "state_dict", "{}", "{}.weights.pth"),
    "diff": ("diff", "{}", "{}"),
}
LINES = b"".join(b"c%x\n\n" % number for number in range(150_000))
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
GROWN = """
import gc, io, json, resource, sys, contextlib
from ckptool.cli import cli
gc.set_threshold(1_000_000)
def run(arguments):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        with contextlib.suppress(SystemExit):
            cli.main(arguments)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
small, large = ([part.replace("{}", path) for part in json.loads(sys.argv[1])] for path in sys.argv[2:])
print(-run(small) + run(large))
"""


def grown(verb: str, tmp_path: Path, data: bytes) -> int:
    """Return by how many bytes a process grows at a file, that has been at one that is like it and small."""
    small, large = tmp_path / "small", tmp_path / "large"
    small.write_bytes(pickle_of(b"N"))
    large.write_bytes(data)
    command = [sys.executable, "-c", GROWN, json.dumps(VERBS[verb]), str(small), str(large)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout) << 10


def pickle_of(values: bytes) -> bytes:
    return b"\x80\4" + call(named("m", "C")) + b"0" + named("m", "C") + b"q\0](" + values + b"e."


@pytest.mark.parametrize("nbytes", [500_000, 4_000_000][: times(1, 1)])  # the larger with --scale 2
@pytest.mark.parametrize("verb", some(VERBS, 4))
@pytest.mark.parametrize("shape", some(SHAPES, 6))
def test_a_pickle_of_small_objects_takes_so_much_memory_for_each_byte(
    verb: str, shape: str, nbytes: int, tmp_path: Path
) -> None:
    data = pickle_of(SHAPES[shape] * (nbytes // len(SHAPES[shape])))
    assert grown(verb, tmp_path, data) < 64 * MIB + PER_BYTE * len(data)


def test_more_names_than_any_program_has_are_refused(tmp_path: Path) -> None:
    from ckptool import LimitExceeded, open_checkpoint

    with pytest.raises(LimitExceeded) as caught:
        open_checkpoint(pickle_of(LINES))
    assert caught.value.kind == "too-many-names"
    assert grown("check", tmp_path, pickle_of(LINES)) < 64 * MIB + PER_BYTE * len(LINES)


@pytest.mark.parametrize("opcode", [b"]", b"\x8f", b"("])
def test_more_lists_than_half_the_bytes_are_refused(opcode: bytes) -> None:
    from ckptool import LimitExceeded
    from ckptool.pickles.reader import read_pickle
    from ckptool.sources.source import BytesSource

    with pytest.raises(LimitExceeded) as caught:
        read_pickle(BytesSource(b"\x80\4" + opcode * 4_200_000 + b"."))
    assert caught.value.kind == "pickle-bomb"
    if opcode != b"(":
        assert read_pickle(BytesSource(b"\x80\4](" + opcode * 300_000 + b"e.")).root


@pytest.mark.parametrize("shared", ["many calls of one list of arguments", "many mappings of one list of pairs"])
def test_what_many_calls_share_is_walked_once(shared: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(BOMBS[shared][0])
    for verb in ("inspect", "check"):
        command = [sys.executable, "-m", "ckptool", verb, str(path)]
        assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode in (0, 1, 2)
