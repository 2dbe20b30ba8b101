"""
How fast and how small ``ckptool diff`` is, beside what people do today, in one run on one machine.

    python tests/benchmarks/bench_diff.py [--dir DIR] [--runs 5]

Makes the files of bench_inspect.py and copies of them (about 14 GB, in DIR or a temporary folder, removed afterwards).
Every figure is of whole processes, run in turn; times are medians. Exits 1 if a bound does not hold.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_inspect import ENVIRONMENT, SMALL_TENSORS, make_files

TORCH = (
    "import sys, torch; a, b = (torch.load(f, mmap=True, weights_only=True) for f in sys.argv[1:]); "
    "sys.exit(not (list(a) == list(b) and all(torch.equal(a[k], b[k]) for k in a)))"
)
DIFF = [sys.executable, "-m", "ckptool", "diff"]


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--dir", type=Path, help="where to make the files")
    arguments.add_argument("--runs", type=int, default=5)
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        files = make_files(Path(folder))
        equal, changed, many = (Path(folder) / name for name in ("equal.pth", "changed.pth", "many-too.pth"))
        shutil.copyfile(files["zip"], equal)
        shutil.copyfile(files["zip"], changed)
        shutil.copyfile(files["many"], many)
        change_one_element(changed)
        runs = options.runs
        held = [
            compare("2.3 GB pair, equal", files["zip"], equal, runs, same=True, wall=0.5, cmp=1.25, peak_mib=64),
            compare("2.3 GB pair, one element changed", files["zip"], changed, runs, same=False, wall=1.25),
            compare("2.3 GB zip and safetensors", files["zip"], files["safetensors"], runs, same=True, peak_mib=64),
            compare(f"{SMALL_TENSORS:,} small tensors, equal", files["many"], many, runs, same=True, wall=0.75),
            compare("2.3 GB pair, structure alone", files["zip"], equal, runs, "--no-values", same=True, peak_mib=48),
        ]
    return 0 if all(held) else 1


def change_one_element(path: Path) -> None:
    """Change an element in the middle of a file whose tensors are larger than everything else."""
    with path.open("r+b") as stream:
        middle = path.stat().st_size // 2
        stream.seek(middle)
        (old,) = stream.read(1)
        stream.seek(middle)
        stream.write(bytes([old ^ 1]))


def compare(
    title: str,
    a: Path,
    b: Path,
    runs: int,
    *flags: str,
    same: bool,
    wall: float | None = None,
    cmp: float | None = None,
    peak_mib: float | None = None,
) -> bool:
    """Run all in turn, print a row for each, and say whether the bounds hold."""
    commands = {"ckptool diff": [*DIFF, *flags, str(a), str(b)]}
    if b.suffix == a.suffix and "safetensors" not in b.name:
        commands["torch.load(mmap=True) + torch.equal"] = [sys.executable, "-c", TORCH, str(a), str(b)]
        commands["cmp"] = ["cmp", "-s", str(a), str(b)]
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in commands}
    for run in range(runs + 1):  # the first warms the caches
        for name, command in commands.items():
            figures = measure(command, 0 if same else 1)
            if run:
                found[name].append(figures)
    walls = {name: statistics.median(figures[0] for figures in rows) for name, rows in found.items()}
    peak = max(figures[2] for figures in found["ckptool diff"])
    checks = []
    for peer, bound in (("torch.load(mmap=True) + torch.equal", wall), ("cmp", cmp)):
        if bound is not None:
            ratio = walls["ckptool diff"] / walls[peer]
            checks.append((ratio <= bound, f"time {ratio:.2f} of {peer} (at most {bound})"))
    if peak_mib is not None:
        checks.append((peak <= peak_mib, f"peak {peak:.1f} MiB (at most {peak_mib})"))
    print(f"{title}: {a.stat().st_size + b.stat().st_size:,} bytes")
    for name, rows in found.items():
        cpu = statistics.median(figures[1] for figures in rows)
        memory = max(figures[2] for figures in rows)
        print(f"  {name:36} {walls[name]:7.3f} s  {cpu:7.3f} s of CPU  {memory:8.1f} MiB")
    for held, text in checks:
        print(f"  {'ok  ' if held else 'MISS'} {text}", flush=True)
    return all(held for held, _ in checks)


def measure(command: list[str], expected: int) -> tuple[float, float, float]:
    """Return a process's wall time and CPU time in seconds, and its peak memory in MiB."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=ENVIRONMENT)
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != expected:
        raise SystemExit(f"{command} answered {process.returncode}, not {expected}")
    return wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


if __name__ == "__main__":
    sys.exit(main())
