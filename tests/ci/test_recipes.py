"""The recipes for pipelines: what they run is run here, on a folder as they expect it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.build import call, floats, named, storage, tensor, torch_zip
from tests.missing import on_windows
from tests.program import invoke

HERE = Path(__file__).parent
ACTION = HERE.parents[1] / ".github" / "actions" / "check" / "action.yml"
TREES = {
    "fine.pth": None,
    "ours.pth": call(named("ourproject.net", "Config")),
    "bad.pth": call(named("os", "system"), "true"),
}


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "models").mkdir()
    for name, x in TREES.items():
        (tmp_path / "models" / name).write_bytes(torch_zip({"w": tensor(storage()), "x": x}, {"0": floats()}))
    shutil.copy(HERE / "policy.toml", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_commands_of_the_recipes_fail_for_what_is_bad_and_pass_without_it(repository: Path) -> None:
    commands = [
        line.strip(" '")
        for name in ("gitlab.yml", "Jenkinsfile")
        for line in re.findall(r"(?:- |sh ')(ckptool .*)", (HERE / name).read_text("utf-8"))
    ]
    assert len(commands) == 2
    for command in commands:
        words = shlex.split(command)[1:]
        assert invoke(words).exit_code == 1
        assert json.loads((repository / words[-1]).read_text())
    (repository / "models" / "bad.pth").unlink()
    for command in commands:
        assert invoke(shlex.split(command)[1:]).exit_code == 0


@on_windows("it has no bash of its own")
@pytest.mark.parametrize(
    ("inputs", "code"),
    [
        ({}, 1),
        ({"FAIL_ON": "system unreadable"}, 1),
        ({"PATHS": "models/fine.pth models/ours.pth", "FAIL_ON": "system"}, 0),
        ({"PATHS": "models/fine.pth models/ours.pth", "POLICY": "policy.toml"}, 0),
        ({"PATHS": "models/fine.pth $(touch ran)", "FAIL_ON": "system"}, 2),
    ],
)
def test_the_action_runs_what_its_inputs_say(inputs: dict[str, str], code: int, repository: Path) -> None:
    text = ACTION.read_text()
    script = "".join(line[8:] for line in text[text.index("set -f") - 8 :].splitlines(keepends=True))
    given = {"PATHS": "models", "FAIL_ON": "", "POLICY": "", "BASELINE": "", "SARIF": "x.sarif", "OPTIONS": ""}
    (repository / "bin").mkdir()
    program = repository / "bin" / "ckptool"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ckptool "$@"\n')
    program.chmod(0o755)
    path = {"PATH": f"{program.parent}:{os.environ['PATH']}", "PYTHONPATH": str(HERE.parents[1])}
    done = subprocess.run(["bash", "-e", "-c", script], env={**os.environ, **path, **given, **inputs}, check=False)

    assert done.returncode == code
    assert json.loads((repository / "x.sarif").read_text())["runs"]
    assert not (repository / "ran").exists()
    for name in given:
        assert f"{name}: ${{{{ inputs.{name.lower().replace('_', '-')} }}}}" in text
