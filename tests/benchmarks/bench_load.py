"""
How fast, and in how little memory, ``ckptool.load`` and ``load_into`` load, beside torch itself, in one run.

    python tests/benchmarks/bench_load.py [--dir DIR] [--runs 5]

Makes the files of bench_inspect.py and some more (about 14 GB in all) in DIR or a temporary folder. Times are of
calls inside a process that has imported torch already, the best of runs in turn, of legacy streams the first load;
memory is that of whole processes. Exits 1 if a bound does not hold.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measuring import (
    BLOCK_SHAPE,
    BLOCKS,
    ENVIRONMENT,
    SMALL_TENSORS,
    at_most,
    benchmark_files,
    in_turn,
    options,
    report,
)

WORKERS = 4
MIB = 1 << 20
WIDTH, DEPTH = 4096, 16  # 1 GiB of float32


def main() -> int:
    given = options(__doc__)
    with benchmark_files(given.dir) as (folder, files):
        files |= {name: folder / f"{name}.pth" for name in ("odd", "even", "training")}
        child("make", folder)
        held = [
            compare(f"{SMALL_TENSORS:,} small tensors", files["many"], given.runs, mapped=1 / 4),
            compare("2.3 GB zip", files["zip"], given.runs, mapped=1.0),
            compare("2.3 GB legacy stream, misaligned", files["odd"], given.runs, plain=1 / 3),
            compare("2.3 GB legacy stream, aligned", files["even"], given.runs, plain=1 / 3),
            fill("load_into a meta model", files["training"], "meta"),
            fill("load_into a real model", files["training"], "cpu"),
            share(files["training"]),
        ]
    return 0 if all(held) else 1


def child(task: str, *arguments: object) -> Any:
    """Run a task of this file in a process of its own, and return what it found."""
    command = [sys.executable, __file__, "--child", task, *map(str, arguments)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=ENVIRONMENT)
    return json.loads(done.stdout or "null")


def compare(title: str, path: Path, runs: int, *, mapped: float | None = None, plain: float | None = None) -> bool:
    # Where bytes are copied, a process that has loaded before may have memory at hand: there the first load counts.
    names = ["ckptool.load", "ckptool.load(mmap=False)", "torch.load"]
    work = {name: lambda name=name: child("first", path, name) for name in names}
    walls = child("time", path, runs) if mapped else {name: min(one) for name, one in in_turn(work, runs).items()}
    rows = {name: f"{wall:8.4f} s" for name, wall in walls.items()}
    ours = walls["ckptool.load"]
    bounds = {"torch.load(mmap=True)": mapped, "torch.load": plain}
    checks = [at_most(f"time {{:.3f}} of {peer}", ours / walls[peer], most) for peer, most in bounds.items() if most]
    return report(f"{title}: {path.stat().st_size:,} bytes", rows, checks)


def fill(title: str, path: Path, device: str) -> bool:
    found, peer = child("fill", path, device), child("fill_with_torch", path, device)
    rows = {
        name: f"{one['wall']:8.3f} s  {one['peak'] / MIB:8.0f} MiB over the process before"
        for name, one in (("ckptool.load_into", found), ("torch.load + load_state_dict", peer))
    }
    checks = [
        at_most("peak {:.0f} MiB over the weights", (found["peak"] - found["weights"]) / MIB, 64),
        at_most("read {:.3f} times the weights", found["read"] / found["weights"], 1.01),
    ]
    return report(f"{title}: {path.stat().st_size:,} bytes, of which two thirds are Adam's", rows, checks)


def share(path: Path) -> bool:
    found = child("share", path)
    share = (found["pss"] - WORKERS * found["torch"]) / found["weights"]
    title = f"{WORKERS} workers that serve one file: summed PSS"
    return report(title, {}, [at_most("{:.2f} of the weights, beside torch's own", share, 1.15)])


# What runs in processes of its own.


def make(folder: str) -> None:
    import torch

    import ckptool

    for extra in ("", "s"):  # one byte more in a name moves every storage by one
        blocks = OrderedDict(
            (f"layers.{index}.weight{extra if not index else ''}", torch.full(BLOCK_SHAPE, 0.5, dtype=torch.bfloat16))
            for index in range(BLOCKS)
        )
        path = Path(folder) / "new.pth"
        torch.save(blocks, path, _use_new_zipfile_serialization=False)
        with ckptool.open_checkpoint(path) as checkpoint:
            storage = next(iter(checkpoint.tensors.values())).info.storage
            assert storage is not None
            path.rename(path.with_name("odd.pth" if (storage.file_offset or 0) % 2 else "even.pth"))
        del blocks
    model = net("cpu")
    adam = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    adam.step()
    torch.save({"state_dict": model.state_dict(), "optimizer": adam.state_dict(), "epoch": 7}, f"{folder}/training.pth")


def net(device: str) -> Any:
    import torch

    with torch.device(device):
        return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))


def loaders(path: str) -> dict[str, Callable[[], Any]]:
    import torch

    import ckptool
    from ckptool.loading import load as loading  # noqa: F401 - imported by then, as torch is

    return {
        "ckptool.load": lambda: ckptool.load(path),
        "ckptool.load(mmap=False)": lambda: ckptool.load(path, mmap=False),
        "torch.load": lambda: torch.load(path, weights_only=True),
        "torch.load(mmap=True)": lambda: torch.load(path, weights_only=True, mmap=True),
    }


def timed(loader: Callable[[], Any]) -> float:
    gc.collect()
    started = time.perf_counter()
    state = loader()
    wall = time.perf_counter() - started
    del state
    return wall


def time_first(path: str, name: str) -> float:
    return timed(loaders(path)[name])


def time_loads(path: str, runs: str) -> dict[str, float]:
    work = {name: lambda loader=loader: timed(loader) for name, loader in loaders(path).items()}
    return {name: min(found) for name, found in in_turn(work, int(runs)).items()}


def own_status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def watched(load: Callable[[], None], weights: int) -> dict[str, float]:
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before, taken = own_status("VmRSS"), bytes_read()
    started = time.perf_counter()
    load()
    wall = time.perf_counter() - started
    return {"wall": wall, "peak": own_status("VmHWM") - before, "weights": weights, "read": bytes_read() - taken}


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def fill_with_ckptool(path: str, device: str) -> dict[str, float]:
    import torch

    import ckptool

    model = net(device)
    weights = DEPTH * WIDTH * WIDTH * 4
    loaded = 0 if device == "meta" else weights  # a real model has its memory before it is loaded

    def load() -> None:
        ckptool.load_into(model, path)
        sum(float(parameter.sum()) for parameter in model.parameters())  # mapped pages count once they are touched

    with torch.no_grad():
        found = watched(load, weights)
    return found | {"peak": found["peak"] + loaded}


def fill_with_torch(path: str, device: str) -> dict[str, float]:
    import torch

    model = net("cpu")

    def load() -> None:
        model.load_state_dict(torch.load(path, weights_only=True)["state_dict"])

    found = watched(load, 0)
    return found | {"peak": found["peak"] + DEPTH * WIDTH * WIDTH * 4}


def share_between_workers(path: str) -> dict[str, float]:
    script = (
        "import sys, torch, ckptool\n"
        "state = ckptool.load(sys.argv[1]) if len(sys.argv) > 1 else {}\n"
        "torch.ones(8).sum()\n"
        "total = sum(float(tensor.view(torch.int32).sum()) for tensor in state.values())\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
    )

    def start(*arguments: str) -> subprocess.Popen[str]:
        worker = subprocess.Popen(
            [sys.executable, "-c", script, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert worker.stdout is not None
        worker.stdout.readline()
        return worker

    def pss(workers: list[subprocess.Popen[str]]) -> int:
        lines = [Path(f"/proc/{worker.pid}/smaps_rollup").read_text().splitlines() for worker in workers]
        found = sum(int(line.split()[1]) * 1024 for text in lines for line in text if line.startswith("Pss:"))
        for worker in workers:
            worker.communicate("\n")
        return found

    idle = pss([start() for _ in range(WORKERS)])
    busy = pss([start(path) for _ in range(WORKERS)])
    return {"pss": busy, "torch": idle / WORKERS, "weights": DEPTH * WIDTH * WIDTH * 4}


TASKS: dict[str, Callable[..., Any]] = {
    "make": make,
    "time": time_loads,
    "first": time_first,
    "fill": fill_with_ckptool,
    "fill_with_torch": fill_with_torch,
    "share": share_between_workers,
}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        print(json.dumps(TASKS[sys.argv[2]](*sys.argv[3:])))
    else:
        sys.exit(main())
