"""
How fast and how small ``ckptool inspect`` is, beside what else lists a checkpoint, in one run on one machine.

    python tests/benchmarks/bench_inspect.py [--dir DIR] [--runs 5]

Makes its own files (about 7 GB, in DIR or a temporary folder, removed afterwards): 2.3 GB of bfloat16 as a zip, as a
legacy stream and as safetensors, and 20,000 small tensors as a zip. Every figure is of whole processes, run in turn;
times are medians. Exits 1 if a bound does not hold.
"""

from __future__ import annotations

import argparse
import gc
import os
import pickletools
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import OrderedDict
from pathlib import Path

# As a user runs it: an installed package has its bytecode compiled.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

BLOCKS = 288
BLOCK_SHAPE = (2048, 2048)  # 8 MiB of bfloat16
SMALL_TENSORS = 20_000

TORCH = "import sys, torch; torch.load(sys.argv[1], map_location='meta', weights_only=True)"
SAFETENSORS = (
    "import sys; from safetensors import safe_open\n"
    "with safe_open(sys.argv[1], framework='np') as f:\n"
    "    for k in f.keys(): s = f.get_slice(k); s.get_shape(), s.get_dtype()"
)
INSPECT = [sys.executable, "-m", "ckptool", "inspect"]
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
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--dir", type=Path, help="where to make the files")
    arguments.add_argument("--runs", type=int, default=5)
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        files = make_files(Path(folder))
        held = [
            compare("2.3 GB zip", files["zip"], TORCH, options.runs, wall=1 / 10, peak_mib=48, read_share=0.01),
            compare(
                "2.3 GB legacy stream", files["legacy"], TORCH, options.runs, wall=1 / 25, peak_mib=48, read_share=0.01
            ),
            compare(
                "2.3 GB safetensors", files["safetensors"], SAFETENSORS, options.runs, peak_mib=48, read_share=0.01
            ),
            compare(f"{SMALL_TENSORS:,} small tensors", files["many"], TORCH, options.runs, wall=1 / 3),
            compare("8 MB, as many tensors as the 2.3 GB", files["little"], TORCH, options.runs),
        ]
        report_interpreter(files["many"])
        report_start_up()
    return 0 if all(held) else 1


def make_files(folder: Path) -> dict[str, Path]:
    """Write the files in a process of its own, so that its memory is not ours."""
    names = {name: folder / f"{name}.pth" for name in ("zip", "legacy", "safetensors", "many", "little")}
    subprocess.run([sys.executable, __file__, "--make", str(folder)], check=True)
    return names


def write_files(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    blocks = OrderedDict(
        (f"layers.{index}.weight", torch.full(BLOCK_SHAPE, index / 7, dtype=torch.bfloat16)) for index in range(BLOCKS)
    )
    torch.save(blocks, folder / "zip.pth")
    torch.save(blocks, folder / "legacy.pth", _use_new_zipfile_serialization=False)
    save_file(dict(blocks), folder / "safetensors.pth")
    little = OrderedDict((name, torch.zeros(128, 128, dtype=torch.bfloat16)) for name in blocks)
    torch.save(little, folder / "little.pth")
    many = OrderedDict((f"layers.{index}.weight", torch.full((4, 4), float(index))) for index in range(SMALL_TENSORS))
    torch.save(many, folder / "many.pth")


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
    """Run both in turn, print a row, and say whether the bounds hold."""
    ours: list[tuple[float, float]] = []
    theirs: list[tuple[float, float]] = []
    for run in range(runs + 1):  # the first warms the caches
        pair = measure([*INSPECT, str(path)]), measure([sys.executable, "-c", peer, str(path)])
        if run:
            ours.append(pair[0])
            theirs.append(pair[1])
    our_wall, our_peak = (statistics.median(column) for column in zip(*ours, strict=True))
    peer_wall, peer_peak = (statistics.median(column) for column in zip(*theirs, strict=True))
    taken = bytes_read(path)
    share = taken / path.stat().st_size
    checks = [
        (wall is None or our_wall <= wall * peer_wall, f"time {our_wall / peer_wall:.3f} of the peer's" + bound(wall)),
        (peak_mib is None or our_peak <= peak_mib, f"peak {our_peak:.1f} MiB" + bound(peak_mib)),
        (read_share is None or share < read_share, f"read {share:.4%} of the file" + bound(read_share)),
    ]
    print(f"{title}: {path.stat().st_size:,} bytes")
    print(f"  ckptool inspect  {our_wall:7.3f} s  {our_peak:8.1f} MiB  {taken:,} bytes read")
    print(f"  {peer.split('; ')[1].splitlines()[0][:40]:40} {peer_wall:7.3f} s  {peer_peak:8.1f} MiB")
    for held, text in checks:
        print(f"  {'ok  ' if held else 'MISS'} {text}")
    return all(held for held, _ in checks)


def bound(value: float | None) -> str:
    return "" if value is None else f" (at most {value:.4g})"


def measure(command: list[str]) -> tuple[float, float]:
    """Return a process's wall time in seconds and its peak memory in MiB."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=ENVIRONMENT)
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command} failed")
    return wall, usage.ru_maxrss / 1024


def bytes_read(path: Path) -> int:
    done = subprocess.run(
        [sys.executable, "-c", COUNT_READS, str(path)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    return int(done.stderr)


def report_interpreter(path: Path) -> None:
    from ckptool.files import BytesSource
    from ckptool.pickles import read_pickle

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
        print(f"start-up: {title:36} {statistics.median(walls) * 1000:7.0f} ms")
    loaded = subprocess.run(
        [sys.executable, "-c", "import sys, ckptool.cli.inspect; print({'torch', 'numpy'} & set(sys.modules))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    print(f"torch and numpy in sys.modules: {'none' if loaded == 'set()' else loaded}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--make"]:
        write_files(Path(sys.argv[2]))
    else:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sys.exit(main())
