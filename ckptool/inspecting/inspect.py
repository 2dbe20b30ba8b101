"""
``inspect`` of Python, the object that it is in JSON, and metadata as lines.

Metadata is the text of safetensors' ``__metadata__`` and of an index, and each value of a pickled tree that is not a
tensor. JSON that is too long for a line is laid out; values that JSON does not have are described in a line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, chain, count
from typing import TYPE_CHECKING, Any, Final

from ckptool.arguments import checked
from ckptool.checking.finding import Finding
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.summary import sharing, summarise
from ckptool.checkpoints.training import parameter_names, training_states
from ckptool.errors import LimitExceeded, UnreadableFile, UnsupportedFeature
from ckptool.formats import open_checkpoint
from ckptool.formats.json_beside import quantization_of
from ckptool.formats.strict_json import parse
from ckptool.inspecting.columns import DEFAULT_COLUMNS, tensor_file_offset, tensor_table
from ckptool.inspecting.head import SCHEMA, adapter_in, family_in, findings_of, head_sections
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.messages import cut, show
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Inert
from ckptool.pickles.values import describe, kind_of, plain_value, scalar_of
from ckptool.sections import Section, as_json, html_of, text_of
from ckptool.sources.files import Origin
from ckptool.tensors.pieces import cut_of
from ckptool.tensors.reading import LazyTensor

if TYPE_CHECKING:
    from ckptool.checkpoints.weights import Known


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
        """The fingerprint of the weights; None if not requested, or if there is none."""
        self.summary = summarise(checkpoint)
        """Counts over all tensors."""
        self.findings = findings_of(checkpoint)
        """What is notable, as far as the index shows."""
        self._checkpoint = checkpoint
        self._digest = digest
        # The file may be closed later: all that has to be read of it is read now.
        self._head = list(head_sections(checkpoint, self.summary, self.findings, digest, whole=True))

    def as_dict(self) -> dict[str, Any]:
        """Return the report for JSON, as the command line prints it."""
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


@checked()
def inspect(origin: Origin, *, digest: bool = False, limits: Limits = DEFAULT_LIMITS) -> InspectReport:
    """
    Say what is in a checkpoint, as ``ckptool inspect`` does. Nothing in it runs, and only the index is read.

    ``origin`` is a path, bytes or a binary file object. With ``digest``, the weights are read for their digest.

    Raises:
        CkptoolError: It cannot be read.
    """
    with open_checkpoint(origin, limits=limits) as checkpoint:
        known = None
        if digest:
            from ckptool.checkpoints.weights import digest_or_why  # it reads every byte, and is rarely requested

            known = digest_or_why(checkpoint, limits)
        return InspectReport(checkpoint, known)


def inspect_object(
    checkpoint: Checkpoint, findings: Sequence[Finding], tensors: Iterable[LazyTensor], digest: Known | None = None
) -> dict[str, Any]:
    """Return the object for JSON; its ``tensors`` are an iterator, which makes their objects one by one."""
    summary = as_json(summarise(checkpoint))
    del summary["is_plain"]  # internal
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
        **_about_weights(checkpoint),
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


def _about_weights(checkpoint: Checkpoint) -> dict[str, object]:
    """Return what the weights are, if they are of an adapter or quantised, and what of a training is beside them."""
    adapter, quantization = adapter_in(checkpoint), quantization_of(checkpoint)
    found: dict[str, object] = {}
    found["adapter"] = adapter and {
        "ranks": list(adapter.ranks),
        "targets": [cut(target, _LONGEST_CLASS) for target in adapter.targets[:_GROUPS_LISTED]],
        "modules": adapter.modules,
        "base": adapter.base and cut(adapter.base, _LONGEST_CLASS),
    }
    found["quantization"] = quantization and {
        "schemes": [
            {"name": cut(name), "weights": len(weights), "unscaled": list(map(cut, unscaled[:_GROUPS_LISTED]))}
            for name, weights, unscaled in quantization.schemes
        ],
        "method": quantization.settings and cut(quantization.settings.method),
        "tensors": len(quantization.types),
    }
    found["training"] = [
        {
            "key": one.key,
            "role": one.role,
            "kind": one.kind and cut(one.kind),
            "class": one.class_name and cut(one.class_name),
            "steps": one.steps,
            "groups": [group._asdict() for group in one.groups[:_GROUPS_LISTED]],
        }
        for one in training_states(checkpoint)
    ]
    return found


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
        boxes = [
            {"offsets": list(one.offsets), "sizes": list(one.sizes), "file": cut(one.file)}
            for one in pieces.pieces[:_PIECES_LISTED]
        ]
        found["pieces"] = {"count": len(pieces.pieces), "along": pieces.along, "boxes": boxes}
    if info.subclass:
        found["subclass"] = cut(info.subclass, _LONGEST_CLASS)
    if info.details:
        found["details"] = dict(info.details)
    if info.parts:
        found["parts"] = [_tensor_json(LazyTensor(name, part), {}) for name, part in info.parts]
    return found


_LINE: Final = 100
_MOST_VALUES: Final = 1 << 16
"""Most values in one entry, which may contain the same list many times over."""


def metadata_lines(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield a line for each key, and more if its value is long, and is JSON or a container."""
    texts = ((key, text, _in_json(text)) for key, text in checkpoint.metadata.items())
    extras = (extra for extra in checkpoint.extras if extra[0].rpartition(".")[2] != "_metadata")
    for key, text, value in chain(texts, ((path or "(root)", *_plain(node)) for path, node in extras)):
        lines = [text]
        if isinstance(value, dict | list | tuple) and len(text) > _LINE:
            with suppress(RecursionError):  # nested too deep to lay out
                lines = _dumped(value, indent=2).split("\n")
        yield f"{show(key)}: {show(lines[0])}"
        yield from map(show, lines[1:])


def _dumped(value: object, **how: Any) -> str:
    def other(value: Any) -> object:
        return list(value) if isinstance(value, set | frozenset) else describe(value)

    return json.dumps(value, ensure_ascii=False, default=other, **how)


def _in_json(text: str) -> object:
    """Return the value of a text that is a JSON object or list; None for other texts."""
    try:
        return parse(text.encode(), "an entry", "metadata") if text[:1] in ("{", "[") else None
    except (UnreadableFile, UnicodeEncodeError):
        return None


def _plain(node: Inert) -> tuple[str, object]:
    """Return a value as one line, and as JSON can have it: objects by their attributes, other code as text."""
    seen = count()

    def leaf(_: Inert) -> None:
        if next(seen) > _MOST_VALUES:
            raise LimitExceeded(f"more than {_MOST_VALUES:,} values")

    def other(node: Inert, value: Callable[[Inert], Any]) -> Any:
        return {str(key): value(one) for key, one in nodes.attribute_pairs(node)} or describe(node)

    try:
        found = plain_value(node, leaf, None, other)
        return found if isinstance(found, str) else _dumped(found), found
    except (UnsupportedFeature, LimitExceeded, TypeError):  # TypeError: keys that JSON does not have
        return describe(node), None
