"""``ckptool diff`` as a person and as a program use it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import build, program
from tests.cli.test_snapshots import CPU, GPU, WEIGHTS, write_variants
from tests.program import VALID, invoke
from tests.scale import in_turn


def run(*arguments: object, code: int = 0) -> str:
    return program.run("diff", *arguments, code=code).stdout


def as_json(*arguments: object, code: int = 0) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    found: dict[str, Any] = json.loads(run("--json", *arguments, code=code), parse_constant=refuse)
    return found


@pytest.fixture
def at_fixtures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Stand in a folder with the fixtures and files that differ from them in some way."""
    for name in (GPU, CPU, WEIGHTS):
        shutil.copy(VALID / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    write_variants(tmp_path)


@pytest.mark.usefixtures("at_fixtures")
def test_json_has_the_published_shape() -> None:
    found = as_json("weights.pth", "tuned.pth", code=1)

    assert found["schema"] == "ckptool.diff/2"
    assert found["same"] is False
    assert (found["a"], found["scope"]) == (
        {"path": "weights.pth", "format": "torch_zip", "form": "state_dict", "key": "", "also_under": []},
        "weights",
    )
    assert found["counts"]["values"] == 4
    values = {value["name"]: value for value in found["values"]}
    found = values["module.conv1.weight"]
    assert (found["numel"], found["differing"], found["at"]) == (150, 1, [2, 0, 1, 3])
    assert found["max_abs"] == abs(found["a"] - found["b"]) == pytest.approx(0.5)
    assert values["module.out.bias"]["b"] == "nan"
    changed = as_json("weights.pth", "half.pth", code=1)
    assert changed["shapes"] == [{"name": "module.out.weight", "a": [10, 60], "b": [5, 60]}]
    assert changed["dtypes"][0] == {"name": "module.conv1.weight", "a": "float32", "b": "bfloat16"}


@pytest.mark.usefixtures("at_fixtures")
def test_the_exit_code_says_whether_they_are_the_same() -> None:
    run("weights.pth", "weights.pth", code=0)
    run("weights.pth", "tuned.pth", code=1)
    run("weights.pth", "nowhere.pth", code=2)
    run("weights.pth", code=2)
    run("weights.pth", "tuned.pth", "--rtol", "-1", code=2)


@pytest.mark.usefixtures("at_fixtures")
def test_keys_name_the_state_dicts() -> None:
    assert run(GPU, CPU, "--key-a", "model", "--ignore-wrappers", "--ignore-device").splitlines()[-1] == (
        "the same: 11 tensors"
    )
    result = program.run("diff", GPU, CPU, "--key-b", "nothing", code=2)
    assert [line.partition(":")[0] for line in result.stderr.splitlines()] == ["Error", "Hint"]


def test_a_bad_file_prints_two_lines_or_an_object(tmp_path: Path) -> None:
    broken = tmp_path / "broken.pth"
    broken.write_bytes((VALID / GPU).read_bytes()[:5000])
    result = program.run("diff", VALID / GPU, broken, code=2)

    assert [line.partition(":")[0] for line in result.stderr.splitlines()] == ["Error", "Hint"]
    error = as_json(VALID / GPU, broken, code=2)["error"]
    assert (error["kind"], error["path"]) == ("truncated-zip", str(broken))


def test_control_characters_never_reach_the_terminal(tmp_path: Path) -> None:
    evil = "\x1b[2J\u202egpj\r"

    def file(name: str, **others: Any) -> Path:
        path = tmp_path / name
        stored = build.storage(location=f"cuda{evil}")
        path.write_bytes(build.torch_zip({evil: build.tensor(stored), **others}, {"0": build.floats()}))
        return path

    paths = file("a", extra=evil, lost=[evil]), file("b", extra=evil + evil, **{evil + "x": {}})
    for arguments in ([], ["--quiet"], ["--no-values"], ["--ignore-device"]):
        shown = run(*paths, *arguments, code=1)
        assert all(char.isprintable() or char == "\n" for char in shown)


@pytest.mark.parametrize(
    ("renamed", "key"),
    in_turn(
        [
            lambda name: f"module.{name}",
            lambda name: name.replace("net.", "encoder.").replace("head.", "classifier."),
        ],
        ["", "state_dict"],
    ),
)
def test_where_names_alone_differ_a_command_aligns_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renamed: Callable[[str], str], key: str
) -> None:
    monkeypatch.chdir(tmp_path)
    names = [f"net.{at}.{one}" for at in range(3) for one in ("weight", "bias")] + ["head.weight", "head.bias"]
    weights = {name: torch.full((at + 1,), float(at)) for at, name in enumerate(names)}
    torch.save(weights, "a.pth")
    other = {renamed(name): values for name, values in weights.items()}
    torch.save({key: other, "epoch": 3} if key else other, "b.pth")

    done = invoke(["diff", "a.pth", "b.pth"])
    (command,) = (line for line in done.stderr.splitlines() if line.startswith("Run: "))
    written = invoke([*shlex.split(command)[2:], "-q"])

    assert (done.exit_code, written.exit_code) == (1, 0)
    assert invoke(["diff", "a.pth", written.stdout.strip()]).exit_code == 0
    assert "Run: " not in invoke(["diff", "a.pth", "b.pth", "-q"]).output


def test_no_command_aligns_what_has_other_tensors(tmp_path: Path) -> None:
    torch.save({"a.weight": torch.ones(2), "a.bias": torch.ones(3)}, tmp_path / "a.pth")
    torch.save({"b.weight": torch.ones(7), "c.scale": torch.ones(9)}, tmp_path / "b.pth")

    assert "Run: " not in invoke(["diff", str(tmp_path / "a.pth"), str(tmp_path / "b.pth")]).output


def test_what_is_quantised_on_one_side_alone_has_a_hint(tmp_path: Path) -> None:
    weight, scale = torch.randn(4, 8), torch.rand(4, 1)
    quantised = {"m.weight": (weight / scale).to(torch.float8_e4m3fn), "m.weight_scale": scale}
    torch.save(quantised, tmp_path / "q.pth")
    torch.save({"m.weight": weight}, tmp_path / "plain.pth")
    for pair in (("q.pth", "plain.pth"), ("plain.pth", "q.pth")):
        found = program.run("diff", *(tmp_path / name for name in pair), code=1)
        (command,) = re.findall("Run: ckptool (.*)", found.stderr)
        assert f"{tmp_path / 'q.pth'} is quantised: to compare what its values stand for" in found.stderr
        assert shlex.split(command) == ["migrate", str(tmp_path / "q.pth"), "--form", "state_dict", "--dequantize"]
    torch.save({"m.weight": weight.double(), "more": weight}, tmp_path / "other.pth")
    assert "Hint" not in program.run("diff", tmp_path / "plain.pth", tmp_path / "other.pth", code=1).stderr
    assert "Hint" not in program.run("diff", tmp_path / "q.pth", tmp_path / "q.pth").stderr
