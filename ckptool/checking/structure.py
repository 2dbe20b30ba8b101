"""
What is notable about a checkpoint, why it matters, and what mends it.

Each check is one function that looks at a ``Checkpoint`` and yields ``Finding``s; ``CHECKS`` is the list of them.
Nothing is read, run or imported. There are no heuristics: a finding is what the file proves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Final, TypeAlias

from ckptool.checking.advice import migration, state_dict
from ckptool.checking.finding import CODES, Advice, Finding, command_line, run
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.completeness import REFERENCE, halves_alone, stubs_in
from ckptool.checkpoints.origin import lightning_attribute
from ckptool.checkpoints.summary import may_be_quantized, summarise, wrappers_in_front
from ckptool.messages import counted, some
from ckptool.names.wrappers import ADDED_BY, beside_wrapped, is_averaged_pair
from ckptool.pickles import nodes
from ckptool.pickles.weights_only import is_torchscripts, is_usual
from ckptool.sources.journal import journal_path, told
from ckptool.sources.naming import is_far, is_folder
from ckptool.sources.source import far_under, versions_of
from ckptool.tensors.dtypes import BY_NAME
from ckptool.tensors.tensor import ARRAY, identity

_OTHERS: Final = ("checkpoint", "folder", "variant")
"""What lies beside a checkpoint, and is one by itself."""
_DISTRIBUTED = ".DTensor"


def examine(checkpoint: Checkpoint) -> tuple[Finding, ...]:
    """Return everything notable about a checkpoint, in the order of ``CHECKS``."""
    return tuple(one for check in CHECKS for one in check(checkpoint))


def container_notes(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK101: oddities of the archive or stream in which nothing can be misread."""
    for note in checkpoint.notes:
        yield Finding("CK101", "info", note)


def halves(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK122, CK123: products of adapters without one of their halves."""
    found = halves_alone(checkpoint.tensors)
    if found is not None:
        what, hint = found.fact, found.hint
        all_of_them, some_of_them = Finding("CK122", "warning", what, hint), Finding("CK123", "warning", what, hint)
        yield all_of_them if found.code == "CK122" else some_of_them


def journals(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK179: a file has the journal of an edit in place beside it, or something of that name."""
    for path, _version in versions_of(checkpoint.source):
        if os.path.lexists(journal_path(path)):
            yield Finding("CK179", "info", *told(path))


def left_unread(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK170: of a file far away, what is read together with the payloads."""
    for source in (checkpoint.source, *(shard.source for shard in checkpoint.shards)):
        under = far_under(source)
        for note in under[0].notes() if under is not None else ():
            yield Finding("CK170", "info", note)


def damaged_index(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK103: the index does not match its checksum."""
    if checkpoint.damage:
        yield Finding(
            "CK103",
            "error",
            f"{checkpoint.damage}: names and shapes may not be those that were saved",
            "Download the file again.",
        )


def other_members(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK102: the archive holds more checkpoints than the one that was opened."""
    found = [member for member in checkpoint.members if member.name != checkpoint.member]
    others = [one.name for one in sorted(found, key=lambda one: (one.form == "training", -one.tensors))]
    where = "a folder" if checkpoint.is_folder else "an archive"
    if not others:
        return
    if checkpoint.form == "archive":
        fact = f"{where} of {len(others):,} checkpoints"
    elif checkpoint.is_folder:
        fact = f"{len(others):,} checkpoints together; each can be opened alone"
    else:
        fact = f"the archive also holds {some(others)}"
    yield Finding("CK102", "info", fact, *run(checkpoint, "inspect", member=others[0]))


def embedded_files(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK131: bytes inside the file are a file of their own."""
    if checkpoint.pickles and not any(one.may_hold_bytes for one in checkpoint.pickles):
        return
    from ckptool.checkpoints.embedded import find_embedded

    for path, one in list(find_embedded(checkpoint.extras).items())[:_MOST_EMBEDDED]:
        member = f"{checkpoint.member}::{path}" if checkpoint.member else path
        yield Finding(
            "CK131",
            "info",
            f"{path!r} is {one.what}, {counted(one.nbytes, 'byte')}, which was not opened",
            *run(checkpoint, "inspect", member=member),
        )


def empty_stubs(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK120: the file has stubs without elements for weights that were partitioned. CK121, CK124: so it seems."""
    if not [True for tensor in checkpoint.tensors.values() if 0 in tensor.info.shape]:
        return
    for one in checkpoint.state_dicts:
        stubs = stubs_in(checkpoint, one) if one.role in ("model", "ema") else None
        if stubs is not None and stubs.code == "CK120":
            yield Finding("CK120", "warning", stubs.fact, stubs.hint)
        elif stubs is not None and stubs.code == "CK121":
            yield Finding("CK121", "warning", stubs.fact, stubs.hint)
        elif stubs is not None:
            yield Finding("CK124", "info", stubs.fact, stubs.hint)


def foreign_names(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK201: unpickling would import something else than what makes containers, numbers, arrays and torch's objects."""
    own = checkpoint.traits.program is not None
    names = dict.fromkeys(
        str(one)
        for stream in checkpoint.streams
        for one in stream.globals
        if not is_usual(one.module, one.name) and not (own and is_torchscripts(one.module, one.name))
    )
    if names:
        fact = f"unpickling would import {some(list(names))} (not imported here)"
        yield Finding("CK201", "info", fact, *run(checkpoint, "inspect", globals=True))


def wrapper_prefixes(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK301: the names carry components that a training wrapper put in front."""
    summary = summarise(checkpoint)
    wrapped = wrappers_in_front(checkpoint, summary.prefixes)
    attribute = lightning_attribute(checkpoint)
    if attribute:
        from ckptool.names.matching import Rename, wrappers_off  # Lightning's files alone

        fact = f"every name of the weights begins with '{attribute}.', where Lightning's module has the model"
        why = "That model alone expects the names without it."
        renames = (*wrappers_off(checkpoint.weights or ()), Rename("strip_prefix", attribute))
        look = migration(checkpoint, why, form="state_dict", renames=renames) or Advice(why)
        yield Finding("CK301", "info", fact, *look)
    if wrapped:
        plain = wrapped[0] == "module." and len(set(wrapped)) == 1
        adders = [ADDED_BY[prefix[:-1]] for prefix in wrapped]
        beside = beside_wrapped(checkpoint.weights or ())
        if beside and wrapped[0] == "module.":
            adders[0] = "a wrapper that averages"
        who = ", then ".join(adders)
        all_names = f"every name of the weights{f' but {some(beside)}' if beside else ''}"
        why = "A model without that wrapper expects the names without it."
        # Where everything is taken, averaged weights stay beside those that are not.
        form = "state_dict" if is_averaged_pair(checkpoint.weights or ()) else ""
        fact = f"{all_names} begins with {''.join(wrapped)!r}, which {who} added"
        look = migration(checkpoint, why, form=form, strip_module=plain, strip_wrappers=not plain) or Advice(why)
        yield Finding("CK301", "info", fact, *look)


def several_weights(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK302: more than one state dict could be the model's weights."""
    found = [one for one in checkpoint.state_dicts if one.role in ("model", "ema") and one.key not in checkpoint.copies]
    if len(found) > 1 and checkpoint.weights is None and checkpoint.unmerged is None:
        from ckptool.checkpoints.weights import ROOT  # most files have one

        names = [f"{one.key or ROOT}{' (averaged)' * (one.role == 'ema')}" for one in found]
        fact = f"several state dicts could be the weights: {some(names, _CANDIDATES)}"
        yield Finding("CK302", "info", fact, *(state_dict(checkpoint, "Pick one with `key=`.") or ()))


def arrays(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK130: arrays of numpy are listed as tensors."""
    found = len([True for tensor in checkpoint.tensors.values() if tensor.info.subclass == ARRAY])
    if not found:
        return
    among = sum(tensor.info.is_array for tensor in (checkpoint.weights or {}).values())
    if among:
        why = "ckptool.load() makes tensors of them, and so does this:"
        fact = f"the weights are {counted(among, 'array')} of numpy, which load_state_dict() does not take"
        yield Finding("CK130", "warning", fact, *(state_dict(checkpoint, why) or ()))
    else:
        yield Finding("CK130", "info", f"{counted(found, 'array')} of numpy, listed as tensors")


def quantized(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK506: weights are quantised. CK507: some of them have no scale."""
    if not may_be_quantized(checkpoint):
        return
    from ckptool.formats.settings import quantization_of  # most files hold floating numbers alone

    found = quantization_of(checkpoint)
    if found is None:
        return
    yield Finding("CK506", "info", f"quantised: {found}")
    for one in found.schemes:
        if 0 < len(one.unscaled) < len(one.weights) and checkpoint.part_of is None:
            without, every = f"{len(one.unscaled):,}", f"{len(one.weights):,} weights"
            fact = f"{without} of {every} in {one.name} have no scale: {some(one.unscaled)}"
            yield Finding("CK507", "warning", fact, "Compare it with the file that it was made of: scales may be lost.")


def unused_storage(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK303: tensors are small views of storages that were saved whole."""
    summary = summarise(checkpoint)
    if summary.nbytes <= 1 << 20 or checkpoint.traits.is_plain:  # each tensor of a plain file has its own
        return
    tensors = checkpoint.tensors.values()
    least = min((one.itemsize / one.packed for one in map(BY_NAME.get, summary.dtypes) if one is not None), default=0)
    if 2 * summary.numel * least >= summary.nbytes and all(map(_STORAGE, tensors)):
        return  # they cover half of it, even if each element takes as little as the smallest
    covered = sum(tensor.info.total_nbytes for tensor in tensors)
    why = "Clone views before saving them."
    if summary.nbytes > 2 * covered and summary.nbytes - covered > 1 << 20:
        fact = f"tensors cover {covered:,} of the {summary.nbytes:,} bytes of storage that were saved with them"
        yield Finding("CK303", "info", fact, *(migration(checkpoint, why, form="safetensors") or Advice(why)))


def program_without_names(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK132: the weights of a program have no names of a model."""
    if checkpoint.traits.program is None or checkpoint.tensors:
        return
    constants = sum(name.startswith("constants.") for name in checkpoint.attributes)
    if constants:
        yield Finding(
            "CK132",
            "warning",
            f"frozen: its weights are {counted(constants, 'constant')} of its code, without the names that they had",
            "Nothing can give them back: use the file from before torch.jit.freeze().",
        )
    elif checkpoint.attributes:
        yield Finding(
            "CK132",
            "warning",
            f"its state_dict() is empty: {counted(len(checkpoint.attributes), 'tensor')} without a name in what its "
            f"__getstate__() gave",
            "Load it with torch.jit.load(), or use the model that was scripted.",
        )


def distributed_index(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK133: the file is the index of a torch.distributed.checkpoint."""
    if nodes.class_name(checkpoint.root) == "torch.distributed.checkpoint.metadata.Metadata":
        yield Finding(
            "CK133",
            "info",
            "the index of a torch.distributed.checkpoint: names and shapes of tensors that are in its .distcp files",
            "Open the folder in which it is called '.metadata', beside them.",
        )


def references(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK160: the file refers to tensors in files of their own, as ``torch_xla.utils.serialization`` saves them."""
    if any(str(one) == REFERENCE for one in checkpoint.globals):
        place = f"{checkpoint.path}.tensors"
        fact = f"it refers to tensors that are in files of their own, in {os.path.basename(place)!r} beside it"
        look = command_line(place, "inspect", brief=True, recursive=True) if os.path.isdir(place) else None
        yield Finding("CK160", "warning", fact, "Look at them there:" if look else "Get that folder, too.", look)


def model_code(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK402 to CK404: what a state_dict() would hold depends on code, which is not in the file."""
    for path, walk in checkpoint.walks:
        where = f" under {path!r}" if path else ""
        for _path, cls, hook in walk.hooks:
            yield Finding(
                "CK402", "warning", f"a state-dict hook may add or rename keys: {hook} of {cls}{where}", _ASK_THE_CLASS
            )
        if walk.unlisted:
            modules = [f"{name or 'the model itself'} ({cls})" for name, cls in walk.unlisted]
            yield Finding(
                "CK403",
                "warning",
                f"not listed: what {counted(len(modules), 'module')}{where} would add to a state_dict in code: "
                f"{some(modules)}",
                _ASK_THE_CLASS,
            )
        if walk.foreign_classes:
            fact = f"names may be wrong if these classes change what state_dict() gives: {some(walk.foreign_classes)}"
            yield Finding("CK404", "info", f"{fact}{where}", *(state_dict(checkpoint, _NO_CLASS) or ()))


def without_values(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK125: there is no tensor in the file. CK126: tensors without values, or that are loaded without them."""
    is_one = checkpoint.traits.is_plain or nodes.mapping_pairs(checkpoint.root) is not None
    if is_one and not (checkpoint.tensors or checkpoint.attributes or checkpoint.members):
        from ckptool.checkpoints.weights import EMPTY, without_tensors

        fact = without_tensors(checkpoint)
        yield Finding("CK125", "warning" if fact.endswith(EMPTY) else "info", fact)
    on_meta = {name: tensor for name, tensor in checkpoint.tensors.items() if tensor.info.location == "meta"}
    empty = [name for name, tensor in on_meta.items() if tensor.info.storage is None]
    tagged = [name for name in on_meta if name not in empty]
    if empty:
        fact = f"{counted(len(empty), 'tensor')} on the meta device, without values: {some(empty)}"
        yield Finding("CK126", "warning", fact, "Save them from the device that they are computed on.")
    if tagged:
        fact = f"torch.load() gives {counted(len(tagged), 'tensor')} no values, for their tag is meta: {some(tagged)}"
        yield Finding("CK126", "warning", fact, *(migration(checkpoint, _TO_CPU, to="cpu") or Advice(_TO_CPU)))


def bound_method(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK405: a method was saved, and with it the whole model."""
    why = "Save model.state_dict() instead."
    if checkpoint.contents.bound_method:
        fact = "a bound method was saved, and the whole model with it: state_dict is missing its parentheses"
        yield Finding("CK405", "warning", fact, *(state_dict(checkpoint, why) or Advice(why)))


def unreadable(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK406: parameters or buffers that only code can make into tensors."""
    if checkpoint.contents.unreadable:
        names = [f"{name} ({cls})" for name, cls in checkpoint.contents.unreadable]
        yield Finding(
            "CK406",
            "warning",
            f"not listed, for only their classes can read them: {some(names)}",
            "Load it once where those classes are installed, and save model.state_dict().",
        )


def mixed_devices(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK501: tensors were saved from more than one accelerator."""
    summary = summarise(checkpoint)
    devices = [tag for tag in summary.devices if tag not in ("cpu", "meta")]
    if len(devices) > 1:
        fact = f"tensors were saved on {len(devices)} devices: {some(devices)}"
        yield Finding("CK501", "warning", fact, *(migration(checkpoint, to="cpu") or ()))


def clashing_names(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK109: two tensors have one dotted name."""
    clashes = checkpoint.contents.clashes
    if clashes:
        head = f"{weights.key}." if (weights := checkpoint.weights) and weights.key else ""
        in_weights = any(name.removeprefix(head) in (weights or ()) for name in clashes)
        yield Finding(
            "CK109",
            "warning" if in_weights else "info",
            f"{counted(len(clashes), 'name')} with a number added, as another tensor has the name without "
            f"it: {some(list(clashes))}",
        )


def parts_of_ranks(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK407: tensors are distributed, and the file holds a part of each."""
    subclassed = [tensor for tensor in checkpoint.tensors.values() if tensor.info.subclass]
    shown = [one for one in subclassed if one.info.parts and (one.info.subclass or "").endswith(_DISTRIBUTED)]
    here = {tensor.name: sum(part.numel for _, part in tensor.info.parts) for tensor in shown}
    cut = [tensor for tensor in shown if here[tensor.name] < tensor.numel]
    if cut:
        yield Finding(
            "CK407",
            "warning",
            f"distributed tensors of which the file holds the part of one rank, {sum(here[one.name] for one in cut):,} "
            f"of {sum(one.numel for one in cut):,} elements: {some([one.name for one in cut])}",
            "Gather them before saving: get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) of "
            "torch.distributed.checkpoint.state_dict.",
        )


def not_plain(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK502: some tensors are no plain strided memory."""
    layouts: dict[str, int] = {}
    infos = [tensor.info for tensor in checkpoint.tensors.values()]
    for info in [one for one in infos if one.layout != "strided" or one.subclass]:
        what = info.subclass or info.layout
        if not info.is_array:
            layouts[what] = layouts.get(what, 0) + 1
    if layouts:
        listed = ", ".join(f"{count:,} {what}" for what, count in layouts.items())
        yield Finding("CK502", "info", f"tensors that are not plain strided memory: {listed}")


def outside_state_dict(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK401: a whole model holds tensors that its state_dict() would not give."""
    if checkpoint.attributes:
        names = list(checkpoint.attributes)
        yield Finding(
            "CK401",
            "info",
            f"outside the state_dict (constants, plain attributes, non-persistent buffers): {some(names)}",
            *run(checkpoint, "inspect", all=True),
        )


def remarks(checkpoint: Checkpoint) -> Iterator[Finding]:
    """What the reader of the format saw; it knows the codes."""
    for code, what, hint in checkpoint.remarks:
        # Not every model has all the modules that an adapter may be of.
        yield Finding(code, CODES[code].severity or ("info" if code == "CK123" else "warning"), what, hint)


def absent_names(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK152: names of the model have no values."""
    # Components of a pipeline are told of as such.
    if checkpoint.absent and not checkpoint.unopened and all(code != "CK164" for code, _, _ in checkpoint.remarks):
        what = f"{counted(len(checkpoint.absent), 'name')} of the model without a value in any file"
        yield Finding("CK152", "warning", f"{what}: {some(checkpoint.absent)}", "They are not among the weights.")


def parts_apart(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK155: the state dicts are parts of one model that cannot be put together."""
    if checkpoint.unmerged is not None:
        yield Finding("CK155", "warning", checkpoint.unmerged, "Load it where it was written, and save it whole.")


def announced_size(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK107: an index of shards announces another size than its tensors have."""
    summary = summarise(checkpoint)
    said = checkpoint.announced_nbytes
    if said is None or said == summary.nbytes:
        return
    # Writers count what is tied under each name, or once; or the memory that is saved with it.
    infos = [tensor.info for tensor in checkpoint.tensors.values()]
    named = sum(info.total_nbytes for info in infos)
    distinct = sum({identity(info): info.total_nbytes for info in infos}.values())
    if said not in (named, distinct, summary.nbytes):
        yield Finding(
            "CK107",
            "warning",
            f"the index announces {said:,} bytes of tensors (total_size), the shards hold {named:,}",
            "Compare the index and the shards with those that were published: one of them may belong to another model.",
        )


def one_of_a_set(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK160: the file is one of several that are one checkpoint."""
    part = checkpoint.part_of
    if part is not None and not any(one.role == "leftover" for one in checkpoint.beside):  # that is CK162
        yield Finding(
            "CK160",
            "warning",
            f"{part.what}: what is in the others is not here",
            part.remedy if checkpoint.shards else "Give what they are together:",
            None if checkpoint.shards else command_line(part.path, "inspect"),
        )


def once_more(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK161: the folder holds the same weights once more."""
    names = [f"{one.name} ({one.about})" for one in checkpoint.beside if one.role == "duplicate"]
    if names:
        yield Finding("CK161", "info", f"the same weights are there once more, and were not opened: {some(names)}")


def leftovers(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK162: shards that no index names."""
    names = [one.name for one in checkpoint.beside if one.role == "leftover"]
    if names:
        yield Finding(
            "CK162",
            "warning",
            f"{counted(len(names), 'shard')} that the index does not name: {some(names)}",
            "They may be left from another save into the same folder: remove them, or get the index again.",
        )


def not_opened(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK171: other checkpoints are beside the one that was opened, going by their names."""
    if any(code == "CK167" for code, _, _ in checkpoint.remarks):
        return  # they were looked into, and that counts them
    others = [one for one in checkpoint.beside if one.role in _OTHERS and not _is_with(checkpoint, one.path)]
    if not others:
        return
    what = f"{counted(len(others), 'other checkpoint')} beside, which {_were(others)} not opened"
    if is_far(others[0].path):
        yield Finding("CK171", "info", f"{what}: {some([one.name for one in others])}")
        return
    folder = os.path.commonpath([os.path.dirname(one.path) for one in others]) or os.curdir
    names = [os.path.relpath(one.path, folder) for one in others]
    look = command_line(folder, "inspect", brief=True, recursive=True)
    yield Finding("CK171", "info", f"{what}: {some(names)}", None, look)


def _is_with(checkpoint: Checkpoint, path: str) -> bool:
    """Say whether a path is a link, or the states of an engine that a trainer saved with its weights."""
    from ckptool.formats.filenames import ENGINE  # most checkpoints are files

    folder, name = os.path.split(path)
    is_engine = ENGINE.fullmatch(name) is not None and not checkpoint.is_folder
    return os.path.islink(path) or (is_engine and os.path.dirname(checkpoint.path or "") == folder)


def unfinished(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK163: downloads that were not finished."""
    names = [one.name for one in checkpoint.beside if one.role == "incomplete"]
    if names:
        what = f"{counted(len(names), 'download')} that {_were(names)} not finished: {some(names)}"
        whole = not any(name.endswith(".aria2") for name in names)  # which fills files in any order
        hint = f"Download again what is missing{'; what was opened is whole without it' * whole}."
        yield Finding("CK163", "warning", what, hint)


def _were(names: Sequence[object]) -> str:
    return "was" if len(names) == 1 else "were"


def unopened_members(checkpoint: Checkpoint) -> Iterator[Finding]:
    """CK114: a member of the archive is a checkpoint, by its name or its content, and cannot be opened."""
    hint = "Nothing is known of what it holds."
    for name, why in checkpoint.unopened:
        if checkpoint.path and _is_beside(checkpoint, name):
            path = os.path.join(os.path.dirname(checkpoint.path), name)
            yield Finding(
                "CK114", "error", f"{name!r} beside it cannot be opened: {why}", hint, command_line(path, "check"), path
            )
        else:
            look = run(checkpoint, "check", member=name, why=hint)
            yield Finding("CK114", "error", f"member {name!r} cannot be opened: {why}", *look)


def _is_beside(checkpoint: Checkpoint, name: str) -> bool:
    """Say whether what cannot be opened is another file of the folder that one was chosen from."""

    first = name.partition("::")[0]
    return not is_folder(checkpoint.path or "") and not any(first in archive for archive in checkpoint.archives)


def calls(checkpoint: Checkpoint) -> tuple[Finding, ...]:
    """CK205: unpickling would call what reaches the system, or a program does."""
    if checkpoint.traits.is_plain and not checkpoint.inside:
        return ()
    from ckptool.checking import safety, would_run  # files of plain tensors have nothing to call

    return tuple(would_run.system_calls(safety.whole(checkpoint, glances=True), lambda: state_dict(checkpoint)))


def foreign(checkpoint: Checkpoint) -> list[str]:
    """Return the names that unpickling would import from elsewhere than torch, numpy and Python's containers."""
    return [str(found) for found in checkpoint.globals if not str(found).startswith(_FAMILIAR)]


_STORAGE = attrgetter("info.storage")
_MOST_EMBEDDED = 8
_TO_CPU = "The file has them: load it with map_location='cpu'."
_NO_CLASS = "For the weights without the class; in Python, ckptool.load_into(model, path)."
_ASK_THE_CLASS = "Compare the names with those of the class: `model='package.module:Class'`."

_FAMILIAR = (
    "torch.",
    "collections.",
    "numpy.",
    "builtins.",
    "__builtin__.",
    "_codecs.encode",
    "copyreg.",
    "copy_reg.",
    "__torch__.",
)

_CANDIDATES = 6


Check: TypeAlias = Callable[[Checkpoint], Iterator[Finding]]

CHECKS: tuple[Check, ...] = (
    damaged_index,
    remarks,
    absent_names,
    parts_apart,
    container_notes,
    left_unread,
    journals,
    other_members,
    embedded_files,
    unopened_members,
    announced_size,
    one_of_a_set,
    not_opened,
    once_more,
    leftovers,
    unfinished,
    clashing_names,
    empty_stubs,
    halves,
    without_values,
    bound_method,
    wrapper_prefixes,
    several_weights,
    mixed_devices,
    parts_of_ranks,
    not_plain,
    arrays,
    quantized,
    unused_storage,
    outside_state_dict,
    program_without_names,
    distributed_index,
    references,
    model_code,
    unreadable,
    foreign_names,
)
