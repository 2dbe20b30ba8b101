"""
A digest of the weights, equal for equal weights in any format; docs/scan.md says how to compute it.

It is the SHA-256 of sorted lines, one for each tensor: the SHA-256 of a text of its type, its shape, the SHA-256 of its
elements (packed in row-major order, little-endian), and its name without wrappers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import sha256
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from ckptool.cancellation import each
from ckptool.checkpoints.checkpoint import Checkpoint, StateDict
from ckptool.checkpoints.weights import choose, entries_of
from ckptool.errors import CkptoolError, Failure, MigrationRefused, UnsupportedFeature
from ckptool.limits import DEFAULT_LIMITS, Limits, refuse_repeated
from ckptool.names.renaming import rename, strip_wrappers, without_marked
from ckptool.tensors.payloads import CHUNK_NBYTES
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import TensorInfo, identity

InMemory: TypeAlias = Callable[[TensorInfo], Iterable[bytes | memoryview] | None]


def digest_of(
    checkpoint: Checkpoint,
    limits: Limits = DEFAULT_LIMITS,
    weights: StateDict | None = None,
    in_memory: InMemory = lambda _: None,
    hashed: Mapping[tuple[object, ...], str] = MappingProxyType({}),
) -> str:
    """
    Return ``sha256:`` and the digest of the weights. Every byte of them is read, in chunks.

    ``weights`` is the state dict if it was chosen already. ``in_memory`` may return the bytes of a tensor so that they
    are not read again; ``hashed`` has known SHA-256s of elements, by the identity of their tensor.

    Raises:
        WeightsNotFound: No state dict is the weights, or several could be.
        UnsupportedFeature: The file has no bytes for a tensor.
        LimitExceeded: Views repeat the same bytes far too often.
        CkptoolError: The file cannot be read any more.
    """
    tensors = tensors_of(checkpoint, limits, weights)
    distinct = {identity(one.info): one for one in tensors.values()}
    known = {
        key: _described(one.info, one.name, limits, in_memory, hashed.get(key))
        for key, one in each(distinct.items(), checkpoint.source.cancellation)
    }
    lines = sorted(_line(known[identity(one.info)], name) for name, one in tensors.items())
    text = "\n".join(lines)
    return f"sha256:{_hex(text)}"


def tensors_of(
    checkpoint: Checkpoint, limits: Limits = DEFAULT_LIMITS, weights: StateDict | None = None
) -> Mapping[str, LazyTensor]:
    """Return the tensors of the digest by the names in it; raises as ``digest_of``, but reads nothing."""
    weights = choose(checkpoint, None, "auto") if weights is None else weights
    given = {**weights, **dict(_packed(checkpoint, weights))}
    given |= {name: given[kept] for name, kept in checkpoint.recorded.ties.items() if kept in given}
    try:
        renamed = rename([*given], [strip_wrappers])
    except MigrationRefused:  # a component of only some names may be the model's own
        renamed = rename([*given], [lambda names: list(map(without_marked, names))])
    tensors = {new: one for new, one in zip(renamed, given.values(), strict=True) if new is not None}
    distinct = {identity(one.info): one for one in tensors.values()}
    refuse_repeated(sum(one.info.total_nbytes for one in distinct.values()), checkpoint.file_nbytes, limits)
    return tensors


class Known(NamedTuple):
    """A digest, or the error if there is none."""

    digest: str | None
    error: CkptoolError | None = None


def digest_or_why(checkpoint: Checkpoint, limits: Limits = DEFAULT_LIMITS) -> Known:
    """Return the result of ``digest_of``, or its error; only a cancellation is raised."""
    try:
        return Known(digest_of(checkpoint, limits))
    except Failure as error:
        return Known(None, error)


def _hex(text: str) -> str:
    return sha256(text.encode(errors="surrogatepass")).hexdigest()


def _line(described: str, name: str) -> str:
    # The name is last, and only the digests of lines are joined: no name can imitate other lines.
    return _hex(f"{described} {name}")


def _packed(checkpoint: Checkpoint, weights: StateDict) -> Iterator[tuple[str, LazyTensor]]:
    """Yield the tensors inside entries of a state dict that are not tensors: packed weights, extra state."""
    entries = {name for name, _ in entries_of(checkpoint, weights) if name not in weights}
    others = {one.head + name for one in checkpoint.state_dicts for name in one}
    head = weights.head
    for name, tensor in checkpoint.tensors.items() if entries else ():
        parts = name[len(head) :].split(".") if name.startswith(head) and name not in others else []
        if any(".".join(parts[:end]) in entries for end in range(1, len(parts))):
            yield name[len(head) :], tensor


def _described(info: TensorInfo, name: str, limits: Limits, in_memory: InMemory, hashed: str | None = None) -> str:
    """Return a text of type, shape and SHA-256 of a tensor; if it is not strided, of layout, details and parts, too."""
    if info.storage is None and not info.parts:
        raise UnsupportedFeature(f"tensor {name!r} has no bytes in the file", kind="no-plain-bytes")
    contents = sha256()
    if info.storage is not None and hashed is None:
        known = in_memory(info)
        for chunk in LazyTensor(name, info).chunks(CHUNK_NBYTES, limits=limits) if known is None else known:
            contents.update(chunk)
    shape = ",".join(map(str, info.shape))
    words = [info.dtype.name, f"[{shape}]", hashed or contents.hexdigest()]
    if info.layout != "strided":
        words += [info.layout, *(f"{key}={value!r}" for key, value in info.details)]
    words += [_line(_described(one, f"{name}.{part}", limits, in_memory), part) for part, one in info.parts]
    return " ".join(words)
