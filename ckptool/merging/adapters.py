"""
Read an adapter of low rank (LoRA): its tensors, by the names that libraries give them, and how strong it is.

- peft: https://github.com/huggingface/peft; src/peft/utils/save_and_load.py, tuners/lora/model.py
- kohya: https://github.com/kohya-ss/sd-scripts; networks/lora.py
- diffusers: https://github.com/huggingface/diffusers; src/diffusers/loaders/lora_conversion_utils.py
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.weights import choose
from ckptool.errors import Failure, MigrationRefused
from ckptool.formats.filenames import ADAPTER
from ckptool.formats.json_beside import object_beside
from ckptool.formats.strict_json import parse_object
from ckptool.messages import counted, quoted, some
from ckptool.migration.casting import TARGETS
from ckptool.sources.paths import is_remote
from ckptool.tensors.reading import LazyTensor

END: Final = re.compile(
    r"(?:\.lora_(?P<peft>A|B|embedding_A|embedding_B|magnitude_vector)(?:\.(?P<name>(?!(?:weight|bias)\Z)[^.]+))?(?:\.weight)?"
    r"|(?P<own>[._])lora(?:_linear_layer)?[._](?P<other>down|up)(?:\.weight)?"
    r"|\.(?P<alpha>alpha))\Z"
)
"""Ends of names, after the name of the module that is changed."""
_SIDES: Final = {"A": "down", "B": "up", "embedding_A": "down", "embedding_B": "up", "magnitude_vector": "magnitude"}
_OTHER_KINDS: Final = {
    "lokr": "LoKr", "hada": "LoHa", "ia3": "IA3", "boft": "BOFT", "oft": "OFT", "vera": "VeRA", "randlora": "RandLoRA",
    "lora_mid": "LoCon with a core", "dora_scale": "DoRA of kohya", "diff_b": "whole differences",
    "diff": "whole differences", "prompt_embeddings": "prompts",
}  # fmt: skip
"""Parts of the names of tensors in other kinds of adapters."""
_MARK: Final = re.compile(rf"(?:^|[._])({'|'.join(_OTHER_KINDS)})(?=[._]|\Z)")
_UNUSUAL: Final = (
    *("lora_bias", "layer_replication", "target_parameters", "trainable_token_indices", "use_qalora"),
    *("alora_invocation_tokens", "arrow_config", "use_bdlora", "monteclora_config", "velora_config"),
)
"""Settings that turn LoRA into something else."""
_CHANGES_BASE: Final = ("pissa", "olora", "loftq", "corda", "lora_ga")
"""Initialisations that change the weights of the model, which differ from the original ones then."""
_BY_ITS_LIBRARY: Final = "Merge it with the library that made it."
_METADATA: Final = "lora_adapter_metadata"
_SAVED: Final = re.compile(r"\.(modules_to_save(\.[^.]+)?|base_layer)(?=\.)")
"""What peft inserts into the names of a model's own tensors."""
_PLAIN: Final = re.compile(r"\^?(?:[\w.]|\\\.){1,200}\$?")
"""Patterns that peft accepts and that repeat nothing; a dot in them is any character, as in peft."""
_MOST_PATTERNS: Final = 10_000
OF_PEFT: Final = "base_model.model."
HEADS: Final = (
    *(OF_PEFT, "unet.", "transformer.", "diffusion_model.", "text_encoder.", "text_encoder_2."),
    *("text_encoder_3.", "lora_unet_", "lora_te1_", "lora_te2_", "lora_te3_", "lora_te_", "lora_transformer_"),
)
"""Prefixes that libraries put before the names of a model, to say which of several it is."""


class Pair(NamedTuple):
    """Two matrices, or kernels, whose product is added to one weight."""

    down: LazyTensor
    up: LazyTensor
    magnitude: LazyTensor | None
    is_embedding: bool
    scale: float
    """The factor of the product."""
    saved: LazyTensor | None
    """A tensor that replaces the weight before, as peft saves embeddings and heads."""


class Adapter(NamedTuple):
    """One adapter: what it adds, and what it replaces."""

    checkpoint: Checkpoint
    pairs: Mapping[str, Pair]
    """By the names of modules in the adapter."""
    saved: Mapping[str, LazyTensor]
    """Tensors that replace those of the model, by name."""
    turns: bool
    """Whether weights are [inputs, outputs] (``fan_in_fan_out``)."""
    has_no_alpha: bool


def read_adapter(checkpoint: Checkpoint) -> Adapter:
    """
    Read an adapter.

    Raises:
        MigrationRefused: It is of another kind, or a part of a pair is missing.
        WeightsNotFound: There are no tensors.
    """
    tensors = choose(checkpoint, None, "auto")
    settings = _settings(checkpoint)
    found: dict[str, dict[str, LazyTensor]] = {}
    saved: dict[str, LazyTensor] = {}
    embeddings: set[str] = set()
    adapters: dict[str | None, str] = {}
    if not any(END.search(name) or _MARK.search(name) or name.startswith(OF_PEFT) for name in tensors):
        hint = "It looks like a model: that is the base, and `lora=` takes the adapter."
        raise refused(checkpoint, f"none of its {counted(len(tensors), 'tensor')} is one of a pair of LoRA", hint)
    for name, tensor in tensors.items():
        end = END.search(name)
        if end is None:
            _refuse_kind(checkpoint, name)
            plain = _SAVED.sub("", name)
            if plain in saved:
                raise refused(checkpoint, f"it holds {plain!r} twice, once as {name!r}")
            saved[plain] = tensor
            continue
        module = name[: end.start()]
        if end["own"] == "_":  # diffusers: the processor of an attention has the pairs of its layers
            module = module.replace(".processor.", ".") + (".0" if module.endswith("to_out") else "")
        side = "alpha" if end["alpha"] else end["other"] or _SIDES[end["peft"]]
        if end["peft"] and end["peft"].startswith("embedding"):
            embeddings.add(module)
        if end["peft"] and adapters.setdefault(end["name"], name) != next(iter(adapters.values())):
            raise refused(checkpoint, f"it holds two adapters, as in {some(list(adapters.values()))}: take one of them")
        if side in found.setdefault(module, {}):
            raise refused(checkpoint, f"{module!r} has two matrices {side!r}: take one of them")
        found[module][side] = tensor
    pairs: dict[str, Pair] = {}
    has_no_alpha = False
    for module, sides in found.items():
        if not {"down", "up"} <= sides.keys():
            lacking = "up" if "down" in sides else "down"
            raise refused(checkpoint, f"{module!r} has no matrix {lacking!r} (lora_{'B' if lacking == 'up' else 'A'})")
        for side, one in sides.items():
            refuse_no_floats(checkpoint, one, repr(one.name), ("int64",) if side == "alpha" else ())
        scale = _scale(checkpoint, module, sides, settings)
        has_no_alpha = has_no_alpha or scale is None
        is_embedding, magnitude = module in embeddings, sides.get("magnitude")
        number, own = 1.0 if scale is None else scale, saved.pop(f"{module}.weight", None)
        pairs[module] = Pair(sides["down"], sides["up"], magnitude, is_embedding, number, own)
    if not pairs:
        raise refused(checkpoint, "it holds no pair of LoRA")
    return Adapter(checkpoint, pairs, saved, bool(settings[""].get("fan_in_fan_out")), has_no_alpha)


def head_of(name: str) -> str:
    """Return the prefix in ``HEADS`` that a name begins with; empty if there is none."""
    return next((one for one in HEADS if name.startswith(one)), "")


def refused(checkpoint: Checkpoint, fact: str, hint: str | None = None, what: str = "merged") -> MigrationRefused:
    """Return the error for a file that cannot be merged."""
    return MigrationRefused(f"it cannot be {what}: {fact}", kind=f"not-{what}", path=checkpoint.path, hint=hint)


def refuse_no_floats(
    checkpoint: Checkpoint, tensor: LazyTensor, what: str, others: tuple[str, ...] = (), hint: str | None = None
) -> None:
    """Refuse a tensor that is not of plain floats, or of a type in ``others``; it may be in another file."""
    info = tensor.info
    if info.storage is None or info.layout != "strided" or tensor.dtype not in (*TARGETS, *others):
        fact = f"{what} is {info.layout} {tensor.dtype} on {info.location}, no plain floats"
        raise refused(checkpoint, fact, hint)


def _settings(checkpoint: Checkpoint) -> Mapping[str, Mapping[str, Any]]:
    """Return the settings of an adapter, from beside it or from diffusers' metadata, for each prefix in ``HEADS``."""
    settings: dict[str, Any] = dict(object_beside(checkpoint.path, checkpoint.source, ADAPTER))
    path = checkpoint.path
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    if not settings and not is_remote(path) and os.path.exists(os.path.join(folder, ADAPTER)):
        raise refused(checkpoint, f"{ADAPTER!r} beside it cannot be read, and says how strong it is")
    if not settings and (text := checkpoint.metadata.get(_METADATA)):
        try:
            settings = dict(parse_object(text.encode(), _METADATA, "json"))
        except Failure as error:
            raise refused(checkpoint, error.message) from error
    parts = {"": settings}
    for head in HEADS:
        if own := {key[len(head) :]: value for key, value in settings.items() if key.startswith(head)}:
            parts[head] = own
    for one in parts.values():
        kind, begins = one.get("peft_type", "LORA"), str(one.get("init_lora_weights", ""))
        if kind != "LORA":
            raise refused(checkpoint, f"it is {quoted(str(kind))[:60]}, not LoRA", _BY_ITS_LIBRARY)
        if unusual := [key for key in _UNUSUAL if one.get(key)]:
            raise refused(checkpoint, f"its settings have {some(unusual)}", _BY_ITS_LIBRARY)
        if begins.lower().startswith(_CHANGES_BASE):
            hint = "Have peft save it as plain LoRA: save_pretrained(…, path_initial_model_for_weight_conversion=…)."
            raise refused(checkpoint, f"it began as {begins[:20]!r}, which changes the weights of the model", hint)
    return parts


def _refuse_kind(checkpoint: Checkpoint, name: str) -> None:
    """Refuse a tensor that is not part of a pair, unless peft saved it in place of the model's."""
    if mark := _MARK.search(name):
        raise refused(checkpoint, f"it is {_OTHER_KINDS[mark[1]]}, not LoRA: it holds {name!r}", _BY_ITS_LIBRARY)
    if ".lora_" in name or not name.startswith(OF_PEFT):
        raise refused(checkpoint, f"it holds {name!r}, which is no part of a plain pair", _BY_ITS_LIBRARY)


def _scale(
    checkpoint: Checkpoint, module: str, sides: Mapping[str, LazyTensor], settings: Mapping[str, Mapping[str, Any]]
) -> float | None:
    """Return the factor of the product of a pair; None if nothing gives it."""
    rank = sides["down"].shape[0] if sides["down"].shape else 0
    if not rank:
        raise refused(checkpoint, f"{module!r} has rank 0")
    if "alpha" in sides:
        return _only_element(checkpoint, sides["alpha"]) / rank
    head = head_of(module)
    plain, own = module[len(head) :], settings.get(head, settings[""])
    said = _said(checkpoint, own, plain, "r", "rank_pattern")
    alpha = _said(checkpoint, own, plain, "lora_alpha", "alpha_pattern")
    if said is not None and said != rank:
        raise refused(checkpoint, f"{module!r} has rank {rank}, and its settings say {said:g}")
    if own.get("use_dora") and "magnitude" not in sides:
        raise refused(checkpoint, f"{module!r} has no magnitude, and its settings say DoRA")
    if alpha is None:
        return None
    return alpha / (math.sqrt(rank) if own.get("use_rslora") else rank)


def _said(checkpoint: Checkpoint, settings: Mapping[str, Any], module: str, key: str, patterns: str) -> float | None:
    """Return a setting for a module: that of the first pattern that its name ends with, or the general one."""
    value = settings.get(key)
    listed = settings.get(patterns)
    if isinstance(listed, Mapping) and len(listed) > _MOST_PATTERNS:
        raise refused(checkpoint, f"{patterns!r} in its settings has more than {_MOST_PATTERNS:,} patterns")
    for pattern, number in listed.items() if isinstance(listed, Mapping) else ():
        if not _PLAIN.fullmatch(pattern):
            fact = f"{patterns!r} in its settings has a pattern that is more than a name: {quoted(pattern)[:80]}"
            raise refused(checkpoint, fact, _BY_ITS_LIBRARY)
        if _of_peft(pattern).match(module):
            value = number
            break
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise refused(checkpoint, f"{key!r} in its settings is {quoted(str(value))[:40]}")
    return value


@lru_cache(_MOST_PATTERNS)
def _of_peft(pattern: str) -> re.Pattern[str]:
    """Return the expression that peft matches with the name of a module."""
    return re.compile(rf"(.*\.)?({pattern})$")


def _only_element(checkpoint: Checkpoint, tensor: LazyTensor) -> float:
    """Return the only element of a small tensor."""
    value = float(tensor.torch()) if tensor.numel == 1 else math.nan
    if not math.isfinite(value):
        raise refused(checkpoint, f"{tensor.name!r} is no number")
    return value
