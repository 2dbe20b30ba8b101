"""
How fast a checkpoint of many shards is inspected and loaded: 91,000 small tensors in 163 files of safetensors.

    python tests/benchmarks/bench_shards.py [--dir DIR] [--runs 5] [--against OTHER_TREE]

Makes its own files (23 MB). ``inspect`` is compared with another working tree of this project, if one is named, and
``load`` with safetensors' own ``safe_open`` and ``get_tensor``. Times are of the processor, the best of the runs, run
in turn. Exits 1 if a bound does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from measuring import ENVIRONMENT, Figures, best, measure, processes_in_turn, report

SHARDS, TENSORS = 163, 91_000
ROWS, COLUMNS = 2, 4
NBYTES = ROWS * COLUMNS * 4
PEER = (
    "import sys, glob, torch\n"
    "from safetensors import safe_open\n"
    "found = {}\n"
    "for path in sorted(glob.glob(sys.argv[1] + '/*.safetensors')):\n"
    "    with safe_open(path, 'pt') as file:\n"
    "        for name in file.keys(): found[name] = file.get_tensor(name)"
)
OURS = "import sys, torch, ckptool; ckptool.load(sys.argv[1])"


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--dir", type=Path, help="where the files are made and kept")
    arguments.add_argument("--runs", type=int, default=5)
    arguments.add_argument("--against", type=Path, help="another working tree, whose inspect is the measure")
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.dir or Path(temporary)
        write_shards(folder, SHARDS, TENSORS)
        held = [compare_load(folder, given.runs)]
        if given.against is not None:
            held.append(compare_inspect(folder, given.against.resolve(), given.runs))
    return 0 if all(held) else 1


def write_shards(folder: Path, shards: int, tensors: int) -> None:
    """Write an index and its shards, each tensor with a long name, as those of models with many experts are."""
    folder.mkdir(parents=True, exist_ok=True)
    shard_of: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        names = [
            f"model.layers.{index // 1500}.mlp.experts.{index % 1500 // 6}.projection_{index % 6}.weight_scale_{index}"
            for index in range(tensors * number // shards, tensors * (number + 1) // shards)
        ]
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        for place, name in enumerate(names):
            offsets = [place * NBYTES, (place + 1) * NBYTES]
            header[name] = {"dtype": "F32", "shape": [ROWS, COLUMNS], "data_offsets": offsets}
            shard_of[name] = file
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        (folder / file).write_bytes(len(text).to_bytes(8, "little") + text + bytes(range(NBYTES)) * len(names))
    whole = {"metadata": {"total_size": tensors * NBYTES}, "weight_map": shard_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(whole, indent=2))


def compare_load(folder: Path, runs: int) -> bool:
    commands = {
        "ckptool.load": [sys.executable, "-c", OURS, str(folder)],
        "safe_open, get_tensor": [sys.executable, "-c", PEER, str(folder)],
    }
    figures = processes_in_turn(commands, runs)
    ratio = figures["ckptool.load"].cpu / figures["safe_open, get_tensor"].cpu
    return report("load", figures, [(ratio <= 1, f"time {ratio:.3f} of the peer's (at most 1)")])


def compare_inspect(folder: Path, other: Path, runs: int) -> bool:
    command = [sys.executable, "-m", "ckptool", "inspect", "-q", str(folder / "model.safetensors.index.json")]
    found: dict[str, list[Figures]] = {}
    os.chdir(folder)  # or what is in the current folder would be imported
    for tree in (Path(__file__).resolve().parents[2], other) * (runs + 1):
        ENVIRONMENT["PYTHONPATH"] = os.fspath(tree)
        found.setdefault(str(tree), []).append(Figures(*measure(command)))
    figures = {tree: best(rows[1:]) for tree, rows in found.items()}  # the first compiles
    ours, theirs = figures.values()
    ratio = ours.cpu / theirs.cpu
    return report("inspect", figures, [(ratio <= 0.8, f"time {ratio:.3f} of the other tree's (at most 0.8)")])


if __name__ == "__main__":
    sys.exit(main())
