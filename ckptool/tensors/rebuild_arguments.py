"""Read the arguments of a tensor's call: sizes, element types, layouts, devices."""

from __future__ import annotations

from typing import Final

from ckptool.errors import MalformedFile
from ckptool.limits import refuse_long
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Call, Global, Inert
from ckptool.tensors import dtypes
from ckptool.tensors.dtypes import DType
from ckptool.tensors.tensor import MAX_RANK, is_countable, is_size

_LONGEST_LAYOUT: Final = 64


def as_sequence(node: Inert) -> tuple[Inert, ...]:
    """Return a shape or strides as a tuple; ``check_extent`` checks the numbers."""
    if type(node) is tuple:
        return node
    if isinstance(node, Call) and isinstance(node.args, tuple) and len(node.args) == 1:  # torch.Size((…,))
        node = node.args[0]
    if not isinstance(node, list | tuple):
        raise malformed_tensor("a tensor whose shape or strides are no sequence")
    return tuple(node)


def as_sizes(node: Inert) -> tuple[int, ...]:
    """Return a shape that nothing else bounds: no strides, no storage."""
    sizes = as_sequence(node)
    if len(sizes) > MAX_RANK or not all(map(is_size, sizes)) or not is_countable(sizes):
        raise malformed_tensor("a tensor whose shape is no sequence of sizes")
    return sizes


def as_flag(node: Inert) -> bool | None:
    """Return True or False, or None where the file says neither."""
    return node if isinstance(node, bool) else None


def as_dtype(node: Inert) -> DType:
    """Return the element type that ``torch.float32`` and its like name."""
    if isinstance(node, Global) and node.module == "torch" and node.name in dtypes.BY_NAME:
        return dtypes.BY_NAME[node.name]
    raise malformed_tensor(f"{nodes.class_name(node)} is no element type")


def as_layout(node: Inert) -> str:
    """Return a layout's name without ``torch.``."""
    if isinstance(node, Call) and isinstance(node.args, tuple) and node.args:  # torch.serialization._get_layout
        node = node.args[0]
    name = node.name if isinstance(node, Global) else node
    return name.removeprefix("torch.") if isinstance(name, str) and len(name) <= _LONGEST_LAYOUT else "unknown"


def as_device(node: Inert) -> str:
    """Return the tag of a ``torch.device``, or of a text in its place."""
    args = node.args[:2] if isinstance(node, Call) and isinstance(node.args, tuple) else (node,)
    texts = [str(arg) for arg in args if type(arg) is str or (type(arg) is int and 0 <= arg < 1 << 16)]
    refuse_long("a device tag", "", *texts)
    return ":".join(texts) or "unknown"


def malformed_tensor(what: str) -> MalformedFile:
    """Return the error for a tensor that contradicts itself."""
    return MalformedFile(what, kind="malformed-tensor")


def is_tensor_class(func: Global) -> bool:
    """Say whether a name is that of a class of tensors in torch, of its first years: ``torch.FloatTensor``."""
    return func.module in ("torch", "torch.cuda") and func.name.endswith("Tensor")
