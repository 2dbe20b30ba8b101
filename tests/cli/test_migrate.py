"""``ckptool migrate`` as a person and as a program use it."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result

import ckptool
import ckptool.cli.migrate as verb
from tests import build
from tests.missing import on_windows
from tests.program import VALID, invoke

STATE_DICT = "lenet-state-dict-data-parallel-forged-cuda0-zip.pth"
CHECKPOINT = "checkpoint-ddp-forged-cuda0-zip.pth"
LEGACY_MODEL = "lenet-model-forged-cuda0-legacy.pth"


def run(*arguments: object) -> Result:
    return invoke(["migrate", *arguments])


def as_json(*arguments: object, code: int = 0) -> Any:
    result = run("--json", *arguments)
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


@pytest.fixture(autouse=True)
def at_fixtures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (STATE_DICT, CHECKPOINT, LEGACY_MODEL):
        (tmp_path / name).symlink_to(VALID / name)
    monkeypatch.chdir(tmp_path)


# What is printed


def test_folders_are_named_by_dst_or_after_the_sources() -> None:
    named = as_json(STATE_DICT, "out", "--max-shard-size", "60KB")
    several = as_json(STATE_DICT, LEGACY_MODEL, "--out-dir", "all", "--max-shard-size", "60KB", "--jobs", "2")
    alone = as_json(STATE_DICT, "--out-dir", "one", "--max-shard-size", "60KB")

    stems = [STATE_DICT.removesuffix(".pth"), LEGACY_MODEL.removesuffix(".pth")]
    assert [one["target"] for one in (named, *several, alone)] == [
        "out", *(f"all/{stem}" for stem in stems), f"one/{stems[0]}"
    ]  # fmt: skip
    for one in (named, *several, alone):
        assert {file["name"]: file["nbytes"] for file in one["files"]} == {
            path.name: path.stat().st_size for path in Path(one["target"]).iterdir()
        }
    assert named["files"][-1]["name"] == "model.safetensors.index.json"
    assert run(STATE_DICT, "out", "--max-shard-size", "60KB").exit_code == 2
    assert run(STATE_DICT, "out", "--max-shard-size", "60KB", "--force").exit_code == 0
    assert run(STATE_DICT, "other", "--max-shard-size", "60XB").exit_code == 1


def test_json_has_the_facts_before_and_after() -> None:
    found = as_json(CHECKPOINT, "out.pth", "--strip-module", "--to", "cpu")

    assert found["before"]["devices"] == {"cuda:0": 25, "cpu": 7}
    assert found["after"]["devices"] == {"cpu": 32}
    assert found["after"]["file_nbytes"] == found["nbytes"] == Path("out.pth").stat().st_size


def test_control_characters_and_bidi_marks_never_reach_the_terminal() -> None:
    tree = {"\x1b[2Jred": build.tensor(build.storage("0", 4, "FloatStorage", "\x1b[31mgpu")), "\u202eevil": 7}
    Path("a.pth").write_bytes(build.torch_zip(tree, {"0": build.floats()}))

    said = run("a.pth", "--to", "cpu", "--drop", "\u202eevil", "--rename", "red=\x07").stdout

    assert "red" in said
    assert not set(said) & set("\x1b\u202e\x07")


def test_several_sources_are_set_apart_by_an_empty_line() -> None:
    said = run(STATE_DICT, LEGACY_MODEL, "--out-dir", "out").stdout

    *blocks, total = said.split("\n\n")
    assert [block.splitlines()[0] for block in blocks] == [f"out/{STATE_DICT}", f"out/{LEGACY_MODEL}"]
    assert re.fullmatch("2 checkpoints, [0-9.]+ KiB: 2 written\n", total)


# Names


def renamed(*options: str) -> list[str]:
    found = as_json(STATE_DICT, "out.pth", "--force", "--include", "module.conv1.*", *options)
    return [new for _, new in found["renamed"]]


def test_changes_of_names_run_in_the_order_in_which_they_are_given() -> None:
    prefix, strip = ["--add-prefix", "net"], ["--strip-prefix", "module.conv1"]
    change = ["--rename", r"^net\.="]

    assert renamed(*strip, *prefix) == ["net.weight", "net.bias"]
    assert renamed(*prefix, *change, *strip) == ["weight", "bias"]
    assert renamed(*change, *strip, *prefix, "--allow-unmatched") == ["net.weight", "net.bias"]
    assert renamed("--add-prefix=a", "--rename=^a=b", "--add-prefix=c") == [
        "c.b.module.conv1.weight",
        "c.b.module.conv1.bias",
    ]
    assert run(STATE_DICT, "x.pth", *prefix, *strip).exit_code == 1  # "net.module…" does not begin with it


def test_wrappers_go_first_wherever_the_option_stands() -> None:
    assert renamed("--add-prefix", "net", "--strip-module") == ["net.conv1.weight", "net.conv1.bias"]


def test_a_file_of_renames_runs_where_it_stands() -> None:
    Path("names.txt").write_text("# a comment\n  # another\n\n  module=m\nconv1=c  # one more\n", encoding="utf-8")
    Path("more.txt").write_text("m=n\n", encoding="utf-8")

    assert renamed("--rename-file", "names.txt") == ["m.c.weight", "m.c.bias"]
    Path("marked.txt").write_text("conv1=c", encoding="utf-8-sig")
    assert renamed("--rename-file", "marked.txt") == ["module.c.weight", "module.c.bias"]
    assert renamed("--rename-file", "names.txt", "--rename-file", "more.txt")[0] == "n.c.weight"
    assert (
        renamed("--rename-file", "more.txt", "--rename-file", "names.txt", "--allow-unmatched")[0] == "nodule.c.weight"
    )
    assert (
        renamed("--rename", "module=x", "--rename-file", "names.txt", "--rename", "x.c=y", "--allow-unmatched")[0]
        == "y.weight"
    )


def test_an_equals_sign_that_belongs_to_the_pattern_does_not_end_it() -> None:
    assert renamed("--rename", r"(?<=module\.)conv1(?=\.weight)=first")[0] == "module.first.weight"
    assert renamed("--rename", r"(?<!x)module\.=a=b.")[0] == "a=b.conv1.weight"
    assert run(STATE_DICT, "x.pth", "--rename", r"a\=b").exit_code == 2
    assert run(STATE_DICT, "x.pth", "--rename", "(=x").exit_code == 2


# Places


def test_the_default_target_is_the_first_line() -> None:
    said = run(STATE_DICT, "--to", "cpu").stdout
    target = Path(said.splitlines()[0])

    assert target.name == STATE_DICT.replace(".pth", ".cpu.pth")
    assert target.is_file()


@pytest.mark.parametrize(
    ("options", "source", "form", "name"),
    [
        (["out/"], STATE_DICT, "same", STATE_DICT),
        (["out"], STATE_DICT, "safetensors", STATE_DICT.replace(".pth", ".safetensors")),
        (["--out-dir", "out"], "a.safetensors", "state_dict", "a.pth"),
        (["--out-dir", "out/"], "a.safetensors", "same", "a.safetensors"),
        (["--out-dir", "out"], "a.tar.gz::inner/model.pth", "same", "a.tar.model.pth"),
    ],
)
def test_in_a_folder_the_result_has_the_name_of_its_source(
    options: list[str], source: str, form: str, name: str
) -> None:
    Path("out").mkdir()
    Path("a.safetensors").write_bytes(build.safetensors({"weight": build.floats()}))
    inner = build.torch_zip({"weight": build.tensor(build.storage())}, {"0": build.floats()})
    Path("a.tar.gz").write_bytes(build.tar_file({"inner/model.pth": inner, "inner/other.txt": b""}))

    report = as_json(source, "--form", form, *options)

    assert [place.name for place in Path("out").iterdir()] == [name]
    assert Path(report["target"]) == Path("out", name)


@pytest.mark.parametrize("sources", [[STATE_DICT], [STATE_DICT, LEGACY_MODEL, CHECKPOINT]])
def test_a_folder_at_the_end_is_made_and_stays_only_with_what_is_written(sources: list[str]) -> None:
    assert run(*sources, "new/er/", "--dry-run").exit_code == 0
    assert not Path("new").exists()
    assert run(*sources, "new/er/", "--to", "cpu").exit_code == 0
    assert sorted(one.name for one in Path("new/er").iterdir()) == sorted(sources)


def test_several_sources_are_each_written_under_the_name_that_one_gets() -> None:
    sources = [STATE_DICT, LEGACY_MODEL, CHECKPOINT]
    alone = [run(source, "--to", "cpu", "--dry-run", "--quiet").stdout.strip() for source in sources]
    result = run(*sources, "--to", "cpu", "--quiet")

    assert (result.exit_code, result.stdout.split()) == (0, alone)
    assert all(Path(one).is_file() for one in alone)


@pytest.mark.parametrize("last", ["missing.pth", "folder"])
def test_of_several_sources_none_is_written_where_the_last_may_be_meant_as_the_result(last: str) -> None:
    Path("folder").mkdir()
    before = sorted(Path().iterdir())
    result = run(STATE_DICT, LEGACY_MODEL, last, "--to", "cpu")

    assert result.exit_code == 2
    assert "--out-dir" in result.stderr
    assert (sorted(Path().iterdir()), list(Path("folder").iterdir())) == (before, [])


def test_two_sources_are_told_how_both_are_written() -> None:
    result = run(STATE_DICT, LEGACY_MODEL, "--to", "cpu")

    assert result.exit_code == 2
    assert "If both are sources, name a folder for the results, `--out-dir`." in result.stderr
    assert "Run:" not in result.stderr  # which of both is meant, nobody knows
    assert run(STATE_DICT, LEGACY_MODEL, "--to", "cpu", "--out-dir", "migrated").exit_code == 0
    assert sorted(one.name for one in Path("migrated").iterdir()) == sorted([STATE_DICT, LEGACY_MODEL])


def test_two_sources_of_one_name_are_refused_before_anything_is_written() -> None:
    Path("other").mkdir()
    Path("other", STATE_DICT).symlink_to(VALID / STATE_DICT)
    result = run(STATE_DICT, f"other/{STATE_DICT}", "--out-dir", "out", "--force")

    assert result.exit_code == 2
    assert f"other/{STATE_DICT}" in result.stderr
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("options", "code"),
    [(("--dry-run",), 0), (("--include", "zzz"), 1), (("--ray", "auto"), 2)],
)
def test_a_folder_in_which_nothing_is_written_is_not_there(
    options: tuple[str, ...], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    Path("there").mkdir()
    for sources in ((STATE_DICT,), (STATE_DICT, LEGACY_MODEL)):
        for folder in ("new/er", "there", "there/new"):
            assert run(*sources, "--out-dir", folder, *options).exit_code == code
    assert list(Path("there").iterdir()) == []
    assert not Path("new").exists()


# Contradictions

CONTRADICTIONS = {
    "same picks": [CHECKPOINT, "--form", "same", "--key", "model"],
    "nothing is cast": [CHECKPOINT, "--keep-dtype", "norm"],
    "nothing saturates": [CHECKPOINT, "--saturate"],
    "no model": [CHECKPOINT, "--model-arg", "a=1"],
    "a model for nothing": [STATE_DICT, "--form", "state_dict", "--model", "ckptool.reference.nets:LeNet"],
    "a model elsewhere": [STATE_DICT, "--to", "cuda", "--model", "ckptool.reference.nets:LeNet"],
    "names of a class": [LEGACY_MODEL, "--rename", "conv=x"],
    "globs for a class": [LEGACY_MODEL, "--include", "conv*"],
    "globs for a model that is taken alone": [LEGACY_MODEL, "--form", "model", "--exclude", "*"],
    "no such entry": [CHECKPOINT, "--form", "state_dict", "--drop", "nothing"],
    "nothing left": [CHECKPOINT, "--form", "state_dict", "--drop", "model"],
    "an optimizer": [CHECKPOINT, "--key", "optimizer"],
    "no averaged weights": [CHECKPOINT, "--weights", "ema"],
    "nothing that matches": [STATE_DICT, "--include", "zzz*"],
    "nothing kept": [STATE_DICT, "--form", "state_dict", "--exclude", "module.*"],
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_what_would_have_no_effect_is_refused(case: str) -> None:
    before = sorted(Path().iterdir())
    result = run(*CONTRADICTIONS[case])

    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert sorted(Path().iterdir()) == before


def test_a_result_without_tensors_can_be_meant() -> None:
    found = as_json(STATE_DICT, "out.pth", "--include", "zzz*", "--allow-empty")

    assert (found["before"]["tensors"], found["after"]["tensors"]) == (10, 0)
    assert found["notes"] == ["include 'zzz*' matches no name"]
    assert torch.load("out.pth") == {}
    error = as_json(STATE_DICT, "b.pth", "--include", "zzz*", code=1)["error"]
    assert error["kind"] == "no-tensor-left"
    assert error["message"] == "none of the 10 tensors is left: include 'zzz*' matches none"


def test_weights_that_are_picked_are_taken_alone() -> None:
    assert as_json(CHECKPOINT, "a.pth", "--key", "model")["form"] == "state_dict"
    assert as_json(CHECKPOINT, "b.pth", "--weights", "raw")["form"] == "state_dict"
    assert as_json(CHECKPOINT, "c.safetensors", "--key", "model")["form"] == "safetensors"


def test_an_entry_of_the_weights_can_be_dropped_by_its_path() -> None:
    found = as_json(CHECKPOINT, "a.pth", "--form", "state_dict", "--drop", "model.module.norm", "--drop", "optimizer")

    assert not [name for name in torch.load("a.pth", map_location="cpu") if "norm" in name]
    assert "model.module.norm.weight" in found["dropped"]


# Progress and interrupts


def test_an_interrupt_stops_every_job(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[str] = []

    def work(source: str, _target: str, *, progress: Any, **_: Any) -> None:
        if source == "a":
            time.sleep(0.1)
            raise KeyboardInterrupt
        end = time.monotonic() + 60
        try:
            while time.monotonic() < end:
                progress(1, 2)
                time.sleep(0.01)
        except KeyboardInterrupt:
            stopped.append(source)
            raise

    monkeypatch.setattr(verb, "migrate_file", work)
    begin = time.monotonic()
    result = run("a", "b", "c", "--out-dir", "out", "--jobs", "2")

    assert result.exit_code == 130
    assert "b" in stopped
    assert time.monotonic() - begin < 30


def test_neither_a_dash_nor_an_arrow_becomes_a_name() -> None:
    done = run(STATE_DICT, "-")
    assert (done.exit_code, "no output to a pipe" in done.stderr, Path("-").exists()) == (2, True, False)
    assert run(STATE_DICT, "./-").exit_code == 0

    done = run(STATE_DICT, "x.pth", "--rename", "module=>net")
    assert (done.exit_code, "one '='" in done.stderr, Path("x.pth").exists()) == (2, True, False)
    with pytest.raises(ckptool.MigrationRefused, match="one '='"):
        ckptool.migrate(STATE_DICT, "x.pth", rename="module=>net")


@pytest.mark.parametrize("form", ["state_dict", "dcp"])
def test_a_dry_run_fails_where_the_run_does(form: str, tmp_path: Path) -> None:
    source, target = tmp_path / "a.pth", tmp_path / "there"
    torch.save({"w": torch.ones(2)}, source)
    target.mkdir() if form == "dcp" else target.write_bytes(b"")
    (target / "x").write_bytes(b"") if form == "dcp" else None
    command = ["migrate", str(source), str(target), "--form", form, "--dtype", "float16"]
    assert [invoke([*command, *more]).exit_code for more in ([], ["--dry-run"])] == [2, 2]
    before = sorted(tmp_path.iterdir())
    result = invoke([*command[:2], str(tmp_path / "new"), *command[3:], "--dry-run"])
    assert (result.exit_code, sorted(tmp_path.iterdir())) == (0, before)
    assert "values are looked at only when it is written" in result.output


def test_an_empty_pattern_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pth")
    result = invoke(["migrate", str(tmp_path / "a.pth"), str(tmp_path / "b.pth"), "--rename", "=x"])
    assert (result.exit_code, "an empty pattern" in result.output) == (2, True)


@on_windows("no name has colons")
def test_a_file_with_colons_in_its_name_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a::b.pth", "c.pth", "d.pth"):
        torch.save({"w": torch.ones(2)}, name)
    assert invoke(["migrate", "a::b.pth", "--in-place", "--to", "cuda"]).exit_code == 0
    assert invoke(["migrate", "a::b.pth", "c.pth", "d.pth", "--dry-run"]).exit_code == 0
