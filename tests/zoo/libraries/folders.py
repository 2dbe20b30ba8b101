"""
Checkpoints that are folders: written by frameworks, in two processes where they are made for several, and read again.

What ckptool writes goes back through the frameworks: the merged file by ``load_state_dict``, shards by
``from_pretrained``, and DCP by ``torch.distributed.checkpoint.load``.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import ckptool
from tests.zoo.box import Box, library
from tests.zoo.libraries import ranks

SECONDS = 240
"""For one folder."""


def _processes(name: str, folder: Path, count: int = 2) -> None:
    """Run a function of ``ranks`` in as many processes, as torchrun would start them."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    folder.mkdir(parents=True, exist_ok=True)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    command = [sys.executable, "-m", ranks.__name__, name, str(folder)]
    running = []
    for rank in range(count):
        own = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_RANK": "0"}
        running.append(subprocess.Popen(command, env=own, stderr=subprocess.PIPE, text=True))
    try:
        said = [one.communicate(timeout=SECONDS)[1] for one in running]
    finally:
        for one in running:
            one.kill()
    for one, text in zip(running, said, strict=True):
        if one.returncode:
            raise RuntimeError(text.strip().splitlines()[-1] if text.strip() else f"exit code {one.returncode}")


def _written(box: Box, names: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """Let several processes write a folder for each name; yield those that the frameworks could write."""
    for name in names:
        folder = box.path(f"{name}/x").parent
        box.attempt(name, lambda name=name, folder=folder: _processes(name, folder))
        if any(folder.iterdir()):
            yield name, folder


def _back_and_forth(box: Box, path: Path, expected: Mapping[str, torch.Tensor]) -> None:
    """Say which weights are there, and read them again with DCP's own loader."""
    box.weights(path, expected)
    box.attempt(f"{path.name} to DCP and back", lambda: _back(box, path, expected))


def _back(box: Box, folder: Path, expected: Mapping[str, torch.Tensor]) -> None:
    """Migrate weights to DCP, and read them with DCP's own loader."""
    from torch.distributed.checkpoint import FileSystemReader, load
    from torch.distributed.checkpoint.api import CheckpointException

    target = box.folder.with_name(f"{box.folder.name}-back")
    ckptool.migrate(folder, target, form="dcp", weights="raw", force=True)
    found = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
    try:
        load(found, storage_reader=FileSystemReader(target), no_dist=True)
    except CheckpointException as error:  # which is not an Exception
        raise AssertionError(str(error)) from error
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), f"{name} is not the same when DCP loads it"


def _through_pretrained(box: Box, folder: Path, model: Any) -> None:
    """Migrate to shards, and read them with ``from_pretrained``."""
    target = box.folder.with_name(f"{box.folder.name}-shards")
    ckptool.migrate(folder, target, max_shard_size="6KB", force=True)
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    again = type(model).from_pretrained(target).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(again[name], tensor), f"{name} is not the same in from_pretrained()"


@library("deepspeed")
def deepspeed(box: Box) -> None:
    """Two processes in stages 0 to 3, in float32 and bfloat16, and the universal checkpoint of one."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as merged

    for name, folder in _written(box, ranks.ZERO):
        expected = torch.load(folder / "module.pt") if name == "zero0" else merged(str(folder))
        (folder / "module.pt").unlink(missing_ok=True)
        _back_and_forth(box, folder, expected)
        if name == "zero1":
            box.attempt("universal", lambda f=folder, e=expected: _universal(box, f, e))


def _universal(box: Box, folder: Path, expected: Mapping[str, torch.Tensor]) -> None:
    from deepspeed.checkpoint import ds_to_universal

    target = box.path("universal/x").parent
    places = ["--input_folder", str(folder / "step1"), "--output_folder", str(target / "step1_universal")]
    command = [sys.executable, ds_to_universal.__file__, *places, "--inject_missing_state"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    parameters = {
        name: tensor for name, tensor in expected.items() if (target / "step1_universal/zero" / name).exists()
    }
    assert parameters
    for name, tensor in parameters.items():
        piece = torch.load(target / "step1_universal/zero" / name / "fp32.pt", weights_only=False)
        piece = piece["param"] if isinstance(piece, dict) else piece
        assert torch.equal(piece.view(tensor.shape), tensor)
    box.weights(target / "step1_universal", expected)


@library("accelerate")
def accelerate(box: Box) -> None:
    """save_state of two processes; on a CPU it does not shard."""
    for _, folder in _written(box, ["accelerate_ddp"]):
        _back_and_forth(box, folder / "state", _expected(folder))


def _expected(folder: Path) -> dict[str, torch.Tensor]:
    """Return what the first process said that the weights are."""
    path = folder / "expected.pt"
    found: dict[str, torch.Tensor] = torch.load(path)
    path.unlink()
    return found


@library("lightning")
def lightning(box: Box) -> None:
    """Checkpoints of the Trainer: of replicas, and of ModelParallel; and Fabric's of FSDP2."""
    for _, folder in _written(box, ranks.LIGHTNING):
        expected = _expected(folder)
        _back_and_forth(box, next(path for path in folder.iterdir() if path.suffix == ".ckpt"), expected)


@library("torch: distributed checkpoints")
def dcp(box: Box) -> None:
    """FSDP2 with an optimizer, and a mesh of two dimensions."""
    for _, folder in _written(box, ranks.TORCH):
        _back_and_forth(box, folder, _expected(folder))


def _llama(**changes: Any) -> Any:
    from tests.zoo.libraries.hugging import _llama as made

    return made(**changes)


@library("transformers")
def transformers(box: Box) -> None:
    """Sharded models and a Trainer's folder; what ckptool makes of them through from_pretrained."""
    for name, model in {
        "llama": _llama(),
        "tied": _llama(tie_word_embeddings=True),
        "half": _llama().bfloat16(),
    }.items():
        for kind, size in {"whole": "5GB", "shards": "6KB"}.items():
            folder = box.path(f"{name}_{kind}/x").parent
            model.save_pretrained(folder, max_shard_size=size)
            there = _names(folder)
            box.weights(folder, model, names=there)
            box.attempt(f"{name} {kind}", lambda f=folder, m=model: _through_pretrained(box, f, m))
            state = {key: value for key, value in model.state_dict().items() if key in there}
            box.attempt(f"{name} {kind} to DCP", lambda f=folder, s=state: _back(box, f, s))
    box.attempt("Trainer", lambda: _trainer(box))


def _names(folder: Path) -> set[str]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return set(json.loads(index.read_text())["weight_map"])
    return set(load_file(folder / "model.safetensors"))


def _trainer(box: Box) -> None:
    from transformers import Trainer, TrainingArguments

    model = _llama()
    words = [{"input_ids": torch.tensor([1, 2, 3]), "labels": torch.tensor([1, 2, 3])}] * 4
    arguments = TrainingArguments(
        output_dir=str(box.path("run")), max_steps=2, save_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
        per_device_train_batch_size=2, logging_strategy="no",
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=words).train()
    folder = box.folder / "run" / "checkpoint-2"
    box.weights(folder, model)
    _through_pretrained(box, folder, model)


@library("sentence-transformers")
def sentence_transformers(box: Box) -> None:
    """A model of several modules, each in a folder of its own."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Dense, Pooling, Transformer
    from tokenizers import Tokenizer, models
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    from tests.zoo.libraries.hugging import SMALL

    words = box.folder.with_name(f"{box.folder.name}-base")
    BertModel(BertConfig(vocab_size=6, **SMALL)).save_pretrained(words)
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "[PAD]": 2}, unk_token="[UNK]")),
        unk_token="[UNK]", pad_token="[PAD]",
    ).save_pretrained(words)  # fmt: skip
    first = Transformer(str(words))
    model = SentenceTransformer(modules=[first, Pooling(16), Dense(16, 4)], device="cpu")
    for safe in (True, False):
        folder = box.path(f"model_{safe}/x").parent
        box.attempt(f"safe {safe}", lambda f=folder, s=safe: model.save(str(f), safe_serialization=s))
        if not any(folder.iterdir()):
            continue
        inner = model[0].auto_model
        box.weights(folder, inner)
        box.weights(folder / "2_Dense", model[2])
        again = SentenceTransformer(str(folder), device="cpu")
        assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


@library("peft")
def peft(box: Box) -> None:
    """An adapter beside its base model, and one that was merged."""
    import peft as library_

    base = box.path("base/x").parent
    _llama().save_pretrained(base)
    model = library_.get_peft_model(
        type(_llama()).from_pretrained(base), library_.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    )
    folder = box.path("adapter/x").parent
    model.save_pretrained(folder)
    box.weights(folder, library_.get_peft_model_state_dict(model))
    target = box.folder.with_name(f"{box.folder.name}-again")
    target.mkdir(exist_ok=True)
    ckptool.migrate(folder, target / "adapter_model.safetensors", force=True)
    (target / "adapter_config.json").write_bytes((folder / "adapter_config.json").read_bytes())
    again = library_.PeftModel.from_pretrained(type(_llama()).from_pretrained(base), target)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    whole = box.path("merged/x").parent
    merged = model.merge_and_unload()
    merged.save_pretrained(whole, max_shard_size="6KB")
    box.weights(whole, merged)


@library("diffusers")
def diffusers(box: Box) -> None:
    """A pipeline of several components, one in shards."""
    from diffusers import AutoencoderKL, DDPMPipeline, DDPMScheduler, LDMPipeline, UNet2DModel, VQModel

    unet = UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, block_out_channels=(8, 8), norm_num_groups=4, layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    vae = VQModel(block_out_channels=(8,), norm_num_groups=4, latent_channels=3)
    pipeline = box.path("pipeline/x").parent
    LDMPipeline(vae, unet, DDPMScheduler()).save_pretrained(pipeline)
    box.weights(pipeline, unet, member="unet")
    box.weights(pipeline, vae, member="vqvae")
    one = box.path("one/x").parent
    DDPMPipeline(unet, DDPMScheduler()).save_pretrained(one)
    box.weights(one, unet)
    coder = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=2)
    shards = box.path("coder/x").parent
    coder.save_pretrained(shards, max_shard_size="20KB")
    box.weights(shards, coder)
    target = box.folder.with_name(f"{box.folder.name}-again")
    target.mkdir(exist_ok=True)
    ckptool.migrate(shards, target / "diffusion_pytorch_model.safetensors", force=True)
    (target / "config.json").write_bytes((shards / "config.json").read_bytes())
    again = AutoencoderKL.from_pretrained(target).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in coder.state_dict().items())


@library("timm")
def timm(box: Box) -> None:
    """A repository of the hub, and the folder of a run."""
    import timm as library_
    from timm.models import save_for_hf
    from timm.utils import CheckpointSaver

    model = library_.create_model("test_resnet", num_classes=3)
    for kind in ("both", True, False):
        folder = box.path(f"hub_{kind}/x").parent
        save_for_hf(model, str(folder), safe_serialization=kind)
        box.weights(folder, model)
        again = library_.create_model("test_resnet", num_classes=3)
        target = box.folder.with_name(f"{box.folder.name}-again.safetensors")
        ckptool.migrate(folder, target, force=True)
        again.load_state_dict(load_file(target))
        assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    folder = box.path("run/x").parent
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    saver = CheckpointSaver(model, optimizer, checkpoint_dir=str(folder), recovery_dir=str(folder))
    saver.save_checkpoint(1, 0.5)
    for path in folder.glob("*.pth.tar"):
        box.weights(path, model)
