"""
How fast and how small ``ckptool inspect`` is, beside what else lists a checkpoint, in one run on one machine.

    python tests/benchmarks/bench_inspect.py [--dir DIR] [--runs 5]

Makes its own files (about 7 GB, in DIR or a temporary folder that is removed afterwards): 2.3 GB of bfloat16 as a zip,
as a legacy stream and as safetensors, and 20,000 small tensors as a zip. Every figure is of whole processes, run in
turn; times are the best of the runs. Exits 1 if a bound does not hold.
"""

from __future__ import annotations

import gc
import pickletools
import subprocess
import sys
import time
import zipfile
from pathlib import Path

from measuring import (
    CKPTOOL,
    SMALL_TENSORS,
    at_most,
    benchmark_files,
    bounds,
    measure,
    options,
    processes_in_turn,
    report,
)

TORCH = "import sys, torch; torch.load(sys.argv[1], map_location='meta', weights_only=True)"
SAFETENSORS = (
    "import sys; from safetensors import safe_open\n"
    "with safe_open(sys.argv[1], framework='np') as f:\n"
    "    for k in f.keys(): s = f.get_slice(k); s.get_shape(), s.get_dtype()"
)
INSPECT = [*CKPTOOL, "inspect"]
COUNT_READS = """
import os, sys
taken = 0
original = os.pread
def counted(fd, nbytes, offset):
    global taken
    data = original(fd, nbytes, offset)
    taken += len(data)
    return data
os.pread = counted
from ckptool.cli import cli
try:
    cli(["inspect", sys.argv[1]], standalone_mode=False)
except SystemExit:
    pass
print(taken, file=sys.stderr)
"""


def main() -> int:
    given = options(__doc__)
    with benchmark_files(given.dir) as (_, files):
        many, head = f"{SMALL_TENSORS:,} small tensors", {"peak_mib": 48, "read_share": 0.01}
        held = [
            compare("2.3 GB zip", files["zip"], TORCH, given.runs, wall=1 / 10, **head),
            compare("2.3 GB legacy stream", files["legacy"], TORCH, given.runs, wall=1 / 25, **head),
            compare("2.3 GB safetensors", files["safetensors"], SAFETENSORS, given.runs, **head),
            compare(many, files["many"], TORCH, given.runs, wall=1 / 3),
            compare("8 MB, as many tensors as the 2.3 GB", files["little"], TORCH, given.runs),
        ]
        report_interpreter(files["many"])
        report_start_up()
    return 0 if all(held) else 1


def compare(
    title: str,
    path: Path,
    peer: str,
    runs: int,
    *,
    wall: float | None = None,
    peak_mib: float | None = None,
    read_share: float | None = None,
) -> bool:
    """Run both in turn, print a row for each, and say whether the bounds hold."""
    name = peer.split("; ")[1].splitlines()[0][:36]
    commands = {"ckptool inspect": [*INSPECT, str(path)], name: [sys.executable, "-c", peer, str(path)]}
    figures = processes_in_turn(commands, runs)
    taken = bytes_read(path)
    checks = [at_most(f"read {taken:,} bytes, {{:.4%}} of the file", taken / path.stat().st_size, read_share or 1)]
    checks += bounds(figures, wall={name: wall}, peak=peak_mib)
    return report(f"{title}: {path.stat().st_size:,} bytes", figures, checks)


def bytes_read(path: Path) -> int:
    done = subprocess.run(
        [sys.executable, "-c", COUNT_READS, str(path)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    return int(done.stderr)


def report_interpreter(path: Path) -> None:
    from ckptool.pickles.reader import read_pickle
    from ckptool.sources.source import BytesSource

    with zipfile.ZipFile(path) as archive:
        data = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    opcodes = sum(1 for _ in pickletools.genops(data))
    gc.disable()
    times = []
    for _ in range(5):
        started = time.perf_counter()
        read_pickle(BytesSource(data))
        times.append(time.perf_counter() - started)
    best = min(times)
    print(f"pickle interpreter: {opcodes:,} opcodes in {best:.3f} s, {opcodes / best / 1e6:.1f} million a second")


def report_start_up() -> None:
    """Print what the start of a process is spent on."""
    steps = {
        "python -c pass": "pass",
        "import click": "import click",
        "import ckptool": "import ckptool",
        "import ckptool.cli.inspect": "import ckptool.cli.inspect",
        "import tabulate (only for --table)": "import tabulate",
        "import torch (never)": "import torch",
    }
    for title, code in steps.items():
        walls = [measure([sys.executable, "-c", code])[0] for _ in range(5)]
        print(f"start-up: {title:36} {min(walls) * 1000:7.0f} ms")
    loaded = subprocess.run(
        [sys.executable, "-c", "import sys, ckptool.cli.inspect; print({'torch', 'numpy'} & set(sys.modules))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    print(f"torch and numpy in sys.modules: {'none' if loaded == 'set()' else loaded}")


if __name__ == "__main__":
    sys.exit(main())
