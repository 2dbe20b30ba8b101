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

from measuring import SMALL_TENSORS, Figures, best, in_turn, measure, options, processes_in_turn, report

LARGE = 300
"""Tensors of the large file."""
WRITE = """
import sys, torch
count, numel, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
tensors = {f"module.layers.{number}.weight": torch.empty(numel, dtype=torch.bfloat16) for number in range(count)}
with torch.serialization.skip_data():
    torch.save(tensors, path)
"""
MIGRATE = [sys.executable, "-m", "ckptool", "migrate"]
EDIT = [*MIGRATE, "--in-place", "--to", "cuda:1", "--strip-module"]
INSPECT = [sys.executable, "-m", "ckptool", "inspect", "-q"]


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

    ours = best(in_turn({"in place": edit}, runs)["in place"])
    subprocess.run(["cp", "--sparse=always", str(path), str(copy)], check=True)
    with report_path.open("w") as stream:
        subprocess.run([*EDIT, "--json", str(copy)], check=True, stdout=stream)
    written, index = json.loads(report_path.read_text())["written_nbytes"], index_nbytes(path)
    checks = [
        (ours.wall <= wall, f"{ours.wall:.3f} s (at most {wall})"),
        (ours.peak <= 64, f"peak {ours.peak:.1f} MiB (at most 64)"),
        (written <= 3 * index, f"{written:,} bytes written, {written / index:.2f} of the index (at most 3)"),
    ]
    if cpu is not None:
        checks.append((ours.cpu <= cpu, f"{ours.cpu:.3f} s of CPU (at most {cpu})"))
    return report(f"in place, {title}: {path.stat().st_size:,} bytes", {"in place": ours}, checks)


def planned(path: Path, runs: int) -> bool:
    """Compare dry runs with opening the file."""
    changes = ["--to", "cuda:1", "--strip-module", "--dry-run", "-q", str(path)]
    commands = {
        "inspect -q": [*INSPECT, str(path)],
        "dry run": [*MIGRATE, *changes, str(path.with_name("new.pth"))],
        "dry run, in place": [*MIGRATE, *changes, "--in-place"],
    }
    figures = processes_in_turn(commands, runs)
    checks = []
    for name in ("dry run", "dry run, in place"):
        ratio = figures[name].wall / figures["inspect -q"].wall
        checks.append((ratio <= 1.5, f"{name}: {ratio:.2f} of inspect (at most 1.5)"))
    return report(f"planning, {path.stat().st_size:,} bytes", figures, checks)


if __name__ == "__main__":
    sys.exit(main())
