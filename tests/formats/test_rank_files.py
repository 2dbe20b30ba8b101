"""Files of ranks: parts of distributed tensors come out whole, and what cannot be put together is said."""

from __future__ import annotations

import copyreg
import os
import pickle
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import ckptool
from ckptool.errors import AmbiguousFile, AmbiguousWeights, FileUnavailable, MalformedFile, UnsupportedFeature
from tests.each import each
from tests.formats.said import refused, said
from tests.scale import exhaustive

FULL = {
    "emb.weight": torch.arange(230, dtype=torch.float32).view(23, 10),
    "up.bias": torch.arange(14, dtype=torch.float32),
    "down.weight": torch.arange(70, dtype=torch.bfloat16).view(5, 14),
    "scale": torch.ones(1),
}
STEPS = torch.tensor(3)


MeshState = Callable[[torch.Tensor, int, list[int]], dict[str, Any]]
"""What is pickled of a mesh for one rank: of the ranks in their places, its own number, and its place."""


def save_ranks(
    folder: Path,
    mesh: tuple[int, ...],
    placements: Sequence[Any],
    name: str = "model_world_size_{world}_rank_{rank}.pt",
    tensors: dict[str, torch.Tensor] = FULL,
    ranks: torch.Tensor | None = None,
    pickled_as: MeshState | None = None,
) -> Path:
    """
    Save what each rank of a mesh would have of tensors: real DTensors, whose mesh is made to be that of each in turn.

    The parts are cut here by ``torch.chunk``, from left to right, and not by what is tested.
    """
    folder.mkdir(parents=True, exist_ok=True)
    world = torch.Size(mesh).numel()
    ranks = torch.arange(world).view(mesh) if ranks is None else ranks
    for rank in range(world):
        place = [int(at) for at in (ranks == rank).nonzero()[0]]
        one = DeviceMesh("cpu", ranks, _init_backend=False, _rank=rank)
        assert list(one.get_coordinate() or ()) == place
        state: dict[str, Any] = {"steps": STEPS.clone()}
        for key, full in tensors.items():
            fit = tuple(Shard(0) if type(p) is Shard and p.dim >= full.ndim else p for p in placements)
            local = part(full, place, mesh, fit)
            state[key] = DTensor.from_local(local, one, fit, run_check=False, shape=full.shape, stride=full.stride())
        module = pickle if pickled_as is None else with_meshes(pickled_as(ranks, rank, place))
        torch.save(state, folder / name.format(world=world, rank=rank), pickle_module=module)
    return folder


def part(full: torch.Tensor, place: Sequence[int], mesh: Sequence[int], placements: Sequence[Any]) -> torch.Tensor:
    """Return what is at a place of a mesh; what is cut in strides is cut last."""
    cuts = sorted(zip(placements, place, mesh, strict=True), key=lambda one: isinstance(one[0], _StridedShard))
    for placement, at, size in cuts:
        if isinstance(placement, (Shard, _StridedShard)):
            chunks = full.chunk(size, placement.dim)
            full = chunks[at] if at < len(chunks) else full.narrow(placement.dim, 0, 0)
    return full.clone()


def with_meshes(attributes: dict[str, Any]) -> Any:
    """Return what pickles each mesh as one with these attributes, and all else as always."""

    class Pickler(pickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, DeviceMesh):
                return copyreg.__newobj__, (DeviceMesh,), attributes  # type: ignore[attr-defined]
            return NotImplemented

    return types.SimpleNamespace(Pickler=Pickler, __name__="pickle")


def assert_full(path: Path, tensors: dict[str, torch.Tensor] = FULL) -> None:
    found = ckptool.load(path)
    for name, full in tensors.items():
        assert found[name].dtype == full.dtype
        assert torch.equal(found[name], full), name
    assert found["steps"] == STEPS


@pytest.mark.usefixtures("group")
def test_a_real_state_dict_of_one_process(tmp_path: Path) -> None:
    mesh = DeviceMesh("cpu", [0])
    state = {name: distribute_tensor(full, mesh, [Shard(0)]) for name, full in FULL.items()}
    (tmp_path / "run").mkdir()
    torch.save({**state, "steps": STEPS}, tmp_path / "run/model_rank0.pt")
    assert_full(tmp_path / "run")
    ckptool.migrate(tmp_path / "run", tmp_path / "out.safetensors")
    assert_full(tmp_path / "out.safetensors")


CASES = [
    ((2,), (Shard(0),)),
    ((3,), (Shard(1),)),
    ((1, 3), (Replicate(), Shard(0))),
    ((2, 1), (Shard(0), Replicate())),
    ((8,), (Shard(0),)),
    ((2, 2), (Shard(0), Shard(1))),
    ((2, 3), (Replicate(), Shard(0))),
    ((2, 2), (Shard(0), Shard(0))),
    ((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    ((3, 2), (_StridedShard(0, split_factor=2), Shard(0))),
]


@pytest.mark.usefixtures("group")
@each(("mesh", "placements"), CASES)
def test_parts_of_a_mesh_come_out_whole(mesh: tuple[int, ...], placements: tuple[Any, ...], tmp_path: Path) -> None:
    assert_full(save_ranks(tmp_path, mesh, placements))


@pytest.mark.usefixtures("group")
def test_missing_ranks_are_said_in_numbers(tmp_path: Path) -> None:
    folder = save_ranks(tmp_path, (3,), (Shard(0),))
    (folder / "model_world_size_3_rank_1.pt").unlink()
    caught = refused(folder, FileUnavailable, "1 of 3 files of ranks not there, rank 1")
    assert (caught.needed, caught.actual) == (3, 2)


@pytest.mark.usefixtures("group")
def test_copies_stand_in_for_missing_ranks(tmp_path: Path) -> None:
    folder = save_ranks(tmp_path, (2, 2), (Replicate(), Shard(0)))
    (folder / "model_world_size_4_rank_3.pt").unlink()
    assert_full(folder)
    assert "CK157" in said(folder)


@pytest.mark.usefixtures("group")
def test_partial_sums_are_refused_by_name(tmp_path: Path) -> None:
    folder = save_ranks(tmp_path / "run", (2,), (Partial(),))
    with pytest.raises(
        AmbiguousWeights,
        match=r"'emb\.weight' of .* cannot be put together: Partial: the parts of the ranks are to be added",
    ):
        ckptool.migrate(folder, tmp_path / "out.safetensors")
    with ckptool.open_checkpoint(folder) as checkpoint:
        assert "rank_1.emb.weight" in checkpoint.tensors


@pytest.mark.usefixtures("group")
def test_ranks_that_are_listed_apart_are_all_there_and_of_one_save(tmp_path: Path) -> None:
    folder = save_ranks(tmp_path / "run", (3,), (Partial(),))
    assert {"CK140", "CK148"}.isdisjoint(one.code for one in ckptool.check(folder).findings)
    (folder / "model_world_size_3_rank_2.pt").unlink()
    found = {one.code: one.message for one in ckptool.check(folder).findings}
    assert found["CK140"] == "1 of 3 files of ranks not there, rank 2"

    save_ranks(folder, (3,), (Partial(),), tensors={"other": FULL["emb.weight"]})
    save_ranks(tmp_path / "again", (3,), (Partial(),))
    shutil.copy(tmp_path / "again" / "model_world_size_3_rank_1.pt", folder)
    assert "CK148" in said(folder)


@pytest.mark.usefixtures("group")
def test_files_of_another_run_beside_them(tmp_path: Path) -> None:
    save_ranks(tmp_path, (4,), (Shard(0),), "model_rank{rank}.pt")
    save_ranks(tmp_path, (2,), (Shard(0),), "model_rank{rank}.pt")
    assert_full(tmp_path)
    assert "CK150" in said(tmp_path)
    shutil.copy(tmp_path / "model_rank2.pt", tmp_path / "model_rank1.pt")
    refused(tmp_path, (MalformedFile, FileUnavailable))


@pytest.mark.usefixtures("group")
def test_two_sets_are_not_chosen_from(tmp_path: Path) -> None:
    save_ranks(tmp_path, (2,), (Shard(0),))
    save_ranks(tmp_path, (3,), (Shard(0),))
    refused(tmp_path, AmbiguousFile, "2 sets of files of ranks: model of 2, model of 3")


@pytest.mark.usefixtures("group")
def test_buffers_that_differ_are_said(tmp_path: Path) -> None:
    folder = save_ranks(tmp_path, (2,), (Shard(0),))
    state = torch.load(folder / "model_world_size_2_rank_1.pt", weights_only=False)
    torch.save({**state, "steps": STEPS + 1}, folder / "model_world_size_2_rank_1.pt")
    assert ckptool.load(folder)["steps"] == STEPS
    assert "CK154" in said(folder)


@pytest.mark.usefixtures("group")
def test_verl_keeps_its_files_in_a_folder_of_the_actor(tmp_path: Path) -> None:
    actor = save_ranks(tmp_path / "actor", (2,), (Shard(0),))
    (actor / "huggingface").mkdir()
    (actor / "huggingface/config.json").write_text("{}")
    save_ranks(actor, (2,), (Shard(0),), "optim_world_size_{world}_rank_{rank}.pt")
    for rank in range(2):
        torch.save({"lr_scheduler": {"last_epoch": 1}}, actor / f"extra_state_world_size_2_rank_{rank}.pt")
    assert_full(actor)
    assert_full(tmp_path)
    with ckptool.open_checkpoint(actor) as checkpoint:
        assert "optim.emb.weight" in checkpoint.tensors
        assert "extra_state_rank_1" in {path.partition(".")[0] for path, _ in checkpoint.extras}


@pytest.mark.usefixtures("group")
def test_one_file_of_a_set_opens_alone_and_names_the_set(tmp_path: Path) -> None:
    folder = save_ranks(tmp_path, (2,), (Shard(0),))
    (found,) = [one for one in ckptool.check(folder / "model_world_size_2_rank_1.pt").findings if one.code == "CK160"]
    assert "2 files" in found.message
    assert found.command is not None
    assert str(folder) in found.command


def test_files_of_ranks_that_are_plain_are_no_such_set(tmp_path: Path) -> None:
    for rank in range(2):
        torch.save({"w": torch.ones(2)}, tmp_path / f"model_rank{rank}.pt")
    refused(tmp_path, (ckptool.CkptoolError, AmbiguousWeights), by=ckptool.load)


# Megatron-LM.


def megatron(folder: Path, ranks: list[str], sizes: dict[str, int], pointer: str = "100") -> Path:
    import argparse

    inside = "release" if pointer == "release" else f"iter_{int(pointer):07}"
    for number, rank in enumerate(ranks):
        (folder / inside / rank).mkdir(parents=True)
        model = {"language_model": {"embedding": {"weight": torch.full((2, 3), number)}}}
        state = {"args": argparse.Namespace(**sizes), "model": model, "iteration": 100}
        torch.save(state, folder / inside / rank / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text(pointer)
    return folder


def test_ranks_of_megatron_are_listed_and_not_merged(tmp_path: Path) -> None:
    folder = megatron(tmp_path / "run", ["mp_rank_00", "mp_rank_01"], {"tensor_model_parallel_size": 2})
    for path in (folder, folder / "latest_checkpointed_iteration.txt", folder / "iter_0000100"):
        with ckptool.open_checkpoint(path) as checkpoint:
            assert list(checkpoint.tensors) == [
                f"mp_rank_0{rank}.model.language_model.embedding.weight" for rank in range(2)
            ]
    with pytest.raises(AmbiguousWeights, match="2 ranks of model parallelism, listed rank by rank"):
        ckptool.migrate(folder, tmp_path / "out.safetensors")
    with pytest.raises(AmbiguousWeights, match="2 ranks of model parallelism"):
        ckptool.migrate(folder, tmp_path / "out.pth")
    assert ckptool.check(folder).findings[0].code == "CK155"


def test_a_name_that_all_ranks_ask_for_is_said_once_with_the_file_of_the_first(tmp_path: Path) -> None:
    folder = megatron(tmp_path, ["mp_rank_00", "mp_rank_01"], {"tensor_model_parallel_size": 2})
    report = ckptool.check(folder)
    said = {one.code: one.message for one in report.findings}
    asked = [one.record for one in report.globals if one.name == "argparse.Namespace"]

    where = "iter_0000100/mp_rank_00/model_optim_rng.pt::data.pkl"
    fact = rf"its pickles ask for .*: argparse\.Namespace \({where}, byte \d+\)"
    assert re.fullmatch(fact, said["CK204"])
    assert asked == [f"iter_0000100/mp_rank_0{rank}/model_optim_rng.pt::model_optim_rng/data.pkl" for rank in range(2)]


def test_a_file_without_a_tree_has_its_tensors_in_the_folder(tmp_path: Path) -> None:
    folder = megatron(tmp_path, ["mp_rank_00"], {"tensor_model_parallel_size": 1})
    ckptool.save({"weight": torch.ones(2)}, tmp_path / "flat.safetensors")
    (tmp_path / "flat.safetensors").replace(folder / "iter_0000100/mp_rank_00/model_optim_rng.pt")
    assert ckptool.load(folder)["weight"].tolist() == [1, 1]


@pytest.mark.parametrize("pointer", ["100", "release"])
def test_one_rank_of_megatron_is_the_whole(pointer: str, tmp_path: Path) -> None:
    folder = megatron(tmp_path, ["mp_rank_00"], {"tensor_model_parallel_size": 1}, pointer)
    assert ckptool.load(folder)["weight"].shape == (2, 3)


def test_megatron_says_which_ranks_are_missing(tmp_path: Path) -> None:
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    folder = megatron(tmp_path, ["mp_rank_00_000", "mp_rank_01_000", "mp_rank_01_001"], sizes)
    refused(folder, FileUnavailable, "1 of 4 ranks not there")
    shutil.rmtree(folder / "iter_0000100")
    refused(folder, FileUnavailable, "names 'iter_0000100', and there is no such folder")


def test_arrays_of_zarr_are_refused_by_name(tmp_path: Path) -> None:
    place = tmp_path / "iter_0000100"
    (place / "model.weight").mkdir(parents=True)
    (place / "model.weight" / ".zarray").write_text("{}")
    torch.save({"iteration": 100}, place / "common.pt")
    for text in ('{"sharded_backend": "torch_dist"}', '{"sharded_backend": "zarr"}'):
        (place / "metadata.json").write_text(text)
        for path in (tmp_path, place):
            refused(path, UnsupportedFeature, "in the format zarr, of 1 array, which is not read")


# Real processes.


SCRIPT = """
import sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

rank, world, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=world)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(10, 13), torch.nn.Linear(13, 5))
full = {name: one.clone() for name, one in model.state_dict().items()}
if world == 4:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
else:
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
torch.save(model.state_dict(), f"{out}/run/model_world_size_{world}_rank_{rank}.pt")
if not rank:
    torch.save(full, f"{out}/full.pth")
dist.barrier()
dist.destroy_process_group()
"""


@exhaustive
def test_real_processes(tmp_path: Path) -> None:
    world = 4
    (tmp_path / "run").mkdir()
    commands = [[sys.executable, "-c", SCRIPT, str(rank), str(world), str(tmp_path)] for rank in range(world)]
    running = [subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}) for command in commands]
    assert [one.wait(300) for one in running] == [0] * world
    full = torch.load(tmp_path / "full.pth")
    found = ckptool.load(tmp_path / "run")
    assert set(found) == set(full)
    for name, tensor in full.items():
        assert torch.equal(found[name], tensor), name


def test_the_part_of_one_rank_is_not_to_be_left_out(tmp_path: Path) -> None:
    folder = save_ranks(tmp_path / "ranks", (2,), [Shard(0)])
    (one, _) = sorted(folder.iterdir())
    alone = tmp_path / "alone" / "model.pth"
    alone.parent.mkdir()
    shutil.copy(one, alone)
    for path, hint in (
        (one, f"Give {folder}, with the parts of all."),
        (alone, "Save it again with the weights gathered."),
    ):
        with pytest.raises(ckptool.MigrationRefused, match="of which it holds one rank's part") as caught:
            ckptool.migrate(path, tmp_path / "x.safetensors")
        assert caught.value.hint == hint
    assert ckptool.migrate(folder, tmp_path / "x.safetensors").tensors == len(FULL) + 1
