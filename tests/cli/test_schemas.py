"""What ``--json`` prints is what the JSON Schemas in the package say, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from jsonschema import Draft202012Validator

from ckptool.cli import cli
from tests.scale import scaled, step

FIXTURES = Path(__file__).parents[2] / "fixtures"
VALID = [path for path in sorted((FIXTURES / "valid").iterdir()) if path.suffix != ".json"]
ALL = [*VALID, *sorted((FIXTURES / "invalid").iterdir())]
VERBS = ("inspect", "check", "migrate", "diff")


def schema(verb: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(files("ckptool.cli").joinpath("schemas", f"{verb}.json").read_text("utf-8"))
    return found


def valid(verb: str, *arguments: object) -> Any:
    """Run a verb with ``--json``, validate what it prints, and return it."""
    result = CliRunner().invoke(cli, [verb, "--json", *map(str, arguments)])
    assert result.stdout, result.output
    found = json.loads(result.stdout)
    Draft202012Validator(schema(verb)).validate(found)
    return found


def objects(found: Any) -> Iterator[dict[str, Any]]:
    if isinstance(found, dict):
        yield found
        for value in found.values():
            yield from objects(value)
    elif isinstance(found, list):
        for value in found:
            yield from objects(value)


@pytest.mark.parametrize("verb", VERBS)
def test_the_schemas_are_schemas_and_allow_no_other_fields(verb: str) -> None:
    Draft202012Validator.check_schema(schema(verb))
    closed = [found for found in objects(schema(verb)) if "required" in found and "properties" in found]

    assert closed
    for found in closed:
        assert found["additionalProperties"] is False
    assert schema(verb)["$defs"]["error"] == schema("inspect")["$defs"]["error"]
    if "finding" in schema(verb)["$defs"]:
        assert schema(verb)["$defs"]["finding"] == schema("inspect")["$defs"]["finding"]


@pytest.mark.parametrize("verb", ["inspect", "check"])
def test_what_is_printed_about_every_fixture(verb: str) -> None:
    found = valid(verb, *ALL, *(["--deep"] if verb == "check" else []))

    assert [one["path"] for one in found] == [str(path) for path in ALL]
    assert sum("error" in one for one in found) == len(ALL) - len(VALID)
    assert any(finding["command"] for one in found for finding in one.get("findings", ()))
    assert valid(verb, ALL[0]) == found[0] or verb == "check"


@scaled
@pytest.mark.parametrize("options", [[], ["--form", "state_dict", "--dtype", "bfloat16"], ["--form", "safetensors"]])
def test_what_is_printed_about_migrating_every_fixture(options: list[str], tmp_path: Path) -> None:
    found = valid("migrate", *VALID[:: step(4)], *options, "--out-dir", tmp_path)

    assert any(one.get("written") for one in found)
    assert valid("migrate", tmp_path / "missing.pth")["error"]["kind"] == "missing"


@scaled
def test_what_is_printed_about_comparing_fixtures(tmp_path: Path) -> None:
    for a, b in pairwise(ALL[:: step(4)]):
        valid("diff", a, b)
    ones = {"r": torch.ones(3), "c": torch.ones(2, dtype=torch.complex64), "i": torch.ones(1, dtype=torch.int64)}
    other = {"r": torch.tensor([1.0, float("inf"), float("nan")]), "c": torch.zeros(2, dtype=torch.complex64)}
    torch.save(ones, tmp_path / "a.pth")
    torch.save(other | {"i": torch.zeros(1, dtype=torch.int64)}, tmp_path / "b.pth")

    assert len(valid("diff", tmp_path / "a.pth", tmp_path / "b.pth")["values"]) == 3
    assert len(valid("diff", tmp_path / "a.pth", tmp_path / "b.pth", "--atol", "9")["close"]) == 1


def test_what_differs_from_a_schema_is_not_valid() -> None:
    found = valid("inspect", VALID[0])

    for wrong in ({**found, "more": 1}, {**found, "tensors": [{}]}, {**found, "schema": "ckptool.inspect/1"}):
        assert not Draft202012Validator(schema("inspect")).is_valid(wrong)
    del found["form"]
    assert not Draft202012Validator(schema("inspect")).is_valid(found)


def test_an_error_is_the_same_object_whichever_verb_meets_it(tmp_path: Path) -> None:
    path = FIXTURES / "invalid" / "truncated-zip.pth"
    errors = [valid(verb, path, *([VALID[0]] if verb == "diff" else []))["error"] for verb in VERBS]

    assert errors == [errors[0]] * 4
    assert errors[0]["path"] == str(path)
    assert {"path", "kind", "message", "hint", "command", "offset", "needed", "actual"} == set(errors[0])
