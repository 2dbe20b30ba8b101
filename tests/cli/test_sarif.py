"""``check --sarif`` prints what code hosts read."""

from __future__ import annotations

import json
from pathlib import Path

from tests.build import call, floats, named, storage, tensor, torch_zip
from tests.program import invoke

ROOT = Path(__file__).parents[2]


def test_findings_of_all_files_are_results_with_their_paths(tmp_path: Path) -> None:
    evil, broken = tmp_path / "an evil one.pth", tmp_path / "broken.pth"
    evil.write_bytes(torch_zip({"w": tensor(storage()), "x": call(named("os", "system"), "true")}, {"0": floats()}))
    broken.write_bytes(b"PK")
    result = invoke(["check", "--sarif", str(evil), str(broken)])
    found = json.loads(result.stdout)
    (run,) = found["runs"]

    assert (result.exit_code, found["version"], run["tool"]["driver"]["name"]) == (1, "2.1.0", "ckptool")
    codes = json.loads(invoke(["check", "--list", "--json"]).stdout)["codes"]
    assert {rule["id"] for rule in run["tool"]["driver"]["rules"]} == {*(one["code"] for one in codes), "unreadable"}
    by_rule = {one["ruleId"]: one for one in run["results"]}
    assert by_rule["CK205"]["level"] == "error"
    assert "os.system('true')" in by_rule["CK205"]["message"]["text"]
    location = by_rule["CK205"]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert location.endswith("/an%20evil%20one.pth")
    assert by_rule["unreadable"]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"].endswith("broken.pth")


def test_one_form_is_printed() -> None:
    assert invoke(["check", "--sarif", "--json", "x"]).exit_code == 2
