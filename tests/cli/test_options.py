"""
Options: no value is lost to a later one, an empty one, as of a variable that is not set, is none, and one that would do
nothing beside another is refused.
"""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
import torch

import ckptool
from ckptool import MigrationRefused
from ckptool.cli import cli
from ckptool.cli.verbs import VERBS
from tests.each import each
from tests.program import VALID, invoke, run
from tests.scale import in_turn

WITH_VALUES = [
    (verb, one)
    for verb in VERBS
    for one in cli.get_command(click.Context(cli), verb).params  # type: ignore[union-attr]
    if isinstance(one, click.Option) and not one.is_flag
]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a checkpoint with weights at its root and below, in the current folder."""
    monkeypatch.chdir(tmp_path)
    torch.save({"a.weight": torch.ones(2, 2), "teacher": {"b.weight": torch.ones(3, 3)}}, "model.pth")
    return "model.pth"


@each(("verb", "option"), WITH_VALUES)
def test_a_value_is_not_given_twice_and_not_empty(verb: str, option: click.Option, model: str) -> None:
    value = option.type.choices[0] if isinstance(option.type, click.Choice) else "1"
    done = invoke([verb, model, option.opts[0], str(value), f"{option.opts[-1]}={value}"])

    assert (f"{option.opts[-1]} is given 2 times" in done.stderr) is not option.multiple
    assert option.multiple or done.exit_code == 2
    empty = run(verb, model, f"{option.opts[-1]}=", code=2)
    assert f"{option.opts[-1]} is given an empty value" in empty.stderr


def test_colours_are_asked_for_once(model: str) -> None:
    done = run("--color", "never", "--color", "always", "inspect", model, code=2)

    assert "--color is given 2 times" in done.stderr
    run("--color", "never", "inspect", model, "-q", "-q")


def test_the_outermost_weights_have_a_name(model: str) -> None:
    refused = invoke(["migrate", model, "new.pth", "--form", "state_dict"])

    assert "--key: '(root)', 'teacher'" in refused.stderr
    words = ["migrate", model, "new.safetensors", "--key", "(root)", "--drop-unsupported"]
    assert invoke(words).exit_code == 0
    assert ckptool.load("new.safetensors").keys() == {"a.weight"}
    assert ckptool.load(model, key="(root)").keys() == {"a.weight", "teacher"}
    assert "with names from the top: --key '(all)'" in refused.stderr
    assert invoke(["migrate", model, "all.safetensors", "--key", "(all)"]).exit_code == 0
    assert (
        ckptool.load("all.safetensors").keys() == ckptool.load(model, key="").keys() == {"a.weight", "teacher.b.weight"}
    )
    assert invoke(["diff", model, model, "--key-a", "(root)", "--key-b", "teacher"]).exit_code == 1


@pytest.mark.parametrize("text", ["", "# nothing\n", "\n  # one\n\n # two"])
def test_a_file_of_renames_without_any_is_refused(text: str, model: str) -> None:
    Path("names.txt").write_text(text, encoding="utf-8")
    done = invoke(["migrate", model, "new.pth", "--rename-file", "names.txt"])

    assert (done.exit_code, "no RE=REPL in names.txt" in done.stderr) == (2, True)
    assert not Path("new.pth").exists()


@pytest.mark.parametrize("devices", ["cqu", ["cpu", "cuda:x"], "", ["gpu"], ["cuda:0", "cudaa"]])
def test_a_misspelt_device_is_refused(devices: str | list[str], model: str) -> None:
    with pytest.raises(MigrationRefused, match="not a device"):
        ckptool.check(model, devices=devices)
    assert not ckptool.check(model, devices=["CUDA:0", "cpu"]).error


@pytest.mark.parametrize(
    ("words", "text"),
    in_turn([["-"], ["--from", "empty.txt"], ["-", "--from", "empty.txt", "-o", "rows.jsonl"]], ["", "\n\n"]),
)
def test_a_scan_of_nothing_is_not_fine(words: list[str], text: str, model: str) -> None:
    Path("empty.txt").write_text("", encoding="utf-8")
    done = invoke(["scan", *words], input=text)

    assert (done.exit_code, "nothing to scan" in done.stderr) == (2, True)
    assert invoke(["scan", *words], input=f"{model}\n" if "-" in words else "").exit_code in (0, 2)


MIXED = {
    "one of two": ["net.a", "b"],
    "as a name, too": ["net.a", "net"],
    "as part of a component": ["net.a", "network.b"],
}


@pytest.mark.parametrize("names", MIXED)
def test_a_prefix_that_only_some_names_have_is_refused(names: str, tmp_path: Path, model: str) -> None:
    torch.save({name: torch.ones(2, 2) for name in MIXED[names]}, tmp_path / "mixed.pth")
    words = ["migrate", "mixed.pth", "new.safetensors"]
    refused = invoke([*words, "--strip-prefix", "net"])

    assert (refused.exit_code, "has the prefix" in refused.stderr) == (1, True)
    with pytest.raises(MigrationRefused, match="has not"):
        ckptool.migrate("mixed.pth", "new.safetensors", strip_prefix="net")
    assert r"--rename '^net\.='" in refused.stderr
    assert invoke([*words, "--rename", r"^net\.="]).exit_code == 0
    assert invoke([*words, "--strip-prefix", "net", "--include", "net.*", "--force"]).exit_code == 0
    assert ckptool.load("new.safetensors").keys() == {"a"}


@each("option", ["--set-metadata", "--recipe-arg", "--model-arg"])
def test_a_key_is_given_once(option: str, model: str) -> None:
    done = run("migrate", model, "new.safetensors", option, "a=1", option, "a=2", code=2)

    assert f"{option}: 'a' is given twice" in done.stderr


@each("value", ["x", "1.5", "True", "'3'", "[1]"])
def test_an_argument_of_a_recipe_is_a_whole_number(value: str, model: str) -> None:
    for words in (["migrate", model, "new.pth"], ["diff", model, model]):
        done = run(*words, "--recipe", "dinov2", "--recipe-arg", f"heads={value}", code=2)
        assert "--recipe-arg: heads is no whole number" in done.stderr


A = str(VALID / "lenet-state-dict-cpu-zip.pth")
OLD = str(VALID / "lenet-model-forged-cuda0-legacy.pth")


@each(
    ("words", "idle"),
    [
        (["inspect", A, "--globals", "--include", "conv*"], "--include"),
        (["inspect", A, "--globals", "--exclude", "conv*"], "--exclude"),
        (["inspect", A, "--globals", "--source"], "--globals"),
        (["inspect", A, "--globals", "-q"], "--quiet"),
        (["inspect", OLD, "--source", "--grep", "conv"], "--grep"),
        (["inspect", OLD, "--source", "--json"], "--source"),
        (["inspect", A, "-q", "--tree"], "--tree"),
        (["inspect", A, "-q", "--limit", "1"], "--limit"),
        (["inspect", A, "-q", "--sort", "size"], "--sort"),
        (["inspect", A, "--json", "--limit", "1"], "--limit"),
        (["inspect", A, "--jsonl", "--columns", "name"], "--columns"),
        (["inspect", A, "--json", "--tree"], "--tree"),
        (["inspect", A, "--tree", "--columns", "name"], "--columns"),
        (["inspect", A, "--depth", "1", "--columns", "name"], "--columns"),
        (["inspect", A, "--tree", "--table", "csv"], "--tree"),
        (["inspect", A, "--table", "csv", "--all"], "--all"),
        (["inspect", A, "--table", "csv", "--digest"], "--digest"),
        (["inspect", A, "-b", "--digest"], "--digest"),
        (["inspect", A, "-b", "--columns", "name"], "--columns"),
        (["check", "--list", A], "FILE"),
        (["check", "--list", "--deep"], "--deep"),
        (["check", "--explain", "x", A, "--deep"], "--deep"),
        (["check", "--explain", "x", A, "--fail-on", "error"], "--fail-on"),
        (["check", "--explain", "x", A, "--sarif"], "--sarif"),
        (["check", "--explain", "x", A, "-b"], "--brief"),
        (["check", A, "--sarif", "--digest"], "--digest"),
        (["check", A, "--sarif", "--jsonl"], "--jsonl"),
        (["check", A, "--sarif", "-b"], "--brief"),
        (["check", A, "-b", "--globals"], "--globals"),
        (["check", A, "-b", "--digest"], "--digest"),
        (["diff", A, A, "--no-values", "--atol", "0.1"], "--atol"),
        (["diff", A, A, "--no-values", "--rtol", "0.1"], "--rtol"),
        (["diff", A, A, "--no-values", "--stat"], "--stat"),
        (["diff", A, A, "-q", "--stat"], "--stat"),
        (["stat", A, "--json", "--limit", "1"], "--limit"),
        (["stat", A, "--jsonl", "--table", "csv"], "--table"),
        (["migrate", A, "--in-place", "--no-reflink", "--dry-run"], "--no-reflink"),
        (["merge", "--average", A, OLD, "-o", "m.pth", "--scale", "1"], "--scale"),
    ],
)
def test_an_option_with_nothing_to_do_is_refused_by_name(words: list[str], idle: str) -> None:
    done = run(*words, code=2)
    assert f"{idle}" in done.stderr
    assert "would do nothing. Give one of them." in done.stderr
    assert done.stderr.startswith("Usage: ")


@each("verb", ["inspect", "check"])
def test_a_line_for_each_file_may_stand_beside_json_with_digests(verb: str, tmp_path: Path) -> None:
    run(verb, A, "-b", "--digest", "--json", "-o", tmp_path / "found.json")
    assert json.loads((tmp_path / "found.json").read_text("utf-8"))["digest"].startswith("sha256:")


@each("word", ["CK205", "code", "system"])
def test_what_only_leaves_out_cannot_make_a_file_fail(word: str) -> None:
    done = run("check", A, "--only", "whole,loads", "--fail-on", word, code=2)
    assert f"--fail-on {word} is about a question that --only leaves out" in done.stderr
    run("check", A, "--only", "safe", "--fail-on", word)
    run("check", A, "--only", "loads", "--fail-on", "error", "--fail-on", "unreadable", "--fail-on", "CK301")


def test_no_fold_alone_is_about_no_tree() -> None:
    done = invoke(["inspect", A, "--no-fold"])

    assert (done.exit_code, "give --tree, too" in done.stderr) == (2, True)
    assert invoke(["inspect", A, "--depth", "1", "--no-fold"]).exit_code == 0


@pytest.mark.parametrize(("option", "value"), in_turn(["--rtol", "--atol"], ["nan", "inf", "-1", "-inf"]))
def test_a_tolerance_is_a_finite_number(option: str, value: str) -> None:
    done = invoke(["diff", A, A, option, value])

    assert (done.exit_code, option[2:] in done.stderr) == (2, True)
    with pytest.raises(ValueError, match="give a finite number, 0 or more"):
        ckptool.diff(A, A, **{option[2:]: float(value)})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="need values=True"):
        ckptool.diff(A, A, values=False, **{option[2:]: 1})  # type: ignore[arg-type]


@pytest.mark.parametrize("questions", ["safe", "whole,loads"])
def test_a_comparison_that_only_leaves_out_is_refused(questions: str) -> None:
    done = run("check", A, "--only", questions, "--like", A, code=2)
    assert "--only leaves out: add fits" in done.stderr
    assert invoke(["check", A, "--only", f"{questions},fits", "--like", A]).exit_code == 0


@each(
    ("option", "question"),
    [("--values", "whole"), ("--strict", "whole"), ("--device-check", "loads"), ("--like", "fits")],
)
def test_a_question_that_only_leaves_out_is_not_asked(option: str, question: str) -> None:
    words = ["check", A, option, *([A] if option == "--like" else [])]
    assert f"--only leaves out: add {question}" in run(*words, "--only", "safe", code=2).stderr
    run(*words, "--only", f"safe,{question}")
    run("check", A, "--only", " ,", code=2)


@pytest.mark.parametrize("others", [[], ["bias"]])
def test_an_empty_pattern_keeps_no_types(others: list[str], tmp_path: Path) -> None:
    with pytest.raises(ckptool.MigrationRefused, match="an empty keep_dtype would keep every type"):
        ckptool.migrate(A, tmp_path / "x.pth", dtype="float16", keep_dtype=["", *others])
    assert not (tmp_path / "x.pth").exists()


def test_a_pattern_beside_quiet_says_by_the_exit_code_whether_it_matches() -> None:
    run("inspect", A, "-q", "--grep", "conv", code=0)
    run("inspect", A, "-q", "--grep", "nowhere", code=1)
