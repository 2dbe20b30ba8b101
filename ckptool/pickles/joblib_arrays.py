"""
Arrays of joblib: an object in the pickle describes each, and the elements follow the opcode that built this object.

    u8 n, n bytes     so that elements are aligned, since joblib 1.2 (where the object has an alignment)
    raw elements      of the array; of one that holds Python objects a pickle instead

Then the pickle goes on. See joblib/numpy_pickle.py, NumpyArrayWrapper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import Final

from ckptool.pickles import nodes
from ckptool.pickles.machine import Machine
from ckptool.pickles.nodes import Block, Call, Inert
from ckptool.pickles.numpy_values import dtype_of, is_wrapper, shape_of
from ckptool.pickles.reader import Pickle, read_as_far, read_pickle
from ckptool.sources.source import Source

_LARGEST: Final = 1 << 62


def read_with_arrays(source: Source, start: int = 0) -> Pickle:
    """Interpret a pickle as ``read_pickle`` does, with the arrays of joblib that may lie in it."""
    return read_pickle(source, start, on_build=_ON_BUILD)


def read_as_far_with_arrays(source: Source, start: int = 0) -> Pickle:
    """Interpret a pickle as ``read_as_far`` does, with the arrays of joblib that may lie in it."""
    return read_as_far(source, start, on_build=_ON_BUILD)


def take_elements(machine: Machine, built: Call, objects: Callable[[Machine], Inert]) -> Inert:
    """
    Return what an object is that was just built, and move past the elements that follow it.

    ``objects`` returns the array of objects that follows, and moves past it.
    """
    if not is_wrapper(built):
        return built
    fields = nodes.state_pairs(built.state)
    dtype, shape = dtype_of(nodes.lookup(fields, "dtype")), shape_of(nodes.lookup(fields, "shape"))
    if dtype is None or shape is None:
        raise machine.malformed("an array of joblib without its shape or its type")
    if dtype.has_objects:
        return objects(machine)
    if nodes.lookup(fields, "numpy_array_alignment_bytes") is not None:
        machine.skip(1 + machine.peek())
    nbytes = prod(shape) * dtype.itemsize
    if nbytes >= _LARGEST:
        raise machine.malformed("an array of joblib of a size beyond all measure")
    built.items = [Block(machine.source, machine.position, nbytes)]
    machine.skip(nbytes)
    return built


def _nested(machine: Machine) -> Inert:
    """Return the array of objects that a pickle of its own is, with no such arrays in it."""
    inner = (read_as_far if machine.is_patient else read_pickle)(machine.source, machine.position)
    for found in inner.globals:
        machine.globals.setdefault((found.module, found.name), found)
    machine.persistent_ids += inner.persistent_ids
    machine.calls += inner.calls
    machine.call_offsets.extend(inner.call_offsets)
    machine.builds += inner.builds
    machine.build_offsets.extend(inner.build_offsets)
    machine.odd_keys += inner.odd_keys
    machine.oddities += inner.oddities
    machine.has_other_text = machine.has_other_text or inner.has_other_text
    machine.has_far_memo = machine.has_far_memo or inner.has_far_memo
    machine.doubled += (*inner.doubled, *(inner.memo.values() if isinstance(inner.memo, Mapping) else inner.memo))
    if inner.broken is not None:
        raise machine.malformed(inner.broken)
    machine.skip(inner.end - machine.position, opcodes=True)
    return inner.root


_ON_BUILD: Final = partial(take_elements, objects=_nested)
