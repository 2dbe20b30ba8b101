"""
How fast a large checkpoint becomes shards by several processes: 4 GB of bfloat16 in a zip, into 8 files.

    python tests/benchmarks/bench_workers.py [--dir DIR] [--runs 5] [--ray] [--against OTHER_TREE]

One process, which uses about two cores, is compared with two; and with another working tree of this project, if one
is named. With ``--ray``, one and two workers are compared on a cluster that has been used once, of two nodes with a
core each. Every figure is of whole processes, those that migrate starts among them, not those of a cluster: times are
the best of the runs, memory is that of the largest process. Exits 1 if a bound does not hold, or if a byte is another
one.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from measuring import CKPTOOL, ENVIRONMENT, Figures, at_most, best_in_turn, bounds, measure, parser, remove, report

TENSORS, NBYTES = 256, 4_000_000_000
SHARDS = 8
TREE = Path(__file__).resolve().parents[2]
sys.path.append(os.fspath(TREE))
WRITE = """
import sys, torch
count, numel, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.manual_seed(0)
torch.save({f"layers.{number}.weight": torch.randn(numel).to(torch.bfloat16) for number in range(count)}, path)
"""


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--nbytes", type=int, default=NBYTES)
    arguments.add_argument("--ray", action="store_true", help="compare workers on Ray, too")
    arguments.add_argument("--against", type=Path, help="another working tree, whose migrate is compared")
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory(dir=given.dir) as folder:
        os.chdir(folder)  # or what is in the current folder would be imported
        source, numel = Path(folder) / "large.pth", given.nbytes // TENSORS // 2
        subprocess.run([sys.executable, "-c", WRITE, str(TENSORS), str(numel), str(source)], check=True)
        print(f"load before: {os.getloadavg()}")
        held = compare(source, numel, given)
        print(f"load after: {os.getloadavg()}")
    return 0 if held else 1


def compare(source: Path, numel: int, given: argparse.Namespace) -> bool:
    if not given.ray:
        return compared(source, numel, given.runs, given.against, None)
    from tests.fleet.cluster import Cluster

    with Cluster(own_core=True) as cluster:
        ENVIRONMENT.update(cluster.environment)
        return compared(source, numel, given.runs, given.against, cluster.address)


def compared(source: Path, numel: int, runs: int, other: Path | None, address: str | None) -> bool:
    size = str(TENSORS // SHARDS * numel * 2)
    command = [*CKPTOOL, "migrate", "-q", "--force", "--max-shard-size", size, str(source)]
    names = ("one worker", "two workers", "one on Ray", "two on Ray", "other tree")
    targets = {name: source.with_name(name.replace(" ", "-")) for name in names}

    def migrated(name: str, tree: Path, *options: str) -> Figures:
        remove(targets[name])
        os.sync()  # what another run has left for the disk to do
        ENVIRONMENT["PYTHONPATH"] = os.fspath(tree)
        return measure([*command, str(targets[name]), *options])

    work = {
        "one worker": lambda: migrated("one worker", TREE),
        "two workers": lambda: migrated("two workers", TREE, "--jobs", "2"),
    }
    if address is not None:
        ray = ("--ray", address, "--jobs")
        migrated("one on Ray", TREE, *ray, "2")  # its workers start
        work["one on Ray"] = lambda: migrated("one on Ray", TREE, *ray, "1")
        work["two on Ray"] = lambda: migrated("two on Ray", TREE, *ray, "2")
    if other is not None:
        work["other tree"] = lambda: migrated("other tree", other.resolve())
    figures = best_in_turn(work, runs)
    one, two = figures["one worker"], figures["two workers"]
    checks = [
        at_most("wall time {:.2f} of one worker's", two.wall / one.wall, 1.1),
        at_most("peak {:.1f} MiB in the largest process", two.peak, 96),
        *((is_same(targets["one worker"], targets[name]), f"{name}: the same bytes") for name in figures),
    ]
    if address is not None:
        share = figures["two on Ray"].wall / figures["one on Ray"].wall
        checks.append(at_most("Ray: wall time {:.2f} of one worker's on Ray", share, 0.7))
    if other is not None:
        checks += bounds(figures, wall={"other tree": 1.05}, cpu={"other tree": 1.05})
    return report(f"{source.stat().st_size:,} bytes into {SHARDS} shards", figures, checks)


def is_same(one: Path, other: Path) -> bool:
    names = sorted(path.name for path in one.iterdir())
    same = filecmp.cmpfiles(one, other, names, shallow=False)[0]
    return names == sorted(path.name for path in other.iterdir()) == sorted(same)


if __name__ == "__main__":
    sys.exit(main())
