"""Folders that several processes write: the bytes of one process, whoever is killed, and nothing else."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result

from tests.cli.test_process import heed_interrupts
from tests.migration import dying
from tests.migration.test_file_jobs import assert_nothing_there, assert_same, state_dict
from tests.missing import only_linux
from tests.program import run
from tests.scale import exhaustive, scale, scaled, times
from tests.workers import do_first

pytestmark = only_linux("/proc, signals")

SHARDS = ("--max-shard-size", "1200B")
FORMS = {"shards": SHARDS, "dcp": ("--form", "dcp", "--max-shard-size", "16KB")}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.save(state_dict(), tmp_path / "source.pth")
    return tmp_path / "source.pth"


def migrate(*arguments: object, code: int = 0) -> Result:
    return run("migrate", *arguments, code=code)


def report(result: Result) -> Any:
    return json.loads(result.stdout) | {"target": ""}


@pytest.mark.parametrize(
    ("form", "workers"),
    [("shards", 2), *(pytest.param(form, count, marks=exhaustive) for form in FORMS for count in (2, 3, 99))],
)
def test_the_result_and_the_report_are_those_of_one(form: str, workers: int, source: Path, tmp_path: Path) -> None:
    names = ("--add-prefix", "a", "--rename", r"^a\.layers=b", "--exclude", "counter")
    options = (*FORMS[form], "--json", *(("--dtype", "bfloat16") if workers == 3 else names))
    one = migrate(source, tmp_path / "one", *options)
    several = migrate(source, tmp_path / "several", *options, "--jobs", workers)

    assert_same(tmp_path / "one", tmp_path / "several")
    assert report(several) == report(one)
    assert several.stderr == one.stderr == ""
    assert any(cast["max_error"] for cast in report(several)["casts"]) is (workers == 3)


def test_what_is_there_stays_and_no_process_starts(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptool.cli.pool._Process", None)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_bytes(b"{}")

    said = migrate(source, tmp_path / "out", *SHARDS, "--jobs", 2, code=2).stderr

    assert "exists already" in said
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["config.json"]
    assert "not written: a dry run" in migrate(source, *SHARDS, "--jobs", 2, "--dry-run").stdout


def test_an_error_of_a_worker_is_the_error(source: Path, tmp_path: Path) -> None:
    data = bytearray(source.read_bytes())
    at = data.index(state_dict()["layers.3.weight"].numpy().tobytes())
    data[at + 5] ^= 1
    source.write_bytes(data)
    one = migrate(source, tmp_path / "out", *SHARDS, code=2)
    two = migrate(source, tmp_path / "out", *SHARDS, "--jobs", 2, code=2)

    assert "is damaged: its CRC-32 is" in one.stderr
    assert two.stderr == one.stderr
    assert_nothing_there(tmp_path / "out")


# Workers that die


@scaled
@pytest.mark.parametrize("form", FORMS if scale else ["shards"])
@pytest.mark.parametrize("after", [False, True] if scale else [True])
def test_a_worker_that_dies_at_any_step_costs_nothing(
    form: str, after: bool, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    migrate(source, tmp_path / "one", *FORMS[form])
    marker = tmp_path / "died"
    dice = random.Random(f"{form}{after}")
    deaths = 0
    for number in range(times(1, 5)):
        at = dice.randrange(1, 120) if number else 20
        with monkeypatch.context() as deadly:
            do_first(dying.code(at, marker, after=after), tmp_path / f"first-{number}", deadly)
            migrate(source, tmp_path / f"{number}", *FORMS[form], "--jobs", 2)
        assert_same(tmp_path / "one", tmp_path / f"{number}")
        deaths += marker.exists()
        marker.unlink(missing_ok=True)
    assert deaths


def test_a_file_at_which_two_died_is_the_error(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    do_first(dying.code(1, tmp_path / "died", after=False, always=True), tmp_path.parent / "first", monkeypatch)

    said = migrate(source, tmp_path / "out", *SHARDS, "--jobs", 2, code=2).stderr

    assert "was not written: 2 times, the process that worked at it was ended by signal 9, Killed" in said
    assert_nothing_there(tmp_path / "out")


# The process that they work for


@scaled
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_when_the_first_process_ends_so_do_the_others_and_nothing_has_the_name(
    how: signal.Signals, source: Path, tmp_path: Path
) -> None:
    large = tmp_path / "large.pth"
    torch.save({f"layers.{number}": torch.randn(250_000) for number in range(times(8, 64))}, large)
    command = [sys.executable, "-m", "ckptool", "migrate", str(large), str(tmp_path / "out")]
    command += ["--max-shard-size", "1MB", "--jobs", "2"]
    for delay in [0.05, *(0.1 * number for number in range(1, times(1, 5)))]:
        process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=heed_interrupts,
        )
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        workers: list[str] = []
        while process.poll() is None and len(workers) < 3:  # one of them is Python's own
            with suppress(OSError):
                workers = children.read_text().split()
            time.sleep(0.001)
        time.sleep(delay)
        if how == signal.SIGINT:
            os.killpg(process.pid, how)  # what a terminal does: the others get it, too
        else:
            process.kill()
        _, said = process.communicate()
        assert said == b""
        while any(is_alive(worker) for worker in workers):
            time.sleep(0.001)  # they end by themselves
        if process.returncode == 0:
            break
        assert not (tmp_path / "out").exists()
        if how == signal.SIGINT:
            assert_nothing_there(tmp_path / "out")
    migrate(large, tmp_path / "out", "--max-shard-size", "1MB", "--force")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large.pth", "out", "source.pth"]


def is_alive(pid: str) -> bool:
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False
