"""Files of ranks with ``ShardedTensor``, as FSDP1 saves them: real ones, of which each file gets its own shard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d
from torch.distributed._shard.sharded_tensor import (
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
)

import ckptool
from ckptool.errors import AmbiguousWeights, FileUnavailable, MalformedFile
from tests.formats.said import refused

pytestmark = [
    pytest.mark.usefixtures("group"),
    pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning"),
]


FULL = {
    "up.weight": torch.arange(70, dtype=torch.float32).view(7, 10),
    "up.bias": torch.arange(7, dtype=torch.bfloat16),
    "few": torch.arange(2, dtype=torch.int64),
}


def sharded(full: torch.Tensor, world: int, axis: int = 0) -> ShardedTensor:
    """Return a tensor all of whose shards are in this process."""
    shards, at = [], 0
    for chunk in full.chunk(world, axis):
        offsets = [at if one == axis else 0 for one in range(full.dim())]
        shards.append(Shard(chunk.clone(), ShardMetadata(offsets, list(chunk.shape), "rank:0/cpu")))
        at += chunk.shape[axis]
    metadata = ShardedTensorMetadata(
        [shard.metadata for shard in shards], full.shape, TensorProperties(dtype=full.dtype)
    )
    return ShardedTensor._init_from_local_shards_and_global_metadata(shards, metadata)


def save_ranks(
    folder: Path,
    world: int,
    monkeypatch: pytest.MonkeyPatch,
    axis: int = 0,
    change: Callable[[int, dict[str, Any]], object] | None = None,
) -> Path:
    """Save what each rank would have: the process is made to be each in turn."""
    folder.mkdir()
    monkeypatch.setattr(distributed_c10d, "get_world_size", lambda _group=None: world)
    for rank in range(world):
        state: dict[str, Any] = {}
        for name, full in FULL.items():
            monkeypatch.setattr(distributed_c10d, "get_rank", lambda _group=None: 0)
            state[name] = sharded(full, world, axis if full.dim() > axis else 0)
            state[name]._local_shards = state[name]._local_shards[rank : rank + 1]
        if change is not None:
            change(rank, state)
        monkeypatch.setattr(distributed_c10d, "get_rank", lambda _group=None, rank=rank: rank)
        torch.save(state, folder / f"model_rank{rank}.pt")
    monkeypatch.undo()
    return folder


@pytest.mark.parametrize(("world", "axis"), [(1, 0), (2, 0), (3, 0), (4, 1)])
def test_shards_come_out_whole(world: int, axis: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_ranks(tmp_path / "run", world, monkeypatch, axis)
    found = ckptool.load(folder)
    assert list(found) == list(FULL)
    for name, full in FULL.items():
        assert found[name].dtype == full.dtype
        assert torch.equal(found[name], full), name
    ckptool.migrate(folder, tmp_path / "out.safetensors")
    assert ckptool.diff(folder, tmp_path / "out.safetensors", ignore_device=True).same


def test_a_missing_rank_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_ranks(tmp_path / "run", 3, monkeypatch)
    (folder / "model_rank1.pt").unlink()
    caught = refused(folder, FileUnavailable, "1 of 3 files of ranks not there, rank 1")
    assert (caught.needed, caught.actual) == (3, 2)


def test_flat_parameters_are_listed_rank_by_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flatten(rank: int, state: dict[str, Any]) -> None:
        for name in list(FULL):
            del state[name]
        state["0._flat_param"] = sharded(torch.arange(8.0), 2)
        state["0._flat_param"]._local_shards = state["0._flat_param"]._local_shards[rank : rank + 1]

    folder = save_ranks(tmp_path / "run", 2, monkeypatch, change=flatten)
    with ckptool.open_checkpoint(folder) as checkpoint:
        parts = [checkpoint.tensors[f"rank_{rank}.0._flat_param"].torch().tolist() for rank in range(2)]
        assert parts == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]
    with pytest.raises(AmbiguousWeights, match="flat parameter of a unit of FSDP, in 2 parts"):
        ckptool.migrate(folder, tmp_path / "out.safetensors")


def without_list(tensor: ShardedTensor) -> None:
    tensor._metadata.shards_metadata = None  # type: ignore[assignment]


def without_tensor(tensor: ShardedTensor) -> None:
    tensor._local_shards[0].tensor = None  # type: ignore[assignment]


def without_shards(tensor: ShardedTensor) -> None:
    tensor._local_shards = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (without_list, "that does not list its shards"),
        (without_tensor, "with a shard that is not a tensor"),
        (without_shards, "without its shards"),
    ],
)
def test_what_contradicts_itself_is_refused(
    damage: Callable[[ShardedTensor], None], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_ranks(tmp_path / "run", 2, monkeypatch, change=lambda rank, state: rank and damage(state["few"]))
    caught = refused(folder, MalformedFile, said)
    assert "model_rank1.pt" in str(caught)


def test_shards_of_other_sizes_than_all_ranks_say_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def grow(rank: int, state: dict[str, Any]) -> None:
        if rank:
            state["up.weight"]._metadata.size = torch.Size((8, 10))

    refused(save_ranks(tmp_path / "run", 2, monkeypatch, change=grow), MalformedFile, r"shapes of 'up\.weight'")
