"""What people paste into a shell, a page or a spreadsheet does nothing there that a file says."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from ckptool.cli.tables import formatted_table, table_formats
from ckptool.messages import quoted, show
from tests.build import zip_file
from tests.each import each
from tests.missing import on_windows
from tests.program import invoke
from tests.scale import in_turn

ONE = {"w": torch.ones(2)}
PAYLOADS = ["$(touch PWNED)", "`touch PWNED`", "a;touch PWNED", "it's $(touch PWNED)", 'a"$(touch PWNED)']
POSIX = on_windows("it has no POSIX shell")


def said(*arguments: str) -> str:
    """Return what a command that fails says to do, as it is pasted: all after the colon of its last lines."""
    result = invoke(list(arguments))
    assert result.exit_code in (1, 2), result.output
    lines = [line for line in result.output.splitlines() if line.startswith(("Hint:", "Run:"))]
    assert lines
    return "\n".join(line.rpartition(": ")[2] if line.startswith("Hint:") else line[5:] for line in lines)


def paste(text: str, folder: Path) -> None:
    """Give each line to a shell as the arguments of a command that does nothing."""
    for line in text.splitlines():
        subprocess.run(["sh", "-c", f": {line}"], cwd=folder, check=False, capture_output=True)
    assert not (folder / "PWNED").exists(), text


@POSIX
@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_hint_that_is_pasted_runs_nothing(payload: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(
        {payload: ONE, "other": {name: one.clone() for name, one in ONE.items()}, "more": 1}, tmp_path / "several.pth"
    )
    paste(said("migrate", "several.pth", "--form", "state_dict"), tmp_path)
    torch.save(ONE, tmp_path / "one.pth")
    data = (tmp_path / "one.pth").read_bytes()
    (tmp_path / "two.zip").write_bytes(zip_file({f"{payload.strip()}.pth": data, "b.pth": data}))
    paste(said("migrate", "two.zip"), tmp_path)
    paste(said("inspect", "two.zip::absent"), tmp_path)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / f"{payload}.txt").write_bytes(b"x")
    paste(said("inspect", "folder"), tmp_path)
    for name in (payload, "other"):
        (folder / f"{name}.pth").write_bytes(data)
    paste(said("migrate", "folder"), tmp_path)


@POSIX
@pytest.mark.parametrize("payload", PAYLOADS)
def test_the_command_for_a_file_that_may_not_be_read_is_quoted(
    payload: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def denied(*_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr("ckptool.sources.files.os.open", denied)
        text = said("inspect", f"{payload}.pth")
    assert "chmod u+r -- " in text
    paste(text, tmp_path)


@each("table_format", table_formats())
def test_no_format_passes_markup_on(table_format: str) -> None:
    table = formatted_table(["name"], [["<script>alert(1)</script>"], ["<img src=x onerror=y>"]], [False], table_format)

    if table_format in ("github", "pipe", "mediawiki", "moinmoin", "textile", "jira", "youtrack", "html"):
        assert "<script" not in table
        assert "<img" not in table
        assert "&lt;script&gt;" in table


@pytest.mark.parametrize(("table_format", "cell"), in_turn(["csv", "tsv"], ["=1+1", "@x", "+1", "-2+3"]))
def test_no_cell_is_a_formula(table_format: str, cell: str) -> None:
    lines = formatted_table(["name", "n"], [[cell, "-"]], [False, True], table_format).splitlines()

    assert lines[-1].startswith(f"'{cell}")
    assert lines[-1].split("," if table_format == "csv" else "\t")[-1].strip() == "-"


@pytest.mark.parametrize(
    "code", [0x3164, 0x2800, 0xFE0F, 0xFFA0, 0x115F, 0x00AD, 0x034F, 0x200B, 0x2060, 0x180B, 0xE0041, 0x17B4, 0x1D159]
)
def test_what_prints_as_nothing_is_shown_as_an_escape(code: int, tmp_path: Path) -> None:
    escape = chr(code).encode("unicode_escape").decode()
    torch.save({f"a{chr(code)}": torch.ones(1), "a": torch.ones(2)}, tmp_path / "x.pth")
    shown = invoke(["inspect", str(tmp_path / "x.pth")]).stdout

    assert chr(code) not in shown
    assert f"a{escape}" in shown
    assert show(f"a{chr(code)}b") == f"a{escape}b"
    assert chr(code) not in quoted(f"a{chr(code)}b")


def test_letters_of_every_script_are_shown_as_they_are() -> None:
    for text in ("größe", "слой", "层", "レイヤー", "طبقة", "레이어", "naïve", "𝛼", "😀"):
        assert show(text) == text
