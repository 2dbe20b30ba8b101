"""What a checkpoint comes to: counts, sizes, devices, types, prefixes, candidates, which tensors share memory."""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from math import prod
from operator import attrgetter, eq
from typing import Final, NamedTuple

from ckptool.cancellation import Cancellation, each
from ckptool.checkpoints.checkpoint import Checkpoint, StateDict, once
from ckptool.checkpoints.roles import NO_WEIGHTS
from ckptool.names.wrappers import ADDED_BY, HEADS, heads_of, prefixes_of
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import StorageRef, TensorInfo, distinct

_LOCATION: Final = attrgetter("location")
_SHAPE: Final = attrgetter("shape")
_DTYPE: Final = attrgetter("dtype.name")
_PARTS: Final = attrgetter("parts")
_SUBCLASS: Final = attrgetter("subclass")
_LAYOUT: Final = attrgetter("layout")
_STORAGE: Final = attrgetter("storage")
_SOURCE: Final = attrgetter("source")
_OFFSET: Final = attrgetter("offset")
_NBYTES: Final = attrgetter("nbytes")
_WHOLE: Final = attrgetter("whole")
_FULL: Final = re.compile(r"float(16|32|64)|bfloat16|complex\d+|bool")
"""Types in which nothing is quantised."""


class Summary(NamedTuple):
    """Counts over all tensors of a checkpoint."""

    tensors: int
    """Names; a tied tensor counts under each."""
    tied: int
    """Names that only repeat a tensor that another name has."""
    numel: int
    """Elements; tied tensors count once."""
    parameters: int | None
    """Elements of the weights, with their buffers; None where no state dict is the weights."""
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


@once
def summarise(checkpoint: Checkpoint) -> Summary:
    """Return the counts of a checkpoint. Reads nothing."""
    cancellation, keeps_ties = checkpoint.source.cancellation, checkpoint.traits.keeps_ties
    infos = [tensor.info for tensor in checkpoint.tensors.values()]
    numels = list(map(prod, map(_SHAPE, each(infos, cancellation))))
    storages = _all_storages(infos, cancellation)
    nbytes, is_apart = _extent(storages, apart=not keeps_ties)
    is_apart = is_apart and len(storages) == len(infos)
    own = distinct(infos, cancellation) if keeps_ties and not is_apart else infos
    numel = sum(numels) if own is infos else sum(map(prod, map(_SHAPE, own)))
    weights = checkpoint.weights
    return Summary(
        tensors=len(infos),
        tied=len(infos) - len(own),
        numel=numel,
        parameters=None if weights is None else numel if len(weights) == len(infos) else weights.numel,
        nbytes=nbytes,
        devices=_counted(list(map(_LOCATION, infos))),
        dtypes=_counted(list(map(_DTYPE, infos))),
        prefixes=prefixes_of(weights or ()),
        is_apart=is_apart,
        is_plain=not any(map(_SUBCLASS, infos)) and {"strided"}.issuperset(map(_LAYOUT, infos)) and all(numels),
    )


def may_be_quantized(checkpoint: Checkpoint) -> bool:
    """Say whether classes or types of tensors leave open whether some are quantised; those of most files do not."""
    summary = summarise(checkpoint)
    if not summary.is_plain or checkpoint.part_of is not None:
        return True
    odd = [name for name in summary.dtypes if not _FULL.fullmatch(name)]
    return bool(odd) and any(one.shape and one.info.dtype.name in odd for one in checkpoint.tensors.values())


def candidates(checkpoint: Checkpoint) -> list[StateDict]:
    """Return the state dicts that can be asked for as weights, the likeliest first; of equal ones, the first."""
    there = [one for one in checkpoint.state_dicts if one is checkpoint.weights or one.key not in checkpoint.copies]
    found = [one for one in there if one.role not in NO_WEIGHTS]
    return sorted(found, key=lambda one: one.role not in ("model", "ema"))


def heads(checkpoint: Checkpoint, state_dict: StateDict) -> int | None:
    """Return how many components wrappers put in front of a whole model's names, by its classes; else None."""
    walks = [walk for path, walk in checkpoint.walks if path == state_dict.key and state_dict.class_name is not None]
    return heads_of(dict(walks[0].modules)) if walks else None


def wrappers_in_front(checkpoint: Checkpoint, prefixes: Sequence[str]) -> list[str]:
    """Return those of the prefixes of the weights' names that wrappers added, from the first on."""
    if not any(prefix[:-1] in ADDED_BY for prefix in prefixes):
        return []
    known = heads(checkpoint, checkpoint.weights) if checkpoint.weights is not None else None
    left = len(prefixes) if known is None else known
    wrapped: list[str] = []
    for prefix in prefixes:
        if prefix[:-1] in ADDED_BY:
            left -= prefix[:-1] in HEADS
            if left < 0:  # the model's own
                break
            wrapped.append(prefix)
    return wrapped


def count(
    infos: Sequence[TensorInfo], tags: Sequence[str] | None = None, cancellation: Cancellation | None = None
) -> Counts:
    """Return the counts of tensors; with ``tags``, as if they had been saved on these devices."""
    tags = list(map(_LOCATION, infos)) if tags is None else tags
    own = distinct(infos, cancellation)
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


def numel_and_nbytes(tensors: Iterable[LazyTensor], *, apart: bool = False) -> tuple[int, int]:
    """
    Return the elements of tensors, each as often as it is there, and the bytes of all storages that they and their
    parts refer to, each byte once.

    ``apart`` says that it is known that no two of them share any.
    """
    infos = [tensor.info for tensor in tensors]
    return sum(map(prod, map(_SHAPE, infos))), _extent(_all_storages(infos), apart=apart)[0]


def _extent(storages: Sequence[StorageRef], *, apart: bool = False) -> tuple[int, bool]:
    """Return how many bytes storages cover, and whether each has some, of which no other has any."""
    sizes = list(map(_NBYTES, storages))
    nbytes = sum(sizes) if apart else _covered(storages, sizes)
    return nbytes, nbytes == sum(sizes) and all(sizes)


def _covered(storages: Sequence[StorageRef], sizes: Sequence[int]) -> int:
    """Return how many bytes storages of these sizes cover: those that begin elsewhere are apart, but for slices."""
    if not any(map(_WHOLE, storages)):
        sources, begins = list(map(_SOURCE, storages)), list(map(_OFFSET, storages))
        is_one = sources[:1] * len(sources) == sources
        places: Sequence[object] = begins if is_one else list(zip(map(id, sources), begins, strict=True))
        if len(set(places)) == len(places):
            return sum(sizes)
        by_place = dict(zip(places, sizes, strict=True))
        if all(map(eq, map(by_place.__getitem__, places), sizes)):
            return sum(by_place.values())
    return sum(end - begin for _, begin, end in _merged(storages))


def sharing(tensors: Iterable[LazyTensor]) -> list[list[str]]:
    """Return the groups of two or more names whose storages overlap, in order of first name."""
    named = [tensor for tensor in tensors if tensor.info.storage is not None and tensor.info.storage.nbytes]
    begins: dict[int, list[int]] = {}
    for source, begin, _ in _merged(_storages(tensor.info for tensor in named)):
        begins.setdefault(source, []).append(begin)
    groups: dict[tuple[int, int], list[str]] = {}
    for tensor in named:
        storage = tensor.info.storage
        assert storage is not None  # filtered above
        source = id(storage.source)
        span = bisect_right(begins[source], storage.offset)
        groups.setdefault((source, span), []).append(tensor.name)
    return [names for names in groups.values() if len(names) > 1]


def _all_storages(infos: Sequence[TensorInfo], cancellation: Cancellation | None = None) -> list[StorageRef]:
    """Return the storages of tensors and their parts, each as often as it is referred to."""
    known = each(infos, cancellation)
    return list(_storages(known) if any(map(_PARTS, infos)) else filter(None, map(_STORAGE, known)))


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
