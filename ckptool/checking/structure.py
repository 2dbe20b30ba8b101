"""
Findings about names, storages and devices that need no values: a function each, in the list ``CHECKS``.

Each check is one function that inspects a ``Checkpoint`` and yields ``Finding``s; ``CHECKS`` is the list of them.
Nothing is read, run or imported, but for the index of another file that has the same weights by its name. There are
no heuristics: a finding is what the file proves.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

from ckptool.checking.finding import Finding, dense, migration, note, run, state_dict
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.completeness import REFERENCE, halves_alone, holes_in, stubs_in
from ckptool.checkpoints.summary import lightning_attribute, may_be_quantized, summarise, wrapper_prefixes_of
from ckptool.formats.filenames import ENGINE
from ckptool.messages import counted, no_values, some
from ckptool.names.wrappers import ADDED_BY, beside_wrapped, is_averaged_pair
from ckptool.pickles import nodes
from ckptool.pickles.weights_only import is_torchscripts, is_usual
from ckptool.sources.journal import journal_path, told
from ckptool.sources.paths import command_line, is_folder, is_remote
from ckptool.sources.source import remote_under
from ckptool.tensors.tensor import ARRAY, identity

_OTHERS: Final = ("checkpoint", "folder", "variant")
"""Roles of files and folders beside a checkpoint that are checkpoints by themselves."""
_MOST_EMBEDDED: Final = 8
_CANDIDATES: Final = 6
_TO_CPU: Final = "The file has them: load it with map_location='cpu'."
_KEEP_ALL: Final = "Take what is meant with `key=`, or keep everything."
_NO_CLASS: Final = "For the weights without the class; in Python, ckptool.load_into(model, path)."
_ASK_THE_CLASS: Final = "Compare the names with those of the class: `model='package.module:Class'`."
_FAMILIAR: Final = (
    *("torch.", "collections.", "numpy.", "builtins.", "__builtin__."),
    *("_codecs.encode", "copyreg.", "copy_reg.", "__torch__."),
)


def examine(checkpoint: Checkpoint) -> tuple[Finding, ...]:
    """Return everything notable about a checkpoint, in the order of ``CHECKS``."""
    return tuple(one for check in CHECKS for one in check(checkpoint))


def said_by_the_reader(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK103, CK152, CK155, CK101, CK170, and the remarks of the format's reader."""
    if checkpoint.damage:
        fact = f"{checkpoint.damage}: names and shapes may not be those that were saved"
        yield note("CK103", fact, "Download the file again.")
    for code, what, hint in checkpoint.remarks:
        # Not every model has all the modules that an adapter may be of.
        yield note(code, what, hint, severity="info" if code == "CK123" else None)
    # Missing components of a pipeline have a finding of their own.
    if checkpoint.absent and not checkpoint.unopened and all(code != "CK164" for code, _, _ in checkpoint.remarks):
        what = f"{counted(len(checkpoint.absent), 'name')} of the model without a value in any file"
        yield note("CK152", f"{what}: {some(checkpoint.absent)}", "They are not among the weights.")
    if checkpoint.unmerged is not None:
        remedy = checkpoint.unmerged_remedy or "Load it where it was written, and save it whole."
        yield note("CK155", checkpoint.unmerged, remedy)
    for what in checkpoint.notes:
        yield note("CK101", what, severity="info")
    for source in (checkpoint.source, *(shard.source for shard in checkpoint.shards)):
        under = remote_under(source)
        for what in under[0].notes() if under is not None else ():
            yield note("CK170", what)


def journals(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK179: a file has the journal of an edit in place beside it, or something of that name."""
    for path, _version in checkpoint.source.versions():
        if os.path.lexists(journal_path(path)):
            yield note("CK179", *told(path))


def other_members(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK102: the archive holds more checkpoints than the one that was opened."""
    found = [member for member in checkpoint.members if member.name != checkpoint.member]
    others = [one.name for one in sorted(found, key=lambda one: (one.form == "training", -one.tensors))]
    if not others:
        return
    if checkpoint.form == "archive":
        fact = f"{'a folder' if checkpoint.is_folder else 'an archive'} of {len(others):,} checkpoints"
    elif checkpoint.is_folder:
        fact = f"{len(others):,} checkpoints together; each can be opened alone"
    else:
        fact = f"the archive also holds {some(others)}"
    yield note("CK102", fact, *run(checkpoint, "inspect", member=others[0]))


def embedded_files(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK131: bytes inside the file are a file of their own."""
    if checkpoint.pickles and not any(one.may_hold_bytes for one in checkpoint.pickles):
        return
    from ckptool.checkpoints.embedded import find_embedded

    for path, one in list(find_embedded(checkpoint.extras).items())[:_MOST_EMBEDDED]:
        member = f"{checkpoint.member}::{path}" if checkpoint.member else path
        fact = f"{path!r} is {one.what}, {counted(len(one.data), 'byte')}, which was not opened"
        yield note("CK131", fact, *run(checkpoint, "inspect", member=member))


def unopened_members(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK114: a member of the archive, or a file beside the chosen one, is a checkpoint that cannot be opened."""
    hint = "Nothing is known of what it holds."
    for name, why in checkpoint.unopened:
        first = name.partition("::")[0]
        in_archive = is_folder(checkpoint.path or "") or any(first in archive for archive in checkpoint.archives)
        if in_archive or not checkpoint.path:
            look = run(checkpoint, "check", member=name, why=hint)
            yield note("CK114", f"member {name!r} cannot be opened: {why}", *look)
        else:
            path = os.path.join(os.path.dirname(checkpoint.path), name)
            fact = f"{name!r} beside it cannot be opened: {why}"
            yield note("CK114", fact, hint, command_line(path, "check"), path=path)


def announced_size(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK107: an index of shards announces another size than its tensors have."""
    summary = summarise(checkpoint)
    said = checkpoint.announced_nbytes
    if said is None or said == summary.nbytes:
        return
    # Writers count tied tensors under each name, or once; or whole storages.
    infos = [tensor.info for tensor in checkpoint.tensors.values()]
    named = sum(info.total_nbytes for info in infos)
    distinct = sum({identity(info): info.total_nbytes for info in infos}.values())
    if said not in (named, distinct, summary.nbytes):
        fact = f"the index announces {said:,} bytes of tensors (total_size), the shards hold {named:,}"
        yield note("CK107", fact, "Compare both with those that were published: one may belong to another model.")


def beside_it(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK160, CK171, CK161, CK162, CK163: other files in the same folder that have to do with the checkpoint."""
    by_role = {one.role: [two.name for two in checkpoint.beside if two.role == one.role] for one in checkpoint.beside}
    part = checkpoint.part_of
    if part is not None and "leftover" not in by_role:  # CK162 reports these
        fact = f"{part.what}: what is in the others is not here"
        if checkpoint.shards:
            yield note("CK160", fact, part.remedy)
        else:
            yield note("CK160", fact, "Give what they are together:", command_line(part.path, "inspect"))
    if all(code != "CK167" for code, _, _ in checkpoint.remarks):  # CK167 counts them
        yield from _not_opened(checkpoint)
    if "duplicate" in by_role:
        from ckptool.checking import folder_files  # few checkpoints have a second form beside them

        yield from folder_files.twins(checkpoint)
    if names := by_role.get("leftover", []):
        fact = f"{counted(len(names), 'shard')} that the index does not name: {some(names)}"
        hint = "They may be left from another save into the same folder: remove them, or get the index again."
        yield note("CK162", fact, hint)
    if names := by_role.get("incomplete", []):
        whole = not any(name.endswith(".aria2") for name in names)  # aria2 fills files in any order
        hint = f"Download again what is missing{'; what was opened is whole without it' * whole}."
        yield note("CK163", f"{counted(len(names), 'unfinished download')}: {some(names)}", hint)


def _not_opened(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK171: other checkpoints are beside the one that was opened, going by their names."""
    others = [one for one in checkpoint.beside if one.role in _OTHERS and not _is_with(checkpoint, one.path)]
    if not others:
        return
    what = (
        f"{counted(len(others), 'other checkpoint')} beside, which {'was' if len(others) == 1 else 'were'} not opened"
    )
    if is_remote(others[0].path):
        yield note("CK171", f"{what}: {some([one.name for one in others])}")
        return
    folder = os.path.commonpath([os.path.dirname(one.path) for one in others]) or os.curdir
    names = [os.path.relpath(one.path, folder) for one in others]
    yield note("CK171", f"{what}: {some(names)}", None, command_line(folder, "inspect", brief=True, recursive=True))


def _is_with(checkpoint: Checkpoint, path: str) -> bool:
    """Return whether a path is a link, or the states of an engine that a trainer saved with its weights."""
    folder, name = os.path.split(path)
    is_engine = ENGINE.fullmatch(name) is not None and not checkpoint.is_folder
    return os.path.islink(path) or (is_engine and os.path.dirname(checkpoint.path or "") == folder)


def clashing_names(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK109: two tensors have one dotted name."""
    clashes = checkpoint.contents.clashes
    if clashes:
        head = f"{weights.key}." if (weights := checkpoint.weights) and weights.key else ""
        in_weights = any(name.removeprefix(head) in (weights or ()) for name in clashes)
        fact = f"{counted(len(clashes), 'name')} with a number added, as another tensor has the name without it"
        yield note("CK109", f"{fact}: {some(list(clashes))}", severity="warning" if in_weights else "info")


def gaps(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK120 to CK124: stubs for weights, and halves of products. CK128: a number is missing in a stack of layers."""
    for one in checkpoint.state_dicts:
        missing = list(holes_in(one)) if one.role in ("model", "ema") else []
        if missing:
            fact = f"{some(missing)}: not there, between others that hold the same names and shapes"
            yield note("CK128", fact, "If the model was not saved so on purpose, a part of it is missing.")
    if any(0 in tensor.info.shape for tensor in checkpoint.tensors.values()):
        for one in checkpoint.state_dicts:
            stubs = stubs_in(checkpoint, one) if one.role in ("model", "ema") else None
            if stubs is not None:
                yield note(stubs.code, stubs.fact, stubs.hint)
    halves = halves_alone(checkpoint.tensors)
    if halves is not None:
        yield note(halves.code, halves.fact, halves.hint, severity="warning")


def without_values(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK125: there is no tensor in the file. CK126: tensors without values, or that are loaded without them."""
    is_one = checkpoint.traits.is_plain or nodes.mapping_pairs(checkpoint.root) is not None
    if is_one and not (checkpoint.tensors or checkpoint.attributes or checkpoint.members):
        from ckptool.checkpoints.weights import EMPTY, without_tensors

        fact = without_tensors(checkpoint)
        yield note("CK125", fact, severity="warning" if fact.endswith(EMPTY) else "info")
    on_meta = {name: tensor for name, tensor in checkpoint.tensors.items() if tensor.info.location == "meta"}
    empty = [name for name, tensor in on_meta.items() if tensor.info.storage is None]
    tagged = [name for name in on_meta if name not in empty]
    if empty:
        yield note("CK126", no_values(empty), "Save them from the device that they are computed on.")
    if tagged:
        fact = f"torch.load() gives {counted(len(tagged), 'tensor')} no values, for their tag is meta: {some(tagged)}"
        yield note("CK126", fact, *migration(checkpoint, _TO_CPU, to="cpu"))


def bound_method(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK405: a method was saved, and with it the whole model."""
    if checkpoint.contents.bound_method:
        why = "Save model.state_dict() instead."
        fact = "a bound method was saved, and the whole model with it: state_dict is missing its parentheses"
        yield note("CK405", fact, *state_dict(checkpoint, why))


def wrapper_prefixes(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK301: the names carry components that a training wrapper put in front."""
    attribute = lightning_attribute(checkpoint)
    if attribute:
        from ckptool.names.matching import Rename, wrappers_off  # Lightning's files alone

        fact = f"every name of the weights begins with '{attribute}.', where Lightning's module has the model"
        why = "That model alone expects the names without it."
        renames = (*wrappers_off(checkpoint.weights or ()), Rename("strip_prefix", attribute))
        look = migration(checkpoint, why, form="state_dict", renames=renames)
        yield note("CK301", fact, *look)
    wrapped = wrapper_prefixes_of(checkpoint, summarise(checkpoint).prefixes)
    if wrapped:
        plain = wrapped[0] == "module." and len(set(wrapped)) == 1
        adders = [ADDED_BY[prefix[:-1]] for prefix in wrapped]
        beside = beside_wrapped(checkpoint.weights or ())
        if beside and wrapped[0] == "module.":
            adders[0] = "a wrapper that averages"
        all_names = f"every name of the weights{f' but {some(beside)}' if beside else ''}"
        fact = f"{all_names} begins with {''.join(wrapped)!r}, which {', then '.join(adders)} added"
        why = "A model without that wrapper expects the names without it."
        # A migration of everything would keep the weights under their key, and averaged ones next to the others.
        is_inside = checkpoint.weights is not None and checkpoint.weights.key
        form = "state_dict" if is_inside or is_averaged_pair(checkpoint.weights or ()) else ""
        look = migration(checkpoint, why, form=form, strip_module=plain, strip_wrappers=not plain)
        yield note("CK301", fact, *look)


def several_weights(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK302: more than one state dict could be the model's weights, or entries beside the chosen one may be, too."""
    weights = checkpoint.weights
    if weights is not None and checkpoint.unexplained_beside(weights):
        from ckptool.checkpoints.weights import left_beside  # most files have nothing like it

        fact = left_beside(checkpoint, None, weights) or ""
        yield note("CK302", fact, *migration(checkpoint, _KEEP_ALL, form="same"), severity="warning")
    found = [one for one in checkpoint.state_dicts if one.role in ("model", "ema") and one.key not in checkpoint.copies]
    if found and weights is None and checkpoint.unmerged is None:
        from ckptool.checkpoints.weights import ROOT  # most files have one

        names = [f"{one.key or ROOT}{' (averaged)' * (one.role == 'ema')}" for one in found]
        beside = checkpoint.unexplained_beside(found[0]) if len(found) == 1 else ()
        fact = f"several state dicts could be the weights: {some(names + list(beside), _CANDIDATES)}"
        yield note("CK302", fact, *state_dict(checkpoint, "migrate takes one with `key=`."), severity="info")


def kinds_of_tensors(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK501: from several accelerators. CK407: one rank's parts. CK502: no plain memory. CK130: arrays of numpy."""
    devices = [tag for tag in summarise(checkpoint).devices if tag not in ("cpu", "meta")]
    if len(devices) > 1:
        fact = f"tensors were saved on {len(devices)} devices: {some(devices)}"
        yield note("CK501", fact, *migration(checkpoint, to="cpu"))
    infos = {name: tensor.info for name, tensor in checkpoint.tensors.items()}
    others = ((name, info) for name, info in infos.items() if not info.is_array)
    odd = {name: info.subclass or info.layout for name, info in others if info.layout != "strided" or info.subclass}
    parts = {name: infos[name].parts for name, what in odd.items() if what.endswith(".DTensor")}
    held = {name: sum(part.numel for _, part in own) for name, own in parts.items() if own}
    here = {name: numel for name, numel in held.items() if numel < infos[name].numel}  # others are whole
    if here:
        fact = "distributed tensors of which the file holds the part of one rank"
        numel = f"{sum(here.values()):,} of {sum(infos[name].numel for name in here):,} elements"
        hint = "Gather them before saving: get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))"
        hint += " of torch.distributed.checkpoint.state_dict."
        yield note("CK407", f"{fact}, {numel}: {some([*here])}", hint)
    if odd:
        listed = ", ".join(f"{count:,} {what}" for what, count in Counter(odd.values()).items())
        yield note("CK502", f"tensors that are not plain strided memory: {listed}")
    arrays = sum(info.subclass == ARRAY for info in infos.values())
    among = sum(tensor.info.is_array for tensor in (checkpoint.weights or {}).values()) if arrays else 0
    if among:
        why = "ckptool.load() makes tensors of them."
        fact = f"the weights are {counted(among, 'array')} of numpy, which load_state_dict() does not take"
        yield note("CK130", fact, *state_dict(checkpoint, why), severity="warning")
    elif arrays:
        yield note("CK130", f"{counted(arrays, 'array')} of numpy, listed as tensors", severity="info")


def quantized(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK506: weights are quantised. CK507: some of them have no scale."""
    if not may_be_quantized(checkpoint):
        return
    from ckptool.formats.json_beside import quantization_of  # most files hold floating numbers alone

    found = quantization_of(checkpoint)
    if found is None:
        return
    yield note("CK506", f"quantised: {found}", *dense(checkpoint))
    for one in found.schemes:
        if 0 < len(one.unscaled) < len(one.weights) and checkpoint.part_of is None:
            without, every = f"{len(one.unscaled):,}", f"{len(one.weights):,} weights"
            fact = f"{without} of {every} in {one.name} have no scale: {some(one.unscaled)}"
            yield note("CK507", fact, "Compare it with the file that it was made of: scales may be lost.")


def unused_storage(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK303: tensors are small views of storages that were saved whole."""
    nbytes = summarise(checkpoint).nbytes
    if nbytes <= 1 << 20 or checkpoint.traits.is_plain:  # tensors of a plain file share no storage
        return
    covered = sum(tensor.info.total_nbytes for tensor in checkpoint.tensors.values())
    if nbytes > 2 * covered and nbytes - covered > 1 << 20:
        why = "Clone views before saving them."
        fact = f"tensors cover {covered:,} of the {nbytes:,} bytes of storage that were saved with them"
        yield note("CK303", fact, *migration(checkpoint, why, form="safetensors"))


def outside_state_dict(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK401: a whole model holds tensors that its state_dict() would not give."""
    if checkpoint.attributes:
        fact = "outside the state_dict (constants, plain attributes, non-persistent buffers): "
        yield note("CK401", fact + some(list(checkpoint.attributes)), *run(checkpoint, "inspect", all=True))


def program_without_names(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK132: the weights of a program have no names of a model."""
    if checkpoint.traits.program is None or checkpoint.tensors:
        return
    constants = sum(name.startswith("constants.") for name in checkpoint.attributes)
    if constants:
        fact = f"frozen: its weights are {counted(constants, 'constant')} of its code, without the names that they had"
        yield note("CK132", fact, "Nothing can give them back: use the file from before torch.jit.freeze().")
    elif checkpoint.attributes:
        fact = f"its state_dict() is empty: {counted(len(checkpoint.attributes), 'tensor')} without a name"
        hint = "Load it with torch.jit.load(), or use the model that was scripted."
        yield note("CK132", f"{fact} in what its __getstate__() gave", hint)


def index_alone(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK133, CK160: the tensors are in other files, which torch.distributed.checkpoint or torch_xla wrote."""
    if nodes.class_name(checkpoint.root) == "torch.distributed.checkpoint.metadata.Metadata":
        fact = "the index of a torch.distributed.checkpoint: names and shapes of tensors that are in its .distcp files"
        yield note("CK133", fact, "Open the folder in which it is called '.metadata', beside them.")
    if any(str(one) == REFERENCE for one in checkpoint.globals):
        place = f"{checkpoint.path}.tensors"
        fact = f"it refers to tensors that are in files of their own, in {os.path.basename(place)!r} beside it"
        look = command_line(place, "inspect", brief=True, recursive=True) if os.path.isdir(place) else None
        yield note("CK160", fact, "Look at them there:" if look else "Get that folder, too.", look)


def model_code(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK402 to CK404, CK406: what a state_dict() would hold depends on code, which is not in the file."""
    for path, walk in checkpoint.walks:
        where = f" under {path!r}" if path else ""
        for _path, cls, hook in walk.hooks:
            fact = f"a state-dict hook may add or rename keys: {hook} of {cls}{where}"
            yield note("CK402", fact, _ASK_THE_CLASS)
        if walk.unlisted:
            modules = [f"{name or 'the model itself'} ({cls})" for name, cls in walk.unlisted]
            what = f"what {counted(len(modules), 'module')}{where} would add to a state_dict in code: {some(modules)}"
            yield note("CK403", f"not listed: {what}", _ASK_THE_CLASS)
        if walk.foreign_classes:
            fact = f"names may be wrong if these classes change what state_dict() gives: {some(walk.foreign_classes)}"
            yield note("CK404", f"{fact}{where}", *state_dict(checkpoint, _NO_CLASS))
    if checkpoint.contents.unreadable:
        names = [f"{name} ({cls})" for name, cls in checkpoint.contents.unreadable]
        hint = "Load it once where those classes are installed, and save model.state_dict()."
        yield note("CK406", f"not listed, for only their classes can read them: {some(names)}", hint)


def foreign_names(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK201: unpickling would import names that are not for containers, numbers, arrays and torch's objects."""
    own = checkpoint.traits.program is not None
    names = dict.fromkeys(
        str(one)
        for stream in checkpoint.streams
        for one in stream.globals
        if not is_usual(one.module, one.name) and not (own and is_torchscripts(one.module, one.name))
    )
    if names:
        fact = f"unpickling would import {some(list(names))} (not imported here)"
        yield note("CK201", fact, *run(checkpoint, "inspect", globals=True))


def calls(checkpoint: Checkpoint) -> tuple[Finding, ...]:
    """CK205: unpickling would call what reaches the system, or a program does."""
    if checkpoint.traits.is_plain and not checkpoint.inside:
        return ()
    from ckptool.checking import safety  # files of plain tensors have nothing to call

    return tuple(
        safety.system_calls(safety.whole(checkpoint, glances=True, skims=True), lambda: state_dict(checkpoint))
    )


def foreign(checkpoint: Checkpoint) -> list[str]:
    """Return the names that unpickling would import from elsewhere than torch, numpy and Python's containers."""
    return [str(found) for found in checkpoint.globals if not str(found).startswith(_FAMILIAR)]


Check: TypeAlias = Callable[[Checkpoint], Iterator[Finding]]

CHECKS: Final[tuple[Check, ...]] = (
    *(said_by_the_reader, journals, other_members, embedded_files, unopened_members, announced_size, beside_it),
    *(clashing_names, gaps, without_values, bound_method, wrapper_prefixes, several_weights, kinds_of_tensors),
    *(quantized, unused_storage, outside_state_dict, program_without_names, index_alone, model_code, foreign_names),
)
