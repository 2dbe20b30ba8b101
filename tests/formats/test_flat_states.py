"""Folders of DCP in which states of an optimizer, and values, stand among the weights under flat names."""

from __future__ import annotations

import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import ckptool
from ckptool.errors import IncompleteWeights, MigrationRefused
from tests.each import each
from tests.formats.dcp_folder import Writer, rows
from tests.formats.said import refused, wrong
from tests.loading.same import assert_same_tensor

NAMES = ("embedding.weight", "decoder.layers.mlp.fc1.weight", "optimizer_head.weight")


def save(state: dict[str, Any], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)


def megatron(folder: Path, optimizer: str) -> dict[str, torch.Tensor]:
    """Write what Megatron-core writes: no planner data, names of parameters behind those of their states."""
    writer = Writer(folder)
    writer.metadata.planner_data = None
    found = {name: torch.randn(6, 4) for name in NAMES}
    for name, tensor in found.items():
        writer.tensor(name, tensor, rows(tensor.shape, 2))
        for key in ("exp_avg", "exp_avg_sq", "fp32_param"):
            writer.tensor(f"{optimizer}.state.{key}.{name}", torch.rand(6, 4), rows(tensor.shape, 2))
    writer.value("rng_state/shard_0.0_1.2", [{"torch_rng_state": torch.get_rng_state()}])
    common = {"iteration": torch.tensor(100), "checkpoint_version": 3.0, "optimizer": {"param_groups": [{"lr": 0.1}]}}
    torch.save(common, folder / "common.pt")
    writer.close()
    return found


@each("optimizer", ["optimizer", "chained_0.optimizer"])
def test_states_of_megatrons_optimizers_are_no_weights(optimizer: str, tmp_path: Path) -> None:
    expected = megatron(tmp_path / "run", optimizer)

    with ckptool.open_checkpoint(tmp_path / "run") as checkpoint:
        roles = {one.key: (one.role, len(one)) for one in checkpoint.state_dicts}
        assert (checkpoint.form, len(checkpoint.tensors)) == ("checkpoint", 14)
    assert roles[""] == ("model", 3)
    assert roles[optimizer] == ("optimizer", 9)
    loaded = ckptool.load(tmp_path / "run")
    assert list(loaded) == list(expected)
    for name, tensor in expected.items():
        assert_same_tensor(loaded[name], tensor, name)
    ckptool.migrate(tmp_path / "run", tmp_path / "weights.pt", form="state_dict")
    assert ckptool.diff(tmp_path / "run", tmp_path / "weights.pt").same
    ckptool.migrate(tmp_path / "run", tmp_path / "all.pt")
    assert ckptool.load(tmp_path / "all.pt").keys() == {*expected, "iteration"}  # a tensor as any other there


def test_states_of_extra_modules_belong_to_the_weights(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "more")
    writer.metadata.planner_data = None
    writer.tensor("fc.weight", torch.ones(2, 2))
    writer.tensor("optimizer.state.exp_avg.fc.weight", torch.ones(2, 2))
    writer.value("fc._extra_state/shard_0_1", io.BytesIO(b"fp8"))
    writer.close()

    with pytest.raises(MigrationRefused) as caught:
        ckptool.migrate(tmp_path / "more", tmp_path / "weights.safetensors")
    assert "'fc._extra_state/shard_0_1'" in caught.value.message


def test_states_that_torch_flattened_are_no_weights(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"state": torch.nn.Linear(3, 3), "norm": torch.nn.BatchNorm1d(3)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model["norm"](model["state"](torch.randn(4, 3))).sum().backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, states = get_state_dict(model, optimizer, options=options)
    train = {"train_state": {"step": torch.tensor(3)}, "lr_scheduler": {"last_epoch": 3}}
    save({**weights, **states, **train}, tmp_path / "step-3")

    loaded = ckptool.load(tmp_path / "step-3")
    expected = model.state_dict()
    assert sorted(loaded) == sorted(expected)
    for name, tensor in expected.items():
        assert_same_tensor(loaded[name], tensor, name)
    ckptool.load_into(model, tmp_path / "step-3")
    ckptool.migrate(tmp_path / "step-3", tmp_path / "weights.safetensors")
    ckptool.migrate(tmp_path / "step-3", tmp_path / "all.pt", drop=["optimizer"])
    left = torch.load(tmp_path / "all.pt", weights_only=True)
    assert sorted(left) == sorted([*expected, *train])


def test_an_optimizer_in_a_dict_of_its_own_is_none_of_the_weights(tmp_path: Path) -> None:
    weights = {"a.weight": torch.ones(2), "a.bias": torch.zeros(1)}
    optimizer = {"state.a.weight.exp_avg": torch.ones(2), "param_groups.a.weight.lr": 0.1}
    others = {"lr_scheduler": {"last_epoch": 3}, "train_state": {"step": torch.tensor(3)}, "dataloader": {"rank": b"x"}}
    save({**weights, "optimizer": optimizer, **others}, tmp_path / "step-3")
    assert sorted(ckptool.load(tmp_path / "step-3")) == sorted(weights)
    ckptool.migrate(tmp_path / "step-3", tmp_path / "weights.safetensors")


def test_an_optimizer_alone_has_no_weights(tmp_path: Path) -> None:
    save({"state.a.exp_avg": torch.ones(2), "param_groups.a.lr": 0.1}, tmp_path / "o")
    with ckptool.open_checkpoint(tmp_path / "o") as checkpoint:
        assert (checkpoint.form, checkpoint.weights) == ("training", None)


def test_a_plain_state_dict_keeps_its_names(tmp_path: Path) -> None:
    save({"state.a.weight": torch.ones(2), "b": torch.ones(1)}, tmp_path / "o")
    assert sorted(ckptool.load(tmp_path / "o")) == ["b", "state.a.weight"]


# What is saved beside the items


def test_values_of_megatron_that_are_not_there_are_told_of(tmp_path: Path) -> None:
    megatron(tmp_path, "optimizer")
    metadata = tmp_path / "metadata.json"
    metadata.write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}')
    index = pickle.loads((tmp_path / ".metadata").read_bytes())
    index.all_local_plans = []
    (tmp_path / ".metadata").write_bytes(pickle.dumps(index, protocol=4))
    assert not wrong(tmp_path)
    metadata.rename(tmp_path / "away")
    assert wrong(tmp_path) == ["CK166"]
    metadata.write_text('{"sharded_back')
    assert wrong(tmp_path) == ["CK166"]
    metadata.unlink()
    (tmp_path / "common.pt").rename(tmp_path / "values")
    assert wrong(tmp_path) == ["CK140"]
    (tmp_path / "values").rename(tmp_path / "common.pt")
    metadata.write_text((tmp_path / "away").read_text())
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
        (tmp_path / name).unlink()
    error = ckptool.check(tmp_path).error
    assert error is not None
    assert "there is no .metadata" in error.message
    metadata.unlink()
    assert wrong(tmp_path) == ["CK165"]


def test_values_of_lightning_that_are_not_there_are_told_of(tmp_path: Path) -> None:
    save({"state_dict": {"w": torch.ones(2)}, "optimizer_0": {"state": {"w": {"step": torch.ones(1)}}}}, tmp_path)
    assert wrong(tmp_path) == ["CK166"]
    torch.save({"epoch": 1, "pytorch-lightning_version": "2.6"}, tmp_path / "meta.pt")
    assert not wrong(tmp_path)
    for name in (".metadata", "__0_0.distcp"):
        (tmp_path / name).unlink()
    assert wrong(tmp_path) == ["CK165"]


def test_a_rank_whose_index_is_not_there_is_told_of(tmp_path: Path) -> None:
    for rank in range(2):
        writer = Writer(tmp_path)
        writer.tensor("w", torch.ones(2, 2))
        writer.value(f"own.{rank}", 1, f"__{rank}_0.distcp")
        writer.close(f"__{rank}.metadata")
    (tmp_path / "__1.metadata").unlink()
    report = ckptool.check(tmp_path)
    assert "'__1.metadata': no such file" in report.findings[0].message
    assert report.worst == "error"
    assert "delete" not in str(report)


def test_another_state_dict_is_not_taken_for_weights_that_were_lost(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.value("model", {"w": torch.ones(2)}, "__0_0.distcp")
    writer.value("epoch", 3, "__1_0.distcp")
    writer.item("__1_0.distcp", MetadataIndex("top"), torch.ones(4))
    writer.metadata.state_dict_metadata["top"] = BytesStorageMetadata()
    writer.close()
    assert list(ckptool.load(tmp_path)) == ["w"]
    (tmp_path / "__0_0.distcp").unlink()
    assert refused(tmp_path, IncompleteWeights, by=ckptool.load).missing == ("model",)
