"""Rarer things that torch itself writes: named for what they are, and never called damaged."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool import CkptoolError, MalformedFile, UnsupportedFeature, WeightsNotFound, open_checkpoint
from tests.against_torch.oracle import saved


def codes(origin: Any) -> set[str]:
    return {one.code for one in ckptool.check(origin).findings}


@pytest.fixture(scope="module")
def distributed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch.distributed.checkpoint as dcp

    folder = tmp_path_factory.mktemp("dcp")
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    dcp.save({"model": net.state_dict(), "step": 3}, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.filterwarnings("ignore")
def test_one_file_of_a_distributed_checkpoint(distributed: Path) -> None:
    with pytest.raises(CkptoolError) as caught:
        open_checkpoint(next(distributed.glob("*.distcp")))

    assert caught.value.kind == "distributed-checkpoint"
    assert caught.value.command == f"ckptool inspect {distributed}"


def test_files_of_torch_one_after_the_other_are_not_damaged() -> None:
    one, other = saved({"a": torch.zeros(3)}), saved({"b": torch.ones(3)})

    for data in (one + other, one * 5):
        with pytest.raises(UnsupportedFeature) as caught:
            open_checkpoint(data)
        assert caught.value.offset == len(data) - len(data) // (2 if data == one + other else 5)


def test_the_first_zips_of_torch_had_another_folder(tmp_path: Path) -> None:
    net = torch.nn.Linear(3, 2)
    with zipfile.ZipFile(io.BytesIO(saved(net.state_dict()))) as new, zipfile.ZipFile(tmp_path / "x.pt", "w") as old:
        for name in new.namelist():
            if name.endswith("data.pkl") or "/data/" in name:
                old.writestr(name.replace("/data/", "/tensors/"), new.read(name))
        old.writestr("archive/version", "1")

    loaded = ckptool.load(tmp_path / "x.pt")
    assert all(torch.equal(loaded[name], value) for name, value in net.state_dict().items())
    ckptool.migrate(tmp_path / "x.pt", tmp_path / "y.pt", form="same")
    assert torch.equal(torch.load(tmp_path / "y.pt")["weight"], net.weight)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scripted", [False, True])
def test_a_torch_package_is_named(scripted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.package import PackageExporter, package_exporter

    monkeypatch.setattr(package_exporter, "_gate_torchscript_serialization", False)
    net = torch.nn.Linear(3, 2)
    with PackageExporter(tmp_path / "x.pt") as exporter:
        exporter.extern("**")
        exporter.save_pickle("model", "model.pkl", torch.jit.script(net) if scripted else net)

    with pytest.raises(UnsupportedFeature, match=r"torch\.package") as caught:
        open_checkpoint(tmp_path / "x.pt")
    assert "PackageImporter" in (caught.value.hint or "")


def test_a_data_pkl_alone_says_what_is_missing() -> None:
    with zipfile.ZipFile(io.BytesIO(saved(torch.nn.Linear(3, 2).state_dict()))) as archive:
        data = archive.read("archive/data.pkl")

    with pytest.raises(MalformedFile) as caught:
        open_checkpoint(data)
    assert caught.value.kind == "bare-pickle"
    assert "2 storages" in caught.value.message


def script(module: torch.nn.Module, *, freeze: bool = False) -> bytes:
    scripted = torch.jit.script(module.eval())
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.freeze(scripted) if freeze else scripted, buffer)
    return buffer.getvalue()


@pytest.mark.filterwarnings("ignore")
def test_a_frozen_program_is_called_so() -> None:
    data = script(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU()), freeze=True)

    with open_checkpoint(data) as checkpoint:
        assert (checkpoint.form, list(checkpoint.attributes)) == ("model", ["constants.0", "constants.1"])
    assert "CK132" in codes(data)
    with pytest.raises(WeightsNotFound, match="frozen"):
        ckptool.load(data)
    assert "CK132" not in codes(script(torch.nn.Linear(3, 2)))


@pytest.mark.filterwarnings("ignore")
def test_items_of_getstate_are_no_names_of_a_model() -> None:
    from torch.ao.nn.quantized import Conv2d

    for module in (Conv2d(2, 3, 1), torch.nn.Sequential(Conv2d(2, 3, 1))):
        data = script(module)
        assert list(torch.jit.load(io.BytesIO(data)).state_dict()) == []
        with open_checkpoint(data) as checkpoint:
            assert (checkpoint.form, dict(checkpoint.tensors)) == ("model", {})
        assert "CK132" in codes(data)


@pytest.mark.filterwarnings("ignore")
def test_a_program_without_parameters_is_a_model() -> None:
    class Nothing(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    data = script(Nothing())

    assert open_checkpoint(data).form == "model"
    assert "CK132" not in codes(data)
