"""
Whether several workers write a folder in the time that ``docs/fleets.md`` works out: from a store, into it, by Ray.

    python tests/benchmarks/bench_fleet.py [--workers 1 2 4] [--mb 480] [--rate 30] [--latency 0.05]

A store on loopback gives each node of a real cluster so many MB in a second in each direction, and answers each request
after the latency. Nodes are told apart by their keys. The time of a migration into 16 shards, verified, from the
command to its end, is compared with what the page says: the larger the files, the closer. Exits 1 if it takes over 1.25
of that, or if two workers take over 0.7 of one.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

TREE = Path(__file__).resolve().parents[2]
sys.path.append(os.fspath(TREE))

from tests.fleet.cluster import Cluster  # noqa: E402 - the tree is not installed
from tests.remote import buckets, servers  # noqa: E402

SHARDS = 16
AHEAD = 96 << 20
"""What is fetched at once, over all connections: the first of it comes with the last, and then writing begins."""
STEP = 1 << 16
TRIPS = 9
"""Requests of a shard, one after the other: for the index of the source, reads, parts, the end, reading back."""
ENDS = 6
"""Requests one after the other at the end: the prefix is looked at, shards are copied, then the index."""


class Line:
    """A network in one direction: bytes take their time one after the other, whichever connection they are of."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free = 0.0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> None:
        with self._lock:
            self._free = max(self._free, time.perf_counter()) + nbytes / self._rate
            until = self._free
        time.sleep(max(0.0, until - time.perf_counter()))


class Shaped(buckets.Bucket):
    """A bucket behind a network."""

    parts = {}  # noqa: RUF012
    log = []  # noqa: RUF012
    rate = 1.0
    latency = 0.0
    lines: dict[tuple[str, bool], Line] = {}  # noqa: RUF012

    def line(self, *, there: bool) -> Line:
        whose = self.headers.get("Authorization", "").partition("Credential=")[2].partition("/")[0]
        with self.server.lock:
            return self.lines.setdefault((whose, there), Line(self.rate))

    def get(self) -> None:
        time.sleep(self.latency)
        super().get()

    def change(self) -> None:
        time.sleep(self.latency)
        line, left = self.line(there=True), int(self.headers.get("Content-Length") or 0)
        body = bytearray()
        while left:
            data = self.rfile.read(min(left, STEP))
            line.take(len(data))
            body += data
            left -= len(data)
        self.body = bytes(body)
        with self.server.lock:
            self.log.append((self.command, self.path))  # the names of uploads are of its length
        {"PUT": self.put, "POST": self.post, "DELETE": self.delete}[self.command]()

    def answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        if len(body) <= STEP or self.command == "HEAD":
            super().answer(status, body, headers)
            return
        line, view, write = self.line(there=False), memoryview(body), self.wfile.write

        class Slowly:
            def write(self, data: Any) -> None:
                if data is not view:
                    write(data)
                    return
                for start in range(0, len(view), STEP):
                    line.take(len(view[start : start + STEP]))
                    write(view[start : start + STEP])

        plain, self.wfile = self.wfile, Slowly()  # type: ignore[assignment]
        try:
            super().answer(status, view, headers)  # type: ignore[arg-type]
        finally:
            self.wfile = plain


class Cheap:
    """What stands for a digest: the processors are the cluster's."""

    def __init__(self, data: bytes) -> None:
        self._text = f"{len(data):x}-{zlib.adler32(data[:4096]):08x}"

    def hexdigest(self) -> str:
        return self._text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--mb", type=int, default=480, help="size of the source")
    parser.add_argument("--rate", type=float, default=30, help="MB in a second, of each node in each direction")
    parser.add_argument("--latency", type=float, default=0.05, help="seconds until a request is answered")
    given = parser.parse_args()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        os.chdir(folder)  # or what is in the current folder would be imported
        command = [sys.executable, __file__, "--serve", json.dumps(vars(given))]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        stack.callback(server.kill)
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        found = [timed(count, url, given) for count in given.workers]
    return 0 if reported(found, given) else 1


def timed(count: int, url: str, given: argparse.Namespace) -> tuple[int, float, float, str]:
    """Return how many workers there were, what the start took, what the work took, and what was said."""
    keys = {"AWS_SECRET_ACCESS_KEY": "x", "AWS_EC2_METADATA_DISABLED": "true", "AWS_REGION": "us-east-1"}
    with Cluster(nodes=count, own=lambda node: {**keys, "AWS_ACCESS_KEY_ID": f"node{node}"}) as cluster:
        environment = {**cluster.environment, **keys, "AWS_ACCESS_KEY_ID": "here"}

        def migrate(source: str, target: str, size: str) -> tuple[float, str]:
            command = [sys.executable, "-m", "ckptool", "migrate", source, target, "--max-shard-size", size]
            command += ["--endpoint", url, "--ray", cluster.address]
            begun = time.perf_counter()
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            took = time.perf_counter() - begun
            assert done.returncode == 0, done.stderr
            return took, done.stdout

        migrate("s3://b/small.safetensors", f"s3://b/first-{count}", "10KB")  # workers start
        start, _ = migrate("s3://b/small.safetensors", f"s3://b/small-{count}", "10KB")
        took, said = migrate("s3://b/large.safetensors", f"s3://b/large-{count}", f"{given.mb * 1_000_000 // SHARDS}")
    return count, start, took, said


def worked_out(count: int, given: argparse.Namespace) -> float:
    """Return the seconds that the work should take: see ``docs/fleets.md``."""
    shard = given.mb / SHARDS
    of_one = (2 * shard + min(AHEAD / 1e6, shard)) / given.rate + TRIPS * given.latency
    return -(-SHARDS // count) * of_one + ENDS * given.latency


def reported(found: list[tuple[int, float, float, str]], given: argparse.Namespace) -> bool:
    network = f"{given.rate:g} MB/s each way for each node, {given.latency * 1000:g} ms"
    print(f"{given.mb} MB into {SHARDS} shards, {network}")
    held = []
    for count, start, took, _ in found:
        work = worked_out(count, given)
        expected = start + work
        held.append(took <= 1.25 * expected)
        print(
            f"  {count} workers: {took:6.1f} s; worked out {expected:6.1f} s, of which {start:.1f} s are those of a"
            f" small one; {took / expected:.2f} {'ok' if held[-1] else 'MISS'}"
        )
    times = {count: took for count, _, took, _ in found}
    if 1 in times and 2 in times:
        held.append(times[2] <= 0.7 * times[1])
        print(f"  two workers take {times[2] / times[1]:.2f} of one (at most 0.7) {'ok' if held[-1] else 'MISS'}")
    return all(held)


def serve(given: dict[str, Any]) -> None:
    buckets.md5 = servers.md5 = Cheap  # type: ignore[attr-defined]
    Shaped.rate, Shaped.latency = given["rate"] * 1e6, given["latency"]
    files = {"/b/small.safetensors": plain(2, 1000), "/b/large.safetensors": plain(SHARDS, given["mb"] * 1_000_000)}
    with servers.serving(files, Shaped) as server:
        print(server.url, flush=True)
        threading.Event().wait()


def plain(count: int, nbytes: int) -> bytes:
    """Return a safetensors file with so many tensors of bytes, which have so many together."""
    size = nbytes // count
    header = {
        f"layers.{number}": {"dtype": "U8", "shape": [size], "data_offsets": [number * size, (number + 1) * size]}
        for number in range(count)
    }
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + os.urandom(size) * count


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(json.loads(sys.argv[2]))
    else:
        sys.exit(main())
