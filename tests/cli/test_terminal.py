"""What a person sees: lines that fit a real terminal, how many, in which colours, and how far a long reading is."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptool
from ckptool.checking.value_survey import ValueRow, statistics_of
from ckptool.cli import text
from ckptool.cli.text import ProgressLine
from ckptool.messages import labelled
from tests.each import each
from tests.missing import on_windows
from tests.program import VALID, invoke
from tests.scale import some

pytestmark = on_windows("it has no POSIX terminal")
if os.name == "posix":
    from tests.cli.pty_run import STYLES, Screen, on_terminal

FINE = VALID / "lenet-state-dict-cpu-zip.pth"
WARNED = VALID / "lenet-model-forged-cuda0-legacy.pth"
LONG: list[list[object]] = [["check", "--deep", FINE], ["diff", FINE, FINE], ["stat", FINE], ["migrate", FINE, "DST"]]
AT_ONCE = "import ckptool.cli.text as p; p._SECONDS_UNTIL_SHOWN = p._SECONDS_BETWEEN = 0"


def too_long(screen: Screen, columns: int) -> list[str]:
    """Return the lines that the terminal would break, but for commands to be copied and the paths in heads."""
    return [
        line
        for line in screen.lines
        if len(line) > columns and "Run: " not in line and str(VALID) not in line and not line.startswith("/")
    ]


@pytest.mark.parametrize("columns", some([60, 200, 80, 120], 4))
def test_lines_fit_the_terminal(columns: int) -> None:
    pointer = VALID.parent / "invalid" / "lfs-pointer.pth"
    files = ["inspect", "-b", WARNED, FINE], ["check", "-b", WARNED], ["stat", FINE], ["diff", FINE, WARNED]
    for arguments in (*files, ["migrate", WARNED, "--dry-run"], ["inspect", WARNED, pointer]):
        screen = on_terminal(arguments, columns)
        assert screen.lines
        assert not [line for line in too_long(screen, columns) if " " in line.strip().removeprefix("Error: ")]


def test_scan_prints_a_table_on_a_terminal_and_lines_of_json_elsewhere() -> None:
    files = [FINE, WARNED, VALID.parent / "invalid" / "lfs-pointer.pth"]
    screen = on_terminal(["scan", "--jobs", "1", *files], 200)
    assert re.split(r"\s+", screen.lines[0].strip()) == ["grade", "format", "form", "parameters", "size", "file"]
    rows = [line.split() for line in screen.lines[1:4]]
    assert sorted(row[:2] for row in rows) == [["error", "unknown"], ["fine", "data"], ["warning", "code"]]
    assert "lfs-pointer.pth: not a checkpoint: a Git LFS pointer" in screen.raw
    assert max(map(len, on_terminal(["scan", "--jobs", "1", *files], 80).lines[:4])) <= 80


def test_a_word_longer_than_the_terminal_stays_behind_its_label_and_in_its_column() -> None:
    path = "folder/" * 8 + "model.pth"
    lines = labelled("source", path), labelled("renamed", f"{path} -> {path}"), labelled("", f"a {path}")

    assert list(text.wrapped(lines, 60)) == [
        labelled("source", path),
        labelled("renamed", path),
        labelled("", "->"),
        labelled("", path),
        labelled("", "a"),
        labelled("", path),
    ]


def test_a_line_for_each_file_is_one_line_of_the_terminal() -> None:
    files = sorted(VALID.glob("lenet*.pth"))
    screen = on_terminal(["check", "-b", *files], 60)
    lines = screen.lines[: screen.lines.index("")]

    assert len(lines) == len(files)
    assert all(len(line) <= 60 for line in lines)


def test_what_is_left_out_for_want_of_room_is_said_and_shown_with_wide() -> None:
    narrow = on_terminal(["inspect", FINE], 50)
    wide = on_terminal(["inspect", "--wide", FINE], 50)

    assert "… no room for dtype, device; --wide shows all" in "\n".join(narrow.lines)
    header = "name          shape          dtype    device  elements      size"
    assert header in wide.lines
    assert not any("no room" in line for line in wide.lines)


def test_odd_values_have_room_on_any_terminal(tmp_path: Path) -> None:
    path = tmp_path / "odd.pth"
    torch.save({"model.layers.0.weight": torch.tensor([0.0, 1 / 3]), "b": torch.tensor([float("nan"), 1 / 3])}, path)
    header = next(line for line in on_terminal(["stat", path], 60).lines if line.startswith("name"))

    assert header.split() == ["name", "mean", "min", "max", "zeros", "NaN", "histogram"]  # no inf: there is none


@pytest.mark.parametrize("verb", some(["inspect", "stat"], 2))
def test_a_terminal_gets_so_many_rows_and_a_pipe_all(verb: str, tmp_path: Path) -> None:
    path = tmp_path / "many.pth"
    torch.save({f"layer.{number}": torch.zeros(number + 1) for number in range(250)}, path)

    screen = on_terminal([verb, path])
    left = [line for line in screen.lines if line.startswith("… and")]
    assert sum(line.startswith("layer.") for line in screen.lines) == 200
    assert left[0].startswith("… and 50 more")
    assert sum(line.startswith("layer.") for line in on_terminal([verb, path, "--limit", "0"]).lines) == 250
    assert sum(line.startswith("layer.") for line in on_terminal([verb, path, "--limit", "7"]).lines) == 7


def test_what_the_limit_leaves_out_is_counted() -> None:
    line = on_terminal(["inspect", FINE, "--limit", "8"]).lines[-1]

    assert line == "… and 2 more, of 610 elements, 2.38 KiB; --limit 0 lists all"
    assert on_terminal(["inspect", FINE, "--tree", "--limit", "3"]).lines[-1] == "… and 12 more; --limit 0 lists all"


@pytest.mark.parametrize("verb", some(["inspect", "check", "stat", "diff"], 3))
def test_a_pager_shows_all_in_one_piece(verb: str, tmp_path: Path) -> None:
    pager = tmp_path / "pager"
    pager.write_text(f"#!/bin/sh\n{{ echo PAGED; cat; }} > {tmp_path}/shown\n")
    pager.chmod(0o755)
    files = [FINE, tmp_path / "absent.pth"] if verb != "diff" else [FINE, FINE]

    screen = on_terminal([verb, "--pager", *files], PAGER=str(pager))

    assert screen.lines == []
    shown = STYLES.sub("", (tmp_path / "shown").read_text())
    assert shown.startswith("PAGED\n")
    assert str(FINE) in shown
    assert "absent.pth: no such file" in shown or verb == "diff"


def test_severities_have_colours_on_a_terminal_and_nowhere_else() -> None:
    raw = on_terminal(["check", "-b", FINE, WARNED, "absent.pth"]).raw

    assert "\x1b[33mwarning\x1b[0m  …" in raw
    assert "\x1b[32mfine\x1b[0m     …" in raw
    assert set(re.findall(r"\x1b\[(\d+)m", raw)) == {"0", "1", "31", "32", "33"}
    assert "\x1b[3" not in on_terminal(["check", "-b", FINE, WARNED], NO_COLOR="1").raw


def test_what_went_well_is_green(tmp_path: Path) -> None:
    good = {
        ("check", FINE): "  verdict      \x1b[32mnothing wrong found\x1b[0m;",
        ("diff", FINE, FINE): "\x1b[32mthe same\x1b[0m: ",
        ("migrate", FINE, tmp_path / "out.pth"): "  result       \x1b[32mwritten\x1b[0m, and read back",
        ("report", FINE, "-o", tmp_path / "page.html"): ".html: \x1b[32mwritten\x1b[0m",
    }
    for arguments, expected in good.items():
        assert expected in on_terminal(arguments).raw


def test_names_are_cut_in_the_middle_on_a_terminal_and_in_no_pipe(tmp_path: Path) -> None:
    name = f"cond_stage_model.{'transformer.' * 6}token_embedding.weight"
    for path, value in (("a.pth", 1.0), ("b.pth", 2.0)):
        torch.save({name: torch.full((8,), value), "b": torch.ones(1)}, tmp_path / path)
    both = [tmp_path / "a.pth", tmp_path / "b.pth"]
    for arguments in (["diff", *both], ["inspect", "--tree", both[0]]):
        screen = on_terminal(arguments)
        assert not [line for line in too_long(screen, 80) if str(tmp_path) not in line]
        assert any(re.search(r"cond_stage_\S*…\S*embedding\.weight", line) for line in screen.lines), screen.lines
        assert name not in screen.raw
        assert name in invoke([*map(str, arguments)]).stdout


def test_wide_characters_are_counted_and_text_that_is_cut_has_a_mark(tmp_path: Path) -> None:
    torch.save({"層" * 60: torch.ones(1), "short": torch.ones(2, 3)}, tmp_path / "wide.pth")
    lines = on_terminal(["inspect", tmp_path / "wide.pth"], 60).lines
    wide, short = (next(line for line in lines if line.startswith(name)) for name in ("層", "short"))
    assert short.index("[2, 3]") == wide.index("[1]") + wide.count("層")  # two cells each
    for length in (195, 196):
        save_file({"w": torch.ones(1)}, tmp_path / "a.safetensors", {"note": "x" * length})
        shown = "".join(on_terminal(["inspect", "-q", tmp_path / "a.safetensors"], 1000).lines)
        assert ("note=" + "x" * 195 + "…" in shown) is (length == 196)


def test_how_files_are_stands_behind_what_they_are() -> None:
    header, fine, warned = on_terminal(["inspect", "-b", FINE, WARNED, "absent.pth"], 120).lines[:3]

    assert header.startswith("file ")
    assert "opened" not in fine
    assert warned.split()[1] == "torch_legacy"


def test_a_tensor_called_error_is_none(tmp_path: Path) -> None:
    names = dict.fromkeys(("warning", "error", "the same", "written", "fine"), torch.ones(3))
    torch.save(names, tmp_path / "a.pth")

    for option in ([], ["--tree"]):
        assert "\x1b[" not in on_terminal(["inspect", *option, tmp_path / "a.pth"]).raw


@pytest.mark.parametrize("arguments", some(LONG, 3))
def test_long_work_says_how_far_it_is(arguments: list[object], tmp_path: Path) -> None:
    arguments = [tmp_path / "out.safetensors" if one == "DST" else one for one in arguments]
    raw = on_terminal(arguments, 120, before=AT_ONCE).raw

    assert "100%" in raw
    assert " KiB of 1" in raw
    assert f"{FINE.name}  ━" in STYLES.sub("", raw)
    assert "/s" in raw
    assert raw.count("\x1b[2K") >= 2  # drawn over itself, and gone before the report


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 2


def test_progress_is_shown_after_half_a_second_ten_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.0, 0.4, 0.6, 0.61, 0.75, 0.9, 1.0, 4.1])
    monkeypatch.setattr("sys.stderr", Terminal())
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((120, 50)))
    line = ProgressLine()
    line.next("folder/a.pth")

    for done in (10, 20, 30, 45):
        line(done << 20, 100 << 20)
    line.next("folder/b.pth")  # what remains is said once there is a rate
    line(1 << 20, 900 << 20)
    line(2 << 20, 900 << 20)

    shown = [one.split() for one in sys.stderr.getvalue().split("\r\x1b[2K")[1:]]  # type: ignore[attr-defined]
    assert [one[2:] for one in shown] == [
        ["20%", "20", "MiB", "of", "100", "MiB", "33.3", "MiB/s", "0:02", "left"],
        ["45%", "45", "MiB", "of", "100", "MiB", "60", "MiB/s", "0:01", "left"],
        ["0%", "1", "MiB", "of", "900", "MiB", "10", "MiB/s"],
        ["0%", "2", "MiB", "of", "900", "MiB", "640", "KiB/s", "23:57", "left"],
    ]


def statistics(path: Path, *, progress: Callable[[int, int], object]) -> list[ValueRow]:
    with ckptool.open_checkpoint(path) as checkpoint:
        return list(statistics_of(checkpoint, list(checkpoint.tensors.values()), depth=None, progress=progress))


@each(
    ("call", "files"),
    [
        (partial(ckptool.check, deep=True), 1),
        (ckptool.diff, 2),
        (statistics, 1),
        (partial(ckptool.load, mmap=False), 1),
    ],
)
def test_callbacks_of_the_library_count_up_to_what_they_announce(call: Callable[..., object], files: int) -> None:
    told: list[tuple[int, int]] = []

    call(*[FINE] * files, progress=lambda done, total: told.append((done, total)))

    assert told == sorted(told)
    assert told[-1][0] == told[-1][1] >= 32_998 * 4


def test_progress_of_several_files_counts_them() -> None:
    assert f"2/2 {FINE.name}" in STYLES.sub("", on_terminal(["check", "--deep", WARNED, FINE], 120, before=AT_ONCE).raw)


@pytest.mark.parametrize("option", some(["--json", "--jsonl", "-q"], 2))
def test_no_progress_where_programs_or_nobody_reads(option: str) -> None:
    verb = ["diff", FINE, FINE] if option == "-q" else ["check", "--deep", FINE]
    raw = on_terminal([*verb, option], before=AT_ONCE).raw

    assert "\x1b[2K" not in raw


@pytest.mark.parametrize("room", [60, 80])
def test_facts_are_broken_between_words_and_commands_never(room: int) -> None:
    lines, whole = on_terminal(["check", WARNED], room).lines, in_pipe("check", WARNED)

    assert [line for line in lines if "Run: " in line] == [line for line in whole if "Run: " in line]
    assert " ".join(" ".join(lines).split()) == " ".join(" ".join(whole).split())


def test_facts_before_and_after_are_lines_where_a_table_is_too_wide() -> None:
    arguments = ["migrate", VALID / "checkpoint-ddp-forged-cuda0-zip.pth", "--form", "state_dict", "--dry-run"]
    narrow, wide = (on_terminal(arguments, columns).lines for columns in (60, 100))

    assert "  format       torch_zip, 42.6 KiB -> torch_zip, 14.9 KiB" in narrow
    assert [line.split() for line in wide if line.split()[:1] == ["before"]] == [["before", "after"]]
    assert not [line for line in narrow if line.split()[:1] == ["before"]]


def in_pipe(*arguments: object) -> list[str]:
    return invoke(arguments).stdout.splitlines()


@pytest.fixture(scope="module")
def talkative(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return files of which there is more to say than a terminal has room for."""
    tmp_path = tmp_path_factory.mktemp("talkative")
    lora = {
        f"lora_unet_{name}_{'x' * 60}.lora_{end}.weight": torch.ones(2, 2)
        for name in "abcdefghijk"
        for end in ("down", "up")
    }
    metadata = {
        "ss_tag_frequency": json.dumps({f"tag {number}": number for number in range(200)}),
        "ss_network_dim": "8",
    }
    save_file(lora, tmp_path / "lora.safetensors", metadata)
    callbacks = {
        f"ModelCheckpoint{{'monitor': 'val_loss', 'mode': 'min', 'number': {one}}}": {"best": one, "t": torch.ones(1)}
        for one in range(30)
    }
    torch.save({"epoch": 1, "state_dict": {"w": torch.ones(2)}, "callbacks": callbacks}, tmp_path / "last.ckpt")
    states = {
        f"optimizer_of_a_long_name_{one}_{'y' * 50}": torch.optim.SGD([torch.ones(2)], 0.1 + one).state_dict()
        for one in range(12)
    }
    torch.save({"w": torch.ones(2), **states}, tmp_path / "many.pth")
    return {"lora": tmp_path / "lora.safetensors", "last": tmp_path / "last.ckpt", "many": tmp_path / "many.pth"}


@pytest.mark.parametrize("which", ["lora", "last", "many"])
def test_a_pipe_gets_what_a_terminal_has_no_room_for(which: str, talkative: dict[str, Path]) -> None:
    path = talkative[which]
    screen = on_terminal(["inspect", "-q", path])
    piped = in_pipe("inspect", "-q", path)
    wide = on_terminal(["inspect", "-q", "--wide", path], 1000).lines

    assert any("…" in line or re.search(r"and \d+ more", line) for line in screen.lines)
    head = piped[: next((at for at, line in enumerate(piped) if " CK" in line), None)]
    assert not any("…" in line or re.search(r"and \d+ more", line) for line in head)
    assert [line.rstrip() for line in wide] == [line.rstrip() for line in piped]
    text = "\n".join(piped)
    if which == "lora":
        assert "tag 199" in text
        assert "ss_network_dim=8" in text
    elif which == "last":
        assert all(f"'number': {one}}}.best={one}" in text for one in range(30))
    else:
        assert all(f"optimizer_of_a_long_name_{one}_{'y' * 50}" in text for one in range(12))


def test_columns_of_many_files_that_have_no_room_are_named() -> None:
    narrow = on_terminal(["inspect", "-b", FINE, WARNED], 80)
    assert narrow.lines[-1] == "… no room for tensors, parameters, elements; --wide shows all"
    header = in_pipe("inspect", "-b", FINE)[0]
    assert header.split() == ["file", "format", "form", "tensors", "parameters", "elements", "size"]
    assert not any("no room" in line for line in on_terminal(["inspect", "-b", FINE], 200).lines)
