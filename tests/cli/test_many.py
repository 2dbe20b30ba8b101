"""Many files: a line for each, folders, patterns that no shell expands, totals, and JSON as it comes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ckptool.inspecting.columns import COLUMNS
from ckptool.messages import show_nbytes
from tests.each import each
from tests.program import INVALID, VALID, as_json, run

FINE = VALID / "lenet-state-dict-cpu-zip.pth"
WARNED = VALID / "lenet-model-forged-cuda0-legacy.pth"
CUT = INVALID / "lfs-pointer.pth"
DIRECTORIES = Path(__file__).parents[3] / "shared" / "corpus-dirs"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Give a folder of three checkpoints, one of which cannot be opened, and of what is none."""
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    for file in (FINE, CUT):
        shutil.copy(file, tmp_path / "runs" / file.name)
    shutil.copy(WARNED, tmp_path / "runs" / "one" / "weights.of-no-known-suffix")
    shutil.copy(FINE, tmp_path / ".git" / "hidden.pth")
    (tmp_path / "runs" / "README.md").write_text("# About these models\n")
    (tmp_path / "runs" / "train.py").write_text("import torch\n")
    return tmp_path


def names(output: str) -> list[str]:
    return [name for _, name in rows(output)]


def rows(output: str) -> list[tuple[str, str]]:
    """Return of each line how the file is, and what it is called: in columns, what is opened has no word."""
    lines = [line for line in output.partition("\n\n")[0].splitlines() if not line.startswith("file ")]
    words = [re.search(r"(?:^|  )(fine|warning|error)(?:  |$)", line) for line in lines]
    return [
        (word[1] if word else "opened", line.split()[1 if word and not word.start() else 0])
        for word, line in zip(words, lines, strict=True)
    ]


def test_a_folder_stands_for_every_checkpoint_in_it_by_content(folder: Path) -> None:
    shown = run("check", "-b", "-r", folder, code=1).stdout

    relative = [str(Path(name).relative_to(folder / "runs")) for name in names(shown)]
    assert relative == [FINE.name, CUT.name, "one/weights.of-no-known-suffix"]
    assert f"passed over  2 files of other kinds: {folder}/runs/README.md, {folder}/runs/train.py\n" in shown


def test_all_files_that_were_passed_over_are_named_when_asked(folder: Path) -> None:
    for number in range(5):
        (folder / "runs" / f"{number}.txt").write_text("notes")
    asked = ("inspect", "-b", "-r", folder)
    for wide in ((), ("--wide",)):  # in a pipe, nothing is left out
        line = run(*asked, *wide, code=2).stdout.splitlines()[-1]
        assert f"7 files of other kinds: {folder}/runs/0.txt, " in line
        assert line.count(str(folder)) == 7


@pytest.mark.parametrize("verb", ["check", "scan"])
def test_an_empty_file_is_a_checkpoint_only_by_its_name(verb: str, tmp_path: Path) -> None:
    (tmp_path / "__init__.py").touch()
    (tmp_path / "cut.pth").touch()
    shown = run(verb, *(() if verb == "scan" else ("-b", "-r")), tmp_path, code=2).output

    assert "1 checkpoint: 1 not opened" in shown
    assert f"passed over  1 file of other kinds: {tmp_path}/__init__.py\n" in shown


@pytest.mark.parametrize("verb", ["inspect", "check"])
def test_totals_are_those_of_the_lines(verb: str, folder: Path) -> None:
    shown = run(verb, "-b", "-r", folder, code=1 if verb == "check" else 2).stdout
    words = [word for word, _ in rows(shown)]

    opened = sum(path.stat().st_size for path in (FINE, WARNED))
    assert f"3 checkpoints, {opened / 1024:.3g} KiB: " in shown
    warned = words.count("warning")
    word = {"inspect": "opened", "check": "fine"}[verb]  # inspect does not look for what is wrong
    assert f"{words.count(word)} {word}, {f'{warned} with warnings, ' * bool(warned)}1 not opened\n" in shown
    assert "torch_legacy (1), torch_zip (1)" in shown


def test_check_says_the_severest_finding_of_each_file_in_a_line() -> None:
    shown = run("check", "-b", WARNED, FINE, code=1).stdout.splitlines()
    whole = as_json("check", WARNED, code=1)

    warnings = [one for one in whole["findings"] if one["severity"] == "warning"]
    first = next(one for one in warnings if one["code"] == "CK206")  # what it would run, before what loads it
    assert warnings[0] != first
    assert shown[0].startswith(f"warning  {WARNED}")
    assert f"{first['code']} {first['message']}" in shown[0]
    assert shown[1].startswith(f"fine     {FINE}")


def test_several_files_end_with_a_total_and_one_does_not() -> None:
    assert "\n2 checkpoints, " in run("inspect", FINE, FINE.parent / "state-dict-plain-cpu-zip.pth").stdout
    assert "1 checkpoint," not in run("check", FINE).stdout


def test_patterns_are_expanded_where_no_shell_does(folder: Path) -> None:
    shown = run("check", "-b", folder / "runs" / "lenet*.pth").stdout
    deep = run("inspect", "-b", f"{folder}/**/*.of-no*").stdout

    assert [Path(name).name for name in names(shown)] == [FINE.name]
    assert [Path(name).name for name in names(deep)] == ["weights.of-no-known-suffix"]
    assert "no such file" in run("inspect", folder / "no*.pth", code=2).output


def test_a_file_whose_name_is_a_pattern_is_that_file(tmp_path: Path) -> None:
    for name in ("epoch[1].pth", "epoch1.pth"):
        shutil.copy(FINE, tmp_path / name)

    assert [Path(name).name for name in names(run("inspect", "-b", tmp_path / "epoch[1].pth").stdout)] == [
        "epoch[1].pth"
    ]


def test_what_a_folder_stands_for_comes_once_and_what_is_named_as_often(folder: Path) -> None:
    assert len(names(run("inspect", "-b", FINE, FINE).stdout)) == 2
    assert len(names(run("inspect", "-b", "-r", folder, folder / "runs", code=2).stdout)) == 3


def test_links_to_folders_are_not_followed(folder: Path) -> None:
    (folder / "runs" / "again").symlink_to(folder, target_is_directory=True)

    assert len(names(run("inspect", "-b", "-r", folder, code=2).stdout)) == 3


def shards(folder: Path) -> None:
    """Write a model in two shards with an index, and beside it what a trainer keeps."""
    run("migrate", FINE, folder, "--max-shard-size", "64KiB")
    shutil.copy(WARNED, folder / "training_args.bin")


def test_files_that_are_one_checkpoint_together_count_once(tmp_path: Path) -> None:
    shards(tmp_path / "model")

    shown = run("inspect", "-b", "-r", tmp_path).stdout
    assert [str(Path(name).relative_to(tmp_path)) for name in names(shown)] == ["model", "model/training_args.bin"]

    (tmp_path / "model" / "model.safetensors.index.json").unlink()
    again = run("inspect", "-b", "-r", tmp_path).stdout
    assert [str(Path(name).relative_to(tmp_path)) for name in names(again)] == ["model", "model/training_args.bin"]


@pytest.mark.skipif(not DIRECTORIES.exists(), reason=f"no {DIRECTORIES}")
def test_real_folders_count_once_with_what_lies_beside() -> None:
    shown = run("inspect", "-b", "-r", DIRECTORIES, code=2).stdout
    found: dict[str, list[str]] = {}
    for name in names(shown):
        path = Path(name).relative_to(DIRECTORIES)
        found.setdefault(path.parts[0], []).append(str(Path(*path.parts[1:])))

    for name in ("dcp-plain", "deepspeed-zero3", "rank-files-dtensor", "hf-shards", "diffusers-pipeline"):
        assert found[name] == ["."]
    assert found["megatron-torch-dist"] == ["iter_0000100"]
    assert len(found["hf-hub-cache"]) == 1
    trainer = ("model.safetensors", "optimizer.pt", "rng_state.pth", "scheduler.pt", "training_args.bin")
    assert found["hf-trainer"] == [f"checkpoint-2/{name}" for name in trainer]


def test_jsonl_is_an_object_in_each_line(folder: Path) -> None:
    lines = run("inspect", "--jsonl", "-r", folder, code=2).stdout.splitlines()
    found = [json.loads(line) for line in lines]

    assert [Path(one["path"]).name for one in found] == [FINE.name, CUT.name, "weights.of-no-known-suffix"]
    assert "error" in found[1]
    assert found[0] == as_json("inspect", folder / "runs" / FINE.name)


def test_a_folder_or_a_pattern_is_a_list_whatever_is_in_it(tmp_path: Path) -> None:
    (nothing,) = as_json("check", "-r", tmp_path, code=2)
    assert nothing["error"]["kind"] == "directory"
    shutil.copy(FINE, tmp_path / FINE.name)
    assert len(as_json("stat", "-r", tmp_path)) == 1
    assert len(as_json("stat", tmp_path / "*.pth")) == 1


def test_errors_stand_where_they_happened() -> None:
    files = map(str, (FINE, CUT, FINE.parent / "state-dict-plain-cpu-zip.pth"))
    command = [sys.executable, "-m", "ckptool", "inspect", *files]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)

    places = [done.stdout.index(text) for text in (f"{FINE}\n", f"Error: {CUT}", "state-dict-plain-cpu-zip.pth\n")]
    assert places == sorted(places)


def test_tables_for_programs_have_plain_numbers() -> None:
    columns = "name,shape,elements,size,file_offset"
    csv = run("inspect", FINE, "--table", "csv", "--columns", columns).stdout.splitlines()
    tsv = run("inspect", FINE, "--table", "tsv", "--columns", columns).stdout.splitlines()
    found = json.loads(run("inspect", FINE, "--table", "json", "--columns", columns).stdout)

    expected = as_json("inspect", FINE)["tensors"]
    assert [(one["name"], one["shape"], one["elements"], one["size"], one["file_offset"]) for one in found] == [
        (one["name"], one["shape"], one["numel"], one["nbytes"], one["file_offset"]) for one in expected
    ]
    first = expected[0]
    assert csv[:2] == [
        columns,
        f'{first["name"]},"{first["shape"]}",{first["numel"]},{first["nbytes"]},{first["file_offset"]}',
    ]
    assert tsv[1].split("\t") == [str(one) for one in found[0].values()]


@pytest.mark.parametrize("verb", ["inspect", "stat"])
def test_a_table_of_several_files_is_one_with_a_column_of_paths(verb: str) -> None:
    files = [FINE, FINE.parent / "state-dict-plain-cpu-zip.pth"]
    alone = [json.loads(run(verb, one, "--table", "json").stdout) for one in files]
    found = json.loads(run(verb, *files, "--table", "json").stdout)

    assert found == [{"path": str(file), **row} for file, rows in zip(files, alone, strict=True) for row in rows]
    csv = run(verb, *files, "--table", "csv").stdout.splitlines()
    assert [line.partition(",")[0] for line in csv] == ["path", *(one["path"] for one in found)]
    assert sum("path" in line for line in run(verb, *files, "--table", "github").stdout.splitlines()) == 1


def test_statistics_in_tables_for_programs_are_whole_numbers_of_float64() -> None:
    found = json.loads(run("stat", FINE, "--table", "json").stdout)
    expected = as_json("stat", FINE)["rows"]

    assert [(one["mean"], one["zeros"], one["histogram"]) for one in found] == [
        (one["values"]["mean"], one["values"]["zeros"], one["values"]["histogram"]) for one in expected
    ]
    row = run("stat", FINE, "--table", "csv", "--include", "conv1.bias").stdout.splitlines()[1]
    assert repr(found[1]["mean"]) in row


@each("name", ["elements", "parameters", "numel", "Parameters", "storage offset", "storage_offset", "shared-with"])
def test_columns_are_called_as_the_table_shows_them(name: str) -> None:
    header = run("inspect", FINE, "--columns", f"name,{name}").stdout.splitlines()[-11]

    assert header.split("  ")[-1].strip() in ("elements", "storage offset", "shared with")
    run("inspect", FINE, "--columns", header.split(maxsplit=1)[1])


def test_all_columns() -> None:
    assert run("inspect", FINE, "--columns", "all", "--table", "csv").stdout.splitlines()[0] == ",".join(COLUMNS)


def test_sorting_by_what_the_table_shows() -> None:
    found = {run("inspect", FINE, "--sort", name).stdout for name in ("elements", "parameters", "numel")}
    assert len(found) == 1


def test_jsonl_of_several_migrations(tmp_path: Path) -> None:
    arguments = ["migrate", FINE, WARNED, "--out-dir", tmp_path, "--to", "cpu", "--dry-run"]
    lines = run(*arguments, "--jsonl").stdout.splitlines()

    assert [json.loads(line) for line in lines] == as_json(*arguments)


def test_a_folder_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    assert "without files" in run("inspect", "-r", tmp_path, code=2).stderr
    (tmp_path / "notes.txt").write_text("nothing here\n")
    assert "no checkpoint among 1 file" in run("stat", "-r", tmp_path, code=2).stderr


def test_links_in_a_circle_are_said(folder: Path) -> None:
    (folder / "runs" / "round.pth").symlink_to("round.pth")

    assert "round.pth" in run("check", "-b", "-r", folder / "runs", code=1).stdout


def test_folders_that_may_not_be_listed_are_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = folder / "runs" / "closed"
    closed.mkdir()
    listed = os.scandir

    def refused(path: str) -> Iterator[os.DirEntry[str]]:
        if str(path) == str(closed):  # root may list what it likes
            raise PermissionError(13, "Permission denied")
        return listed(path)

    monkeypatch.setattr(os, "scandir", refused)
    assert "you may not list" in run("check", "-b", "-r", folder / "runs", code=1).stdout
    assert "you may not list" in run("inspect", closed, code=2).stderr


def test_too_many_files_are_told_how_to_look_at_each(tmp_path: Path) -> None:
    for number in range(65):
        shutil.copy(FINE, tmp_path / f"{number}.pth")

    shown = run("check", tmp_path, code=2)
    assert f"ckptool inspect -b -r -- {tmp_path}" in shown.stdout + shown.stderr


def test_what_lies_beside_and_cannot_be_opened_is_named_as_a_file(tmp_path: Path) -> None:
    shutil.copy(FINE, tmp_path / "a.pth")
    (tmp_path / "b.pth").write_bytes(FINE.read_bytes()[:300])

    (found,) = re.findall(r"CK114 (.*)\n.*\n +Run: (.*)", run("check", tmp_path, code=1).stdout)
    assert found[0].startswith("'b.pth' beside it cannot be opened: truncated")
    assert found[1] == f"ckptool check {tmp_path}/b.pth"


def test_the_total_says_how_many_would_run_what(folder: Path) -> None:
    (folder / "runs" / "evil.pth").write_bytes(b"cos\nsystem\n(S'true'\ntR.")

    shown = run("check", "-b", "-r", folder / "runs", code=1).stdout
    assert "grades       data (1), code (1), system (1), unknown (1)" in shown
    assert "grades" not in run("inspect", "-b", "-r", folder / "runs", code=2).stdout


def test_migrations_of_many_files_end_with_a_total(tmp_path: Path) -> None:
    there = tmp_path / "there"
    files = [FINE, CUT, WARNED]
    shown = run("migrate", "-b", *files, "--out-dir", there, "--form", "safetensors", code=2).stdout.splitlines()
    nbytes = sum(path.stat().st_size for path in there.iterdir())

    target = there / f"{FINE.stem}.safetensors"
    assert re.split(r"  +", shown[0])[:2] == ["written", str(FINE)]
    assert f"{target}: safetensors, " in shown[0]
    assert [line.split()[0] for line in shown[:3]] == ["written", "error", "written"]
    assert shown[3:] == ["", f"3 checkpoints, {show_nbytes(nbytes)}: 2 written, 1 failed"]
    told = run("migrate", *files, "--out-dir", there, "--form", "safetensors", code=2).stdout.splitlines()
    assert told[-1] == "3 checkpoints: 3 failed"
    one = run("migrate", FINE, "--out-dir", there, "--form", "safetensors", "--force", "-q").stdout
    assert one == f"{target}\n"


@pytest.mark.parametrize("verb", ["inspect", "check"])
def test_objects_name_the_member_that_was_asked_for(verb: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "both.zip", "w") as archive:
        for file in (FINE, WARNED):
            archive.write(file, file.name)
    paths = [tmp_path / "both.zip", f"{tmp_path}/both.zip::{FINE.name}", f"{tmp_path}/both.zip::none.pth"]
    printed = run(verb, "--jsonl", *paths, code=1 if verb == "check" else 2).stdout.splitlines()

    assert [json.loads(line)["member"] for line in printed] == [None, FINE.name, "none.pth"]


def test_files_of_items_without_an_index_hide_no_other_checkpoint(folder: Path) -> None:
    (folder / "runs" / "__0_0.distcp").write_bytes(b"items")
    shown = run("inspect", "-b", "-r", folder / "runs", code=2)

    assert [Path(name).name for name in names(shown.stdout)] == [
        "runs",
        FINE.name,
        CUT.name,
        "weights.of-no-known-suffix",
    ]
    assert "there is no .metadata" in shown.output


def test_statistics_of_several_checkpoints_are_refused_and_they_are_listed(tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    with tarfile.open(tmp_path / "two.tar", "w") as tar:
        for name in ("a.pth", "b.pth"):
            torch.save({"weight": torch.ones(2)}, tmp_path / "two" / name)
            tar.add(tmp_path / "two" / name, name)

    for path, what in ((tmp_path / "two.tar", "an archive"), (tmp_path / "two", "a folder")):
        error = as_json("stat", path, code=2)["error"]
        assert error["message"].endswith(f"{what} of 2 checkpoints")
        assert f"{path}::a.pth" in error["hint"]
