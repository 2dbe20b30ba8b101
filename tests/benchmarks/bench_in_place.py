"""
How fast and how small ``ckptool migrate --in-place`` is, on a file of 100 GB and on one of 20,000 tensors.

    python tests/benchmarks/bench_in_place.py [--dir DIR] [--runs 5]

The large file takes no space: torch leaves holes where its tensors are to be. Every figure is of whole processes; times
are the best of the runs, each on a copy of the file. Exits 1 if a bound does not hold.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

from measuring import (
    CKPTOOL,
    SMALL_TENSORS,
    Figures,
    at_most,
    best_in_turn,
    bounds,
    measure,
    options,
    processes_in_turn,
    report,
)

LARGE = 300
"""Tensors of the large file."""
WRITE = """
import sys, torch
count, numel, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
tensors = {f"module.layers.{number}.weight": torch.empty(numel, dtype=torch.bfloat16) for number in range(count)}
with torch.serialization.skip_data():
    torch.save(tensors, path)
"""
MIGRATE = [*CKPTOOL, "migrate"]
EDIT = [*MIGRATE, "--in-place", "--to", "cuda:1", "--strip-module"]
INSPECT = [*CKPTOOL, "inspect", "-q"]


def main() -> int:
    given = options(__doc__)
    with tempfile.TemporaryDirectory(dir=given.dir) as folder:
        large = written(Path(folder) / "large.pth", LARGE, 100 * 10**9 // LARGE // 2)
        many = written(Path(folder) / "many.pth", SMALL_TENSORS, 16)
        held = [
            edited("100 GB", large, given.runs, wall=0.5, cpu=0.2),
            edited(f"{SMALL_TENSORS:,} tensors", many, given.runs, wall=2),
            planned(many, given.runs),
        ]
    return 0 if all(held) else 1


def written(path: Path, count: int, numel: int) -> Path:
    """Write a file of as many tensors as torch does, but for their elements."""
    subprocess.run([sys.executable, "-c", WRITE, str(count), str(numel), str(path)], check=True)
    return path


def index_nbytes(path: Path) -> int:
    """Return the size of the pickle and of the directory of a zip."""
    with ZipFile(path) as archive:
        (pickled,) = (one.file_size for one in archive.infolist() if one.filename.endswith("/data.pkl"))
        return pickled + path.stat().st_size - archive.start_dir


def edited(title: str, path: Path, runs: int, *, wall: float, cpu: float | None = None) -> bool:
    copy = path.with_name("copy.pth")
    report_path = path.with_name("report.json")

    def edit() -> Figures:
        subprocess.run(["cp", "--sparse=always", str(path), str(copy)], check=True)
        return measure([*EDIT, str(copy)])

    figures = best_in_turn({"in place": edit}, runs)
    ours = figures["in place"]
    subprocess.run(["cp", "--sparse=always", str(path), str(copy)], check=True)
    with report_path.open("w") as stream:
        subprocess.run([*EDIT, "--json", str(copy)], check=True, stdout=stream)
    written, index = json.loads(report_path.read_text())["written_nbytes"], index_nbytes(path)
    checks = [at_most("{:.3f} s", ours.wall, wall), *bounds(figures, peak=64)]
    checks.append(at_most(f"{written:,} bytes written, {{:.2f}} of the index", written / index, 3))
    if cpu is not None:
        checks.append(at_most("{:.3f} s of CPU", ours.cpu, cpu))
    return report(f"in place, {title}: {path.stat().st_size:,} bytes", figures, checks)


def planned(path: Path, runs: int) -> bool:
    """Compare dry runs with opening the file."""
    changes = ["--to", "cuda:1", "--strip-module", "--dry-run", "-q", str(path)]
    commands = {
        "inspect -q": [*INSPECT, str(path)],
        "dry run": [*MIGRATE, *changes, str(path.with_name("new.pth"))],
        "dry run, in place": [*MIGRATE, *changes, "--in-place"],
    }
    figures = processes_in_turn(commands, runs)
    opened, *dry = figures
    checks = [at_most(f"{name}: {{:.2f}} of inspect", figures[name].wall / figures[opened].wall, 1.5) for name in dry]
    return report(f"planning, {path.stat().st_size:,} bytes", figures, checks)


if __name__ == "__main__":
    sys.exit(main())
