"""An option that would do nothing beside another one is refused, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckptool
from tests.each import each
from tests.program import invoke, run
from tests.scale import in_turn

VALID = Path(ckptool.__file__).parents[1] / "fixtures" / "valid"
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
        (["inspect", A, "--tree", "--table", "csv"], "--tree"),
        (["inspect", A, "--table", "csv", "--all"], "--all"),
        (["inspect", A, "--table", "csv", "--digest"], "--digest"),
        (["inspect", A, "-b", "--digest"], "--digest"),
        (["inspect", A, "-b", "--columns", "name"], "--columns"),
        (["check", "--list", A], "FILE"),
        (["check", "--list", "--deep"], "--deep"),
        (["check", "--explain", "x", A, "--deep"], "--deep"),
        (["check", "--explain", "x", A, "--fail-on", "error"], "--fail-on"),
        (["check", A, "--sarif", "--jsonl"], "--jsonl"),
        (["check", A, "--sarif", "-b"], "--brief"),
        (["check", A, "-b", "--globals"], "--globals"),
        (["diff", A, A, "--no-values", "--atol", "0.1"], "--atol"),
        (["diff", A, A, "--no-values", "--rtol", "0.1"], "--rtol"),
        (["diff", A, A, "--no-values", "--stat"], "--stat"),
        (["diff", A, A, "-q", "--stat"], "--stat"),
        (["stat", A, "--json", "--limit", "1"], "--limit"),
        (["stat", A, "--jsonl", "--table", "csv"], "--table"),
        (["migrate", A, "--in-place", "--no-reflink", "--dry-run"], "--no-reflink"),
    ],
)
def test_an_option_with_nothing_to_do_is_refused_by_name(words: list[str], idle: str) -> None:
    done = run(*words, code=2)
    assert f"{idle}" in done.stderr
    assert "would do nothing. Give one of them." in done.stderr


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


@pytest.mark.parametrize("others", [[], ["bias"]])
def test_an_empty_pattern_keeps_no_types(others: list[str], tmp_path: Path) -> None:
    with pytest.raises(ckptool.MigrationRefused, match="an empty keep_dtype would keep every type"):
        ckptool.migrate(A, tmp_path / "x.pth", dtype="float16", keep_dtype=["", *others])
    assert not (tmp_path / "x.pth").exists()
