"""
Folders as an engine of DeepSpeed saves them, laid out by plain ``torch.save``: what the tests of them are about.

``Engine`` partitions random parameters as ZeRO does, so what has to come out is known: ``masters``.
"""

from __future__ import annotations

import sys
import types
from collections import OrderedDict
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch


class ZeroStageEnum(IntEnum):
    """As deepspeed.runtime.zero.config has it."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3


ZeroStageEnum.__module__ = "deepspeed.runtime.zero.config"


def save(value: object, path: Path) -> None:
    """``torch.save`` where the names of DeepSpeed's classes lead somewhere."""
    found = types.ModuleType("deepspeed.runtime.zero.config")
    found.ZeroStageEnum = ZeroStageEnum  # type: ignore[attr-defined]
    names = ["deepspeed", "deepspeed.runtime", "deepspeed.runtime.zero", found.__name__]
    sys.modules.update({name: found if name == found.__name__ else types.ModuleType(name) for name in names})
    try:
        torch.save(value, path)
    finally:
        for name in names:
            del sys.modules[name]


class Engine:
    """
    A model in two groups of parameters, with a buffer, a frozen parameter and a tied one, partitioned among ranks.

    ``shapes`` are those of the trained parameters, group by group; ``aligned`` pads behind each.
    """

    def __init__(
        self, stage: int, world: int, *, dtype: torch.dtype = torch.float32, aligned: int = 0, sub_group: int = 0
    ) -> None:
        torch.manual_seed(stage * 100 + world)
        self.stage, self.world, self.dtype, self.aligned, self.sub_group = stage, world, dtype, aligned, sub_group
        self.shapes: list[dict[str, tuple[int, ...]]] = [
            {"emb.weight": (23, 10), "up.weight": (14, 10), "scalar": ()},
            {"up.bias": (14,), "norm.weight": (7, 1, 3)},
        ]
        self.masters = {name: torch.randn(shape) for group in self.shapes for name, shape in group.items()}
        self.moments = {name: torch.randn(one.shape) for name, one in self.masters.items()}
        self.frozen = {"frozen.weight": torch.randn(3, 5).to(dtype)}
        self.buffers = {"mean": torch.randn(14).to(dtype), "calls": torch.tensor(3)}
        self.tied = {"head.weight": "emb.weight"}
        self.extra: dict[str, Any] = {"epoch": 1}

    def expected(self) -> dict[str, torch.Tensor]:
        """What ``zero_to_fp32`` gives: masters, buffers of floats as float32, frozen ones as they are, ties."""
        buffers = {name: one.float() if one.is_floating_point() else one for name, one in self.buffers.items()}
        tied = {name: self.masters[kept] for name, kept in self.tied.items()}
        return {**self.masters, **self.frozen, **buffers, **tied}

    def save(self, folder: Path, tag: str = "global_step2") -> Path:
        """Save into a folder, and return it."""
        inside = folder / tag
        inside.mkdir(parents=True, exist_ok=True)
        (folder / "latest").write_text(tag)
        (folder / "zero_to_fp32.py").write_text("raise SystemExit('this must never run')")
        ranks = range(self.world)
        for rank in ranks if self.stage == 3 else [0]:
            head = f"zero_pp_rank_{rank}_" if self.stage == 3 else ""
            save(self.model_states(rank), inside / f"{head}mp_rank_00_model_states.pt")
        for rank in ranks if self.stage else []:
            save(self.optim_states(rank), inside / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        return folder

    def module(self) -> dict[str, torch.Tensor]:
        """The state dict of the model."""
        state = {**self.masters, **self.frozen, **{name: self.masters[kept] for name, kept in self.tied.items()}}
        cast = {name: one.to(self.dtype) for name, one in state.items()}
        if self.stage == 3:
            cast = {name: torch.empty(0, dtype=self.dtype) for name in state}
        return OrderedDict({**self.buffers, **cast})

    def model_states(self, rank: int) -> dict[str, Any]:
        """What a rank saves of the model."""
        fragments: dict[str, torch.Tensor] | None = dict(self.frozen)
        frozen: dict[str, torch.Size] | None = OrderedDict((name, one.shape) for name, one in self.frozen.items())
        if self.stage == 3:
            fragments = {name: parts(one, self.world)[rank] for name, one in self.frozen.items()}
        elif self.stage < 2:
            fragments = frozen = None
        shapes = [OrderedDict((name, torch.Size(shape)) for name, shape in group.items()) for group in self.shapes]
        return {
            "module": self.module(),
            "buffer_names": list(self.buffers),
            "optimizer": None if self.stage else {"state": {}, "param_groups": []},
            "param_shapes": shapes if self.stage else None,
            "frozen_param_shapes": frozen,
            "frozen_param_fragments": fragments,
            "shared_params": dict(self.tied),
            "lr_scheduler": {"last_epoch": 2},
            "global_steps": 2,
            "dp_world_size": self.world,
            "mp_world_size": 1,
            "ds_config": {"zero_optimization": {"stage": self.stage}},
            "ds_version": "0.19.8",
            **self.extra,
        }

    def optim_states(self, rank: int) -> dict[str, Any]:
        """What a rank saves of the optimizer."""
        flats, moments = (self.flats(values)[rank] for values in (self.masters, self.moments))
        state = {n: {"step": torch.tensor(2.0), "exp_avg": one} for n, one in enumerate(moments)}
        base = {"state": state, "param_groups": [{"lr": 0.1, "params": [n]} for n in range(len(self.shapes))]}
        inner: dict[str, Any] = {"zero_stage": ZeroStageEnum(self.stage), "ds_version": "0.19.8"}
        if self.stage == 3:
            inner |= {"partition_count": self.world, "optimizer_state_dict": base, "fp32_flat_groups": flats}
        else:
            inner |= {"partition_count": [self.world] * len(flats), "base_optimizer_state": base}
            inner["single_partition_of_fp32_groups"] = [self.without_padding(rank, n, f) for n, f in enumerate(flats)]
            inner["param_slice_mappings"] = [self.slices(rank, n, flat.numel()) for n, flat in enumerate(flats)]
            if self.aligned:
                inner["param_alignment_paddings"] = [[self.gap(shape) for shape in g.values()] for g in self.shapes]
        return {"optimizer_state_dict": inner, "ds_config": {}, "ds_version": "0.19.8"}

    def gap(self, shape: tuple[int, ...]) -> int:
        """Elements of padding behind a parameter."""
        return -torch.Size(shape).numel() % self.aligned if self.aligned else 0

    def slices(self, rank: int, number: int, size: int) -> dict[str, tuple[int, int]]:
        """Which parameters of a group a rank has parts of: elements, and where they begin in its flat tensor."""
        found, at = OrderedDict(), 0
        for name, shape in self.shapes[number].items():
            begin, end = max(at, rank * size), min(at + torch.Size(shape).numel(), (rank + 1) * size)
            if begin < end:
                found[name] = (end - begin, begin - rank * size)
            at += torch.Size(shape).numel() + self.gap(shape)
        return found

    def flats(self, values: dict[str, torch.Tensor]) -> list[list[torch.Tensor]]:
        """The flat tensors of each rank."""
        if self.stage == 3:
            lanes = [
                torch.cat([parts(values[name], self.world)[rank] for group in self.shapes for name in group])
                for rank in range(self.world)
            ]
            return [list(lane.split(self.sub_group or lane.numel())) for lane in lanes]
        by_group = []
        for group in self.shapes:
            run = torch.cat(
                [torch.nn.functional.pad(values[n].flatten(), (0, self.gap(shape))) for n, shape in group.items()]
            )
            padded = torch.nn.functional.pad(run, (0, -run.numel() % (2 * self.world)))
            by_group.append(padded.chunk(self.world))
        return [[group[rank].clone() for group in by_group] for rank in range(self.world)]

    def without_padding(self, rank: int, number: int, flat: torch.Tensor) -> torch.Tensor:
        """A rank's flat masters as they are saved: the padding at the end of the group is cut off."""
        used = sum(torch.Size(shape).numel() + self.gap(shape) for shape in self.shapes[number].values())
        return flat[: max(0, min(flat.numel(), used - rank * flat.numel()))].clone()


def parts(value: torch.Tensor, world: int) -> list[torch.Tensor]:
    """A tensor in equal flat parts, the last padded, as stage 3 has it."""
    flat = value.flatten()
    return [one.clone() for one in torch.nn.functional.pad(flat, (0, -flat.numel() % world)).chunk(world)]
