"""
How fast and how small ``ckptool stat`` is: 2.3 GB of bfloat16, beside a torch process that computes the same, and
beside sft-cli, if there is one; and how much more processor time 1.2 GB of float32 take beside two busy processes.

    python tests/benchmarks/bench_stat.py [--dir DIR] [--runs 3] [--sft PATH]

Makes files of 2.3 and 1.2 GB (in DIR, or a temporary folder) of normal values, with zeros among them. torch computes
mean, deviation, range and zeros of each tensor, from memory that is mapped; sft-cli does what ``sft stat`` does. Times
are of whole processes, run in turn, the best of the runs. The values are compared with those of float64. Exits 1 if a
bound does not hold.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from measuring import (
    BLOCK_SHAPE,
    BLOCKS,
    CKPTOOL,
    ENVIRONMENT,
    at_most,
    beside_busy,
    bounds,
    parser,
    processes_in_turn,
    report,
)

STAT = [*CKPTOOL, "stat"]
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
blocks, *shape = map(int, sys.argv[3:])
torch.manual_seed(0)
base = torch.randn(shape).to(getattr(torch, sys.argv[2]))
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
    arguments = parser(__doc__, runs=3)
    arguments.add_argument("--sft", default=shutil.which("sft"), help="the command of sft-cli")
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory(dir=given.dir) as folder:
        path, wide = ((given.dir or Path(folder)) / f"{dtype}.safetensors" for dtype in ("bfloat16", "float32"))
        for one, blocks in ((path, BLOCKS), (wide, BLOCKS // 4)):
            if not one.exists():
                write = [sys.executable, "-c", WRITE, one, one.stem, blocks, *BLOCK_SHAPE]
                subprocess.run(list(map(str, write)), check=True)
        peers = {"torch": [sys.executable, "-c", TORCH, str(path)]}
        if given.sft:
            peers["sft stat"] = [given.sft, "stat", str(path)]
        figures = processes_in_turn({"ckptool stat": [*STAT, str(path)], **peers}, given.runs)
        checks = bounds(figures, wall=dict.fromkeys(peers, 1), peak=PEAK_MIB)
        checks.append(at_most("values within {:.1e} of those of float64", largest_error(path), RELATIVE))
        held = [report("2.3 GB of bfloat16", figures, checks), crowded(wide, given.runs)]
        return 0 if all(held) else 1


def crowded(path: Path, runs: int) -> bool:
    """Compare the processor time that values take alone with that beside two busy processes."""
    commands = {"stat": [*STAT, str(path)], "check --values": [*CKPTOOL, "check", "--values", str(path)]}
    alone = processes_in_turn(commands, runs)
    with beside_busy(2):
        beside = processes_in_turn(commands, runs)
    said = "{name}: time of CPU {{:.2f}} of that alone"
    checks = [at_most(said.format(name=name), beside[name].cpu / alone[name].cpu, 1.5) for name in commands]
    return report("1.2 GB of float32, beside 2 busy processes", beside, checks)


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
