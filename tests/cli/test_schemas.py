"""What ``--json`` prints is what the JSON Schemas in the package say, and nothing else."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator

from tests.program import INVALID, OURS, invoke, validated
from tests.scale import scaled, step

ALL = [*OURS, *sorted(INVALID.iterdir())]
VERBS = ("inspect", "check", "migrate", "diff")
SCHEMAS = sorted(path.name.removesuffix(".json") for path in files("ckptool.cli").joinpath("schemas").iterdir())


def schema(verb: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(files("ckptool.cli").joinpath("schemas", f"{verb}.json").read_text("utf-8"))
    return found


def valid(verb: str, *arguments: object, by: str | None = None) -> Any:
    """Run a verb with ``--json``, validate what it prints by the schema of this name, and return it."""
    result = invoke([verb, "--json", *arguments])
    assert result.stdout, result.output
    return validated(json.loads(result.stdout), by or verb)


def objects(found: Any) -> Iterator[dict[str, Any]]:
    if isinstance(found, dict):
        yield found
        for value in found.values():
            yield from objects(value)
    elif isinstance(found, list):
        for value in found:
            yield from objects(value)


@pytest.mark.parametrize("verb", SCHEMAS)
def test_the_schemas_are_schemas_and_allow_no_other_fields(verb: str) -> None:
    Draft202012Validator.check_schema(schema(verb))
    closed = [found for found in objects(schema(verb)) if "required" in found and "properties" in found]

    assert closed
    for found in closed:
        assert found["additionalProperties"] is False
    for shared in {"error", "finding"} & schema(verb)["$defs"].keys():
        assert schema(verb)["$defs"][shared] == schema("inspect")["$defs"][shared]


def test_each_schema_has_the_name_and_number_of_the_objects_that_it_describes() -> None:
    assert set(SCHEMAS) == {*VERBS, "codes", "devices", "explain", "scan", "stat", "summary", "tensors"}
    for verb in SCHEMAS:
        names = {found["schema"]["const"] for found in objects(schema(verb)) if "const" in found.get("schema", ())}
        kind, _, number = schema(verb)["$id"].removeprefix("urn:ckptool:schema:").partition(":")
        assert (kind, names) == (verb, {f"ckptool.{verb}/{number}"})


@pytest.mark.parametrize("verb", ["inspect", "check"])
def test_what_is_printed_about_every_fixture(verb: str) -> None:
    some = ALL[:: step(4)]
    found = valid(verb, *some, *(["--deep"] if verb == "check" else []))

    assert [one["path"] for one in found] == [str(path) for path in some]
    assert sum("error" in one for one in found) == len({*some} - {*OURS})
    assert any(finding["command"] for one in found for finding in one.get("findings", ()))
    assert valid(verb, some[0]) == found[0] or verb == "check"


@scaled
@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--form", "state_dict", "--dtype", "bfloat16"],
        ["--form", "safetensors"],
        ["--max-shard-size", "40KB"],
    ],
)
def test_what_is_printed_about_migrating_every_fixture(options: list[str], tmp_path: Path) -> None:
    found = valid("migrate", *OURS[:: step(4)], *options, "--out-dir", tmp_path)

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


def test_what_is_printed_about_the_values_of_fixtures() -> None:
    found = valid("stat", *ALL[:: step(4)])

    assert any(row["values"] is None for one in found for row in one.get("rows", ()))
    assert any("error" in one for one in found)


def test_an_error_is_the_same_object_whichever_verb_meets_it(tmp_path: Path) -> None:
    path = INVALID / "truncated-zip.pth"
    errors = [valid(verb, path, *([OURS[0]] if verb == "diff" else []))["error"] for verb in VERBS]

    assert errors == [errors[0]] * 4
    assert errors[0]["path"] == str(path)
    assert {"path", "kind", "message", "hint", "command", "offset", "needed", "actual"} == set(errors[0])


def test_what_is_printed_about_messages_codes_and_devices() -> None:
    message = "KeyError: 'state_dict'"
    for arguments in ([message], [message, OURS[0]], ["hello"], [message, "absent.pth"], [message, ALL[-1]]):
        valid("check", "--explain", *arguments, by="explain")
    assert len(valid("check", "--list", by="codes")["codes"]) > 30
    assert valid("devices")["devices"][0]["device"] == "cpu"


def test_devices_without_torch_is_an_error_in_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "ckptool.torch_ops.devices", raising=False)

    assert valid("devices")["error"]["kind"] == "missing-package"


@pytest.mark.parametrize("option", [["--like", str(ALL[-1])], ["--like", "absent.pth"], ["--model", "absent:Model"]])
def test_what_a_file_cannot_be_compared_with_is_an_error_in_json(option: list[str]) -> None:
    one = valid("check", *option, OURS[0])
    assert one["verdict"] == "not looked at"
    assert one["error"]["path"] in (option[1], None)
    several = valid("check", *option, *OURS[:2])
    assert [found["path"] for found in several] == list(map(str, OURS[:2]))
