"""Memory that a verb takes for each byte of a file: of pickles that are nothing but small objects, each of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from time import process_time
from typing import Any

import pytest

from tests import scale
from tests.build import named
from tests.formats.said import refused
from tests.hostile.cases.pickles import zipped
from tests.hostile.growth import SHAPES, pickle_of, too_large
from tests.program import invoke
from tests.scale import exhaustive

VERBS: dict[str, tuple[str, ...]] = {
    "inspect": ("inspect", "{}"),
    "inspect --json": ("inspect", "--json", "{}"),
    "check": ("check", "{}"),
    "check --json": ("check", "--json", "{}"),
    "stat": ("stat", "{}"),
    "migrate": ("migrate", "{}", "{}.pth"),
    "migrate --form same": ("migrate", "--form", "same", "--keep-calls", "{}", "{}.same.pth"),
    "migrate --form state_dict": ("migrate", "--form", "state_dict", "{}", "{}.weights.pth"),
    "migrate --form safetensors": ("migrate", "--form", "safetensors", "{}", "{}.safetensors"),
    "diff": ("diff", "{}", "{}"),
}
LINES = b"".join(b"c%x\n\n" % number for number in range(200_000))


def turns() -> Iterator[Any]:
    """Yield shapes of objects, and verbs in turn, so that each verb gets several shapes; with ``--scale 2``, all."""
    for number, shape in enumerate(SHAPES):
        verbs = list(VERBS) if scale.scale > 1 else list(VERBS)[number % 4 :: 4]
        if number % 10 == 0:
            yield shape, verbs
        elif scale.scale > number % 2:  # of two shapes, one
            yield pytest.param(shape, verbs, marks=scale.exhaustive)


@pytest.mark.parametrize("nbytes", [125_000, 500_000, 4_000_000] if scale.scale > 1 else [125_000])
@pytest.mark.parametrize(("shape", "verbs"), list(turns()))
def test_a_pickle_of_small_objects_takes_so_much_memory_for_each_byte(
    shape: str, verbs: list[str], nbytes: int, tmp_path: Path
) -> None:
    data = pickle_of(SHAPES[shape] * (nbytes // len(SHAPES[shape])))
    assert too_large({verb: VERBS[verb] for verb in verbs}, tmp_path, data) == {}


@exhaustive
def test_more_names_than_any_program_has_are_refused(tmp_path: Path) -> None:
    from ckptool import LimitExceeded

    assert refused(pickle_of(LINES), LimitExceeded).kind == "too-many-names"
    assert too_large({"check": VERBS["check"]}, tmp_path, pickle_of(LINES)) == {}


@pytest.mark.parametrize("opcode", [b"\x8f", b"("])
def test_more_lists_than_half_the_bytes_are_refused(opcode: bytes) -> None:
    from ckptool import LimitExceeded, open_checkpoint

    assert refused(b"\x80\4" + opcode * 2_200_000 + b".", LimitExceeded).kind == "pickle-bomb"
    if opcode != b"(":
        assert open_checkpoint(b"\x80\4](" + opcode * 880_000 + b"e.").root


NAMED = named("a", "B") + b"q\0010"
ONE_LIST = {
    "many calls of one list of arguments": NAMED + b"(" + b"N" * 30_000 + b"tq\0020](" + b"h\1h\2R" * 3_000 + b"e",
    "many mappings of one list of pairs": b"](" + b"NN\x86" * 10_000 + b"e\x85q\0020"
    + named("collections", "OrderedDict") + b"q\0010](" + b"h\1h\2R" * 3_000 + b"e",
}  # fmt: skip


@pytest.mark.parametrize("shared", ONE_LIST)
@pytest.mark.parametrize("verb", ["inspect", "check"])
def test_what_many_calls_share_is_walked_once(shared: str, verb: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(zipped(ONE_LIST[shared]))
    started = process_time()
    assert invoke([verb, str(path)]).exit_code in (0, 1, 2)
    assert process_time() - started < 6  # one walk for each call takes more than ten
