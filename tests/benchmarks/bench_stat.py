"""
How fast and how small ``ckptool stat`` is: 2.3 GB of bfloat16, beside a torch process that computes the same, and
beside sft-cli, if there is one.

    python tests/benchmarks/bench_stat.py [--dir DIR] [--runs 3] [--sft PATH]

Makes a file of 2.3 GB (in DIR, or a temporary folder) of normal values, with zeros among them. torch computes mean,
deviation, range and zeros of each tensor, from memory that is mapped; sft-cli does what ``sft stat`` does. Times are of
whole processes, run in turn, the best of the runs. The values are compared with those of float64. Exits 1 if a bound
does not hold.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from measuring import BLOCK_SHAPE, BLOCKS, ENVIRONMENT, processes_in_turn, report

STAT = [sys.executable, "-m", "ckptool", "stat"]
PEAK_MIB = 128
RELATIVE = 1e-6
TORCH = """
import sys
from safetensors.torch import load_file
import torch
with torch.inference_mode():
    for name, values in load_file(sys.argv[1]).items():
        low, high = values.aminmax()
        std, mean = torch.std_mean(values.float(), correction=0)
        print(name, mean.item(), std.item(), low.item(), high.item(), values.numel() - int(values.count_nonzero()))
"""
WRITE = """
import sys, torch
from safetensors.torch import save_file
blocks, *shape = map(int, sys.argv[2:])
torch.manual_seed(0)
base = torch.randn(shape).to(torch.bfloat16)
base.view(-1)[::97] = 0
save_file({f"layers.{n}.weight": base * (n + 1) / 64 for n in range(blocks)}, sys.argv[1])
"""
REFERENCE = """
import json, sys
from safetensors import safe_open
import torch
with safe_open(sys.argv[1], "pt") as file:
    for name in list(file.keys())[::16]:
        values = file.get_tensor(name).double()
        std, mean = torch.std_mean(values, correction=0)
        norm, zeros = values.norm().item(), int((values == 0).sum())
        print(json.dumps([name, mean.item(), std.item(), values.min().item(), values.max().item(), norm, zeros]))
"""


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--dir", type=Path, help="where the file is, or is made and kept (2.3 GB)")
    arguments.add_argument("--runs", type=int, default=3)
    arguments.add_argument("--sft", default=shutil.which("sft"), help="the command of sft-cli")
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory(dir=given.dir) as folder:
        path = (given.dir or Path(folder)) / "bfloat16.safetensors"
        if not path.exists():
            write = [sys.executable, "-c", WRITE, path, BLOCKS, *BLOCK_SHAPE]
            subprocess.run(list(map(str, write)), check=True)
        commands = {
            "ckptool stat": [*STAT, str(path)],
            "torch": [sys.executable, "-c", TORCH, str(path)],
        }
        if given.sft:
            commands["sft stat"] = [given.sft, "stat", str(path)]
        figures = processes_in_turn(commands, given.runs)
        ours = figures["ckptool stat"]
        error = largest_error(path)
        checks = [
            (ours.wall < one.wall, f"{ours.wall / one.wall:.2f} of the time of {name}")
            for name, one in figures.items()
            if name != "ckptool stat"
        ]
        checks.append((ours.peak <= PEAK_MIB, f"peak {ours.peak:.1f} MiB (at most {PEAK_MIB})"))
        checks.append((error <= RELATIVE, f"values within {error:.1e} of those of float64 (at most {RELATIVE:.0e})"))
        return 0 if report("2.3 GB of bfloat16", figures, checks) else 1


def largest_error(path: Path) -> float:
    """Return by how much our values differ from those of float64, relative to the deviation or to themselves."""
    shown = subprocess.run([*STAT, "--json", str(path)], capture_output=True, check=True, env=ENVIRONMENT).stdout
    ours = {row["name"]: row["values"] for row in json.loads(shown)["rows"]}
    lines = subprocess.run([sys.executable, "-c", REFERENCE, str(path)], capture_output=True, check=True).stdout
    worst = 0.0
    for name, *expected in map(json.loads, lines.splitlines()):
        for field, value in zip(("mean", "std", "min", "max", "norm", "zeros"), expected, strict=True):
            worst = max(worst, abs(ours[name][field] - value) / abs(value))
    return worst


if __name__ == "__main__":
    sys.exit(main())
