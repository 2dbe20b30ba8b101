"""
How fast ``ckptool migrate`` puts together what ZeRO partitioned, beside DeepSpeed's own ``zero_to_fp32``, in one run.

    python tests/benchmarks/bench_deepspeed.py [--dir DIR] [--runs 5]

Makes folders of 1.5 GB of float32 masters, of stages 2 and 3, among 8 ranks, in DIR or a temporary folder. Needs
DeepSpeed, for its script alone. Exits 1 if a bound does not hold.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from measuring import CKPTOOL, bounds, options, processes_in_turn, report

WORLD = 8
LAYERS = 24
MIGRATE = [*CKPTOOL, "migrate", "--force"]
PEER = [sys.executable, "-m", "deepspeed.utils.zero_to_fp32", "--safe_serialization", "--max_shard_size", "100GB"]


def main() -> int:
    given = options(__doc__)
    held = []
    with tempfile.TemporaryDirectory(dir=given.dir) as folder:
        for stage in (2, 3):
            source, out = Path(folder, f"zero{stage}"), Path(folder, "out.safetensors")
            subprocess.run([sys.executable, __file__, "--write", str(stage), str(source)], check=True)
            held.append(compare(f"ZeRO-{stage} -> safetensors", source, out, given.runs))
            shutil.rmtree(source)
    return 0 if all(held) else 1


def compare(title: str, source: Path, target: Path, runs: int) -> bool:
    peer = target.with_name("peer")
    commands = {"migrate": [*MIGRATE, str(source), str(target)], "zero_to_fp32": [*PEER, str(source), str(peer)]}
    figures = processes_in_turn(commands, runs, anew=(target, peer))
    nbytes = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    return report(f"{title}: {nbytes:,} bytes", figures, bounds(figures, wall={"zero_to_fp32": 0.8}, peak=96))


def write(stage: int, folder: Path) -> None:
    """Write a folder as an engine does, rank by rank; the values are all different."""
    import torch

    shapes = {
        f"layers.{layer}.{name}": torch.Size(shape)
        for layer in range(LAYERS)
        for name, shape in {"qkv": (6144, 1024), "bias": (1021,), "up": (4096, 1024), "down": (1024, 4949)}.items()
    }
    inside = folder / "global_step1"
    inside.mkdir(parents=True)
    (folder / "latest").write_text(inside.name)
    total = sum(shape.numel() for shape in shapes.values())
    parts = sum(-(-shape.numel() // WORLD) for shape in shapes.values())
    of_rank = parts if stage == 3 else -(-total // (2 * WORLD)) * 2
    for rank in range(WORLD):
        count = of_rank if stage == 3 or rank < WORLD - 1 else total - rank * of_rank
        flat = torch.arange(rank * of_rank, rank * of_rank + count, dtype=torch.float32).mul_(1e-6)
        key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        base = {"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}]}
        inner = {"zero_stage": stage, "ds_version": "0.19.8", key: [flat]}
        inner |= {"partition_count": WORLD} if stage == 3 else {"partition_count": [WORLD]}
        inner |= {"optimizer_state_dict" if stage == 3 else "base_optimizer_state": base}
        states = {"optimizer_state_dict": inner, "ds_config": {}, "ds_version": "0.19.8"}
        torch.save(states, inside / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        if stage == 3 or not rank:
            sizes = {name: torch.Size((0,)) for name in shapes} if stage == 3 else shapes
            head = f"zero_pp_rank_{rank}_" if stage == 3 else ""
            module = {name: torch.zeros(size, dtype=torch.bfloat16) for name, size in sizes.items()}
            torch.save(model_states(module, shapes), inside / f"{head}mp_rank_00_model_states.pt")


def model_states(module: object, shapes: object) -> dict[str, object]:
    return {
        "module": module,
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [shapes],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {},
        "global_steps": 1,
        "dp_world_size": WORLD,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": "0.19.8",
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--write"]:
        write(int(sys.argv[2]), Path(sys.argv[3]))
        sys.exit()
    sys.exit(main())
