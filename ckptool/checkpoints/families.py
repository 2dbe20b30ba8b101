"""
Recognise kinds of adapters (LoRA) and models that make images, by names and shapes.

It is a guess from names and shapes, unless a file beside the checkpoint confirms it.

For low-rank adapters (LoRA), the modules that they change, and their ranks, are read from these names:

    base_model.model.….q_proj.lora_A.weight         PEFT; lora_A.default.weight in a training checkpoint
    unet.….to_q.lora.down.weight, ….processor.to_q_lora.down.weight      diffusers, new and old
    lora_unet_down_blocks_0_…_attn1_to_q.lora_down.weight                kohya's scripts
    transformer.h.0.attn.attn.lora_A                loralib, LitGPT
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.messages import cut
from ckptool.tensors.reading import LazyTensor

_BEFORE_TARGET: Final = r"(?s)^(?:lora_(?:unet|te\d?|transformer)_(?:.*_\d+_)?(?=.)|.*\.(?!\d+$))"
"""The part of a name before the target, not a number alone. kohya's names have no dots: there it follows one."""
_BASES: Final = ("ss_sd_model_name", "ss_base_model_version", "modelspec.architecture")
"""Keys of the base model in the metadata of safetensors, the most exact first."""
_LONGEST_TEXT: Final = 1 << 20

_KINDS: Final = {
    "LoKr": r"lokr_(?:w[12](?:_[ab])?|t2)",
    "LoHa": r"hada_(?:w[12]_[ab]|t[12])",
    "IA3": r"ia3_l|on_input",
    "BOFT": r"boft_[RS]",
    "OFT": r"oft_(?:[rR]|blocks|diag)",
    "VeRA": r"vera_lambda_[bd]",
    "AdaLoRA": r"lora_E",
    "DoRA": r"lora_magnitude_vector|dora_scale",
    "LoRA": r"lora_(?:embedding_)?A|lora(?:_linear_layer)?\.down|lora_down",
}
"""
Names of tensors by kind of adapter, in PEFT, LyCORIS, diffusers and kohya's scripts.

A LoKr or LoHa may have the ``dora_scale`` of a DoRA, too, and a DoRA has all names of a LoRA: the first kind counts.
"""
_KIND: Final = "|".join(f"(?P<{kind}>{names})" for kind, names in _KINDS.items())
_OF_KIND: Final = rf"(?s)(?P<module>.+)[._](?:{_KIND})(?:\.[^.]+)?(?:\.weight)?"
_MARKS: Final = ("lokr_", "hada_", "ia3_l", "on_input", "oft_", "vera_", "lora_", "lora.", "dora_")
"""Every such name contains one of these."""
_BASES_OF_MODULES: Final = ("weight", "base_layer.weight", "linear.weight")
"""Names of a module's own weight beside an adapter, in a file that has both."""
_LONGEST_KIND: Final = 64
_IN_PEFT: Final = {
    **{kind.upper(): kind for kind in _KINDS},
    "PROMPT_TUNING": "prompt tuning",
    "PREFIX_TUNING": "prefix tuning",
    "P_TUNING": "P-tuning",
}
"""Kinds by their name in PEFT."""
_MOST_VECTORS: Final = 8


class _Known(NamedTuple):
    """A part of a known model."""

    family: str
    part: str
    heads: tuple[str, ...]
    """Prefixes of its names: in whole checkpoints, in pipelines, in files of this part alone."""
    names: tuple[str, ...]
    """Names that all must exist."""
    width: int | None = None
    """The second size of the first of them, mostly the width of the text that it attends to."""


_WHOLE: Final = ("model.diffusion_model.", "diffusion_model.", "")
_OF_UNET: Final = ("input_blocks.4.1.transformer_blocks.0.attn2.to_k.weight", "out.2.weight")
_OF_DIFFUSERS: Final = tuple(
    f"{side}_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k.weight" for side in ("down", "up")
)
_WIDTHS: Final = {"1": 768, "2": 1024, "XL": 2048, "XL refiner": 1280}
_JOINT: Final = (
    *("context_embedder.weight", "transformer_blocks.0.attn.add_k_proj.weight"),
    "time_text_embed.text_embedder.linear_1.weight",
)
_VAE: Final = ("VAE", "vae", ("first_stage_model.", "vae.", ""))
_KNOWN: Final = (
    *(_Known(f"Stable Diffusion {one}", "unet", _WHOLE, _OF_UNET, width) for one, width in _WIDTHS.items()),
    *(_Known(f"Stable Diffusion {one}", "unet", ("unet.", ""), _OF_DIFFUSERS, width) for one, width in _WIDTHS.items()),
    _Known("Stable Diffusion 3", "transformer", _WHOLE, ("joint_blocks.0.context_block.attn.qkv.weight",)),
    _Known("Stable Diffusion 3", "transformer", ("transformer.", ""), (*_JOINT, "pos_embed.proj.weight"), 4096),
    _Known("Flux", "transformer", _WHOLE, ("txt_in.weight", "double_blocks.0.img_attn.norm.key_norm.scale"), 4096),
    _Known("Flux", "transformer", ("transformer.", ""), (*_JOINT, "single_transformer_blocks.0.proj_mlp.weight"), 4096),
    _Known(
        *_VAE, ("decoder.conv_in.weight", "encoder.down.0.block.0.norm1.weight", "decoder.up.0.block.0.norm1.weight")
    ),
    _Known(
        *_VAE, ("decoder.conv_in.weight", "encoder.down_blocks.0.resnets.0.norm1.weight", "decoder.conv_out.weight")
    ),
)
_OF_VAES: Final = ("encoder.", "decoder.", "quant_conv.", "post_quant_conv.", "loss.")
"""Prefixes of all names of a VAE that is alone."""
_OTHERS: Final = (
    *("controlnet_", "time_stack", "temporal_", "temp_attentions", "motion_modules", "distilled_guidance", "quantize."),
)
"""Parts of names of derived models, which are other families."""
_ENCODERS: Final = r"(?m)^(?:cond_stage_model|conditioner\.embedders\.\d|text_encoders\.\w+|text_encoder(?:_\d)?)\."


class Family(NamedTuple):
    """A known family, and the parts of it that exist."""

    name: str
    parts: tuple[str, ...] = ()
    is_guess: bool = True
    """Whether it is known from names and shapes alone."""

    def __str__(self) -> str:
        what = f"{self.name}{': ' if self.parts else ''}{', '.join(self.parts)}"
        return f"looks like {what}" if self.is_guess else what


def family_of(checkpoint: Checkpoint, settings: Callable[[], Mapping[str, object]]) -> Family | None:
    """
    Return the family of a checkpoint; None if it looks like no known one.

    ``settings`` returns PEFT's configuration beside it, which has the kind of tensors with PEFT's names.
    """
    tensors: Mapping[str, LazyTensor] = checkpoint.weights or checkpoint.tensors
    if tensors and all(name.startswith(("base_model.", "prompt_embeddings")) for name in tensors):
        said = settings()
        kind = said.get("peft_type")
        if isinstance(kind, str):
            is_dora = kind == "LORA" and said.get("use_dora") is True
            return Family("DoRA" if is_dora else _IN_PEFT.get(kind, cut(kind, _LONGEST_KIND)), is_guess=False)
    text = "\n".join(("", *tensors))
    if any(mark in text for mark in _MARKS) and (found := _kind(tensors)) is not None:
        return Family(found)
    return _embedding(tensors) or _image_model(tensors, text)


def _kind(tensors: Mapping[str, LazyTensor]) -> str | None:
    """Return the kind of an adapter that is alone; None for a model with one inside, and for other tensors."""
    kinds: set[str | None] = set()
    for name in tensors:
        found = re.fullmatch(_OF_KIND, name)
        if found is None:
            continue
        is_inside = any(f"{found['module']}.{own}" in tensors for own in _BASES_OF_MODULES)
        if is_inside and not name.endswith("on_input"):  # IA3 itself has a weight beside this one
            return None
        kinds.add(found.lastgroup)
    return next((kind for kind in _KINDS if kind in kinds), None)


def _embedding(tensors: Mapping[str, LazyTensor]) -> Family | None:
    """Return the family of a few vectors: a tuned prompt, or the meaning of a word; else None."""
    if not 0 < len(tensors) <= _MOST_VECTORS:
        return None
    names, shapes = list(tensors), [one.shape for one in tensors.values()]
    if names == ["prompt_embeddings"] and len(shapes[0]) == 2:
        return Family("prompt tuning or prefix tuning")
    is_word = len(names) == 1 and names[0].startswith("<") and names[0].endswith(">")
    is_known = all(name in ("emb_params", "clip_l", "clip_g") or name.startswith("string_to_param.") for name in names)
    # These are the widths of Stable Diffusion's text encoders.
    are_vectors = all(0 < len(shape) <= 2 and shape[-1] in (768, 1024, 1280) for shape in shapes)
    return Family("textual inversion") if (is_word or is_known) and are_vectors else None


def _image_model(tensors: Mapping[str, LazyTensor], text: str) -> Family | None:
    parts: dict[str, str] = {}
    for one in _KNOWN:
        for head in one.heads:
            if all(head + name in tensors for name in one.names):
                shape = tensors[head + one.names[0]].shape
                if len(shape) == 4 if one.part == "vae" else one.width in (None, *shape[1:2]):
                    parts.setdefault(one.part, one.family)
    if not parts or any(word in text for word in _OTHERS):
        return None
    family = next(iter(parts.values()))
    if family == "VAE":
        return Family(family) if all(name.startswith(_OF_VAES) for name in tensors) else None
    encoders = len(set(re.findall(_ENCODERS, text)))
    more = {"text encoder": encoders == 1, "text encoders": encoders > 1, "averaged weights": "\nmodel_ema." in text}
    return Family(family, (*parts, *(part for part, is_there in more.items() if is_there)))


class Adapter(NamedTuple):
    """A low-rank adapter."""

    ranks: tuple[int, ...]
    """The ranks that occur, in ascending order; usually one."""
    targets: tuple[str, ...]
    """The last component of the names of the modules that it changes."""
    modules: int
    """How many modules it changes."""
    base: str | None
    """The model that it belongs to, if the file names it."""


def adapter_of(checkpoint: Checkpoint) -> Adapter | None:
    """Return the LoRA adapter in a checkpoint, or None."""
    ranks: set[int] = set()
    modules: dict[str, None] = {}
    for name, tensor in checkpoint.tensors.items():
        found = re.fullmatch(_OF_KIND, name) if "lora" in name else None
        if found is None or found.lastgroup != "LoRA" or len(tensor.shape) < 2:
            continue
        ranks.add(tensor.shape[0])
        modules.setdefault(found["module"])
    if not modules:
        return None
    targets = dict.fromkeys(re.sub(_BEFORE_TARGET, "", module) for module in modules)
    metadata = checkpoint.metadata
    # diffusers has PEFT's configurations as JSON, in which each key begins with the name of a component.
    text = metadata.get("lora_adapter_metadata", "")[:_LONGEST_TEXT]
    named = re.search(r'base_model_name_or_path"\s*:\s*"([^"\\]{1,1000})"', text)
    base = named[1] if named is not None else next((metadata[key] for key in _BASES if metadata.get(key)), None)
    return Adapter(tuple(sorted(ranks)), tuple(targets), len(modules), base)
