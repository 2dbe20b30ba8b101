"""
How fast ``ckptool scan`` is over 2,000 small files: two processes against one, and what it costs above opening them.

    python tests/benchmarks/bench_scan.py [--dir DIR] [--runs 3]

The opens themselves are what one process takes that calls ``open_checkpoint(path).close()`` for each, on the same walk
through the folders, with its start. What ``scan`` takes above that is the rows (summary, findings, grade, JSON), and a
second process: its start, and two messages for each file. The bound is on what the processors take together; by the
clock it is less, as they work at the same time.

Copies real files of up to 8 MiB, where they are there, and fixtures elsewhere, each once (80 MB, in DIR or a temporary
folder that is removed afterwards); the others of the 2,000 names are links to them. Times of processors count the
workers, too. Exits 1 if a bound does not hold.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from itertools import cycle, islice
from pathlib import Path

from measuring import CKPTOOL, at_least, at_most, options, processes_in_turn, report

ROOT = Path(__file__).parents[2]
REAL, FIXTURES = ROOT.parent / "shared" / "corpus", ROOT / "fixtures"
FILES = 2_000
MOST_NBYTES = 8 << 20

OPENS = """
import gc, sys
gc.set_threshold(1_000_000)
from ckptool import CkptoolError, open_checkpoint
from ckptool.formats.listing import checkpoints_below
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
from ckptool.checking.scan import row
from ckptool.formats.listing import checkpoints_below
for path, _ in checkpoints_below(sys.argv[1]):
    json.dumps(row(path))
sys.exit(2)
"""


def main() -> int:
    given = options(__doc__)
    with tempfile.TemporaryDirectory(dir=given.dir) as folder:
        place = Path(folder) / "files"
        nbytes = copy_files(place)
        command = [*CKPTOOL, "scan", str(place)]
        commands = {
            "open_checkpoint() of all": [sys.executable, "-c", OPENS, str(place)],
            "row() of all": [sys.executable, "-c", ROWS, str(place)],
            "scan --jobs 1": [*command, "--jobs", "1"],
            "scan --jobs 2": [*command, "--jobs", "2"],
        }
        found = processes_in_turn(commands, given.runs, exit_code=2)
    opens, rows, one, two = found.values()
    checks = [
        at_most("one process takes {:.0%} more of the processor than opening", one.cpu / opens.cpu - 1, 0.6),
        (True, f"by the clock, it takes {one.wall / opens.wall - 1:.0%} longer"),
        (True, f"rows in one process, without workers, take {rows.wall / opens.wall - 1:.0%} longer than opening"),
        at_least("two processes are {:.2f} times as fast as one, if two cores are free", one.wall / two.wall, 1.6),
        (True, f"{one.cpu / FILES * 1000:.2f} and {two.cpu / FILES * 1000:.2f} ms of processor for a file"),
        (True, f"{FILES / one.wall:.0f} and {FILES / two.wall:.0f} files in a second; load {os.getloadavg()[0]:.1f}"),
    ]
    return 0 if report(f"{FILES:,} files, {nbytes:,} bytes", found, checks) else 1


def copy_files(place: Path, most_nbytes: int = MOST_NBYTES) -> int:
    """Put small checkpoints under 2,000 names, and return the size of all of them."""
    every = [path for path in sorted((REAL if REAL.is_dir() else FIXTURES).rglob("*")) if path.is_file()]
    small = [
        path for path in every if path.stat().st_size <= most_nbytes and path.suffix not in (".json", ".jsonl", ".md")
    ]
    first: dict[Path, Path] = {}
    for number, path in enumerate(islice(cycle(small), FILES)):
        target = place / f"{number % 20:02}" / f"{number:04}-{path.name}"
        target.parent.mkdir(parents=True, exist_ok=True)
        if path in first:
            target.hardlink_to(first[path])
        else:
            first[path] = Path(shutil.copyfile(path, target))
    return sum(path.stat().st_size for path in place.rglob("*") if path.is_file())


if __name__ == "__main__":
    sys.exit(main())
