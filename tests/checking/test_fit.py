"""``check --like`` and ``--model``: held against what load_state_dict() itself says."""

from __future__ import annotations

import json
import shlex
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from ckptool import CheckReport, CkptoolError, MigrationRefused, check, load_into
from tests.program import invoke, run
from tests.scale import in_turn, some


class Net(nn.Module):
    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.head = nn.Linear(6, classes)


SPEC = f"{Net.__module__}:{Net.__name__}"


def wrapped(prefix: str) -> Callable[[OrderedDict[str, torch.Tensor]], object]:
    return lambda state: OrderedDict((f"{prefix}{name}", value) for name, value in state.items())


CASES: dict[str, Callable[[OrderedDict[str, torch.Tensor]], object]] = {
    "data parallel": wrapped("module."),
    "compiled": wrapped("module._orig_mod."),
    "private": wrapped("_module."),
    "a prefix": wrapped("model."),
    "a checkpoint": lambda state: {"epoch": 3, "state_dict": wrapped("module.")(state)},
    "beside another": lambda state: {**wrapped("model.")(state), "loss.weight": torch.ones(3)},  # type: ignore[dict-item]
    "other component": lambda state: OrderedDict((k.replace("head.", "fc."), v) for k, v in state.items()),
}


def write(folder: Path, value: object) -> Path:
    path = folder / "file.pth"
    torch.save(value, path)
    return path


def commands(report: CheckReport) -> list[list[str]]:
    commands = [finding.command for finding in report.findings if finding.code.startswith("CK6")]
    return [shlex.split(command) for command in commands if command]


def migrated(command: list[str]) -> Path:
    result = run(*command[1:], "--force", "--json")
    return Path(json.loads(result.output)["target"])


@pytest.mark.parametrize("case", CASES)
def test_the_command_in_the_hint_makes_a_file_that_the_model_takes(case: str, tmp_path: Path) -> None:
    model = Net()
    path = write(tmp_path, CASES[case](model.state_dict()))  # type: ignore[arg-type]
    report = check(path, model=SPEC)

    assert report.worst == "warning"
    target = migrated(commands(report)[0])
    fresh = Net()
    fresh.load_state_dict(torch.load(target), strict=True)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in fresh.state_dict().items())
    assert check(target, model=SPEC).worst == "info"


def test_what_fits_is_said_to_fit(tmp_path: Path) -> None:
    report = check(write(tmp_path, Net().state_dict()), model=SPEC)

    (finding,) = report.findings
    assert (finding.code, finding.severity) == ("CK601", "info")
    assert finding.message == f"all 9 names and shapes are those of {SPEC}"


@pytest.mark.parametrize("lacking", [[], ["stem.bias"]])
def test_missing_unexpected_and_reshaped_are_those_of_load_state_dict(lacking: list[str], tmp_path: Path) -> None:
    state = Net(classes=7).state_dict()
    for name in (*lacking, "norm.num_batches_tracked"):
        del state[name]
    state["extra.weight"] = torch.ones(1)
    report = check(write(tmp_path, state), model=SPEC)
    found = {(finding.code, finding.severity): finding.message for finding in report.findings}

    assert found.get(("CK603", "warning")) == ("1 missing: stem.bias" if lacking else None)
    assert found["CK603", "info"] == "1 missing that models compute themselves: norm.num_batches_tracked"
    assert found["CK604", "warning"] == "1 unexpected: extra.weight"
    shapes = "2 of another shape: head.weight is [7, 6], not [10, 6], head.bias is [7], not [10]"
    assert found["CK605", "warning"] == shapes
    if lacking:  # who leaves something out would lose what may be this one
        assert commands(report) == []
        assert not any("strict" in (one.hint or "") for one in report.findings)
        return
    # The hint of the last one leaves them out, and the rest loads.
    rest = torch.load(migrated(commands(report)[-1]))
    answer = Net().load_state_dict(rest, strict=False)
    assert answer.unexpected_keys == []
    assert set(answer.missing_keys) == {"norm.num_batches_tracked", "head.weight", "head.bias"}


def test_two_networks_in_one_file_are_not_chosen_between(tmp_path: Path) -> None:
    state = Net().state_dict()
    both = OrderedDict((f"{who}.{name}", value) for who in ("student", "teacher") for name, value in state.items())
    report = check(write(tmp_path, both), model=SPEC)

    (finding,) = [one for one in report.findings if one.code == "CK606"]
    assert "--strip-prefix student, --strip-prefix teacher" in finding.message
    Net().load_state_dict(torch.load(migrated(commands(report)[0])), strict=True)


def test_no_hint_is_about_an_option_of_another_verb(tmp_path: Path) -> None:
    torch.save({"epoch": 3}, tmp_path / "none.pth")
    torch.save({"w": torch.ones(2)}, tmp_path / "like.pth")
    (found,) = (one for one in check(tmp_path / "none.pth", like=tmp_path / "like.pth").findings if one.code == "CK600")

    assert "there are no weights" in found.message
    assert found.hint is None


def test_another_checkpoint_stands_in_for_the_model_without_torch(tmp_path: Path) -> None:
    other = tmp_path / "other.pth"
    torch.save(Net().state_dict(), other)
    path = write(tmp_path, wrapped("module.")(Net().state_dict()))  # type: ignore[arg-type]
    report = check(path, like=other)

    assert [one.code for one in report.findings] == ["CK301", "CK602"]
    assert check(other, like=other).worst == "info"


def test_a_state_dict_is_picked_by_its_key(tmp_path: Path) -> None:
    state = Net().state_dict()
    path = write(tmp_path, {"first": state, "second": wrapped("module.")(state)})  # type: ignore[arg-type]

    assert [one.code for one in check(path, model=SPEC).findings if one.code[:3] == "CK6"] == ["CK600"]
    assert [one.code for one in check(path, model=SPEC, key="first").findings if one.code[:3] == "CK6"] == ["CK601"]
    assert [one.code for one in check(path, model=SPEC, key="second").findings if one.code[:3] == "CK6"] == ["CK602"]


@pytest.mark.parametrize("spec", ["no_such_package.module:Net", f"{Net.__module__}:NoNet", "nothing"])
def test_a_model_that_cannot_be_built_is_refused(spec: str, tmp_path: Path) -> None:
    path = write(tmp_path, Net().state_dict())
    with pytest.raises(MigrationRefused):
        check(path, model=spec)
    assert "no_such_package" not in sys.modules
    result = run("check", path, "--model", spec, code=2)
    assert result.stderr.startswith("Error: ")


def test_a_rename_is_suggested_where_a_name_is_missing_and_one_like_it_is_left(tmp_path: Path) -> None:
    state = OrderedDict((name.replace("head.", "fc."), value) for name, value in Net().state_dict().items())
    report = check(write(tmp_path, state), model=SPEC)
    (finding,) = [one for one in report.findings if one.code == "CK603"]

    assert finding.message == "2 missing: head.weight (like fc.weight?), head.bias (like fc.bias?)"
    assert finding.hint == "If these are the same tensors, rename them."
    assert finding.command is not None


def test_many_unexpected_names_are_left_out_by_their_heads(tmp_path: Path) -> None:
    state = Net().state_dict()
    state.update({f"decoder.{index}.weight": torch.ones(1) for index in range(20)})
    report = check(write(tmp_path, state), model=SPEC)

    Net().load_state_dict(torch.load(migrated(commands(report)[0])), strict=True)


def test_a_model_with_wrappers_inside_is_seen_through(tmp_path: Path) -> None:
    wrapped_inside = OrderedDict(
        (name.replace("stem.", "stem._orig_mod."), value) for name, value in Net().state_dict().items()
    )
    other = tmp_path / "other.pth"
    torch.save(wrapped_inside, other)
    (finding,) = check(write(tmp_path, Net().state_dict()), like=other).findings

    assert (finding.code, finding.severity) == ("CK601", "info")
    assert finding.hint == "Load it before the model is wrapped."


def state_of(**sizes: int) -> dict[str, torch.Tensor]:
    """Return tensors of these numbers of elements; two underscores in a name are a dot."""
    return {name.replace("__", "."): torch.ones(size) for name, size in sizes.items()}


LAYERS = {f"body.{index}.weight": torch.ones(3) for index in range(12)}
EXPECTED: dict[str, dict[str, torch.Tensor]] = {
    "two layers": state_of(head__weight=3, head__bias=2),
    "many layers": {**LAYERS, "head.weight": torch.ones(4)},
    "no dots": state_of(weight=3, bias=2),
}
FOUND: dict[str, dict[str, torch.Tensor]] = {
    "others, wrapped": {f"module.{name}x": value for name, value in LAYERS.items()},
    "few others": state_of(fc__weight=5, fc__bias=6),
    "as many as there are options for": state_of(**{f"n{index}": 9 for index in range(8)}),
    "others without dots": state_of(**{f"n{index}": 9 for index in range(9)}),
    "all reshaped": {name: torch.ones(7) for names in EXPECTED.values() for name in names},
    "reshaped beside paired": {**LAYERS, **{f"body.{index}.weight": torch.ones(9) for index in range(2, 12)}},
    "reshaped beside others": {"head.weight": torch.ones(8), "other.weight": torch.ones(3)},
    "paired beside others": {**EXPECTED["two layers"], **{f"other.{index}": torch.ones(1) for index in range(9)}},
    "prefixed beside others": {f"model.{name}": value for name, value in LAYERS.items()} | state_of(loss=1),
    "heads and names": {**LAYERS, **{f"loss.{index}": torch.ones(1) for index in range(8)}, "scale": torch.ones(1)},
    "renamed": {name.replace("body", "trunk"): value for name, value in LAYERS.items()},
    "nothing but a prefix": {f"module.{name}": torch.ones(7) for name in LAYERS},
}


@pytest.mark.parametrize(("expected", "found"), some(in_turn(EXPECTED, FOUND), 2))
def test_no_command_in_a_hint_leaves_nothing(found: str, expected: str, tmp_path: Path) -> None:
    other = tmp_path / "other.pth"
    torch.save(EXPECTED[expected], other)
    report = check(write(tmp_path, FOUND[found]), like=other)

    for command in commands(report):
        assert torch.load(migrated([*command, "--allow-empty"])), command


def test_the_commands_of_one_file_leave_out_what_they_say(tmp_path: Path) -> None:
    other = tmp_path / "other.pth"
    torch.save(EXPECTED["many layers"], other)
    found = {**FOUND["heads and names"], "head.weight": torch.ones(4)}
    (command,) = commands(check(write(tmp_path, found), like=other))

    assert list(torch.load(migrated(command))) == list(EXPECTED["many layers"])


@pytest.mark.parametrize("count", [2, 12])
def test_a_file_of_another_model_is_said_to_be_one(count: int, tmp_path: Path) -> None:
    state = OrderedDict((f"module.conv{index}.scale", torch.ones(index + 20)) for index in range(count))
    report = check(write(tmp_path, state), model=SPEC)
    hints = {one.code: one.hint for one in report.findings if one.code in ("CK603", "CK604") and one.severity != "info"}

    hint = f"Check that this file and {SPEC} belong together: they have no name in common."
    assert hints == {"CK603": hint, "CK604": hint}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.b.weight = self.a.weight


WEIGHT = torch.eye(2)
OTHERS: dict[str, tuple[torch.Tensor, torch.Tensor, str]] = {
    "complex": (WEIGHT * 1j, WEIGHT * 1j, "'a.weight' is complex64, the model's float32"),
    "codes": (WEIGHT.to(torch.int8), WEIGHT.to(torch.int8), "2 tensors of integers, as quantised weights are"),
    "sparse": (WEIGHT.to_sparse(), WEIGHT.to_sparse(), "is sparse_coo, the model's strided"),
    "meta": (WEIGHT.to("meta"), WEIGHT.to("meta"), "has no bytes"),
    "two values": (WEIGHT, WEIGHT * 2, "a.weight and b.weight"),
}


@pytest.mark.parametrize("how", OTHERS)
def test_what_load_into_refuses_does_not_fit(how: str, tmp_path: Path) -> None:
    first, second, fact = OTHERS[how]
    path, spec = write(tmp_path, {"a.weight": first, "b.weight": second}), f"{Tied.__module__}:{Tied.__name__}"
    with pytest.raises(CkptoolError):
        load_into(Tied(), path)
    found = [one for one in check(path, model=spec).findings if one.code == "CK607"]
    assert [fact in one.message for one in found] == [True]
    for options in ([], ["--dry-run"]):
        result = invoke(["migrate", str(path), str(tmp_path / "out.pth"), "--model", spec, *options])
        assert (result.exit_code, "unforeseen" in result.output) in ((1, False), (2, False)), result.output
    path = write(tmp_path, {"a.weight": WEIGHT, "b.weight": WEIGHT.clone()})
    assert {one.code for one in check(path, model=spec).findings} == {"CK601"}
    assert invoke(["migrate", str(path), str(tmp_path / "out.pth"), "--model", spec]).exit_code == 0
