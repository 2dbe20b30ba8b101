"""The Hugging Face libraries, and what quantises their models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.zoo.box import Box, library, trained

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def _llama(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(vocab_size=40, num_key_value_heads=2, **(SMALL | changes)))


@library("transformers")
def transformers(box: Box) -> None:
    """save_pretrained of several architectures: one file, shards, pickles, ties."""
    import transformers as library_

    models = {
        "llama": _llama(),
        "llama_tied": _llama(tie_word_embeddings=True),
        "bert": library_.BertForMaskedLM(library_.BertConfig(vocab_size=40, **SMALL)),
        "gpt2": library_.GPT2LMHeadModel(library_.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2)),
        "vit": library_.ViTForImageClassification(library_.ViTConfig(image_size=16, patch_size=8, **SMALL)),
        "t5": library_.T5ForConditionalGeneration(
            library_.T5Config(
                vocab_size=40, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0
            )
        ),
        "mixtral": library_.MixtralForCausalLM(
            library_.MixtralConfig(vocab_size=40, num_local_experts=2, num_key_value_heads=2, **SMALL)
        ),
    }  # fmt: skip
    for name, model in models.items():
        box.attempt(name, lambda name=name, model=model: _pretrained(box, name, model))
        box.save(f"{name}.bin", model.state_dict(), model)
    box.save("llama_whole.pt", models["llama"], models["llama"])
    box.attempt("half", lambda: _pretrained(box, "llama_bfloat16", _llama().to(torch.bfloat16)))


def _pretrained(box: Box, name: str, model: Any) -> None:
    one, many = box.path(f"{name}/x").parent, box.path(f"{name}_shards/x").parent
    model.save_pretrained(one)
    model.save_pretrained(many, max_shard_size="6KB")
    again = type(model).from_pretrained(one)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in again.state_dict().items())
    kept = {key: model.state_dict()[key] for key in model.state_dict()}
    names = _names_on_disk(one / "model.safetensors")
    if names <= set(kept):  # some architectures are renamed when they are saved
        box.weights(one, model, names=names)
        box.weights(many / "model.safetensors.index.json", model, names=names)


def _names_on_disk(path: Path) -> set[str]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return set(file.keys())


@library("accelerate")
def accelerate(box: Box) -> None:
    """save_state, save_model and save of the Accelerator."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = trained()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    accelerator.save_state(str(box.path("state")))
    accelerator.save_state(str(box.path("state_pickled")), safe_serialization=False)
    accelerator.save_model(model, str(box.path("model")))
    accelerator.save_model(model, str(box.path("shards")), max_shard_size="1KB")
    accelerator.save_model(model, str(box.path("pickled")), safe_serialization=False)
    accelerator.save({"model": accelerator.get_state_dict(model)}, box.path("saved.pt"))
    for name in ("state", "state_pickled", "model", "shards", "pickled"):
        box.weights(name, model)
    box.weights("saved.pt", model)


@library("peft")
def peft(box: Box) -> None:
    """Adapters of many kinds."""
    import peft as library_

    kinds = {
        "lora": library_.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"]),
        "dora": library_.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], use_dora=True),
        "with_head": library_.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], modules_to_save=["lm_head"]),
        "ia3": library_.IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[]),
        "vera": library_.VeraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]),
        "loha": library_.LoHaConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]),
        "adalora": library_.AdaLoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], total_step=9),
        "prefix": library_.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        "prompt": library_.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        "oft": library_.OFTConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], oft_block_size=4),
    }
    for name, config in kinds.items():
        box.attempt(name, lambda name=name, config=config: _adapter(box, name, config))


def _adapter(box: Box, name: str, config: Any) -> None:
    import peft as library_

    model = library_.get_peft_model(_llama(), config)
    model.save_pretrained(str(box.path(f"{name}/x").parent))
    model.save_pretrained(str(box.path(f"{name}_bin/x").parent), safe_serialization=False)
    saved = library_.get_peft_model_state_dict(model)
    box.weights(f"{name}/adapter_model.safetensors", saved)
    if (box.folder / f"{name}_bin/adapter_model.bin").exists():
        box.weights(f"{name}_bin/adapter_model.bin", saved)
    box.weights(f"{name}", saved)
    box.save(f"{name}.pt", model.state_dict(), model)


@library("sentence-transformers")
def sentence_transformers(box: Box) -> None:
    """Modules that are saved each in a folder of its own."""
    from sentence_transformers.models import Dense, LayerNorm

    for module, name in ((Dense(4, 3), "dense"), (LayerNorm(4), "norm")):
        for safe in (True, False):
            folder = box.path(f"{name}_{safe}/x").parent
            box.attempt(f"{name}, {safe}", lambda m=module, f=folder, s=safe: m.save(str(f), safe_serialization=s))
            if any(folder.iterdir()):
                box.weights(folder, module)


@library("diffusers")
def diffusers(box: Box) -> None:
    """Parts and a pipeline."""
    from diffusers import AutoencoderKL, DDPMPipeline, DDPMScheduler, UNet2DModel
    from diffusers.training_utils import EMAModel

    unet = UNet2DModel(
        sample_size=8, block_out_channels=(8, 8), norm_num_groups=4, layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    vae = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=2)
    for name, model in (("unet", unet), ("vae", vae)):
        model.save_pretrained(box.path(f"{name}/x").parent)
        model.save_pretrained(box.path(f"{name}_bin/x").parent, safe_serialization=False)
        model.save_pretrained(box.path(f"{name}_shards/x").parent, max_shard_size="50KB")
        for tail in ("", "_bin", "_shards"):
            box.weights(f"{name}{tail}", model)
    DDPMPipeline(unet, DDPMScheduler()).save_pretrained(box.path("pipeline/x").parent)
    box.weights("pipeline/unet", unet)
    average = EMAModel(unet.parameters(), model_cls=UNet2DModel, model_config=unet.config)
    average.step(unet.parameters())
    box.save("ema.pt", average.state_dict())
    average.save_pretrained(box.path("ema/x").parent)


@library("timm")
def timm(box: Box) -> None:
    """Its CheckpointSaver, averages, and save_for_hf."""
    import timm as library_
    from timm.models import save_for_hf
    from timm.utils import CheckpointSaver, ModelEmaV2, ModelEmaV3

    model = library_.create_model("test_resnet", num_classes=3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    optimizer.step()
    for kind in (ModelEmaV2, ModelEmaV3):
        average = kind(model)
        folder = box.path(f"{kind.__name__}/x").parent
        saver = CheckpointSaver(
            model, optimizer, model_ema=average, checkpoint_dir=str(folder), recovery_dir=str(folder)
        )
        saver.save_checkpoint(1, 0.5)
        for name in ("checkpoint-1.pth.tar", "last.pth.tar", "model_best.pth.tar"):
            if (folder / name).exists():
                box.weights(folder / name, model, choice="raw")
                box.weights(folder / name, average.module.state_dict(), choice="ema")
    save_for_hf(model, str(box.path("hub/x").parent), safe_serialization="both")
    box.weights("hub/model.safetensors", model)
    box.weights("hub/pytorch_model.bin", model)
    for name in ("vit_tiny_patch16_224", "test_efficientnet", "test_convnext", "test_vit"):
        one = box.attempt(name, lambda name=name: library_.create_model(name))
        if one is not None:
            box.save(f"{name}.pt", one.state_dict(), one)
    box.save("whole.pt", model, model)


@library("torchao")
def torchao(box: Box) -> None:
    """Tensors of quantised layers."""
    from torchao import quantization as kinds

    for name in (
        "Int8WeightOnlyConfig",
        "Int8DynamicActivationInt8WeightConfig",
        "Float8WeightOnlyConfig",
        "IntxWeightOnlyConfig",
    ):
        box.attempt(name, lambda name=name: _torchao(box, name, kinds))


def _torchao(box: Box, name: str, kinds: Any) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).to(torch.bfloat16)
    kinds.quantize_(model, getattr(kinds, name)())
    box.save(f"{name}.pt", model.state_dict())
    box.save(f"{name}_whole.pt", model)


@library("optimum-quanto")
def quanto(box: Box) -> None:
    """Quantised and frozen layers."""
    from optimum.quanto import freeze, qfloat8, qint4, qint8, quantize
    from safetensors.torch import save_file

    for name, kind in {"qint8": qint8, "qint4": qint4, "qfloat8": qfloat8}.items():
        model = nn.Sequential(nn.Linear(128, 128), nn.ReLU())
        quantize(model, weights=kind)
        freeze(model)
        box.weights(box.save(f"{name}.pt", model.state_dict()), model.state_dict())
        box.attempt(
            f"{name} safetensors", lambda name=name, m=model: save_file(m.state_dict(), box.path(f"{name}.safetensors"))
        )
        box.attempt(f"{name} whole", lambda name=name, m=model: box.save(f"{name}_whole.pt", m))


@library("hqq")
def hqq(box: Box) -> None:
    """Layers with packed weights and their meta data."""
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    for bits in (8, 4, 2):
        config = BaseQuantizeConfig(nbits=bits, group_size=16)
        layer = HQQLinear(nn.Linear(32, 32), config, compute_dtype=torch.float32, device="cpu")
        box.weights(box.save(f"bits{bits}.pt", layer.state_dict()), layer.state_dict())
        box.attempt("whole", lambda bits=bits, layer=layer: box.save(f"bits{bits}_whole.pt", nn.Sequential(layer)))


@library("bitsandbytes")
def bitsandbytes(box: Box) -> None:
    """Layers of 8 and 4 bits, and an optimizer of 8 bits."""
    import bitsandbytes as bnb

    four = nn.Sequential(bnb.nn.Linear4bit(64, 64, quant_type="nf4"), nn.ReLU()).to("cpu")
    eight = nn.Sequential(bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False), nn.ReLU()).to("cpu")
    for name, model in (("four", four), ("eight", eight)):
        box.weights(box.save(f"{name}.pt", model.state_dict()), model.state_dict())
        box.attempt(f"{name} whole", lambda name=name, model=model: box.save(f"{name}_whole.pt", model, model))


@library("compressed-tensors")
def compressed_tensors(box: Box) -> None:
    """Packed weights, as its compressor writes them."""
    from compressed_tensors.compressors import pack_to_int32
    from safetensors.torch import save_file

    packed = pack_to_int32(torch.randint(-8, 7, (16, 16), dtype=torch.int8), 4)
    state = {
        "layer.weight_packed": packed,
        "layer.weight_scale": torch.ones(16, 1),
        "layer.weight_shape": torch.tensor([16, 16]),
    }
    save_file(state, box.path("model.safetensors"), {"format": "pt"})
    box.weights("model.safetensors", state)


@library("safetensors")
def safetensors(box: Box) -> None:
    """Its own functions, with every element type that they take."""
    from safetensors.numpy import save_file as save_numpy
    from safetensors.torch import save_file, save_model

    model, _ = trained()
    tied = nn.ModuleDict({"embed": nn.Embedding(6, 4), "head": nn.Linear(4, 6, bias=False)})
    tied["head"].weight = tied["embed"].weight
    for name, one in {"net": model, "tied": tied}.items():
        save_model(one, str(box.path(f"{name}.safetensors")), {"made by": "a test"})
        box.weights(f"{name}.safetensors", one)
    save_numpy({name: value.numpy() for name, value in model.state_dict().items()}, box.path("arrays.safetensors"))
    box.weights("arrays.safetensors", model)
    for kind in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}:
        name = str(kind).removeprefix("torch.")
        raw = torch.arange(64, dtype=torch.uint8)
        box.attempt(name, lambda name=name, kind=kind, raw=raw: save_file(
            {"w": (raw % 2).bool() if kind is torch.bool else raw.view(kind)}, box.path(f"{name}.safetensors")
        ))  # fmt: skip
    save_file({}, box.path("empty.safetensors"))
