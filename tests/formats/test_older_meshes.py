"""Distributed tensors whose mesh is pickled as releases of torch before this one had it."""

from __future__ import annotations

import copyreg
import pickle
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import ckptool
from tests.scale import in_turn

pytestmark = pytest.mark.usefixtures("group")

FULL = torch.arange(70, dtype=torch.float32).view(7, 10)
MeshState = Callable[[torch.Tensor, int, list[int]], dict[str, Any]]


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


def save_ranks(
    folder: Path,
    ranks: torch.Tensor,
    placements: Sequence[Any],
    state: MeshState,
    pick: Callable[[list[int]], torch.Tensor],
    change: Callable[[dict[str, Any]], object] | None = None,
) -> Path:
    """Save what ``pick`` says that each rank has; everything but the mesh is as this torch pickles it."""
    folder.mkdir()
    for rank in ranks.flatten().tolist():
        at = [int(one) for one in (ranks == rank).nonzero()[0]]
        mesh = DeviceMesh("cpu", ranks, _init_backend=False, _rank=rank)
        attributes = state(ranks, rank, at)
        if change is not None:
            change(attributes)

        class Pickler(pickle.Pickler):
            def reducer_override(self, obj: Any, attributes: dict[str, Any] = attributes) -> Any:
                if isinstance(obj, DeviceMesh):
                    return copyreg.__newobj__, (DeviceMesh,), attributes  # type: ignore[attr-defined]
                return NotImplemented

        tensor = DTensor.from_local(
            pick(at).clone(), mesh, placements, run_check=False, shape=FULL.shape, stride=FULL.stride()
        )
        module = types.SimpleNamespace(Pickler=Pickler, __name__="pickle")
        torch.save({"w": tensor}, folder / f"model_rank{rank}.pt", pickle_module=module)
    return folder


def row_of(at: list[int]) -> torch.Tensor:
    return FULL.chunk(3)[at[0]]


def box_of(at: list[int]) -> torch.Tensor:
    return FULL.chunk(2)[at[0]].chunk(2, 1)[at[1]]


@pytest.mark.parametrize(
    ("state", "order"), in_turn([listed, searched, laid_out, laid_out_along_one], [[2, 0, 1], [0, 1, 2]])
)
def test_rows_of_a_mesh_of_one_dimension(state: MeshState, order: list[int], tmp_path: Path) -> None:
    folder = save_ranks(tmp_path / "run", torch.tensor(order), [Shard(0)], state, row_of)
    assert torch.equal(ckptool.load(folder)["w"], FULL)


@pytest.mark.parametrize("state", [listed, searched, laid_out])
def test_boxes_of_a_mesh_of_two_dimensions(state: MeshState, tmp_path: Path) -> None:
    folder = save_ranks(tmp_path / "run", torch.tensor([[3, 1], [0, 2]]), [Shard(0), Shard(1)], state, box_of)
    assert torch.equal(ckptool.load(folder)["w"], FULL)


def forget(attributes: dict[str, Any]) -> None:
    attributes["mesh"] = torch.tensor([7, 8, 9])


def lose(attributes: dict[str, Any]) -> None:
    del attributes["mesh"]


def flatten(attributes: dict[str, Any]) -> None:
    attributes["mesh"] = attributes["mesh"].view(1, 3)


@pytest.mark.parametrize("change", [forget, lose, flatten])
def test_without_its_place_in_the_mesh_parts_are_listed_rank_by_rank(
    change: Callable[[dict[str, Any]], object], tmp_path: Path
) -> None:
    folder = save_ranks(tmp_path / "run", torch.arange(3), [Shard(0)], searched, row_of, change)
    with ckptool.open_checkpoint(folder) as checkpoint:
        assert "where in the mesh its rank is, is not in the file" in str(checkpoint.unmerged)
        assert list(checkpoint.tensors) == [f"rank_{rank}.w" for rank in range(3)]
