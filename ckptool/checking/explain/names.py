"""
The names of tensors in a message, of whatever kind it is: where each is in a checkpoint or beside it, and what it is.

Only names that the file has, or that can be nothing but those of tensors, count: a message is full of others.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from ckptool.checking import advice
from ckptool.checking.explain.keys import Cause, form_of, key_lists, names_meet, why_renamed
from ckptool.checking.finding import run
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.families import adapter_of
from ckptool.errors import Failure
from ckptool.formats import open_checkpoint
from ckptool.formats.directories import walk
from ckptool.formats.json_beside import object_beside, quantization_of
from ckptool.limits import Limits
from ckptool.messages import counted, some
from ckptool.names.matching import SPELLINGS, Rename, is_extra_state
from ckptool.names.missing import not_there
from ckptool.names.renaming import without_marked
from ckptool.names.wrappers import ADDED_BY
from ckptool.sources.naming import command_line, is_far

_MOST_NAMES: Final = 10_000
_MOST_FILES: Final = 16
_SPLIT: Final = re.compile(r"""[\s,;:'"`()\[\]{}|=<>]+""")
_QUOTED: Final = re.compile(r"""['"`]([\w./-]{1,1000})['"`]""")
_DOTTED: Final = re.compile(r"\w[\w-]*(?:\.[\w-]+)+(?:/shard_\d+_\d+)?")
_DEEP: Final = re.compile(r"(?!self\.|torch\.|cls\.)[\w-]+\.[\w-]+\.")
"""A name with three parts is no attribute in a line of code, mostly."""
_TENSOR: Final = re.compile(
    r"[._](?:(?:in_proj_|base_layer\.)?weight|bias|gamma|beta|running_(?:mean|var)|weight_[gv]|original[01]?|inv_freq"
    r"|embed(?:ding)?s|lora_\w+|lok?[hr]a?_\w+|alpha|absmax|quant_map|q?weight|qzeros|scales|g_idx|SCB|_extra_state"
    r"|\w*_(?:scale(?:_inv)?|scales|blocks|packed|shape|quantizer)|w13_\w+|w2_\w+)(?:/shard_\d+_\d+)?\Z"
)
"""How names end that are those of tensors, whatever message they are in."""
_MODULE: Final = re.compile(r"no module or parameter named '([^'\n]{1,1000})'")
_HEADS: Final = re.compile(r"(?:^|\.)(?:lm_head|embed_out|output_layer|output)\.weight")
_EMBEDDINGS: Final = re.compile(r"(?:^|\.)(?:embed_tokens|wte|word_embeddings|shared|tok_embeddings)\.weight")
_FORMS: Final = (
    (r"\bqkv_proj\b", "q_proj"),
    (r"\bgate_up_proj\b", "gate_proj"),
    (r"\bexperts\.w13_", "experts.0.gate_proj."),
    (r"\bexperts\.w13_", "experts.gate_up_proj_"),
    (r"\bexperts\.w2_", "experts.0.down_proj."),
    (r"\bexperts\.w2_", "experts.down_proj_"),
    (r"\bweight$", "qweight"),
    (r"\bweight$", "weight_packed"),
    (r"$", "_blocks"),
    (
        r"\b(?:int8_weight|qweight|weight_(?:packed|scale|scale_inv)|weight\.(?:nested_)?(?:absmax|quant_map))$",
        "weight",
    ),
)
"""What servers join of several tensors, or quantise; and the first of these in a file, or the one that is not."""
_LONGEST: Final = 200
_CHUNK: Final = 1 << 22


def where(checkpoint: Checkpoint, text: str, limits: Limits) -> Cause | None:
    """Return where the names of a message are, and what they are there; None if it has none that say anything."""
    there = _there(checkpoint)
    listed = dict.fromkeys(name for names in key_lists(text) for name in names)
    for module in _MODULE.findall(text):
        listed |= dict.fromkeys(name for name in checkpoint.weights or () if f"{name}.".startswith(f"{module}."))
    tokens = (token.rstrip(".") for token in _SPLIT.split(text))
    named = list(islice(dict.fromkeys((*listed, *filter(_DOTTED.fullmatch, tokens))), _MOST_NAMES))
    found = _found(named, there)
    sure = {*listed, *_QUOTED.findall(text), *(name for name in named if _DEEP.match(name))}
    named = [name for name in named if name in found or (name in sure and _TENSOR.search(f".{name}"[-_LONGEST:]))]
    causes = list(_causes(checkpoint, named, found, there, text, limits)) if named else []
    if not causes:
        return None
    first = next((one for one in causes if one.hint or one.command), causes[0])
    return first._replace(fact="; ".join(one.fact for one in causes))


def _there(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the full name of each tensor by that, and by what it is called in the weights."""
    head = checkpoint.weights.head if checkpoint.weights is not None else ""
    return {name.removeprefix(head): name for name in checkpoint.tensors} | {name: name for name in checkpoint.tensors}


def _ends(name: str) -> Iterator[str]:
    at = name.find(".")
    while at >= 0:
        yield name[at + 1 :]
        at = name.find(".", at + 1)


def _found(named: Iterable[str], there: Collection[str]) -> dict[str, str]:
    """Return what names are called in a file: as they are, or with something in front, or with less."""
    wanted = dict.fromkeys(named)
    found = {name: name for name in wanted if name in there}
    wanted = {name: None for name in wanted if name not in found}
    for other in there if wanted else ():
        for end in _ends(other):
            if end in wanted:
                found.setdefault(end, other)
    for name in wanted.keys() - found.keys():
        shorter = next((end for end in _ends(name) if "." in end and end in there), None)
        if shorter is not None:
            found[name] = shorter
    return found


def _shown(names: Sequence[str]) -> str:
    """Return some names, those that differ by numbers as one."""
    alike = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in names))
    return some(names) if len(alike) == len(names) else f"{len(names):,} names ({some(alike)})"


def _are(names: Sequence[str]) -> str:
    return f"{_shown(names)} {'is' if len(names) == 1 else 'are'}"


def _causes(
    checkpoint: Checkpoint, named: list[str], found: dict[str, str], there: Mapping[str, str], text: str, limits: Limits
) -> Iterator[Cause]:
    """Yield what is to be said of the names, what decides most first."""
    extra = [name for name in named if is_extra_state(name)]
    rest = [name for name in named if name not in extra]
    if extra:
        yield _extra_state(checkpoint, extra, text)
    quantized, adapter = quantization_of(checkpoint), adapter_of(checkpoint)
    parts = quantized.types if quantized is not None else ()
    coded = [name for name in rest if name in found and there[found[name]] in parts]
    if coded and quantized is not None:
        fact = f"{_are(coded)} of its quantised weights: {quantized.short}"
        hint = "A loader has to know this: convert the weights that they were made of, or dequantise them."
        yield Cause(fact, hint, run(checkpoint, "inspect").command)
    rest = [name for name in rest if name not in coded]
    says = _says_tied(checkpoint)
    heads = [name for name in rest if _HEADS.search(name) or (says and _EMBEDDINGS.search(name) and name not in found)]
    if heads and (tied := _tied(checkpoint, heads, found, there, limits, says=says)) is not None:
        yield tied
        rest = [name for name in rest if name not in heads]
    same = [name for name in rest if found.get(name) == name]
    if same:
        yield _same(checkpoint, same, text)
    others = [name for name in rest if name in found and name not in same]
    absent = [name for name in rest if name not in found]
    if absent:
        beside = _beside(checkpoint, [*others, *absent], limits)
        elsewhere = {name for names in beside.values() for name in names}
        for place, names in beside.items():
            yield Cause(f"{_are(names)} in {place}", "Give the loader that.", command_line(place, "inspect"))
        absent = [name for name in absent if name not in elsewhere]
    if others:
        yield _renamed(checkpoint, others, found, text)
    forms = _in_other_forms(absent, there)
    if forms:
        yield Cause(f"{_are([*forms])} there in another form: {some([repr(form) for form in forms.values()])}")
    absent = [name for name in absent if name not in forms]
    changes = names_meet(absent, list(checkpoint.weights or ()), guesses=False) if absent == named else None
    if changes:
        command = _migration(checkpoint, text, renames=changes)
        yield Cause(f"{_are(absent)} there under other names", why_renamed(changes), command)
        absent = []
    if absent:
        has = f": it has {some(list(checkpoint.weights or there))}" if absent == named and there else ""
        yield Cause(not_there(absent[0], list(there)) if len(absent) == 1 else f"{_are(absent)} not there{has}")
    if adapter is not None and (absent or same):
        ranks = some([str(rank) for rank in adapter.ranks])
        fact = f"it is an adapter (LoRA, r {ranks}, on {some(adapter.targets)}), without the weights of its base"
        is_of_base = any("lora" not in name for name in absent)
        yield Cause(fact, "Load the base model first, and the adapter onto it." if is_of_base else None)
    elif absent and checkpoint.part_of is not None:
        part = checkpoint.part_of
        yield Cause(f"it is {part.what}", "Give all of them together.", command_line(part.path, "inspect"))


def _extra_state(checkpoint: Checkpoint, extra: list[str], text: str) -> Cause:
    """State of FP8 that the file has and the model has not, or the reverse."""
    own = [name for name in checkpoint.weights or () if is_extra_state(name)]
    fact = f"{_are(extra)} state of FP8, and no weight: it holds such under {counted(len(own), 'name')}"
    if not own or key_lists(text).missing:
        return Cause(f"{fact}; a model that does not compute in FP8 needs none")
    glob = "*._extra_state" if all("." in name for name in own) else "*_extra_state"
    return Cause(fact, "Leave them out.", _migration(checkpoint, text, exclude=(glob,)))


def _same(checkpoint: Checkpoint, same: list[str], text: str) -> Cause:
    """Names that are there: of another spelling than the loader knows, of a wrapper, or of a model without its head."""
    fact = f"{_are(same)} in it, as {'it is' if len(same) == 1 else 'they are'}"
    heads = {name.partition(".")[0] for name in checkpoint.weights or ()}
    prefix = next(iter(heads)) if len(heads) == 1 else ""
    spelled = (
        tuple(Rename("rename", f"{old}={new}") for old, new in spelling if any(re.search(old, name) for name in same))
        for spelling in SPELLINGS[:2]
    )
    if changes := next(filter(None, spelled), ()):
        fact, hint = f"{fact}, in one of two spellings", "If the loader wants the other, rename them."
    elif prefix in ADDED_BY or (prefix and prefix in _MODULE.findall(text)):
        changes = (Rename("strip_wrappers") if prefix in ADDED_BY else Rename("strip_prefix", prefix),)
        fact, hint = (
            f"{fact}; every name begins with '{prefix}.'",
            "If the loader has no such module, write them without.",
        )
    elif {"layers", "embed_tokens"} <= heads and "model" not in heads:
        changes = (Rename("add_prefix", "model"),)
        fact = f"{fact}; no name begins with 'model.': it is the inner model of a causal language model, saved alone"
        hint = "Write it with the prefix; lm_head.weight has to be tied, or is lost."
    else:
        return Cause(fact)
    return Cause(fact, hint, _migration(checkpoint, text, renames=changes))


def _migration(checkpoint: Checkpoint, text: str, **options: Any) -> str | None:
    return advice.migration(checkpoint, form=form_of(text, checkpoint), **options).command


def _renamed(checkpoint: Checkpoint, others: list[str], found: Mapping[str, str], text: str) -> Cause:
    """Names that are there with something in front, or with less."""
    changes = names_meet(others, list(checkpoint.weights or ()))
    fact = not_there(others[0], list(checkpoint.weights or ()) or list(found.values()))
    fact += f", and so for {len(others) - 1:,} more" if len(others) > 1 else ""
    if not changes:
        return Cause(fact)
    changes = tuple(one.as_rename if one.option == "strip_prefix" else one for one in changes)
    command = _migration(checkpoint, text, renames=changes)
    return Cause(fact, "If the loader is to take them by these names, rename them.", command)


def _in_other_forms(named: Iterable[str], there: Collection[str]) -> dict[str, str]:
    """Return what there is of tensors in another form: quantised or not, or joined of several by a server."""
    forms = {
        name: [re.sub(old, new, without_marked(name)) for old, new in _FORMS if re.search(old, name)] for name in named
    }
    known = _found((one for some_forms in forms.values() for one in some_forms), there)
    found = {name: next((known[one] for one in some_forms if one in known), None) for name, some_forms in forms.items()}
    return {name: form for name, form in found.items() if form is not None}


def _says_tied(checkpoint: Checkpoint) -> bool | None:
    """Return what the settings beside a file say of the output layer; None if they say nothing."""
    settings = object_beside(checkpoint.path, checkpoint.source, "config.json")
    says = [one.get("tie_word_embeddings") for one in (settings, settings.get("text_config")) if isinstance(one, dict)]
    return next((one for one in says if isinstance(one, bool)), None)


def _tied(
    checkpoint: Checkpoint,
    heads: list[str],
    found: Mapping[str, str],
    there: Mapping[str, str],
    limits: Limits,
    *,
    says: bool | None,
) -> Cause | None:
    """The output layer and other names of the embedding, if the model ties them to it, or may do so."""
    said = ", and config.json says that it is tied to the embedding" if says else ""
    twin = next((one for name, one in checkpoint.tensors.items() if _EMBEDDINGS.search(name)), None)
    if twin is None or (not says and (heads[0] in found or says is False or adapter_of(checkpoint) is not None)):
        return None
    if heads[0] not in found:
        fact = f"{_are(heads)} not there{said}, and {twin.name} is"
        return Cause(fact, "If the model ties these to its embedding, nothing is lost: it does so after loading.")
    own = checkpoint.tensors[there[found[heads[0]]]]
    if twin.shape != own.shape or twin.dtype != own.dtype or is_far(checkpoint.path):
        return Cause(f"{heads[0]} is there{said}")
    pairs = zip(own.chunks(_CHUNK, limits=limits), twin.chunks(_CHUNK, limits=limits), strict=True)
    if not all(one == other for one, other in pairs):
        return Cause(f"{heads[0]} is there{said}, but has other values than {twin.name}")
    command = _migration(checkpoint, "", exclude=(found[heads[0]],))
    return Cause(f"{heads[0]} is there, equal to {twin.name}{said}", "Leave it out.", command)


def _beside(checkpoint: Checkpoint, named: list[str], limits: Limits) -> dict[str, list[str]]:
    """Return which names are in which other checkpoints of the folder."""
    if is_far(checkpoint.path) or not os.path.exists(checkpoint.path):
        return {}
    places = [checkpoint.part_of.path] if checkpoint.part_of is not None and checkpoint.part_of.path else []
    if checkpoint.is_folder or os.path.isdir(checkpoint.path):
        places += walk.beside(checkpoint)
    else:
        folder = os.path.dirname(checkpoint.path) or os.curdir
        places += [path for path in walk.inside_refused(folder) if not os.path.samefile(path, checkpoint.path)]
    found: dict[str, list[str]] = {}
    for place in places[:_MOST_FILES]:
        try:
            with open_checkpoint(place, limits=limits) as other:
                there = _there(other)
        except Failure:
            continue
        names = [name for name in named if name in there]
        if names:
            found[place] = names
    return found
