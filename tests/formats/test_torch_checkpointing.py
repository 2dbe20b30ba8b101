"""Directories of ``torch_checkpointing``: what its ranks have parts of comes out whole, and what is missing is said."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import ckptool
from ckptool import CkptoolError, FileUnavailable, IncompleteWeights, MalformedFile, UnsupportedFeature
from tests.formats.said import refused, run, said
from tests.formats.test_rank_files import FULL, save_ranks


def write_index(folder: Path, world: int, tensors: dict[str, torch.Tensor], **layouts: object) -> None:
    """Write the index as the package does: plain dicts, in protocol 4."""
    mesh = {"device_type": "cpu", "mesh_shape": (world,), "mesh_data": tuple(range(world)), "mesh_dim_names": None}
    paths = {
        json.dumps([name], separators=(",", ":")): [
            {
                "sharding_metadata": {
                    "type": "DTensorShardingMetadata",
                    "data": {
                        "global_shape": list(full.shape),
                        "dtype": str(full.dtype),
                        "stride": list(full.stride()),
                        "mesh_spec": mesh,
                        "placements": [{"type": "Shard", "dim": 0}],
                    },
                },
                "ranks": tuple(range(world)),
            }
        ]
        for name, full in tensors.items()
    }
    item = {"nested_path_to_metadata": paths, "rank_to_layout_info": dict.fromkeys(range(world)) | layouts}
    index = {"metadata": {"model": item}, "world_size": world, "version": "2.0"}
    (folder / "metadata.pkl").write_bytes(pickle.dumps(index, protocol=4))


def written(folder: Path, mesh: tuple[int, ...] = (2,), placements: tuple[Any, ...] = (Shard(0),)) -> Path:
    save_ranks(folder, mesh, placements, "model_{rank}.pt")
    world = torch.Size(mesh).numel()
    write_index(folder, world, FULL)
    for rank in range(world):
        torch.save(7, folder / f"step_{rank}.pt")
        torch.save({"rng": torch.arange(3) + rank}, folder / f"loader_{rank}.pt")
    return folder


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [((2,), (Shard(0),)), ((4,), (Shard(0),)), ((2, 2), (Shard(0), Shard(1))), ((2, 2), (Replicate(), Shard(0)))],
)
def test_parts_of_ranks_are_one_checkpoint(mesh: tuple[int, ...], placements: tuple[Any, ...], tmp_path: Path) -> None:
    folder = written(tmp_path / "step-1", mesh, placements)

    loaded = ckptool.load(folder)

    assert loaded.keys() == {*FULL, "steps"}
    for name, full in FULL.items():
        assert torch.equal(loaded[name], full)
    with ckptool.open_checkpoint(folder) as checkpoint:
        assert checkpoint.format == "torch_checkpointing"
        assert {"step": 7}.items() <= dict(checkpoint.extras).items()  # one: its copies are equal
        assert {"loader_rank_0.rng", "loader_rank_1.rng"} <= checkpoint.tensors.keys()  # each has its own
    assert run("migrate", folder, tmp_path / "a.safetensors").exit_code == 0
    assert ckptool.load(tmp_path / "a.safetensors").keys() == loaded.keys()
    assert not {"CK141", "CK152", "CK155"} & {one.code for one in ckptool.check(folder, deep=True).findings}


def test_a_missing_file_of_a_rank_is_named(tmp_path: Path) -> None:
    folder = written(tmp_path / "step-1")
    (folder / "model_1.pt").unlink()

    caught = refused(folder, FileUnavailable, r"1 of 2 files of ranks not there: 'model_1.pt'")
    assert (caught.needed, caught.actual) == (2, 1)


def test_a_file_alone_is_a_part(tmp_path: Path) -> None:
    folder = written(tmp_path / "step-1")

    for name in ("model_0.pt", "metadata.pkl"):
        (finding,) = [one for one in ckptool.check(folder / name).findings if one.code == "CK160"]
        assert finding.command == f"ckptool inspect {folder}"
    refused(folder / "model_0.pt", IncompleteWeights, by=ckptool.load)
    assert run("migrate", folder / "model_0.pt", tmp_path / "a.pth").exit_code == 1


def test_what_one_process_saved_is_whole(tmp_path: Path) -> None:
    torch.save(FULL, tmp_path / "model_0.pt")
    write_index(tmp_path, 1, FULL)

    for path in (tmp_path, tmp_path / "model_0.pt"):
        assert ckptool.load(path).keys() == FULL.keys()
    assert "CK160" not in said(tmp_path / "model_0.pt")


def test_stages_of_a_pipeline_are_put_together(tmp_path: Path) -> None:
    later = {f"layers.9.{name}": full for name, full in FULL.items()} | {"norm": torch.ones(3)}
    save_ranks(tmp_path, (2,), (Shard(0),), "model_{rank}.pt")
    save_ranks(tmp_path / "other", (2,), (Shard(0),), "model_{rank}.pt", later)
    for rank in range(2):
        shutil.move(tmp_path / f"other/model_{rank}.pt", tmp_path / f"model_{rank + 2}.pt")
    write_index(tmp_path, 4, FULL | later)

    loaded = ckptool.load(tmp_path)

    for name, full in (FULL | later).items():
        assert torch.equal(loaded[name], full)


@pytest.mark.parametrize(
    ("case", "error", "says"),
    [
        ("shape", MalformedFile, "which the index does not say"),
        ("plain parts", MalformedFile, "which the index does not say"),
        ("safetensors", UnsupportedFeature, "files of safetensors, which are not joined"),
        ("no size", MalformedFile, "does not say how many ranks"),
        ("out of the folder", FileUnavailable, "not there"),
        ("path", MalformedFile, "a path in 'metadata.pkl'"),
    ],
)
def test_what_makes_no_sense_is_refused(case: str, error: type[CkptoolError], says: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "step-1")
    index = pickle.loads((folder / "metadata.pkl").read_bytes())
    item = index["metadata"]["model"]
    if case == "shape":
        one = item["nested_path_to_metadata"]['["emb.weight"]'][0]
        one["sharding_metadata"]["data"]["global_shape"] = [24, 10]
    elif case == "plain parts":
        for rank in range(2):
            torch.save({"emb.weight": FULL["emb.weight"].chunk(2)[rank].clone()}, folder / f"model_{rank}.pt")
    elif case == "safetensors":
        layout = {"file_path": "w/0.safetensors", "serialization_format": {"type": "SafetensorsSerialization"}}
        (folder / "w").mkdir()
        (folder / "w/0.safetensors").write_bytes(b"")
        item["rank_to_layout_info"] = {0: layout, 1: None}
    elif case == "no size":
        index["world_size"] = "two"
    elif case == "out of the folder":
        item["rank_to_layout_info"][1] = {"file_path": "../../etc/passwd", "serialization_format": None}
    elif case == "path":
        item["nested_path_to_metadata"]["[" * 5000] = []
    (folder / "metadata.pkl").write_bytes(pickle.dumps(index, protocol=4))

    refused(folder, error, says)


def test_names_without_values_are_absent(tmp_path: Path) -> None:
    folder = written(tmp_path / "step-1")
    write_index(folder, 2, FULL | {"lost.weight": torch.ones(2)})

    assert "CK152" in said(folder)
    refused(folder, IncompleteWeights, r"lost\.weight", by=ckptool.load, key="model")


def test_another_file_of_that_name_changes_nothing(tmp_path: Path) -> None:
    for step in (1, 2):
        torch.save({"w": torch.full((3,), float(step))}, tmp_path / f"model_{step}.pt")
    (tmp_path / "metadata.pkl").write_bytes(pickle.dumps({"labels": ["a", "b"]}))

    assert "CK160" not in said(tmp_path / "model_1.pt")
    assert ckptool.load(tmp_path / "model_1.pt").keys() == {"w"}
    assert run("inspect", tmp_path).exit_code == 0


WRITER = """
import os, sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import torch_checkpointing as tc
from torch_checkpointing import metadata_manager
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}.store", rank=rank, world_size=2)


def on_the_cpu(manager, data, process_group=None):  # what is gathered is gathered by CUDA
    found = [None, None]
    dist.all_gather_object(found, data)
    return dict(enumerate(found))


metadata_manager.DefaultMetadataManager._all_gather_pickled_data = on_the_cpu
full = torch.load(sys.argv[3])
mesh = init_device_mesh("cpu", (2,))
model = {name: distribute_tensor(whole, mesh, [Shard(0)]) for name, whole in full.items()}
optimizer = {"state": {0: {"exp_avg": model["emb.weight"] * 2}}, "param_groups": [{"lr": 0.5, "params": [0]}]}
config = tc.CheckpointManager.Config.with_sync_save()
config.items = {name: tc.ItemSpec(resharder=DefaultResharder(), required=False) for name in ("model", "optimizer")}
config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
manager = config.build()
manager.save(folder, {"model": model, "optimizer": optimizer, "step": 7})
into = {"model": {name: torch.zeros_like(one) for name, one in model.items()}}
loaded = manager.load(folder, into=into)["model"]
torch.save({name: one.full_tensor() for name, one in loaded.items()}, f"{folder}.{rank}.expected")
manager.close()
dist.destroy_process_group()
"""


def test_what_the_package_writes_is_read_as_the_package_reads_it(tmp_path: Path) -> None:
    pytest.importorskip("torch_checkpointing")
    torch.save(FULL, tmp_path / "full.pt")
    (tmp_path / "write.py").write_text(WRITER)
    words = [sys.executable, "-W", "ignore", str(tmp_path / "write.py")]
    folder = tmp_path / "step-1"
    ranks = [
        subprocess.Popen(
            [*words, str(rank), str(folder), str(tmp_path / "full.pt")],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        _, said = rank.communicate(timeout=300)
        assert rank.returncode == 0, said

    loaded = ckptool.load(folder)
    expected = torch.load(tmp_path / "step-1.0.expected")

    assert loaded.keys() == expected.keys() == FULL.keys()
    for name, full in FULL.items():
        assert torch.equal(loaded[name], expected[name])
        assert torch.equal(loaded[name], full)
    with ckptool.open_checkpoint(folder) as checkpoint:
        assert torch.equal(checkpoint.tensors["optimizer.state.0.exp_avg"].torch(), FULL["emb.weight"] * 2)
        assert dict(checkpoint.extras)["step"] == 7
