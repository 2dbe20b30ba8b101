"""Sharded safetensors of DCP's writer for Hugging Face: pieces whose places are in text, and no index."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed import checkpoint

import ckptool
from ckptool.errors import MalformedFile, UnsupportedFeature
from tests.build import call, named, pickled, torch_zip
from tests.formats.dcp_folder import Boxes, grid, rows, tensors
from tests.formats.said import refused


def write(folder: Path, cut: dict[str, Boxes], *, files: int = 1) -> dict[str, torch.Tensor]:
    """Write tensors as the ranks of ``cut`` would: the first box of each into the first rank's file."""
    folder.mkdir()
    whole = tensors()
    for rank in range(max(map(len, cut.values()))):
        own, places = {}, {}
        for name, boxes in cut.items():
            if rank < len(boxes):
                offsets, sizes = boxes[rank]
                part = whole[name][tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]
                own[name], places[name] = part.contiguous(), {"saved_offsets": list(offsets)}
        text = {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(places), "format": "pt"}
        save_file(own, folder / f"shard-{rank + 1:05}-model-00001-of-{files:05}.safetensors", text)
    return whole


CUT: dict[str, Boxes] = {
    "model.weight": grid((23, 10), 2, 2),
    "model.wide": rows((5, 14), 4, 1),
    "model.bias": rows((14,), 4),
    "model.flags": [((0,), (11,))],
}


def test_pieces_are_put_together(tmp_path: Path) -> None:
    whole = write(tmp_path / "saved", CUT)
    with ckptool.open_checkpoint(tmp_path / "saved") as opened:
        assert opened.format == "dcp_safetensors"
        assert set(opened.tensors) == set(CUT)
        assert all(torch.equal(opened.tensors[name].torch(), whole[name]) for name in CUT)
    report = ckptool.check(tmp_path / "saved", deep=True)
    assert [one.code for one in report.findings] == ["CK145"]
    done = ckptool.migrate(tmp_path / "saved", tmp_path / "one.safetensors")
    assert done.verified
    (note,) = done.notes
    assert "nothing says how many there were" in note
    assert torch.equal(ckptool.load(tmp_path / "one.safetensors")["model.weight"], whole["model.weight"])


def test_a_piece_that_is_a_pickle_is_not_called_one_of_safetensors(tmp_path: Path) -> None:
    write(tmp_path / "saved", CUT)
    last = max((tmp_path / "saved").glob("*.safetensors"))
    for data in (pickled(call(named("os", "system"), "true")), torch_zip(call(named("os", "system"), "true"))):
        last.write_bytes(data)
        assert ckptool.check(tmp_path / "saved").grade == "system"


def test_a_merged_file_says_what_the_pieces_said(tmp_path: Path) -> None:
    write(tmp_path / "saved", CUT)
    with ckptool.open_checkpoint(tmp_path / "saved") as opened:
        assert opened.metadata == {"format": "pt"}
    ckptool.migrate(tmp_path / "saved", tmp_path / "one.safetensors")
    assert ckptool.diff(tmp_path / "saved", tmp_path / "one.safetensors").same


def test_copies_of_a_piece_are_one(tmp_path: Path) -> None:
    whole = write(tmp_path / "saved", {"model.flags": [((0,), (11,))] * 3})
    assert torch.equal(ckptool.load(tmp_path / "saved")["model.flags"], whole["model.flags"])


@pytest.mark.parametrize("rank", [1, 2])
def test_a_rank_in_the_middle_is_missed(tmp_path: Path, rank: int) -> None:
    write(tmp_path / "saved", CUT)
    (tmp_path / "saved" / f"shard-{rank + 1:05}-model-00001-of-00001.safetensors").unlink()
    report = ckptool.check(tmp_path / "saved")
    assert {"CK140", "CK141"} <= {one.code for one in report.findings}
    assert f"no file of 1 rank, by the numbers in the names: {rank + 1}" in str(report)
    refused(tmp_path / "saved", match="hole", by=ckptool.load)


def test_the_last_rank_is_not_promised(tmp_path: Path) -> None:
    write(tmp_path / "saved", {"model.bias": rows((14,), 4)})
    (tmp_path / "saved" / "shard-00004-model-00001-of-00001.safetensors").unlink()
    with ckptool.open_checkpoint(tmp_path / "saved") as opened:
        assert opened.tensors["model.bias"].shape == (12,)
    assert "complete as far as the files tell" in str(ckptool.check(tmp_path / "saved"))


@pytest.mark.parametrize(
    "places", [{"w": {"saved_offsets": [1, 0]}}, {"w": {"saved_offsets": [-1]}}, {"w": {"saved_offsets": [1 << 63]}}]
)
def test_places_that_make_no_sense(tmp_path: Path, places: dict[str, object]) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "shard-00001.safetensors", {"DCP_SHARDING_INFO": json.dumps(places)})
    refused(tmp_path, MalformedFile)


def test_full_tensors_are_preferred_to_their_pieces(tmp_path: Path) -> None:
    whole = write(tmp_path / "sharded", CUT)
    folder = tmp_path / "both"
    folder.mkdir()
    shutil.move(tmp_path / "sharded", folder / "sharded")
    save_file({name: whole[name] for name in CUT}, folder / "model-00001-of-00001.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(CUT, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with ckptool.open_checkpoint(folder) as opened:
        assert opened.format == "safetensors"
        assert torch.equal(opened.tensors["model.weight"].torch(), whole["model.weight"])
    with ckptool.open_checkpoint(folder / "sharded") as opened:
        assert torch.equal(opened.tensors["model.weight"].torch(), whole["model.weight"])


def test_a_file_that_one_rank_lacks_is_told_of(tmp_path: Path) -> None:
    write(tmp_path / "saved", {"model.bias": rows((14,), 3), "model.weight": rows((23, 10), 3)})
    for rank in (1, 2, 3):
        path = tmp_path / "saved" / f"shard-0000{rank}-model-00001-of-00001.safetensors"
        with safe_open(path, "pt") as opened:
            own, text = {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata()  # noqa: SIM118
        for number, (name, part) in enumerate(own.items(), 1):
            save_file({name: part}, path.with_name(f"shard-0000{rank}-model-0000{number}-of-00002.safetensors"), text)
        path.unlink()
    path = path.with_name("shard-00003-model-00001-of-00002.safetensors")
    assert [one.code for one in ckptool.check(tmp_path / "saved").findings] == ["CK145"]
    path.unlink()
    (finding,) = [one for one in ckptool.check(tmp_path / "saved").findings if one.code == "CK156"]
    assert "shard-00003-model-00001-of-00002.safetensors" in finding.message


def test_pieces_are_no_shards_of_an_index(tmp_path: Path) -> None:
    write(tmp_path / "saved", {"model.bias": rows((14,), 3)})
    folder = tmp_path / "whole"
    folder.mkdir()
    shutil.copy(next((tmp_path / "saved").iterdir()), folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"model.bias": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    error = ckptool.check(folder).error
    assert error is not None
    assert "pieces of tensors" in error.message


@pytest.mark.skipif(not hasattr(checkpoint, "HuggingFaceStorageWriter"), reason="torch 2.7 and later have it")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_whole_tensors_whose_places_are_told_are_shards_of_an_index(tmp_path: Path) -> None:
    wanted = {"a.weight": torch.randn(6, 4), "a.bias": torch.randn(3).bfloat16(), "empty": torch.empty(0, 2)}
    file_of = {"a.weight": 1, "a.bias": 2, "empty": 2}
    writer = checkpoint.HuggingFaceStorageWriter(str(tmp_path / "saved"), fqn_to_index_mapping=file_of)
    checkpoint.save(wanted, storage_writer=writer, no_dist=True)

    loaded = ckptool.load(tmp_path / "saved")
    assert loaded.keys() == wanted.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in wanted.items())
    with ckptool.open_checkpoint(tmp_path / "saved") as opened:
        assert (opened.metadata, opened.notes) == ({"format": "pt"}, ())

    (path,) = (tmp_path / "saved").glob("*-00002-of-*")  # what another rank has of the same name was written over it
    for places in ({"a.bias": {"saved_offsets": [4]}}, {"a.bias": {"saved_offsets": 0}}, {"a.bias": 0}):
        save_file(
            {"a.bias": wanted["a.bias"], "empty": wanted["empty"]}, path, {"DCP_SHARDING_INFO": json.dumps(places)}
        )
        refused(tmp_path / "saved", UnsupportedFeature, "pieces of tensors", by=ckptool.load)
