"""Folders of whole files: which of them is opened, what is said of the others, and what one file of a set is alone."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptool
from ckptool import AmbiguousWeights, FileUnavailable, IncompleteWeights, open_checkpoint
from tests.each import each
from tests.formats.said import descriptors, message, refused, said
from tests.loading.same import assert_same_tensor
from tests.program import invoke

Tensors = Mapping[str, torch.Tensor]


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {"a.weight": torch.randn(3, 4), "a.bias": torch.randn(3), "b.weight": torch.randn(2, 3)}


def write(path: Path, tensors: Tensors) -> None:
    """Write a file as its suffix says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        save_file(dict(tensors), path, metadata={"format": "pt"})
    else:
        torch.save(dict(tensors), path)


def write_shards(folder: Path, name: str, tensors: Tensors, *, index: bool = True, last: str = "") -> list[str]:
    """Write one tensor a shard: ``name`` is that of the whole, ``last`` a variant at the end."""
    stem, suffix = name.rsplit(".", 1)
    count = len(tensors)
    files = [f"{stem}-{number:05}-of-{count:05}{last}.{suffix}" for number in range(1, count + 1)]
    shard_of = dict(zip(tensors, files, strict=True))
    for tensor, file in shard_of.items():
        write(folder / file, {tensor: tensors[tensor]})
    if index:
        total = sum(tensor.nbytes for tensor in tensors.values())
        whole = {"metadata": {"total_size": total}, "weight_map": shard_of}
        (folder / f"{name}.index.json").write_text(json.dumps(whole))
    return files


def write_training(folder: Path) -> None:
    """Lay out what a Trainer writes beside weights."""
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(torch.optim.lr_scheduler.StepLR(optimizer, 1).state_dict(), folder / "scheduler.pt")
    torch.save({"cpu": torch.get_rng_state()}, folder / "rng_state.pth")
    torch.save({"a": 1}, folder / "training_args.bin")
    state = {"global_step": 500, "max_steps": 1000, "epoch": 2.5, "best_model_checkpoint": "/home/me/checkpoint-400"}
    (folder / "trainer_state.json").write_text(json.dumps(state))


def assert_loads(folder: Path, expected: Tensors) -> None:
    found = ckptool.load(folder)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same_tensor(found[name], tensor, name)


def roles(folder: Path) -> dict[str, str]:
    with open_checkpoint(folder) as checkpoint:
        return {one.name: one.role for one in checkpoint.beside}


@pytest.fixture(autouse=True)
def everything_is_closed() -> Iterator[None]:
    before = descriptors()
    yield
    assert descriptors() == before


# What is opened


def _one(name: str) -> Callable[[Path], None]:
    return lambda folder: write(folder / name, weights())


def _both(folder: Path) -> None:
    write(folder / "model.safetensors", weights())
    write(folder / "pytorch_model.bin", weights(1))


def _variant_beside(folder: Path) -> None:
    write(folder / "diffusion_pytorch_model.safetensors", weights())
    write(folder / "diffusion_pytorch_model.fp16.safetensors", weights(1))
    write(folder / "diffusion_pytorch_model.non_ema.bin", weights(2))


def _index_of_each(folder: Path) -> None:
    write_shards(folder, "model.safetensors", weights())
    write_shards(folder, "pytorch_model.bin", weights(1))


def _trainer(folder: Path) -> None:
    write(folder / "model.safetensors", weights())
    write_training(folder)


def _trainer_run(folder: Path) -> None:
    (folder / "checkpoint-500").mkdir()
    _trainer(folder / "checkpoint-500")
    (folder / "runs").mkdir()
    (folder / "runs" / "events.out").write_text("x")
    torch.save({"a": 1}, folder / "training_args.bin")


def _accelerate(folder: Path) -> None:
    write(folder / "pytorch_model.bin", weights())
    for name in ("optimizer.bin", "scheduler.bin", "sampler.bin", "random_states_0.pkl", "custom_checkpoint_0.pkl"):
        torch.save({"x": torch.ones(1)}, folder / name)


def _speechbrain(folder: Path) -> None:
    folder = folder / "CKPT+2024-01-01+00-00-00+00"
    write(folder / "embedding_model.ckpt", weights())
    torch.save(torch.optim.Adam([torch.nn.Parameter(torch.ones(2))]).state_dict(), folder / "optimizer.ckpt")
    (folder / "counter.ckpt").write_text("3")
    (folder / "dataloader-TRAIN.ckpt").write_text("12")
    (folder / "CKPT.yaml").write_text("end-of-epoch: true")


def _sentence(folder: Path) -> None:
    write(folder / "0_Transformer" / "model.safetensors", weights())
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    modules = [{"idx": 0, "name": "0", "path": "0_Transformer", "type": "t"}]
    (folder / "modules.json").write_text(json.dumps(modules))


def _sentence_at_the_root(folder: Path) -> None:
    write(folder / "model.safetensors", weights())
    write(folder / "2_Dense" / "model.safetensors", weights(1))


def _ray(folder: Path) -> None:
    write(folder / "checkpoint_000003" / "checkpoint" / "model.safetensors", weights())
    (folder / ".validate_storage_marker").write_text("")


def _variant_of_an_index(folder: Path) -> None:
    files = write_shards(folder, "model.fp16.safetensors", weights())
    (folder / "model.fp16.safetensors.index.json").rename(folder / "model.safetensors.index.fp16.json")
    assert files[0] == "model.fp16-00001-of-00003.safetensors"


def _hub(folder: Path) -> None:
    repository = folder / "models--someone--tiny"
    blobs, snapshots = repository / "blobs", repository / "snapshots"
    blobs.mkdir(parents=True)
    for number, commit in enumerate(("1" * 40, "2" * 40)):
        snapshot = snapshots / commit
        snapshot.mkdir(parents=True)
        write(folder / "one.safetensors", weights(number))
        (folder / "one.safetensors").rename(blobs / (str(number) * 64))
        (snapshot / "model.safetensors").symlink_to(f"../../blobs/{str(number) * 64}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("1" * 40)


FOLDERS: dict[str, Callable[[Path], object]] = {
    "one file": _one("model.safetensors"),
    "one file of any name": _one("best.th"),
    "an adapter": _one("adapter_model.safetensors"),
    "open_clip": _one("open_clip_pytorch_model.bin"),
    "a variant alone": _one("model.fp16.safetensors"),
    "an index": lambda folder: write_shards(folder, "model.safetensors", weights()),
    "an index of pickles": lambda folder: write_shards(folder, "pytorch_model.bin", weights()),
    "an index of a variant": _variant_of_an_index,
    "shards without an index": lambda folder: write_shards(folder, "model.safetensors", weights(), index=False),
    "shards of a variant": lambda f: write_shards(
        f, "diffusion_pytorch_model.bin", weights(), index=False, last=".fp16"
    ),
    "safetensors and pickle": _both,
    "variants beside": _variant_beside,
    "two indexes": _index_of_each,
    "a checkpoint of a Trainer": _trainer,
    "a run of a Trainer": _trainer_run,
    "save_state of accelerate": _accelerate,
    "speechbrain": _speechbrain,
    "sentence-transformers": _sentence,
    "sentence-transformers, with weights at the root": _sentence_at_the_root,
    "Ray Train": _ray,
    "a cache of the hub": _hub,
    "a step of torchtitan": lambda folder: write(folder / "step-500" / "model.pt", weights()),
}


@each("name", FOLDERS)
def test_a_folder_is_the_checkpoint_that_it_leads_to(name: str, tmp_path: Path) -> None:
    FOLDERS[name](tmp_path)
    expected = weights()

    assert_loads(tmp_path, expected)
    assert ckptool.check(tmp_path).error is None
    ckptool.migrate(tmp_path, tmp_path.parent / f"{tmp_path.name}.safetensors", form="safetensors")
    assert ckptool.diff(tmp_path, tmp_path.parent / f"{tmp_path.name}.safetensors").same
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 3), "b": torch.nn.Linear(3, 2, bias=False)})
    ckptool.load_into(model, tmp_path)
    assert_same_tensor(model["b"].weight.detach(), expected["b.weight"], "b.weight")


def test_what_is_beside_is_listed(tmp_path: Path) -> None:
    _trainer(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        found = {one.name: one for one in checkpoint.beside}
    shown = invoke(["inspect", "-q", str(tmp_path)]).output
    printed = json.loads(invoke(["inspect", "--json", str(tmp_path)]).output)

    assert {name: one.role for name, one in found.items()} == {
        "optimizer.pt": "optimizer",
        "rng_state.pth": "rng",
        "scheduler.pt": "scheduler",
        "trainer_state.json": "trainer",
        "training_args.bin": "arguments",
    }
    assert found["trainer_state.json"].about == "step 500 of 1000, epoch 2.5, best /home/me/checkpoint-400"
    assert found["optimizer.pt"].nbytes == (tmp_path / "optimizer.pt").stat().st_size
    with open_checkpoint(found["optimizer.pt"].path) as optimizer:
        assert optimizer.form == "training"
    assert "  optimizer.pt: optimizer, " in shown
    assert [one["name"] for one in printed["beside"]] == list(found)


def test_a_deep_check_compares_the_values_of_the_same_weights_in_two_forms(tmp_path: Path) -> None:
    own = weights()
    name = next(iter(own))
    save_file(own, tmp_path / "model.safetensors")
    torch.save(own, tmp_path / "pytorch_model.bin")
    assert "values that were not compared" in ckptool.check(tmp_path).findings[0].message
    (found,) = ckptool.check(tmp_path, deep=True).findings
    assert found.severity == "info"
    assert found.message == "the same weights are there once more, with equal values: pytorch_model.bin"

    torch.save(own | {name: own[name] + 1}, tmp_path / "pytorch_model.bin")
    done = invoke(["check", "--deep", str(tmp_path)])
    assert done.exit_code == 1
    assert "1 warning; every byte was read" in done.output
    assert f"other values in 1 tensor: {name}" in done.output
    assert f"Run: ckptool diff {tmp_path / 'model.safetensors'} {tmp_path / 'pytorch_model.bin'}" in done.output

    torch.save(own | {name: own[name].bfloat16()}, tmp_path / "pytorch_model.bin")
    (found,) = ckptool.check(tmp_path, deep=True).findings
    assert (found.severity, f"values that were not compared of {name}: pytorch" in found.message) == ("info", True)


@pytest.mark.parametrize(
    ("files", "hint"),
    [
        ([], "Copy the folder again, with its files."),
        (["README.md", "adapter_config.json"], "Copy the weights, too (adapter_model.safetensors)."),
        (["config.json", "tokenizer.json"], "Copy the weights, too (model.safetensors)."),
        (["README.md"], "Name a file in it: README.md"),
    ],
)
def test_a_folder_without_weights_is_said_to_lack_them(files: list[str], hint: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    done = invoke(["inspect", str(tmp_path)])
    assert done.exit_code == 2
    assert f"Hint: {hint}" in done.stderr


def test_an_adapter_without_its_settings_is_told_of(tmp_path: Path) -> None:
    pair = {f"base_model.model.q.lora_{one}.weight": torch.ones(2, 2) for one in "AB"}
    save_file({name: tensor.clone() for name, tensor in pair.items()}, tmp_path / "adapter_model.safetensors")
    done = invoke(["check", str(tmp_path)])
    assert done.exit_code == 1
    assert "CK166 an adapter of peft without 'adapter_config.json'" in done.output
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2}))
    assert invoke(["check", str(tmp_path)]).exit_code == 0


def test_an_adapter_says_what_it_adapts(tmp_path: Path) -> None:
    write(tmp_path / "adapter_model.safetensors", weights())
    config = {"peft_type": "LORA", "base_model_name_or_path": "someone/tiny", "r": 8, "lora_alpha": 16,
              "target_modules": ["q_proj", "v_proj"], "bias": "none"}  # fmt: skip
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))

    with open_checkpoint(tmp_path) as checkpoint:
        (found,) = checkpoint.beside
    assert found.about == "LORA of someone/tiny, r 8, alpha 16, on q_proj, v_proj"


def test_the_same_weights_twice_and_variants_are_told_of(tmp_path: Path) -> None:
    for folder in (tmp_path / "twice", tmp_path / "variant"):
        folder.mkdir()
    _both(tmp_path / "twice")
    _variant_beside(tmp_path / "variant")

    assert roles(tmp_path / "twice") == {"pytorch_model.bin": "duplicate"}
    assert list(said(tmp_path / "twice")) == ["CK161"]
    shown = invoke(["inspect", str(tmp_path / "twice")]).output
    assert "the same weights" not in shown
    assert "pytorch_model.bin: going by its name, a second form, of " in shown
    assert "the same names and shapes are there once more, with values that were not compared" in shown
    assert set(roles(tmp_path / "variant").values()) == {"variant"}


def test_what_goes_by_the_name_of_the_same_weights_and_has_others_is_told_of(tmp_path: Path) -> None:
    tied = {"a.weight": torch.ones(2, 2)}
    save_file(tied, tmp_path / "model.safetensors")
    torch.save(tied | {"b.weight": tied["a.weight"]}, tmp_path / "pytorch_model.bin")
    (found,) = ckptool.check(tmp_path).findings
    assert (found.code, found.severity) == ("CK161", "info")

    torch.save(tied | {"b.weight": tied["a.weight"], "c.weight": torch.ones(3)}, tmp_path / "pytorch_model.bin")
    (found,) = ckptool.check(tmp_path).findings
    assert (found.code, found.severity) == ("CK161", "warning")
    assert "it has 1 tensor more: c.weight" in found.message
    save_file({"a.weight": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    told = "it has a.weight [2, 2], not [2, 3]; 2 tensors more: b.weight, c.weight"
    assert ckptool.check(tmp_path).findings[0].message.endswith(told)


def test_other_checkpoints_beside_the_one_that_was_opened_are_named(tmp_path: Path) -> None:
    for name in ("pytorch_model.bin", "epoch2.pth", "best.pt", "sub/model.safetensors", "optimizer.pt"):
        write(tmp_path / name, weights())
    (found,) = [one for one in ckptool.check(tmp_path).findings if one.code == "CK171"]

    assert found.message == "3 other checkpoints beside, which were not opened: best.pt, epoch2.pth, sub"
    assert found.command == f"ckptool inspect {tmp_path} --brief --recursive"
    shown = invoke(found.command.split()[1:]).output
    assert all(name in shown for name in ("epoch2.pth", "best.pt", "sub/model.safetensors"))
    assert found.message in invoke(["inspect", str(tmp_path)]).output
    assert "CK171" not in said(tmp_path / "best.pt")


# Several


def _accelerate_of_two(folder: Path) -> None:
    write(folder / "model.safetensors", weights())
    write(folder / "model_1.safetensors", weights(1))


def _speechbrain_of_two(folder: Path) -> None:
    write(folder / "embedding_model.ckpt", weights())
    write(folder / "classifier.ckpt", weights(1))
    (folder / "counter.ckpt").write_text("3")


def _steps(folder: Path) -> None:
    for number in (500, 1000):
        write(folder / f"checkpoint-{number}" / "model.safetensors", weights(number))


def _adapter_and_base(folder: Path) -> None:
    write(folder / "model.safetensors", weights())
    write(folder / "adapter_model.safetensors", weights(1))


SEVERAL: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "two models of accelerate": (_accelerate_of_two, ["model.safetensors", "model_1.safetensors"]),
    "two models of speechbrain": (_speechbrain_of_two, ["classifier.ckpt", "embedding_model.ckpt"]),
    "two steps": (_steps, ["checkpoint-1000", "checkpoint-500"]),
    "an adapter and a model": (_adapter_and_base, ["adapter_model.safetensors", "model.safetensors"]),
}


@each("name", SEVERAL)
def test_of_several_none_is_chosen_and_all_are_listed(name: str, tmp_path: Path) -> None:
    make, expected = SEVERAL[name]
    make(tmp_path)

    with open_checkpoint(tmp_path) as checkpoint:
        assert (checkpoint.form, [one.name for one in checkpoint.members]) == ("archive", expected)
    caught = refused(tmp_path, AmbiguousWeights, by=ckptool.load)
    for candidate in caught.candidates:
        assert len(ckptool.load(candidate)) == 3
    for deep in (False, True):
        grave = [one.code for one in ckptool.check(tmp_path, deep=deep).findings if one.severity != "info"]
        assert grave == ["CK166"] * (name == "an adapter and a model")  # which has no settings
    assert "a folder of 2 checkpoints" in invoke(["inspect", str(tmp_path)]).output


def test_components_of_a_pipeline_are_one_checkpoint_and_each_is_one(tmp_path: Path) -> None:
    write(tmp_path / "unet" / "diffusion_pytorch_model.safetensors", weights())
    (tmp_path / "vae").mkdir()
    write_shards(tmp_path / "vae", "diffusion_pytorch_model.safetensors", weights(1))
    write(tmp_path / "safety_checker" / "pytorch_model.bin", weights(2))
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler" / "scheduler_config.json").write_text("{}")
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "P", "unet": ["diffusers", "U"]}))

    with open_checkpoint(tmp_path) as checkpoint:
        assert {one.name for one in checkpoint.members} == {"safety_checker", "unet", "vae"}
        assert {name.partition(".")[0] for name in checkpoint.tensors} == {"safety_checker", "unet", "vae"}
        assert checkpoint.shard_of["vae.a.bias"] == "vae/diffusion_pytorch_model-00002-of-00003.safetensors"
        nbytes = checkpoint.file_nbytes
    for component, seed in (("unet", 0), ("vae", 1), ("safety_checker", 2)):
        assert_same_tensor(ckptool.load(tmp_path, key=component)["a.bias"], weights(seed)["a.bias"], component)
        assert_same_tensor(ckptool.load(f"{tmp_path}::{component}")["a.bias"], weights(seed)["a.bias"], component)
    refused(tmp_path, AmbiguousWeights, by=ckptool.load)
    assert nbytes == sum(one.stat().st_size for one in tmp_path.rglob("*") if one.suffix in (".bin", ".safetensors"))
    assert ckptool.check(tmp_path, deep=True).worst == "info"
    ckptool.migrate(tmp_path, tmp_path / "all.pt", form="same")
    assert set(torch.load(tmp_path / "all.pt")) == {"safety_checker", "unet", "vae"}


def test_too_many_to_be_looked_into_are_named(tmp_path: Path) -> None:
    for number in range(65):
        (tmp_path / f"epoch_{number}.pt").touch()

    error = refused(tmp_path)
    assert error.kind == "directory"
    assert "65 files" in error.message


# What is missing, and what is left


def test_a_gap_in_shards_without_an_index_is_named(tmp_path: Path) -> None:
    files = write_shards(tmp_path, "model.safetensors", weights(), index=False)
    (tmp_path / files[1]).unlink()

    error = refused(tmp_path)
    assert (error.kind, error.needed, error.actual) == ("missing-shards", 3, 2)
    assert files[1] in error.message
    assert invoke(["check", str(tmp_path)]).exit_code == 2


def test_a_shard_that_is_cut_is_named(tmp_path: Path) -> None:
    files = write_shards(tmp_path, "model.safetensors", weights(), index=False)
    os.truncate(tmp_path / files[1], (tmp_path / files[1]).stat().st_size - 1)

    error = refused(tmp_path)
    assert error.kind == "truncated-safetensors"
    assert files[1] in error.message


# One file of a set, alone


def test_a_shard_alone_says_of_which_set_it_is(tmp_path: Path) -> None:
    files = write_shards(tmp_path, "model.safetensors", weights())

    (found,) = ckptool.check(tmp_path / files[1]).findings
    assert (found.code, found.command) == ("CK160", f"ckptool inspect {tmp_path}/model.safetensors.index.json")
    assert found.message.startswith("shard 2 of 3")
    (tmp_path / "model.safetensors.index.json").unlink()
    assert ckptool.check(tmp_path / files[1]).findings[0].command == f"ckptool inspect {tmp_path}"


@each(
    "names",
    [
        ("pytorch_model_fsdp_rank0.bin", "pytorch_model_fsdp_rank3.bin"),
        ("model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt"),
        ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"),
        ("__0_0.distcp", "__1_0.distcp"),
    ],
)
def test_what_one_process_wrote_says_so(names: Sequence[str], tmp_path: Path) -> None:
    for number, name in enumerate(names):
        torch.save({key: one + number for key, one in weights().items()}, tmp_path / name)

    for name in names:
        assert "CK160" in said(tmp_path / name), name


@each("name", ["model_rank0.pt", "rng_state_rank_0.pth", "model.pt", "a-00001-of-00001.safetensors"])
def test_a_file_that_is_there_alone_is_none_of_a_set(name: str, tmp_path: Path) -> None:
    write(tmp_path / name, weights())

    assert "CK160" not in said(tmp_path / name)


# What is hostile


@each(
    "text",
    ["", "{", "[]", "null", '{"global_step": {"a": [1]}, "epoch": 1e999}', "[" * 100_000, '{"a": 1, "a": 2}', "\x00"],
)
def test_text_that_makes_no_sense_never_makes_weights_unreadable(text: str, tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", weights())
    for name in ("trainer_state.json", "adapter_config.json", "model_index.json", "modules.json", "config.json"):
        (tmp_path / name).write_text(text)

    assert_loads(tmp_path, weights())
    assert invoke(["inspect", str(tmp_path)]).exit_code == 0


def test_no_more_of_a_text_is_read_than_makes_sense(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", weights())
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": 3, "log": "x" * (5 << 20)}))

    with open_checkpoint(tmp_path) as checkpoint:
        assert [(one.name, one.about) for one in checkpoint.beside] == [("trainer_state.json", None)]


def test_links_out_of_a_folder_are_not_followed(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere" / "model.safetensors", weights())
    for name in ("file", "folder"):
        (tmp_path / name).mkdir()
    (tmp_path / "file" / "model.safetensors").symlink_to("../elsewhere/model.safetensors")
    (tmp_path / "folder" / "checkpoint-1").symlink_to("../elsewhere")

    assert refused(tmp_path / "file").kind == "shard-link"
    assert refused(tmp_path / "folder").kind == "directory"
    assert len(ckptool.load(tmp_path / "file" / "model.safetensors")) == 3


def test_a_link_to_the_last_of_several_is_none_more(tmp_path: Path) -> None:
    write(tmp_path / "checkpoint-1" / "model.safetensors", weights())
    (tmp_path / "checkpoint-last").symlink_to("checkpoint-1")
    (tmp_path / "checkpoint-1" / "again").symlink_to("..")

    assert_loads(tmp_path, weights())
    write(tmp_path / "epochs" / "epoch_1.pt", weights())
    (tmp_path / "epochs" / "last.pt").symlink_to("epoch_1.pt")
    assert list(said(tmp_path / "epochs")) == []


@each("commit", ["", "../../..", "1" * 40 + "/..", "3" * 40, "\xff" * 40, "1" * 5000])
def test_a_reference_that_names_no_snapshot_is_not_followed(commit: str, tmp_path: Path) -> None:
    _hub(tmp_path)
    (tmp_path / "models--someone--tiny" / "refs" / "main").write_text(commit)

    with open_checkpoint(tmp_path) as checkpoint:
        assert [one.name for one in checkpoint.members] == ["1" * 40, "2" * 40]


def _as_text(folder: Path) -> None:
    """Copy a cache as what knows no links does."""
    _hub(folder)
    for link in [one for one in folder.rglob("*") if one.is_symlink()]:
        target = link.readlink()
        link.unlink()
        link.write_text(str(target))


def test_a_cache_whose_links_were_copied_as_text_is_read(tmp_path: Path) -> None:
    _as_text(tmp_path)
    snapshot = tmp_path / "models--someone--tiny" / "snapshots" / ("1" * 40)
    write_shards(snapshot, "other.safetensors", weights())
    for number, shard in enumerate(snapshot.glob("other*")):
        blob = f"{number:064}"
        shard.rename(snapshot.parents[1] / "blobs" / f"a{blob[1:]}")
        shard.write_text(f"../../blobs/a{blob[1:]}")
    (snapshot / "model.safetensors").unlink()

    assert_loads(tmp_path, weights())
    ckptool.migrate(tmp_path, tmp_path / "out.safetensors")


def test_text_for_a_blob_that_is_not_there_is_a_missing_file(tmp_path: Path) -> None:
    _as_text(tmp_path)
    for blob in (tmp_path / "models--someone--tiny" / "blobs").iterdir():
        blob.unlink()

    assert refused(tmp_path).kind == "missing"


def test_text_that_would_be_a_link_elsewhere_is_text(tmp_path: Path) -> None:
    _as_text(tmp_path)
    (tmp_path / "blobs").mkdir()
    write(tmp_path / "blobs" / ("0" * 64), weights())
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "model.safetensors").write_text("../../blobs/" + "0" * 64)

    assert isinstance(refused(tmp_path / "a" / "b"), ckptool.NotACheckpoint)


def test_a_name_that_counts_a_million_shards_costs_nothing(tmp_path: Path) -> None:
    write(tmp_path / "model-00001-of-999999999.safetensors", weights())

    assert "999,999,999" in refused(tmp_path).message


def test_a_deep_or_wide_tree_of_folders_is_not_walked_to_its_end(tmp_path: Path) -> None:
    write(tmp_path / "/".join("abcdefghij") / "model.safetensors", weights())
    for number in range(700):
        (tmp_path / f"empty-{number}").mkdir()

    assert isinstance(refused(tmp_path), FileUnavailable)


# Names that other programs use


def _engine_states(folder: Path, tag: str) -> None:
    (folder / tag).mkdir(parents=True)
    torch.save({"module": weights(9), "param_shapes": None}, folder / tag / "mp_rank_00_model_states.pt")
    (folder / "latest").write_text(tag)


def _with_engine(folder: Path) -> None:
    write(folder / "model.safetensors", weights())
    _engine_states(folder, "global_step500")


def _engine_is_gone(folder: Path) -> None:
    write(folder / "model.safetensors", weights())
    (folder / "latest").write_text("global_step500")


def _another_engine_is_there(folder: Path) -> None:
    _with_engine(folder)
    (folder / "latest").write_text("global_step700")


def _pointer(name: str, text: bytes, *below: str) -> Callable[[Path], None]:
    def go(folder: Path) -> None:
        write(folder.joinpath(*below) / "weights.pt", weights())
        (folder / name).write_bytes(text)

    return go


def _link(name: str, *below: str) -> Callable[[Path], None]:
    def go(folder: Path) -> None:
        write(folder.joinpath(*below) / "weights.pt", weights())
        (folder / name).symlink_to("/nowhere")

    return go


STRANGERS: dict[str, Callable[[Path], None]] = {
    "a trainer's folder with an engine's states": _with_engine,
    "a trainer's folder whose engine's states are gone": _engine_is_gone,
    "a trainer's folder whose engine's states are others": _another_engine_is_there,
    "notes": _pointer("latest", b"see the notes\n"),
    "a name": _pointer("latest", b"v1.2\n"),
    "a path": _pointer("latest", b"../elsewhere"),
    "bytes": _pointer("latest", b"\xff\xfe\0\0" * 2000),
    "nothing": _pointer("latest", b""),
    "beside a folder": _pointer("latest", b"v1.2", "run"),
    "a link": _link("latest"),
    "a link beside a folder": _link("latest", "run"),
    "universal": _pointer("latest_universal", b"v1.2"),
    "iteration": _pointer("latest_checkpointed_iteration.txt", b"200"),
    "iteration beside a folder": _pointer("latest_checkpointed_iteration.txt", b"200", "run"),
    "an index of something": _pointer(".metadata", b"{}"),
    "an index of something beside a folder": _pointer(".metadata", b"{}", "run"),
    "text called as a checkpoint": _pointer("odd.pt", b"no checkpoint", "run"),
    "a link called as a checkpoint": _link("odd.pt", "run"),
}


@each("name", STRANGERS)
def test_a_file_that_is_called_as_others_call_theirs_changes_nothing(name: str, tmp_path: Path) -> None:
    STRANGERS[name](tmp_path)
    assert_loads(tmp_path, weights())
    assert [one for one in said(tmp_path) if one < "CK200"] == []


def test_the_states_of_an_engine_beside_weights_have_a_path_of_their_own(tmp_path: Path) -> None:
    _with_engine(tmp_path)
    assert roles(tmp_path)["global_step500"] == "folder"
    assert_loads(tmp_path / "global_step500", weights(9))


def test_a_folder_called_latest_is_a_folder(tmp_path: Path) -> None:
    write(tmp_path / "latest" / "model.safetensors", weights())
    write(tmp_path / "best" / "model.safetensors", weights(1))
    assert_loads(tmp_path / "latest", weights())


def test_a_pointer_says_which_of_several_folders_is_meant(tmp_path: Path) -> None:
    write(tmp_path / "step-1" / "model.safetensors", weights(1))
    write(tmp_path / "step-2" / "model.safetensors", weights(2))
    (tmp_path / "latest").write_text("step-2\n")
    assert_loads(tmp_path, weights(2))
    assert_loads(tmp_path / "latest", weights(2))

    (tmp_path / "latest").write_text("step-3")
    error = refused(tmp_path)
    assert "'latest' names 'step-3', and there is no such folder" in error.message
    assert error.hint == "Name one that is there: step-1, step-2"
    (tmp_path / "step-3").mkdir()
    assert "there is no checkpoint in it" in refused(tmp_path).message


def test_an_index_is_told_from_what_another_program_calls_so(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_text("# This file tracks properties of this project.\n")
    assert "not a checkpoint: a text file of 1 line" in refused(tmp_path / ".metadata").message
    write(tmp_path / "model.safetensors", weights())
    assert_loads(tmp_path, weights())
    assert "not a checkpoint: a text file of 1 line" in refused(tmp_path / ".metadata").message


def test_links_to_folders_are_named_as_links(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere" / "model.safetensors", weights())
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "last").symlink_to("../elsewhere")
    assert "a directory of links, which are not followed: last" in refused(tmp_path / "run").message


# Pipelines that lack something


def _pipeline_of(folder: Path, *names: str, named: Sequence[str]) -> None:
    index: dict[str, object] = {"_class_name": "P", "scheduler": ["diffusers", "DDIMScheduler"], "gone": [None, None]}
    for name in names:
        write(folder / name / "diffusion_pytorch_model.safetensors", weights())
        (folder / name / "config.json").write_text("{}")
    index.update({name: ["diffusers", "AutoencoderKL"] for name in named})
    (folder / "model_index.json").write_text(json.dumps(index))


def test_a_pipeline_of_plain_files_runs_nothing_and_one_with_a_pickle_says_what(tmp_path: Path) -> None:
    _pipeline_of(tmp_path, "unet", "vae", named=["unet", "vae"])
    said = "diffusers.DiffusionPipeline.from_pretrained() opens it and runs nothing: it holds no pickle"
    assert ckptool.check(tmp_path).loading == (said,)
    write(tmp_path / "safety_checker" / "pytorch_model.bin", weights())
    assert "pickle.load() of a part of it only makes data" in ckptool.check(tmp_path).loading


def test_an_index_of_another_pipeline_promises_nothing(tmp_path: Path) -> None:
    _pipeline_of(tmp_path, "unet", "vae", named=["unet", "vqvae"])
    assert "CK164" not in said(tmp_path)


@each("lost", ["gone", "truncated", "with its folder"])
def test_one_component_that_is_left_of_a_pipeline_is_not_taken_for_it(lost: str, tmp_path: Path) -> None:
    _pipeline_of(tmp_path, "unet", "vae", named=["unet", "vae"])
    path = tmp_path / "vae" / "diffusion_pytorch_model.safetensors"
    if lost == "truncated":
        path.write_bytes(path.read_bytes()[:100])
    elif lost == "gone":
        path.unlink()
    else:
        shutil.rmtree(path.parent)

    assert refused(tmp_path, IncompleteWeights, by=ckptool.load).missing == ("vae",)
    assert len(ckptool.load(tmp_path / "unet")) == 3
    assert len(ckptool.load(tmp_path, allow_missing=True)) == 3
    assert ckptool.check(tmp_path).worst in ("error", "warning")


def test_weights_that_a_trainer_saved_alone_lack_nothing(tmp_path: Path) -> None:
    _trainer(tmp_path)
    for name in TRAINERS[:3]:
        (tmp_path / name).unlink()
    assert "CK166" not in said(tmp_path)


def test_a_folder_of_several_is_as_large_as_they_are(tmp_path: Path) -> None:
    for number in (1, 2):
        torch.save({f"w{number}": torch.ones(number)}, tmp_path / f"{number}.pth")

    with ckptool.open_checkpoint(tmp_path) as folder:
        assert folder.form == "archive"
        assert folder.file_nbytes == sum(one.stat().st_size for one in tmp_path.iterdir())


@pytest.mark.parametrize(("good", "broken"), [("a.pt", "b.pt"), ("net.safetensors", "other.pth"), ("x/m.pt", "y/m.pt")])
def test_a_checkpoint_is_not_taken_because_another_cannot_be_read(good: str, broken: str, tmp_path: Path) -> None:
    for name in (good, broken):
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {"a.weight": torch.ones(2, 2)}
        save_file(tensors, path) if path.suffix == ".safetensors" else torch.save(tensors, path)
    whole = (tmp_path / "in" / broken).read_bytes()
    (tmp_path / "in" / broken).write_bytes(whole[: len(whole) // 2])

    assert {"CK167", "CK169"} <= {*said(tmp_path / "in")}
    refused(tmp_path / "in", IncompleteWeights, "cannot be opened", by=ckptool.load)
    archive = shutil.make_archive(str(tmp_path / "packed"), "zip", tmp_path / "in")
    for path in (tmp_path / "in", archive):
        with pytest.raises(IncompleteWeights, match="1 checkpoint beside it cannot be opened"):
            ckptool.migrate(path, tmp_path / "a.pth")
    assert ckptool.load(f"{archive}::{good}").keys() == {"a.weight"}
    assert ckptool.load(tmp_path / "in", allow_missing=True).keys() == {"a.weight"}
    assert ckptool.load(tmp_path / "in" / good).keys() == {"a.weight"}


def test_a_folder_of_states_of_training_is_not_said_to_hold_weights(tmp_path: Path) -> None:
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    torch.save({"last_epoch": 1}, tmp_path / "scheduler.pt")
    assert "which alone holds tensors of 2" in message(tmp_path, "CK167")


def test_an_index_may_name_shards_with_a_dot_in_front(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model-00001-of-00001.safetensors")
    index = {"metadata": {}, "weight_map": {"a": "./model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert list(ckptool.load(tmp_path)) == ["a"]


# What is named as soon as it is so


TRAINERS = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "training_args.bin")


def _components(folder: Path) -> None:
    _pipeline_of(folder, "unet", "vae", named=["unet", "vae"])


def _parameters_of_speechbrain(folder: Path) -> None:
    _speechbrain_of_two(folder)
    paths = "".join(f"    {name}: !ref <path>/{name}.ckpt\n" for name in ("embedding_model", "classifier"))
    (folder / "hyperparams.yaml").write_text(f"pretrainer: !new:p\n  paths:\n{paths}")


def _two_saves(folder: Path) -> None:
    for name in ("checkpoint-2", "checkpoint-10"):
        write(folder / name / "model.safetensors", weights())
        torch.save({"a": 1}, folder / name / "training_args.bin")
        (folder / name / "trainer_state.json").write_text("{}")


def _two_whole_saves(folder: Path) -> None:
    _two_saves(folder)
    for name in ("checkpoint-2", "checkpoint-10"):
        write_training(folder / name)
    (folder / "logs").mkdir()


def _with_adapter(folder: Path) -> None:
    """Lay out an adapter below its model."""
    (folder / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    write(folder / "model.safetensors", weights())
    write(folder / "adapter" / "adapter_model.safetensors", weights(1))
    (folder / "adapter" / "adapter_config.json").write_text('{"r": 2}')


def _two_adapters(folder: Path) -> None:
    for place in (folder, folder / "second"):
        write(place / "adapter_model.safetensors", weights())
        (place / "adapter_config.json").write_text('{"r": 2}')


def _shards_beside_a_whole(folder: Path) -> None:
    write(folder / "model.safetensors", weights())
    write_shards(folder, "model.safetensors", weights())


def _gone(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _cut(name: str) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 2)


def _unfinished(place: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / place).mkdir(parents=True, exist_ok=True)
        (folder / place / "abc.incomplete").write_text("x")

    return change


def _other_total(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"total_size": ', '"total_size": 1'))


def _as_a_link(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).rename(folder / "elsewhere")
        (folder / name).symlink_to("elsewhere")

    return change


Change = Callable[[Path], object]
COMPONENT, SHARD = "vae/diffusion_pytorch_model.safetensors", "model-00009-of-00009.safetensors"
SNAPSHOT = f"models--someone--tiny/snapshots/{'1' * 40}/.cache/huggingface/download"
NAMED: dict[str, tuple[Change, Change, str, str]] = {
    "a shard of another save": (
        FOLDERS["an index"],
        lambda folder: write(folder / SHARD, {"x": torch.ones(1)}),
        "CK162",
        SHARD,
    ),
    "and beside a whole file": (
        _shards_beside_a_whole,
        lambda folder: write(folder / SHARD, {"x": torch.ones(1)}),
        "CK162",
        f"1 shard that the index does not name: {SHARD}",
    ),
    "another total": (FOLDERS["an index"], _other_total, "CK107", ""),
    "shards that no index names": (
        FOLDERS["an index"],
        _gone("model.safetensors.index.json"),
        "CK168",
        "by their names",
    ),
    "a download into the blobs of a cache": (_hub, _unfinished("models--someone--tiny/blobs"), "CK163", ""),
    "a download into a folder": (_hub, _unfinished(SNAPSHOT), "CK163", ""),
    "a component without weights": (_components, _gone(COMPONENT), "CK164", "'vae' has no weights in its folder"),
    "an index of components that is cut": (
        _components,
        lambda f: (f / "model_index.json").write_text('{"_class'),
        "CK164",
        "'model_index.json' is empty or broken",
    ),
    "a component that is gone": (_components, lambda f: shutil.rmtree(f / "vae"), "CK164", "'vae' is not there"),
    "a component that is a link": (_components, _as_a_link("vae"), "CK164", "'vae' is a link, which is not followed"),
    "a component of speechbrain": (
        _parameters_of_speechbrain,
        _gone("classifier.ckpt"),
        "CK164",
        "'classifier.ckpt'",
    ),
    "weights of a Trainer": (_trainer, _gone("model.safetensors"), "CK165", "'trainer_state.json'"),
    "weights of an earlier save": (_two_saves, _gone("checkpoint-2/model.safetensors"), "CK165", "'checkpoint-2'"),
    "weights of the last save": (_two_saves, _gone("checkpoint-10/model.safetensors"), "CK165", "1 checkpoint of"),
    "weights beside an optimizer": (
        _two_whole_saves,
        _gone("checkpoint-2/model.safetensors"),
        "CK165",
        "'checkpoint-2'",
    ),
    "an adapter": (_with_adapter, _gone("adapter/adapter_model.safetensors"), "CK165", "'adapter'"),
    "the model of an adapter": (_with_adapter, _gone("model.safetensors"), "CK165", "the model of 'config.json'"),
    "an adapter beside another": (_two_adapters, _gone("adapter_model.safetensors"), "CK165", "the adapter of"),
    **{name: (_trainer, _gone(name), "CK166", "training cannot go on as it was") for name in TRAINERS},
    "what was chosen by what is in it": (_speechbrain_of_two, _gone("classifier.ckpt"), "CK167", "was opened"),
    "half an optimizer beside": (_trainer, _cut("optimizer.pt"), "CK169", "'optimizer.pt'"),
    "half an adapter beside": (_with_adapter, _cut("adapter/adapter_model.safetensors"), "CK169", "'adapter'"),
}


@each("name", NAMED)
def test_what_is_wrong_with_a_folder_is_named(name: str, tmp_path: Path) -> None:
    make, change, code, words = NAMED[name]
    make(tmp_path)
    assert code not in said(tmp_path)
    change(tmp_path)
    assert words in message(tmp_path, code)
    if code == "CK169" or make is _two_saves:
        assert_loads(tmp_path, weights())
