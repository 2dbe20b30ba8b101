"""
How fast and how small ``ckptool diff`` is, beside what people do today, in one run on one machine.

    python tests/benchmarks/bench_diff.py [--dir DIR] [--runs 5]

Makes the files of bench_inspect.py and copies of them (about 14 GB) in DIR or a temporary folder.
Every figure is of whole processes, run in turn; times are the best of the runs. Exits 1 if a bound does not hold.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from measuring import (
    CKPTOOL,
    SMALL_TENSORS,
    at_most,
    benchmark_files,
    beside_busy,
    bounds,
    options,
    processes_in_turn,
    report,
)

TORCH = (
    "import sys, torch; a, b = (torch.load(f, mmap=True, weights_only=True) for f in sys.argv[1:]); "
    "sys.exit(not (list(a) == list(b) and all(torch.equal(a[k], b[k]) for k in a)))"
)
BY_HOW_MUCH = """
import sys, torch
torch.set_num_threads(1)
a, b = (torch.load(f, mmap=True, weights_only=True) for f in sys.argv[1:])
for name, left in a.items():
    left, right = left.float(), b[name].float()
    gap = (left - right).abs()
    print(name, int((left != right).sum()), float(gap.max()), float((gap / right.abs()).nan_to_num().max()))
sys.exit(1)
"""
DIFF = [*CKPTOOL, "diff"]
MAPPED, COUNTED = "torch.load(mmap=True) + torch.equal", "torch with one thread, counts and largest differences"


def main() -> int:
    given = options(__doc__)
    with benchmark_files(given.dir) as (folder, files):
        equal, changed, many = (folder / name for name in ("equal.pth", "changed.pth", "many-too.pth"))
        shutil.copyfile(files["zip"], equal)
        shutil.copyfile(files["zip"], changed)
        shutil.copyfile(files["many"], many)
        change_one_element(changed)
        runs = given.runs
        held = [
            compare("2.3 GB pair, equal", files["zip"], equal, runs, same=True, wall=0.5, cmp=1.25, peak_mib=64),
            compare("2.3 GB pair, one element changed", files["zip"], changed, runs, same=False, wall=1.25),
            compare("2.3 GB zip and safetensors", files["zip"], files["safetensors"], runs, same=True, peak_mib=64),
            compare(f"{SMALL_TENSORS:,} small tensors, equal", files["many"], many, runs, same=True, wall=0.75),
            *spread(files["zip"], folder / "spread.pth", runs),
            compare("2.3 GB pair, structure alone", files["zip"], equal, runs, "--no-values", same=True, peak_mib=48),
        ]
    return 0 if all(held) else 1


def spread(a: Path, b: Path, runs: int) -> Iterator[bool]:
    """Compare a pair in which 1 % of the elements of every tensor differ, alone and beside two busy processes."""
    change_one_percent(a, b)
    for busy in (0, 2):
        title = f"2.3 GB pair, 1 % of all elements changed, beside {busy} busy processes"
        with beside_busy(busy):
            yield compare(title, a, b, runs, same=False, cpu=0.7 if busy else 0.5, peak_mib=96)


def change_one_percent(a: Path, b: Path) -> None:
    """Write a copy in which every hundredth element of bfloat16 has another last bit."""
    import numpy as np
    import torch

    changed = torch.load(a, weights_only=True)
    for tensor in changed.values():
        tensor.view(torch.int16).numpy().reshape(-1)[::100] ^= np.int16(1)
    torch.save(changed, b)


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
    cpu: float | None = None,
    peak_mib: float | None = None,
) -> bool:
    """Run all in turn, print a row for each, and say whether the bounds hold."""
    commands = {"ckptool diff": [*DIFF, *flags, str(a), str(b)]}
    if b.suffix == a.suffix and "safetensors" not in b.name:
        commands[MAPPED] = [sys.executable, "-c", TORCH, str(a), str(b)]
        commands["cmp"] = ["cmp", "-s", str(a), str(b)]
    if cpu is not None:
        commands = {"ckptool diff": commands["ckptool diff"]}
        commands[COUNTED] = [sys.executable, "-c", BY_HOW_MUCH, str(a), str(b)]
    figures = processes_in_turn(commands, runs, 0 if same else 1)
    checks = bounds(figures, wall={MAPPED: wall, "cmp": cmp}, cpu={COUNTED: cpu}, peak=peak_mib)
    nbytes, ours = a.stat().st_size + b.stat().st_size, figures["ckptool diff"]
    if cpu is not None:
        checks.append(at_most("{:.2f} s of CPU for a GB", ours.cpu / nbytes * 1e9, 4))
    return report(f"{title}: {nbytes:,} bytes", figures, checks)


if __name__ == "__main__":
    sys.exit(main())
