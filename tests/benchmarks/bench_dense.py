"""
How fast and small ``migrate --dequantize`` and ``merge --lora`` are, beside torch on one thread, and beside ``cat``.

    python tests/benchmarks/bench_dense.py [--dir DIR] [--runs 3] [--gigabytes 2]

Makes FP8 in blocks of 128 by 128, and a model of bfloat16 with a LoRA of rank 16 for each matrix. The scripts of torch
read by ``safe_open``, compute each weight, and write by ``save_file``; they verify nothing. ``cat twice`` writes the
result two times, each with a sync. Times are of whole processes, run in turn, the best of the runs. Exits 1 if a bound
does not hold.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from measuring import CKPTOOL, bounds, measure, parser, processes_in_turn, report

SIDE = 4096
"""Rows and columns of each matrix: 16 MiB as FP8."""
RANK = 16
BESIDE_TORCH_MIB = 200
TORCH = [sys.executable, "-c", "import torch"]
WRITE = f"""
import json, sys, torch
from pathlib import Path
from safetensors.torch import save_file
folder, many = Path(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
base = torch.randn({SIDE}, {SIDE})
def names(number): return f"model.layers.{{number}}.q_proj"
fp8, model, lora = {{}}, {{}}, {{}}
for number in range(many):
    fp8[names(number) + ".weight"] = base.roll(number).to(torch.float8_e4m3fn)
    fp8[names(number) + ".weight_scale_inv"] = torch.rand({SIDE // 128}, {SIDE // 128}) / 128
(folder / "fp8").mkdir()
save_file(fp8, folder / "fp8" / "model.safetensors")
quantization = {{"quant_method": "fp8", "weight_block_size": [128, 128]}}
(folder / "fp8" / "config.json").write_text(json.dumps({{"quantization_config": quantization}}))
del fp8
for number in range(many):
    model[names(number) + ".weight"] = base.roll(number).bfloat16()
    lora["base_model.model." + names(number) + ".lora_A.weight"] = torch.randn({RANK}, {SIDE}) / 64
    lora["base_model.model." + names(number) + ".lora_B.weight"] = torch.randn({SIDE}, {RANK}) / 64
save_file(model, folder / "model.safetensors")
(folder / "lora").mkdir()
save_file(lora, folder / "lora" / "adapter_model.safetensors")
config = {{"peft_type": "LORA", "r": {RANK}, "lora_alpha": {2 * RANK}, "target_modules": ["q_proj"]}}
(folder / "lora" / "adapter_config.json").write_text(json.dumps(config))
"""
DEQUANTIZED = """
import sys, torch
from safetensors import safe_open
from safetensors.torch import save_file
torch.set_num_threads(1)
made = {}
with safe_open(sys.argv[1], "pt") as file:
    for name in file.keys():
        if name.endswith(".weight"):
            weight, scale = file.get_tensor(name), file.get_tensor(name + "_scale_inv")
            rows, columns = scale.shape
            blocks = weight.float().view(rows, 128, columns, 128)
            made[name] = (blocks * scale[:, None, :, None]).bfloat16().view(weight.shape)
save_file(made, sys.argv[2])
"""
MERGED = """
import sys, torch
from safetensors import safe_open
from safetensors.torch import save_file
torch.set_num_threads(1)
made = {}
with safe_open(sys.argv[1], "pt") as file, safe_open(sys.argv[2], "pt") as lora:
    for name in file.keys():
        head = "base_model.model." + name.removesuffix("weight")
        delta = lora.get_tensor(head + "lora_B.weight") @ lora.get_tensor(head + "lora_A.weight") * 2.0
        made[name] = (file.get_tensor(name).float() + delta).bfloat16()
save_file(made, sys.argv[3])
"""
TWICE = """
import subprocess
for _ in range(2):
    subprocess.run("cat {0} > {1} && sync {1} && rm {1}", shell=True, check=True)
"""


def main() -> int:
    arguments = parser(__doc__, runs=3)
    arguments.add_argument("--gigabytes", type=float, default=2.0, help="of FP8")
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory(dir=given.dir) as made:
        folder = Path(made)
        many = max(1, round(given.gigabytes * 1e9 / SIDE**2))
        subprocess.run([sys.executable, "-c", WRITE, made, str(many)], check=True)
        beside = measure(TORCH).peak
        fp8, model, lora = folder / "fp8/model.safetensors", folder / "model.safetensors", folder / "lora"
        ours, theirs = folder / "ours.safetensors", folder / "theirs.safetensors"
        twice = [sys.executable, "-c", TWICE.format(model, folder / "copy")]
        cases = {
            f"FP8 in blocks, {many * SIDE**2 / 1e9:.1f} GB, to bfloat16": (
                [*CKPTOOL, "migrate", "-q", str(fp8), str(ours), "--dequantize", "--dtype", "bfloat16"],
                [sys.executable, "-c", DEQUANTIZED, str(fp8), str(theirs)],
            ),
            f"LoRA of rank {RANK} into {many * SIDE**2 * 2 / 1e9:.1f} GB of bfloat16": (
                [*CKPTOOL, "merge", "-q", str(model), "--lora", str(lora), "-o", str(ours)],
                [sys.executable, "-c", MERGED, str(model), str(lora / "adapter_model.safetensors"), str(theirs)],
            ),
        }
        held = True
        for title, (command, torch) in cases.items():
            commands = {"ckptool": command, "torch": torch, "cat twice": twice}
            figures = processes_in_turn(commands, given.runs, anew=[ours, theirs])
            wall = {"cat twice": 1.3 if "FP8" in title else None}
            checks = bounds(figures, wall=wall, cpu={"torch": 1.5}, peak=beside + BESIDE_TORCH_MIB)
            held &= report(title, figures, checks)
        return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
