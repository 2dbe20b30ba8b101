"""
How fast ``ckptool scan`` is over 2,000 small files: two processes against one, and what it costs above opening them.

    python tests/benchmarks/bench_scan.py [--dir DIR] [--runs 3]

The opens themselves are what one process takes that calls ``open_checkpoint(path).close()`` for each, on the same walk
through the folders, with its start. What ``scan`` takes above that is the rows (summary, findings, grade, JSON), and a
second process: its start, and two messages for each file.

Copies fixtures, and real files where they are there, of up to 200 KB (about 150 MB, in DIR or a temporary folder that
is removed afterwards). Times of processors count the workers, too. Exits 1 if a bound does not hold.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from itertools import cycle, islice
from pathlib import Path

from measuring import options, processes_in_turn, report

ROOT = Path(__file__).parents[2]
PLACES = (ROOT / "fixtures", ROOT.parent / "shared" / "corpus")
FILES = 2_000
MOST_NBYTES = 200_000

OPENS = """
import gc, sys
gc.set_threshold(1_000_000)
from ckptool import CkptoolError, open_checkpoint
from ckptool.formats.directories.walk import checkpoints_below
for path, _ in checkpoints_below(sys.argv[1]):
    try:
        open_checkpoint(path).close()
    except CkptoolError:
        pass
sys.exit(2)  # as scan: some cannot be opened
"""
ROWS = """
import gc, json, sys
gc.set_threshold(1_000_000)
from ckptool.checking.row import row
from ckptool.formats.directories.walk import checkpoints_below
for path, _ in checkpoints_below(sys.argv[1]):
    json.dumps(row(path))
sys.exit(2)
"""


def main() -> int:
    given = options(__doc__)
    with tempfile.TemporaryDirectory(dir=given.dir) as folder:
        place = Path(folder) / "files"
        nbytes = copy_files(place)
        command = [sys.executable, "-m", "ckptool", "scan", str(place)]
        commands = {
            "open_checkpoint() of all": [sys.executable, "-c", OPENS, str(place)],
            "row() of all": [sys.executable, "-c", ROWS, str(place)],
            "scan --jobs 1": [*command, "--jobs", "1"],
            "scan --jobs 2": [*command, "--jobs", "2"],
        }
        found = processes_in_turn(commands, given.runs, exit_code=2)
    opens, rows, one, two = found.values()
    above, faster = one.cpu / opens.cpu - 1, one.wall / two.wall
    checks = [
        (above <= 0.25, f"one process takes {above:.0%} more of the processor than opening (at most 25 %)"),
        (True, f"{one.cpu / rows.cpu - 1:.0%} more than making the rows in one process, without workers"),
        (faster >= 1.6, f"two processes are {faster:.2f} times as fast as one (at least 1.6, if two cores are free)"),
        (True, f"{one.cpu / FILES * 1000:.2f} and {two.cpu / FILES * 1000:.2f} ms of processor for a file"),
        (True, f"{FILES / one.wall:.0f} and {FILES / two.wall:.0f} files in a second; load {os.getloadavg()[0]:.1f}"),
    ]
    return 0 if report(f"{FILES:,} files, {nbytes:,} bytes", found, checks) else 1


def copy_files(place: Path) -> int:
    """Copy small checkpoints under 2,000 names, and return their size."""
    every = [path for folder in PLACES if folder.is_dir() for path in sorted(folder.rglob("*")) if path.is_file()]
    small = [
        path for path in every if path.stat().st_size <= MOST_NBYTES and path.suffix not in (".json", ".md", ".distcp")
    ]
    for number, path in enumerate(islice(cycle(small), FILES)):
        target = place / f"{number % 20:02}" / f"{number:04}-{path.name}"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    return sum(path.stat().st_size for path in place.rglob("*") if path.is_file())


if __name__ == "__main__":
    sys.exit(main())
