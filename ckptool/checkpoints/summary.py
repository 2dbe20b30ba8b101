"""What a checkpoint comes to: counts, sizes, devices, types, prefixes, candidates, which tensors share memory."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from math import prod
from operator import add, attrgetter, le
from typing import Final, NamedTuple

from ckptool.cancellation import Cancellation, each
from ckptool.checkpoints.checkpoint import Checkpoint, StateDict
from ckptool.checkpoints.roles import NO_WEIGHTS
from ckptool.names.wrappers import heads_of, prefixes_of
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import StorageRef, TensorInfo, distinct

_LOCATION: Final = attrgetter("location")
_SHAPE: Final = attrgetter("shape")
_DTYPE: Final = attrgetter("dtype.name")
_INFO: Final = attrgetter("info")
_PARTS: Final = attrgetter("parts")
_SUBCLASS: Final = attrgetter("subclass")
_LAYOUT: Final = attrgetter("layout")
_STORAGE: Final = attrgetter("storage")
_SOURCE: Final = attrgetter("source")
_OFFSET: Final = attrgetter("offset")
_NBYTES: Final = attrgetter("nbytes")


class Summary(NamedTuple):
    """Counts over all tensors of a checkpoint."""

    tensors: int
    """Names; a tied tensor counts under each."""
    tied: int
    """Names that only repeat a tensor that another name has."""
    numel: int
    """Elements; tied tensors count once."""
    nbytes: int
    """Bytes of storage; shared bytes count once, whether tensors cover them or not."""
    devices: dict[str, int]
    """Tensors by device tag, as saved."""
    dtypes: dict[str, int]
    prefixes: tuple[str, ...]
    """Leading components, with their dots, that every name of the weights has; outermost first."""
    is_apart: bool
    """Whether no two tensors share any bytes of storage, and each has some storage of its own."""
    is_plain: bool
    """Whether all tensors have elements, in strided memory, and are of no class of their own."""


class Counts(NamedTuple):
    """Counts over some tensors, from the index of the file alone."""

    tensors: int
    tied: int
    numel: int
    devices: dict[str, int]
    dtypes: dict[str, int]


def summarise(checkpoint: Checkpoint) -> Summary:
    """Return the counts of a checkpoint. Reads nothing."""
    cancellation = checkpoint.source.cancellation
    infos = [tensor.info for tensor in checkpoint.tensors.values()]
    storages = _all_storages(infos)
    whole = sum(map(_NBYTES, storages))
    nbytes = _covered(each(storages, cancellation)) if checkpoint.traits.keeps_ties else whole
    is_apart = nbytes == whole and len(storages) == len(infos) and all(map(_NBYTES, storages))
    is_plain = not any(map(_SUBCLASS, infos)) and {"strided"}.issuperset(map(_LAYOUT, infos))
    is_plain = is_plain and all(map(prod, map(_SHAPE, infos)))
    counts = count(infos, cancellation=cancellation, apart=is_apart or not checkpoint.traits.keeps_ties)
    tensors, tied, numel, devices, dtypes = counts
    return Summary(
        tensors, tied, numel, nbytes, devices, dtypes, prefixes_of(checkpoint.weights or ()), is_apart, is_plain
    )


def candidates(checkpoint: Checkpoint) -> list[StateDict]:
    """Return the state dicts that can be asked for as weights, the likeliest first."""
    found = [one for one in checkpoint.state_dicts if one.role not in NO_WEIGHTS]
    return sorted(found, key=lambda one: one.role not in ("model", "ema"))


def heads(checkpoint: Checkpoint, state_dict: StateDict) -> int | None:
    """Return how many components wrappers put in front of a whole model's names, by its classes; else None."""
    walks = [walk for path, walk in checkpoint.walks if path == state_dict.key and state_dict.class_name is not None]
    return heads_of(dict(walks[0].modules)) if walks else None


def count(
    infos: Sequence[TensorInfo],
    tags: Sequence[str] | None = None,
    cancellation: Cancellation | None = None,
    *,
    apart: bool = False,
) -> Counts:
    """Return the counts of tensors; with ``tags``, as if they had been saved on these devices; ``apart``: none tied."""
    tags = list(map(_LOCATION, infos)) if tags is None else tags
    own = infos if apart else distinct(infos, cancellation)
    return Counts(
        tensors=len(infos),
        tied=len(infos) - len(own),
        numel=sum(map(prod, map(_SHAPE, each(own, cancellation)))),
        devices=_counted(tags),
        dtypes=_counted(list(map(_DTYPE, infos))),
    )


def _counted(values: Sequence[str]) -> dict[str, int]:
    """Return how often each value is there, in order of first use: mostly, all are the same."""
    if values and values.count(values[0]) == len(values):
        return {values[0]: len(values)}
    return dict(Counter(values))


def storage_nbytes(tensors: Iterable[LazyTensor], *, apart: bool = False) -> int:
    """
    Return the bytes of all storages that tensors and their parts refer to, each byte once.

    ``apart`` says that it is known that no two of them share any.
    """
    storages = _all_storages(list(map(_INFO, tensors)))
    return sum(map(_NBYTES, storages)) if apart else _covered(storages)


def _covered(storages: Iterable[StorageRef]) -> int:
    """Return how many bytes storages cover."""
    known = storages if isinstance(storages, list) else list(storages)
    sources = list(map(_SOURCE, known))
    if sources and sources.count(sources[0]) < len(sources):
        return sum(end - begin for _, begin, end in _merged(known))
    begins, sizes = list(map(_OFFSET, known)), list(map(_NBYTES, known))
    if all(map(le, map(add, begins, sizes), islice(begins, 1, None))):  # most lie one after the other
        return sum(sizes)
    by_begin = dict(zip(begins, sizes, strict=True))
    if len(by_begin) == len(begins) or list(map(by_begin.__getitem__, begins)) == sizes:
        ends = sorted(map(add, by_begin, by_begin.values()))
        if all(map(le, ends, islice(sorted(by_begin), 1, None))):  # in some order, too: no two share a byte
            return sum(by_begin.values())
    covered = last = 0
    for begin, nbytes in sorted(zip(begins, sizes, strict=True)):
        end = begin + nbytes
        if end > last:
            covered += end - max(begin, last)
            last = end
    return covered


def sharing(tensors: Iterable[LazyTensor]) -> list[list[str]]:
    """Return the groups of two or more names whose storages overlap, in order of first name."""
    named = [tensor for tensor in tensors if tensor.info.storage is not None and tensor.info.storage.nbytes]
    begins: dict[int, list[int]] = {}
    for source, begin, _ in _merged(_storages(tensor.info for tensor in named)):
        begins.setdefault(source, []).append(begin)
    groups: dict[tuple[int, int], list[str]] = {}
    for tensor in named:
        storage = tensor.info.storage
        assert storage is not None  # noqa: S101 - filtered above
        source = id(storage.source)
        span = bisect_right(begins[source], storage.offset)
        groups.setdefault((source, span), []).append(tensor.name)
    return [names for names in groups.values() if len(names) > 1]


def _all_storages(infos: Sequence[TensorInfo]) -> list[StorageRef]:
    """Return the storages of tensors and their parts, each as often as it is referred to."""
    return list(_storages(infos) if any(map(_PARTS, infos)) else filter(None, map(_STORAGE, infos)))


def _storages(infos: Iterable[TensorInfo]) -> Iterable[StorageRef]:
    for info in infos:
        if info.storage is not None:
            yield info.storage
        if info.parts:
            yield from _storages(part for _, part in info.parts)


def _merged(storages: Iterable[StorageRef]) -> list[tuple[int, int, int]]:
    """Return disjoint ``(source, begin, end)`` spans that cover the storages: views of a storage overlap it."""
    spans = sorted({(id(s.source), s.offset, s.offset + s.nbytes) for s in storages if s.nbytes})
    merged: list[tuple[int, int, int]] = []
    for source, begin, end in spans:
        if merged and merged[-1][0] == source and begin < merged[-1][2]:
            merged[-1] = (source, merged[-1][1], max(end, merged[-1][2]))
        else:
            merged.append((source, begin, end))
    return merged
