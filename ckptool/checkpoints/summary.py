"""
The summary of a checkpoint: counts, sizes, devices, dtypes, prefixes, candidates, and tensors that share memory.

Also the framework that wrote it, from its version in the file, or from the names of classes.
"""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from ckptool.cancellation import Cancellation, each
from ckptool.checkpoints.checkpoint import Checkpoint, StateDict, once, walk_of
from ckptool.checkpoints.roles import NO_WEIGHTS
from ckptool.names.wrappers import ADDED_BY, HEADS, heads_of, prefixes_of
from ckptool.pickles import nodes
from ckptool.pickles.values import scalar_of
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import StorageRef, TensorInfo, distinct, storages_of

_FULL: Final = re.compile(r"float(16|32|64)|bfloat16|complex\d+|bool")
"""Names of dtypes that are never quantised."""


class Summary(NamedTuple):
    """Counts over all tensors of a checkpoint."""

    tensors: int
    """Number of names; a tied tensor counts for each of its names."""
    tied: int
    """Number of names whose tensor has an earlier name."""
    numel: int
    """Number of elements; tied tensors count once."""
    parameters: int | None
    """Number of elements of the weights, including buffers; None if no state dict is the weights."""
    nbytes: int
    """Bytes of all storages; shared bytes count once, whether tensors cover them or not."""
    devices: dict[str, int]
    """Tensors by device tag, as saved."""
    dtypes: dict[str, int]
    prefixes: tuple[str, ...]
    """Leading components, each with its dot, of every name of the weights; outermost first."""
    is_plain: bool
    """Whether all tensors have elements, are strided, and have no class of their own."""


class Counts(NamedTuple):
    """Counts over some tensors, from the index of the file alone."""

    tensors: int
    tied: int
    numel: int
    devices: dict[str, int]
    dtypes: dict[str, int]


@once
def summarise(checkpoint: Checkpoint) -> Summary:
    """Return the counts of a checkpoint, without reading tensors."""
    infos = [tensor.info for tensor in each(checkpoint.tensors.values(), checkpoint.source.cancellation)]
    counts = count(infos, ties=checkpoint.traits.keeps_ties, cancellation=checkpoint.source.cancellation)
    weights = checkpoint.weights
    return Summary(
        *counts[:3],
        parameters=None if weights is None else counts.numel if len(weights) == len(infos) else weights.numel,
        nbytes=_covered(infos),
        devices=counts.devices,
        dtypes=counts.dtypes,
        prefixes=prefixes_of(weights or ()),
        is_plain=all(info.subclass is None and info.layout == "strided" and info.numel for info in infos),
    )


def may_be_quantized(checkpoint: Checkpoint) -> bool:
    """Return whether some tensors may be quantised, by their classes and dtypes: false for most files."""
    summary = summarise(checkpoint)
    if not summary.is_plain or checkpoint.part_of is not None:
        return True
    odd = [name for name in summary.dtypes if not _FULL.fullmatch(name)]
    return bool(odd) and any(one.shape and one.info.dtype.name in odd for one in checkpoint.tensors.values())


def candidates(checkpoint: Checkpoint) -> list[StateDict]:
    """Return the state dicts that can be chosen as weights, the likeliest first; one of each set of copies."""
    there = [one for one in checkpoint.state_dicts if one is checkpoint.weights or one.key not in checkpoint.copies]
    found = [one for one in there if one.role not in NO_WEIGHTS]
    return sorted(found, key=lambda one: one.role not in ("model", "ema"))


def heads(checkpoint: Checkpoint, state_dict: StateDict) -> int | None:
    """Return how many components wrappers added to a whole model's names, by its classes; None for others."""
    walk = walk_of(checkpoint, state_dict)
    return heads_of(dict(walk.modules)) if walk is not None else None


def wrapper_prefixes_of(checkpoint: Checkpoint, prefixes: Sequence[str]) -> list[str]:
    """Return the leading ``prefixes`` of the weights' names that wrappers added."""
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
    infos: Sequence[TensorInfo],
    tags: Sequence[str] | None = None,
    *,
    ties: bool = True,
    cancellation: Cancellation | None = None,
) -> Counts:
    """Return the counts of tensors; with ``tags``, for these devices; without ``ties``, every name counts by itself."""
    own = distinct(infos, cancellation) if ties else infos
    return Counts(
        tensors=len(infos),
        tied=len(infos) - len(own),
        numel=sum(info.numel for info in each(own, cancellation)),
        devices=dict(Counter([info.location for info in infos] if tags is None else tags)),
        dtypes=dict(Counter(info.dtype.name for info in infos)),
    )


def numel_and_nbytes(tensors: Iterable[LazyTensor]) -> tuple[int, int]:
    """
    Return the number of elements of tensors, tied ones each time, and the bytes of the storages of them and their
    parts, where each byte counts once.
    """
    infos = [tensor.info for tensor in tensors]
    return sum(info.numel for info in infos), _covered(infos)


def _covered(infos: Iterable[TensorInfo]) -> int:
    """Return the bytes of the storages of tensors and their parts; overlaps count once."""
    return sum(end - begin for _, begin, end in _merged(storages_of(infos)))


def sharing(tensors: Iterable[LazyTensor]) -> list[list[str]]:
    """Return the groups of two or more names whose storages overlap, in order of first name."""
    named = [tensor for tensor in tensors if tensor.info.storage is not None and tensor.info.storage.nbytes]
    begins: dict[int, list[int]] = {}
    for source, begin, _ in _merged(storages_of(tensor.info for tensor in named)):
        begins.setdefault(source, []).append(begin)
    groups: dict[tuple[int, int], list[str]] = {}
    for tensor in named:
        storage = tensor.info.storage
        assert storage is not None  # filtered above
        source = id(storage.source)
        span = bisect_right(begins[source], storage.offset)
        groups.setdefault((source, span), []).append(tensor.name)
    return [names for names in groups.values() if len(names) > 1]


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


_VERSIONS: Final = (
    (("pytorch-lightning_version",), "pytorch-lightning"),
    (("ds_version",), "deepspeed"),
    (("meta", "mmengine_version"), "mmengine"),
    (("meta", "mmcv_version"), "mmcv"),
    (("fairseq_version",), "fairseq"),
    (("speechbrain_version",), "speechbrain"),
    (("checkpoint_version",), "megatron"),
)
"""The keys of frameworks' versions in what they save."""
_BEGINNINGS: Final = frozenset(keys[0] for keys, _ in _VERSIONS)
_LONGEST: Final = 64
_MOST: Final = 1e9
"""Numbers above this are not versions; Python refuses to print integers with thousands of digits."""
_NO_FRAMEWORKS: Final = frozenset({"", "torch", "__main__", "__torch__", "collections", "builtins"})


class Writer(NamedTuple):
    """A framework, and its version if the file has it."""

    name: str
    version: str | None


def lightning_attribute(checkpoint: Checkpoint) -> str:
    """Return the attribute of Lightning's module that contains all weights, in modules of its own; or empty text."""
    weights, writer = checkpoint.weights or (), writer_of(checkpoint)
    if writer is None or writer.name != _VERSIONS[0][1] or all(name.count(".") == 1 for name in weights):
        return ""
    attribute = "".join(prefixes_of(weights)[:1])[:-1]
    return "" if attribute in ADDED_BY else attribute


def writer_of(checkpoint: Checkpoint) -> Writer | None:
    """Return the framework that wrote a checkpoint; None if the file does not show it."""
    pairs = nodes.mapping_pairs(checkpoint.root) or []
    there = {key for key, _ in pairs if type(key) is str and key in _BEGINNINGS}
    for keys, name in _VERSIONS if there else ():
        node = nodes.lookup(pairs, keys[0])
        for key in keys[1:]:
            node = nodes.item(node, key)
        version = scalar_of(node)
        is_number = type(version) in (int, float) and abs(version) < _MOST  # type: ignore[arg-type]
        if is_number or isinstance(version, str):
            return Writer(name, str(version)[:_LONGEST])
    for one in checkpoint.state_dicts:
        package = (one.class_name or "").partition(".")[0]
        if package not in _NO_FRAMEWORKS:
            return Writer(package[:_LONGEST], None)
    return None
