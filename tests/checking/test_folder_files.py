"""What the files beside a checkpoint would run is said for its folder, whatever they are called."""

from __future__ import annotations

import gzip
import json
import pickle
import shlex
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptool import check
from tests.build import (
    call,
    floats,
    index_of_shards,
    inline_tensor,
    legacy,
    named,
    ops,
    pickled,
    safetensors,
    storage,
    tensor,
    torch_zip,
    written,
    zip_file,
)
from tests.program import invoke
from tests.scale import exhaustive

EVIL = pickled(call(named("os", "system"), "true"))
IN_ZIP = torch_zip(call(named("os", "system"), "true"))
WEIGHTS = torch_zip({"w": tensor(storage())}, {"0": floats()})

BESIDE = {
    "training_args.bin": IN_ZIP,
    "optimizer.pt": IN_ZIP,
    "rng_state_0.pth": IN_ZIP,
    "random_states_0.pkl": EVIL,
    "pytorch_model.bin": IN_ZIP,
    "scaler.joblib": EVIL,
    "more.npy": EVIL,
    "of any name": EVIL,
    ".hidden": EVIL,
    "global_step1/mp_rank_00_model_states.pt": IN_ZIP,
    "a/b/c/d/e/f/g/h.pkl": EVIL,
    "behind a script": b"#!/bin/sh\n" + IN_ZIP,
}


def system(path: Path) -> list[tuple[str, str]]:
    report = check(path)
    calls = [(act.text, act.record) for act in report.acts if act.grade == "system" and act.how != "refers"]
    assert bool(calls) == ("CK205" in {one.code for one in report.findings})
    return calls


@pytest.mark.parametrize("name", BESIDE)
def test_a_call_in_a_file_beside_the_weights_is_an_error(name: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "x", {"model.safetensors": safetensors({"w": floats()}), "config.json": b"{}"})
    assert system(folder) == []
    written(folder, {name: BESIDE[name]})
    assert [(text, record.partition("::")[0]) for text, record in system(folder)] == [("os.system('true')", name)]
    assert invoke(["check", str(folder), "--fail-on", "system"]).exit_code == 1


def test_folders_that_are_not_looked_into_are_said(tmp_path: Path) -> None:
    folder = written(tmp_path / "x", {"model.safetensors": safetensors({"w": floats()}), "a/b/c.txt": b"c"})
    assert check(folder).findings == ()
    written(folder, {"a/" * 80 + "c.txt": b"c"})
    (found,) = check(folder).findings
    assert (found.code, "more than 64 deep" in found.message) == ("CK209", True)


@exhaustive
def test_more_folders_than_are_looked_into_are_said(tmp_path: Path) -> None:
    folder = written(tmp_path / "x", {"model.safetensors": safetensors({"w": floats()})})
    for number in range(10_100):
        (folder / str(number)).mkdir()
    (found,) = check(folder).findings
    assert (found.code, "folders below it after 10,000" in found.message) == ("CK209", True)


def test_links_that_lead_round_in_a_circle_are_left_in_the_end(tmp_path: Path) -> None:
    folder = written(tmp_path / "x", {"model.safetensors": safetensors({"w": floats()}), "a/c.txt": b"c"})
    (folder / "a" / "b").symlink_to(folder)
    assert check(folder).findings == ()
    written(folder, {"a/x.pth": WEIGHTS})
    assert "CK209" not in {one.code for one in check(folder).findings}


def test_files_behind_many_links_are_said(tmp_path: Path) -> None:
    folder = written(tmp_path / "x", {"model.safetensors": safetensors({"w": floats()})})
    last = folder
    for number in range(6):
        (tmp_path / str(number)).mkdir()
        (last / "link").symlink_to(tmp_path / str(number))
        last = tmp_path / str(number)
    written(last, {"x.pkl": EVIL})
    (found,) = check(folder).findings
    assert found.code == "CK209"
    assert (
        found.message
        == "'link' in the folder: not looked at: a link that leads out of the folder, which is not followed"
    )


def test_a_call_in_a_shard_that_no_index_names_or_that_is_no_shard_is_an_error(tmp_path: Path) -> None:
    index = {"model.bin.index.json": index_of_shards({"w": "a.bin"})}
    assert system(written(tmp_path / "x", {**index, "a.bin": WEIGHTS, "b.bin": IN_ZIP}))
    assert system(written(tmp_path / "y", {**index, "a.bin": IN_ZIP}))
    assert system(written(tmp_path / "z", {"a.pth": WEIGHTS, "b.pth": IN_ZIP}))


def test_a_call_behind_what_is_loaded_of_a_part_is_an_error(tmp_path: Path) -> None:
    streamed = legacy({"w": tensor(storage(rest=(None,)))}, [("0", 4, floats())])
    index = {"model.bin.index.json": index_of_shards({"w": "a.bin"})}
    for number, files in enumerate(
        (
            {**index, "a.bin": streamed + EVIL},
            {**index, "a.bin": pickled({"w": inline_tensor()}) + EVIL},
            {"model.safetensors": safetensors({"w": floats()}), "optimizer.pt": streamed + EVIL},
            {"model.safetensors": safetensors({"w": floats()}), "optimizer.pt": streamed * 3 + EVIL},
            {"model.pth": WEIGHTS, "more.zip": zip_file({"a.pt": streamed + EVIL})},
            {"global_step1/mp_rank_00_model_states.pt": streamed + EVIL, "latest": b"global_step1"},
        )
    ):
        assert system(written(tmp_path / str(number), files))


def test_findings_name_the_file_that_they_are_about(tmp_path: Path) -> None:
    folder = written(tmp_path / "x", {"model.pth": WEIGHTS, "old.bak": EVIL, "a/b.pth": IN_ZIP, "torn.pth": b"PK\3\4"})
    report = check(folder)
    told = {(one.code, one.path, one.command) for one in report.findings if one.path is not None}
    calls = {("CK205", f"{folder}/{name}", f"ckptool check {folder}/{name}") for name in ("old.bak", "a/b.pth")}

    assert calls < told
    assert {path for _, path, _ in told - calls} == {f"{folder}/torn.pth"}
    assert "'old.bak' in the folder: unpickling calls os.system('true'), " in str(report)
    assert report.loading is not None
    assert "system" not in report.loading
    assert report.grade == "system"
    printed = json.loads(invoke(["check", "--json", str(folder)]).stdout)
    assert {(one["code"], one["path"], one["command"]) for one in printed["findings"] if one["path"]} == told
    (run,) = json.loads(invoke(["check", "--sarif", str(folder)]).stdout)["runs"]
    places = [one["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for one in run["results"]]
    assert [Path(place).name for place in places if place != str(folder)] == [
        Path(one.path).name for one in report.findings if one.path is not None
    ]


def test_of_many_files_with_the_same_the_first_are_told(tmp_path: Path) -> None:
    folder = written(tmp_path / "x", {"model.pth": WEIGHTS, **{f"{number:02}.bak": EVIL for number in range(20)}})
    found = [one for one in check(folder).findings if one.code == "CK205"]

    assert len(found) == 17
    assert found[-1].message.startswith(f"4 more files of the folder with the same: {folder}/16.bak, ")


def test_a_line_for_a_folder_names_each_file_with_the_worst(tmp_path: Path) -> None:
    evil = {"model.pth": WEIGHTS, "a.bak": EVIL, "b/c.bin": IN_ZIP, "d": EVIL, "e.txt": b"text"}
    shown = invoke(["check", "-b", str(written(tmp_path / "x", evil))]).stdout
    assert "'a.bak' in the folder: unpickling calls" in shown
    assert "(and 2 more: d, c.bin)" in shown


@pytest.mark.filterwarnings("ignore")
def test_the_files_of_a_checkpoint_are_told_once(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(4), "epoch": 1}, checkpoint_id=str(tmp_path / "x"))
    before = check(tmp_path / "x")
    assert system(tmp_path / "x") == []
    assert "CK209" not in {one.code for one in before.findings}
    written(tmp_path / "x", {"meta.pt": IN_ZIP})
    assert len(system(tmp_path / "x")) == 1
    folder = written(tmp_path / "y", {"a.pth": torch_zip({"x": call(named("os", "system"), "true"), "y": ops(1)})})
    assert len(system(folder)) == 1


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.yaml", b'a: !!python/object/apply:os.system ["x"]\n'),
        ("conf.yml", b"_target_: !!python/name:os.system\n"),
        ("data.pkl.gz", gzip.compress(pickle.dumps([1]), mtime=0)[:-9]),
        ("model.json", b'{"module": "keras.layers", "class_name": "Lambda", "config": {"function": "x"}}'),
        ("config.json", b'{"auto_map": {"AutoModel": "modeling.Net"}}'),
    ],
)
def test_no_command_is_given_that_cannot_look_at_the_file(tmp_path: Path, name: str, content: bytes) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pth")
    (tmp_path / name).write_bytes(content)

    report = check(tmp_path)

    for one in report.findings:
        if one.command is not None:
            done = invoke(shlex.split(one.command)[1:])
            assert done.exit_code in (0, 1), (one, done.output)
