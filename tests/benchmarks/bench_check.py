"""
How fast and how small ``ckptool check`` is: quick beside ``inspect``, deep beside one pass of ``zlib.crc32``.

    python tests/benchmarks/bench_check.py [--dir DIR] [--runs 5]

Makes the files of bench_inspect.py (about 7 GB, in DIR or a temporary folder, removed afterwards). Every figure is of
whole processes, run in turn; times are medians. Exits 1 if a bound does not hold.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from bench_inspect import INSPECT, SMALL_TENSORS, make_files, measure

CHECK = [sys.executable, "-m", "ckptool", "check"]
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
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--dir", type=Path, help="where to make the files")
    arguments.add_argument("--runs", type=int, default=5)
    options = arguments.parse_args()
    titles = {
        "zip": "2.3 GB zip",
        "legacy": "2.3 GB legacy stream",
        "safetensors": "2.3 GB safetensors",
        "many": f"{SMALL_TENSORS:,} small tensors",
    }
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        files = make_files(Path(folder))
        held = [
            compare(f"{title}, quick", files[name], CHECK, INSPECT, "inspect", options.runs, peak_mib=None)
            for name, title in titles.items()
        ]
        held += [
            compare(f"{titles[name]}, deep", files[name], [*CHECK, "--deep"], CRC32, "crc32", options.runs, PEAK_MIB)
            for name in ("zip", "legacy", "safetensors")
        ]
    return 0 if all(held) else 1


def compare(
    title: str, path: Path, command: list[str], peer: list[str], peer_name: str, runs: int, peak_mib: float | None
) -> bool:
    """Run both in turn, print a row, and say whether the bounds hold."""
    pairs = [(measure([*command, str(path)]), measure([*peer, str(path)])) for _ in range(runs + 1)]
    ours, theirs = zip(*pairs[1:], strict=True)  # the first warms the caches
    wall, peak = (statistics.median(column) for column in zip(*ours, strict=True))
    peer_wall, peer_peak = (statistics.median(column) for column in zip(*theirs, strict=True))
    held = wall <= AT_MOST * peer_wall and (peak_mib is None or peak <= peak_mib)
    print(
        f"{'ok  ' if held else 'MISS'} {title:32} {wall:7.3f} s {peak:6.1f} MiB   "
        f"{peer_name} {peer_wall:7.3f} s {peer_peak:6.1f} MiB   ratio {wall / peer_wall:.3f} (at most {AT_MOST})"
    )
    return held


if __name__ == "__main__":
    sys.exit(main())
