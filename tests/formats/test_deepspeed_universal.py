"""Universal checkpoints of DeepSpeed: a folder for each parameter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptool
from ckptool.errors import FileUnavailable, MalformedFile
from tests.formats.deepspeed_folder import Engine, save
from tests.formats.said import refused
from tests.formats.test_deepspeed import assert_equal


def universal(engine: Engine, folder: Path) -> Path:
    """Convert what an engine would save, as ds_to_universal.py does."""
    inside = folder / "global_step2_universal"
    for name, master in engine.masters.items():
        own = inside / "zero" / name
        own.mkdir(parents=True)
        for file, value in {"fp32": master, "exp_avg": engine.moments[name]}.items():
            padded = torch.nn.functional.pad(value.flatten(), (0, 5))
            torch.save(padded if engine.stage == 3 else {"param": value, "cat_dim": 0}, own / f"{file}.pt")
        if engine.stage < 3:
            torch.save(torch.tensor(2.0), own / "step.pt")
    torch.save({"param_groups": [{"lr": 0.1}], "clip_grad": 1.0}, inside / "zero/optimizer_state.pt")
    head = "zero_pp_rank_0_" if engine.stage == 3 else ""
    save(engine.model_states(0), inside / f"{head}mp_rank_00_model_states.pt")
    (folder / "latest_universal").write_text(inside.name)
    return folder


@pytest.mark.parametrize("stage", [1, 2])
def test_parameters_buffers_and_ties_are_one_model(stage: int, tmp_path: Path) -> None:
    engine = Engine(stage, 2, dtype=torch.float32)
    folder = universal(engine, tmp_path / "run")
    for path in (folder, folder / "latest_universal", folder / "global_step2_universal"):
        assert_equal(ckptool.load(path), engine.expected())
    with ckptool.open_checkpoint(folder) as checkpoint:
        assert checkpoint.format == "deepspeed_universal"
        for name, moments in engine.moments.items():
            assert torch.equal(checkpoint.tensors[f"optimizer.state.{name}.exp_avg"].torch(), moments)
    ckptool.migrate(folder, tmp_path / "out.safetensors")
    assert_equal(ckptool.load(tmp_path / "out.safetensors"), engine.expected())


def test_buffers_that_were_converted_keep_their_type(tmp_path: Path) -> None:
    """DeepSpeed 0.19 makes a folder for each buffer, too, and float32 of it."""
    engine = Engine(1, 2, dtype=torch.float32)
    folder = universal(engine, tmp_path / "run")
    for name, buffer in engine.buffers.items():
        own = folder / "global_step2_universal/zero" / name
        own.mkdir()
        torch.save({"param": buffer.float()}, own / "fp32.pt")
    assert_equal(ckptool.load(folder), engine.expected())


def test_stage_3_is_flat_and_padded(tmp_path: Path) -> None:
    engine = Engine(3, 2)
    loaded = ckptool.load(universal(engine, tmp_path), allow_missing=True)
    wanted = {name: one for name, one in engine.expected().items() if name not in engine.frozen}
    assert_equal(loaded, wanted)
    with ckptool.open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.absent == tuple(engine.frozen)


def test_a_parameter_without_its_file(tmp_path: Path) -> None:
    folder = universal(Engine(2, 1), tmp_path)
    (folder / "global_step2_universal/zero/up.bias/fp32.pt").unlink()
    refused(folder, FileUnavailable, r"fp32\.pt")


def test_files_that_are_no_parameters(tmp_path: Path) -> None:
    folder = universal(Engine(3, 1), tmp_path)
    place = folder / "global_step2_universal/zero/emb.weight/fp32.pt"
    torch.save(torch.ones(7), place)
    refused(folder, MalformedFile, "has 7 elements, its parameter 230")
    torch.save({"param": 3}, place)
    refused(folder, MalformedFile, "holds no tensor")
    place.write_bytes(b"what")
    refused(folder, match=r"fp32\.pt")
