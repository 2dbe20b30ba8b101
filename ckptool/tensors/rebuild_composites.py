"""
Tensors that have no plain bytes of their own: sparse, nested and quantised ones, wrappers, numbers, those without data.

Each function reads the arguments of one call that makes a tensor. ``tensors`` returns those of named nodes that
are tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import copysign, inf
from struct import pack
from typing import TypeAlias

from ckptool.pickles import nodes
from ckptool.pickles.nodes import Call, Global, Inert
from ckptool.sources.source import BytesSource
from ckptool.tensors import dtypes
from ckptool.tensors.rebuild_arguments import (
    as_device,
    as_dtype,
    as_flag,
    as_layout,
    as_sequence,
    as_sizes,
    malformed_tensor,
)
from ckptool.tensors.tensor import StorageRef, TensorInfo, check_extent

Args: TypeAlias = tuple[Inert, ...]
Parts: TypeAlias = tuple[tuple[str, TensorInfo], ...]
Tensors: TypeAlias = Callable[[Iterable[tuple[str, Inert]]], Parts]

_SPARSE_PARTS = {
    "sparse_coo": ("indices", "values"),
    "sparse_csr": ("crow_indices", "col_indices", "values"),
    "sparse_bsr": ("crow_indices", "col_indices", "values"),
    "sparse_csc": ("ccol_indices", "row_indices", "values"),
    "sparse_bsc": ("ccol_indices", "row_indices", "values"),
}


def quantized(info: TensorInfo, quantizer: Inert, tensors: Tensors) -> TensorInfo:
    """Return a tensor of integers with its scheme; ``info`` describes the integers."""
    if not (isinstance(quantizer, tuple) and quantizer and isinstance(quantizer[0], Global)):
        raise malformed_tensor("a quantised tensor without a quantiser")
    scheme = quantizer[0].name
    names = ("scale", "zero_point") if scheme == "per_tensor_affine" else ("scales", "zero_points", "axis")
    values = list(zip(names, quantizer[1:], strict=False))
    details = tuple((name, value) for name, value in values if isinstance(value, int | float))
    return info._replace(layout=scheme, parts=tensors(values), details=details)


def sparse(args: Args, tensors: Tensors) -> TensorInfo:
    """Return a COO tensor, or a compressed one of rows, columns or blocks."""
    layout, data = as_layout(args[0]), args[1]
    fields = _SPARSE_PARTS.get(layout)
    if fields is None or not isinstance(data, tuple) or len(data) <= len(fields):
        raise malformed_tensor(f"a sparse tensor of layout {layout!r} without its parts")
    parts = tensors(zip(fields, data, strict=False))
    if len(parts) != len(fields):
        raise malformed_tensor(f"a {layout} tensor with parts that are no tensors")
    info = _composite(layout, parts, parts[-1][1], as_sizes(data[len(fields)]))
    coalesced = layout == "sparse_coo" and len(data) > 3 and data[3] is True
    return info._replace(details=(("is_coalesced", True),)) if coalesced else info


def nested(args: Args, tensors: Tensors) -> TensorInfo:
    """Return a nested tensor of the strided layout."""
    parts = tensors(zip(("buffer", "sizes", "strides", "offsets"), args, strict=False))
    if not parts or parts[0][0] != "buffer":
        raise malformed_tensor("a nested tensor without a buffer")
    return _composite("nested", parts, parts[0][1], parts[0][1].shape)


def jagged(pairs: nodes.Pairs, tensors: Tensors) -> TensorInfo:
    """Return a nested tensor of the jagged layout, from the pairs of its state."""
    parts = tensors((field, nodes.lookup(pairs, field)) for field in ("values", "offsets", "lengths"))
    if not parts or parts[0][0] != "values":
        raise malformed_tensor("a jagged tensor without values")
    return _composite("jagged", parts, parts[0][1], parts[0][1].shape)


def _composite(layout: str, parts: Parts, main: TensorInfo, shape: tuple[int, ...]) -> TensorInfo:
    """Return a tensor that has no bytes but its parts'; ``main`` holds its values."""
    return TensorInfo(main.dtype, shape, (), 0, None, main.location, main.requires_grad, layout=layout, parts=parts)


def meta(args: Args) -> TensorInfo:
    """Return a tensor on the meta device, which has no bytes."""
    dtype, size, stride, requires_grad, *_rest = args
    info = TensorInfo(as_dtype(dtype), as_sequence(size), as_sequence(stride), 0, None, "meta", requires_grad is True)
    check_extent(info)
    return info


def wrapper(args: Args) -> TensorInfo:
    """Return a wrapper subclass; the tensors that it wraps are in its state."""
    cls, dtype, size, stride, offset, layout, device, requires_grad = args
    info = TensorInfo(
        as_dtype(dtype),
        as_sequence(size),
        as_sequence(stride),
        offset,
        None,
        as_device(device),
        requires_grad is True,
        layout=as_layout(layout),
        subclass=nodes.class_name(cls),
    )
    check_extent(info)
    return info


def on_manifold(node: Call, recognise: Callable[[Call], TensorInfo | None], tensors: Tensors) -> TensorInfo | None:
    """
    Return a tensor of geoopt, a plain one with a manifold: ``functools.partial(…, build_fn=f)(*arguments of f, state,
    class, manifold, requires_grad)``.
    """
    made = node.func.state if isinstance(node.func, Call) else None
    build = (
        nodes.lookup(nodes.mapping_pairs(made[2]) or [], "build_fn") if isinstance(made, tuple) and made[2:] else None
    )
    if not isinstance(node.args, tuple) or len(node.args) < 4:
        return None
    *arguments, _state, cls, manifold, requires_grad = node.args
    info = recognise(Call(build, tuple(arguments)))
    if info is None:
        return None
    name, parts = nodes.class_name(cls), (*info.parts, *tensors([("manifold", manifold)]))
    kind = "parameter" if name.endswith("Parameter") else info.kind
    return info._replace(subclass=name, requires_grad=as_flag(requires_grad), kind=kind, parts=parts)


def uninitialized(args: Args) -> TensorInfo:
    """Return a lazy parameter or buffer that has no shape yet."""
    float32 = dtypes.BY_NAME["float32"]
    return TensorInfo(float32, (), (), 0, None, "cpu", args[0] is True, "parameter", "uninitialized")


def scalar(value: Inert) -> TensorInfo | None:
    """Return the tensor that ``torch.tensor`` makes of a number; None if it makes none of it."""
    if type(value) is float:
        name, data = "float32", _as_float32(value)
    elif type(value) is int and -(1 << 63) <= value < 1 << 63:
        name, data = "int64", value.to_bytes(8, "little", signed=True)
    else:
        return None
    ref = StorageRef("number", "cpu", len(data), BytesSource(data), 0)
    return TensorInfo(dtypes.BY_NAME[name], (), (), 0, ref, "cpu", requires_grad=False)


def _as_float32(value: float) -> bytes:
    try:
        return pack("<f", value)
    except OverflowError:
        return pack("<f", copysign(inf, value))
