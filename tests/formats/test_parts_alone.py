"""Parts that make no sense alone, adapters without weights, and indexes of another save: what they lack is said."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ckptool
from ckptool import FileUnavailable, IncompleteWeights
from tests.formats.said import refused, run, said
from tests.scale import in_turn

Tensors = dict[str, torch.Tensor]


def run_hint(path: Path, code: str) -> str:
    """Run the command of a finding, and return what was printed."""
    (finding,) = [one for one in ckptool.check(path).findings if one.code == code]
    assert finding.command is not None
    done = run(*shlex.split(finding.command)[1:])
    assert done.exit_code == 0, done.output
    return done.output


def lora(*modules: str, rank: int = 2) -> Tensors:
    return {
        f"base_model.model.layers.{layer}.{module}.lora_{part}.weight": torch.ones(rank, 4)
        for layer in range(2)
        for module in modules
        for part in "AB"
    }


def write_adapter(folder: Path, tensors: Tensors, name: str = "adapter_model.safetensors", **settings: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, **settings}))
    if name.endswith(".safetensors"):
        save_file(tensors, folder / name, metadata={"format": "pt"})
    else:
        torch.save(tensors, folder / name)
    return folder / name


@pytest.mark.parametrize(
    ("name", "tensors", "settings"),
    [
        ("adapter_model.safetensors", {}, {"target_modules": ["q_proj", "v_proj"]}),
        ("adapter_model.safetensors", {}, {"target_modules": "all-linear"}),
        ("adapter_model.bin", {}, {"peft_type": "PROMPT_TUNING"}),
        ("adapter_model.bin", lora("lm_head"), {"target_modules": ["q_proj", "v_proj"]}),
    ],
)
def test_an_adapter_without_weights_is_not_fine(
    name: str, tensors: Tensors, settings: dict[str, object], tmp_path: Path
) -> None:
    file = write_adapter(tmp_path / "a", tensors, name, **settings)

    for path in (file, file.parent):
        (found,) = [one for one in ckptool.check(path).findings if one.code == "CK122"]
        assert found.severity == "warning"
        assert "ZeRO-3" in str(found.hint)


def test_stubs_of_an_adapter_are_not_fine(tmp_path: Path) -> None:
    stubs = {name: torch.empty(0) for name in lora("q_proj")}
    file = write_adapter(tmp_path, stubs, target_modules=["q_proj"])

    for path in (file, tmp_path):
        assert said(path)["CK121"] == "warning"


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "odd_proj"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["odd_proj"]},
        {"target_modules": r".*q_proj", "modules_to_save": ["q_proj", "odd_proj"]},
    ],
)
def test_a_module_that_the_base_may_not_have_is_told_of(
    settings: dict[str, object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_adapter(tmp_path, lora("q_proj"), **settings)
    noted = "no tensor of the adapter is of odd_proj, and"

    for path in (file, tmp_path):
        assert said(path)["CK123"] == "info"
        assert run("check", path).exit_code == 0
        assert noted in " ".join(ckptool.migrate(path, tmp_path.parent / "a.pth", force=True).notes)
        caplog.clear()
        assert len(ckptool.load(path)) == 4
        assert noted in caplog.text


MAGNITUDES = {f"base_model.model.layers.{one}.q_proj.lora_magnitude_vector": torch.ones(4) for one in range(2)}


@pytest.mark.parametrize(
    ("tensors", "settings", "fact"),
    [
        (lora("q_proj", rank=4) | lora("k_proj"), {}, "rank 4 of 'base_model.model.layers.0.q_proj', where it says 2"),
        (
            lora("q_proj"),
            {"rank_pattern": {"1.q_proj": 8}},
            "rank 2 of 'base_model.model.layers.1.q_proj', where it says 8",
        ),
        (lora("q_proj", rank=8), {"rank_pattern": {"proj": 8}}, "rank 8 of"),
        (lora("q_proj"), {"use_dora": True}, "no tensor is a magnitude"),
        (lora("q_proj") | MAGNITUDES, {}, "2 tensors are magnitudes of DoRA"),
        (lora("q_proj"), {"layers_to_transform": [0, 1, 2, 3]}, "no tensor is of the layers 2, 3, which"),
        (lora("q_proj"), {"layers_to_transform": 5}, "no tensor is of the layers 5, which"),
    ],
)
def test_an_adapter_that_is_not_what_its_settings_say_is_told_of(
    tensors: Tensors, settings: dict[str, object], fact: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_adapter(tmp_path, tensors, **settings)

    for path in (file, tmp_path):
        assert said(path)["CK127"] == "warning"
        ckptool.load(path)
        assert fact in caplog.text
        caplog.clear()


@pytest.mark.parametrize(
    ("tensors", "settings"),
    [
        (lora("q_proj") | lora("k_proj", rank=4), {"rank_pattern": {"k_proj": 4}}),
        (lora("q_proj") | lora("k_proj", rank=4), {"rank_pattern": {"layers.0.k_proj": 4, "k_proj": 4}}),
        (lora("q_proj", rank=8), {"rank_pattern": {"q.*": 8}}),
        (lora("q_proj", rank=8), {"target_parameters": ["experts.up"]}),
        (lora("q_proj") | MAGNITUDES, {"use_dora": True}),
        (lora("q_proj"), {"layers_to_transform": [0, 1]}),
        (lora("q_proj"), {"layers_to_transform": None}),
        (lora("q_proj"), {"r": "2"}),
        (lora("q_proj", "v_proj"), {"target_modules": ["q_proj", "v_proj"]}),
        (lora("self_attn.q_proj"), {"target_modules": ["self_attn.q_proj"]}),
        (lora("q_proj"), {"target_modules": r".*\.(q|k)_proj"}),
        (lora("q_proj"), {"target_modules": [r".*_proj$"]}),
        (lora("q_proj"), {"target_modules": None}),
        (lora("q_proj", "lm_head"), {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
        (lora("q_proj", "score"), {"target_modules": ["q_proj"], "modules_to_save": ["classifier", "score"]}),
        (lora("q_proj"), {"target_modules": {"odd": 1}, "peft_type": 7}),
        ({"prompt_embeddings": torch.ones(3)}, {"peft_type": "PROMPT_TUNING"}),
    ],
)
def test_a_whole_adapter_is_fine(tensors: Tensors, settings: dict[str, object], tmp_path: Path) -> None:
    file = write_adapter(tmp_path, tensors, **settings)

    for path in (file, tmp_path):
        assert not {"CK121", "CK122", "CK123", "CK127"} & said(path).keys()
        assert run("check", path).exit_code == 0


@pytest.mark.parametrize(
    ("name", "left", "code"),
    [
        ("adapter_model.safetensors", ".lora_A.", "CK122"),
        ("adapter_model.bin", ".lora_B.", "CK122"),
        ("adapter_model.safetensors", "0.q_proj", "CK123"),
    ],
)
def test_half_a_lora_is_not_fine(name: str, left: str, code: str, tmp_path: Path) -> None:
    whole = lora("q_proj", "v_proj")
    some = {key: one for key, one in whole.items() if left in key or (code == "CK123" and "lora_A" in key)}
    file = write_adapter(tmp_path, some, name, target_modules=["q_proj", "v_proj"])

    for path in (file, tmp_path):
        assert said(path)[code] == "warning"
        assert run("check", path).exit_code == 1
        assert run("migrate", path, tmp_path / "a.pth", "--form", "state_dict", "--force").exit_code == (
            code == "CK122"
        )


HALVES = {
    "peft": {"model.q_proj.lora_A.weight": (4, 8)},
    "peft of an embedding": {"model.emb.lora_embedding_B": (8, 4), "model.emb.lora_embedding_B.default": (8, 4)},
    "kohya": {"lora_unet_mid_proj.lora_down.weight": (4, 8), "lora_unet_mid_proj.alpha": ()},
    "diffusers": {"unet.mid.attn.to_q.lora.up.weight": (8, 4)},
    "in training": {"w": (8, 8), "h.0.lora_A.default.weight": (4, 8)},
    "stubs of the other": {"h.0.lora_A.weight": (4, 8), "h.0.lora_B.weight": (0,)},
}


@pytest.mark.parametrize(("name", "suffix"), in_turn(HALVES, ["safetensors", "pt"]))
def test_halves_of_an_adapter_are_none_whatever_the_file_is_called(name: str, suffix: str, tmp_path: Path) -> None:
    tensors = {key: torch.randn(shape) for key, shape in HALVES[name].items()}
    path = tmp_path / f"style.{suffix}"
    save_file(tensors, path) if suffix == "safetensors" else torch.save(tensors, path)

    assert said(path)["CK122"] == "warning"
    for call in (lambda: ckptool.load(path), lambda: ckptool.migrate(path, tmp_path / "a.pth", form="state_dict")):
        with pytest.raises(IncompleteWeights, match="without the other half"):
            call()
    assert ckptool.load(path, allow_missing=True).keys() == tensors.keys()
    ckptool.migrate(path, tmp_path / "b.pth", form="state_dict", allow_missing=True)


SOME_LACK = {
    "LoRA": (["lora_A.weight", "lora_B.weight"], "lora_B.weight"),
    "kohya's": (["lora_down.weight", "lora_up.weight", "alpha"], "lora_down.weight"),
    "LoKr": (["lokr_w1", "lokr_w2_a", "lokr_w2_b", "lokr_t2"], "lokr_w1"),
    "half of a factor of LoKr": (["lokr_w1", "lokr_w2_a", "lokr_w2_b"], "lokr_w2_b"),
    "LoHa": (["hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"], "hada_w2_a"),
    "DoRA": (["lora_A.weight", "lora_B.weight", "lora_magnitude_vector"], "lora_magnitude_vector"),
    "DoRA in training": (
        ["lora_A.default.weight", "lora_B.default.weight", "lora_magnitude_vector.default.weight"],
        "lora_magnitude_vector.default.weight",
    ),
    "kohya's DoRA": (["lora_down.weight", "lora_up.weight", "dora_scale"], "dora_scale"),
}


@pytest.mark.parametrize("kind", SOME_LACK)
def test_an_adapter_some_of_whose_products_lack_a_part_is_told_of(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parts, lacking = SOME_LACK[kind]
    whole = {f"lora_unet_{layer}.{part}": torch.randn(4, 4) for layer in "abc" for part in parts}
    some = {name: one for name, one in whole.items() if name != f"lora_unet_b.{lacking}"}
    for name, tensors, is_whole in (("whole", whole, True), ("some", some, False)):
        path = tmp_path / f"{name}.safetensors"
        save_file(tensors, path)
        caplog.clear()
        report = ckptool.migrate(path, tmp_path / f"{name}.pth", form="state_dict")

        assert ckptool.load(path).keys() == tensors.keys()
        assert ("lora_unet_b." in caplog.text) is not is_whole
        assert ("lora_unet_b." in " ".join(report.notes)) is not is_whole
        assert said(path).get("CK123") == (None if is_whole else "warning")
    noted = ckptool.migrate(path, tmp_path / "left.pth", form="state_dict", exclude=["lora_unet_b.*"]).notes
    assert "lora_unet_b." not in " ".join(noted)


def test_scan_finds_half_an_adapter(tmp_path: Path) -> None:
    save_file({"h.0.lora_A.weight": torch.randn(4, 8)}, tmp_path / "style.safetensors")

    assert run("check", tmp_path / "style.safetensors").exit_code == 1
    assert "CK122" in json.loads(run("scan", tmp_path / "style.safetensors").stdout)["findings"]


@pytest.mark.parametrize("halves", [("lora_A", "lora_B"), ("lora_down", "lora_up"), ("lora.down", "lora.up")])
def test_both_halves_are_an_adapter(halves: tuple[str, str], tmp_path: Path) -> None:
    whole = {f"h.{layer}.{half}.weight": torch.randn(4, 4) for layer in range(2) for half in halves}
    save_file(whole | {"h.0.explora_A.weight": torch.ones(2)}, tmp_path / "style.safetensors")

    assert not {"CK122", "CK123"} & said(tmp_path / "style.safetensors").keys()
    assert len(ckptool.load(tmp_path / "style.safetensors")) == 5


@pytest.mark.parametrize("suffix", ["aria2", "part", "crdownload", "incomplete", "tmp"])
def test_downloads_that_were_not_finished_are_told_of(suffix: str, tmp_path: Path) -> None:
    write_set(tmp_path / "a", 1)
    write_set(tmp_path / "b", 2)
    for place, name in (("a", "model-00001-of-00001.safetensors"), ("b", "model-00002-of-00002.safetensors")):
        (tmp_path / place / f"{name}.{suffix}").write_bytes(b"x")
        assert said(tmp_path / place)["CK163"] == "warning"
        assert run("check", tmp_path / place).exit_code == 1
    write_set(tmp_path / "c", 2)
    (tmp_path / "c/notes.part").write_bytes(b"x")
    (tmp_path / "c/readme.md.tmp").write_bytes(b"x")
    assert "CK163" not in said(tmp_path / "c")


def test_what_is_no_adapter_is_not_compared_with_its_settings(tmp_path: Path) -> None:
    write_adapter(tmp_path, lora("q_proj"), target_modules=["q_proj"])
    save_file({}, tmp_path / "empty.safetensors")
    save_file({}, tmp_path.parent / "adapter_model.safetensors")

    assert "CK122" not in said(tmp_path / "empty.safetensors")
    assert "CK122" not in said(tmp_path.parent / "adapter_model.safetensors")


def write_set(folder: Path, count: int, name: str = "model-{:05}-of-{:05}.safetensors") -> Tensors:
    folder.mkdir(parents=True, exist_ok=True)
    whole = {f"l.{index}.w": torch.full((4,), float(index)) for index in range(count)}
    for index, (key, tensor) in enumerate(whole.items()):
        path = folder / name.format(index + 1, count)
        save_file({key: tensor}, path) if path.suffix == ".safetensors" else torch.save({key: tensor}, path)
    return whole


def write_index(folder: Path, count: int, name: str = "model.safetensors") -> Path:
    stem, suffix = name.rsplit(".", 1)
    shard_of = {f"l.{index}.w": f"{stem}-{index + 1:05}-of-{count:05}.{suffix}" for index in range(count)}
    path = folder / f"{name}.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 16 * count}, "weight_map": shard_of}))
    return path


@pytest.mark.parametrize(
    ("shard", "index"),
    [
        ("model-{:05}-of-{:05}.safetensors", "model.safetensors"),
        ("pytorch_model-{:05}-of-{:05}.bin", "pytorch_model.bin"),
        ("diffusion_pytorch_model-{:05}-of-{:05}.safetensors", "diffusion_pytorch_model.safetensors"),
    ],
)
def test_a_complete_set_beside_an_index_of_another_is_opened(shard: str, index: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    whole = write_set(folder, 3, shard)
    path = write_index(folder, 5, index)

    loaded = ckptool.load(folder)

    assert loaded.keys() == whole.keys()
    assert said(folder)["CK162"] == "warning"
    assert "CK168" not in said(folder)
    done = run("migrate", folder, tmp_path / "whole.safetensors")
    assert done.exit_code == 0
    assert "none of which is here" in done.output
    caught = refused(path, FileUnavailable, "the complete set of 3 shards that is there is of another save")
    assert caught.command is not None
    assert run(*shlex.split(caught.command)[1:]).exit_code == 0
    assert "Run: ckptool inspect" in run("inspect", path).output


@pytest.mark.parametrize("case", ["another is not complete", "two sets", "one of its own", "no other"])
def test_no_set_is_guessed(case: str, tmp_path: Path) -> None:
    path = write_index(tmp_path, 4)
    if case != "no other":
        write_set(tmp_path, 2)
    if case == "another is not complete":
        (tmp_path / "model-00001-of-00002.safetensors").unlink()
    elif case == "two sets":
        write_set(tmp_path, 3)
    elif case == "one of its own":
        save_file({"l.0.w": torch.ones(4)}, tmp_path / "model-00001-of-00004.safetensors")

    for place in (tmp_path, path):
        assert "another save" not in refused(place, FileUnavailable, "of 4 shards not there").message


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_is_kept_beside_pieces_points_to_the_folder(tmp_path: Path) -> None:
    dcp.save({"decoder.w": torch.ones(4)}, checkpoint_id=tmp_path / "iter_10", no_dist=True)
    torch.save({"args": argparse.Namespace(), "iteration": 10}, tmp_path / "iter_10/common.pt")
    torch.save({"epoch": 1, "pytorch-lightning_version": "2.6"}, tmp_path / "iter_10/meta.pt")
    torch.save({"iteration": 10}, tmp_path / "common.pt")

    for name in ("common.pt", "meta.pt", "__0_0.distcp"):
        assert said(tmp_path / "iter_10" / name)["CK160"] == "warning"
        assert "decoder.w" in run_hint(tmp_path / "iter_10" / name, "CK160")
    assert "CK160" not in said(tmp_path / "common.pt")


def test_a_rank_of_megatron_points_to_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(2):
        (tmp_path / f"iter_1/mp_rank_{rank:02}").mkdir(parents=True)
        torch.save({"model": {"w": torch.ones(2)}}, tmp_path / f"iter_1/mp_rank_{rank:02}/model_optim_rng.pt")
    rank = tmp_path / "iter_1/mp_rank_01"

    for path in (rank, rank / "model_optim_rng.pt"):
        assert "mp_rank_00.model" in run_hint(path, "CK160")
        assert run("migrate", path, tmp_path / "a.safetensors").exit_code == 1
        refused(path, IncompleteWeights, by=ckptool.load)
    monkeypatch.chdir(rank)
    assert "mp_rank_00.model" in run_hint(Path("model_optim_rng.pt"), "CK160")
    assert "CK302" not in said(rank.parent)  # nothing is to be picked


def test_references_to_tensors_point_to_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("torch_xla.utils.serialization")
    reference = module.TensorReference = type("TensorReference", (), {"__module__": module.__name__})
    for name in ("torch_xla", "torch_xla.utils"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        torch.save({"w": reference(), "b": reference()}, tmp_path / place / "model.pt")
    (tmp_path / "a/model.pt.tensors").mkdir()
    for index in range(2):
        torch.save(torch.ones(index + 1), tmp_path / f"a/model.pt.tensors/tensor_{index}.pt")

    assert "tensor_1.pt" in run_hint(tmp_path / "a/model.pt", "CK160")
    for path in (tmp_path / "a", tmp_path / "b/model.pt"):
        assert said(path)["CK160"] == "warning"
        done = run("migrate", path, tmp_path / "out.pth")
        assert done.exit_code == 1
        assert "files of their own" in done.output


@pytest.mark.parametrize(
    ("is_indexed", "stem"),
    in_turn(
        [True, False], ["model{}.safetensors", "pytorch_model{}.bin", "diffusion_pytorch_model{}.fp16.safetensors"]
    ),
)
def test_one_shard_is_written_only_if_asked(stem: str, is_indexed: bool, tmp_path: Path) -> None:
    names = [stem.format(f"-0000{number}-of-00003") for number in (1, 2, 3)]
    for number, name in enumerate(names if is_indexed else names[:1]):
        tensors = {f"layers.{number}.weight": torch.randn(4, 4)}
        save_file(tensors, tmp_path / name) if stem.endswith("s") else torch.save(tensors, tmp_path / name)
    shard, target = tmp_path / names[0], tmp_path / "whole.safetensors"
    if is_indexed:
        weight_map = {f"layers.{number}.weight": name for number, name in enumerate(names)}
        index = stem.format("").replace(".fp16.safetensors", ".safetensors.index.fp16.json")
        index = index if index.endswith(".json") else f"{index}.index.json"
        (tmp_path / index).write_text(json.dumps({"weight_map": weight_map}))
        assert ckptool.load(tmp_path).keys() == weight_map.keys()

    assert said(shard)["CK160"] == "warning"
    done = run("migrate", shard, target)
    assert (done.exit_code, target.exists()) == (1, False)
    assert "shard 1 of 3" in done.output
    assert "--allow-missing" in done.output
    refused(shard, IncompleteWeights, "shard 1 of 3", by=ckptool.load)
    assert run("migrate", shard, target, "--allow-missing").exit_code == 0
    assert ckptool.load(target).keys() == {"layers.0.weight"}


@pytest.mark.parametrize(
    ("name", "offset", "is_part"),
    [
        ("shard-00001-model-00001-of-00001.safetensors", 0, True),
        ("shard-00002-model-00001-of-00001.safetensors", 8, True),
        ("renamed.safetensors", 8, True),
        ("model-00001-of-00001.safetensors", 0, False),
    ],
)
def test_pieces_of_one_rank_are_written_only_if_asked(name: str, offset: int, is_part: bool, tmp_path: Path) -> None:
    text = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [offset, 0]}})}
    save_file({"w": torch.ones(8, 4)}, tmp_path / name, text)

    assert ("CK160" in said(tmp_path / name)) == is_part
    done = run("migrate", tmp_path / name, tmp_path / "whole.pth")
    assert done.exit_code == is_part
    assert ("pieces of tensors" in done.output) == is_part
    assert run("migrate", tmp_path / name, tmp_path / "part.pth", "--allow-missing").exit_code == 0


@pytest.mark.parametrize(
    ("left", "metadata", "is_hole"),
    [
        ("00002-of-00003", {"total_size": 32}, True),
        ("00001-of-00002", {"total_size": 32}, False),
        ("00001-of-00002", {}, True),
        ("", {}, True),
        ("", {"total_size": 48}, True),
        ("", {"total_size": 32}, False),
    ],
)
def test_an_index_that_does_not_name_a_shard_of_its_set(
    left: str, metadata: dict[str, int], is_hole: bool, tmp_path: Path
) -> None:
    folder, target = tmp_path / "in", tmp_path / "whole.safetensors"
    folder.mkdir()
    names = {number: f"model-0000{number}-of-00003.safetensors" for number in (1, 3)}
    for number, name in names.items():
        save_file({f"layers.{number}.weight": torch.ones(4)}, folder / name)
    if left:
        save_file({"layers.2.weight": torch.ones(4)}, folder / f"model-{left}.safetensors")
    index = folder / "model.safetensors.index.json"
    shard_of = {f"layers.{one}.weight": name for one, name in names.items()}
    index.write_text(json.dumps({"metadata": metadata, "weight_map": shard_of}))

    for place in (folder, index):
        done = run("migrate", place, target, "--force")
        assert (done.exit_code, "does not name" in done.output) == (int(is_hole), is_hole)
        if is_hole:
            refused(place, IncompleteWeights, r"does not name model-00002-of-00003", by=ckptool.load)
        assert len(ckptool.load(place, allow_missing=True)) == 2
    assert ("CK162" in said(folder)) == bool(left)
    assert ("CK160" in said(folder)) == (is_hole and not left)


@pytest.mark.parametrize(("first", "count"), [(0, 2), (1, 2), (0, 3), (1, 900_000_000)])
def test_shards_are_counted_from_0_or_1(first: int, count: int, tmp_path: Path) -> None:
    names = [f"model-{number:05}-of-{count:05}.safetensors" for number in (first, first + 1)]
    for number, name in enumerate(names):
        save_file({f"layers.{number}.weight": torch.ones(4)}, tmp_path / name)
    shard_of = {f"layers.{number}.weight": name for number, name in enumerate(names)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shard_of}))

    done = run("migrate", tmp_path, tmp_path / "whole.pth")
    assert (done.exit_code, f"does not name model-{first + 2:05}-of" in done.output) == (count > 2, count > 2)


@pytest.mark.parametrize(
    ("place", "holds"),
    [
        ("mp_rank_03/model_optim_rng.pt", {}),
        ("mp_rank_00_001/model_optim_rng.pt", {}),
        ("mp_rank_00/model_optim_rng.pt", {"args": {"tensor_model_parallel_size": 4}}),
        ("mp_rank_00/model_optim_rng.pt", {"args": argparse.Namespace(tensor_model_parallel_size=4)}),
        ("mp_rank_00_model_states.pt", {"mp_world_size": 4}),
        ("renamed.pt", {"mp_world_size": 4}),
        ("x.pt", {"args": argparse.Namespace(tensor_model_parallel_size=2), "iteration": 10}),
        ("x.pt", {"args": argparse.Namespace(pipeline_model_parallel_size=2), "iteration": 10}),
    ],
)
def test_one_rank_of_model_parallelism_is_none(place: str, holds: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "iteration" / place
    path.parent.mkdir(parents=True)
    key = "module" if holds.get("mp_world_size") else "model"
    torch.save({key: {"w": torch.ones(4, 4)}, **holds}, path)

    assert said(path)["CK160"] == "warning"
    for one in (path, path.parent, tmp_path / "iteration"):
        done = run("migrate", one, tmp_path / "whole.safetensors")
        assert done.exit_code in (1, 2), one
        assert not (tmp_path / "whole.safetensors").exists()
    assert run("migrate", path, tmp_path / "whole.safetensors", "--allow-missing").exit_code == 0


@pytest.mark.parametrize("said_sizes", [{}, {"args": {"tensor_model_parallel_size": 1}}, {"args": None}])
def test_the_only_rank_of_megatron_is_whole(said_sizes: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "iteration" / "mp_rank_00" / "model_optim_rng.pt"
    path.parent.mkdir(parents=True)
    torch.save({"model": {"w": torch.ones(4, 4)}, **said_sizes}, path)

    for place in (path, path.parent, tmp_path / "iteration"):
        assert ckptool.load(place).keys() == {"w"}
    own = {"model": {"w": torch.ones(4, 4)}, "args": {"tensor_model_parallel_size": 2}}  # of a script of one's own
    torch.save(own, tmp_path / "own.pt")
    assert ckptool.load(tmp_path / "own.pt").keys() == {"w"}


def stack(*numbers: int, of: str = "model.layers", width: int = 4) -> Tensors:
    modules = ("attn.q_proj", "mlp.up_proj")
    return {f"{of}.{one}.{module}.weight": torch.ones(width, 4) for one in numbers for module in modules}


@pytest.mark.parametrize(
    ("tensors", "missing"),
    [
        (stack(0, 1, 2, 4, 5), "model.layers.3:"),
        (stack(1, 2, 3, 4, 6, 7, 9, 10), "model.layers.5, model.layers.8:"),
        (stack(0, 1, 2, 3) | stack(0, 1, 3, of="model.layers.2.moe.experts"), "model.layers.2.moe.experts.2:"),
    ],
)
def test_a_layer_that_is_missing_between_others_is_told_of(tensors: Tensors, missing: str, tmp_path: Path) -> None:
    save_file(tensors, file := tmp_path / "model.safetensors")
    (found,) = [one for one in ckptool.check(file).findings if one.code == "CK128"]

    assert found.severity == "warning"
    assert found.message.startswith(missing)


@pytest.mark.parametrize(
    "tensors",
    [
        stack(0, 1, 2, 3),
        stack(0, 2, 4, 6),  # something without weights between each two
        stack(2, 3, 4, 6, 7),  # a stage, of which other findings tell
        stack(0, 1, 2) | stack(4, 5, 6, width=8),  # something without weights between two widths
        {f"features.{one}.weight": torch.ones(4, 4) for one in (0, 1, 2, 4, 5)},
        {name: one for name, one in stack(0, 1, 2, 3, 4).items() if "2.mlp" not in name},
    ],
)
def test_numbers_without_weights_are_not_told_of(tensors: Tensors, tmp_path: Path) -> None:
    save_file(tensors, file := tmp_path / "model.safetensors")

    assert "CK128" not in said(file)
