"""
How fast ``ckptool.load`` loads onto a GPU, beside a raw copy from pinned memory and the peers that are installed.

    python tests/benchmarks/bench_gpu.py [--dir DIR] [--runs 5]

Makes the files of bench_inspect.py (7 GB) in DIR or a temporary folder; they are in the page cache. Times are of calls
inside a process in which CUDA has started, until the device is done, the best of runs in turn. What is loaded is first
held against what torch loads. Exits 1 if that differs or a bound does not hold, and 0 where there is no GPU.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from measuring import SMALL_TENSORS, benchmark_files, in_turn, options
from safetensors.torch import load_file

import ckptool

DEVICE = "cuda"
PINNED_NBYTES = 256 << 20

Loader = Callable[[Path], Any]


def main() -> int:
    given = options(__doc__)
    if not torch.cuda.is_available():
        print("no CUDA device is here")
        return 0
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    torches: dict[str, Loader] = {
        "torch.load": lambda path: torch.load(path, map_location=DEVICE, weights_only=True),
        "torch.load(mmap=True)": lambda path: torch.load(path, map_location=DEVICE, weights_only=True, mmap=True),
    }
    with benchmark_files(given.dir) as (_, files):
        held = [
            compare("2.3 GB zip", files["zip"], torches, given.runs),
            compare("2.3 GB safetensors", files["safetensors"], safetensors_peers(), given.runs),
            compare(f"{SMALL_TENSORS:,} small tensors, zip", files["many"], torches, given.runs),
        ]
    return 0 if all(held) else 1


def safetensors_peers() -> dict[str, Loader]:
    peers: dict[str, Loader] = {"safetensors.torch.load_file": lambda path: load_file(path, device=DEVICE)}
    if find_spec("fastsafetensors"):
        peers["fastsafetensors"] = with_fastsafetensors
    if find_spec("runai_model_streamer"):
        peers["runai_model_streamer"] = with_runai
    return peers


def with_fastsafetensors(path: Path) -> Any:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), torch.device(DEVICE, 0), nogds=True)
    loader.add_filenames({0: [str(path)]})
    held = loader.copy_files_to_device()
    tensors = {name: held.get_tensor(name) for name in list(loader.get_keys())}
    torch.cuda.synchronize()
    del tensors  # they are views of its buffers, which nothing else lets go of
    held.close()
    loader.close()


def with_runai(path: Path) -> Any:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(str(path))
        return {name: tensor.to(DEVICE) for name, tensor in streamer.get_tensors()}


def compare(title: str, path: Path, peers: dict[str, Loader], runs: int) -> bool:
    nbytes = path.stat().st_size
    first = next(iter(peers))
    same = equal(ckptool.load(path, DEVICE), peers[first](path))
    loaders: dict[str, Loader] = {"ckptool.load": lambda path: ckptool.load(path, DEVICE), **peers}
    work = {name: lambda load=load: timed(lambda: load(path)) for name, load in loaders.items()}
    work["copy from pinned memory"] = copying(nbytes)
    walls = {name: min(found) for name, found in in_turn(work, runs).items()}
    print(f"{title}: {nbytes:,} bytes")
    for name, wall in walls.items():
        print(f"  {name:36} {wall:8.4f} s  {nbytes / wall / 1e9:7.2f} GB/s")
    share = walls["ckptool.load"] / walls[first]
    checks = [(same, f"equal to what {first} loads"), (share <= 1, f"time {share:.3f} of {first} (at most 1)")]
    for held, text in checks:
        print(f"  {'ok  ' if held else 'MISS'} {text}", flush=True)
    return all(held for held, _ in checks)


def equal(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    return ours.keys() == theirs.keys() and all(
        ours[name].device == tensor.device and torch.equal(ours[name], tensor) for name, tensor in theirs.items()
    )


def copying(nbytes: int) -> Callable[[], float]:
    """Return what copies so many bytes as fast as the bus goes: by pieces, out of memory that is pinned already."""
    piece = min(nbytes, PINNED_NBYTES)
    pinned = torch.empty(piece, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(piece, dtype=torch.uint8, device=DEVICE)

    def copy() -> None:
        for start in range(0, nbytes, piece):
            size = min(piece, nbytes - start)
            target[:size].copy_(pinned[:size], non_blocking=True)

    return lambda: timed(copy)


def timed(work: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    made = work()
    torch.cuda.synchronize()
    wall = time.perf_counter() - started
    del made
    return wall


if __name__ == "__main__":
    sys.exit(main())
