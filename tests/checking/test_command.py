"""``ckptool check`` as a person and as a program use it, and what the library promises behind it."""

from __future__ import annotations

import ast
import json
import random
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import ckptool
from ckptool import CheckReport, check
from ckptool.checking.finding import RETIRED
from tests import program
from tests.build import call, floats, named, one_of_each, storage, tensor, torch_zip
from tests.corpus.test_corpus import FOLDER, NO_CHECKPOINTS, ROWS
from tests.device.tags import OfADevice
from tests.each import each
from tests.program import INVALID, OURS, VALID, invoke
from tests.scale import some, step, times

PLAIN = VALID / "state-dict-plain-cpu-zip.pth"
CHECKPOINT = VALID / "checkpoint-ddp-forged-cuda0-zip.pth"
STATE_DICT = VALID / "lenet-state-dict-data-parallel-forged-cuda0-zip.pth"
TRUNCATED = INVALID / "truncated-zip.pth"


def run(*arguments: object, code: int) -> str:
    return program.run("check", *arguments, code=code).stdout


def test_exit_codes_tell_nothing_something_and_unreadable_apart() -> None:
    run(PLAIN, code=0)
    run(STATE_DICT, code=0)  # notes alone
    run(PLAIN, CHECKPOINT, code=1)
    run(CHECKPOINT, TRUNCATED, PLAIN, code=1)  # what fails is not hidden by what cannot be opened
    run(TRUNCATED, PLAIN, code=2)
    run("no-such-file.pth", code=2)
    run(code=2)
    run("--deep", code=2)


def test_json_is_ascii_whatever_the_names(tmp_path: Path) -> None:
    path = tmp_path / "層\u202e.pth"
    torch.save({"層": torch.ones(1)}, path)
    assert run(path, "--json", code=0).isascii()
    shown = run(path, "--globals", code=0)
    assert all(char.isprintable() or char == "\n" for char in shown)


def codes(name: Path | str, devices: list[str]) -> list[tuple[str, str]]:
    found = check(VALID / name, devices=devices).findings
    return [(one.code, one.severity) for one in found if one.code == "CK503"]


def test_devices_are_compared_with_those_that_are_given(of_a_device: OfADevice) -> None:
    tag = of_a_device.tag
    for path in of_a_device.files():
        assert codes(path, ["cpu"]) == [("CK503", "warning")]
        assert codes(path, ["cpu", tag]) == []
        assert codes(path, ["cpu", tag.replace("0", "1")]) == [("CK503", "warning")]


def test_tags_of_every_kind_are_compared_with_the_devices_that_are_given() -> None:
    assert codes("device-forged-cuda3-zip.pth", ["cpu", "cuda:0"]) == [("CK503", "warning")]
    assert codes("device-forged-mps-zip.pth", ["cpu", "mps"]) == []
    assert codes("device-forged-meta-zip.pth", ["cpu"]) == []
    assert codes("state-dict-plain-cpu-zip.pth", ["cpu"]) == []


@each("path", [path for path in OURS if path.suffix == ".pth"][:: step(3)])
def test_a_device_that_is_lacking_is_one_that_torch_lacks(path: Path) -> None:
    lacking_where_torch_lacks_it(path)


def test_a_device_that_saved_a_file_is_lacking_where_torch_lacks_it(of_a_device: OfADevice) -> None:
    for path in (of_a_device.file(), of_a_device.file(container="legacy")):
        lacking_where_torch_lacks_it(path)


def here() -> list[str]:
    """Return the tags of the devices of this machine."""
    return [one["device"] for one in program.as_json("devices")["devices"]]


def lacking_where_torch_lacks_it(path: Path) -> None:
    report = check(path, devices=here())
    codes = {(finding.code, finding.severity) for finding in report.findings}
    if ("CK202", "warning") in codes:
        pytest.skip("torch.load() refuses the file, whatever its devices")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.load(path)
        except Exception:  # noqa: BLE001 - whatever it is, it does not open
            assert ("CK503", "warning") in codes
        else:
            assert ("CK503", "warning") not in codes


def test_the_devices_of_this_machine_are_asked_for_on_request(of_a_device: OfADevice) -> None:
    tags = here()
    run(of_a_device.file(), "--device-check", code=0 if of_a_device.tag in tags else 1)


def test_what_a_file_needs_is_named_and_not_looked_up() -> None:
    messages = {one.code: one.message for one in check(VALID / "model-plain-cpu-zip.pth").findings}
    assert messages["CK505"] == "to load as a model it needs package 'ckptool', in the version that saved it"
    messages = {one.code: one.message for one in check(VALID / "every-dtype-cpu-zip.pth").findings}
    assert messages["CK504"].startswith("needs torch 2.")
    assert "CK504" not in {one.code for one in check(PLAIN).findings}


def test_the_library_call_is_public() -> None:
    assert ckptool.check is check
    report = ckptool.check(PLAIN.read_bytes(), deep=True)
    assert isinstance(report, CheckReport)
    assert report.worst is None
    assert report.verdict == "nothing wrong found; every byte was read; all 16 records match their checksums"


@pytest.mark.parametrize("name", one_of_each())
def test_no_damage_gives_anything_but_a_report(name: str) -> None:
    good = one_of_each()[name]
    chance = random.Random(name)
    for _ in range(times(40, 300)):
        data = bytearray(good)
        for _ in range(chance.randint(1, 3)):
            data[chance.randrange(len(data))] = chance.choice([0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)])
        report = check(bytes(data[: chance.choice([len(data), chance.randrange(1, len(data))])]), deep=True, like=good)
        assert report.verdict


@pytest.mark.corpus
@pytest.mark.skipif(not ROWS, reason=f"no folder of real files at {FOLDER}")
@pytest.mark.parametrize("row", some(ROWS, 10), ids=lambda row: row["file"])
def test_real_files_raise_no_false_alarm(row: dict[str, str]) -> None:
    report = check(FOLDER / row["file"], deep=True)

    if row["container"] in NO_CHECKPOINTS:
        assert report.error is not None
        return
    assert report.error is None
    # The one thing that is in anybody's way: stock torch refuses the file; test_stock_load asks torch whether it does.
    alarms = [finding for finding in report.findings if finding.severity != "info"]
    assert {finding.code for finding in alarms} <= {"CK202", "CK206"}
    assert all(finding.hint or finding.command for finding in alarms)
    # What an archive holds beside weights is for a loader of its own: byte code in those of stable-baselines3.
    by_itself = report.grade not in ("data", "program")
    in_the_way = by_itself if _for_another_loader(report) else row["torch_weights_only"] != "ok"
    assert bool(alarms) == in_the_way


def _for_another_loader(report: CheckReport) -> bool:
    return any(finding.code == "CK202" and finding.severity == "info" for finding in report.findings)


@pytest.mark.corpus
@pytest.mark.skipif(not ROWS, reason=f"no folder of real files at {FOLDER}")
@pytest.mark.parametrize(
    "row", some([row for row in ROWS if row["container"] not in NO_CHECKPOINTS], 10), ids=lambda r: r["file"]
)
def test_values_of_real_files_raise_no_false_alarm(row: dict[str, str]) -> None:
    report = check(FOLDER / row["file"], values=True)

    assert not [one for one in report.findings if one.severity == "error"]
    for finding in report.findings:
        assert finding.code not in ("CK110", "CK111") or finding.severity == "info", finding


def test_strict_takes_an_odd_container_for_an_error(tmp_path: Path) -> None:
    sound = one_of_each()["torch_legacy"]
    for name, data, code in (("sound", sound, 0), ("behind", sound + b"x", 1)):
        path = tmp_path / name
        path.write_bytes(data)
        found = json.loads(run(path, "--json", code=code))
        assert (found["worst"] in (None, "info"), found["grade"]) == ((False, "code") if code else (True, "data"))
        found = json.loads(run(path, "--json", "--strict", code=code))
        assert [one["severity"] for one in found["findings"] if one["code"] == "CK101"] == ["error"] * code
    assert not [
        finding for path in OURS[:: step(3)] for finding in check(path, strict=True).findings if finding.code == "CK101"
    ]


@pytest.mark.parametrize("verb", ["check", "inspect"])
def test_a_small_file_of_plain_data_needs_few_modules(verb: str) -> None:
    code = (
        "import sys; from ckptool.cli import cli\n"
        f"try: cli.main(['{verb}', sys.argv[1]])\n"
        "except SystemExit: print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(VALID / "state-dict-plain-cpu-zip.pth")],
        capture_output=True,
        text=True,
        check=True,
    )
    imported = set(done.stdout.splitlines()[-1].split())
    dear = {"json", "concurrent.futures", "ckptool.formats.runnable.programs", "ckptool.checking.folder_files"}
    dear |= {"ckptool.checking.value_survey", "ckptool.formats.directories", "ckptool.checkpoints.quantized"}
    assert "ckptool.checking.structure" in imported
    assert not dear & imported
    ours = [one for one in imported if one.startswith("ckptool.")]
    assert not [one for one in ours if one.startswith("ckptool.migration")]  # what only looks cannot write
    assert len(ours) <= 88


TABLE = json.loads(invoke(["check", "--list", "--json"]).stdout)
CODES = {one["code"]: one for one in TABLE["codes"]}
SOURCES = [path.read_text("utf-8") for path in sorted(Path(ckptool.__file__).parent.rglob("*.py"))]
NODES = [node for text in SOURCES if '"CK' in text for node in ast.walk(ast.parse(text))]


def codes_in(node: ast.AST) -> set[str]:
    texts = (one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str))
    return {text for text in texts if re.fullmatch(r"CK\d{3}", text)}


def test_every_code_that_is_used_is_in_the_table_and_every_code_in_it_is_used() -> None:
    calls = [one for one in NODES if isinstance(one, ast.Call)]
    given = [one.args[0] for one in calls if ast.unparse(one.func) in ("note", "Remark", "Stubs", "_finding")]
    chosen = [one.value for one in NODES if isinstance(one, ast.Assign | ast.AnnAssign) and one.value is not None]
    assert set().union(*map(codes_in, (*given, *(one for one in chosen if not isinstance(one, ast.Dict))))) == set(
        CODES
    )


def test_no_retired_code_comes_back() -> None:
    assert RETIRED.keys().isdisjoint(CODES)


def test_every_code_is_expected_by_a_test() -> None:
    tests = "".join(path.read_text("utf-8") for path in sorted(Path(__file__).parents[1].rglob("test_*.py")))
    assert [code for code in CODES if f'"{code}"' not in tests] == []


def test_a_severity_is_given_only_where_the_table_has_none() -> None:
    for made in (one for one in NODES if isinstance(one, ast.Call)):
        if ast.unparse(made.func) == "note" and any(one.arg == "severity" for one in made.keywords):
            assert {CODES[code]["severity"] for code in codes_in(made.args[0])} <= {None}, ast.unparse(made)


def test_the_table_is_printed_for_people_and_programs() -> None:
    lines = invoke(["check", "--list"], catch_exceptions=False).stdout.splitlines()
    assert len(lines) == len(CODES)
    assert lines[2] == f"CK103  error    {CODES['CK103']['says']}"
    assert lines[0] == f"CK101           {CODES['CK101']['says']}"

    assert TABLE["schema"] == "ckptool.codes/1"
    assert TABLE["codes"][2] == {"code": "CK103", "severity": "error", "says": CODES["CK103"]["says"]}


def test_what_a_code_says_is_one_sentence() -> None:
    for says in (entry["says"] for entry in CODES.values()):
        assert says[0].isupper()
        assert says.endswith(".")
        assert ". " not in says


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
