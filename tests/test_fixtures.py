"""Every committed fixture opens, and holds what the JSON beside it says: written from the live model, not by us."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from ckptool import CkptoolError, open_checkpoint
from tests.device.tags import real
from tests.each import each
from tests.scale import exhaustive

INVALID = Path(__file__).parents[1] / "fixtures" / "invalid"
VALID = Path(__file__).parents[1] / "fixtures" / "valid"
CASES = sorted(VALID.glob("*.json"))


@each("case", CASES)
def test_a_fixture_holds_what_its_json_says(case: Path) -> None:
    holds_what_is_said(case)


@exhaustive
def test_a_file_of_a_device_holds_what_was_said_of_the_tensors_there() -> None:
    for path in real().files():
        holds_what_is_said(path.with_suffix(".json"))


def holds_what_is_said(case: Path) -> None:
    expected = json.loads(case.read_text())
    with open_checkpoint(case.with_name(expected["file"])) as checkpoint:
        assert (checkpoint.format, checkpoint.form) == (expected["format"], expected["form"])
        assert list(checkpoint.tensors) == [tensor["name"] for tensor in expected["tensors"]]
        for wanted in expected["tensors"]:
            tensor = checkpoint.tensors[wanted["name"]]
            info = tensor.info
            found = (info.dtype.name, list(info.shape), info.location)
            assert found == (wanted["dtype"], wanted["shape"], wanted["device"]), wanted["name"]
            if wanted["sha256"] is not None and info.storage is not None:
                assert hashlib.sha256(tensor.read()).hexdigest() == wanted["sha256"], wanted["name"]


def test_there_are_fixtures_of_every_device_that_the_tests_name() -> None:
    found: set[str] = set()
    for case in CASES:
        found.update(tensor["device"] for tensor in json.loads(case.read_text())["tensors"])

    assert {"cpu", "cuda:0", "cuda:3", "mps", "xpu:0", "npu:0", "hpu", "xla:0", "meta"} <= found


@pytest.mark.parametrize("path", sorted(INVALID.glob("*.[!m]*")), ids=lambda path: path.name)
def test_an_invalid_fixture_is_named_for_what_it_is(path: Path) -> None:
    with pytest.raises(CkptoolError) as raised:
        open_checkpoint(path)

    assert raised.value.kind == path.stem
    assert raised.value.path == str(path)
