"""
How fast ``ckptool.load`` loads onto a GPU, beside a raw copy from pinned memory and the peers that are installed.

    python tests/benchmarks/bench_gpu.py [--dir DIR] [--runs 5] [--device cuda] [--simulated]

Makes the files of bench_inspect.py (7 GB) in DIR or a temporary folder; they are in the page cache. Times are of calls
inside a process in which the device has started, until it is done, the best of runs in turn. What is loaded is first
held against what torch loads. Exits 1 if that differs or a bound does not hold, and 0 where there is no such device.

``--simulated`` tries the benchmark itself, on small files and the device of ``tests/device``, whose times mean nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from measuring import BLOCK_SHAPE, at_most, benchmark_files, in_turn, parser, report
from safetensors.torch import load_file

import ckptool

SMALL = (32, 32)
PINNED_NBYTES = 256 << 20

Loader = Callable[[Path], Any]


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--device", default="cuda", help="as torch calls it: cuda, xpu, sim…")
    arguments.add_argument("--simulated", action="store_true", help="a simulated one in its place, and small files")
    given = arguments.parse_args()
    if given.simulated:
        sys.path.insert(0, str(Path(__file__).parents[2]))
        from tests.device.register import register

        register(given.device)
    if not is_here(given.device):
        print(f"no device of torch's is called {given.device!r} here")
        return 0
    bench = Bench(given.device, given.runs, is_timed=not given.simulated)
    print(f"{bench.name}, torch {torch.__version__}")
    with benchmark_files(given.dir, SMALL if given.simulated else BLOCK_SHAPE) as (_, files):
        held = [
            bench.compare("bfloat16, zip", files["zip"], bench.torches()),
            bench.compare("bfloat16, safetensors", files["safetensors"], bench.safetensors_peers()),
            bench.compare("small tensors, zip", files["little" if given.simulated else "many"], bench.torches()),
        ]
    return 0 if all(held) else 1


def is_here(device: str) -> bool:
    """Say whether torch has a device of that name, and one of it is there."""
    try:
        return bool(torch.get_device_module(device).is_available())
    except RuntimeError:
        return False


class Bench:
    """Compares loaders onto one device."""

    def __init__(self, device: str, runs: int, *, is_timed: bool) -> None:
        self.device = device
        self.runs = runs
        self.is_timed = is_timed
        """Whether a time that is over its bound is a miss."""
        self.module: Any = torch.get_device_module(device)

    @property
    def name(self) -> str:
        return str(self.module.get_device_name()) if hasattr(self.module, "get_device_name") else self.device

    def torches(self) -> dict[str, Loader]:
        return {
            "torch.load": lambda path: torch.load(path, map_location=self.device, weights_only=True),
            "torch.load(mmap=True)": lambda path: torch.load(
                path, map_location=self.device, weights_only=True, mmap=True
            ),
        }

    def safetensors_peers(self) -> dict[str, Loader]:
        if self.device not in ("cuda", "xpu"):  # it takes the devices that it knows by name
            return {"load_file, then to": lambda path: {k: one.to(self.device) for k, one in load_file(path).items()}}
        peers: dict[str, Loader] = {"safetensors.torch.load_file": lambda path: load_file(path, device=self.device)}
        if self.device == "cuda" and self.is_timed and find_spec("fastsafetensors"):
            peers["fastsafetensors"] = with_fastsafetensors
        if self.device == "cuda" and self.is_timed and find_spec("runai_model_streamer"):
            peers["runai_model_streamer"] = with_runai
        return peers

    def compare(self, title: str, path: Path, peers: dict[str, Loader]) -> bool:
        nbytes = path.stat().st_size
        first = next(iter(peers))
        same = equal(ckptool.load(path, self.device), peers[first](path))
        loaders: dict[str, Loader] = {"ckptool.load": lambda path: ckptool.load(path, self.device), **peers}
        work = {name: lambda load=load: self.timed(lambda: load(path)) for name, load in loaders.items()}
        work["copy from pinned memory"] = self.copying(nbytes)
        walls = {name: min(found) for name, found in in_turn(work, self.runs).items()}
        shown = {name: f"{wall:8.4f} s  {nbytes / wall / 1e9:7.2f} GB/s" for name, wall in walls.items()}
        checks = [(same, f"equal to what {first} loads")]
        if self.is_timed:
            checks.append(at_most(f"time {{:.3f}} of {first}", walls["ckptool.load"] / walls[first], 1))
        return report(f"{title}: {nbytes:,} bytes", shown, checks)

    def copying(self, nbytes: int) -> Callable[[], float]:
        """Return what copies so many bytes as fast as the bus goes: by pieces, out of memory that is pinned already."""
        piece = min(nbytes, PINNED_NBYTES)
        pinned = torch.empty(piece, dtype=torch.uint8, pin_memory=True)
        target = torch.empty(piece, dtype=torch.uint8, device=self.device)

        def copy() -> None:
            for start in range(0, nbytes, piece):
                size = min(piece, nbytes - start)
                target[:size].copy_(pinned[:size], non_blocking=True)

        return lambda: self.timed(copy)

    def timed(self, work: Callable[[], Any]) -> float:
        self.module.synchronize()
        started = time.perf_counter()
        made = work()
        self.module.synchronize()
        wall = time.perf_counter() - started
        del made
        return wall


def with_fastsafetensors(path: Path) -> Any:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), torch.device("cuda", 0), nogds=True)
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
        return {name: tensor.to("cuda") for name, tensor in streamer.get_tensors()}


def equal(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    return ours.keys() == theirs.keys() and all(
        ours[name].device == tensor.device and torch.equal(ours[name], tensor) for name, tensor in theirs.items()
    )


if __name__ == "__main__":
    sys.exit(main())
