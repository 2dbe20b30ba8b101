"""
How fast a checkpoint of many shards is inspected and loaded: 91,000 small tensors in 163 files of safetensors.

    python tests/benchmarks/bench_shards.py [--dir DIR] [--runs 5] [--against OTHER_TREE]

Makes its own files (23 MB). ``inspect`` is compared with another working tree of this project, if one is named, and
``load`` with safetensors' own ``safe_open`` and ``get_tensor``. Times are of the processor, the best of the runs, run
in turn. Exits 1 if a bound does not hold.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path

from measuring import CKPTOOL, ENVIRONMENT, Figures, best_in_turn, bounds, measure, parser, processes_in_turn, report

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
    arguments = parser(__doc__)
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
    return report("load", figures, bounds(figures, cpu={"safe_open, get_tensor": 1}))


def compare_inspect(folder: Path, other: Path, runs: int) -> bool:
    command = [*CKPTOOL, "inspect", "-q", str(folder / "model.safetensors.index.json")]
    os.chdir(folder)  # or what is in the current folder would be imported

    def inspected(tree: Path) -> Figures:
        ENVIRONMENT["PYTHONPATH"] = os.fspath(tree)
        return measure(command)

    trees = {"this tree": Path(__file__).resolve().parents[2], "the other tree": other}
    figures = best_in_turn({name: partial(inspected, tree) for name, tree in trees.items()}, runs)
    return report("inspect", figures, bounds(figures, cpu={"the other tree": 0.8}))


if __name__ == "__main__":
    sys.exit(main())
