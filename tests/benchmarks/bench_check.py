"""
How fast and how small ``ckptool check`` is: quick beside ``inspect``, deep beside one pass of ``zlib.crc32``.

    python tests/benchmarks/bench_check.py [--dir DIR] [--runs 5]

Makes the files of bench_inspect.py (about 7 GB, in DIR or a temporary folder). Every figure is of whole processes, run
in turn; times are the best of the runs. Exits 1 if a bound does not hold.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench_inspect import INSPECT
from measuring import CKPTOOL, SMALL_TENSORS, benchmark_files, bounds, options, processes_in_turn, report

CHECK = [*CKPTOOL, "check"]
ONE_PASS = """
import sys, zlib
buffer = memoryview(bytearray(1 << 20)); found = 0
with open(sys.argv[1], "rb", buffering=0) as f:
    while n := f.readinto(buffer): found = zlib.crc32(buffer[:n], found)
"""
CRC32 = [sys.executable, "-c", ONE_PASS]
AT_MOST = 1.3
PEAK_MIB = 64


def main() -> int:
    given = options(__doc__)
    titles = {
        "zip": "2.3 GB zip",
        "legacy": "2.3 GB legacy stream",
        "safetensors": "2.3 GB safetensors",
        "many": f"{SMALL_TENSORS:,} small tensors",
    }
    with benchmark_files(given.dir) as (_, files):
        held = [
            compare(f"{title}, quick", files[name], CHECK, INSPECT, "inspect", given.runs, peak_mib=None)
            for name, title in titles.items()
        ]
        held += [
            compare(f"{titles[name]}, deep", files[name], [*CHECK, "--deep"], CRC32, "crc32", given.runs, PEAK_MIB)
            for name in ("zip", "legacy", "safetensors")
        ]
    return 0 if all(held) else 1


def compare(
    title: str, path: Path, command: list[str], peer: list[str], peer_name: str, runs: int, peak_mib: float | None
) -> bool:
    """Run both in turn, print a row, and say whether the bounds hold."""
    figures = processes_in_turn({"ckptool check": [*command, str(path)], peer_name: [*peer, str(path)]}, runs)
    return report(title, figures, bounds(figures, wall={peer_name: AT_MOST}, peak=peak_mib))


if __name__ == "__main__":
    sys.exit(main())
