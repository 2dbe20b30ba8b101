"""Distributed tensors whose mesh is pickled as releases of torch before this one had it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

import ckptool
from tests.formats.test_rank_files import MeshState, save_ranks
from tests.scale import in_turn

pytestmark = pytest.mark.usefixtures("group")

FULL = torch.arange(70, dtype=torch.float32).view(7, 10)


class Layout:
    """Stands for the class of the layout, which had sizes and steps of its own."""


def listed(ranks: torch.Tensor, rank: int, at: list[int]) -> dict[str, Any]:
    """torch 2.2 to 2.8: a tensor of the ranks, and where in it this one is."""
    return {"device_type": "cpu", "mesh": ranks, "mesh_dim_names": None, "_coordinate_on_dim": at}


def searched(ranks: torch.Tensor, rank: int, at: list[int]) -> dict[str, Any]:
    """The same without the place: the name of the file has the rank."""
    return {"device_type": "cpu", "mesh": ranks.to(torch.int32), "mesh_dim_names": None}


def laid_out(ranks: torch.Tensor, rank: int, at: list[int]) -> dict[str, Any]:
    """torch 2.9: sizes and steps, and a list of the ranks."""
    layout = Layout()
    layout.__dict__ |= {"shape": tuple(ranks.shape), "stride": ranks.stride()}
    return {"_device_type": "cpu", "_layout": layout, "_rank_map": ranks.flatten(), "_rank": rank}


def laid_out_along_one(ranks: torch.Tensor, rank: int, at: list[int]) -> dict[str, Any]:
    """A mesh of one dimension has them as plain numbers."""
    state = laid_out(ranks, rank, at)
    state["_layout"].__dict__ |= {"shape": ranks.numel(), "stride": 1}
    return state


def saved(
    folder: Path,
    state: MeshState,
    order: list[Any] | None = None,
    placements: Sequence[Any] = (Shard(0),),
    change: Callable[[dict[str, Any]], object] = id,
) -> Path:
    """Save what ranks have in a mesh that is pickled in one of these ways, and changed."""

    def pickled(ranks: torch.Tensor, rank: int, at: list[int]) -> dict[str, Any]:
        attributes = state(ranks, rank, at)
        change(attributes)
        return attributes

    ranks = torch.tensor([0, 1, 2] if order is None else order)
    return save_ranks(folder, tuple(ranks.shape), placements, "model_rank{rank}.pt", {"w": FULL}, ranks, pickled)


@pytest.mark.parametrize(
    ("state", "order"), in_turn([listed, searched, laid_out, laid_out_along_one], [[2, 0, 1], [0, 1, 2]])
)
def test_rows_of_a_mesh_of_one_dimension(state: MeshState, order: list[int], tmp_path: Path) -> None:
    assert torch.equal(ckptool.load(saved(tmp_path / "run", state, order))["w"], FULL)


@pytest.mark.parametrize("state", [listed, searched, laid_out])
def test_boxes_of_a_mesh_of_two_dimensions(state: MeshState, tmp_path: Path) -> None:
    folder = saved(tmp_path / "run", state, [[3, 1], [0, 2]], [Shard(0), Shard(1)])
    assert torch.equal(ckptool.load(folder)["w"], FULL)


@pytest.mark.parametrize(
    "change",
    [
        lambda attributes: attributes.update(mesh=torch.tensor([7, 8, 9])),
        lambda attributes: attributes.pop("mesh"),
        lambda attributes: attributes.update(mesh=attributes["mesh"].view(1, 3)),
    ],
    ids=["of others", "gone", "of two dimensions"],
)
def test_without_its_place_in_the_mesh_parts_are_listed_rank_by_rank(
    change: Callable[[dict[str, Any]], object], tmp_path: Path
) -> None:
    with ckptool.open_checkpoint(saved(tmp_path / "run", searched, change=change)) as checkpoint:
        assert "where in the mesh its rank is, is not in the file" in str(checkpoint.unmerged)
        assert [name for name in checkpoint.tensors if "steps" not in name] == [f"rank_{rank}.w" for rank in range(3)]
