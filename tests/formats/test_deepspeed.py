"""Folders of DeepSpeed: what was partitioned comes out whole, and what is not whole is said."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool.errors import (
    AmbiguousWeights,
    DamagedFile,
    FileUnavailable,
    IncompleteWeights,
    MalformedFile,
)
from tests.each import each
from tests.formats.deepspeed_folder import Engine, save
from tests.formats.said import message, refused, said
from tests.scale import in_turn


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name], tensor), name


ENGINES = [
    *(Engine(1, 1), Engine(1, 3), Engine(2, 2), Engine(2, 8), Engine(3, 1), Engine(3, 2), Engine(3, 8)),
    Engine(1, 2, dtype=torch.bfloat16),
    Engine(2, 2, dtype=torch.bfloat16, aligned=4),
    Engine(2, 3, dtype=torch.float16, aligned=16),
    Engine(3, 3, dtype=torch.float16, sub_group=37),
    Engine(3, 2, sub_group=1000),
]


@pytest.mark.parametrize("engine", ENGINES, ids=lambda one: f"{one.stage}-{one.world}-{one.aligned}-{one.sub_group}")
def test_weights_are_the_masters_put_together(engine: Engine, tmp_path: Path) -> None:
    folder = engine.save(tmp_path / "run")
    assert_equal(ckptool.load(folder), engine.expected())
    with ckptool.open_checkpoint(folder) as checkpoint:
        assert checkpoint.format == "deepspeed"
        assert checkpoint.remarks == ()
        for name, moments in engine.moments.items():
            assert torch.equal(checkpoint.tensors[f"optimizer.state.{name}.exp_avg"].torch(), moments)
        assert dict(checkpoint.extras)["global_steps"] == 2
        assert dict(checkpoint.extras)["epoch"] == 1
    target = tmp_path / "out.safetensors"
    ckptool.migrate(folder, target)
    assert_equal(ckptool.load(target), engine.expected())


@pytest.mark.parametrize("stage", [1, 2])
def test_module_has_the_rounded_weights(stage: int, tmp_path: Path) -> None:
    engine = Engine(stage, 2, dtype=torch.bfloat16)
    folder = engine.save(tmp_path / "run")
    assert_equal(ckptool.load(folder, weights="module"), dict(engine.module()))
    ckptool.migrate(folder, tmp_path / "out.pth", weights="module")
    assert_equal(torch.load(tmp_path / "out.pth"), dict(engine.module()))


def test_stage_3_has_no_rounded_weights(tmp_path: Path) -> None:
    refused(
        Engine(3, 2).save(tmp_path / "run"),
        match="no weights of an engine of DeepSpeed",
        by=ckptool.load,
        weights="module",
    )


def test_stage_0_is_the_module(tmp_path: Path) -> None:
    engine = Engine(0, 2, dtype=torch.bfloat16)
    folder = engine.save(tmp_path / "run")
    assert_equal(ckptool.load(folder), dict(engine.module()))
    assert_equal(ckptool.load(folder, weights="module"), dict(engine.module()))


def test_ways_to_name_a_folder_lead_to_the_same(tmp_path: Path) -> None:
    engine = Engine(2, 2)
    folder = engine.save(tmp_path / "run")
    for path in (folder, folder / "latest", folder / "global_step2"):
        assert_equal(ckptool.load(path), engine.expected())


def test_a_checkpoint_may_be_called_latest(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "latest")
    assert list(ckptool.load(tmp_path / "latest")) == ["w"]


def test_ties_stay_ties(tmp_path: Path) -> None:
    loaded = ckptool.load(Engine(3, 2).save(tmp_path / "run"))
    assert loaded["head.weight"].data_ptr() == loaded["emb.weight"].data_ptr()


def test_a_torch_file_has_the_weights_alone_or_everything(tmp_path: Path) -> None:
    engine = Engine(2, 2, dtype=torch.bfloat16)
    folder = engine.save(tmp_path / "run")
    ckptool.migrate(folder, tmp_path / "out.pth")
    assert_equal(torch.load(tmp_path / "out.pth"), engine.expected())
    ckptool.migrate(folder, tmp_path / "all.pth", form="same")
    with ckptool.open_checkpoint(folder) as one, ckptool.open_checkpoint(tmp_path / "all.pth") as other:
        assert {name: tensor.read() for name, tensor in one.tensors.items()} == {
            name: tensor.read() for name, tensor in other.tensors.items()
        }
        assert dict(other.extras)["global_steps"] == 2


def test_everything_is_written_where_it_is_asked_for(tmp_path: Path) -> None:
    engine = Engine(2, 2)
    ckptool.migrate(engine.save(tmp_path / "run"), tmp_path / "out.safetensors", include=["up.*"])
    assert set(ckptool.load(tmp_path / "out.safetensors")) == {"up.weight", "up.bias"}


@pytest.mark.parametrize(
    ("stage", "target", "include"),
    [(2, "out.safetensors", ()), (3, "out.pth", ("emb.*",)), (3, "out.safetensors", ()), (2, "out.pth", ("emb.*",))],
)
def test_a_damaged_flat_buffer_is_not_written_on(
    stage: int, target: str, include: Sequence[str], tmp_path: Path
) -> None:
    engine = Engine(stage, 2)
    folder = engine.save(tmp_path / "run")
    path = folder / "global_step2/zero_pp_rank_1_mp_rank_00_optim_states.pt"
    data = bytearray(path.read_bytes())
    value = engine.flats(engine.masters)[1][0][-3:-2].numpy().tobytes()
    at = data.index(value)
    data[at] ^= 1
    path.write_bytes(data)
    for options in ({}, {"dtype": "bfloat16"}):
        with pytest.raises(DamagedFile):
            ckptool.migrate(folder, tmp_path / target, include=include, **options)
    refused(folder, DamagedFile, by=ckptool.load, verify=True)
    assert "CK105" in said(folder, deep=True)


# What is not whole.


def test_a_missing_rank_is_said_in_numbers(tmp_path: Path) -> None:
    folder = Engine(2, 3).save(tmp_path / "run")
    (folder / "global_step2/zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    caught = refused(folder, FileUnavailable, r"1 of 3 \*_optim_states.pt not there")
    assert (caught.needed, caught.actual, caught.kind) == (3, 2, "missing-shards")
    assert caught.hint
    assert "mp_rank_00_model_states.pt" in caught.hint


def test_stage_3_without_its_optimizer_is_refused(tmp_path: Path) -> None:
    folder = Engine(3, 2).save(tmp_path / "run")
    for path in folder.glob("*/*_optim_states.pt"):
        path.unlink()
    refused(folder, FileUnavailable, "2 of 2")


def test_without_an_optimizer_the_module_is_what_there_is(tmp_path: Path) -> None:
    engine = Engine(2, 2, dtype=torch.bfloat16)
    folder = engine.save(tmp_path / "run")
    for path in folder.glob("*/*_optim_states.pt"):
        path.unlink()
    refused(folder, IncompleteWeights, "rounded to bfloat16", by=ckptool.load)
    with pytest.raises(IncompleteWeights, match=r"no \*_optim_states.pt"):
        ckptool.migrate(folder, tmp_path / "a.safetensors")
    assert_equal(ckptool.load(folder, weights="module"), dict(engine.module()))
    assert_equal(ckptool.load(folder, allow_missing=True), dict(engine.module()))
    assert "CK159" in said(folder)


@pytest.mark.parametrize(
    ("stage", "dtype", "is_alone", "said"),
    [
        (1, torch.bfloat16, False, "with rounded weights"),
        (2, torch.float16, False, "with rounded weights"),
        (1, torch.float32, False, "one of 3 files of DeepSpeed:"),
        (0, torch.bfloat16, False, None),
        (2, torch.bfloat16, True, None),
        (1, torch.float32, True, None),
    ],
)
def test_the_states_of_the_model_alone_are_no_checkpoint(
    stage: int, dtype: torch.dtype, is_alone: bool, said: str | None, tmp_path: Path
) -> None:
    engine = Engine(stage, 2, dtype=dtype)
    path = engine.save(tmp_path / "run") / "global_step2/mp_rank_00_model_states.pt"
    for other in path.parent.glob("*_optim_states.pt") if is_alone else ():
        other.unlink()
    found = [one for one in ckptool.check(path).findings if one.code == "CK160"]
    assert [(said or "none") in one.message for one in found] == [True] * (said is not None)
    if said == "with rounded weights":
        refused(path, IncompleteWeights, said, by=ckptool.load)
        with pytest.raises(IncompleteWeights, match=said):
            ckptool.migrate(path, tmp_path / "a.safetensors")
    assert_equal(ckptool.load(path, allow_missing=True), dict(engine.module()))


@pytest.mark.parametrize("stage", [1, 2])
def test_without_an_optimizer_the_module_may_be_all(stage: int, tmp_path: Path) -> None:
    engine = Engine(stage, 2)
    folder = engine.save(tmp_path / "run")
    for path in folder.glob("*/*_optim_states.pt"):
        path.unlink()
    assert_equal(ckptool.load(folder), dict(engine.module()))
    found = said(folder)
    assert (found["CK166"], "CK159" in found) == ("warning", False)


@pytest.mark.parametrize("options", [{}, {"form": "state_dict"}, {"drop": ["optimizer"]}], ids=str)
def test_what_is_left_out_of_a_migration_is_listed(options: dict[str, Any], tmp_path: Path) -> None:
    folder = Engine(2, 2).save(tmp_path / "run")
    target = tmp_path / f"out.{'pth' if options else 'safetensors'}"
    with ckptool.open_checkpoint(folder) as found:
        paths = {*found.tensors, *(path for path, _ in found.extras if not path.endswith("_metadata"))}
        weights = set(found.weights or ())
    report = ckptool.migrate(folder, target, **options)
    assert set(report.dropped) == paths - weights
    assert len(report.dropped) == len(set(report.dropped))
    assert re.search(r"optimizer: \d+ entries", str(report))


def test_weights_under_no_key_are_left_out_in_one_line(tmp_path: Path) -> None:
    folder = Engine(2, 2).save(tmp_path / "run")
    report = ckptool.migrate(folder, tmp_path / "out.safetensors", weights="module")
    with ckptool.open_checkpoint(folder) as found:
        count = len(found.weights or ())
    assert f"  left out     the weights under no key: {count} entries\n" in str(report)


def test_files_of_a_larger_run_are_left_out_and_said(tmp_path: Path) -> None:
    Engine(2, 4).save(tmp_path / "run")
    engine = Engine(2, 2)
    folder = engine.save(tmp_path / "run")
    assert_equal(ckptool.load(folder), engine.expected())
    found = message(folder, "CK150")
    assert "2 files" in found
    assert "zero_pp_rank_2" in found


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    folder = Engine(2, 2).save(tmp_path / "run")
    (folder / "global_step2").rename(folder / "global_step4")
    caught = refused(folder, FileUnavailable, "names 'global_step2', and there is no such folder")
    assert caught.hint == "Name one that is there: global_step4"


@pytest.mark.parametrize("text", ["../../etc", "/etc", "a/b", "..", "global_step2\nother", "a\0b"])
def test_latest_cannot_lead_away(text: str, tmp_path: Path) -> None:
    folder = Engine(2, 1).save(tmp_path / "run")
    (folder / "latest").write_text(text)
    refused(folder)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    elsewhere = Engine(2, 1).save(tmp_path / "elsewhere")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "latest").write_text("global_step2")
    (folder / "global_step2").symlink_to(elsewhere / "global_step2")
    refused(folder, FileUnavailable, "link")


def saved_again(engine: Engine, folder: Path, rank: int = 1, *, inside: bool = True, **changes: object) -> Path:
    """Save what a rank has of the optimizer once more, with other fields."""
    states = engine.optim_states(rank)
    (states["optimizer_state_dict"] if inside else states).update(changes)
    save(states, folder / f"global_step2/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return folder


def model_again(engine: Engine, folder: Path, rank: int = 0, **changes: object) -> Path:
    """Save what a rank has of the model once more, with other fields."""
    head = f"zero_pp_rank_{rank}_" if engine.stage == 3 else ""
    save({**engine.model_states(rank), **changes}, folder / f"global_step2/{head}mp_rank_00_model_states.pt")
    return folder


def flats(*given: object) -> dict[str, object]:
    return {"single_partition_of_fp32_groups": [*given]}


def paddings(given: object) -> dict[str, object]:
    return {"rank": 0, "param_alignment_paddings": [[given, 0, 0], [0, 0]]}


OTHER_STEP = {"base_optimizer_state": {"state": {0: {"step": torch.tensor(7.0)}}}}
MIXED: list[tuple[int, Callable[..., Path], dict[str, object], str]] = [
    (2, saved_again, {"ds_version": "0.9.0", "inside": False}, "releases of DeepSpeed differ: 0.19.8 in .* 0.9.0 in"),
    (2, saved_again, {"partition_count": [3, 3]}, "numbers of partitions differ"),
    (2, saved_again, {"zero_stage": 1}, "stages of ZeRO differ"),
    (2, saved_again, OTHER_STEP, "steps of the optimizer differ: 2.0"),
    (2, saved_again, flats(torch.zeros(9)), "numbers of flat tensors differ: 2"),
    (2, saved_again, flats(torch.zeros(9), torch.zeros(3)), "needs 371 elements .* have 195"),
    (2, saved_again, flats(torch.zeros(9), torch.zeros(9), None), "is not a flat tensor"),
    (2, saved_again, flats(torch.zeros(3, 3), torch.zeros(3, 3)), "is not a flat tensor"),
    (2, saved_again, {"single_partition_of_fp32_groups": None}, "no single_partition_of_fp32_groups"),
    *(
        (2, saved_again, paddings(one), "param_alignment_paddings are not sizes|elements")
        for one in (-4, 1 << 62, 1.5, None)
    ),
    (2, model_again, {"dp_world_size": 4}, "4 data-parallel ranks, the optimizer is in 2 parts"),
    (3, model_again, {"rank": 1, "global_steps": 3}, r"steps differ: 2 in .* 3 in"),
]


@each(("stage", "again", "changes", "words"), MIXED)
def test_mixed_saves_are_refused(
    stage: int, again: Callable[..., Path], changes: dict[str, object], words: str, tmp_path: Path
) -> None:
    engine = Engine(stage, 2)
    folder = again(engine, engine.save(tmp_path / "run"), **changes)
    refused(folder, MalformedFile, words)


NO_SHAPES: list[tuple[object, str]] = [
    ([{"emb.weight": torch.Size((23, 11))}, {}], "elements"),
    ([{"emb.weight": torch.Size((1 << 62,))}, {}], "4,611,686,018,427,387,904 elements|elements"),
    ([{"emb.weight": torch.Size((1 << 31, 1 << 31, 1 << 31))}, {}], "no shape for 'emb.weight'"),
    ([{"emb.weight": (-1, 2)}, {}], "no shape for 'emb.weight'"),
    ([{"emb.weight": "x"}, {}], "no shape for 'emb.weight'"),
    ([{"a": torch.Size((1,))}, {"a": torch.Size((1,))}], "in two groups"),
    ([{3: torch.Size((1,))}], "not text"),
    ([], "elements|groups"),
    ("x", "elements|groups"),
]


@each(("given", "stage"), in_turn(NO_SHAPES, [2, 3]))
def test_shapes_that_do_not_fit(given: tuple[object, str], stage: int, tmp_path: Path) -> None:
    shapes, message = given
    engine = Engine(stage, 1)
    folder = model_again(engine, engine.save(tmp_path / "run"), param_shapes=shapes)
    refused(folder, MalformedFile, message)


def test_a_model_file_of_stage_3_that_is_missing_is_said(tmp_path: Path) -> None:
    engine = Engine(3, 2)
    folder = engine.save(tmp_path / "run")
    (folder / "global_step2/zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    with ckptool.open_checkpoint(folder) as checkpoint:
        assert "frozen.weight" not in checkpoint.tensors
        assert checkpoint.absent == ("frozen.weight",)
    assert {"CK152", "CK157"} <= said(folder).keys()
    with pytest.raises(IncompleteWeights, match=r"1 name of the model without a value in any file: frozen\.weight"):
        ckptool.migrate(folder, tmp_path / "out.safetensors")
    assert "up.bias" in ckptool.load(folder, allow_missing=True)


def test_state_of_the_optimizer_that_not_every_rank_has_is_left_out(tmp_path: Path) -> None:
    engine = Engine(2, 2)
    base = engine.optim_states(1)["optimizer_state_dict"]["base_optimizer_state"]
    del base["state"][0]["exp_avg"]
    folder = saved_again(engine, engine.save(tmp_path / "run"), 1, base_optimizer_state=base)
    assert_equal(ckptool.load(folder), engine.expected())
    assert "CK153" in said(folder)


def test_names_of_the_engine_and_of_the_client_do_not_clash(tmp_path: Path) -> None:
    engine = Engine(2, 1)
    engine.extra = {"optimizer_": 1, "module_": 2, "": 3}
    with ckptool.open_checkpoint(engine.save(tmp_path / "run")) as checkpoint:
        assert dict(checkpoint.extras)["_"] == 3
        assert_equal({name: one.torch() for name, one in (checkpoint.weights or {}).items()}, engine.expected())


# Several model-parallel ranks, pipelines.


def test_tensor_parallel_ranks_are_listed_and_not_merged(tmp_path: Path) -> None:
    folder = tmp_path / "run/global_step2"
    folder.mkdir(parents=True)
    (tmp_path / "run/latest").write_text("global_step2")
    for rank in range(2):
        states = {"module": {"up.weight": torch.full((2, 3), rank)}, "mp_world_size": 2, "dp_world_size": 1}
        save(states, folder / f"mp_rank_0{rank}_model_states.pt")
    with ckptool.open_checkpoint(tmp_path / "run") as checkpoint:
        assert list(checkpoint.tensors) == [f"mp_rank_0{rank}.module.up.weight" for rank in range(2)]
        assert checkpoint.weights is None
    with pytest.raises(AmbiguousWeights, match="2 model-parallel ranks, listed rank by rank") as caught:
        ckptool.migrate(tmp_path / "run", tmp_path / "out.safetensors")
    assert caught.value.candidates == ("mp_rank_00.module", "mp_rank_01.module")
    assert ckptool.load(tmp_path / "run", key="mp_rank_01.module")["up.weight"][0, 0] == 1
    assert "CK155" in said(tmp_path / "run")
    (folder / "mp_rank_01_model_states.pt").unlink()
    refused(tmp_path / "run", FileUnavailable, "1 of 2 files of model-parallel ranks not there")


def pipeline(folder: Path, layers: dict[int, dict[str, torch.Tensor]], rank: str = "") -> None:
    for number, state in layers.items():
        torch.save(state, folder / f"layer_{number:02}-{rank}model_states.pt")


def test_layers_of_a_pipeline_are_one_model(tmp_path: Path) -> None:
    layers = {0: {"weight": torch.ones(2, 3)}, 1: {}, 10: {"0.bias": torch.zeros(2)}}
    pipeline(tmp_path, layers | {number: {} for number in range(2, 10)})
    assert_equal(ckptool.load(tmp_path), {"0.weight": layers[0]["weight"], "10.0.bias": layers[10]["0.bias"]})
    (tmp_path / "layer_05-model_states.pt").unlink()
    refused(tmp_path, FileUnavailable, "1 of 11 layers not there: 5")


def stages_of_a_pipeline(folder: Path, world: int) -> dict[str, torch.Tensor]:
    """Save two stages of a pipeline, each with an optimizer of its own, and return the masters of all."""
    masters: dict[str, torch.Tensor] = {}
    for rank, shapes in enumerate([{"0.weight": (6, 5), "0.bias": (6,)}, {"2.weight": (3, 6)}]):
        stage = Engine(1, world, dtype=torch.bfloat16)
        stage.shapes, stage.tied, stage.frozen, stage.buffers = [dict(shapes)], {}, {}, {}
        stage.masters = {name: torch.randn(shape) for name, shape in shapes.items()}
        stage.moments = {name: 2 * one for name, one in stage.masters.items()}
        save(stage.model_states(0) | {"module": None}, folder / f"mp_rank_0{rank}_model_states.pt")
        for part in range(world):
            save(stage.optim_states(part), folder / f"zero_pp_rank_{part}_mp_rank_0{rank}_optim_states.pt")
        masters |= stage.masters
    layers: dict[int, dict[str, torch.Tensor]] = {0: {}, 1: {}, 2: {}}
    for name, one in masters.items():
        layers[int(name[0])][name[2:]] = one.bfloat16()
    layers[1]["mean"] = torch.ones(4)
    pipeline(folder, layers)
    return masters


@pytest.mark.parametrize("world", [1, 2])
def test_masters_of_all_stages_of_a_pipeline_are_one_model(world: int, tmp_path: Path) -> None:
    masters = stages_of_a_pipeline(tmp_path, world)
    assert_equal(ckptool.load(tmp_path), masters | {"1.mean": torch.ones(4)})
    rounded = {name: one.bfloat16() for name, one in masters.items()}
    assert_equal(ckptool.load(tmp_path, weights="module"), rounded | {"1.mean": torch.ones(4)})
    with ckptool.open_checkpoint(tmp_path) as checkpoint:
        for name, one in masters.items():
            assert torch.equal(checkpoint.tensors[f"optimizer.state.{name}.exp_avg"].torch(), 2 * one)
        assert dict(checkpoint.extras)["epoch"] == 1
    assert "CK151" not in said(tmp_path)


def test_a_layer_without_its_masters_is_said_to_be_rounded(tmp_path: Path) -> None:
    masters = stages_of_a_pipeline(tmp_path, 1)
    pipeline(tmp_path, {3: {"again.weight": masters["0.weight"].bfloat16()}})
    rounded = "1 tensor without a float32 master under its name: 3.again.weight"
    assert message(tmp_path, "CK151").startswith(rounded)
    (tmp_path / "zero_pp_rank_0_mp_rank_01_optim_states.pt").unlink()
    assert "CK159" in said(tmp_path)
    refused(tmp_path, IncompleteWeights, "without a float32 master", by=ckptool.load)


def test_layers_of_tensor_parallel_ranks_are_listed(tmp_path: Path) -> None:
    for rank in range(2):
        pipeline(tmp_path, {0: {"weight": torch.full((2, 3), rank)}}, f"model_0{rank}-")
    refused(tmp_path, AmbiguousWeights, "2 tensor-parallel ranks", by=ckptool.load)
    assert ckptool.load(tmp_path, key="model_01")["0.weight"][0, 0] == 1
    pipeline(tmp_path, {1: {"weight": torch.ones(1)}}, "model_00-")
    refused(tmp_path, FileUnavailable, "1 of 2 layers of tensor-parallel rank 1 not there: 1")


def test_the_last_layers_of_a_pipeline_are_missed_by_their_parameters(tmp_path: Path) -> None:
    pipeline(tmp_path, {0: {"weight": torch.ones(2, 3)}, 1: {"weight": torch.ones(3)}})
    shapes = [OrderedDict({"0.weight": torch.Size((2, 3)), "1.weight": torch.Size((3,)), "tied.w": torch.Size((1,))})]
    states = {"module": None, "param_shapes": shapes, "dp_world_size": 1, "mp_world_size": 1}
    torch.save(states, tmp_path / "mp_rank_00_model_states.pt")
    assert sorted(ckptool.load(tmp_path)) == ["0.weight", "1.weight"]
    (tmp_path / "layer_01-model_states.pt").unlink()
    refused(tmp_path, FileUnavailable, "1 of 2 layers of which the optimizer has parameters not there: 1")


def test_settings_of_another_run_are_told_of(tmp_path: Path) -> None:
    engine = Engine(2, 2)
    folder = engine.save(tmp_path / "run") / "global_step2"
    model, optim = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"

    def codes_with(settings: dict[str, Any]) -> dict[str, str]:
        save(engine.model_states(0) | {"ds_config": {"bf16": {"enabled": True}, "steps": 2}}, folder / model)
        save(engine.optim_states(0) | {"ds_config": settings}, folder / optim)
        return {one.code: one.message for one in ckptool.check(folder).findings}

    assert "CK148" not in codes_with({"bf16": {"enabled": True}, "steps": 2})
    found = codes_with({"bf16": {"enabled": False}, "steps": 2})["CK148"]
    assert found == f"settings of the engine differ between {model!r} and {optim!r}: bf16.enabled"


@pytest.mark.parametrize("stage", [1, 2])
def test_files_that_changed_their_names_are_refused(stage: int, tmp_path: Path) -> None:
    engine = Engine(stage, 2)
    folder = engine.save(tmp_path) / "global_step2"
    first, second = (folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1))
    assert ckptool.check(tmp_path).error is None
    first.rename(tmp_path / "kept")
    second.rename(first)
    (tmp_path / "kept").rename(second)
    assert "holds the parameters of rank 1, not of rank 0" in refused(tmp_path).message


def test_parameters_that_lie_elsewhere_than_a_rank_says_are_told_of(tmp_path: Path) -> None:
    engine = Engine(2, 2)
    states = engine.optim_states(0)
    states["optimizer_state_dict"]["param_slice_mappings"][0]["another"] = (1, 0)
    save(states, engine.save(tmp_path) / "global_step2" / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    assert "CK148" in said(tmp_path)


def test_layers_of_other_shapes_than_the_optimizer_has_are_refused(tmp_path: Path) -> None:
    stages_of_a_pipeline(tmp_path, 1)
    assert ckptool.check(tmp_path).error is None
    layers = sorted(tmp_path.rglob("layer_*"))
    kept = layers[0].read_bytes()
    layers[0].write_bytes(layers[1].read_bytes())
    layers[1].write_bytes(kept)
    assert "by param_shapes" in refused(tmp_path).message


def test_a_stage_without_a_file_of_the_engine_is_named(tmp_path: Path) -> None:
    stages_of_a_pipeline(tmp_path, 1)
    next(tmp_path.rglob("mp_rank_00_model_states.pt")).unlink()
    assert "CK153" in said(tmp_path)


# Experts


def mixture(folder: Path, **more: Any) -> dict[str, torch.Tensor]:
    """Save a model with two layers of experts, of 2 and of 3, as DeepSpeed does; return its whole state dict."""
    folder.mkdir(exist_ok=True)
    found = {"emb.weight": torch.randn(4, 3)}
    save({"module": dict(found), "num_experts": [2, 3], "epoch": 1, **more}, folder / "mp_rank_00_model_states.pt")
    for layer, count in enumerate((2, 3)):
        for expert in range(count):
            head = f"blocks.{layer}.moe.deepspeed_moe.experts.deepspeed_experts.{expert}"
            own = {f"{head}.fc.weight": torch.randn(2, 3), f"{head}.fc.bias": torch.randn(2)}
            save(own, folder / f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt")
            found |= own
    return found


def test_experts_are_put_back_into_their_model(tmp_path: Path) -> None:
    expected = mixture(tmp_path / "saved")
    assert_equal(ckptool.load(tmp_path / "saved"), expected)
    with ckptool.open_checkpoint(tmp_path / "saved") as checkpoint:
        assert dict(checkpoint.extras)["epoch"] == 1
        assert checkpoint.weights is not None
        assert checkpoint.weights.key == "module"
    ckptool.migrate(tmp_path / "saved", tmp_path / "one.safetensors")
    assert ckptool.diff(tmp_path / "saved", tmp_path / "one.safetensors").same


def test_experts_that_are_not_there_or_not_their_own_are_refused(tmp_path: Path) -> None:
    mixture(tmp_path)
    first, second = (tmp_path / f"layer_1_expert_{number}_mp_rank_00_model_states.pt" for number in (1, 2))
    kept = second.read_bytes()
    second.unlink()
    refused(tmp_path, FileUnavailable, "1 of 5 files of experts not there: expert 2 of layer 1")
    second.write_bytes(first.read_bytes())
    refused(tmp_path, MalformedFile, "which is not of its expert")
    second.write_bytes(kept)
    assert ckptool.check(tmp_path).error is None


def test_experts_whose_names_say_nothing_are_listed_file_by_file(tmp_path: Path) -> None:
    mixture(tmp_path, ds_autoep_layers=[{"moe_layer_id": 0}])
    refused(tmp_path, AmbiguousWeights, "5 files of experts", by=ckptool.load)
    assert "CK155" in said(tmp_path)


@pytest.mark.parametrize("form", ["same", "dcp"])
def test_masters_are_the_weights_of_what_was_written_of_everything(form: str, tmp_path: Path) -> None:
    engine = Engine(2, 2, dtype=torch.bfloat16)
    target = tmp_path / ("all.pt" if form == "same" else "all")
    ckptool.migrate(engine.save(tmp_path / "saved"), target, form=form)
    assert_equal(ckptool.load(target), engine.expected())


def test_an_optimizer_without_flat_tensors_is_refused_where_there_are_parameters(tmp_path: Path) -> None:
    engine = Engine(3, 1)
    folder = model_again(engine, engine.save(tmp_path / "run"), param_shapes=[OrderedDict({"a": torch.Size((0,))})])
    states = engine.optim_states(0)
    states["optimizer_state_dict"]["fp32_flat_groups"] = []
    states["optimizer_state_dict"]["optimizer_state_dict"]["state"] = {}
    save(states, next(folder.rglob("*_optim_states.pt")))
    assert "no flat tensor" in refused(folder).message
