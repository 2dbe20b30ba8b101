"""
What each process of several does, on the CPU with gloo: trains a net a little, and saves its part into a folder.

    python -m tests.zoo.libraries.ranks FUNCTION FOLDER      with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set

The first process leaves the whole weights beside it, in ``expected.pt``, where no loader of the framework gives them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from tests.zoo.box import Net
from tests.zoo.one import declare_operators


def _seeded() -> nn.Module:
    torch.manual_seed(0)
    return Net(8)


def _expect(folder: Path, state: Mapping[str, torch.Tensor]) -> None:
    if distributed.get_rank() == 0:
        whole = {name: tensor.detach().clone() for name, tensor in state.items()}
        torch.save(whole, folder / "expected.pt")


def _full(model: nn.Module) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def _deepspeed(folder: Path, stage: int, bits: bool = False) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    backend = import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None  # type: ignore[attr-defined]  # which would compile for minutes
    model = _seeded()
    config: dict[str, Any] = {
        "train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "zero_optimization": {"stage": stage}, "bf16": {"enabled": bits},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
    }  # fmt: skip
    if bits:
        model = model.bfloat16()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    words = torch.randn(2, 3, dtype=torch.bfloat16 if bits else torch.float32)
    engine.backward(engine(words).square().sum())
    engine.step()
    engine.save_checkpoint(str(folder), tag="step1")
    if not stage and distributed.get_rank() == 0:
        torch.save(dict(engine.module.state_dict()), folder / "module.pt")


def accelerate_ddp(folder: Path) -> None:
    os.environ["ACCELERATE_USE_CPU"] = "true"
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = _seeded()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.01))
    accelerator.backward(model(torch.randn(4, 3)).square().sum())
    optimizer.step()
    accelerator.save_state(str(folder / "state"))
    _expect(folder, accelerator.get_state_dict(model))


def _lightning(folder: Path, strategy: Any, shard: bool = False) -> None:
    import lightning as L
    from torch.utils.data import DataLoader, TensorDataset

    class Task(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _seeded()

        def configure_model(self) -> None:
            if shard:
                from torch.distributed.fsdp import fully_shard

                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            found: torch.Tensor = self.net(batch[0]).square().mean()
            return found

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.net.parameters(), 0.1)

    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", devices=2, strategy=strategy, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    task = Task()
    trainer.fit(task, DataLoader(TensorDataset(torch.randn(8, 3)), batch_size=2))
    trainer.save_checkpoint(folder / "last.ckpt")
    _expect(folder, _full(task) if shard else task.state_dict())


def lightning_parallel(folder: Path) -> None:
    from lightning.pytorch.strategies import ModelParallelStrategy

    _lightning(folder, ModelParallelStrategy(save_distributed_checkpoint=True), shard=True)


def fabric_parallel(folder: Path) -> None:
    import lightning as L
    from lightning.fabric.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    strategy = ModelParallelStrategy(parallelize_fn=lambda model, mesh: fully_shard(model, mesh=mesh["data_parallel"]))
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model = fabric.setup(_seeded())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), 0.1))
    fabric.backward(model(torch.randn(4, 3)).square().mean())
    optimizer.step()
    fabric.save(folder / "last.ckpt", {"model": model, "optimizer": optimizer, "step": 3})
    _expect(folder, _full(model.module))


def fsdp2(folder: Path) -> None:
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo")
    model = _seeded()
    fully_shard(model.body)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    checkpoint.save({"model": weights, "optimizer": state, "epoch": 3}, checkpoint_id=folder)
    _expect(folder, _full(model))


def tensor_parallel(folder: Path) -> None:
    from torch.distributed import checkpoint, init_device_mesh
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 5))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    checkpoint.save(get_model_state_dict(model), checkpoint_id=folder)
    _expect(folder, _full(model))


ZERO: dict[str, Callable[[Path], None]] = {
    f"zero{stage}{'_bf16' * bits}": partial(_deepspeed, stage=stage, bits=bits)
    for bits in (False, True)
    for stage in range(bits, 4)
}
LIGHTNING: dict[str, Callable[[Path], None]] = {
    "lightning_ddp": partial(_lightning, strategy="ddp"),
    "lightning_parallel": lightning_parallel,
    "fabric_parallel": fabric_parallel,
}
TORCH: dict[str, Callable[[Path], None]] = {"fsdp2": fsdp2, "tensor_parallel": tensor_parallel}
ALL = {**ZERO, **LIGHTNING, **TORCH, "accelerate_ddp": accelerate_ddp}
"""What each process does, by the name that it is started with."""

if __name__ == "__main__":
    declared = declare_operators()
    torch.set_num_threads(1)
    ALL[sys.argv[1]](Path(sys.argv[2]))
    if distributed.is_initialized():
        distributed.barrier()
        distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # libraries leave threads behind
