"""
How fast a scan of 2,000 small files is on Ray with two workers, against a loop in one process.

    python tests/benchmarks/bench_ray.py [--dir DIR] [--runs 5]

Each time is that of the scan alone: the listing of the folders, the rows, and their way back; on a Ray that has its
workers already, and has done one scan, which does not count. The loop makes the same rows one after the other where the
listing is, without workers. ``bench_scan.py`` compares processes of our own.

Copies what ``bench_scan.py`` copies: real files of up to 8 MiB where they are there, and fixtures elsewhere.
Runs are in turn, and times the best of them: other programs can only add to them. What is compared needs two cores
that are free; Ray gives its workers the lowest priority, unless ``RAY_worker_niceness=0``. Exits 1 if a bound does not
hold.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench_scan import FILES, copy_files
from measuring import at_least, in_turn, options, report

from ckptool.checking.scan import NOTHING, Rows, row
from ckptool.cli.on_ray import OnRay
from ckptool.cli.pool import MOST_ITEMS
from ckptool.cli.scan import CONNECTIONS
from ckptool.formats.listing import Listing

WORKERS = 2


def main() -> int:
    given = options(__doc__)
    gc.set_threshold(1_000_000)  # as the command does
    with tempfile.TemporaryDirectory(dir=given.dir) as folder, OnRay("local", WORKERS) as ray:
        place = Path(folder) / "files"
        nbytes = copy_files(place)
        work = {
            "a loop in one process": lambda: timed(lambda: one_by_one(place)),
            "scan --ray, 2 workers": lambda: timed(lambda: rows_of(place, ray)),
        }
        found = in_turn(work, given.runs)
    walls = {name: min(wall for wall, _ in runs) for name, runs in found.items()}
    counts = {count for runs in found.values() for _, count in runs}
    loop, on_ray = walls.values()
    shown = {
        name: f"{wall:8.3f} s  {FILES / wall:8.0f} files in a second  {loop / wall:5.2f} times"
        for name, wall in walls.items()
    }
    checks = [
        (len(counts) == 1, f"each gives as many rows: {', '.join(map(str, counts))}"),
        at_least("two workers on Ray are {:.2f} times as fast as a loop", loop / on_ray, 1.4),
    ]
    return 0 if report(f"{FILES:,} files, {nbytes:,} bytes; load {os.getloadavg()[0]:.1f}", shown, checks) else 1


def timed(scan: Callable[[], int]) -> tuple[float, int]:
    """Return the seconds that a scan takes, and how many rows it gives."""
    begun = time.perf_counter()
    count = scan()
    return time.perf_counter() - begun, count


def one_by_one(place: Path) -> int:
    listing = Listing([str(place)])
    count = 0
    while (target := listing.next()) is not None:
        json.dumps(row(target.path))
        count += 1
    return count


def rows_of(place: Path, ray: OnRay) -> int:
    """Take all rows, and look at each as the command does."""
    listing = Listing([str(place)])
    found = ray.answers(Rows(NOTHING, CONNECTIONS), listing.next, most=MOST_ITEMS)
    return sum(json.loads(line)["path"] is not None for answers in found for _, line in answers)


if __name__ == "__main__":
    sys.exit(main())
