"""
The names of tensors in an error message: which are in a checkpoint or beside it, and what they are.

Only names that the file has, or that are surely names of tensors, count: a message has many other words.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Final

from ckptool.checking import finding
from ckptool.checking.explain import MOST_NAMES, Cause, form_of, key_lists, names_meet, rename_hint
from ckptool.checking.finding import run
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.families import adapter_of
from ckptool.checkpoints.quantized import Quantization
from ckptool.errors import Failure
from ckptool.formats import listing, open_checkpoint
from ckptool.formats.json_beside import EMBEDDINGS, HEADS, quantization_of, ties_embedding
from ckptool.limits import Limits
from ckptool.messages import counted, some
from ckptool.names.matching import SPELLINGS, Rename, is_extra_state
from ckptool.names.renaming import not_there, without_marked
from ckptool.names.wrappers import ADDED_BY
from ckptool.sources.paths import command_line, is_remote

_MOST_FILES: Final = 16
_SPLIT: Final = re.compile(r"""[\s,;:'"`()\[\]{}|=<>]+""")
_NEXT_WORD: Final = re.compile(r"\.[A-Z][a-z]*\Z")
"""The first word of a sentence that follows without a space."""
_QUOTED: Final = re.compile(r"""['"`]([\w./-]{1,1000})['"`]""")
_DOTTED: Final = re.compile(r"\w[\w-]*(?:\.[\w-]+)+(?:/shard_\d+_\d+)?")
_DEEP: Final = re.compile(r"(?!self\.|torch\.|cls\.)[\w-]+\.[\w-]+\.")
"""A name with three parts is seldom an attribute in a line of code."""
_TENSOR: Final = re.compile(
    r"[._](?:(?:in_proj_|base_layer\.)?weight|bias|gamma|beta|running_(?:mean|var)|weight_[gv]|original[01]?|inv_freq"
    r"|embed(?:ding)?s|lora_\w+|lok?[hr]a?_\w+|alpha|absmax|quant_map|q?weight|qzeros|scales|g_idx|SCB|_extra_state"
    r"|\w*_(?:scale(?:_inv)?|scales|blocks|packed|shape|quantizer)|w13_\w+|w2_\w+)(?:/shard_\d+_\d+)?\Z"
)
"""Endings that only names of tensors have, whatever the message."""
_MODULE: Final = re.compile(r"no module or parameter named '([^'\n]{1,1000})'")
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
"""Names that servers join from several tensors, or quantise; and the name of the first of these, or the plain one."""
_LONGEST: Final = 200
_CHUNK: Final = 1 << 22


def where(checkpoint: Checkpoint, text: str, limits: Limits) -> Cause | None:
    """Return where the names of a message are in a checkpoint, and what they are; None if it has no such names."""
    causes = list(_Lookup(checkpoint, text, limits).causes())
    if not causes:
        return None
    first = next((one for one in causes if one.hint or one.command), causes[0])
    return first._replace(fact="; ".join(one.fact for one in causes))


def dense(checkpoint: Checkpoint, quantized: Quantization, names: Sequence[str]) -> Cause:
    """Return the cause that weights, ``names`` among them, are quantised, and the command that makes them dense."""
    plain = finding.dense(checkpoint)
    which = f"{_are(names)} of its quantised weights" if names else "its weights are quantised"
    hint = "Take a loader that knows this, or let migrate make plain weights of them (`dequantize=True`)."
    return Cause(f"{which}: {quantized.short}", hint, plain.command or run(checkpoint, "inspect").command)


class _Lookup:
    """The names of a message, and what a checkpoint has for them. Each rule takes the names that it can explain."""

    def __init__(self, checkpoint: Checkpoint, text: str, limits: Limits) -> None:
        self.checkpoint, self.text, self.limits = checkpoint, text, limits
        head = checkpoint.weights.head if checkpoint.weights is not None else ""
        self.weights = list(checkpoint.weights or ())
        self.there = {name.removeprefix(head): name for name in checkpoint.tensors}
        """The full name of each tensor, by itself and by its name in the weights."""
        self.there |= {name: name for name in checkpoint.tensors}
        listed = dict.fromkeys(name for names in key_lists(text) for name in names)
        for module in _MODULE.findall(text):
            listed |= dict.fromkeys(name for name in self.weights if f"{name}.".startswith(f"{module}."))
        tokens = (_NEXT_WORD.sub("", token.rstrip(".")) for token in _SPLIT.split(text))
        named = list(islice(dict.fromkeys((*listed, *filter(_DOTTED.fullmatch, tokens))), MOST_NAMES))
        self.found = _found(named, self.there)
        sure = {*listed, *_QUOTED.findall(text), *filter(_DEEP.match, named)}
        self.named = {
            name: None
            for name in named
            if name in self.found
            or (name in listed and "." in name)
            or (name in sure and _TENSOR.search(f".{name}"[-_LONGEST:]))
        }
        self.rest = dict(self.named)
        """The names that no rule has explained yet."""

    def causes(self) -> Iterator[Cause]:
        """Yield the causes that the rules find; rules that decide most come first."""
        rules = (
            *(self.extra_state, self.quantized, self.tied, self.same, self.respelled, self.beside),
            *(self.renamed, self.in_other_forms, self.absent),
        )
        for rule in rules:
            if self.rest:
                yield from rule()

    def take(self, names: Iterable[str]) -> list[str]:
        """Remove names from ``rest``, because they are explained now, and return them."""
        taken = list(names)
        for name in taken:
            del self.rest[name]
        return taken

    def migration(self, **options: Any) -> str | None:
        """Return the command that writes the checkpoint with changes, in the form that the message is about."""
        return finding.migration(self.checkpoint, form=form_of(self.text, self.checkpoint), **options).command

    def extra_state(self) -> Iterator[Cause]:
        """State of FP8 that the file has and the model has not, or the reverse."""
        extra = self.take([name for name in self.rest if is_extra_state(name)])
        if not extra:
            return
        own = [name for name in self.weights if is_extra_state(name)]
        fact = f"{_are(extra)} state of FP8, and no weight: it holds such under {counted(len(own), 'name')}"
        if own and not key_lists(self.text).missing:
            glob = "*._extra_state" if all("." in name for name in own) else "*_extra_state"
            yield Cause(fact, "Leave them out.", self.migration(exclude=(glob,)))
        else:
            yield Cause(f"{fact}; a model that does not compute in FP8 needs none")

    def quantized(self) -> Iterator[Cause]:
        """Codes and scales."""
        quantized = quantization_of(self.checkpoint)
        if quantized is None:
            return
        parts = self.take([one for one in self.rest if self.there.get(self.found.get(one, "")) in quantized.types])
        if parts:
            yield dense(self.checkpoint, quantized, parts)

    def tied(self) -> Iterator[Cause]:
        """The output layer and other names of the embedding, if the model ties them to it, or may do so."""
        maybe = [name for name in self.rest if HEADS.search(name) or EMBEDDINGS.search(name)]
        twin = next((one for name, one in self.checkpoint.tensors.items() if EMBEDDINGS.search(name)), None)
        if not maybe or twin is None:
            return
        says = ties_embedding(self.checkpoint)
        heads = [name for name in maybe if HEADS.search(name) or (says is True and name not in self.found)]
        is_there = bool(heads) and heads[0] in self.found
        is_open = says is not True and (is_there or says is False or self.adapter() is not None)
        if not heads or is_open:
            return
        said = ", and config.json says that the output layer is tied to the embedding" if says is True else ""
        self.take(heads)
        if not is_there:
            hint = "If the model ties these to its embedding, nothing is lost: it does so after loading."
            yield Cause(f"{_are(heads)} not there, {twin.name} is{said}", hint)
            return
        own = self.checkpoint.tensors[self.there[self.found[heads[0]]]]
        if twin.shape != own.shape or twin.dtype != own.dtype or is_remote(self.checkpoint.path):
            yield Cause(f"{heads[0]} is there{said}")
            return
        pairs = zip(own.chunks(_CHUNK, limits=self.limits), twin.chunks(_CHUNK, limits=self.limits), strict=True)
        if all(one == other for one, other in pairs):
            fact = f"{heads[0]} is there, equal to {twin.name}{said}"
            yield Cause(fact, "Leave it out.", self.migration(exclude=(self.found[heads[0]],)))
        else:
            yield Cause(f"{heads[0]} is there{said}, but has other values than {twin.name}")

    def same(self) -> Iterator[Cause]:
        """Names that are there as they are; the loader may want another spelling, no wrapper, or a prefix."""
        same = self.take([name for name in self.rest if self.found.get(name) == name])
        if not same:
            return
        fact = f"{_are(same)} in it, as {'it is' if len(same) == 1 else 'they are'}"
        heads = {name.partition(".")[0] for name in self.weights}
        prefix = next(iter(heads)) if len(heads) == 1 else ""
        spelled = (
            tuple(Rename("rename", f"{old}={new}") for old, new in pairs if any(re.search(old, name) for name in same))
            for pairs in SPELLINGS[:2]
        )
        hint, changes = None, next(filter(None, spelled), ())
        if changes:
            fact, hint = f"{fact}, in one of two spellings", "If the loader wants the other, rename them."
        elif prefix in ADDED_BY or (prefix and prefix in _MODULE.findall(self.text)):
            changes = (Rename("strip_wrappers") if prefix in ADDED_BY else Rename("strip_prefix", prefix),)
            fact, hint = f"{fact}; every name begins with '{prefix}.'", "If the model has no such module, take it off."
        elif {"layers", "embed_tokens"} <= heads and "model" not in heads:
            changes = (Rename("add_prefix", "model"),)
            fact += "; no name begins with 'model.': it is the inner model of a causal language model, saved alone"
            hint = "Write it with the prefix; lm_head.weight has to be tied, or is lost."
        else:
            fact += f"; {adapter}" if (adapter := self.adapter()) else ""
        is_whole = self.named.keys() <= self.found.keys()
        yield Cause(fact, hint, self.migration(renames=changes) if changes and is_whole else None)

    def beside(self) -> Iterator[Cause]:
        """Names that are in other checkpoints of the folder."""
        places = _beside(self.checkpoint) if self.rest.keys() - self.found.keys() else []
        for place in places:
            try:
                with open_checkpoint(place, limits=self.limits) as other:
                    there = {*other.tensors, *(other.weights or ())}
            except Failure:
                continue
            names = self.take([name for name in self.rest if name in there])
            if names:
                part = self.checkpoint.part_of
                hint = "That is another checkpoint: give the loader the one that it is for, alone."
                hint = "Give all files of it together." if part is not None and place == part.path else hint
                yield Cause(f"{_are(names)} in {place}", hint, command_line(place, "inspect"))

    def renamed(self) -> Iterator[Cause]:
        """Names that are there with a longer or a shorter prefix."""
        others = self.take([name for name in self.rest if name in self.found])
        if not others:
            return
        changes = names_meet(others, self.weights) if self.named.keys() <= self.found.keys() else None  # else some lack
        changes = tuple(one.as_rename if one.option == "strip_prefix" else one for one in changes or ())
        fact = not_there(others[0], self.weights or list(self.found.values()))
        fact += f", and so for {len(others) - 1:,} more" if len(others) > 1 else ""
        hint = "If the loader is to take them by these names, rename them." if changes else None
        yield Cause(fact, hint, self.migration(renames=changes) if changes else None)

    def in_other_forms(self) -> Iterator[Cause]:
        """Names that are there quantised or not, or that a server joins of several."""
        bare = {name: without_marked(name) for name in self.rest}
        forms = {
            name: [re.sub(old, new, one) for old, new in _FORMS if re.search(old, one)] for name, one in bare.items()
        }
        known = _found((form for several in forms.values() for form in several), self.there)
        met = {name: next((known[one] for one in several if one in known), None) for name, several in forms.items()}
        names = self.take([name for name, form in met.items() if form is not None])
        if names:
            yield Cause(f"{_are(names)} there in another form: {some([repr(met[name]) for name in names])}")

    def respelled(self) -> Iterator[Cause]:
        """Names that are all there in another spelling."""
        is_all = len(self.rest) == len(self.named) and self.rest.keys().isdisjoint(self.found)
        changes = names_meet(self.rest, self.weights, guesses=False) if is_all else None
        if changes:
            names = self.take([*self.rest])
            yield Cause(f"{_are(names)} there under other names", rename_hint(changes), self.migration(renames=changes))

    def absent(self) -> Iterator[Cause]:
        """Names that are nowhere; and what the file is a part of."""
        names, part, adapter = self.take([*self.rest]), self.checkpoint.part_of, self.adapter()
        has = (
            f": it has {some(self.weights or list(self.there))}" if len(names) == len(self.named) and self.there else ""
        )
        yield Cause(not_there(names[0], list(self.there)) if len(names) == 1 else f"{_are(names)} not there{has}")
        if adapter:
            is_of_base = any("lora" not in name for name in names)
            yield Cause(adapter, "Load the base model first, and the adapter onto it." if is_of_base else None)
        elif part is not None:
            yield Cause(f"it is {part.what}", "Give all of them together.", command_line(part.path, "inspect"))

    def adapter(self) -> str | None:
        """Return a text about the adapter that the file is; None if it is not one."""
        found = adapter_of(self.checkpoint)
        if found is None:
            return None
        ranks = some([str(rank) for rank in found.ranks])
        return f"it is an adapter (LoRA, r {ranks}, on {some(found.targets)}), without the weights of its base"


def _ends(name: str) -> Iterator[str]:
    at = name.find(".")
    while at >= 0:
        yield name[at + 1 :]
        at = name.find(".", at + 1)


def _found(named: Iterable[str], there: Collection[str]) -> dict[str, str]:
    """Return the names in a file of given names: the same, or with a longer or a shorter prefix."""
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


def _are(names: Sequence[str]) -> str:
    """Return some names and a verb; names that differ only by numbers are shown as one."""
    alike = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in names))
    shown = some(names) if len(alike) == len(names) else f"{len(names):,} names ({some(alike)})"
    return f"{shown} {'is' if len(names) == 1 else 'are'}"


def _beside(checkpoint: Checkpoint) -> list[str]:
    """Return the paths of other checkpoints in the folder; first the one that the file is a part of."""
    if is_remote(checkpoint.path) or not os.path.exists(checkpoint.path):
        return []
    places = [checkpoint.part_of.path] if checkpoint.part_of is not None and checkpoint.part_of.path else []
    if os.path.isdir(checkpoint.path):
        places += listing.beside(checkpoint) if checkpoint.tensors else listing.inside_refused(checkpoint.path)
    else:
        inside = listing.inside_refused(os.path.dirname(checkpoint.path) or os.curdir)
        places += [os.path.normpath(one) for one in inside if not os.path.samefile(one, checkpoint.path)]
    return places[:_MOST_FILES]
