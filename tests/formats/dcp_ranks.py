"""
Saves a small trained model from several processes, with ``torch.distributed.checkpoint``, as trainers do.

    python -m tests.formats.dcp_ranks FOLDER WORLD rows|columns|grid|ranks|async|threads|fsdp|safetensors ...

Runs itself as WORLD processes, which talk over gloo, and saves each kind in a folder of its name.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

KINDS = ("rows", "columns", "grid", "ranks", "async", "threads", "fsdp", "safetensors")


def save(folder: Path, world: int, *kinds: str) -> None:
    """Start the processes, and wait until they have saved."""
    with tempfile.TemporaryDirectory() as meeting:
        command = [sys.executable, "-W", "ignore", "-m", "tests.formats.dcp_ranks", str(folder), str(world), *kinds]
        ranks = [
            subprocess.Popen(
                command, env=os.environ | {"RANK": str(rank), "MEETING": meeting}, cwd=Path(__file__).parents[2]
            )
            for rank in range(world)
        ]
        codes = [one.wait(120) for one in ranks]
    if any(codes):
        raise RuntimeError(f"ranks ended with {codes}")


def state(world: int, kind: str) -> dict[str, Any]:
    """Return weights and the state of an optimizer, spread over the ranks."""
    import torch
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.BatchNorm1d(9), torch.nn.Linear(9, 3))
    if kind == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(4, 6)).sum().backward()
    optimizer.step()
    if kind == "fsdp":
        return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer), "epoch": 3}
    shape, placements = ((2, world // 2), [Shard(0), Shard(1)]) if kind == "grid" else ((world,), [Shard(0)])
    mesh = init_device_mesh("cpu", shape)
    if kind == "columns":
        placements = [Shard(1)]

    def spread(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {key: spread(value) for key, value in tree.items()}
        is_matrix = isinstance(tree, torch.Tensor) and tree.dim() == 2
        return distribute_tensor(tree, mesh, placements) if is_matrix else tree

    return {"model": spread(model.state_dict()), "optimizer": spread(optimizer.state_dict()), "epoch": 3}


def _rank(folder: Path, world: int, kinds: list[str]) -> None:
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=world, init_method=f"file://{os.environ['MEETING']}/store")
    for kind in kinds:
        _save(folder / kind, world, kind)
        dist.barrier()
    dist.destroy_process_group()


def _save(folder: Path, world: int, kind: str) -> None:
    import torch.distributed.checkpoint as dcp

    given = state(world, kind)
    if kind == "async":
        dcp.async_save(given, checkpoint_id=folder).result()  # type: ignore[union-attr]
    elif kind == "safetensors":
        writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
        dcp.save(given["model"], storage_writer=writer)
    elif kind == "threads":
        dcp.save(given, storage_writer=dcp.FileSystemWriter(folder, thread_count=3))
    else:
        dcp.save(given, checkpoint_id=folder, use_collectives=kind != "ranks")


if __name__ == "__main__":
    target, size, asked = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    if "RANK" in os.environ:
        _rank(target, size, asked)
    else:
        save(target, size, *asked)
