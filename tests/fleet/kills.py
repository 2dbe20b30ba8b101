"""
Work on Ray while worker processes are killed: nothing is lost, nothing is there twice, rows and files are the same.

    python -m tests.fleet.kills [KILLS] [SEED]

One scan of 200 files follows another, each into a new file, until so many (by default 500) workers were killed at work.
Then as many are killed at the files of folders, as in ``tests.migration.kills``.
The rows of each must be those of a scan without Ray, once all paths; where a file was at hand both times that it was
alone with a worker, and the row says so, the same command must mend that, as it does without Ray.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from tests.fleet.cluster import ROOT, Cluster
from tests.migration.kills import Processes, say
from tests.migration.kills import run as migrations

FILES = 200


class Killed(NamedTuple):
    """What a run came to."""

    kills: int
    scans: int
    blamed: int
    """Rows that said that two workers ended at them, until the next scan."""


def copy_files(place: Path, count: int = FILES) -> None:
    """Copy fixtures of all kinds under so many names."""
    found = [path for path in sorted((ROOT / "fixtures").rglob("*")) if path.is_file() and path.suffix in SUFFIXES]
    place.mkdir(parents=True)
    for number in range(count):
        path = found[number % len(found)]
        shutil.copyfile(path, place / f"{number:03}-{path.name}")


SUFFIXES = (".pth", ".pt", ".safetensors", ".ckpt", ".bin")


def rows(path: Path) -> dict[str, dict[str, Any]]:
    """Return the rows by path, but the times at which they were made; no path may have two."""
    found = latest(path)
    twice = len(path.read_text().splitlines()) - len(found)
    assert not twice, f"{twice} paths have two rows"
    return found


def latest(path: Path) -> dict[str, dict[str, Any]]:
    """Return the last row of each path."""
    found = map(json.loads, path.read_text().splitlines())
    return {one["path"]: {key: value for key, value in one.items() if key != "scanned_ns"} for one in found}


def scan(cluster: Cluster, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ckptool", "scan", *arguments]
    return subprocess.Popen(
        command, env=cluster.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/"
    )


def finished(process: subprocess.Popen[str]) -> str:
    """Return what it said on standard error; it printed nothing else, and some files could not be opened."""
    printed, said = process.communicate(timeout=300)
    assert process.returncode == 2, said
    assert not printed
    return said


def run(cluster: Cluster, folder: Path, kills: int, seed: int) -> Killed:
    """Scan again and again until so many workers were killed."""
    chance = random.Random(seed)
    files, local = folder / "files", folder / "local.jsonl"
    copy_files(files)
    totals = finished(scan(cluster, str(files), "-o", str(local)))
    expected = rows(local)
    assert len(expected) == FILES
    killed = scans = blamed = 0
    while killed < kills:
        output = folder / f"{scans}.jsonl"
        process = scan(cluster, str(files), "--ray", cluster.address, "-o", str(output))
        while process.poll() is None:
            time.sleep(chance.uniform(0, 0.5))
            victims = cluster.at_work()
            if victims and killed < kills:
                os.kill(chance.choice(victims), signal.SIGKILL)
                killed += 1
        said = finished(process)
        scans += 1
        found = rows(output)
        assert found.keys() == expected.keys(), f"{len(expected.keys() - found.keys())} lost"
        ended = [path for path, row in found.items() if row["error"] and row["error"]["kind"] == "worker-ended"]
        blamed += len(ended)
        assert all(found[path] == row for path, row in expected.items() if path not in ended)
        if ended:
            finished(scan(cluster, str(files), "--ray", cluster.address, "-o", str(output)))
            assert latest(output) == expected
        else:
            assert said == totals
    return Killed(killed, scans, blamed)


class OnCluster(Processes):
    """Workers of a cluster."""

    ended = "the process on Ray that worked at it ended"
    pauses = (0.2, 2)

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.environment = cluster.environment

    def options(self, chance: random.Random) -> list[str]:
        return ["--ray", self._cluster.address]

    def at_work(self, migration: subprocess.Popen[str]) -> list[int]:
        return self._cluster.at_work()


def main() -> None:
    kills, seed = (*map(int, sys.argv[1:]), *(500, 0)[len(sys.argv) - 1 :])
    with Cluster() as cluster, tempfile.TemporaryDirectory() as folder:
        found = run(cluster, Path(folder), kills, seed)
        many = f"{found.kills:,} workers killed in {found.scans:,} scans of {FILES} files"
        print(f"{many}: all rows are there, and the same.")
        print(f"{found.blamed:,} rows said until the next scan that two workers had ended at the file, as they had.")
        say(migrations(OnCluster(cluster), Path(folder), kills, seed))


if __name__ == "__main__":
    main()
