"""CK161: whether files of a folder that go by the name of the same weights hold the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Final

from ckptool.checking.finding import Finding, note
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.errors import Failure
from ckptool.formats import open_checkpoint
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.messages import counted, some
from ckptool.sources.paths import command_line, is_far
from ckptool.sources.source import Meter
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import identity

_NOT_COMPARED: Final = "the same names and shapes are there once more, with values that were not compared:"
_EQUAL: Final = "the same weights are there once more, with equal values:"


def compared(checkpoint: Checkpoint, limits: Limits = DEFAULT_LIMITS, meter: Meter | None = None) -> Iterator[Finding]:
    """Yield CK161 for what lies beside a checkpoint; with a meter, values are compared too, and counted by it."""
    alike: dict[str, list[str]] = {}
    for one in (one for one in checkpoint.beside if one.role == "duplicate"):
        if is_far(one.path):
            alike.setdefault(_NOT_COMPARED, []).append(f"{one.name} (going by its name)")
            continue
        parts, unlike, unread = list[str](), list[str](), list[str]()
        try:
            with open_checkpoint(one.path, limits=limits) as other:
                parts = _parts(checkpoint, other)
                if not parts and meter is not None:
                    unlike, unread = _values(checkpoint, other, limits, meter)
        except Failure as error:
            fact = f"{one.name} cannot be compared with what was opened: {error.message}"
            yield note("CK161", fact, severity="info")
            continue
        if parts:
            fact = f"{one.name} is no second form of what was opened: it has {'; '.join(parts)}"
            hint = "One of them is not whole, or they are two checkpoints: give the path of the file that is meant."
            yield note("CK161", fact, hint, command_line(one.path, "inspect"), severity="warning")
        elif unlike:
            fact = f"other values in {counted(len(unlike), 'tensor')}: {some(unlike)}"
            fact = f"{one.name} has the names and shapes of what was opened, and {fact}"
            hint = "Loaders differ in which of them they take: keep the one that is meant."
            yield note("CK161", fact, hint, command_line(checkpoint.path, "diff", one.path), severity="warning")
        else:
            what = f"{_NOT_COMPARED[:-1]} of {some(unread)}:" if unread else _EQUAL if meter else _NOT_COMPARED
            alike.setdefault(what, []).append(one.name)
    for what, names in alike.items():
        yield note("CK161", f"{what} {some(names)}", severity="info")


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


def _values(checkpoint: Checkpoint, other: Checkpoint, limits: Limits, meter: Meter) -> tuple[list[str], list[str]]:
    """Return the tensors of both with other values; and those not compared: of two types, not plain, too many views."""
    from ckptool.torch_ops.differences import differ  # few are read

    own, others = _weights(checkpoint), _weights(other)
    unlike, unread = list[str](), list[str]()
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
                known[key] = unread
            else:
                known[key] = unlike if differ(*pair) else None
        if (names := known[key]) is not None:
            names.append(name)
    return unlike, unread
