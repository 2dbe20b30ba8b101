"""Nodes that no pickle is read as: they stand for many of those in ``nodes`` until they are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from ckptool.pickles.nodes import Global, Pairs


class PlainTensor(NamedTuple):
    """
    A node for the call that torch writes for a tensor of plain strided memory: ``_rebuild_tensor_v2``, without hooks.

    One node in place of twenty; what nothing refers to is not put into the memo.
    """

    cls: Global
    """The class of its storage."""
    key: str
    """Of its storage, as are ``location`` and ``numel``."""
    location: str
    numel: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool


make_plain_tensor: Callable[
    [tuple[Global, str, str, int, int, tuple[int, ...], tuple[int, ...], bool]], PlainTensor
] = partial(tuple.__new__, PlainTensor)
"""Makes one of all its fields: thrice as fast as its constructor, which counts for thousands of tensors."""


class DictInBatches(NamedTuple):
    """A dict of very many entries, which are made when they are written, a few at a time, and then let go."""

    batches: Callable[[], Iterator[Pairs]]
    """What is in them that no ``shared`` of ``write_pickle`` has is written each time that it is met."""
