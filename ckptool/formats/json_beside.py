"""Settings in JSON beside a checkpoint: how it is quantised, and which model an adapter is for."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, suppress
from functools import partial
from typing import Final, cast

from ckptool.checkpoints.checkpoint import Checkpoint, once
from ckptool.checkpoints.completeness import GATHER
from ckptool.checkpoints.parsed import Parsed, Remark
from ckptool.checkpoints.quantized import Quantization, find, numbers_in
from ckptool.checkpoints.quantized_layouts import TYPES, Settings
from ckptool.checkpoints.roles import NO_WEIGHTS
from ckptool.checkpoints.summary import may_be_quantized
from ckptool.errors import Failure
from ckptool.formats.filenames import ADAPTER
from ckptool.formats.strict_json import parse_object
from ckptool.messages import counted, quoted, some
from ckptool.sources.folder import FolderSource
from ckptool.sources.paths import is_likely, is_remote
from ckptool.sources.source import Source, SourceInFolder
from ckptool.tensors.tensor import TensorInfo

_JSON_NBYTES: Final = 4 << 20
_WORDS: Final = 80
"""Most characters of one fact that is shown."""
_LISTED: Final = 8
"""Most files beside a checkpoint that are read."""
QUANTIZED: Final[Mapping[str, tuple[str, ...]]] = {
    "config.json": ("quantization_config", "compression_config", "quantization"),
    "hf_quant_config.json": ("quantization",),
    "quantize_config.json": (),
    "quantization_config.json": (),
    "quant_config.json": (),
}
"""Files that describe how weights are quantised, and under which keys; those without keys describe nothing else."""
_PLAIN: Final = re.compile(r"[\w.]{1,80}")
"""The name of a module, and no pattern."""
_MOST_PATTERNS: Final = 256
"""Most modules with a rank of their own; more are not compared."""
HEADS: Final = re.compile(r"(?:^|\.)(?:lm_head|embed_out|output_layer|output)\.weight")
EMBEDDINGS: Final = re.compile(r"(?:^|\.)(?:embed_tokens|wte|word_embeddings|shared|tok_embeddings)\.weight")
"""Names of the weights of output layers and of embeddings, which many models tie to each other."""
_EITHER: Final = ("classifier", "score")
"""The heads of classifiers, both of which peft announces: a model has one of them."""
_parsed: Final = partial(parse_object, has_constants=True)


def missing_adapter_parts(settings: Mapping[str, object], parsed: Parsed) -> Iterator[Remark]:
    """Yield remarks on what the settings beside an adapter announce, and it lacks."""
    kind, names = settings.get("peft_type"), parsed.contents.tensors
    if not isinstance(kind, str):
        return
    targets, saved = _modules(settings, "target_modules"), _modules(settings, "modules_to_save")
    if any(one in name for one in _EITHER for name in names):
        saved = [one for one in saved if one not in _EITHER]
    plain = list(dict.fromkeys([*targets, *saved]))
    lacking = [one for one in plain if not any(one in name for name in names)]
    said = f"{ADAPTER!r} announces one: {quoted(kind)}{f' on {some(plain)}' if plain else ''}"
    if not names:
        yield Remark("CK122", f"an adapter without tensors, and {said}", GATHER)
    elif lacking and len(lacking) == len(plain):
        yield Remark("CK122", f"an adapter without a tensor of these modules, and {said}", GATHER)
    elif lacking:
        yield Remark("CK123", f"no tensor of the adapter is of {some(lacking)}, and {said}", "The model may have none.")
    if kind == "LORA" and names:
        facts = (*_unlike_rank(settings, names), *_unlike_others(settings, names))
        yield from (Remark("CK127", fact, "Give the settings that it was saved with.") for fact in facts)


def _unlike_rank(settings: Mapping[str, object], names: Mapping[str, TensorInfo]) -> Iterator[str]:
    """Yield the ranks that pairs have where the settings give others, for all or by the ends of modules' names."""
    rank, patterns = settings.get("r"), settings.get("rank_pattern") or {}
    listed = list(patterns.items()) if isinstance(patterns, Mapping) else []
    is_plain = all(_PLAIN.fullmatch(end) and isinstance(own, int) for end, own in listed[:_MOST_PATTERNS])
    if settings.get("target_parameters") or not isinstance(rank, int) or not is_plain or len(listed) > _MOST_PATTERNS:
        return
    unlike: dict[tuple[int, int], str] = {}
    for name, info in names.items():
        module, is_first, _ = name.partition(".lora_A.")
        if is_first and info.shape:
            said = next((own for end, own in listed if f".{module}".endswith(f".{end}")), rank)
            if said != info.shape[0]:
                unlike.setdefault((info.shape[0], said), module)
    if unlike:
        found = [f"rank {own} of {module!r}, where it says {said}" for (own, said), module in unlike.items()]
        yield f"the adapter's tensors have another rank than {ADAPTER!r} says: {some(found)}"


def _unlike_others(settings: Mapping[str, object], names: Collection[str]) -> Iterator[str]:
    """Yield facts on magnitudes of DoRA, and on layers, that the settings have and the tensors lack, or conversely."""
    magnitudes = sum("lora_magnitude_vector" in name for name in names)
    if settings.get("use_dora") is True and not magnitudes:
        yield f"no tensor is a magnitude, and {ADAPTER!r} says that it is DoRA (use_dora)"
    elif magnitudes and not settings.get("use_dora"):
        yield f"{counted(magnitudes, 'tensor')} are magnitudes of DoRA, and {ADAPTER!r} does not say use_dora"
    said = settings.get("layers_to_transform")
    listed = said if isinstance(said, list) else [said]
    numbers = {part for name in names for part in name.split(".") if part.isdecimal()}
    lacking = [str(one) for one in listed if type(one) is int and str(one) not in numbers]
    if lacking and numbers:
        yield f"no tensor is of the layers {some(lacking)}, which {ADAPTER!r} lists (layers_to_transform)"


def _modules(settings: Mapping[str, object], key: str) -> list[str]:
    """Return the modules that settings list by name; empty if one of them is a pattern."""
    listed = settings.get(key)
    if not isinstance(listed, list) or not all(isinstance(one, str) and _PLAIN.fullmatch(one) for one in listed):
        return []
    return listed


def json_object(folder: FolderSource, name: str) -> Mapping[str, object]:
    """Return the JSON object in a small file; an empty one if it is not an object, or cannot be read."""
    with suppress(Failure):
        return _parsed(folder.content(name, _JSON_NBYTES), name, "json", folder.cancellation)
    return {}


def base_model(path: str, source: Source) -> str | None:
    """Return the model that an adapter in a folder, or a file in it, is for, by the configuration there."""
    found = object_beside(path, source, ADAPTER).get("base_model_name_or_path")
    return found[:_WORDS] if isinstance(found, str) and found else None


def ties_embedding(checkpoint: Checkpoint) -> object:
    """Return whether config.json beside a checkpoint ties output layer and embedding; None if it does not say."""
    settings = object_beside(checkpoint.path, checkpoint.source, "config.json")
    both = [one for one in (settings, settings.get("text_config")) if isinstance(one, dict)]
    return next((one["tie_word_embeddings"] for one in both if "tie_word_embeddings" in one), None)


@once
def quantization_of(checkpoint: Checkpoint) -> Quantization | None:
    """Return what is quantised, except in optimizers; None if nothing is. Reads no values of remote checkpoints."""
    return quantization_among(checkpoint, () if is_remote(checkpoint.path) else checkpoint.tensors.keys())


def quantization_among(checkpoint: Checkpoint, taken: Collection[str]) -> Quantization | None:
    """Return what is quantised, if only some tensors are ``taken``: no bytes of others are read, not even a few."""
    if not may_be_quantized(checkpoint):
        return None
    is_part = checkpoint.part_of is not None
    states = {id(one) for found in checkpoint.state_dicts if found.role in NO_WEIGHTS for one in found.values()}
    infos = {name: one.info for name, one in checkpoint.tensors.items() if id(one) not in states}
    infos |= {name: infos[kept] for name, kept in checkpoint.recorded.ties.items() if kept in infos}
    numbers, homes = dict[str, TensorInfo](), dict[str, str]()
    if any(info.dtype.name in TYPES and len(info.shape) > 1 for info in infos.values()):
        texts: dict[str, object] = {**checkpoint.recorded.texts}
        for key, text in checkpoint.recorded.texts.items():
            with suppress(Failure):  # else it is a text that is not JSON
                texts[key] = _parsed(text.encode(), "a text", "json") if text.startswith("{") else text
        numbers = numbers_in([*checkpoint.extras, *((f"__metadata__.{key}", said) for key, said in texts.items())])
        numbers |= {name: one.info for name, one in checkpoint.attributes.items() if name not in infos}
        homes = {tensor.name: one.key for one in checkpoint.state_dicts for tensor in one.values()}
    head = f"{checkpoint.weights.key}.".lstrip(".") if checkpoint.weights is not None else ""
    own = {name for name in infos if name.startswith(head)}
    modules = [(key, *module) for key, walk in checkpoint.walks for module in walk.modules]
    classes = {".".join(filter(None, (key, path, "weight"))): cls for key, path, cls in modules}
    settings = partial(_settings, checkpoint.path, checkpoint.source)
    beside = partial(_numbers_beside, checkpoint)
    return find(infos, numbers, homes, settings, beside, classes, own, taken, is_part=is_part)


def _numbers_beside(checkpoint: Checkpoint) -> dict[str, dict[str, TensorInfo]]:
    """Return the numbers in small files of JSON, and in checkpoints, beside a checkpoint, by the names of the files."""
    from ckptool.formats import open_checkpoint

    if is_remote(checkpoint.path) or not os.path.exists(checkpoint.path) or checkpoint.part_of is not None:
        return {}
    place = checkpoint.path if os.path.isdir(checkpoint.path) else os.path.dirname(checkpoint.path) or os.curdir
    own = {os.path.basename(checkpoint.path), *(one.name for one in checkpoint.shards)}
    found: dict[str, dict[str, TensorInfo]] = {}
    try:
        with closing(FolderSource(place)) as folder:
            names = [one for one in folder.files if one not in own and (folder.nbytes_of(one) or 0) <= _JSON_NBYTES]
            for name in [one for one in names if one.endswith(".json")][:_LISTED]:
                found[name] = numbers_in(json_object(folder, name).items())
            names = [one for one in names if is_likely(one)][:_LISTED]
    except Failure:
        return {}
    for name in names:
        with suppress(Failure), open_checkpoint(os.path.join(place, name)) as other:
            found[name] = {**numbers_in(other.extras), **{one: tensor.info for one, tensor in other.tensors.items()}}
    return found


def _settings(path: str, source: Source) -> Settings | None:
    for name, keys in QUANTIZED.items():
        whole = object_beside(path, source, name)
        inner = whole.get("text_config")
        whole = {**inner, **whole} if isinstance(inner, dict) else whole
        found = next((whole[key] for key in keys if whole.get(key)), None) if keys else whole
        if isinstance(found, dict) and found:
            usual = "mlx" if "quantization" in whole else "awq" if "w_bit" in found else "gptq"
            method = found.get("quant_method", found.get("quant_algo", usual))
            bits = re.search(r"(?:'weights': {[^{}]*'num_bits'|'bits'): ([1-9]\d?)\b", str(found))
            return Settings(str(method)[:_WORDS], name, bits and int(bits[1]), found)
    return None


def object_beside(path: str, source: Source, name: str) -> Mapping[str, object]:
    """Return the JSON object in a small file in a folder, or beside a file in it; an empty one if there is none."""
    with suppress(Failure):
        if not is_remote(path):
            place = path if os.path.isdir(path) else os.path.dirname(path) or os.curdir
            if os.path.exists(os.path.join(place, name)) and os.path.exists(path):
                with closing(FolderSource(place)) as folder:
                    return json_object(folder, name)
        elif hasattr(source, "open_sibling"):
            beside = cast("SourceInFolder", source).open_sibling(name)
            if beside.nbytes <= _JSON_NBYTES:
                return _parsed(beside.read(0, beside.nbytes), name, "json", source.cancellation)
    return {}
