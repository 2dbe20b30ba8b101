"""Globs and patterns of a user: what they take, and that they cost what they may on the names of any file."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
import torch

import ckptool
from ckptool.names import renaming
from ckptool.names.renaming import LONGEST, Substitution, Trials
from tests.each import each
from tests.program import invoke

CUBIC = r"(.*)\.(.*)\.weight"
ONE = torch.ones(1)


def saved(folder: Path, *names: str) -> str:
    path = folder / "names.pth"
    torch.save(dict.fromkeys(names, ONE), path)
    return str(path)


def test_names_that_are_too_long_are_left_and_that_is_said(tmp_path: Path) -> None:
    path = saved(tmp_path, "a" * 60_000, "b" * 60_000, "." * LONGEST, "x.y.weight")
    started = time.thread_time()
    result = invoke(["inspect", "--grep", CUBIC, path])

    assert time.thread_time() - started < renaming.SECONDS
    assert "x.y.weight" in result.stdout
    assert result.stderr == f"Note: 2 names of more than {LONGEST} characters not tried with --grep.\n"


@pytest.mark.parametrize(
    "changes", [{"rename": [(CUBIC, r"\1")]}, {"dtype": "float16", "keep_dtype": [CUBIC], "form": "state_dict"}]
)
def test_a_migration_by_patterns_refuses_such_names(changes: dict[str, object], tmp_path: Path) -> None:
    path = saved(tmp_path, "a" * 60_000, "x.y.weight")

    with pytest.raises(ckptool.errors.LimitExceeded) as raised:
        ckptool.migrate(path, dry_run=True, **changes)  # type: ignore[arg-type]
    assert (raised.value.kind, raised.value.needed, raised.value.actual) == ("name-too-long", 60_000, LONGEST)
    assert ckptool.migrate(path, dry_run=True, exclude=["aaa*"], **changes).written is False  # type: ignore[arg-type]


def test_all_trials_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renaming, "SECONDS", 0.1)
    trials = Trials()
    pattern = re.compile(CUBIC)

    with pytest.raises(ckptool.errors.LimitExceeded) as raised:
        all(trials.on("." * 300, pattern.search) is None for _ in range(1_000))
    assert raised.value.kind == "pattern-too-slow"


def test_short_names_count_where_they_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renaming, "SECONDS", 0.1)
    trials = Trials()
    pattern = re.compile(r"(\w+\.?)*weight=x")

    with pytest.raises(ckptool.errors.LimitExceeded) as raised:
        all(trials.on("a" * 20 + str(at), pattern.search) is None for at in range(10_000))
    assert raised.value.kind == "pattern-too-slow"


def test_trials_are_stopped_between_names() -> None:
    cancellation = ckptool.Cancellation()
    trials = Trials(cancellation)
    assert trials.on("a" * 100, str.upper) == "A" * 100
    cancellation.cancel()

    with pytest.raises(ckptool.Cancelled):
        trials.on("a" * 100, str.upper)


def test_a_cancelled_migration_tries_no_more_names(tmp_path: Path) -> None:
    path = saved(tmp_path, *(f"{'n' * 100}.{index}" for index in range(5)))
    cancellation = ckptool.Cancellation()
    tried = []

    def stop(found: re.Match[str]) -> str:
        tried.append(found[0])
        cancellation.cancel()
        return "m"

    with pytest.raises(ckptool.Cancelled):
        ckptool.migrate(
            path,
            dry_run=True,
            rename=[Substitution(re.compile("n+"), stop)],  # type: ignore[arg-type]  # re.sub takes it: it stops here
            limits=ckptool.Limits(cancellation=cancellation),
        )
    assert len(tried) <= 2


NAMES = ["conv.weight", "conv.bias", "head.conv.weight", "Head.bias"]


@each(
    ("include", "exclude", "left"),
    [
        ((), (), NAMES),
        (("conv.*",), (), ["conv.weight", "conv.bias"]),
        (("conv.*", "*.bias"), (), ["conv.weight", "conv.bias", "Head.bias"]),
        ((), ("*.bias",), ["conv.weight", "head.conv.weight"]),
        (("*conv*",), ("head.*",), ["conv.weight", "conv.bias"]),
        (("head.?ias",), (), []),
        ((), ("*",), []),
    ],
)
def test_a_name_is_taken_if_a_glob_includes_it_and_none_excludes_it(
    include: tuple[str, ...], exclude: tuple[str, ...], left: list[str], tmp_path: Path
) -> None:
    torch.save({name: torch.ones(1) for name in NAMES}, tmp_path / "x.pth")
    globs = [f"--{option}={glob}" for option, all_of in (("include", include), ("exclude", exclude)) for glob in all_of]
    found = invoke(["stat", str(tmp_path / "x.pth"), "--allow-unmatched", "--json", *globs])

    assert [row["name"] for row in json.loads(found.stdout)["rows"]] == left
