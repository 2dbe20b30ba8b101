"""``ckptool inspect`` as a person and as a program use it."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptool
from ckptool.fleet import row
from ckptool.reference.nets import LeNet
from tests import program
from tests.checkpoints.digest_by_hand import digest as by_hand
from tests.each import each
from tests.program import OURS, VALID, invoke, validated

STATE_DICT = VALID / "lenet-state-dict-data-parallel-forged-cuda0-zip.pth"
CHECKPOINT = VALID / "checkpoint-ddp-forged-cuda0-zip.pth"
LEGACY_MODEL = VALID / "lenet-model-forged-cuda0-legacy.pth"
PLAIN = VALID / "state-dict-plain-cpu-zip.pth"


def run(*arguments: object, code: int = 0) -> str:
    return program.run("inspect", *arguments, code=code).stdout


def as_json(*arguments: object) -> Any:
    return program.as_json("inspect", *arguments)


def names(*arguments: object) -> list[str]:
    return [tensor["name"] for tensor in as_json(STATE_DICT, *arguments)["tensors"]]


def test_json_says_where_a_tensors_bytes_stand_in_the_file() -> None:
    expected = json.loads(PLAIN.with_suffix(".json").read_text())
    data = PLAIN.read_bytes()

    for tensor, wanted in zip(as_json(PLAIN)["tensors"], expected["tensors"], strict=True):
        start = tensor["file_offset"]
        assert hashlib.sha256(data[start : start + tensor["nbytes"]]).hexdigest() == wanted["sha256"]


def test_a_bad_file_prints_two_lines_and_the_next_file_is_shown(tmp_path: Path) -> None:
    broken = tmp_path / "broken.pth"
    broken.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 548118077\n")
    result = invoke(["inspect", str(broken), str(STATE_DICT)])

    assert result.exit_code == 2
    assert [line.partition(":")[0] for line in result.stderr.splitlines()] == ["Error", "Hint"]
    assert "548,118,077" in result.stderr
    assert "module.conv1.weight" in result.stdout


def test_names_are_filtered_by_regex_and_globs() -> None:
    assert names("--grep", r"conv\d\.", "--exclude", "*.bias") == ["module.conv1.weight", "module.conv2.weight"]
    assert names("--include", "*.out.*") == ["module.out.weight", "module.out.bias"]


def test_the_table_is_sorted() -> None:
    firsts = {"size": "module.fc1.weight", "name": "module.conv1.bias", "file": "module.conv1.weight"}
    assert {key: names("--sort", key)[0] for key in firsts} == firsts


def test_bad_usage_is_exit_code_2() -> None:
    for arguments in (["--columns", "colour"], ["--table", "papyrus"], ["--grep", "("]):
        run(STATE_DICT, *arguments, code=2)


@each("wrap", ["", "DataParallel"])
def test_a_whole_model_says_how_it_is_loaded(wrap: str, tmp_path: Path) -> None:
    path, model = tmp_path / "whole.pth", LeNet()
    torch.save(getattr(nn, wrap)(model) if wrap else model, path)
    said = run(path)

    (python,) = re.findall(r"to load +in Python: (.*)", said)
    assert python == f"ckptool.load_into(LeNet(), {str(path)!r})"
    made = LeNet()
    eval(python, {"ckptool": ckptool, "LeNet": lambda: made})
    assert all(map(torch.equal, made.state_dict().values(), model.state_dict().values()))
    (command,) = re.findall(r"Run: ckptool (migrate .*)", said)
    written = json.loads(invoke([*shlex.split(command), "--json"]).stdout)["target"]
    assert torch.load(written).keys() == model.state_dict().keys()
    assert "to load" not in run(PLAIN)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("what", ["averages", "folder", "program"])
def test_what_is_not_one_state_dict_is_shown_how_to_load(what: str, tmp_path: Path) -> None:
    model, saved = nn.Linear(3, 2), str(tmp_path / "saved")
    if what == "averages":
        wrapped = nn.DataParallel(model).state_dict()
        torch.save({"model": wrapped, "model_ema": {name: tensor + 1 for name, tensor in wrapped.items()}}, saved)
    elif what == "folder":
        ckptool.save(model.state_dict(), saved, form="dcp")
    else:
        torch.jit.script(model).save(saved)
    said = run(Path(saved))

    (python,) = re.findall(r"to load +in Python: (.*)", said)
    eval(python, {"ckptool": ckptool, "model": nn.Linear(3, 2)})
    commands = re.findall(r"(?:Run|the averages): ckptool (.*)", said)
    assert len(commands) == (2 if what == "averages" else 1)
    written = [json.loads(invoke([*shlex.split(one), "--json", "--force"]).stdout)["target"] for one in commands]
    tensors = torch.load(written[-1])
    assert tensors.keys() == {"weight", "bias"}
    assert torch.equal(tensors["bias"], model.bias + (what == "averages"))


def test_embedded_class_source_is_printed() -> None:
    assert "class LeNet(" in run(LEGACY_MODEL, "--source")


def test_control_characters_and_bidi_marks_never_reach_the_terminal(tmp_path: Path) -> None:
    hostile = tmp_path / "evil\x1b]0;x\x07.pkl"
    hostile.write_bytes(pickle.dumps({"\x1b[2J\u202egpj.exe\u200b\r": 1, "b": ["\ud800", "\x9b31m"], "c\nd": {}}))
    for arguments in ([], ["--all"], ["--globals"]):
        shown = run(hostile, *arguments)
        assert all(char.isprintable() or char == "\n" for char in shown)
    assert as_json(hostile)["form"] == "data"


def test_a_member_of_an_archive_is_picked(tmp_path: Path) -> None:
    outer = tmp_path / "agent.zip"
    with zipfile.ZipFile(outer, "w") as archive:
        archive.write(STATE_DICT, "policy.pth")
        archive.write(CHECKPOINT, "run/last.ckpt")
        archive.writestr("data", "{}")

    listed = as_json(outer)
    assert listed["form"] == "archive"
    assert [member["name"] for member in listed["members"]] == ["policy.pth", "run/last.ckpt"]
    assert as_json(f"{outer}::run/last.ckpt")["summary"]["tensors"] == 32
    run(f"{outer}::nothing", code=2)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes on this system")
def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    done = subprocess.run(
        [sys.executable, "-m", "ckptool", "inspect", pipe], timeout=20, capture_output=True, text=True
    )

    assert done.returncode == 2
    assert done.stderr.startswith("Error: ")


@pytest.mark.parametrize("words", [["inspect"], ["check", "--deep"]])
def test_neither_torch_nor_numpy_is_imported_by_a_fresh_interpreter(words: list[str]) -> None:
    code = (
        "import sys\n"
        "from ckptool.cli import cli\n"
        "try: cli(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "print({'torch', 'numpy', 'safetensors'} & set(sys.modules), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *words, *OURS], capture_output=True, text=True, check=True)

    assert done.stderr.strip() == "set()"


def test_an_error_that_a_verb_lets_through_is_two_lines(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    result = invoke(["fixtures", str(tmp_path / "out"), "--device", "cuda:99"])

    assert result.exit_code == 2
    assert [line.partition(":")[0] for line in result.stderr.splitlines()] == ["Error", "Hint"]


@each(
    ("arguments", "said"),
    [
        (["--grep", "nomatch"], "0 of 10 names match --grep 'nomatch'"),
        (["--include", "conv1"], "0 of 10 names match --include 'conv1'"),
        (["--exclude", "*"], "0 of 10 names match --exclude '*'"),
        (["--grep", "conv1", "--include", "*.nothing"], "0 of 10 names match --grep 'conv1' --include '*.nothing'"),
    ],
)
def test_a_selection_that_takes_nothing_says_so(arguments: list[str], said: str) -> None:
    assert said in run(STATE_DICT, *arguments, code=1)
    run(STATE_DICT, *arguments, "--allow-unmatched")
    alone = invoke(["inspect", str(STATE_DICT), *arguments, "--table", "csv"])
    assert said in alone.stderr
    assert said not in alone.stdout


def save(path: Path, name: str, metadata: dict[str, str]) -> None:
    """Write a safetensors file of one tensor, without torch, which is not there wherever these tests run."""
    header = json.dumps({"__metadata__": metadata, name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}})
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(4))


def test_shards_are_listed_in_the_order_of_their_names(tmp_path: Path) -> None:
    names = [f"model-{number:05}-of-00002.safetensors" for number in (2, 1)]
    for name in names:
        save(tmp_path / name, name[6:11], {})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {name[6:11]: name for name in names}}))
    printed = run("-q", index)
    assert printed.index(names[1]) < printed.index(names[0])
    assert [shard["name"] for shard in as_json(index)["shards"]] == names


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (999_499, ""),
        (999_999, " (1M)"),
        (494_032_768, " (494M)"),
        (999_700_000, " (1B)"),
        (7_241_732_096, " (7.24B)"),
        (1_800_000_000_000, " (1.8T)"),
    ],
)
def test_large_counts_are_said_as_people_say_them_too(number: int, shown: str) -> None:
    from ckptool.messages import rough

    assert rough(number) == shown


def test_what_is_to_be_pasted_is_all_that_is_printed() -> None:
    done = invoke(["inspect", "--source", PLAIN])

    assert (done.exit_code, done.stdout) == (0, "")
    assert "it carries no source code" in done.stderr
    alone = [run("--globals", one) for one in (CHECKPOINT, PLAIN)]
    assert run("--globals", CHECKPOINT, PLAIN) == "".join(alone)
    assert all(len(line.split()) == 1 for line in alone[0].splitlines())


@pytest.mark.parametrize("verb", ["inspect", "stat"])
def test_patterns_that_only_leave_nothing_together_match_names_each(verb: str) -> None:
    done = program.run(verb, STATE_DICT, "--grep", "bias$", "--include", "*.weight", code=1)

    assert "0 of 10 names match --grep 'bias$' --include '*.weight'\n" in done.stdout
    assert done.stderr.startswith("Error: no tensor is left to look at\n")


def test_a_file_of_a_folder_that_is_alone_is_no_one_of_several(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").write_bytes(b"x" * 64)
    shown = invoke(["inspect", str(tmp_path / "__0_0.distcp")]).output

    assert "a file of a torch.distributed.checkpoint" in shown
    assert "1 file of" not in shown


@pytest.mark.parametrize("name", ["model.pth", "wrapped.pth", "meta.pth"])
def test_the_digest_is_the_one_that_anybody_can_compute(name: str, tmp_path: Path) -> None:
    weights = {"body.weight": torch.arange(6.0).reshape(2, 3), "count": torch.tensor(7)}
    wrapped = {f"module.{key}": tensor for key, tensor in weights.items()}
    torch.save({"state_dict": wrapped, "epoch": 3} if name == "wrapped.pth" else weights, tmp_path / name)
    if name == "meta.pth":
        torch.save({**weights, "lost": torch.zeros(2, device="meta")}, tmp_path / name)
    said = run("-q", "--digest", tmp_path / name)
    found = validated(as_json("--digest", tmp_path / name), "inspect")

    if name == "meta.pth":
        assert (found["digest"], found["digest_error"]) == (None, "no-plain-bytes")
        assert "none: tensor 'lost' has no bytes in the file" in said
    else:
        assert (found["digest"], found["digest_error"]) == (by_hand(weights), None)
        assert by_hand(weights) in said
    assert found["digest"] == row(tmp_path / name, digest=True)["digest"]
