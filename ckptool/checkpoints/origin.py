"""
Where a checkpoint comes from: the framework that wrote it, and for which base model an adapter is.

Frameworks leave their version, or the names of their classes.

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
from ckptool.names.wrappers import ADDED_BY, prefixes_of
from ckptool.pickles import nodes
from ckptool.pickles.describe import scalar_of

_VERSIONS: Final = (
    (("pytorch-lightning_version",), "pytorch-lightning"),
    (("ds_version",), "deepspeed"),
    (("meta", "mmengine_version"), "mmengine"),
    (("meta", "mmcv_version"), "mmcv"),
    (("fairseq_version",), "fairseq"),
    (("speechbrain_version",), "speechbrain"),
    (("checkpoint_version",), "megatron"),
)
"""Where frameworks leave their version in what they save."""
_BEGINNINGS: Final = frozenset(keys[0] for keys, _ in _VERSIONS)
_LONGEST: Final = 64
_MOST: Final = 1e9
"""As a version. Python refuses to print integers of some thousand digits."""
_NO_FRAMEWORKS: Final = frozenset({"", "torch", "__main__", "__torch__", "collections", "builtins"})
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
_LONGEST_TEXT: Final = 1 << 20


class Writer(NamedTuple):
    """A framework, and its version where the file has it."""

    name: str
    version: str | None


def lightning_attribute(checkpoint: Checkpoint) -> str:
    """Return the attribute of Lightning's module that all weights are inside, with a module between; or nothing."""
    weights, writer = checkpoint.weights or (), writer_of(checkpoint)
    if writer is None or writer.name != _VERSIONS[0][1] or all(name.count(".") == 1 for name in weights):
        return ""
    attribute = "".join(prefixes_of(weights)[:1])[:-1]
    return "" if attribute in ADDED_BY else attribute


def writer_of(checkpoint: Checkpoint) -> Writer | None:
    """Return the framework that wrote a checkpoint; None where nothing says so."""
    pairs = nodes.mapping_pairs(checkpoint.root) or []
    there = {key for key, _ in pairs if type(key) is str and key in _BEGINNINGS}
    for keys, name in _VERSIONS if there else ():
        node = nodes.lookup(pairs, keys[0])
        for key in keys[1:]:
            node = nodes.lookup(nodes.mapping_pairs(node) or [], key)
        version = scalar_of(node)
        is_number = type(version) in (int, float) and abs(version) < _MOST  # type: ignore[arg-type]
        if is_number or isinstance(version, str):
            return Writer(name, str(version)[:_LONGEST])
    for one in checkpoint.state_dicts:
        package = (one.class_name or "").partition(".")[0]
        if package not in _NO_FRAMEWORKS:
            return Writer(package[:_LONGEST], None)
    return None


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
    named = _PATH_IN_JSON.search(metadata.get(_DIFFUSERS, "")[:_LONGEST_TEXT])
    return named[1] if named is not None else next((metadata[key] for key in _BASES if metadata.get(key)), None)
