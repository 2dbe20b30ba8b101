"""
Read numpy arrays, scalars and dtypes from the nodes of a pickle, without numpy.

numpy pickles an array as ``_reconstruct(ndarray, (0,), b"b")`` with the state
``(version, shape, dtype, column-major, bytes or list)``, a scalar as ``scalar(dtype, bytes)``, and a dtype as
``dtype("f4", …)`` with the state ``(version, byte order, …)``. See numpy/_core/src/multiarray/methods.c.
"""

from collections.abc import Callable
from struct import calcsize, unpack
from typing import NamedTuple

from ckptool.pickles.nodes import Call, Global, Inert

_MAX_RANK = 64  # numpy's own limit
_MODULES = {"numpy.core.multiarray", "numpy._core.multiarray"}
_NAMES = {
    "f2": "float16",
    "f4": "float32",
    "f8": "float64",
    "i1": "int8",
    "i2": "int16",
    "i4": "int32",
    "i8": "int64",
    "u1": "uint8",
    "u2": "uint16",
    "u4": "uint32",
    "u8": "uint64",
    "b1": "bool",
    "c8": "complex64",
    "c16": "complex128",
}
_STRUCT_CODES = {"f2": "e", "f4": "f", "f8": "d", "i1": "b", "i2": "h", "i4": "i", "i8": "q"}
_STRUCT_CODES |= {"u1": "B", "u2": "H", "u4": "I", "u8": "Q", "b1": "?"}


class NumpyArray(NamedTuple):
    """An array: ``dtype`` is numpy's name for the element type, or its code where it has no simple one."""

    dtype: str
    shape: tuple[int, ...]
    column_major: bool
    big_endian: bool
    data: bytes | None
    """None for arrays of Python objects."""


def numpy_array(node: Inert, decode: Callable[[Inert], bytes | None] | None = None) -> NumpyArray | None:
    """Return an array's dtype, shape and data, or None if ``node`` is not one. ``decode`` replaces ``raw_bytes``."""
    if not (_is_numpy(node, "_reconstruct") and isinstance(node.state, tuple) and len(node.state) == 5):
        return None
    _, shape, dtype, column_major, data = node.state
    if not (isinstance(shape, tuple) and len(shape) <= _MAX_RANK and all(map(_is_size, shape))):
        return None
    code, order = _dtype(dtype)
    raw = (decode or raw_bytes)(data)
    return NumpyArray(_NAMES.get(code, code), shape, column_major is True, order == ">", raw)


def numpy_scalar(node: Inert) -> tuple[str, object] | None:
    """Return the type's name and the value of a numpy scalar, or None if ``node`` is not one; a value may be None."""
    if not (_is_numpy(node, "scalar") and isinstance(node.args, tuple) and node.args):
        return None
    code, order = _dtype(node.args[0])
    raw = raw_bytes(node.args[1]) if len(node.args) > 1 else None
    name = _NAMES.get(code, code)
    if raw is not None and code.startswith("U"):
        text = raw.decode("utf-32-be" if order == ">" else "utf-32-le", "replace")
        return "str_", text.rstrip("\0")  # as numpy does
    if raw is None or code not in _STRUCT_CODES:
        return name, None
    layout = (">" if order == ">" else "<") + _STRUCT_CODES[code]
    return name, unpack(layout, raw)[0] if len(raw) == calcsize(layout) else None


def _is_size(value: Inert) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_numpy(node: Inert, name: str) -> bool:
    if not (isinstance(node, Call) and isinstance(node.func, Global)):
        return False
    return node.func.module in _MODULES and node.func.name == name


def _dtype(node: Inert) -> tuple[str, str]:
    """Return numpy's code of a dtype ("f4") and its byte order ("<", ">" or "|")."""
    if isinstance(node, Call) and isinstance(node.args, tuple) and node.args and isinstance(node.args[0], str):
        order = node.state[1] if isinstance(node.state, tuple) and len(node.state) > 1 else "<"
        return node.args[0], order if isinstance(order, str) else "<"
    return "object", "|"


def raw_bytes(node: Inert) -> bytes | None:
    """Return bytes as any protocol writes them: as they are, or as Latin-1 text to be encoded."""
    text = encoded_bytes(node)
    try:
        return text.encode("latin-1") if isinstance(text, str) else None if text is None else bytes(text)
    except UnicodeEncodeError:
        return None


def encoded_bytes(node: Inert) -> str | bytes | bytearray | None:
    """Return the string that ``raw_bytes`` decodes: the same object for two calls that share it."""
    if isinstance(node, bytes | bytearray | str):
        return node
    if isinstance(node, Call) and isinstance(node.func, Global) and isinstance(node.args, tuple):
        args = node.args
        if str(node.func) == "_codecs.encode" and len(args) == 2 and args[1] in ("latin1", "latin-1"):
            return args[0] if isinstance(args[0], str) else None
        if str(node.func) in ("builtins.bytes", "__builtin__.bytes") and not args:
            return b""
    return None
