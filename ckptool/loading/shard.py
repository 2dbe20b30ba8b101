"""
One rank's shard of the weights: tensors are cut along a dimension, and only the rank's part is read.

A part along the first dimension is one range of the file. Along others, its elements are gathered while reading.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from ckptool.checkpoints.weights import Weights, names_matching
from ckptool.errors import UnsupportedFeature
from ckptool.tensors.pieces import in_pieces, packed
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import TensorInfo, identity

Cut: TypeAlias = tuple[int, int, int]
"""The dimension that a tensor is cut along, the number of the rank (from 0), and the number of ranks."""
Shard: TypeAlias = Mapping[str, Cut]
"""Cuts, by globs of the names of tensors."""


def share_of(weights: Weights, shard: Shard | None) -> Weights:
    """
    Return weights in which each tensor that is cut is replaced by the rank's part of it.

    Raises:
        UnsupportedFeature: A tensor cannot be cut: it lacks the dimension, equal parts, or plain elements.
        ValueError: There is no such rank, or two globs that match a name give different cuts.
        WeightsNotFound: A glob matches no name.
    """
    cuts: dict[str, Cut] = {}
    for glob, cut in (shard or {}).items():
        _, rank, world = cut
        if not 0 <= rank < world:
            raise ValueError(f"shard[{glob!r}] is (dimension, rank, ranks), and has rank {rank} of {world}")
        for name in names_matching("shard", glob, list(weights.tensors)):
            if cuts.setdefault(name, cut) != cut:
                raise ValueError(f"shard says {cut} of {name!r} for {glob!r}, and {cuts[name]} for another glob")
    parts: dict[object, TensorInfo] = {}  # tied tensors stay tied
    tensors = dict(weights.tensors)
    for name, cut in cuts.items():
        key = identity(tensors[name].info), cut
        if key not in parts:
            parts[key] = _part(tensors[name], *cut)
        tensors[name] = LazyTensor(tensors[name].name, parts[key])
    return weights._replace(tensors=tensors)


def _part(tensor: LazyTensor, dim: int, rank: int, world: int) -> TensorInfo:
    """Return the facts of one rank's part of a tensor, as if it were stored by itself."""
    shape = list(tensor.shape)
    if not -len(shape) <= dim < len(shape):
        raise _uneven(tensor, f"has no dimension {dim}: its shape is {shape}")
    rows, left = divmod(shape[dim], world)
    if left:
        fact = f"{shape[dim]:,} = {world:,} * {rows:,} + {left:,}"
        raise _uneven(tensor, f"{shape} has no {world:,} equal parts along dimension {dim}: {fact}")
    info = tensor[(*[slice(None)] * (dim % len(shape)), slice(rank * rows, (rank + 1) * rows))].info
    if info.is_contiguous or info.storage is None:
        return info
    whole = in_pieces(info.storage.key, info.shape, info.dtype, packed(info, tensor.name), info.location)
    return whole._replace(requires_grad=info.requires_grad, kind=info.kind, subclass=info.subclass)


def _uneven(tensor: LazyTensor, fact: str) -> UnsupportedFeature:
    return UnsupportedFeature(f"tensor {tensor.name!r} {fact}", kind="uneven-shard", hint="Cut it in another way.")
