"""A slice of the programs in every run; ``python -m tests.fuzz.calls --programs 1000000`` makes more of them."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
from pathlib import Path
from struct import pack

import pytest

from ckptool import check
from tests.build import call, named
from tests.checking.test_safety import CONTAINERS, PIECES
from tests.fuzz.calls import missing, program, run_files, unpickled
from tests.hostile.cases.every import CASES
from tests.scale import exhaustive, scaled, step, times

PROGRAMS = times(3_000, 40_000)
ROOT = Path(__file__).parents[2]


@scaled
def test_no_call_of_python_s_unpickler_is_missing() -> None:
    # In a process of its own, whose memory is limited: lengths that lie make the unpickler ask for much.
    command = [sys.executable, "-m", "tests.fuzz.calls", "--programs", str(PROGRAMS), "--seed", "20261122"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{PROGRAMS:,} programs, 0 with a call that is not told" in done.stdout


@exhaustive
def test_no_call_in_the_hostile_files_is_missing(tmp_path: Path) -> None:
    hostile = [case.make for case in CASES if case.row.startswith("P") and isinstance(case.make, bytes)]
    for number, data in enumerate([one for one in hostile if len(one) < 100_000][:: step(12, 3)]):
        (tmp_path / f"{number}").write_bytes(data)
    for number, packed in enumerate([*CONTAINERS.values(), *PIECES.values()]):
        (tmp_path / f"packed {number}").write_bytes(packed(call(named("os", "system"), "true")))
    command = [sys.executable, "-m", "tests.fuzz.calls", "--files", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    files, calls, lost = (int(word.replace(",", "")) for word in done.stdout.split() if word[0].isdigit())
    assert files == len(list(tmp_path.iterdir()))
    assert calls > files / 4
    assert lost == 0


@pytest.mark.parametrize("forgotten", ["check"])
def test_a_call_that_is_not_listed_is_found_out(
    forgotten: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_bytes(PIECES["npz"](call(named("os", "system"), "true")))
    assert run_files(tmp_path)[2] == []
    silent = check(b"\x80\2N.")
    monkeypatch.setattr(f"tests.fuzz.calls.{forgotten}", lambda *_, **__: silent)
    assert run_files(tmp_path)[2]


@pytest.mark.parametrize(
    "data",
    [
        b"csubprocess\nPopen",
        b"(X\2\0\0\0lsisubprocess\nPopenX",
        b"cm\nC\nI0x10\n\x85R.",
        b"\x80\4\x95\xff\0\0\0\0\0\0\0cm\nC\n)R.",
        b"cm\nC\n)R0(NN",
        b"\x82\7)R.",
        b"(((cm\nC\n)RN.",
    ],
)
def test_what_the_reader_refuses_is_told_too(data: bytes) -> None:
    from tests.fuzz.calls import registered

    registered()
    assert unpickled(data, pickle.Unpickler) or unpickled(data, pickle._Unpickler)  # type: ignore[attr-defined]
    assert missing(data) is None


TORN = {
    "a length beyond the file": (b"\x96\xff\xff\xff\xff", bytes(8)),
    "an index that nothing has": (b"N\x94j\5\0", bytes(4)),
    "no number": (b"Ia", b"7\n"),
    "text that is none": (b"X\3\0\0\0\xff", b"abc"),
}


@pytest.mark.parametrize("which", TORN)
def test_an_opcode_that_goes_wrong_at_the_end_of_its_frame_has_another_reading(which: str) -> None:
    begun, anew = TORN[which]
    data = b"\x80\4\x95" + pack("<Q", len(begun)) + begun + anew + b"cos\nsystem\n)R."

    assert ("calls", "os.system") in unpickled(data, pickle.Unpickler)
    assert missing(data) is None
    assert "system" in {act.grade for act in check(data).acts}


def test_a_frame_that_ends_inside_an_opcode_is_an_error() -> None:
    # From a file, C reads the name "system" of the module "os"; from memory, that of "myos".
    data = b"\x80\2\x95\3\0\0\0\0\0\0\0cmyos\nsystem\n)R."
    assert ("refers", "os.system") in unpickled(data, pickle.Unpickler)
    plain = b"\x80\4\x95\x02\0\0\0\0\0\0\0X\3\0\0\0abc."
    for one in (data, plain, b"\x80\4\x95\x03\0\0\0\0\0\0\0N..."):
        assert "CK205" in {finding.code for finding in check(one).findings}
    assert check(pickle.dumps(["x" * 100_000, {"a": [1] * 9}], 4)).acts == ()


@pytest.mark.parametrize("container", list(CONTAINERS)[:: step(4)])
def test_the_calls_of_a_program_are_listed_in_each_container(container: str) -> None:
    chance = random.Random(3)
    tried = 0
    for _ in range(times(40, 400)):
        data = program(chance)
        noted = {label for kind, label in unpickled(data, pickle.Unpickler) if kind == "calls" and "(" not in label}
        if data[-1:] != b"." or data[:1] != b"\x80" or not noted or b"\x95" in data[2:]:
            continue
        tried += 1
        acts = check(CONTAINERS[container](data[2:-1])).acts
        assert {label for label in noted if "evil" in label and "ext" not in label} <= {act.name for act in acts}
    assert tried
