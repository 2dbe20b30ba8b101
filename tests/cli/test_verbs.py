"""The words that people try: no verb, other words for verbs, misspelt ones, help, versions, completion."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import Result

from ckptool import __version__
from ckptool.cli import cli
from ckptool.cli.verbs import EXAMPLES, GROUPS, SECTIONS, VERBS, WORDS, Verbs
from tests.each import each
from tests.program import invoke
from tests.scale import some

FIXTURE = str(Path(__file__).parents[2] / "fixtures" / "valid" / "state-dict-plain-cpu-zip.pth")


def run(*arguments: str, **options: str) -> Result:
    return invoke(arguments, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "arguments", [[FIXTURE], ["-q", FIXTURE], [FIXTURE, "-q"], ["--json", FIXTURE], [FIXTURE, FIXTURE]]
)
def test_files_without_a_verb_are_inspected(arguments: list[str]) -> None:
    found, expected = run(*arguments), run("inspect", *arguments)

    assert (found.exit_code, found.output) == (0, expected.output)


@pytest.mark.parametrize("verb", ["inspect", "check", "info"])
def test_options_may_come_before_the_verb(verb: str) -> None:
    found, expected = run("--json", verb, FIXTURE), run(verb, "--json", FIXTURE)

    assert (found.exit_code, found.output) == (0, expected.output)


def test_a_file_that_is_not_there_is_named_as_such() -> None:
    found = run("model.pth")

    assert found.exit_code == 2
    assert "model.pth: no such file" in found.output


def test_a_file_that_is_not_there_is_answered_with_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("plain.pth", "m.safetensors"):
        (tmp_path / name).touch()

    assert "Did you mean 'm.safetensors'?" in invoke(["-q", "m.safetensor"]).output
    assert "Did you mean 'plain.pth'?" in invoke(["inspect", "plan.pth"]).output
    assert "Did you mean the file 'plain.pth'?" in invoke(["plain"]).output
    assert "Did you mean 'inspect'?" in invoke(["inspct"]).output


def test_a_verb_is_never_taken_for_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "devices").write_bytes(b"x")
    monkeypatch.chdir(tmp_path)

    assert run("devices", "--help").output.startswith("Usage: cli devices")


@pytest.mark.parametrize("word", sorted(WORDS))
def test_other_words_for_verbs(word: str) -> None:
    assert run(word, "--help").output == run(WORDS[word], "--help").output


@pytest.mark.parametrize(("word", "meant"), [("inspct", "inspect"), ("migarte", "migrate"), ("convrt", "migrate")])
def test_a_misspelt_verb_is_answered_with_the_nearest(word: str, meant: str) -> None:
    found = run(word)

    assert found.exit_code == 2
    assert f"Did you mean '{meant}'?" in found.output


@pytest.mark.parametrize(
    ("option", "meant"), [("--treee", "--tree"), ("--verison", "--version"), ("--depht", "--depth")]
)
def test_a_misspelt_option_is_answered_with_the_nearest_alone(option: str, meant: str) -> None:
    found = run("inspect", FIXTURE, option)

    assert found.exit_code == 2
    assert f"No such option '{option}'. Did you mean '{meant}'?" in found.output.replace("(", "").replace("?)", "?")


@each(
    ("words", "meant", "options"),
    [
        (["migrate", FIXTURE, "--cpu"], "Did you mean '--to cpu'?", "--to cpu"),
        (["migrate", "--cuda", FIXTURE], "Did you mean '--to cuda'?", "--to cuda"),
        (["migrate", FIXTURE, "--device", "cuda:1"], "Did you mean '--to'?", "--to cuda:1"),
        (["migrate", FIXTURE, "--half", "--cpu"], "Did you mean '--dtype half'?", "--dtype half --to cpu"),
        ([FIXTURE, "--device=cuda:1"], "Did you mean '--to'?", "--to=cuda:1"),
        ([FIXTURE, "--bf16"], "Did you mean '--dtype bf16'?", "--dtype bf16"),
        ([FIXTURE, "--to", "cpu"], "It is one of 'ckptool migrate'.", "--to cpu"),
        (["--form", "safetensors", "show", FIXTURE], "It is one of 'ckptool migrate'.", "--form safetensors"),
    ],
)
def test_options_that_people_try_are_answered_with_the_whole_command(
    words: list[str], meant: str, options: str, tmp_path: Path
) -> None:
    found = run(*words)
    option = next(word.partition("=")[0] for word in words if word.startswith("--"))
    (command,) = re.findall("Run: ckptool (.*)", found.stderr)

    assert (found.exit_code, found.stdout) == (2, "")
    assert f"No such option '{option}'. {meant}" in found.stderr
    assert sorted(command.split()) == sorted(["migrate", FIXTURE, *options.split()])
    done = run(*command.split(), "--out-dir", str(tmp_path))
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["diff", FIXTURE, FIXTURE, "--tolerance", "1e-3"], "Did you mean '--atol'?"),
        (["check", "--safe", FIXTURE], "Did you mean '--only safe'?"),
        (["migrate", FIXTURE, "--strip"], "Did you mean '--strip-module'?"),
        (["--check", FIXTURE], "Did you mean 'check'?"),
        (["inspect", FIXTURE, "--values"], "Did you mean 'stat'?"),
        (["migrate", FIXTURE, "-o", "x.pth"], "DST is the second path, without an option."),
    ],
)
def test_what_people_try_is_answered_with_what_there_is(words: list[str], answer: str) -> None:
    found = run(*words)
    assert (found.exit_code, found.stdout) == (2, "")
    option = next(word for word in words if word.startswith("-"))
    assert f"No such option '{option}'. {answer}" in found.stderr


@pytest.mark.parametrize("verb", ["inspect", "check", "diff", "stat", "scan", "migrate", "merge", "recover", "explain"])
def test_a_verb_without_its_arguments_shows_an_example(verb: str) -> None:
    found = run(verb)
    assert found.exit_code == 2
    assert "Missing " in found.stderr
    assert f"For example: ckptool {verb} " in found.stderr.replace("ckptool model.pth", "ckptool inspect model.pth")


@pytest.mark.parametrize("verb", ["inspect", "stat"])
def test_a_glob_that_is_a_part_of_names_is_answered_with_one_that_matches(verb: str) -> None:
    found = run(verb, FIXTURE, "--include", "embedding")
    assert found.exit_code == 1
    assert "Hint: A glob is compared with the whole name: '*embedding*' matches 1. If this is meant" in found.stderr
    assert "compared" not in run(verb, FIXTURE, "--include", "nothing").stderr


@pytest.mark.parametrize(
    ("model", "answer"),
    [
        ("ckptool.reference.nets:Lenet", "there is no 'Lenet' in it; 'LeNet' is"),
        ("ckptool.reference.nets:MLP", "Hint: Give size, depth with --model-arg."),
    ],
)
def test_a_class_that_cannot_be_built_is_answered_with_what_is_missing(model: str, answer: str) -> None:
    assert answer in run("check", FIXTURE, "--model", model).stderr


def test_an_option_of_the_verb_itself_stays_the_nearest() -> None:
    assert "Did you mean '--device-check'?" in run("check", FIXTURE, "--device", "cuda").stderr


def test_a_misspelt_verb_in_front_of_a_file_is_no_file() -> None:
    assert "'inspct' is no verb, and no file that is there. Did you mean 'inspect'?" in run("inspct", FIXTURE).output


def test_help_and_version_are_words_too() -> None:
    assert run("version").output == run("--version").output
    assert run("help").output == run("--help").output
    assert run("help", "diff").output == run("diff", "--help").output


def test_what_is_done_in_python_is_said_to_be() -> None:
    assert "ckptool.load(path)" in run("load", FIXTURE).output


@pytest.mark.parametrize("arguments", [["--key", "model"], ["--model-arg", "n=4"]])
def test_check_refuses_options_that_would_do_nothing(arguments: list[str]) -> None:
    found = run("check", FIXTURE, *arguments)

    assert found.exit_code == 2
    assert f"{arguments[0]} is" in found.output


def test_no_word_at_all_is_a_wish_for_help() -> None:
    assert (run().exit_code, run().output) == (0, run("--help").output)
    assert all(f"\n  {verb} " in run().output for verb in VERBS)
    assert "..." not in run().output.partition("Look into")[2], "a first line is cut"


@each("arguments", [["-V"], ["--version"], *([verb, option] for verb in VERBS for option in ("-V", "--version"))])
def test_the_version_is_told_wherever_it_is_asked_for(arguments: list[str]) -> None:
    assert (run(*arguments).exit_code, run(*arguments).output) == (0, f"ckptool, version {__version__}\n")


@pytest.mark.parametrize("verb", sorted(EXAMPLES))
def test_the_help_of_a_verb_ends_with_examples(verb: str) -> None:
    shown = run(verb, "--help").output

    assert shown.endswith("".join(f"  {line}\n" for line in EXAMPLES[verb]))


def test_colours_are_for_terminals_and_for_whoever_asks() -> None:
    plain = run("check", FIXTURE, "--strict").output + run("check", "absent.pth").output
    always = run("--color", "always", "absent.pth")

    assert "\x1b" not in plain
    assert "\x1b[31m\x1b[1mError:\x1b[0m absent.pth: no such file" in always.output
    assert "\x1b" not in run("--color=never", FIXTURE).output
    assert run("inspect", "absent.pth", "--color", "always").output == always.output
    assert run("inspect", "--color=always", "--", "absent.pth").output == always.output
    assert re.sub(r"\x1b\[\d+m", "", always.output) == run("absent.pth").output


def test_explain_is_what_check_explains() -> None:
    message = "PytorchStreamReader failed reading zip archive: failed finding central directory"
    by_option, by_verb = run("check", "--explain", message, FIXTURE), run("explain", message, FIXTURE)

    assert (by_verb.exit_code, by_verb.output) == (by_option.exit_code, by_option.output)
    assert by_verb.output.startswith("truncated-zip: ")
    assert run("explain", "-", input=message).output == run("explain", message).output


def test_standard_input_is_answered_alike() -> None:
    assert run("-").output == run("inspect", "-").output
    assert "standard input" in run("-").output


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "powershell"])
def test_one_command_prints_the_completion_of_each_shell(shell: str) -> None:
    by_name = run("completion", shell).output
    by_use = invoke(["completion"], env={"SHELL": f"/usr/bin/{shell}"}).output

    assert by_name == by_use
    assert "_CKPTOOL_COMPLETE" in by_name
    assert f"{shell}_complete" in by_name
    assert invoke(["completion"], env={"SHELL": "/bin/tcsh"}).exit_code == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["stat"], "Missing argument 'FILE...'. For example: ckptool stat model.pth\n"),
        (["inspect", "--columns"], "Option '--columns' requires an argument.\n"),
        (["migrate", "--dtype"], "Option '--dtype' requires an argument.\n"),
        (["inspect", "--limit", "x", "y"], "'x' is not a whole number.\n"),
        (["explain", "."], ". is a folder, and TEXT is the message to explain. To look at it: ckptool check .\n"),
    ],
)
def test_errors_of_usage_say_how_it_is_given(words: list[str], said: str) -> None:
    result = invoke(words)
    assert result.exit_code == 2
    assert result.stderr.endswith(said)


COMPLETED = [
    (["insp"], "inspect"),
    (["inspect", "--tre"], "--tree"),
    (["migrate", "--weights", "em"], "ema"),
    (["inspect", "--columns", "name,dev"], "name,device"),
    (["migrate", "--to", "cp"], "cpu"),
    (["check", "mod"], "file"),
]


@pytest.mark.parametrize(("words", "expected"), some(COMPLETED, 2))
def test_bash_completes_words_options_choices_and_files(words: list[str], expected: str, tmp_path: Path) -> None:
    if shutil.which("bash") is None:  # what it would ask
        asked = {"COMP_WORDS": " ".join(["ckptool", *words]), "COMP_CWORD": str(len(words))}
        asked["_CKPTOOL_COMPLETE"] = "bash_complete"
        program = [sys.executable, "-m", "ckptool"]
        answer = subprocess.run(program, capture_output=True, text=True, env=os.environ | asked, check=False)
        kind, _, value = answer.stdout.strip().partition(",")
        assert (kind if kind == "file" else value) == expected, answer.stderr
        return
    command = tmp_path / "ckptool"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m ckptool "$@"\n')
    command.chmod(0o755)
    script = f"""
        eval "$(ckptool completion bash)"
        compopt() {{ echo file; }}
        COMP_WORDS=(ckptool {" ".join(words)}); COMP_CWORD={len(words)}
        _ckptool_completion ckptool; echo "${{COMPREPLY[@]}}"
    """
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment, check=False)

    assert done.stdout.split() == [expected], done.stderr


def test_powershell_is_answered_three_lines_for_each_word() -> None:
    asked = {"COMP_WORDS": "ckptool insp", "COMP_CWORD": "1", "_CKPTOOL_COMPLETE": "powershell_complete"}
    program = [sys.executable, "-m", "ckptool"]
    done = subprocess.run(program, capture_output=True, text=True, env=os.environ | asked, check=False)

    assert done.stdout.splitlines()[:2] == ["plain", "inspect"]


def test_the_help_lists_what_each_verb_says_of_itself_and_imports_none() -> None:
    listed = {verb: does for verbs in SECTIONS.values() for verb, does in verbs.items()}
    commands = {verb: cli.get_command(click.Context(cli), verb) for verb in listed}

    assert listed == {verb: one.get_short_help_str(200) for verb, one in commands.items() if one is not None}
    code = "import sys; from ckptool.cli import cli\ntry: cli.main(['--help'])\nexcept SystemExit: print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {f"ckptool.cli.{verb}" for verb in (*listed, "more")} & set(done.stdout.split())


@pytest.mark.parametrize("verb", GROUPS)
def test_each_option_is_in_one_group_of_the_help(verb: str) -> None:
    command = Verbs().get_command(click.Context(click.Command("")), verb)
    assert command is not None
    listed = " ".join(GROUPS[verb].values()).split()
    options = [one.name for one in command.params if isinstance(one, click.Option) and not one.hidden]

    assert sorted(listed) == sorted(map(str, options))


@pytest.mark.skipif(sys.platform != "win32", reason="elsewhere the shell finds what patterns match")
def test_patterns_stand_for_files_where_files_are_meant_and_nowhere_else(tmp_path: Path) -> None:
    for name in ("b.pth", "a.pth", "%OS%.pth", "[a].pth", "x.weight"):
        shutil.copy(FIXTURE, tmp_path / name)

    def said(*words: str) -> str:
        command = [sys.executable, "-m", "ckptool", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    assert re.findall(r"\S+\.pth", said("check", "-b", "?.pth")) == ["a.pth", "b.pth"]
    assert re.findall(r"\S+\.pth", said("-b", "*.pth")) == ["%OS%.pth", "[a].pth", "a.pth", "b.pth"]
    assert "the same" in said("diff", "?.pth")
    assert said("check", "[*.pth").startswith("[a].pth")
    assert said("check", "%OS%.pth").startswith("%OS%.pth")
    said("migrate", "a.pth", "c.safetensors", "--include", "*.weight", "--rename", "^=%OS%.")
    assert "%OS%." in said("inspect", "c.safetensors")
