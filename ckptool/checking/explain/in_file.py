"""What in a file causes a message: one function for each kind of message whose cause a file can show."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import ne
from os import PathLike
from typing import Any, NamedTuple

from ckptool.checking import advice, torch_load
from ckptool.checking.explain.keys import Explanation, form_of, key_lists, names_meet, why_renamed
from ckptool.checking.finding import command_line, run
from ckptool.checkpoints.checkpoint import Checkpoint, StateDict
from ckptool.checkpoints.summary import count, numel_and_nbytes, summarise
from ckptool.errors import Failure, FileUnavailable
from ckptool.formats import open_checkpoint
from ckptool.limits import Limits
from ckptool.messages import FORMS, counted, counts, show_nbytes, some
from ckptool.names.matching import Rename, Renames, is_extra_state, renamed
from ckptool.names.missing import not_there
from ckptool.names.wrappers import ADDED_BY
from ckptool.pickles.nodes import Inert, lookup, mapping_pairs
from ckptool.sources.naming import shown_path
from ckptool.tensors.reading import LazyTensor

_MOST_LISTED = 8


class Cause(NamedTuple):
    """
    What in the file causes a message, and what to do about it there; None leaves the hint that is always given.

    Without a hint and a command, the command is to look at the file.
    """

    fact: str
    hint: str | None = None
    command: str | None = None


def look_into(
    found: tuple[Explanation, ...], text: str, origin: str | PathLike[str], limits: Limits
) -> tuple[Explanation, ...]:
    """
    Return the explanations with what in the file causes the message, and with commands for that file.

    Raises:
        FileUnavailable: There is no such file, or it may not be read.
    """
    try:
        with open_checkpoint(origin, limits=limits) as checkpoint:
            return tuple(_with_cause(one, checkpoint, text) for one in found)
    except FileUnavailable as error:
        error.path = error.path or shown_path(origin)
        raise
    except Failure as error:
        command = error.command or command_line(shown_path(origin), "check")
        return tuple(one._replace(hint=error.hint or one.hint, command=command, in_file=error.message) for one in found)


def _with_cause(one: Explanation, checkpoint: Checkpoint, text: str) -> Explanation:
    find = _CAUSES.get(one.kind)
    cause = find(checkpoint, text) if find is not None else None
    if cause is not None:
        command = cause.command or (None if cause.hint else _command(checkpoint, "inspect"))
        return one._replace(in_file=cause.fact, hint=cause.hint or one.hint, command=command)
    what = f"{checkpoint.format}, {FORMS[checkpoint.form]}, {counted(len(checkpoint.tensors), 'tensor')}"
    return one._replace(
        in_file=f"it opens ({what}), and nothing in it explains this", command=_command(checkpoint, "check")
    )


def _command(checkpoint: Checkpoint, verb: str, **options: Any) -> str | None:
    return run(checkpoint, verb, **options).command


def _migration(checkpoint: Checkpoint, **options: Any) -> str | None:
    """Return the command of a migration, if it is known to work."""
    found = advice.migration(checkpoint, **options)
    return found.command if found is not None else None


def _weights_command(checkpoint: Checkpoint, form: str = "state_dict", **options: Any) -> str | None:
    """Return the command that writes the weights alone, if it is known which they are."""
    if checkpoint.weights is not None:
        return _migration(checkpoint, form=form, **options)
    found = advice.state_dict(checkpoint)
    return found.command if found is not None and form == "state_dict" and not options else None


def _entry(key: str) -> str:
    """Return the Python expression for what is loaded under a key: ``checkpoint['model']``."""
    return "checkpoint" + "".join(f"[{part!r}]" for part in key.split(".") if part)


# Names


def _keys(checkpoint: Checkpoint, text: str) -> Cause | None:
    """The names that the message misses are there, deeper in the file or under other names."""
    missing, unexpected = key_lists(text)
    if not missing:
        return _only_unexpected(checkpoint, unexpected)
    form = form_of(text)
    for found in sorted(_weights(checkpoint), key=lambda one: one is not checkpoint.weights):
        prefix = f"{found.key}." if form == "dcp" and found.key else ""
        expected = [name.removeprefix(prefix) for name in missing]
        is_meant = not found.keys().isdisjoint(unexpected)
        known = [name for name in found if is_meant and name not in unexpected]
        changes = names_meet([*expected, *known], found)
        if changes and not unexpected and not _changes_all(changes, found):
            continue  # a message that lists no unexpected names knows those of the file: the model wants them, too
        if changes is not None:
            return _where(checkpoint, expected, changes, found, form)
    names = [name for one in _weights(checkpoint) for name in one]
    there = sum(name in names for name in missing)
    return Cause(
        (f"it has {there:,} of the {len(missing):,} names, and others: " if there else "it has other names: ")
        + some([name for name in names if name not in missing])
        if names
        else "it has no weights",
        "It belongs to another model, or to another version of this one: build the model that it was saved from.",
        _command(checkpoint, "inspect"),
    )


def _changes_all(changes: Renames, found: StateDict) -> bool:
    return all(map(ne, found, renamed(list(found), changes) or found))


def _where(checkpoint: Checkpoint, expected: list[str], changes: Renames, found: StateDict, form: str) -> Cause:
    all_of = f"all {len(expected):,} names are {f'under {found.key!r}' if found.key else 'at its top'}"
    key = "" if found is checkpoint.weights or form == "dcp" else found.key
    if changes:
        pairs = zip(found, renamed(list(found), changes) or (), strict=True)
        old, new = next(pair for pair in pairs if pair[0] != pair[1])
        if form == "dcp":  # all is written, and only some of it has the prefix
            changes = tuple(one.as_rename for one in changes)
        return Cause(
            f"{all_of}, under other names: {old!r} is {new!r}",
            why_renamed(changes),
            _migration(checkpoint, form=form, key=key, renames=changes),
        )
    if not found.key and found.class_name is None:
        fact = f"{all_of}, as they are: the message is about another file"
        return Cause(fact)
    taken = f"{_entry(found.key)}{'.state_dict()' if found.class_name else ''}"
    return Cause(
        all_of,
        f"Call model.load_state_dict({taken}), or write the weights alone.",
        _migration(checkpoint, form="state_dict", key=key),
    )


def _only_unexpected(checkpoint: Checkpoint, unexpected: list[str]) -> Cause | None:
    weights = checkpoint.weights or ()
    prefixes = summarise(checkpoint).prefixes
    if prefixes and set(weights) <= set(unexpected):
        wrapped = prefixes[0][:-1] in ADDED_BY
        return Cause(
            f"every name of its weights begins with {prefixes[0]!r}",
            "Write them without it.",
            _weights_command(checkpoint, strip_wrappers=True)
            if wrapped
            else _weights_command(checkpoint, renames=(Rename("strip_prefix", prefixes[0][:-1]),)),
        )
    there = [name for name in unexpected if any(name in one for one in _weights(checkpoint))]
    if not there:
        return None
    return Cause(f"it has {some(there)}, which the model has no use for", "Load it with strict=False.")


def _extra_state(checkpoint: Checkpoint, text: str) -> Cause:
    """State of FP8 that the model has and the file has not, or the reverse."""
    found = [name for name in checkpoint.weights or () if is_extra_state(name)]
    fact = f"it holds such state under {counted(len(found), 'name')}"
    if key_lists(text).missing or not found:
        return Cause(fact)
    glob = "*._extra_state" if all("." in name for name in found) else "*_extra_state"
    return Cause(fact, None, _migration(checkpoint, form=form_of(text), exclude=(glob,)))


def _stub(checkpoint: Checkpoint, _: str) -> Cause | None:
    """Tensors without elements, in the file."""
    weights: Mapping[str, LazyTensor] = checkpoint.weights or {}
    empty = [name for name, one in weights.items() if 0 in one.shape]
    fact = f"{len(empty):,} of its {counted(len(weights), 'tensor')} have no elements: {some(empty)}"
    return Cause(fact, None, _command(checkpoint, "check")) if empty else None


def _no_framework(checkpoint: Checkpoint, _: str) -> Cause | None:
    """A safetensors file whose metadata does not say for which framework it is."""
    if not checkpoint.traits.is_plain or "format" in checkpoint.metadata:
        return None
    command = _migration(checkpoint, form="safetensors")
    return Cause("its metadata has no 'format', which transformers asks for", "Write it again: that adds it.", command)


def _weights(checkpoint: Checkpoint) -> list[StateDict]:
    return [one for one in checkpoint.state_dicts if one.role != "optimizer"]


def _no_such_entry(checkpoint: Checkpoint, text: str) -> Cause | None:
    """A KeyError: the weights are under another name, or at the top."""
    named = re.search(r"KeyError: ['\"]([^'\"\n]+)['\"]", text)
    pairs = mapping_pairs(checkpoint.root)
    weights = checkpoint.weights
    if named is None:
        return None
    name = named[1]
    top = [key for key, _ in pairs if isinstance(key, str)] if pairs is not None else list(checkpoint.tensors)
    if name in top or name in (weights or ()):
        return None
    if weights is not None and not weights.key and weights.class_name is None:
        if "." in name or name in ("weight", "bias"):
            return Cause(not_there(name, list(weights)))
        return Cause(
            f"it is the state_dict itself, {counted(len(weights), 'tensor')} from {next(iter(weights))!r} on",
            "Call model.load_state_dict() with what was loaded, without taking an entry.",
            _command(checkpoint, "inspect"),
        )
    if weights is None:
        return Cause(f"at its top it has {some([repr(one) for one in top], _MOST_LISTED)}")
    if weights.class_name is not None and not weights.key:
        return Cause(
            f"it is a whole model, {weights.class_name}, and no dict",
            "Call .state_dict() on it, or take its weights without the class.",
            _weights_command(checkpoint),
        )
    return Cause(
        f"at its top it has {some([repr(one) for one in top], _MOST_LISTED)}; the weights are under {weights.key!r}",
        f"Take {_entry(weights.key)}{'.state_dict()' if weights.class_name else ''}, or write the weights alone.",
        _weights_command(checkpoint),
    )


def _shape(checkpoint: Checkpoint, text: str) -> Cause | None:
    """A size mismatch: the tensors of these names, and their shapes in the file."""
    weights = checkpoint.weights
    names = list(dict.fromkeys(re.findall(r"size mismatch for ([\w.]+)", text)))
    if weights is None or not names:
        return None
    there = [name for name in names if name in weights]
    if not there:
        return Cause(f"it has no {names[0]!r}: the message is about another file, or names were changed", None)
    listed = some([f"{name} is {list(weights[name].shape)}" for name in there])
    command = None
    if len(there) <= _MOST_LISTED and len(there) < len(weights) and not key_lists(text).missing:
        command = _weights_command(checkpoint, exclude=there)
    return Cause(
        f"in it, {listed}",
        "Build the model with these sizes"
        + ("; or leave the tensors out, and load the rest with strict=False." if command else "."),
        command,
    )


def _convolution(checkpoint: Checkpoint, text: str) -> Cause | None:
    """A convolution that takes other inputs: which one it is."""
    size = re.search(r"weight of size \[([\d, ]+)\]", text)
    if size is None:
        return None
    shape = tuple(int(number) for number in size[1].split(",") if number.strip())
    names = [name for name, tensor in (checkpoint.weights or {}).items() if tensor.shape == shape]
    if not names:
        return None
    return Cause(f"{some(names)} {'has' if len(names) == 1 else 'have'} this size in it")


# Devices, types, sizes


def _device(checkpoint: Checkpoint, text: str) -> Cause | None:
    """Tags of devices that are not here; or none, and then it is map_location that names one."""
    tags = {tag: number for tag, number in summarise(checkpoint).devices.items() if tag not in ("cpu", "meta")}
    named = re.search(r"tagged with ([^)\s]+)\)", text)
    if named is not None and named[1] not in tags:
        held = counts(summarise(checkpoint).devices) or "no tensors"
        return Cause(
            f"no tensor in it is tagged {named[1]!r} ({held}): it is map_location that is misspelt",
            "Spell map_location as 'cpu' or 'cuda:0'.",
        )
    if not tags:
        return None
    return Cause(f"its tensors are tagged {counts(tags)}", None, _migration(checkpoint, to="cpu"))


def _types(checkpoint: Checkpoint, _: str) -> Cause | None:
    """Weights in half precision."""
    weights = checkpoint.weights
    if weights is None:
        return None
    dtypes = count([tensor.info for tensor in weights.values()]).dtypes
    halves = any(name in dtypes for name in ("float16", "bfloat16"))
    return Cause(
        f"its weights are {counts(dtypes)}",
        "Cast the input to that type, or write the weights as float32." if halves else "Cast the input, or the model.",
        _weights_command(checkpoint, dtype="float32") if halves else None,
    )


def _memory(checkpoint: Checkpoint, _: str) -> Cause | None:
    """How much of the file is weights, and where torch.load() would put it."""
    weights = checkpoint.weights
    if weights is None:
        return None
    summary = summarise(checkpoint)
    whole = summary.nbytes
    own = numel_and_nbytes(weights.values(), apart=summary.is_apart)[1]
    devices = [tag for tag in summary.devices if tag not in ("cpu", "meta")]
    placed = f", all of it put on {some(devices)} by torch.load()" if devices else ", all of it put into host memory"
    fact = f"its tensors take {show_nbytes(whole)}, of which the weights are {show_nbytes(own)}{placed}"
    hint = "Load the weights alone, with map_location='cpu' or ckptool.load_into(model, FILE)."
    return Cause(fact, hint, _weights_command(checkpoint, to="cpu"))


def _optimizer(checkpoint: Checkpoint, _: str) -> Cause | None:
    """The groups of the optimizer that was saved."""
    pairs = mapping_pairs(checkpoint.root) or ()
    found = []
    for key, value in (("", checkpoint.root), *pairs):
        groups = lookup(mapping_pairs(value) or [], "param_groups")
        if isinstance(groups, list | tuple):
            found.append((key, [len(held) for group in groups if (held := _parameters(group)) is not None]))
    if not found:
        return Cause("it has no optimizer's state at its top", None, _command(checkpoint, "inspect", all=True))
    listed = [
        f"{key!r} has {counted(len(sizes), 'group')} of {', '.join(map(str, sizes[:_MOST_LISTED]))} parameters"
        for key, sizes in found
    ]
    weights = checkpoint.weights
    has = f"; the weights have {counted(len(weights), 'tensor')}" if weights is not None else ""
    return Cause(f"{some(listed)}{has}", None, _weights_command(checkpoint))


def _parameters(group: Inert) -> Sequence[Inert] | None:
    held = lookup(mapping_pairs(group) or [], "params")
    return held if isinstance(held, list | tuple) else None


# What else is in it


def _names(checkpoint: Checkpoint, _: str, *, foreign: bool = False) -> Cause | None:
    """
    Names that its pickles ask for, beside those of tensors.

    Where something is not installed, it is not torch's own names that are missing, if there are ``foreign`` ones.
    """
    names = list(dict.fromkeys(use.name for use in torch_load.asked(checkpoint) if not use.is_allowed))
    if foreign:
        names = [name for name in names if name.partition(".")[0] != "torch"] or names
    if not names:
        return None
    command = _weights_command(checkpoint)
    hint = (
        "Take the weights without them." if command else "It holds no weights: read it with ckptool.open_checkpoint()."
    )
    return Cause(f"it asks for {some(names)}", hint, command)


def _form(checkpoint: Checkpoint, _: str) -> Cause:
    """What was loaded."""
    weights = checkpoint.weights
    if weights is None:
        return Cause(f"it is: {FORMS[checkpoint.form]}")
    taken = _entry(weights.key)
    if weights.class_name is not None:
        where = f" under {weights.key!r}" if weights.key else ""
        return Cause(
            f"it is a whole model{where}, {weights.class_name}, with {counted(len(weights), 'tensor')}",
            f"Call {taken}.state_dict() for its weights, or take them without the class.",
            _weights_command(checkpoint),
        )
    fact = f"it is a state_dict of {counted(len(weights), 'tensor')}"
    if weights.key:
        fact = f"it is a checkpoint, with the weights, {counted(len(weights), 'tensor')}, under {weights.key!r}"
    return Cause(fact, f"Build the model, and call model.load_state_dict({taken}).", _command(checkpoint, "inspect"))


def _format(checkpoint: Checkpoint, _: str) -> Cause:
    """How it is laid out, and the command that writes it in a way that everything reads."""
    fact = f"it is {checkpoint.format}, {show_nbytes(checkpoint.file_nbytes)}, {FORMS[checkpoint.form]}"
    command = _weights_command(checkpoint)
    if command is None:
        return Cause(fact, "It holds no weights.", _command(checkpoint, "inspect"))
    return Cause(fact, "Write its weights as a file that torch.load() opens everywhere.", command)


def _no_program(checkpoint: Checkpoint, _: str) -> Cause:
    """What a server for TorchScript was given."""
    return Cause(f"it is {checkpoint.format}, {FORMS[checkpoint.form]}")


def _to_safetensors(checkpoint: Checkpoint, _: str) -> Cause | None:
    """What safetensors cannot hold as it is, which migrating mends."""
    summary = summarise(checkpoint)
    sparse = [name for name, one in checkpoint.tensors.items() if one.info.layout.startswith("sparse")]
    command = _weights_command(checkpoint, "safetensors", drop_unsupported=bool(sparse))
    if command is None:
        return None
    ties = f"{summary.tied:,} of them tied, " if summary.tied else ""
    fact = f"it holds {counted(summary.tensors, 'tensor')}, {ties}{len(sparse):,} sparse; {FORMS[checkpoint.form]}"
    return Cause(fact, "Write its weights as safetensors.", command)


def _there(checkpoint: Checkpoint, text: str) -> Cause:
    """The file is there: the path in the message is another."""
    named = re.search(r"No such file or directory: '?([^'\n]+)", text)
    other = f", and the message is about {named[1]!r}" if named is not None else ""
    if named is not None and named[1].endswith("/.metadata"):
        folder = checkpoint.path
        return Cause(f"its index is {folder}/.metadata", f"Load {folder}.", _command(checkpoint, "inspect"))
    return Cause(f"it is there, {show_nbytes(checkpoint.file_nbytes)}{other}")


_Find = Callable[[Checkpoint, str], Cause | None]


def _each(kinds: Iterable[str], find: _Find) -> dict[str, _Find]:
    return dict.fromkeys(kinds, find)


_CAUSES: dict[str, _Find] = {
    **_each(("keys", "keys-nested", "keys-renamed", "some-keys"), _keys),
    **_each(("device-missing", "device-number", "device-unknown", "device-module", "some-device"), _device),
    **_each(("memory-loading", "memory-device", "some-memory"), _memory),
    **_each(("optimizer-groups", "optimizer-parameters"), _optimizer),
    **_each(("unsafe-global", "blocked-module", "weights-only", "weights-only-warning"), _names),
    **_each(("missing-class", "missing-module", "some-class"), partial(_names, foreign=True)),
    **_each(("numpy", "path", "python-2", "newer-torch"), _names),
    **_each(("old-model", "source-changed"), _form),
    **_each(("not-a-model", "not-a-state-dict", "whole-model"), _form),
    **_each(("torchscript", "old-tar", "torch-too-old", "plain-pickle", "foreign-zip", "not-a-zip"), _format),
    **_each(("mmap-legacy", "untyped-legacy", "zip-in-old-torch"), _format),
    **_each(("not-a-pickle", "opened-as-text"), _format),
    **_each(("shared-tensors", "non-contiguous", "sparse", "nested", "safetensors-metadata"), _to_safetensors),
    **_each(("shape", "some-shape"), _shape),
    "channels": _convolution,
    "not-safetensors": _to_safetensors,
    "not-torchscript": _no_program,
    "mixed-dtypes": _types,
    "no-file": _there,
    "no-such-entry": _no_such_entry,
    "extra-state": _extra_state,
    "stub": _stub,
    "no-framework": _no_framework,
}
