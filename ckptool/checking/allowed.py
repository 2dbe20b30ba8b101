"""
What ``torch.load(weights_only=True)`` accepts, as data: the names and opcodes of PyTorch 2.13. And which other names
TorchScript and honest pickles are full of.

Nothing here is looked up. A test compares both tables with torch's own. See torch/_weights_only_unpickler.py.
"""

from __future__ import annotations

import re
from typing import Final

from ckptool.checkpoints.parsed import Stream
from ckptool.pickles.dangerous_names import INDEX_CLASSES
from ckptool.pickles.nodes import Global

TORCH: Final = "2.13"


def _each(pattern: str, words: str) -> set[str]:
    return {pattern.format(word) for word in words.split()}


_DENSE: Final = "Float Half Double Byte Char Short Int Long Bool BFloat16"
_SPARSE: Final = _DENSE.replace(" Bool", "")

ALLOWED: Final = frozenset(
    _each("collections.{}", "OrderedDict Counter")
    | _each("builtins.{}", "bytearray set complex")
    | {"_codecs.encode"}
    | _each("torch.{}", "Size Tensor device nn.parameter.Parameter serialization._get_layout")
    | _each("torch.{}", "float64 float32 float16 bfloat16 complex128 complex64 complex32 bool")
    | _each("torch.{}", "int64 int32 int16 int8 int7 int6 int5 int4 int3 int2 int1")
    | _each("torch.{}", "uint64 uint32 uint16 uint8 uint7 uint6 uint5 uint4 uint3 uint2 uint1")
    | _each("torch.float8_{}", "e5m2 e4m3fn e5m2fnuz e4m3fnuz e8m0fnu")
    | _each("torch.{}", "float4_e2m1fn_x2 bits1x8 bits2x4 bits4x2 bits8 bits16")
    | _each("torch.{}", "qint8 qint32 quint8 quint4x2 quint2x4")
    | _each("torch.per_{}", "tensor_affine tensor_symmetric channel_affine channel_symmetric")
    | {"torch.per_channel_affine_float_qparams"}
    | _each("torch._utils._rebuild_{}", "tensor tensor_v2 tensor_v3 parameter parameter_with_state qtensor")
    | _each("torch._utils._rebuild_{}", "sparse_tensor nested_tensor meta_tensor_no_storage wrapper_subclass")
    | _each("torch._utils._rebuild_device_tensor_from_{}", "numpy cpu_tensor")
    | {"torch._tensor._rebuild_from_type_v2"}
    | _each("torch.{}Tensor", _DENSE)
    | _each("torch.cuda.{}Tensor", _DENSE)
    | _each("torch.sparse.{}Tensor", _SPARSE)
    | _each("torch.cuda.sparse.{}Tensor", _SPARSE)
    | _each("torch.{}Storage", f"{_DENSE} ComplexFloat ComplexDouble QInt8 QUInt8 QInt32 QUInt4x2 QUInt2x4")
    | _each("torch.cuda.{}Storage", f"{_DENSE} ComplexFloat ComplexDouble")
    | _each("torch.storage.{}", "TypedStorage UntypedStorage")
)
"""Full names that it allows by default."""

OPCODES: Final = frozenset(b"caes(t\x85\x86\x87N\x89\x88)]}\x8fJKMGXUQhjqr\x8a\x80.Rbu\x81")
"""Opcodes that it knows: those of protocol 2 that ``torch.save`` writes, and a few more."""

TORCHSCRIPT: Final = frozenset(
    _each("torch.jit._pickle.build_{}", "intlist tensorlist doublelist boollist tensor_from_id")
    | {"torch.jit._pickle.restore_type_tag"}
)
"""Functions that ``torch.jit.save`` calls in its pickles; each returns what it is given."""

_USUAL: Final = frozenset(
    _each("builtins.{}", "object dict list tuple frozenset int long float str unicode bytes bool slice range")
    | _each("collections.{}", "defaultdict deque")
    | _each("copyreg.{}", "_reconstructor __newobj__ __newobj_ex__")
    | _each("numpy.{}", "dtype ndarray core.numeric._frombuffer _core.numeric._frombuffer")
    | _each("numpy.core.multiarray.{}", "scalar _reconstruct")
    | _each("numpy._core.multiarray.{}", "scalar _reconstruct")
    | _each("torch.{}", "_utils._rebuild_sparse_csr_tensor storage._load_from_bytes")
)
_CLASS_OF_TORCH: Final = r"torch\.(nn|optim)\.[a-z0-9_.]+\.[A-Z]\w*"

_PYTHON_2: Final = {
    "__builtin__": "builtins",
    "UserDict": "collections",
    "UserList": "collections",
    "UserString": "collections",
}
"""Modules of Python 2 that it takes for modules of Python 3, as far as that leads to an allowed name."""


_IN_INDEX: Final = re.compile(rf"{INDEX_CLASSES}|pathlib\.(?:_local\.)?(?:Pure)?(?:Posix|Windows)?Path")
"""Classes of torch's own, and the path at which it was saved."""


def is_allowed(module: str, name: str) -> bool:
    """Say whether ``torch.load(weights_only=True)`` allows ``module.name`` by default."""
    return f"{_PYTHON_2.get(module, module)}.{name}" in ALLOWED


def is_torchscripts(module: str, name: str) -> bool:
    """Say whether TorchScript puts ``module.name`` in its pickles: a class in the archive's own code, or a type tag."""
    return module.partition(".")[0] == "__torch__" or f"{module}.{name}" in TORCHSCRIPT


def is_of_index(module: str, name: str) -> bool:
    """Say whether every index of a ``torch.distributed.checkpoint`` asks for this, or may."""
    return _IN_INDEX.fullmatch(f"{module}.{name}") is not None


def is_expected(stream: Stream, one: Global) -> bool:
    """Say whether a name is usual where a stream asks for it."""
    return is_usual(one.module, one.name) or (stream.is_index and is_of_index(one.module, one.name))


def is_usual(module: str, name: str) -> bool:
    """Say whether ``module.name`` only makes a container, a number, an array, a tensor, or an object of torch's own."""
    full = f"{'copyreg' if module == 'copy_reg' else _PYTHON_2.get(module, module)}.{name}"
    return full in ALLOWED or full in _USUAL or re.fullmatch(_CLASS_OF_TORCH, full) is not None
