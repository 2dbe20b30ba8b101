"""
Adapters (LoRA) into the weights that they change.

Names and shapes are compared before anything is written. Every pair of an adapter is used, or the merge is refused.
The names that libraries give the tensors of adapters, and how strong one is:

- peft: https://github.com/huggingface/peft; src/peft/utils/save_and_load.py, tuners/lora/model.py
- kohya: https://github.com/kohya-ss/sd-scripts; networks/lora.py
- diffusers: https://github.com/huggingface/diffusers; src/diffusers/loaders/lora_conversion_utils.py
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.weights import Weights, choose
from ckptool.errors import Failure, MigrationRefused
from ckptool.formats.filenames import ADAPTER
from ckptool.formats.json_beside import EMBEDDINGS, object_beside, quantization_of, ties_embedding
from ckptool.formats.json_beside import HEADS as OUTPUT_LAYERS
from ckptool.formats.strict_json import parse_object
from ckptool.messages import as_path, counted, quoted, some
from ckptool.migration.casting import TARGETS, Memory, memory_of
from ckptool.names.renaming import by_likeness
from ckptool.sources.paths import is_remote
from ckptool.tensors.payloads import ComputedWeight
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
_HEADS: Final = (
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
    """Return the prefix in ``_HEADS`` that a name begins with; empty if there is none."""
    return next((one for one in _HEADS if name.startswith(one)), "")


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
    """Return the settings of an adapter, from beside it or from diffusers' metadata, for each prefix in ``_HEADS``."""
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
    for head in _HEADS:
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
        raise refused(checkpoint, f"it holds {name!r}, which is not part of a plain pair", _BY_ITS_LIBRARY)


def _scale(
    checkpoint: Checkpoint, module: str, sides: Mapping[str, LazyTensor], settings: Mapping[str, Mapping[str, Any]]
) -> float | None:
    """Return the factor of the product of a pair; None if nothing gives it."""
    rank = sides["down"].shape[0] if sides["down"].shape else 0
    if not rank:
        raise refused(checkpoint, f"{module!r} has rank 0")
    if "alpha" in sides:
        value = float(sides["alpha"].torch()) if sides["alpha"].numel == 1 else math.nan
        if not math.isfinite(value):
            raise refused(checkpoint, f"{sides['alpha'].name!r} is not a number")
        return value / rank
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


_WEIGHT: Final = ".weight"
_OF_KOHYA: Final = "lora_"
_OF_ANOTHER: Final = "Give the model that the adapter was made for."
_SETTINGS_TURN: Final = "It fits the other way round: copy adapter_config.json, too, if it says so (fan_in_fan_out)."
_LACKS: Final = ("CK122", "CK123")
"""Findings that an adapter has no tensors of modules that its settings announce."""
_PLAIN_FIRST: Final = "Quantised weights become plain with `dequantize=True`."


class _Change(NamedTuple):
    """What one adapter does to one weight: it replaces it by a tensor, adds a product, or both."""

    adapter: Adapter
    pair: Pair | None
    parts: Sequence[LazyTensor]
    scale: float = 1.0
    is_turned: bool = False
    saved: LazyTensor | None = None

    @property
    def said(self) -> str:
        if self.pair is None:
            return f"that of {as_path(self.adapter.checkpoint.path)} in its place"
        kind = "DoRA" if self.pair.magnitude is not None else "LoRA"
        added = f"added{' to its own weight' if self.saved is not None else ''}, of rank {self.parts[0].shape[0]}"
        return f"{kind} of {as_path(self.adapter.checkpoint.path)} {added}, times {self.scale:g}"

    @property
    def is_alone(self) -> bool:
        """Whether no other change of the same weight is allowed with it."""
        return self.saved is not None or (self.pair is not None and self.pair.magnitude is not None)


class _Merged(ComputedWeight):
    """The bytes of a weight with what adapters add to it, or of a tensor that replaces it, in the weight's type."""

    def __init__(self, name: str, base: LazyTensor, changes: Sequence[_Change]) -> None:
        parts = [part for one in changes for part in (*one.parts, *filter(None, [one.saved]))]
        super().__init__(name, base.nbytes, "; ".join(one.said for one in changes), parts)
        self._base = base
        self._changes = changes

    def made(self) -> Iterator[bytes]:
        from ckptool.torch_ops import values

        weight = values.own(self._base)
        for one in self._changes:
            if one.saved is not None:
                weight = values.own(one.saved).to(weight.dtype)
            if one.pair is not None:
                parts = [values.own(part) for part in one.parts]
                is_embedding = one.pair.is_embedding
                weight = values.add_low_rank(
                    weight, *parts, scale=one.scale, is_turned=one.is_turned, is_embedding=is_embedding
                )
            one.adapter.checkpoint.check_unchanged()
        if not values.is_finite(weight.flatten()):
            lost = values.finite_count(values.own(self._base)) - values.finite_count(weight)
            if lost > 0:
                fact = f"{counted(lost, 'value')} of {self.name!r} would be infinite or NaN, and was finite"
                hint = "The adapter has such values, or is too strong for this type: cast the base to float32 first."
                raise MigrationRefused(fact, kind="not-merged", hint=hint)
        return values.bytes_of(weight)


def with_adapters(
    adapters: Sequence[tuple[Adapter, float]],
    checkpoint: Checkpoint,
    weights: Weights,
    *,
    allow_unmatched: bool,
    notes: list[str],
    assumed: list[str],
) -> tuple[Weights, Sequence[ComputedWeight]]:
    """
    Return the weights with the changes of adapters, each with its factor, and those that are computed. Tied names stay
    tied. What is to be said about them is added to ``notes``, and what no file confirms, to ``assumed``, too.

    Raises:
        MigrationRefused: A part of an adapter fits no weight, or several.
    """
    names = {name: name for name in weights.tensors}
    names |= {old: name for name, old in weights.old_names.items() if name in weights.tensors}
    tied = _tied_by_settings(checkpoint, weights)
    changes: dict[object, list[_Change]] = {}
    for adapter, weight in adapters:
        fits = _fits(adapter, checkpoint, names, notes, allow_unmatched=allow_unmatched)
        for name, many in Counter(fits.values()).items():
            if many > 1:
                raise refused(adapter.checkpoint, f"{many} of its parts are of {name!r}")
        here: dict[str, _Change] = {}
        for key, name in fits.items():
            here[key] = change = _change(adapter, key, weight, name, weights.tensors[name])
            memory = memory_of(weights.tensors[name].info)
            together = changes.setdefault(tied.get(memory, memory), [])
            together.append(change)
            if len(together) > 1 and any(one.is_alone for one in together):
                raise refused(adapter.checkpoint, f"{name!r} is changed in another way, too")
        _refuse_mixed(adapter, here, {key: weights.tensors[name].shape for key, name in fits.items()})
        path = as_path(adapter.checkpoint.path)
        facts = [f"{path}: {one.what}" for one in adapter.checkpoint.remarks if one.code in _LACKS]
        facts += [f"nothing says the alpha of {path}: it is taken to be the rank"] * adapter.has_no_alpha
        notes += facts
        assumed += facts
    made: dict[object, _Merged] = {}
    tensors = dict(weights.tensors)
    for name, tensor in weights.tensors.items():
        memory = memory_of(tensor.info)
        memory = tied.get(memory, memory)
        if memory is None or memory not in changes:
            continue
        if memory in made:
            notes.append(f"{name!r} is tied to what is merged, and changes with it")
        else:
            made[memory] = _Merged(name, tensor, changes[memory])
        tensors[name] = LazyTensor(name, made[memory].tensor(tensor.info, tensor.info.dtype))
    return weights._replace(tensors=tensors), list(made.values())


def _fits(
    adapter: Adapter, base: Checkpoint, names: Mapping[str, str], notes: list[str], *, allow_unmatched: bool
) -> dict[str, str]:
    """Return the tensor of the base for each pair, and for each replacing tensor, of an adapter."""
    groups: dict[str, list[str]] = {}
    for key in (*adapter.pairs, *adapter.saved):
        groups.setdefault(head_of(key), []).append(key)
    modules = {name.removesuffix(_WEIGHT): new for name, new in names.items() if name.endswith(_WEIGHT)}
    found: dict[str, str] = {}
    for head, keys in groups.items():
        found |= _placed(adapter, head, keys, modules, names)
    left = [key for keys in groups.values() for key in keys if key not in found]
    if left and not (allow_unmatched and found):
        fact = f"{len(left):,} of its {len(adapter.pairs) + len(adapter.saved):,} parts fit no weight: {some(left)}"
        plain = left[0].removeprefix(head_of(left[0]))
        hint = f"The nearest of the base: {some(by_likeness(plain, sorted(modules)))}."
        embedding = next(filter(EMBEDDINGS.search, names), None)
        if (
            embedding
            and any(OUTPUT_LAYERS.search(f"{key}{_WEIGHT}") for key in left)
            and ties_embedding(base) is not False
        ):
            hint = f"The output layer of this model is tied to {embedding!r}, and has no tensor: untie and save it."
        hint += " To merge what fits: `allow_unmatched=True`." if found else ""
        quantised = quantization_of(base)
        hint += f" {_PLAIN_FIRST}" if quantised is not None and quantised.bound else ""
        raise refused(adapter.checkpoint, fact, hint)
    if left:
        path = as_path(adapter.checkpoint.path)
        notes.append(f"{len(left):,} parts of {path} fit no weight, and are left out: {some(left)}")
    return found


def _tied_by_settings(checkpoint: Checkpoint, weights: Weights) -> dict[Memory | None, Memory | None]:
    """Return the memory of the embedding by that of an output layer, if config.json ties them and they are equal."""
    from ckptool.torch_ops.differences import differ

    tensors = weights.tensors.items()
    head, embedding = (
        next((one for name, one in tensors if of.search(name)), None) for of in (OUTPUT_LAYERS, EMBEDDINGS)
    )
    if head is None or embedding is None or (head.shape, head.dtype) != (embedding.shape, embedding.dtype):
        return {}
    if ties_embedding(checkpoint) is not True or differ(head, embedding):
        return {}
    return {memory_of(head.info): memory_of(embedding.info)}


def _placed(
    adapter: Adapter, head: str, keys: Sequence[str], modules: Mapping[str, str], names: Mapping[str, str]
) -> dict[str, str]:
    """
    Return the tensors of the base for the parts of an adapter whose names all begin with ``head``.

    Names of the base may have a longer prefix, if it is the same for all; some parts may be missing if there is none.
    """
    is_flat = head.startswith(_OF_KOHYA)
    if is_flat:  # dots are underscores there: a name that two modules would have is not used
        many = Counter(module.replace(".", "_") for module in modules)
        flat = ((module.replace(".", "_"), name) for module, name in modules.items())
        modules = {module: name for module, name in flat if many[module] == 1}
    best: dict[str, str] = {}
    for start in (head,) if is_flat or head == OF_PEFT else ("", head):
        own = {key: (key[len(start) :], modules if key in adapter.pairs else names) for key in keys}
        first, there = own[keys[0]]
        end = f"{'_' if is_flat else '.'}{first}"
        before = ["", *dict.fromkeys(one[: -len(first)] for one in there if one.endswith(end) and first not in there)]
        whole = [at for at in before if all(at + one in home for one, home in own.values())]
        if len(meant := dict.fromkeys(there[at + first] for at in whole)) > 1:
            raise refused(adapter.checkpoint, f"{keys[0]!r} may be {some(list(meant))}")
        if whole:
            return {key: home[whole[0] + one] for key, (one, home) in own.items()}
        best = max(best, {key: home[one] for key, (one, home) in own.items() if one in home}, key=len)
    return best


def _refuse_mixed(adapter: Adapter, changes: Mapping[str, _Change], shapes: Mapping[str, Sequence[int]]) -> None:
    """Refuse square weights that are said to be [inputs, outputs] beside others that surely are not."""
    layers = {
        key: one
        for key, one in changes.items()
        if adapter.turns and one.pair is not None and not one.pair.is_embedding and len(shapes[key]) == 2
    }
    square = next((key for key, one in layers.items() if one.is_turned and len(set(shapes[key])) == 1), None)
    other = next((key for key, one in layers.items() if not one.is_turned), None)
    if square is not None and other is not None:
        fact = f"its settings say fan_in_fan_out, which {other!r} is not: {square!r} is square, and may be either"
        raise refused(adapter.checkpoint, fact, _BY_ITS_LIBRARY)


def _change(adapter: Adapter, key: str, weight: float, name: str, base: LazyTensor) -> _Change:
    """Return the change of a weight of the base by a part of an adapter; refuse what does not fit it."""
    shape = base.shape
    refuse_no_floats(adapter.checkpoint, base, f"{name!r} in the base", hint=_PLAIN_FIRST)
    pair = adapter.pairs.get(key)
    saved = adapter.saved[key] if pair is None else pair.saved
    if saved is not None:
        refuse_no_floats(adapter.checkpoint, saved, repr(saved.name))
        if saved.shape != shape:
            fact = f"{saved.name!r} is {list(saved.shape)}, and {name!r} in the base {list(shape)}"
            raise refused(adapter.checkpoint, fact)
    if pair is None:
        return _Change(adapter, None, [], saved=saved)
    if pair.down.dtype != pair.up.dtype and "float64" in (pair.down.dtype, pair.up.dtype):
        fact = f"{key!r} has matrices of {pair.down.dtype} and {pair.up.dtype}"
        raise refused(adapter.checkpoint, fact)
    down, up, magnitude = pair.down.shape, pair.up.shape, pair.magnitude
    is_product = len(down) > 1 and len(up) > 1 and up[1] == down[0] and not any(size != 1 for size in up[2:])
    full, is_kernel = (*up[:1], *down[1:]), any(size > 1 for size in down[2:])
    is_plain = full == shape if is_kernel else full[:2] == shape[:2] and not any(size != 1 for size in shape[2:])
    is_turned = not is_kernel and full[1::-1] == shape and (adapter.turns or pair.is_embedding)
    has_rows = magnitude is None or magnitude.numel == up[0]
    if not is_product or not (is_turned or (is_plain and not pair.is_embedding)) or not has_rows:
        beside = "" if magnitude is None else f", and a magnitude of {list(magnitude.shape)}"
        fact = f"{key!r} has {list(down)} and {list(up)}{beside}, and {name!r} in the base is {list(shape)}"
        is_other_way = full[1::-1] == shape and not adapter.turns
        raise refused(adapter.checkpoint, fact, _SETTINGS_TURN if is_other_way else _OF_ANOTHER)
    parts = [pair.down, pair.up, *filter(None, [magnitude])]
    return _Change(adapter, pair, parts, pair.scale * weight, is_turned, saved)
