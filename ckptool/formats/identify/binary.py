"""Kinds without a mark of their own: ONNX and TensorFlow, which are protobuf, and Flax, which is msgpack."""

from __future__ import annotations

import re
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from ckptool.formats.identify.wording import EXPORTED, IN_TENSORFLOW, not_a_checkpoint, quoted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptool.errors import NotACheckpoint
    from ckptool.formats.identify.head import Head


_TENSORFLOW_OP = re.compile(rb"[\n\x12](?:\x05Const|\x04NoOp|\x0bVarHandleOp)|\x12\x0bPlaceholder")
"""The length and name of an operation that next to every graph has."""
_MSGPACK_MAP = re.compile(rb"(?:[\x81-\x8f]|\xde..|\xdf....)[\xa1-\xbf][ -~]", re.DOTALL)
_FLAX_ARRAY = re.compile(rb"(?:\xc7.|\xc8..|\xc9....)\x01\x93[\x90-\x9f]", re.DOTALL)
"""Extension 1 of flax.serialization, which begins with a list of three: shape, dtype, bytes."""


def name_binary(head: Head) -> NotACheckpoint | None:
    """Name protobuf or msgpack that holds the model of another framework."""
    data = head.data
    if _MSGPACK_MAP.match(data) and _FLAX_ARRAY.search(data):
        what = f"Flax parameters (msgpack) of {head.size}"
        return not_a_checkpoint(what, "flax", "Read it with flax.serialization.")
    fields = list(islice(_fields(data), 16))
    if not fields or fields[0].number != 1:
        return None
    if _is_onnx(data, fields):
        strings = [_string(data, field) for field in fields if field.number in (2, 3)]
        by = f", written by {quoted(' '.join(strings))}" if strings else ""
        what = f"an ONNX model of {head.size}, IR version {fields[0].value}{by}"
        return not_a_checkpoint(what, "onnx", EXPORTED)
    if _TENSORFLOW_OP.search(data):  # a GraphDef begins with its nodes, a SavedModel with its version, 1
        what = f"a TensorFlow graph or SavedModel of {head.size}"
        return not_a_checkpoint(what, "tensorflow", IN_TENSORFLOW) if fields[0].value in (-1, 1) else None
    return None


class _Field(NamedTuple):
    number: int
    value: int
    """Of a number; -1 for bytes."""
    start: int
    stop: int


def _is_onnx(data: bytes, fields: list[_Field]) -> bool:
    # onnx.proto, ModelProto: 1 ir_version, 2-4 and 6 strings, 5 model_version, 7 graph, 8 opset_import
    if fields[0].value <= 0:
        return False
    for field in fields[1:]:
        if field.number == 7:  # it begins with a node or, without one, with its name
            return field.value < 0 and data[field.start : field.start + 1] in (b"\n", b"\x12")
        if field.number in (2, 3, 4) and not _string(data, field).isprintable():
            return False
        if field.number not in (2, 3, 4, 5, 6, 8, 14) or (field.number == 5) != (field.value >= 0):
            return False
    return False


def _string(data: bytes, field: _Field) -> str:
    return data[field.start : field.stop].decode("ascii", "replace")


def _fields(data: bytes) -> Iterator[_Field]:
    """Walk the outermost fields of a protobuf message; the last one may reach beyond the head."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if tag < 8 or number >= 1 << 29 or wire not in (0, 2):
            return
        size, start = _varint(data, at)
        if size < 0:
            return
        at = start + size if wire == 2 else start
        yield _Field(number, -1 if wire == 2 else size, start, at)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number and where it ends; -1 where it does not."""
    value = 0
    for shift, byte in enumerate(data[at : at + 10]):
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value, at + shift + 1
    return -1, at
