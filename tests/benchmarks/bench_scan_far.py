"""
How fast ``ckptool scan`` is over small files 50 ms away: many at once against one at a time, and how many requests.

    python tests/benchmarks/bench_scan_far.py [--dir DIR] [--runs 1]

A process of its own serves 2,000 names of real files, or of fixtures, of up to 200 KB; one at a time it reads 200 of
them. The server takes time of the same processors. Exits 1 if a bound does not hold.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import quote

from bench_remote import Store, serving
from bench_scan import copy_files
from measuring import CKPTOOL, at_least, at_most, options, report

MANY, FEW = 2_000, 200
SECONDS = 0.05
MOST_NBYTES = 200_000


def main() -> int:
    given = options(__doc__)
    with tempfile.TemporaryDirectory(dir=given.dir) as folder:
        place = Path(folder)
        copy_files(place / "copies", MOST_NBYTES)
        (place / "files").mkdir()
        for path in (place / "copies").rglob("*.*"):
            path.rename(place / "files" / path.name)
        with serving(place / "files") as store:
            store.ask(f"set?latency={SECONDS}")
            names = sorted(path.name for path in (place / "files").iterdir())[:MANY]
            one, _ = scanned(store, names[:FEW], "--jobs", "1", "--connections", "1")
            many, requests = scanned(store, names)
    checks = [
        at_least("{:.1f} times as fast as one at a time", one / FEW * len(names) / many, 25),
        at_most("{:.2f} requests for a file of up to 8 MiB", requests, 1.3),
        (True, f"{len(names) / many:.0f} files in a second; load {os.getloadavg()[0]:.1f}"),
    ]
    return 0 if report(f"{len(names):,} files, {SECONDS * 1000:.0f} ms away", {}, checks) else 1


def scanned(store: Store, names: list[str], *how: str) -> tuple[float, float]:
    """Return the seconds that a scan takes, and its requests for each file."""
    store.ask("counts")
    command = [*CKPTOOL, "scan", "-", *how]
    begun = time.perf_counter()
    given = "".join(f"{store.url}/b/{quote(name)}\n" for name in names).encode()
    done = subprocess.run(command, input=given, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    seconds = time.perf_counter() - begun
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == len(names), len(rows)
    return seconds, store.ask("counts")["requests"] / len(names)


if __name__ == "__main__":
    sys.exit(main())
