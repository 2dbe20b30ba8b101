"""
What reading far away takes: requests, bytes and time of an index, and of a migration while it is fetched.

    python tests/benchmarks/bench_remote.py [--dir DIR] [--runs 3] [--boto3 PYTHON] [--s3fs PYTHON] [--only index]

A store on loopback, a process of its own, serves files of 2 GB that are made here, and counts. The peers are measured
in the same run where an interpreter is named that has them: ``--s3fs`` one with s3fs and torch, for
``torch.load(meta)`` and for ckptool on its file objects, ``--boto3`` one with boto3, for a download before the
migration. huggingface_hub's metadata calls are measured where it is installed. Exits 1 if a bound does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

from measuring import CKPTOOL, ENVIRONMENT, Figures, at_most, best_in_turn, measure, parser, processes_in_turn, report

HERE = Path(__file__).resolve().parent
LATENCY = 0.05
RATE = 50 << 20
"""Bytes in a second, for each connection."""
MOST = {
    "big-zip": (3, 512),
    "big-safetensors": (2, 512),
    "legacy": (4, 512),
    "many-zip": (6, 4096),
    "tiny-zip": (2, 9000),
}
"""Requests and KiB."""

OURS = "import ckptool, sys; ckptool.open_checkpoint(ckptool.Remote('s3://b/' + sys.argv[1], endpoint=sys.argv[2]))"
OBJECT = """
import ckptool, s3fs, sys
files = s3fs.S3FileSystem(endpoint_url=sys.argv[2])
with files.open('b/' + sys.argv[1], 'rb') as stream: ckptool.open_checkpoint(stream)
"""
META = """
import s3fs, sys, torch
files = s3fs.S3FileSystem(endpoint_url=sys.argv[2])
with files.open('b/' + sys.argv[1], 'rb') as stream: torch.load(stream, map_location='meta', weights_only=True)
"""
HUB = """
import sys
from huggingface_hub import HfApi
HfApi(endpoint=sys.argv[2]).parse_safetensors_file_metadata('org/net', sys.argv[1])
"""
DOWNLOAD = """
import boto3, sys
boto3.client('s3', endpoint_url=sys.argv[2]).download_file('b', sys.argv[1], sys.argv[3])
"""


class Store(NamedTuple):
    """The store, and what it counted."""

    url: str

    def ask(self, words: str) -> Any:
        with urlopen(f"{self.url}/_/{words}") as answer:
            return json.load(answer)


def main() -> int:
    arguments = parser(__doc__, runs=3)
    arguments.add_argument("--boto3", help="an interpreter that has boto3")
    arguments.add_argument("--s3fs", help="an interpreter that has s3fs and torch")
    arguments.add_argument("--only", default="index,stream", help="which parts are measured")
    given = arguments.parse_args()
    ENVIRONMENT.update(AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="b", AWS_REGION="us-east-1")
    ENVIRONMENT["PYTHONPATH"] = os.fspath(HERE.parents[1])
    held = []
    with tempfile.TemporaryDirectory(dir=given.dir) as temporary:
        folder = given.dir or Path(temporary)
        subprocess.run([sys.executable, __file__, "write", str(folder), given.only], check=True, env=ENVIRONMENT)
        with serving(folder) as store:
            if "index" in given.only:
                held.append(indexes(store, given.s3fs))
                held.append(latency(store, given.runs))
            if "stream" in given.only:
                held += [stream(store, Path(temporary), given, rate) for rate in (0, RATE)]
    return 0 if all(held) else 1


def write_files(folder: Path, only: str) -> None:
    """Write the files. Of those that only have an index to be read, the payloads are holes."""
    import torch
    from safetensors.torch import save_file

    def blocks(count: int, nbytes: int) -> dict[str, torch.Tensor]:
        return {f"layers.{at}.weight": torch.full((nbytes // 4,), at / 7) for at in range(count)}

    if not (folder / "big-zip").exists():
        torch.save(blocks(288, 7_200_000), folder / "big-zip")
    if "index" not in only or (folder / "tiny-zip").exists():
        return
    with torch.serialization.skip_data():
        torch.save(blocks(5_000, 100_000), folder / "many-zip")
    torch.save(blocks(20_000, 128), folder / "tiny-zip")
    torch.save(blocks(288, 300_000), folder / "legacy", _use_new_zipfile_serialization=False)
    save_file(blocks(288, 300_000), folder / "big-safetensors")


@contextmanager
def serving(folder: Path) -> Iterator[Store]:
    command = [sys.executable, str(HERE / "loopback_store.py"), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Store(process.stdout.readline().strip())
        finally:
            process.terminate()


def indexes(store: Store, s3fs: str | None) -> bool:
    """Count requests and bytes of each kind of file, for ckptool and its peers."""
    checks = []
    print("index: requests, KiB")
    for name, (requests, kib) in MOST.items():
        ours = counted(store, sys.executable, OURS, name)
        checks.append((ours[0] <= requests and ours[1] <= kib, f"{name}: {ours} (at most {requests}, {kib} KiB)"))
        if s3fs:
            through = counted(store, s3fs, OBJECT, name)
            checks.append((through[0] <= 2 * requests, f"{name}, a file object of s3fs: {through}"))
            if "safetensors" not in name:
                print(f"       torch.load(meta) over s3fs, {name}: {counted(store, s3fs, META, name)}")
        if "safetensors" in name:
            print(f"       huggingface_hub, {name}: {counted(store, sys.executable, HUB, name)}")
    return report("", {}, checks)


def counted(store: Store, python: str, code: str, name: str) -> tuple[int, int]:
    store.ask("counts")
    measure([python, "-c", code, name, store.url])
    found = store.ask("counts")
    return found["requests"], found["bytes"] >> 10


def latency(store: Store, runs: int) -> bool:
    """Inspect, with time added to each answer."""
    store.ask(f"set?latency={LATENCY}")
    work = [*CKPTOOL, "inspect", "-q", "s3://b/big-zip", "--endpoint", store.url]
    figures = processes_in_turn({"inspect, 50 ms of latency": work}, runs)
    store.ask("set?latency=0")
    return report("latency", figures, [at_most("{:.3f} s", one.wall, 0.5) for one in figures.values()])


def stream(store: Store, folder: Path, given: argparse.Namespace, rate: int) -> bool:
    """Migrate while the file is fetched, and fetch it first."""
    store.ask(f"set?rate={rate}")
    migrate = [*CKPTOOL, "migrate", "--to", "cpu", "--force"]
    target, copy = str(folder / "out.pth"), str(folder / "copy.pth")

    def ours() -> Figures:
        return measure([*migrate, "s3://b/big-zip", target, "--endpoint", store.url])

    def theirs() -> Figures:
        started = time.perf_counter()
        first = measure([given.boto3, "-c", DOWNLOAD, "big-zip", store.url, copy])
        second = measure([*migrate, copy, target])
        Path(copy).unlink()
        return Figures(time.perf_counter() - started, first.cpu + second.cpu, max(first.peak, second.peak))

    work = {"while it is fetched": ours} | ({"boto3, then migrate": theirs} if given.boto3 else {})
    figures = best_in_turn(work, given.runs)
    mine = figures["while it is fetched"]
    checks = [at_most("peak {:.1f} MiB", mine.peak, 200)]
    if given.boto3:
        ratio = mine.wall / figures["boto3, then migrate"].wall
        checks.append(at_most("time {:.3f} of download and migrate", ratio, 0.5 if rate else 0.6))
    store.ask("set?rate=0")
    return report(f"stream, {rate >> 20} MiB/s for each connection" if rate else "stream", figures, checks)


if __name__ == "__main__":
    if sys.argv[1:2] == ["write"]:
        write_files(Path(sys.argv[2]), sys.argv[3])
    else:
        sys.exit(main())
