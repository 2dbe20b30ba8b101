"""Casting and building: what ``--dtype`` and ``--model`` promise, held against torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

import ckptool
from ckptool import MigrationRefused
from ckptool.cli import cli

LENET = Path(__file__).parents[2] / "fixtures" / "valid" / "lenet-state-dict-data-parallel-forged-cuda0-zip.pth"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(40, 30, generator=generator)
    tensors = {
        "weight": base,
        "tied": base,
        "transposed": base.t(),
        "norm": torch.randn(7, generator=generator),
        "steps": torch.arange(5),
        "odd": torch.tensor([float("nan"), float("inf"), 0.0, -0.0]),
    }
    torch.save(tensors, tmp_path / "saved.pth")
    return tmp_path / "saved.pth"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_values_are_what_torch_casts_them_to(saved: Path, dtype: str, suffix: str) -> None:
    target = saved.with_name(f"cast.{suffix}")
    report = ckptool.migrate(saved, target, dtype=dtype, form="state_dict" if suffix == "pth" else "safetensors")
    found = torch.load(target) if suffix == "pth" else load_file(target)
    wanted = torch.load(saved)

    for name, tensor in found.items():
        expected = wanted[name].to(getattr(torch, dtype)) if wanted[name].is_floating_point() else wanted[name]
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor.nan_to_num(7), expected.nan_to_num(7)), name
    assert {cast.name for cast in report.casts} >= {"weight", "norm"}


def test_the_error_of_a_cast_is_measured(saved: Path) -> None:
    report = ckptool.migrate(saved, saved.with_name("cast.pth"), dtype="float16", form="state_dict")
    weight = torch.load(saved)["weight"].double()

    (cast,) = [cast for cast in report.casts if cast.name == "weight"]
    assert cast.max_error == float((weight.half().double() - weight).abs().max())


def test_tied_tensors_stay_tied_when_they_are_cast(saved: Path) -> None:
    ckptool.migrate(saved, saved.with_name("cast.pth"), dtype="float16", form="state_dict")
    found = torch.load(saved.with_name("cast.pth"))

    assert found["weight"].data_ptr() == found["tied"].data_ptr()


def test_a_conjugate_view_is_not_taken_for_what_it_views(tmp_path: Path) -> None:
    z = torch.complex(torch.arange(4.0), torch.arange(4.0) + 1)
    torch.save({"a": z.imag, "b": z.conj().imag}, tmp_path / "z.pth")
    ckptool.migrate(tmp_path / "z.pth", tmp_path / "cast.pth", dtype="float16", form="state_dict")
    found = torch.load(tmp_path / "cast.pth")

    assert torch.equal(found["a"], z.imag.half())
    assert torch.equal(found["b"], z.conj().imag.half())


def test_names_can_keep_their_type(saved: Path) -> None:
    ckptool.migrate(saved, saved.with_name("cast.pth"), dtype="bfloat16", keep_dtype=["^norm"], form="state_dict")
    found = torch.load(saved.with_name("cast.pth"))

    assert (found["norm"].dtype, found["weight"].dtype) == (torch.float32, torch.bfloat16)


def test_overflow_is_refused_unless_it_is_to_saturate(tmp_path: Path) -> None:
    torch.save({"w": torch.tensor([1e30, -1e30, 1.0])}, tmp_path / "w.pth")
    with pytest.raises(MigrationRefused) as raised:
        ckptool.migrate(tmp_path / "w.pth", tmp_path / "half.pth", dtype="float16", form="state_dict")
    assert raised.value.kind == "overflow"
    assert not (tmp_path / "half.pth").exists()

    report = ckptool.migrate(
        tmp_path / "w.pth", tmp_path / "half.pth", dtype="float16", form="state_dict", saturate=True
    )
    assert report.casts[0].overflowed == 2
    assert torch.load(tmp_path / "half.pth")["w"].tolist() == [65504.0, -65504.0, 1.0]


def run(*arguments: object, code: int = 0) -> dict[str, object]:
    result = CliRunner().invoke(cli, ["migrate", "--json", *map(str, arguments)])
    assert result.exit_code == code, result.output
    found: dict[str, object] = json.loads(result.stdout)
    return found


def test_a_model_is_built_from_a_state_dict(tmp_path: Path) -> None:
    from ckptool.reference.nets import LeNet

    target = tmp_path / "model.pth"
    report = run(LENET, target, "--strip-module", "--model", "ckptool.reference.nets:LeNet")
    model = torch.load(target, weights_only=False)

    assert report["form"] == "model"
    assert isinstance(model, LeNet)
    wanted = torch.load(LENET, map_location="cpu")
    assert all(torch.equal(tensor, wanted[f"module.{name}"]) for name, tensor in model.state_dict().items())


def test_a_model_that_does_not_fit_is_refused_with_its_keys(tmp_path: Path) -> None:
    report = run(LENET, tmp_path / "model.pth", "--model", "ckptool.reference.nets:LeNet", code=1)

    assert report["error"]["kind"] == "key-mismatch"  # type: ignore[index]
    assert "conv1.weight" in report["error"]["message"]  # type: ignore[index]
    assert list(tmp_path.iterdir()) == []


def test_one_failure_does_not_stop_the_others(tmp_path: Path) -> None:
    (tmp_path / "bad.pth").write_bytes(b"")
    result = CliRunner().invoke(
        cli,
        [
            "migrate",
            "--json",
            "--to",
            "cpu",
            "--out-dir",
            str(tmp_path / "out"),
            "--jobs",
            "2",
            str(tmp_path / "bad.pth"),
            str(LENET),
        ],
    )

    assert result.exit_code == 2
    assert [("error" in found) for found in json.loads(result.stdout)] == [True, False]
    assert torch.load(tmp_path / "out" / LENET.name)["module.conv1.bias"].device.type == "cpu"


@pytest.mark.parametrize("spec", ["no.such.module:Net", "ckptool.reference.nets:Nothing", "ckptool.reference.nets"])
def test_a_class_that_cannot_be_built_is_refused(spec: str, tmp_path: Path) -> None:
    report = run(LENET, tmp_path / "model.pth", "--model", spec, code=1)

    assert report["error"]["kind"] == "model-not-built"  # type: ignore[index]
