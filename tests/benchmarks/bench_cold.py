"""
How fast ``ckptool.load`` loads what is not in memory, beside torch, safetensors and ``dd``, in one run.

    python tests/benchmarks/bench_cold.py [--dir DIR] [--runs 5]

Makes the files of bench_inspect.py, and of one of them a folder of shards, one of DCP, and two of ZeRO (15 GB in all),
in DIR or a temporary folder. Before each load, the files are written back and dropped from memory; what is still there
then ends the run. Times are medians of the runs in turn, each in a process of its own that has imported torch: until
one byte of each page was touched where the file is mapped, and of ``dd`` to nowhere. Exits 1 if a bound does not hold.

A virtual machine takes long to get back memory that its host has taken: memory for the files, and for what is
read from them, is used and given back just before, so that a load does not pay for that.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench_deepspeed import write as write_zero
from measuring import ENVIRONMENT, at_least, at_most, benchmark_files, in_turn, options, report

SHARD = 500_000_000


def main() -> int:
    given = options(__doc__)
    with benchmark_files(given.dir) as (folder, files):
        source = files["safetensors"]
        folders = {form: folder / form for form in ("shards", "dcp", "zero2", "zero3")}
        child("make", source, folder)
        held = [
            mapped("safetensors", source, "load_file", given.runs),
            mapped("zip", files["zip"], "torch.load(mmap=True)", given.runs),
            *(read(form, path, given.runs) for form, path in {"safetensors": source, "zip": files["zip"]}.items()),
            *(read(form, path, given.runs) for form, path in folders.items()),
        ]
    return 0 if all(held) else 1


def child(task: str, *arguments: object) -> Any:
    """Run a task of this file in a process of its own, and return what it found."""
    command = [sys.executable, __file__, "--child", task, *map(str, arguments)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, env=ENVIRONMENT).stdout)


def mapped(form: str, path: Path, peer: str, runs: int) -> bool:
    ours, theirs, rows = compare(path, ["ckptool.load", peer], runs)
    checks = [
        at_most(f"time {{:.2f}} of {peer}", ours[0] / theirs[0], 1.05),
        at_most(f"time of CPU {{:.2f}} of {peer}", ours[1] / theirs[1], 1.05),
    ]
    return report(f"{form}, mapped and touched", rows, checks)


def read(form: str, path: Path, runs: int) -> bool:
    ours, theirs, rows = compare(path, ["ckptool.load(mmap=False)", "dd"], runs)
    ratio = (ours[2] / ours[0]) / (theirs[2] / theirs[0])  # dd reads what is beside the weights, too
    return report(f"{form}, read into memory", rows, [at_least("rate {:.2f} of dd", ratio, 0.9)])


def compare(path: Path, names: list[str], runs: int) -> tuple[list[float], list[float], dict[str, str]]:
    """Return the medians of what ``load`` returns for each of two, and rows that show them."""
    found = in_turn({name: partial(child, "load", path, name) for name in names}, runs)
    medians = [[statistics.median(times) for times in zip(*rows, strict=True)] for rows in found.values()]
    shown = {
        name: f"{one[0]:8.3f} s  {one[1]:8.3f} s of CPU  {one[2] / one[0] / 1e9:6.2f} GB/s"
        for name, one in zip(names, medians, strict=True)
    }
    return medians[0], medians[1], shown


# What runs in processes of its own.


def make(source: str, folder: str) -> None:
    import ckptool

    ckptool.migrate(source, Path(folder, "shards"), max_shard_size=SHARD)
    ckptool.migrate(source, Path(folder, "dcp"), form="dcp", max_shard_size=SHARD)
    for stage in (2, 3):
        write_zero(stage, Path(folder, f"zero{stage}"))


def load(path: str, name: str) -> tuple[float, float, int]:
    """
    Return the times of a load, wall and of the processor, and the bytes that it loads; none is in memory before.

    What is mapped is touched, a byte of each page.
    """
    import torch
    from safetensors.torch import load_file

    import ckptool
    from ckptool.loading import load as loading  # noqa: F401 - imported by then, as torch is

    whole = Path(path)
    files = sorted(one for one in whole.rglob("*") if one.is_file()) if whole.is_dir() else [whole]
    loaders: dict[str, Callable[[], Any]] = {
        "ckptool.load": lambda: ckptool.load(path),
        "ckptool.load(mmap=False)": lambda: ckptool.load(path, mmap=False),
        "load_file": lambda: load_file(path),
        "torch.load(mmap=True)": lambda: torch.load(path, weights_only=True, mmap=True),
        "dd": lambda: dd(files),
    }
    size = sum(one.stat().st_size for one in files)
    for one in files:
        drop(one)
    with mmap.mmap(-1, size * 9 // 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        touched = torch.frombuffer(memory, dtype=torch.uint8)
        touched[:: mmap.PAGESIZE] = 1
        del touched
    if warm := [one.name for one in files if resident(one)]:
        raise SystemExit(f"still in memory: {warm}")
    wall, cpu = time.perf_counter(), own_cpu()
    state = loaders[name]()
    if name in ("ckptool.load", "load_file", "torch.load(mmap=True)"):
        for tensor in state.values():
            tensor.view(-1).view(torch.uint8)[:: mmap.PAGESIZE].sum()
    return time.perf_counter() - wall, own_cpu() - cpu, sum(one.nbytes for one in state.values()) or size


def dd(files: list[Path]) -> dict[str, Any]:
    """Read files to nowhere."""
    for one in files:
        subprocess.run(["dd", f"if={one}", "of=/dev/null", "bs=16M", "status=none"], check=True)
    return {}


def own_cpu() -> float:
    """Return the processor time of this process, and of the processes that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def drop(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def resident(path: Path) -> int:
    """Return how many pages of a file are in memory; see mincore(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    with path.open("rb") as stream:
        nbytes = path.stat().st_size
        pages = (ctypes.c_ubyte * -(-nbytes // mmap.PAGESIZE))()
        where = ctypes.c_void_p(
            libc.mmap(None, ctypes.c_size_t(nbytes), mmap.PROT_READ, mmap.MAP_SHARED, stream.fileno(), ctypes.c_long(0))
        )
        if libc.mincore(where, ctypes.c_size_t(nbytes), pages):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
        libc.munmap(where, ctypes.c_size_t(nbytes))
    return sum(page & 1 for page in pages)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        print(json.dumps({"make": make, "load": load}[sys.argv[2]](*sys.argv[3:])))  # type: ignore[operator]
    else:
        sys.exit(main())
