"""
``inspect``: what is in a checkpoint, as a report, and as an object for JSON.

The head of a report is what the file is, fact by fact, what is notable, and how it is loaded. What it says beside its
tensors is the text of safetensors' ``__metadata__`` and of an index, and every value of a pickled tree that is none.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, count
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ckptool.arguments import check_arguments
from ckptool.checking.advice import migration, state_dict
from ckptool.checking.finding import Finding, finding_facts
from ckptool.checking.structure import calls, examine
from ckptool.checkpoints.checkpoint import Checkpoint, StateDict, walk_of
from ckptool.checkpoints.families import Adapter, Family, adapter_of, family_of
from ckptool.checkpoints.summary import Summary, sharing, summarise
from ckptool.checkpoints.training import TrainingState, parameter_names, training_states
from ckptool.errors import LimitExceeded, UnreadableFile, UnsupportedFeature
from ckptool.formats import open_checkpoint
from ckptool.formats.filenames import ADAPTER
from ckptool.formats.json_beside import base_model, object_beside, quantization_of
from ckptool.formats.strict_json import parse
from ckptool.inspecting.columns import DEFAULT_COLUMNS, tensor_file_offset, tensor_table
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.messages import FORMS, counted, counts, cut, rough, show, show_nbytes, some
from ckptool.names.wrappers import COMPONENTS, prefix_facts
from ckptool.pickles import nodes
from ckptool.pickles.describe import describe, kind_of, scalar_of
from ckptool.pickles.nodes import Call, Inert, class_name
from ckptool.pickles.plain_values import plain_value
from ckptool.sections import Fact, Section, as_json, cut_middle, html_of, text_of
from ckptool.sources.files import Origin
from ckptool.sources.paths import command_line
from ckptool.tensors.pieces import Cut, cut_of
from ckptool.tensors.reading import LazyTensor

if TYPE_CHECKING:
    from ckptool.checkpoints.digest import Known
    from ckptool.checkpoints.parsed import Beside
    from ckptool.checkpoints.quantized import Quantization


_LONGEST_CLASS = 256
_SHARED_LISTED = 32
_GROUPS_LISTED = 1 << 10
_PIECES_LISTED = 1 << 8
_SHARED_LENGTH = 1 << 12


class InspectReport:
    """What is in a checkpoint. As text, what ``ckptool inspect`` prints; in a notebook, a table."""

    def __init__(self, checkpoint: Checkpoint, digest: Known | None = None) -> None:
        self.path = checkpoint.path
        self.digest = digest and digest.digest
        """The fingerprint of the weights; None if not asked for, or if there is none."""
        self.summary = summarise(checkpoint)
        """Counts over all tensors."""
        self.findings = findings_of(checkpoint)
        """What is notable, as far as the index shows that."""
        self._checkpoint = checkpoint
        self._digest = digest
        # The file may be closed later: all that has to be read of it is read now.
        self._head = list(head_sections(checkpoint, self.summary, self.findings, digest, whole=True))

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON, as the command line prints it."""
        tensors = self._checkpoint.tensors.values()
        found = inspect_object(self._checkpoint, self.findings, tensors, self._digest)
        return {**found, "tensors": list(found["tensors"])}

    def _sections(self) -> Iterator[Section]:
        yield from self._head
        if tensors := self._checkpoint.tensors:
            yield from ("", tensor_table(self._checkpoint, tensors.values(), DEFAULT_COLUMNS))

    def __str__(self) -> str:
        return "\n".join(text_of(self._sections()))

    def __dir__(self) -> list[str]:
        return ["path", "digest", "summary", "findings", "as_dict"]

    def __repr__(self) -> str:
        return f"<InspectReport of {self._checkpoint!r}>"

    def _repr_html_(self) -> str:
        return html_of(self.path, self._sections())


def inspect(origin: Origin, *, digest: bool = False, limits: Limits = DEFAULT_LIMITS) -> InspectReport:
    """
    Say what is in a checkpoint, as ``ckptool inspect`` does. Nothing in it runs, and only the index is read.

    ``origin`` is a path, bytes or a binary file object. With ``digest``, the weights are read for their digest.

    Raises:
        CkptoolError: It cannot be read.
    """
    check_arguments(inspect, locals())
    with open_checkpoint(origin, limits=limits) as checkpoint:
        known = None
        if digest:
            from ckptool.checkpoints.digest import digest_or_why  # it reads every byte, and is seldom asked for

            known = digest_or_why(checkpoint, limits)
        return InspectReport(checkpoint, known)


def inspect_object(
    checkpoint: Checkpoint, findings: Sequence[Finding], tensors: Iterable[LazyTensor], digest: Known | None = None
) -> dict[str, Any]:
    """Return the object; its tensors are made as they are asked for."""
    summary = as_json(summarise(checkpoint))
    del summary["is_plain"]  # a matter of this code
    asked = {} if digest is None else {"digest": digest.digest, "digest_error": digest.error and digest.error.kind}
    groups = sharing(checkpoint.tensors.values())
    shared = {name: group for group in groups for name in group}
    parameters = parameter_names(checkpoint)
    family = family_in(checkpoint)
    return {
        "schema": SCHEMA,
        "path": checkpoint.path,
        "member": checkpoint.member,
        "file_nbytes": checkpoint.file_nbytes,
        "format": checkpoint.format,
        "form": checkpoint.form,
        "summary": summary,
        **asked,
        "state_dicts": [
            {
                "key": found.key,
                "role": found.role,
                "tensors": len(found),
                "numel": found.numel,
                "class": found.class_name,
                "is_weights": found is checkpoint.weights,
            }
            for found in checkpoint.state_dicts
        ],
        **({} if family is None else {"family": family._asdict()}),
        "adapter": _adapter_json(adapter_in(checkpoint)),
        "quantization": _quantization_json(quantization_of(checkpoint)),
        "training": [_training_json(found) for found in training_states(checkpoint)],
        "tensors": (
            _tensor_json(tensor, shared, checkpoint.shard_of.get(tensor.name), parameters.get(tensor.name))
            for tensor in tensors
        ),
        "attributes": [_tensor_json(tensor, {}) for tensor in checkpoint.attributes.values()],
        "members": [member._asdict() for member in checkpoint.members],
        "shards": [{"name": one.name, "tensors": one.tensors, "nbytes": one.nbytes} for one in checkpoint.shards],
        "beside": [one._asdict() for one in checkpoint.beside],
        "metadata": {cut(key): cut(value) for key, value in checkpoint.metadata.items()},
        "extras": [
            {"name": path, "type": kind_of(node), "value": scalar_of(node), "text": describe(node)}
            for path, node in checkpoint.extras
        ],
        "globals": [str(found) for found in checkpoint.globals],
        "findings": [finding._asdict() for finding in findings],
    }


def _adapter_json(found: Adapter | None) -> dict[str, object] | None:
    if found is None:
        return None
    return {
        "ranks": list(found.ranks),
        "targets": [cut(target, _LONGEST_CLASS) for target in found.targets[:_GROUPS_LISTED]],
        "modules": found.modules,
        "base": found.base and cut(found.base, _LONGEST_CLASS),
    }


def _quantization_json(found: Quantization | None) -> dict[str, object] | None:
    if found is None:
        return None
    schemes = [
        {"name": cut(name), "weights": len(weights), "unscaled": list(map(cut, unscaled[:_GROUPS_LISTED]))}
        for name, weights, unscaled in found.schemes
    ]
    return {"schemes": schemes, "method": found.settings and cut(found.settings.method), "tensors": len(found.types)}


def _training_json(found: TrainingState) -> dict[str, object]:
    return {
        "key": found.key,
        "role": found.role,
        "kind": found.kind and cut(found.kind),
        "class": found.class_name and cut(found.class_name),
        "steps": found.steps,
        "groups": [group._asdict() for group in found.groups[:_GROUPS_LISTED]],
    }


def _tensor_json(
    tensor: LazyTensor,
    shared: Mapping[str, Sequence[str]],
    shard: str | None = None,
    parameter: str | None = None,
) -> dict[str, object]:
    info = tensor.info
    others = [name for name in shared.get(tensor.name, ())[: _SHARED_LISTED + 1] if name != tensor.name]
    lengths = accumulate(map(len, others))  # each of a thousand tensors would list the same long names
    others = [name for name, length in zip(others, lengths, strict=True) if length <= _SHARED_LENGTH]
    found: dict[str, object] = {
        "name": tensor.name,
        "shape": list(info.shape),
        "dtype": info.dtype.name,
        "device": info.location,
        "numel": info.numel,
        "nbytes": info.total_nbytes,
        "stride": list(info.stride),
        "storage_offset": info.storage_offset,
        "requires_grad": info.requires_grad,
        "kind": info.kind,
        "storage": info.storage.key if info.storage else "",
        "file_offset": tensor_file_offset(info),
        "shared_with": others[:_SHARED_LISTED],
        "layout": info.layout,
    }
    if shard is not None:
        found["shard"] = shard
    if parameter is not None:
        found["parameter"] = cut(parameter)
    pieces = cut_of(info)
    if pieces is not None:
        found["pieces"] = _pieces_json(pieces)
    if info.subclass:
        found["subclass"] = cut(info.subclass, _LONGEST_CLASS)
    if info.details:
        found["details"] = dict(info.details)
    if info.parts:
        found["parts"] = [_tensor_json(LazyTensor(name, part), {}) for name, part in info.parts]
    return found


def _pieces_json(pieces: Cut) -> dict[str, object]:
    boxes = [(list(one.offsets), list(one.sizes), cut(one.file)) for one in pieces.pieces[:_PIECES_LISTED]]
    return {
        "count": len(pieces.pieces),
        "along": pieces.along,
        "boxes": [{"offsets": offsets, "sizes": sizes, "file": file} for offsets, sizes, file in boxes],
    }


SCHEMA = "ckptool.inspect/2"
_BESIDE_WEIGHTS = ("checkpoint", "training", "tensors", "data")
_BESIDE_SHOWN = 16
_WORD = 32


_ROLES = {
    "rng": "states of random number generators",
    "arguments": "arguments of the training",
    "scaler": "gradient scaler",
    "trainer": "state of the trainer",
    "data": "position in the data",
    "adapter": "adapter",
    "duplicate": "going by its name, a second form",
    "variant": "another variant",
    "leftover": "shard of another save",
    "incomplete": "incomplete",
}
"""What is in a training, or adjacent to a checkpoint, in words."""


class Room(NamedTuple):
    """How many items of a list, characters of the metadata and characters of a name are said of a file in a line."""

    extras: int = 8
    metadata: int = 200
    path: int = 48


SHORT, WHOLE = Room(), Room(*[sys.maxsize] * 3)


def findings_of(checkpoint: Checkpoint) -> tuple[Finding, ...]:
    """Return what is notable about a checkpoint, as far as its index shows that."""
    return (*calls(checkpoint), *examine(checkpoint))


def head_sections(
    checkpoint: Checkpoint,
    summary: Summary,
    findings: Sequence[Finding],
    digest: Known | None = None,
    *,
    whole: bool = False,
) -> Iterator[Section]:
    """Yield what a file is, fact by fact; ``whole`` cuts none, and leaves nothing out."""
    yield show(f"{checkpoint.path}::{checkpoint.member}" if checkpoint.member else checkpoint.path)
    for fact in head_facts(checkpoint, summary, WHOLE if whole else SHORT):
        yield fact._replace(most=None) if whole else fact
    if digest is not None:
        why = "" if digest.error is None else digest.error.message
        yield Fact("digest", [digest.digest or f"none: {show(why)}"])
    to_load = list(_to_load(checkpoint))
    # How to get the weights is said at the end, once; with what takes off a prefix, there.
    others = [one._replace(hint=None, command=None) if one.code == "CK404" and to_load else one for one in findings]
    yield from finding_facts(others)
    has_command = any((one.command or "").startswith("ckptool migrate") for one in others)
    yield Fact("to load", [show(line) for line in to_load if not (has_command and line.startswith("Run:"))])


def _to_load(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield what loads the weights where that takes more than plain ``torch.load``, and what writes them alone."""
    weights = checkpoint.weights
    walk = walk_of(checkpoint, weights) if weights is not None else None
    is_elsewhere = any(one.info.location not in ("cpu", "meta") for one in weights.values()) if weights else False
    holds_more = checkpoint.form in ("checkpoint", "training") or checkpoint.is_folder or is_elsewhere
    if weights is None or checkpoint.traits.program is not None or (walk is None and not holds_more):
        return
    command = state_dict(checkpoint).command
    if command is None:
        return
    where = f"{checkpoint.path}::{checkpoint.member}" if checkpoint.member else checkpoint.path
    model = "model" if walk is None else _model_of(dict(walk.modules))
    yield f"in Python: ckptool.load_into({model}, {where!r})"
    if model != "model":  # which may be lost
        yield f"code of {model.removesuffix('()')}, without forward(): {command_line(where, 'inspect', skeleton=True)}"
    yield f"Run: {command}"
    averages = [one.key for one in checkpoint.state_dicts if one.role == "ema" and one is not weights and one.key]
    if len(averages) == 1 and weights.role == "model":
        yield f"the averages: {migration(checkpoint, form='state_dict', key=averages[0]).command}"


def _model_of(classes: Mapping[str, str]) -> str:
    """Return the call that makes a model, in a wrapper or not, of the classes of its modules by their paths."""
    path = ""
    while (inside := f"{path}.{COMPONENTS.get(classes.get(path, ''), '')}".strip(".")) in classes and inside != path:
        path = inside
    own = classes.get(path, "torch.")
    return "model" if own.startswith("torch.") else f"{own.rpartition('.')[2]}()"


def head_facts(checkpoint: Checkpoint, summary: Summary, room: Room = SHORT) -> Iterator[Fact]:
    """Yield what a file is; what there is nothing to say about is left out."""
    yield from (fact for fact in _facts(checkpoint, summary, room) if fact.items)


def _facts(checkpoint: Checkpoint, summary: Summary, room: Room) -> Iterator[Fact]:
    in_shards = f" in {counted(len(checkpoint.shards), 'shard')}" if checkpoint.shards else ""
    yield Fact("format", [f"{checkpoint.format}{in_shards}, {show_nbytes(checkpoint.file_nbytes)}"])
    family = family_in(checkpoint)
    yield Fact("form", [f"{_form(checkpoint, room)}{f', {show(str(family))}' if family is not None else ''}"])
    tied = f", {summary.tied:,} of them tied" if summary.tied else ""
    if summary.tensors or not checkpoint.members:
        yield Fact("tensors", [f"{summary.tensors:,}{tied}; {_numel(summary)}, {show_nbytes(summary.nbytes)}"])
    if summary.tensors:
        yield Fact("devices", [counts(summary.devices)])
        yield Fact("dtypes", [counts(summary.dtypes)])
    for label, prefix in prefix_facts(summary.prefixes):
        yield Fact(label, [prefix])
    adapter = adapter_in(checkpoint)
    if adapter is not None:
        kind = family.name if family is not None and family.name.endswith("oRA") else "LoRA"
        yield Fact("adapter", [f"{kind} {_adapter(adapter, room)}"])
    if len(checkpoint.state_dicts) > 1 or checkpoint.form in ("checkpoint", "training"):
        dicts = [_state_dict(found, checkpoint.weights, room) for found in checkpoint.state_dicts]
        yield Fact("state dicts", dicts, None)
    if checkpoint.form in _BESIDE_WEIGHTS:
        yield Fact("training", [_training(found, room) for found in training_states(checkpoint)])
    shards = sorted(checkpoint.shards, key=lambda one: one.name)
    yield Fact(
        "shards",
        [f"{show(one.name)}: {counted(one.tensors, one.holds)}, {show_nbytes(one.nbytes)}" for one in shards],
    )
    members = (
        f"{show(found.name)}: {found.format}, {found.form}, {counted(found.tensors, 'tensor')}, "
        f"{show_nbytes(found.nbytes)}"
        for found in checkpoint.members
    )
    yield Fact("members", list(members), None)
    yield Fact("beside", [_beside(one, checkpoint.path) for one in checkpoint.beside], _BESIDE_SHOWN)
    if checkpoint.metadata:
        # What is cut here is cut again below: only the second cut is seen.
        text = ", ".join(f"{key}={value[: room.metadata + 1]}" for key, value in checkpoint.metadata.items())
        yield Fact("metadata", [show(text if len(text) <= room.metadata else f"{text[: room.metadata]}…")])
    extras = [extra for extra in checkpoint.extras if extra[0].rpartition(".")[2] != "_metadata"]
    if extras:
        yield Fact("also holds", [_extras(extras, room)])


def _numel(summary: Summary) -> str:
    """Return how many elements there are, and how many of them are the weights."""
    numel, own = summary.numel, summary.parameters
    whole = f"{counted(numel, 'parameter' if own == numel else 'element')}{rough(numel)}"
    if own is None or own == numel:
        return whole
    return f"{counted(own, 'parameter')}{rough(own)} in the weights, {whole} in all"


def family_in(checkpoint: Checkpoint) -> Family | None:
    """Return the known family that a file is of, as its tensors look, or a configuration beside it says."""

    return family_of(checkpoint, lambda: object_beside(checkpoint.path, checkpoint.source, ADAPTER))


def adapter_in(checkpoint: Checkpoint) -> Adapter | None:
    """Return the adapter that a file holds, with its base model where the file, or a configuration beside it, says."""
    found = adapter_of(checkpoint)
    if found is None or found.base is not None:
        return found
    return found._replace(base=base_model(checkpoint.path, checkpoint.source))


def _adapter(found: Adapter, room: Room) -> str:
    ranks = " and ".join(map(str, found.ranks)) if len(found.ranks) < 3 else f"{found.ranks[0]} to {found.ranks[-1]}"
    targets = some([show(cut_middle(target, room.path)) for target in found.targets], room.extras)
    base = f"; for {show(cut_middle(found.base, room.path))}" if found.base else ""
    return f"of rank {ranks} on {targets}, in {counted(found.modules, 'module')}{base}"


def extra_lines(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield a line for each value that is not a tensor: its path, its type, what it is."""
    for path, node in checkpoint.extras:
        yield show(f"{path or '(root)'}: {kind_of(node)} = {describe(node)}")


def _form(checkpoint: Checkpoint, room: Room) -> str:
    if checkpoint.form == "data" and isinstance(checkpoint.root, Call) and not checkpoint.root.pairs:
        return f"{FORMS['data']}: {show(cut_middle(class_name(checkpoint.root), room.path))}"
    if checkpoint.form != "model":
        return FORMS[checkpoint.form]
    cls = checkpoint.state_dicts[0].class_name if checkpoint.state_dicts else None
    return f"model: {show(cls)}" if cls else "model"


def _extras(extras: Sequence[tuple[str, Inert]], room: Room) -> str:
    """Return what is not a tensor, the outermost first, and how many more there are."""
    outermost = sorted(extras, key=lambda extra: extra[0].count("."))
    shown = [_extra(path, node, room) for path, node in outermost[: room.extras]]
    return show(some([*shown, *(path for path, _ in outermost[room.extras :])], room.extras))


def _extra(path: str, node: Inert, room: Room) -> str:
    """Return a path, with its value where that is a number or a word."""
    if not path:
        return describe(node)
    value = scalar_of(node)
    if value is None or (isinstance(value, str) and len(value) > _WORD):
        return cut_middle(path, room.path)
    shown = f"{value:.6g}" if isinstance(value, float) else value
    return f"{cut_middle(path, room.path)}={shown}"


def _beside(found: Beside, path: str) -> str:
    """Return one line about a file or folder that lies beside the checkpoint, or in the folder that it is."""
    folder, name = os.path.split(found.path.rstrip(f"/{os.sep}"))
    shown = name if folder in (path, os.path.dirname(path)) else found.path
    facts = [_ROLES.get(found.role, found.role)]
    facts += [show(found.about)] if found.about else []
    facts += [show_nbytes(found.nbytes)] if found.nbytes is not None else []
    return f"{show(shown)}: {', '.join(facts)}"


def _training(found: TrainingState, room: Room) -> str:
    """Return one line about an optimizer, a scheduler, a scaler or states of random number generators."""
    name = show(cut_middle(found.key, room.path)) or "(root)"
    if found.role in ("rng", "scaler"):
        return f"{name}: {_ROLES[found.role]}"
    kind = show(cut_middle(found.kind, room.path)) if found.kind else f"{found.role} of an unknown class"
    said = kind if found.class_name or not found.kind else f"{kind} by its settings"
    facts = []
    if found.role == "optimizer":
        parameters = sum(group.parameters or 0 for group in found.groups)
        groups = f" in {len(found.groups):,} groups" if len(found.groups) > 1 else ""
        facts.append(f"{counted(parameters, 'parameter tensor')}{groups}")
    rates = dict.fromkeys(f"{group.lr:.6g}" for group in found.groups if group.lr is not None)
    if rates:
        facts.append(f"lr {some(list(rates))}")
    if found.steps is not None:
        facts.append(counted(found.steps, "step"))
    return f"{name}: {', '.join([said, *facts])}"


def _state_dict(found: StateDict, weights: StateDict | None, room: Room) -> str:
    name = show(cut_middle(found.key, room.path)) or "(root)"
    cls = f", {show(found.class_name)}" if found.class_name else ""
    chosen = "  <- the weights" if found is weights else ""
    numel = counted(found.numel, "parameter" if found.role in ("model", "ema") else "element")
    return f"{name}: {found.role}{cls}, {counted(len(found), 'tensor')}, {numel}{chosen}"


_LINE: Final = 100
_MOST_VALUES: Final = 1 << 16
"""In one entry: the same list may be held many times over."""


def metadata_lines(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield a line for each key, and more where its value is JSON, or holds others, and is long."""
    for key, text in checkpoint.metadata.items():
        yield from _lines(key, text, _in_json(text))
    for path, node in checkpoint.extras:
        if path.rpartition(".")[2] != "_metadata":
            text, value = _plain(node)
            yield from _lines(path or "(root)", text, value)


def _lines(key: str, text: str, value: object) -> Iterator[str]:
    is_long = isinstance(value, dict | list | tuple) and len(text) > _LINE
    try:
        lines = _dumped(value, indent=2).split("\n") if is_long else [text]
    except RecursionError:  # one that parsers follow, and nobody reads
        lines = [text]
    yield f"{show(key)}: {show(lines[0])}"
    yield from map(show, lines[1:])


def _dumped(value: object, **how: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=_of_no_json, **how)


def _of_no_json(value: Any) -> object:
    return list(value) if isinstance(value, set | frozenset) else describe(value)


def _in_json(text: str) -> object:
    """Return what a text is as JSON; None where it is none."""
    try:
        return parse(text.encode(), "an entry", "metadata") if text[:1] in ("{", "[") else None
    except (UnreadableFile, UnicodeEncodeError):
        return None


def _plain(node: Inert) -> tuple[str, object]:
    """Return a value on a line, and as JSON can have it: objects by their attributes, other code in words."""
    seen = count()

    def leaf(_: Inert) -> None:
        if next(seen) > _MOST_VALUES:
            raise LimitExceeded(f"more than {_MOST_VALUES:,} values")

    def other(node: Inert, value: Callable[[Inert], Any]) -> Any:
        return {str(key): value(one) for key, one in nodes.attribute_pairs(node)} or describe(node)

    try:
        found = plain_value(node, leaf, None, other)
        return found if isinstance(found, str) else _dumped(found), found
    except (UnsupportedFeature, LimitExceeded, TypeError):  # of what JSON has no key for
        return describe(node), None
