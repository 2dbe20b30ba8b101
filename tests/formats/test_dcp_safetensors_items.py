"""Folders of torch.distributed.checkpoint whose tensors were written as safetensors, and those of odd tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import SerializationFormat

import ckptool
from ckptool import migrate
from ckptool.errors import FileUnavailable, MalformedFile, TruncatedFile
from tests.formats.said import wrong
from tests.formats.test_dcp import flat, save


def state() -> dict[str, Any]:
    torch.manual_seed(3)
    model = {
        "a": torch.randn(3, 4),
        "b": torch.arange(5),
        "half": torch.randn(3).to(torch.bfloat16),
        "none": torch.ones(0, 2),
        "s": torch.tensor(3.0),
    }
    return {"model": model, "epoch": 3}


def as_safetensors(folder: Path, threads: int = 1) -> Path:
    return save(state(), folder, thread_count=threads, serialization_format=SerializationFormat.SAFETENSORS)


@pytest.mark.parametrize("threads", [1, 2, 9])  # so that a file has one tensor, too
def test_tensors_are_those_that_were_saved(threads: int, tmp_path: Path) -> None:
    folder = as_safetensors(tmp_path / "saved", threads)
    with ckptool.open_checkpoint(folder) as opened:
        found = {name: tensor.torch() for name, tensor in opened.tensors.items()}
        assert dict(opened.extras)["epoch"] == 3
    expected = dict(flat(state()))
    assert set(found) == set(expected)
    assert all(found[name].dtype == one.dtype and torch.equal(found[name], one) for name, one in expected.items())
    report = ckptool.check(folder, deep=True)
    assert wrong(report) == ["CK158"]
    assert (report.parts, report.intact) == (1, 1)  # the epoch; the others have no checksums
    assert "no checksum for 5 items" in str(report)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_is_written_again_is_read_by_its_own_loader(tmp_path: Path) -> None:
    folder = as_safetensors(tmp_path / "saved")
    into = {"model": {name: torch.zeros_like(tensor) for name, tensor in state()["model"].items()}}
    with pytest.raises(dcp.api.CheckpointException):  # as the finding says
        dcp.load(into, checkpoint_id=str(folder), no_dist=True)
    migrate(folder, tmp_path / "again", form="dcp")
    dcp.load(into, checkpoint_id=str(tmp_path / "again"), no_dist=True)
    assert all(torch.equal(into["model"][name], tensor) for name, tensor in state()["model"].items())


def test_a_file_that_was_cut(tmp_path: Path) -> None:
    folder = as_safetensors(tmp_path / "saved")
    (file,) = folder.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-3])
    with ckptool.open_checkpoint(folder) as opened, pytest.raises(TruncatedFile, match=r"__0_0\.distcp.*truncated"):
        opened.tensors["model.a"].read()
    assert "CK143" in wrong(ckptool.check(folder, deep=True))


@pytest.mark.parametrize(("old", "new"), [(b'"model.b"', b'"model.c"'), (b"[0, 0]", b"[1, 0]")], ids=str)
def test_a_piece_that_is_another_is_not_taken(old: bytes, new: bytes, tmp_path: Path) -> None:
    folder = as_safetensors(tmp_path / "saved")
    (file,) = folder.glob("*.distcp")
    data = file.read_bytes()
    assert old in data
    file.write_bytes(data.replace(old, new))
    name = "model.b" if b"model" in old else "model.a"
    with ckptool.open_checkpoint(folder) as opened, pytest.raises(MalformedFile, match=r"__0_0\.distcp"):
        opened.tensors[name].read()
    assert "CK143" in wrong(ckptool.check(folder, deep=True))


def test_items_at_one_place_that_are_no_safetensors_overlap(tmp_path: Path) -> None:
    folder = as_safetensors(tmp_path / "saved")
    (file,) = folder.glob("*.distcp")
    data = file.read_bytes()
    at = data.index(b'{"__metadata__"')
    file.write_bytes(data[:at] + b"#" + data[at + 1 :])
    assert "CK146" in wrong(ckptool.check(folder))


@pytest.mark.filterwarnings("ignore")
def test_quantised_tensors_keep_their_scales(tmp_path: Path) -> None:
    channels = torch.quantize_per_channel(
        torch.randn(3, 4), torch.tensor([0.1, 0.2, 0.5]), torch.zeros(3), 0, torch.qint8
    )
    whole = {"q": torch.quantize_per_tensor(torch.randn(3, 4), 0.1, 2, torch.quint8), "c": channels, "b": torch.ones(3)}
    folder = save({"model": whole}, tmp_path / "saved")
    loaded = ckptool.load(folder)
    migrate(folder, tmp_path / "out.pt")
    for found in (loaded, torch.load(tmp_path / "out.pt")["model"]):
        assert set(found) == set(whole)
        for name, tensor in whole.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name].dequantize(), tensor.dequantize())
    report = ckptool.check(folder, deep=True)
    assert (wrong(report), report.intact) == ([], 3)
    (folder / "__0_0.distcp").unlink()
    with ckptool.open_checkpoint(folder) as opened, pytest.raises(FileUnavailable, match="is not whole"):
        opened.tensors["model.q"].read()
