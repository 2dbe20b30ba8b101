"""
Folders written by several processes while these are killed: nothing is lost, nothing is there twice, the same bytes.

    python -m tests.migration.kills [KILLS] [SEED]

One migration follows another, into shards, into items, from one file and from a folder, until so many (by default 500)
workers were killed at work. Each must end with the folder of an undisturbed one; or, where several workers were killed
at one file, with an error that says so, and nothing under the name or beside it.
"""

from __future__ import annotations

import filecmp
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).parents[2]
SIZE = ("--max-shard-size", "4MB")
FORMS = {"shards": SIZE, "items": ("--form", "dcp", *SIZE)}


class Killed(NamedTuple):
    """What a run came to."""

    kills: int
    runs: int
    refused: int
    """Runs that ended with an error, as several workers were killed at one file."""


class Processes:
    """Workers of this machine, as ``--jobs`` starts them."""

    environment: Mapping[str, str] = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = "signal 9, Killed"
    """What is said where so many were killed at one file that it was given up."""
    pauses = (0.02, 0.6)
    """Seconds between two kills; each migration has its own between these."""

    def options(self, chance: random.Random) -> list[str]:
        """Return what makes a migration use them."""
        return ["--jobs", str(chance.choice([2, 3, 4]))]

    def at_work(self, migration: subprocess.Popen[str]) -> list[int]:
        """Return those that a migration has now."""
        return children(migration.pid)


def migrate(environment: Mapping[str, str], *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ckptool", "migrate", "-q", *map(str, arguments)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/"
    )


def assert_same(one: Path, other: Path) -> None:
    names = sorted(path.name for path in one.iterdir())
    assert sorted(path.name for path in other.iterdir()) == names
    assert sorted(filecmp.cmpfiles(one, other, names, shallow=False)[0]) == names


def run(workers: Processes, folder: Path, kills: int, seed: int) -> Killed:
    """Migrate again and again until so many workers were killed."""
    chance = random.Random(seed)
    environment = workers.environment
    source = folder / "source.pth"
    torch.save({f"layers.{number}.weight": torch.randn(256, 1024) for number in range(32)}, source)
    expected = {name: folder / name for name in FORMS}
    for name, options in FORMS.items():
        process = migrate(environment, source, expected[name], *options)
        process.communicate()
        assert process.returncode == 0
    killed = runs = refused = 0
    place = folder / "place"
    while killed < kills:
        place.mkdir()
        name = chance.choice(list(FORMS))
        begun = chance.choice([source, *expected.values()])
        process = migrate(environment, begun, place / "out", *FORMS[name], *workers.options(chance))
        often = chance.uniform(*workers.pauses)
        while process.poll() is None:
            time.sleep(chance.uniform(0, often))
            victims = workers.at_work(process)
            if victims and killed < kills:
                with suppress(ProcessLookupError):
                    os.kill(chance.choice(victims), signal.SIGKILL)
                    killed += 1
        _, said = process.communicate()
        runs += 1
        if process.returncode == 0:
            assert_same(expected[name], place / "out")
            assert [path.name for path in place.iterdir()] == ["out"]
        else:
            assert (process.returncode, workers.ended in said) == (2, True), said
            left = [path.relative_to(place) for path in place.rglob("*")]
            assert not left, f"{left} left by: {said}"
            refused += 1
        shutil.rmtree(place)
    return Killed(killed, runs, refused)


def children(pid: int) -> list[int]:
    try:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except OSError:
        return []


def main() -> None:
    kills, seed = (*map(int, sys.argv[1:]), *(500, 0)[len(sys.argv) - 1 :])
    with tempfile.TemporaryDirectory() as folder:
        say(run(Processes(), Path(folder), kills, seed))


def say(found: Killed) -> None:
    print(
        f"{found.kills:,} workers killed in {found.runs:,} migrations: {found.refused:,} were given up, as several had"
    )
    print(f"died at one file, and left nothing; {found.runs - found.refused:,} wrote the folder, with the same bytes.")


if __name__ == "__main__":
    main()
