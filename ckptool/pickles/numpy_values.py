"""
numpy arrays, scalars and dtypes in the nodes of a pickle, read without numpy.

numpy pickles an array as ``_reconstruct(ndarray, (0,), b"b")`` with the state
``(version, shape, dtype, column-major, bytes or list)``, by protocol 5 as ``_frombuffer(bytes, dtype, shape, order)``,
a scalar as ``scalar(dtype, bytes)``, and a dtype as ``dtype("f4", …)`` with the state ``(version, byte order, …)``.
See numpy/_core/src/multiarray/methods.c and _core/numeric.py.

joblib writes an object with the fields of an array; the elements follow the opcode that gives the object its state.

    u8 n, n bytes     alignment of the elements, since joblib 1.2 (if the object has an alignment)
    raw elements      of the array; a pickle instead if it holds Python objects

Then the pickle goes on. See joblib/numpy_pickle.py, NumpyArrayWrapper.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from math import prod
from struct import calcsize, unpack
from typing import Final, NamedTuple

from ckptool.pickles import nodes
from ckptool.pickles.machine import Machine
from ckptool.pickles.nodes import Block, Call, Global, Inert, class_of, lookup, state_pairs
from ckptool.pickles.reader import read_as_far, read_pickle

_MAX_RANK = 64  # numpy's own limit
_MODULES = {"numpy.core.multiarray", "numpy._core.multiarray"}
_RECONSTRUCT, _NDARRAY = Global("numpy.core.multiarray", "_reconstruct"), Global("numpy", "ndarray")
_NUMERIC = {"numpy.core.numeric", "numpy._core.numeric"}
_INTERNAL = {"numpy._core._internal", "numpy.core._internal"}
_TYPES: Final = {
    "f2": ("float16", "e"),
    "f4": ("float32", "f"),
    "f8": ("float64", "d"),
    "i1": ("int8", "b"),
    "i2": ("int16", "h"),
    "i4": ("int32", "i"),
    "i8": ("int64", "q"),
    "u1": ("uint8", "B"),
    "u2": ("uint16", "H"),
    "u4": ("uint32", "I"),
    "u8": ("uint64", "Q"),
    "b1": ("bool", "?"),
    "c8": ("complex64", ""),
    "c16": ("complex128", ""),
}
"""The name of a dtype and its letter in ``struct``, by its code."""


class NumpyArray(NamedTuple):
    """An array: ``dtype`` is numpy's name of the element type, or its code if it has no simple name."""

    dtype: str
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    """The axes in their order in memory, the slowest first."""
    big_endian: bool
    data: bytes | Block | None
    """None for arrays of Python objects."""

    def __str__(self) -> str:
        return f"array of {'objects' if self.dtype[:1] == 'O' else self.dtype} {list(self.shape)}"


def array_of(node: Inert, decode: Callable[[Inert], bytes | None] | None = None) -> NumpyArray | None:
    """Return the array that a node is, or None. ``decode`` is used instead of ``raw_bytes``."""
    fields = _array_fields(node)
    if fields is None:
        return None
    shape, dtype, axes, data = fields
    if shape_of(shape) is None:
        return None
    natural = tuple(range(len(shape)))
    raw = data if isinstance(data, Block) else (decode or raw_bytes)(data)
    if not isinstance(axes, tuple):
        axes = natural[::-1] if axes == "F" else natural
    if not all(type(axis) is int for axis in axes) or tuple(sorted(axes)) != natural:
        return None
    code, order = _dtype(dtype)
    return NumpyArray(_TYPES.get(code, (code, ""))[0], shape, axes, order == ">", raw)


def is_array(node: Inert) -> bool:
    """Return whether a node is an array, without reading its elements."""
    return _array_fields(node) is not None


def _array_fields(node: Inert) -> tuple[Inert, Inert, Inert, Inert] | None:
    """Return the nodes of an array's shape, dtype, memory order ("C", "F" or a tuple of axes) and data, or None."""
    if _is_numpy(node, "_reconstruct") and isinstance(node.state, tuple) and len(node.state) == 5:
        _, shape, dtype, column_major, data = node.state
        return shape, dtype, "F" if column_major is True else "C", data
    if _is_numpy(node, "_frombuffer", _NUMERIC) and isinstance(node.args, tuple) and 4 <= len(node.args) <= 5:
        data, dtype, shape, order = node.args[:4]
        if order != "K":
            return shape, dtype, order, data
        axes = node.args[-1]  # the array is the transpose of one with the given shape
        if not (isinstance(axes, tuple) and isinstance(shape, tuple) and len(axes) == len(shape)):
            return None
        if not all(type(axis) is int and 0 <= axis < len(shape) for axis in axes):
            return None
        memory = sorted(range(len(axes)), key=axes.__getitem__)
        return tuple(shape[axis] for axis in axes), dtype, tuple(memory), data
    if is_wrapper(node) and isinstance(node.items, list) and len(node.items) == 1:
        fields = state_pairs(node.state)
        return lookup(fields, "shape"), lookup(fields, "dtype"), lookup(fields, "order"), node.items[0]
    return None


def is_wrapper(node: Inert) -> bool:
    """Return whether a node is joblib's object for an array."""
    found = class_of(node)
    if found is None or not found.name.endswith("NumpyArrayWrapper"):
        return False
    *path, name = f"{found.module}.{found.name}".split(".")
    return name == "NumpyArrayWrapper" and "joblib" in path  # scikit-learn had a copy of joblib


def as_numpy_writes_it(wrapper: Call) -> Call:
    """Return the call that numpy would pickle for an array of joblib, whose elements are read now."""
    fields, block = state_pairs(wrapper.state), (wrapper.items or [])[0]
    cls = lookup(fields, "subclass")
    plain = not isinstance(cls, Global) or cls.name == "memmap"
    made = Call(_RECONSTRUCT, (_NDARRAY if plain else cls, (0,), b"b"))
    made.state = (1, lookup(fields, "shape"), lookup(fields, "dtype"), lookup(fields, "order") == "F", block.read())
    return made


_OBJECTS: Final = -1
"""In place of the size of elements: they are Python objects."""


def _itemsize(node: Inert) -> int | None:
    """Return the size of a dtype's elements in bytes, or _OBJECTS; None if it is not known, or the node not a dtype."""
    code, _ = _dtype(node)
    state = node.state if isinstance(node, Call) and isinstance(node.state, tuple) else ()
    if code[:1] == "O" or _is_numpy(node, "_convert_to_stringdtype_kwargs", _INTERNAL):
        return _OBJECTS
    itemsize = state[5] if len(state) > 5 and _is_size(state[5]) else None
    if itemsize is None and code[1:].isdecimal() and len(code) < 12:  # the length of text is in the state
        itemsize = int(code[1:])
    has_objects = len(state) > 7 and isinstance(state[7], int) and state[7] & 1
    return _OBJECTS if itemsize is not None and has_objects else itemsize


def shape_of(node: Inert) -> tuple[int, ...] | None:
    """Return the node if it is a shape that an array can have, else None."""
    is_shape = isinstance(node, tuple) and len(node) <= _MAX_RANK and all(map(_is_size, node))
    return node if is_shape else None


def numpy_scalar(node: Inert) -> tuple[str, object] | None:
    """Return the dtype's name and the value (None if unknown) of a numpy scalar; None if the node is not one."""
    if not (_is_numpy(node, "scalar") and isinstance(node.args, tuple) and node.args):
        return None
    code, order = _dtype(node.args[0])
    raw = raw_bytes(node.args[1]) if len(node.args) > 1 else None
    name, letter = _TYPES.get(code, (code, ""))
    if raw is not None and code.startswith("U"):
        text = raw.decode("utf-32-be" if order == ">" else "utf-32-le", "replace")
        return "str_", text.rstrip("\0")  # as numpy does
    if raw is None or not letter:
        return name, None
    layout = (">" if order == ">" else "<") + letter
    return name, unpack(layout, raw)[0] if len(raw) == calcsize(layout) else None


def _is_size(value: Inert) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_numpy(node: Inert, name: str, modules: Collection[str] = _MODULES) -> bool:
    if not (isinstance(node, Call) and isinstance(node.func, Global)):
        return False
    return node.func.name == name and node.func.module in modules


def _dtype(node: Inert) -> tuple[str, str]:
    """Return numpy's code of a dtype ("f4") and its byte order ("<", ">" or "|"); ("object", "|") if unknown."""
    if not (isinstance(node, Call) and isinstance(node.args, tuple) and node.args):
        return "object", "|"
    code = node.args[0]
    if isinstance(code, Global) and code.module == "ml_dtypes":  # types that numpy itself does not have
        code = code.name
    if not isinstance(code, str):
        return "object", "|"
    order = node.state[1] if isinstance(node.state, tuple) and len(node.state) > 1 else "<"
    return code, order if isinstance(order, str) else "<"


def raw_bytes(node: Inert) -> bytes | None:
    """Return bytes as any protocol writes them: as they are, or as text to be encoded as Latin-1; None for others."""
    text = encoded_bytes(node)
    try:
        return text.encode("latin-1") if isinstance(text, str) else None if text is None else bytes(text)
    except UnicodeEncodeError:
        return None


def encoded_bytes(node: Inert) -> str | bytes | bytearray | None:
    """Return the text or bytes that ``raw_bytes`` decodes, the same object if two calls share it; None for others."""
    if isinstance(node, bytes | bytearray | str):
        return node
    if isinstance(node, Call) and isinstance(node.func, Global) and isinstance(node.args, tuple):
        args = node.args
        if str(node.func) == "_codecs.encode" and len(args) == 2 and args[1] in ("latin1", "latin-1"):
            return args[0] if isinstance(args[0], str) else None
        if str(node.func) in ("builtins.bytes", "__builtin__.bytes") and not args:
            return b""
    return None


_LARGEST: Final = 1 << 62


def take_elements(machine: Machine, built: Call) -> Inert:
    """Return the node for an object that just got its state; if it is joblib's, move past the elements after it."""
    if not is_wrapper(built):
        return built
    fields = nodes.state_pairs(built.state)
    itemsize, shape = _itemsize(nodes.lookup(fields, "dtype")), shape_of(nodes.lookup(fields, "shape"))
    if itemsize is None or shape is None:
        raise machine.malformed("an array of joblib without its shape or its type")
    if itemsize == _OBJECTS:  # the elements are a pickle of their own
        inner = (read_as_far if machine.follows_python else read_pickle)(machine.source, machine.position)
        machine.add(inner)
        if inner.broken is not None:
            raise machine.malformed(inner.broken)
        machine.skip(inner.end - machine.position, opcodes=True)
        return inner.root
    if nodes.lookup(fields, "numpy_array_alignment_bytes") is not None:
        machine.skip(1 + machine.peek())
    nbytes = prod(shape) * itemsize
    if nbytes >= _LARGEST:
        raise machine.malformed("an array of joblib of a size beyond all measure")
    built.items = [Block(machine.source, machine.position, nbytes)]
    machine.skip(nbytes)
    return built
