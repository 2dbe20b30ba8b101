"""The cause of an error message in a file: a function for each kind of message."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from itertools import chain
from operator import ne
from os import PathLike
from typing import Any, Final

from ckptool.checking import finding, torch_load
from ckptool.checking.explain import (
    OWN,
    Cause,
    Explanation,
    form_of,
    key_lists,
    mismatched,
    names_meet,
    rename_hint,
    without_adapter,
)
from ckptool.checking.explain.names import dense, where
from ckptool.checking.finding import CODES, run
from ckptool.checking.structure import examine
from ckptool.checkpoints.checkpoint import Checkpoint, StateDict
from ckptool.checkpoints.families import adapter_of
from ckptool.checkpoints.summary import count, numel_and_nbytes, summarise
from ckptool.errors import Failure, FileUnavailable
from ckptool.formats import open_checkpoint
from ckptool.formats.json_beside import base_model, quantization_of
from ckptool.limits import Limits
from ckptool.messages import FORMS, counted, counts, show_nbytes, some
from ckptool.names.matching import Rename, is_benign, renamed
from ckptool.names.wrappers import ADDED_BY
from ckptool.pickles.nodes import lookup, mapping_pairs
from ckptool.sources.paths import command_line, shown_path

_MOST_LISTED: Final = 8
_HEAD: Final = re.compile(r"^(?:base_model\.model|lora_(?:unet|te\d?|transformer)|[^.]+)")
_OF_LORA: Final = re.compile(r"lora_(?:embedding_)?[AB]|lora[._](?:\w+\.)?(?:down|up)\b|\.alpha$")
_KINDS: Final = {".lokr_": "LoKr", ".hada_": "LoHa", ".oft_": "OFT", ".ia3_": "IA3", "prompt_embeddings": "prompt"}
_OF_TASK: Final = re.compile(r"(?:score|classifier|qa_outputs|lm_head|cls|pooler|pre_classifier)\.")
"""Heads of transformers: that of another task has other values, whatever its shapes are."""
_OF_PEFT: Final = re.compile(r"^(?:transformer\.)?base_model\.model\.")
_COMPONENTS: Final = {
    "a diffusion model": r"(model\.)?diffusion_model\.|(double|single|joint|input|down|transformer)_blocks\.|blocks\.",
    "a text encoder": r"(cond_stage_model|conditioner|text_encoders?|text_model)\.|encoder\.block\.",
    "a VAE": r"(first_stage_model|vae)\.|(en|de)coder\.(conv_in|mid)",
}
"""Components of image generators, and how the names of their tensors begin."""
_OTHER_FILE: Final = "It has no such entry: another file was meant, or one of another release of the code."
_OF_DAMAGE: Final = ("zip-reader", "some-damage")
_SAVED: Final = ("hyper_parameters", "optimizer_states", "lr_schedulers", "loops")


def look_into(
    found: tuple[Explanation, ...], text: str, origin: str | PathLike[str], limits: Limits
) -> tuple[Explanation, ...]:
    """
    Return the explanations with the cause of the message in the file, and with commands for that file.

    For an unknown message, explain where the names in it are; return nothing if it has none.

    Raises:
        FileUnavailable: There is no such file, or it may not be read.
    """
    try:
        with open_checkpoint(origin, limits=limits) as checkpoint:
            said = cache(lambda: where(checkpoint, text, limits))
            if not found and said() is not None:
                found = (Explanation("names", "Not a message that is known here, but it names tensors."),)
            return tuple(_with_cause(one, checkpoint, text, said) for one in found)
    except FileUnavailable as error:
        error.path = error.path or shown_path(origin)
        raise
    except Failure as error:
        command = error.command or command_line(shown_path(origin), "check")
        return tuple(one._replace(hint=error.hint or one.hint, command=command, in_file=error.message) for one in found)


def _with_cause(one: Explanation, checkpoint: Checkpoint, text: str, said: Callable[[], Cause | None]) -> Explanation:
    own = (find(checkpoint, text) for kinds, find in _CAUSES if one.kind in kinds.split())
    cause = next(filter(None, own), None) or said()
    if cause is not None:
        command = cause.command or (None if cause.hint else run(checkpoint, "inspect").command)
        return one._replace(in_file=cause.fact, hint=cause.hint or one.hint, command=command)
    what = f"{checkpoint.format}, {FORMS[checkpoint.form]}, {counted(len(checkpoint.tensors), 'tensor')}"
    fact = f"it opens ({what})"
    if one.kind in CODES:
        there = dict.fromkeys(found.message for found in examine(checkpoint) if found.code == one.kind)
        fact += f"; {'; '.join(there)}" if there else ", and 'check' says whether it has this"
    elif one.hint != OWN:
        fact += ", and nothing in it explains this"
    return one._replace(in_file=fact, command=run(checkpoint, "check", deep=one.kind in _OF_DAMAGE).command)


def _migrate(checkpoint: Checkpoint, **options: Any) -> str | None:
    """Return the command of a migration, if it is known to work."""
    return finding.migration(checkpoint, **options).command


def _alone(checkpoint: Checkpoint, form: str = "state_dict", **options: Any) -> str | None:
    """Return the command that writes the weights alone, if it is known which they are."""
    if checkpoint.weights is not None:
        return _migrate(checkpoint, form=form, **options)
    return finding.state_dict(checkpoint).command if form == "state_dict" and not options else None


def _entry(found: StateDict) -> str:
    """Return the Python expression for a state dict in what is loaded: ``checkpoint['model']``."""
    keys = "".join(f"[{part!r}]" for part in found.key.split(".") if part)
    return f"checkpoint{keys}{'.state_dict()' if found.class_name else ''}"


def _weights(checkpoint: Checkpoint) -> list[StateDict]:
    """Return the state dicts that may be weights, the chosen one first."""
    found = [one for one in checkpoint.state_dicts if one.role != "optimizer"]
    return sorted(found, key=lambda one: one is not checkpoint.weights)


def _dense(checkpoint: Checkpoint, text: str) -> Cause | None:
    """The weights are quantised, and so are some of those that the message names, if it names any."""
    found, names = quantization_of(checkpoint), [*mismatched(text), *chain(*key_lists(text))]
    if found is None:
        return None
    head = f"{key}." if checkpoint.weights is not None and (key := checkpoint.weights.key) else ""
    own = {path.removeprefix(head) for path in found.types}
    parts = [name for name in names if name in own]
    return None if names and not parts else dense(checkpoint, found, parts)


# Names


def _keys(checkpoint: Checkpoint, text: str) -> Cause | None:
    """The names that the message misses are there, deeper in the file or under other names."""
    missing, unexpected = key_lists(text)
    if not missing:
        return _only_unexpected(checkpoint, unexpected)
    form = form_of(text, checkpoint)
    for found in _weights(checkpoint):
        prefix = f"{found.key}." if form == "dcp" and found.key else ""
        expected = [name.removeprefix(prefix) for name in missing]
        is_meant = not found.keys().isdisjoint(unexpected)
        known = [name for name in found if is_meant and name not in unexpected]
        changes = names_meet([*expected, *known], found, guesses=not all(map(_OF_TASK.match, expected)))
        if changes and not unexpected and not all(map(ne, found, renamed(list(found), changes) or found)):
            continue  # a message that lists no unexpected names knows those of the file: the model wants them, too
        if changes is None:
            continue
        all_of = f"all {len(expected):,} names are {f'under {found.key!r}' if found.key else 'at its top'}"
        key = "" if found is checkpoint.weights or form == "dcp" else found.key
        if changes:
            pairs = zip(found, renamed(list(found), changes) or (), strict=True)
            old, new = next(pair for pair in pairs if pair[0] != pair[1])
            if form == "dcp":  # all entries are written, and only some have the prefix
                changes = tuple(one.as_rename for one in changes)
            fact = f"{all_of}, under other names: {old!r} is {new!r}"
            return Cause(fact, rename_hint(changes), _migrate(checkpoint, form=form, key=key, renames=changes))
        if not found.key and found.class_name is None:
            return Cause(f"{all_of}, as they are: the message is about another file")
        hint = f"Call model.load_state_dict({_entry(found)}), or write the weights alone."
        return Cause(all_of, hint, _migrate(checkpoint, form="state_dict", key=key))
    return None


def _only_unexpected(checkpoint: Checkpoint, unexpected: list[str]) -> Cause | None:
    weights, prefixes = checkpoint.weights, summarise(checkpoint).prefixes
    if prefixes and weights and set(weights) <= set(unexpected):
        prefix = prefixes[0][:-1]
        how = {"strip_wrappers": True} if prefix in ADDED_BY else {"renames": (Rename("strip_prefix", prefix),)}
        fact = f"every name of its weights begins with {prefixes[0]!r}"
        return Cause(fact, "Write them without it.", _alone(checkpoint, **how))
    there = [name for name in unexpected if any(name in one for one in _weights(checkpoint))]
    if not there or adapter_of(checkpoint) is not None:
        return None
    fact = f"it has {some(there)}, which the model has no use for"
    shapes = {name: tensor.shape for one in _weights(checkpoint) for name, tensor in one.items()}
    if all(is_benign(name) or (name.endswith(".bias") and len(shapes[name]) == 4) for name in there):  # masks of GPT-2
        return Cause(f"{fact}: models compute such buffers themselves", "Load it with strict=False: nothing is lost.")
    return Cause(fact, "Load it with strict=False.")


def _stub(checkpoint: Checkpoint, _: str) -> Cause | None:
    """Tensors without elements, in the file."""
    shapes = {name: one.shape for name, one in (checkpoint.weights or {}).items()}
    empty = [name for name, shape in shapes.items() if 0 in shape]
    fact = f"{len(empty):,} of its {counted(len(shapes), 'tensor')} have no elements: {some(empty)}"
    return Cause(fact, None, run(checkpoint, "check").command) if empty else None


def _no_framework(checkpoint: Checkpoint, _: str) -> Cause | None:
    """A safetensors file whose metadata does not say for which framework it is."""
    if not checkpoint.traits.is_plain or "format" in checkpoint.metadata:
        return None
    fact = "its metadata has no 'format', which transformers asks for"
    return Cause(fact, "Write it again: that adds it.", _migrate(checkpoint, form="safetensors"))


def _no_such_entry(checkpoint: Checkpoint, text: str) -> Cause | None:
    """A KeyError: the weights are under another name, or at the top."""
    named = re.search(r"""KeyError: (['"])([^\n]{1,1000}?)\1(?=\s|$)""", text)
    if named is None:
        return None
    name, pairs, weights = named[2], mapping_pairs(checkpoint.root), checkpoint.weights
    top = [key for key, _ in pairs if isinstance(key, str)] if pairs is not None else list(checkpoint.tensors)
    if not top or name in top or name in (weights or ()):
        return None
    has = f"at its top it has {some([repr(one) for one in top], _MOST_LISTED)}"
    if weights is None and checkpoint.part_of is not None:
        part = checkpoint.part_of
        return Cause(f"it is {part.what}, without weights", "Give the folder.", command_line(part.path, "inspect"))
    if weights is None:
        return Cause(has)
    is_of_weights = re.search(r"model|net|state|weight|param|ema|generator|encoder|decoder", name) is not None
    if weights.key and not is_of_weights:
        return Cause(has, _OTHER_FILE)
    if weights.key:
        hint = f"Take {_entry(weights)}, or write the weights alone."
        return Cause(f"{has}; the weights are under {weights.key!r}", hint, _alone(checkpoint))
    if weights.class_name is not None:
        hint = "Call .state_dict() on it, or take its weights without the class."
        return Cause(f"it is a whole model, {weights.class_name}, and no dict", hint, _alone(checkpoint))
    if "." in name:
        return None
    fact = f"it is the state_dict itself, {counted(len(weights), 'tensor')} from {next(iter(weights))!r} on"
    hint = "Call model.load_state_dict() with what was loaded, without taking an entry."
    return Cause(fact, hint if is_of_weights else _OTHER_FILE, run(checkpoint, "inspect").command)


def _shape(checkpoint: Checkpoint, text: str) -> Cause | None:
    """A size mismatch: the tensors of these names, and their shapes in the file."""
    weights = checkpoint.weights
    names = [name if name in (weights or ()) else without_adapter(name) for name in mismatched(text)]
    if weights is None or not names:
        return None
    there = [name for name in names if name in weights]
    if not there:
        return Cause(f"it has no {names[0]!r}: the message is about another file, or names were changed")
    fact = f"in it, {some([f'{name} is {list(weights[name].shape)}' for name in there])}"
    command = None
    is_part = len(there) <= _MOST_LISTED and len(there) < len(weights) and adapter_of(checkpoint) is None
    if is_part and not key_lists(text).missing:
        command = _alone(checkpoint, exclude=there)
    or_not = "; or leave the tensors out of the file, and load the result with strict=False." if command else "."
    return Cause(fact, f"Build the model with these sizes{or_not}", command)


def _convolution(checkpoint: Checkpoint, text: str) -> Cause | None:
    """A convolution that takes other inputs, or a tensor that does not fit: which one it is, by its size."""
    size = re.search(r"(?:weight of size |load weight \(torch\.Size\()\[([\d, ]+)\]", text)
    shape = [int(number) for number in re.findall(r"\d+", size[1])] if size is not None else None
    names = [name for name, tensor in (checkpoint.weights or {}).items() if list(tensor.shape) == shape]
    return Cause(f"{some(names)} {'has' if len(names) == 1 else 'have'} this size in it") if names else None


def _rows(checkpoint: Checkpoint, _: str) -> Cause | None:
    """Embeddings, which have a row for each token or position."""
    tables = {name: one.shape for name, one in (checkpoint.weights or {}).items() if len(one.shape) == 2}
    found = [f"{name} is {list(shape)}" for name, shape in tables.items() if re.search(r"emb|wte|wpe", name)]
    return Cause(f"in it, {some(found)}") if found else None


# Devices, types, sizes


def _device(checkpoint: Checkpoint, text: str) -> Cause | None:
    """Tags of devices that are not here; or none, and then it is map_location that names one."""
    devices = summarise(checkpoint).devices
    tags = {tag: number for tag, number in devices.items() if tag not in ("cpu", "meta")}
    named = re.search(r"tagged with ([^)\s]+)\)", text)
    if named is not None and named[1] not in tags:
        held = counts(devices) or "no tensors"
        fact = f"no tensor in it is tagged {named[1]!r} ({held}): it is map_location that is misspelt"
        return Cause(fact, "Spell map_location as 'cpu' or 'cuda:0'.")
    return Cause(f"its tensors are tagged {counts(tags)}", None, _migrate(checkpoint, to="cpu")) if tags else None


def _types(checkpoint: Checkpoint, _: str) -> Cause | None:
    """Weights in half precision."""
    if checkpoint.weights is None:
        return None
    dtypes = count([tensor.info for tensor in checkpoint.weights.values()]).dtypes
    fact = f"its weights are {counts(dtypes)}"
    if not any(dtype.startswith(("float16", "bfloat16", "float8")) for dtype in dtypes):
        return Cause(fact, "Cast the input, or the model.")
    hint = "Cast the input to that type, or write the weights as float32."
    return Cause(fact, hint, _alone(checkpoint, dtype="float32"))


def _memory(checkpoint: Checkpoint, _: str) -> Cause | None:
    """How much of the file is weights, and where torch.load() would put it."""
    if checkpoint.weights is None:
        return None
    summary = summarise(checkpoint)
    own = numel_and_nbytes(checkpoint.weights.values())[1]
    devices = [tag for tag in summary.devices if tag not in ("cpu", "meta")]
    placed = f", all of it put on {some(devices)} by torch.load()" if devices else ", all of it put into host memory"
    fact = f"its tensors take {show_nbytes(summary.nbytes)}, of which the weights are {show_nbytes(own)}{placed}"
    hint = "Load the weights alone, with map_location='cpu' or ckptool.load_into(model, FILE)."
    return Cause(fact, hint, _alone(checkpoint, to="cpu"))


def _optimizer(checkpoint: Checkpoint, _: str) -> Cause | None:
    """The groups of the optimizer that was saved."""
    listed = []
    for key, value in (("", checkpoint.root), *(mapping_pairs(checkpoint.root) or ())):
        groups = lookup(mapping_pairs(value) or [], "param_groups")
        if isinstance(groups, list | tuple):
            held = (lookup(mapping_pairs(group) or [], "params") for group in groups)
            sizes = [str(len(one)) for one in held if isinstance(one, list | tuple)]
            listed.append(f"{key!r} has {counted(len(sizes), 'group')} of {', '.join(sizes[:_MOST_LISTED])} parameters")
    if not listed:
        return Cause("it has no optimizer's state at its top", None, run(checkpoint, "inspect", all=True).command)
    weights = checkpoint.weights
    has = f"; the weights have {counted(len(weights), 'tensor')}" if weights is not None else ""
    return Cause(f"{some(listed)}{has}", None, _alone(checkpoint))


# What else is in it


def _names(checkpoint: Checkpoint, _: str, *, foreign: bool = False) -> Cause | None:
    """
    Names that its pickles ask for, beside those of tensors.

    ``foreign`` leaves out torch's own names, if there are others: those are not what is not installed.
    """
    names = list(dict.fromkeys(use.name for use in torch_load.asked(checkpoint) if not use.is_allowed))
    if foreign:
        names = [name for name in names if name.partition(".")[0] != "torch"] or names
    if not names:
        return (
            Cause("it asks for no class or package: the code that loads it does", "Install it there.")
            if foreign
            else None
        )
    fact, command = f"it asks for {some(names)}", _alone(checkpoint)
    if command is None:
        return Cause(fact, "It holds no weights: read it with ckptool.open_checkpoint().")
    return Cause(fact, "Take the weights without them.", command)


def _begins(checkpoint: Checkpoint, text: str) -> Cause | None:
    """How its names begin; of a LoRA, also for what it is, and what else is in it."""
    names, lora = list(checkpoint.weights or checkpoint.tensors), adapter_of(checkpoint)
    begins = f"its names begin with {counts(Counter(_HEAD.findall(name)[0] for name in names if name))}"
    if not names:
        return None
    if lora is None:
        kind = next((kind for mark, kind in _KINDS.items() if any(mark in name for name in names)), None)
        return Cause((f"it is a {kind}; " if kind else "") + begins)
    base = lora.base or base_model(checkpoint.path, checkpoint.source)
    ranks = some([str(rank) for rank in lora.ranks])
    fact = f"it is a LoRA of r {ranks} on {some(lora.targets)}{f', for {base}' if base else ''}; {begins}"
    others = [name for name in names if not _OF_LORA.search(name)]
    fact += f"; {counted(len(others), 'tensor')} of another kind: {some(others)}" if others else ""
    if "lora key not loaded" in text and all(map(_OF_PEFT.match, names)):
        changes = (Rename("rename", f"{_OF_PEFT.pattern}=transformer."),)
        hint = "ComfyUI knows names as diffusers has them, where a transformer was trained, but not those of peft."
        return Cause(fact, hint, _migrate(checkpoint, form=form_of(text, checkpoint), renames=changes))
    return Cause(fact)


def _components(checkpoint: Checkpoint, text: str) -> Cause | None:
    """Which components of an image generator are in it, by the names; and how these begin."""
    names = list(checkpoint.tensors)
    has = [part for part, pattern in _COMPONENTS.items() if any(re.match(pattern, name) for name in names)]
    listed = [part if part in has else part.replace("a ", "no ", 1) for part in _COMPONENTS]
    begins = _begins(checkpoint, text)
    said = f"by its names, it has {some(listed)}; " if has else ""
    return begins and begins._replace(fact=said + begins.fact)


def _quantized(checkpoint: Checkpoint, _: str) -> Cause:
    """How its weights are quantised, or of which types they are."""
    found, types = quantization_of(checkpoint), f"its tensors are {counts(summarise(checkpoint).dtypes)}"
    if found is None:
        return Cause(f"{types}, and not quantised")
    return Cause(f"{types}; quantised: {found}", *finding.dense(checkpoint))


def _of_lightning(checkpoint: Checkpoint, _: str) -> Cause | None:
    """What Lightning saved beside the weights."""
    pairs = mapping_pairs(checkpoint.root) or []
    there = [key for key in _SAVED if lookup(pairs, key) is not None]
    arguments = [str(key) for key, _ in mapping_pairs(lookup(pairs, "hyper_parameters")) or ()]
    if lookup(pairs, "state_dict") is None:
        return None
    has = f"it has {some(there)}" if there else f"it has none of {some(_SAVED, len(_SAVED))}"
    return Cause(f"{has}{f'; the arguments in it are {some(arguments, _MOST_LISTED)}' if arguments else ''}")


def _form(checkpoint: Checkpoint, _: str) -> Cause:
    """The form of the checkpoint that was loaded."""
    weights = checkpoint.weights
    if weights is None:
        return Cause(f"it is: {FORMS[checkpoint.form]}")
    tensors = counted(len(weights), "tensor")
    if weights.class_name is not None:
        fact = f"it is a whole model{f' under {weights.key!r}' if weights.key else ''}, {weights.class_name}"
        hint = f"Call {_entry(weights)} for its weights, or take them without the class."
        return Cause(f"{fact}, with {tensors}", hint, _alone(checkpoint))
    fact = f"it is a state_dict of {tensors}"
    if weights.key:
        fact = f"it is a checkpoint, with the weights, {tensors}, under {weights.key!r}"
    hint = f"Build the model, and call model.load_state_dict({_entry(weights)})."
    return Cause(fact, hint, run(checkpoint, "inspect").command)


def _layout(checkpoint: Checkpoint, _: str, *, form: str = "", hint: str | None = None) -> Cause:
    """How it is laid out, and the command that takes its weights, in the ``form`` that helps; or that it has none."""
    fact = f"it is {checkpoint.format}, {show_nbytes(checkpoint.file_nbytes)}, {FORMS[checkpoint.form]}"
    command = _alone(checkpoint, form) if form and not (form == "safetensors" and checkpoint.traits.is_plain) else None
    if hint and command is None:
        return Cause(fact, "It holds no weights.", run(checkpoint, "inspect").command)
    return Cause(fact, hint, command)


_as_file = partial(_layout, form="state_dict", hint="Write its weights as a file that torch.load() opens everywhere.")


def _to_safetensors(checkpoint: Checkpoint, _: str) -> Cause | None:
    """Tensors that safetensors cannot hold as they are, and the migration that mends that."""
    summary = summarise(checkpoint)
    sparse = sum(one.info.layout.startswith("sparse") for one in checkpoint.tensors.values())
    command = _alone(checkpoint, "safetensors", drop_unsupported=sparse > 0)
    ties = f"{summary.tied:,} of them tied, " if summary.tied else ""
    fact = f"it holds {counted(summary.tensors, 'tensor')}, {ties}{sparse:,} sparse; {FORMS[checkpoint.form]}"
    return Cause(fact, "Write its weights as safetensors.", command) if command else None


def _in_pieces(checkpoint: Checkpoint, _: str) -> Cause | None:
    """A folder, or an index of shards, in place of one file: what loads it as it is, and what makes one of it."""
    if not (checkpoint.is_folder or checkpoint.shards):
        return None
    fact = f"it is {checkpoint.format}, {FORMS[checkpoint.form]}, in more than one file"
    if (command := _alone(checkpoint)) is None:
        return Cause(fact)
    return Cause(fact, "Load all with ckptool.load_into(model, FILE), or write the weights as one file.", command)


def _index(checkpoint: Checkpoint, _: str) -> Cause | None:
    """The folder has an index: another folder, mostly its parent, was loaded."""
    if not checkpoint.traits.call.startswith("torch.distributed.checkpoint."):
        return None
    folder = checkpoint.path
    return Cause(f"its index is {folder}/.metadata", f"Load {folder}.", run(checkpoint, "inspect").command)


def _there(checkpoint: Checkpoint, text: str) -> Cause:
    """The file is there: the path in the message is another."""
    named = re.search(r"(?:No such file or directory|File not found): '?([^'\n]+)", text)
    other = f", and the message is about {named[1]!r}" if named is not None else ""
    return Cause(f"it is there, {checkpoint.format}, {show_nbytes(checkpoint.file_nbytes)}{other}")


_CAUSES: Final[tuple[tuple[str, Callable[[Checkpoint, str], Cause | None]], ...]] = (
    ("shape some-shape load-report keys keys-nested some-keys missing-tensors mixed-dtypes half-on-cpu", _dense),
    ("shape some-shape load-report", _shape),
    ("keys keys-nested keys-renamed some-keys adapter-keys load-report missing-tensors", _keys),
    ("device-missing device-number device-unknown device-module device-operator some-device", _device),
    ("memory-loading memory-device some-memory", _memory),
    ("optimizer-groups optimizer-parameters optimizer-order", _optimizer),
    ("unsafe-global blocked-module weights-only weights-only-warning numpy path python-2 newer-torch", _names),
    ("missing-class missing-module some-class not-a-class sb3-object", partial(_names, foreign=True)),
    ("old-model source-changed not-a-model not-a-state-dict whole-model", _form),
    ("torchscript old-tar torch-too-old plain-pickle foreign-zip not-a-zip mmap-legacy untyped-legacy", _as_file),
    ("zip-in-old-torch not-a-pickle opened-as-text", _as_file),
    (
        "unknown-operator no-folder megatron-ranks zero-world-size zero-rank no-state-dict",
        partial(_layout, form="state_dict"),
    ),
    ("not-torchscript persistent-id pickle-protocol zero-latest zero-files model-parallel no-gguf", _layout),
    ("no-weights-file adapter-settings unreadable-weights", partial(_layout, form="safetensors")),
    (
        "shared-tensors non-contiguous sparse nested safetensors-metadata not-safetensors safetensors-header",
        _to_safetensors,
    ),
    ("adapter-modules adapter-tensors lora-layers lora-component no-wrapper no-folder-here", _begins),
    ("model-type no-component left-over", _components),
    ("quantized element-type", _quantized),
    ("weights-alone no-arguments", _of_lightning),
    ("channels some-shape", _convolution),
    ("index", _rows),
    ("mixed-dtypes half-on-cpu", _types),
    ("no-file", _there),
    ("folder json", _in_pieces),
    ("dcp-index", _index),
    ("no-such-entry", _no_such_entry),
    ("stub", _stub),
    ("no-framework", _no_framework),
)
"""Kinds of messages, and the function that finds their cause; the first one that finds a cause counts."""
