"""
Low-rank adapters (LoRA), by the names of their tensors: which modules they change, and by how many dimensions.

    base_model.model.….q_proj.lora_A.weight         PEFT; lora_A.default.weight in a training checkpoint
    unet.….to_q.lora.down.weight, ….processor.to_q_lora.down.weight      diffusers, new and old
    lora_unet_down_blocks_0_…_attn1_to_q.lora_down.weight                kohya's scripts
    transformer.h.0.attn.attn.lora_A                loralib, LitGPT
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from ckptool.checkpoints.checkpoint import Checkpoint

_MARK: Final = "lora"
_DOWN: Final = re.compile(
    r"(?P<module>.*?)"
    r"(?:\.lora_(?:embedding_)?A(?:\.[^.]+)??(?:\.weight)?|(?:\.|_)lora(?:_linear_layer)?\.down\.weight|\.lora_down\.weight)",
    re.DOTALL,
)
"""The matrix that leads into the few dimensions."""
_KOHYA: Final = re.compile(r"lora_(?:unet|te\d?|transformer)_(?:.*_\d+_)?(.+)", re.DOTALL)
"""Kohya's names have no dots: the target is what follows the last number."""
_BASES: Final = ("ss_sd_model_name", "ss_base_model_version", "modelspec.architecture")
"""What metadata of safetensors call the base model, the most exact first."""
_DIFFUSERS: Final = "lora_adapter_metadata"
"""JSON of PEFT's configurations, each entry with the name of a component before it."""
_PATH_IN_JSON: Final = re.compile(r'base_model_name_or_path"\s*:\s*"([^"\\]{1,1000})"')
_LONGEST: Final = 1 << 20


class Adapter(NamedTuple):
    """A low-rank adapter."""

    ranks: tuple[int, ...]
    """Those that occur, in order; mostly one."""
    targets: tuple[str, ...]
    """The last component of the names of the modules that it changes."""
    modules: int
    """How many they are."""
    base: str | None
    """The model that it belongs to, if the file says so."""


def adapter_of(checkpoint: Checkpoint) -> Adapter | None:
    """Return the adapter whose tensors a checkpoint holds; None if it holds none."""
    ranks: set[int] = set()
    modules: dict[str, None] = {}
    for name, tensor in checkpoint.tensors.items():
        if _MARK not in name:
            continue
        found = _DOWN.fullmatch(name)
        if found is None or len(tensor.shape) < 2:
            continue
        ranks.add(tensor.shape[0])
        modules.setdefault(found["module"])
    if not modules:
        return None
    targets = dict.fromkeys(_target(module) for module in modules)
    return Adapter(tuple(sorted(ranks)), tuple(targets), len(modules), _base(checkpoint.metadata))


def _target(module: str) -> str:
    kohya = _KOHYA.fullmatch(module)
    return kohya[1] if kohya is not None else module.rpartition(".")[2]


def _base(metadata: Mapping[str, str]) -> str | None:
    """Return what the metadata say of the base model."""
    named = _PATH_IN_JSON.search(metadata.get(_DIFFUSERS, "")[:_LONGEST])
    return named[1] if named is not None else next((metadata[key] for key in _BASES if metadata.get(key)), None)
