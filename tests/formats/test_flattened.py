"""Megatron-core's tensors that were flattened before they were cut: each is put back in the shape that it had."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import ckptool
from tests.each import each
from tests.formats.dcp_folder import Writer

SHAPES = [
    ((13,), (1,)),
    ((6, 10), (1, 2)),
    ((6, 10), (3, 1)),
    ((4, 6, 5), (2, 3, 1)),
    ((3, 8, 5), (3, 2, 1)),  # layers, of which each is a part
]


def flattened(writer: Writer, name: str, tensor: torch.Tensor, parts: tuple[int, ...], cuts: int) -> None:
    """Write a tensor as Megatron-core does: by parts along each dimension, of which each is flattened and cut."""
    size = tuple(whole // count for whole, count in zip(tensor.shape, parts, strict=True))
    numel = prod(size)
    edges = sorted({0, numel, *(numel * at // cuts + 1 for at in range(1, cuts))})
    chunks = []
    for place in product(*map(range, parts)):
        inside = tensor[tuple(slice(at * one, (at + 1) * one) for at, one in zip(place, size, strict=True))].flatten()
        for rank, (begin, end) in enumerate(pairwise(edges)):
            lead = (1,) * len(parts)
            chunk = ChunkStorageMetadata(torch.Size((*place, begin)), torch.Size((*lead, end - begin)))
            chunks.append(chunk)
            index = MetadataIndex(name, chunk.offsets, len(chunks))
            writer.item(f"__{rank}_0.distcp", index, inside[begin:end].clone().view(*lead, -1))
    described = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), torch.Size((*parts, numel)), chunks)
    writer.metadata.state_dict_metadata[name] = described
    data: dict[str, Any] = writer.metadata.__dict__.setdefault("mcore_data", {})
    data[name] = {"nd_reformulated_orig_global_shape": tuple(tensor.shape)}


def closed(writer: Writer) -> Path:
    """Write what Megatron-core writes beside the items, too: values that are not sharded, and which writer it was."""
    folder = writer.close()
    torch.save({"iteration": 7}, folder / "common.pt")
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "common_backend": "torch"}')
    return folder


def saved(folder: Path, cuts: int = 3) -> tuple[Path, dict[str, torch.Tensor]]:
    writer = Writer(folder)
    writer.metadata.planner_data = None
    found = {}
    for number, (shape, parts) in enumerate(SHAPES):
        name = f"optimizer.state.exp_avg.{number}"
        found[name] = torch.arange(prod(shape), dtype=torch.float32).reshape(shape) + number
        flattened(writer, name, found[name], parts, cuts)
    found["weight"] = torch.randn(4, 3)
    writer.tensor("weight", found["weight"])
    return closed(writer), found


@pytest.mark.parametrize("cuts", [1, 3])
def test_they_have_the_shape_and_values_that_they_had(tmp_path: Path, cuts: int) -> None:
    folder, expected = saved(tmp_path / "saved", cuts)
    with ckptool.open_checkpoint(folder) as opened:
        assert set(opened.tensors) == set(expected)
        for name, tensor in expected.items():
            assert opened.tensors[name].shape == tuple(tensor.shape)
            assert torch.equal(opened.tensors[name].torch(), tensor), name
    report = ckptool.check(folder, deep=True)
    assert [one.code for one in report.findings if one.severity != "info"] == []
    assert report.intact == report.parts


def test_they_are_migrated_as_they_are_read(tmp_path: Path) -> None:
    folder, expected = saved(tmp_path / "saved")
    for target, form in (("all.pt", "same"), ("again", "dcp")):
        ckptool.migrate(folder, tmp_path / target, form=form)
        with ckptool.open_checkpoint(tmp_path / target) as opened:
            for name, tensor in expected.items():
                assert torch.equal(opened.tensors[name].torch(), tensor), (target, name)


def test_a_damaged_item_is_found_when_it_is_copied(tmp_path: Path) -> None:
    folder, expected = saved(tmp_path / "saved")
    file = folder / "__1_0.distcp"
    data = file.read_bytes()
    name = "optimizer.state.exp_avg.1"
    values = expected[name][:, :5].flatten()[11:13].numpy().tobytes()
    assert data.count(values) == 1
    file.write_bytes(data.replace(values, bytes(len(values))))
    with pytest.raises(ckptool.DamagedFile, match=r"exp_avg\.1"):
        ckptool.migrate(folder, tmp_path / "all.pt", form="same")
    report = ckptool.check(folder, deep=True)
    assert report.parts is not None
    assert report.intact == report.parts - 1


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    folder, expected = saved(tmp_path / "saved")
    (folder / "__2_0.distcp").unlink()
    with ckptool.open_checkpoint(folder) as opened:
        found = opened.tensors["optimizer.state.exp_avg.1"]
        assert found.shape == (6, 10)
        with pytest.raises(ckptool.FileUnavailable, match="__2_0"):
            found.read()
        assert torch.equal(opened.tensors["weight"].torch(), expected["weight"])


@each("given", [(6, 11), (12, 5), (60,), (6, 10, 1), (-6, -10), (), "6, 10", None, [[6], 10]])
def test_a_shape_that_cannot_be(tmp_path: Path, given: Any) -> None:
    folder, expected = saved(tmp_path / "first")
    writer = Writer(tmp_path / "saved")
    name = "optimizer.state.exp_avg.1"
    flattened(writer, name, expected[name], (1, 2), 3)
    writer.metadata.__dict__["mcore_data"][name] = {"nd_reformulated_orig_global_shape": given}
    folder = closed(writer)
    (finding,) = [one for one in ckptool.check(folder).findings if one.severity == "error"]
    assert finding.code == "CK141"
    assert name in finding.message
    with ckptool.open_checkpoint(folder) as opened, pytest.raises(ckptool.MalformedFile, match="contradicts itself"):
        opened.tensors[name].read()
