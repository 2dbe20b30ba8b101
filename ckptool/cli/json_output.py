"""
Reports as JSON on stdout, printed piece by piece, so that a long one is never in memory as a whole.

A text of the file's may become six times as long by its escapes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import click

from ckptool.checking.finding import Finding
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.summary import Summary, sharing
from ckptool.checkpoints.training import TrainingState, parameter_names, training_states
from ckptool.cli.inspect_report import adapter_in
from ckptool.cli.tables import tensor_file_offset
from ckptool.cli.text import with_options
from ckptool.errors import CkptoolError
from ckptool.formats import member_in
from ckptool.formats.directories.beside import quantization_of
from ckptool.messages import cut
from ckptool.pickles.describe import describe, kind_of, scalar_of
from ckptool.tensors.pieces import Cut, cut_of
from ckptool.tensors.reading import LazyTensor

if TYPE_CHECKING:
    from ckptool.checkpoints.adapters import Adapter
    from ckptool.checkpoints.digest import Known
    from ckptool.checkpoints.quantized import Quantization

INSPECT = "ckptool.inspect/2"

_LONGEST_CLASS = 256
_SHARED_LISTED = 32
_GROUPS_LISTED = 1 << 10
_PIECES_LISTED = 1 << 8
_SHARED_LENGTH = 1 << 12
_AT_ONCE = 1 << 16
_DEPTH = 2
"""Of an object, the members of its members are pieces; a list of objects is one level more."""


def print_json(found: object) -> None:
    """Print a value as one line of ASCII."""
    _print("", found)
    click.echo("")


class JsonOutput:
    """The objects of files, printed as they come: each a line, or all together a list, or the only one by itself."""

    def __init__(self, *, as_lines: bool, is_list: bool) -> None:
        self._as_lines = as_lines
        self._is_list = is_list
        self._printed = 0

    def add(self, found: dict[str, object]) -> None:
        if self._as_lines:
            print_json(found)
        else:
            _print((", " if self._printed else "[") if self._is_list else "", found)
        self._printed += 1

    def end(self) -> None:
        if not self._as_lines:
            click.echo(("]" if self._printed else "[]") if self._is_list else "")


def _print(start: str, found: object) -> None:
    waiting, length = [start], 0
    for piece in _pieces(found, _DEPTH + isinstance(found, list)):
        waiting.append(piece)
        length += len(piece)
        if length >= _AT_ONCE:
            click.echo("".join(waiting), nl=False)
            waiting, length = [], 0
    click.echo("".join(waiting), nl=False)


def _pieces(found: object, depth: int) -> Iterator[str]:
    if depth and isinstance(found, dict):
        for number, (key, value) in enumerate(found.items()):
            yield f"{', ' if number else '{'}{json.dumps(key)}: "
            yield from _pieces(value, depth - 1)
        yield "}" if found else "{}"
    elif depth and isinstance(found, list | tuple | Iterator):
        yield "["
        for number, value in enumerate(found):
            yield ", " if number else ""
            yield from _pieces(value, depth - 1)
        yield "]"
    else:
        yield json.dumps(found, ensure_ascii=True, allow_nan=False)


def inspect_object(
    checkpoint: Checkpoint,
    summary: Summary,
    findings: Sequence[Finding],
    tensors: Iterable[LazyTensor],
    digest: Known | None = None,
) -> dict[str, object]:
    """Return the object that ``inspect --json`` prints for a file; its tensors are made as they are asked for."""
    asked = {} if digest is None else {"digest": digest.digest, "digest_error": digest.error and digest.error.kind}
    groups = sharing(checkpoint.tensors.values())
    shared = {name: group for group in groups for name in group}
    parameters = parameter_names(checkpoint)
    return {
        "schema": INSPECT,
        "path": checkpoint.path,
        "member": checkpoint.member,
        "file_nbytes": checkpoint.file_nbytes,
        "format": checkpoint.format,
        "form": checkpoint.form,
        "summary": {
            "tensors": summary.tensors,
            "tied": summary.tied,
            "numel": summary.numel,
            "parameters": summary.parameters,
            "nbytes": summary.nbytes,
            "devices": summary.devices,
            "dtypes": summary.dtypes,
            "prefixes": list(summary.prefixes),
        },
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
        "adapter": _adapter_json(adapter_in(checkpoint)),
        "quantization": _quantization_json(quantization_of(checkpoint, summary)),
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
        "findings": [finding_object(finding) for finding in findings],
    }


def inspect_error(path: str, error: CkptoolError) -> dict[str, object]:
    """Return the object that ``inspect --json`` prints for a file that cannot be read."""
    return {"schema": INSPECT, "path": path, "member": member_in(path), "error": error_object(error)}


def error_object(error: CkptoolError) -> dict[str, object]:
    """Return an error as every verb's JSON has it."""
    return {
        "path": error.path,
        "kind": error.kind,
        "message": error.message,
        "hint": error.hint and with_options(error.hint),
        "command": error.command,
        "offset": error.offset,
        "needed": error.needed,
        "actual": error.actual,
    }


def finding_object(finding: Finding) -> dict[str, object]:
    """Return a finding as every verb's JSON has it."""
    return finding._replace(hint=finding.hint and with_options(finding.hint))._asdict()


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
