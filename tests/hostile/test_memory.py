"""Memory that a call takes for each byte of a file: of pickles that are nothing but small objects, each of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.hostile.cases.pickles import BOMBS
from tests.hostile.growth import SHAPES, on_linux, pickle_of, shapes, too_large
from tests.scale import some, times

VERBS: dict[str, tuple[str, ...]] = {
    "inspect": ("inspect", "{}"),
    "inspect --json": ("inspect", "--json", "{}"),
    "check": ("check", "{}"),
    "check --json": ("check", "--json", "{}"),
    "stat": ("stat", "{}"),
}
LINES = b"".join(b"c%x\n\n" % number for number in range(150_000))


@on_linux
@pytest.mark.parametrize("nbytes", [500_000, 4_000_000][: times(1, 1)])  # the larger with --scale 2
@pytest.mark.parametrize("shape", some(shapes(), 3))
def test_a_pickle_of_small_objects_takes_so_much_memory_for_each_byte(shape: str, nbytes: int, tmp_path: Path) -> None:
    data = pickle_of(SHAPES[shape] * (nbytes // len(SHAPES[shape])))
    assert too_large(VERBS, tmp_path, data) == {}


@on_linux
def test_more_names_than_any_program_has_are_refused(tmp_path: Path) -> None:
    from ckptool import LimitExceeded, open_checkpoint

    with pytest.raises(LimitExceeded) as caught:
        open_checkpoint(pickle_of(LINES))
    assert caught.value.kind == "too-many-names"
    assert too_large({"check": VERBS["check"]}, tmp_path, pickle_of(LINES)) == {}


@pytest.mark.parametrize("opcode", [b"]", b"\x8f", b"("])
def test_more_lists_than_half_the_bytes_are_refused(opcode: bytes) -> None:
    from ckptool import LimitExceeded
    from ckptool.pickles.reader import read_pickle
    from ckptool.sources.source import BytesSource

    with pytest.raises(LimitExceeded) as caught:
        read_pickle(BytesSource(b"\x80\4" + opcode * 4_200_000 + b"."))
    assert caught.value.kind == "pickle-bomb"
    if opcode != b"(":
        assert read_pickle(BytesSource(b"\x80\4](" + opcode * 880_000 + b"e.")).root


@pytest.mark.parametrize("shared", ["many calls of one list of arguments", "many mappings of one list of pairs"])
def test_what_many_calls_share_is_walked_once(shared: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(BOMBS[shared][0])
    for verb in ("inspect", "check"):
        command = [sys.executable, "-m", "ckptool", verb, str(path)]
        assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode in (0, 1, 2)
