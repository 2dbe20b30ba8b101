"""A slice of the fuzzing in every run, with a fixed seed; ``python -m tests.fuzz`` goes on for as long as one likes."""

from __future__ import annotations

import pickletools
import random

import pytest

import ckptool
from ckptool import LazyTensor
from tests import build
from tests.fuzz.__main__ import run
from tests.fuzz.mutants import FAMILIES, OPCODES, mutant, program
from tests.fuzz.oracle import judge
from tests.scale import scaled, times

SEED = 20_260_214
FILES = times(1_200, 6_000)


@scaled
@pytest.mark.filterwarnings("ignore")  # torch's own, about what it refuses
def test_no_file_has_another_error_or_another_reading() -> None:
    seen, bugs = run(SEED, max(60, FILES / 100), FILES)

    assert [(one.family, one.number, what) for one, what in bugs] == []
    assert sum(seen.values()) >= FILES
    for family in FAMILIES:
        # If all were refused, nothing would have been compared.
        assert seen[f"{family} compared"] > 0, family
    assert sum(count for what, count in seen.items() if "compared" in what) > FILES // 20


def test_the_programs_are_made_of_all_opcodes() -> None:
    assert set(OPCODES) == {ord(opcode.code) for opcode in pickletools.opcodes}
    seen = set(b"".join(program(random.Random(number)) for number in range(400)))

    assert set(OPCODES) <= seen


def test_a_file_is_the_same_for_the_same_seed() -> None:
    for family in FAMILIES:
        assert mutant(3, family, 5) == mutant(3, family, 5)
        assert mutant(3, family, 5).data != mutant(4, family, 5).data


@pytest.mark.parametrize("name", ["torch_zip", "torch_legacy", "safetensors"])
def test_a_reader_that_gives_other_bytes_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = build.one_of_each()[name]
    assert judge(data) == "compared"
    read = LazyTensor.read
    monkeypatch.setattr(LazyTensor, "read", lambda self, **named: read(self, **named)[::-1])

    with pytest.raises(AssertionError):
        judge(data)


def test_a_reader_that_breaks_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise IndexError

    monkeypatch.setattr(ckptool, "load", broken)

    with pytest.raises(IndexError):
        judge(build.one_of_each()["torch_zip"])
