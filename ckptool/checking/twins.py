"""CK161: whether files of a folder that go by the name of the same weights hold the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from ckptool.checking.finding import Finding, Severity, note
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.errors import Failure
from ckptool.formats import open_checkpoint
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.messages import counted, some
from ckptool.sources.paths import command_line, is_far
from ckptool.sources.source import Meter
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import identity


class _Values(NamedTuple):
    """What a comparison of the values of two checkpoints gave, in names of tensors."""

    unlike: list[str]
    unread: list[str]
    """Of two types, or without plain bytes; or there are too many views of the same bytes."""


def compared(checkpoint: Checkpoint, limits: Limits = DEFAULT_LIMITS, meter: Meter | None = None) -> Iterator[Finding]:
    """Yield CK161 for what lies beside a checkpoint; with a meter, values are compared too, and counted by it."""
    same: list[str] = []
    equal: list[str] = []
    for one in (one for one in checkpoint.beside if one.role == "duplicate"):
        if is_far(one.path):
            same.append(f"{one.name} (going by its name)")
            continue
        values = None
        try:
            with open_checkpoint(one.path, limits=limits) as other:
                parts = _parts(checkpoint, other)
                if not parts and meter is not None:
                    values = _values(checkpoint, other, limits, meter)
        except Failure as error:
            fact = f"{one.name} cannot be compared with what was opened: {error.message}"
            yield note("CK161", fact, severity="info")
            continue
        if parts:
            fact = f"{one.name} is no second form of what was opened: it has {'; '.join(parts)}"
            hint = "One of them is not whole, or they are two checkpoints: give the path of the file that is meant."
            yield note("CK161", fact, hint, command_line(one.path, "inspect"), severity="warning")
        elif values is None:
            same.append(one.name)
        elif values.unlike or values.unread:
            yield _told(checkpoint, one.name, one.path, values)
        else:
            equal.append(one.name)
    if same:
        fact = f"the same names and shapes are there once more, with values that were not compared: {some(same)}"
        yield note("CK161", fact, severity="info")
    if equal:
        yield note("CK161", f"the same weights are there once more, with equal values: {some(equal)}", severity="info")


def _told(checkpoint: Checkpoint, name: str, path: str, values: _Values) -> Finding:
    command = command_line(checkpoint.path, "diff", path)
    severity: Severity = "warning" if values.unlike else "info"
    facts = [f"other values in {counted(len(values.unlike), 'tensor')}: {some(values.unlike)}"] * bool(values.unlike)
    facts += [f"values that were not compared: {some(values.unread)}"] * bool(values.unread)
    hint = "Loaders differ in which of them they take: keep the one that is meant." if values.unlike else None
    fact = f"{name} has the names and shapes of what was opened, and {'; '.join(facts)}"
    return note("CK161", fact, hint, command, severity=severity)


def _parts(checkpoint: Checkpoint, other: Checkpoint) -> list[str]:
    """Return what another checkpoint has that this one has not, and the other way round; nothing if all is alike."""
    more, less = _names_without(other, checkpoint), _names_without(checkpoint, other)
    two, own = (_weights(one) for one in (other, checkpoint))
    unlike = [f"{name} {list(two[name].shape)}, not {list(own[name].shape)}" for name in more if name in less]
    parts = [some(unlike)] if unlike else []
    for names, than, others in ((more, "more", less), (less, "less", more)):
        rest = [name for name in names if name not in others]
        parts += [f"{counted(len(rest), 'tensor')} {than}: {some(rest)}"] if rest else []
    return parts


def _weights(checkpoint: Checkpoint) -> dict[str, LazyTensor]:
    return dict(checkpoint.weights if checkpoint.weights is not None else checkpoint.tensors)


def _names_without(checkpoint: Checkpoint, other: Checkpoint) -> list[str]:
    """Return the names of weights that another checkpoint has neither with this shape, nor by a name tied to it."""
    from ckptool.names.matching import is_benign  # few folders hold weights twice

    weights, others = _weights(checkpoint), _weights(other)
    there = {(name, one.info.shape) for name, one in others.items()}
    held = {identity(one.info) for name, one in weights.items() if (name, one.info.shape) in there}
    own = ((name, one.info) for name, one in weights.items() if not is_benign(name))
    return [name for name, info in own if (name, info.shape) not in there and identity(info) not in held]


def _values(checkpoint: Checkpoint, other: Checkpoint, limits: Limits, meter: Meter) -> _Values:
    """Compare the values of tensors that both have; a pair that is tied to an earlier one is not read again."""
    from ckptool.torch_ops.differences import differ  # few are read

    own, others = _weights(checkpoint), _weights(other)
    found = _Values([], [])
    left = limits.expanded(checkpoint.file_nbytes + other.file_nbytes)
    known: dict[tuple[object, ...], list[str] | None] = {}
    for name in (name for name in own if name in others):
        pair = own[name], others[name]
        key = tuple(chain(*(identity(one.info) for one in pair)))
        if key not in known:
            left -= pair[0].nbytes
            meter.read(pair[1].nbytes)
            is_plain = all(one.info.storage is not None and one.info.layout == "strided" for one in pair)
            if left < 0 or not is_plain or pair[0].dtype != pair[1].dtype:
                known[key] = found.unread
            else:
                known[key] = found.unlike if differ(*pair) else None
        if (names := known[key]) is not None:
            names.append(name)
    return found
