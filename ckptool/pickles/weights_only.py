"""
Names and opcodes that ``torch.load(weights_only=True)`` accepts, in PyTorch 2.13.

The tables are only text: nothing is looked up. A test compares them with torch's own. See
torch/_weights_only_unpickler.py.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from ckptool.pickles.alarms import canonical, each
from ckptool.pickles.constructions import BY_NAME
from ckptool.pickles.judge import is_listed
from ckptool.pickles.reader import read_pickle
from ckptool.sources.source import BytesSource

_DENSE: Final = "Float Half Double Byte Char Short Int Long Bool BFloat16"
_SPARSE: Final = _DENSE.replace(" Bool", "")

ALLOWED: Final = frozenset(
    each("collections.{}", "OrderedDict Counter")
    + each("builtins.{}", "bytearray set complex")
    + ("_codecs.encode",)
    + each("torch.{}", "Size Tensor device nn.parameter.Parameter serialization._get_layout")
    + each("torch.{}", "float64 float32 float16 bfloat16 complex128 complex64 complex32 bool")
    + each("torch.{}", "int64 int32 int16 int8 int7 int6 int5 int4 int3 int2 int1")
    + each("torch.{}", "uint64 uint32 uint16 uint8 uint7 uint6 uint5 uint4 uint3 uint2 uint1")
    + each("torch.float8_{}", "e5m2 e4m3fn e5m2fnuz e4m3fnuz e8m0fnu")
    + each("torch.{}", "float4_e2m1fn_x2 bits1x8 bits2x4 bits4x2 bits8 bits16")
    + each("torch.{}", "qint8 qint32 quint8 quint4x2 quint2x4")
    + each("torch.per_{}", "tensor_affine tensor_symmetric channel_affine channel_symmetric")
    + ("torch.per_channel_affine_float_qparams",)
    + each("torch._utils._rebuild_{}", "tensor tensor_v2 tensor_v3 parameter parameter_with_state qtensor")
    + each("torch._utils._rebuild_{}", "sparse_tensor nested_tensor meta_tensor_no_storage wrapper_subclass")
    + each("torch._utils._rebuild_device_tensor_from_{}", "numpy cpu_tensor")
    + ("torch._tensor._rebuild_from_type_v2",)
    + each("torch.{}Tensor", _DENSE)
    + each("torch.cuda.{}Tensor", _DENSE)
    + each("torch.sparse.{}Tensor", _SPARSE)
    + each("torch.cuda.sparse.{}Tensor", _SPARSE)
    + each("torch.{}Storage", f"{_DENSE} ComplexFloat ComplexDouble QInt8 QUInt8 QInt32 QUInt4x2 QUInt2x4")
    + each("torch.cuda.{}Storage", f"{_DENSE} ComplexFloat ComplexDouble")
    + each("torch.storage.{}", "TypedStorage UntypedStorage")
)
"""Full names that torch allows by default."""

OPCODES: Final = frozenset(b"caes(t\x85\x86\x87N\x89\x88)]}\x8fJKMGXUQhjqr\x8a\x80.Rbu\x81")
"""Opcodes that torch's unpickler knows: those of protocol 2 that ``torch.save`` writes, and a few more."""

PYTHON_2: Final = {
    "__builtin__": "builtins",
    "UserDict": "collections",
    "UserList": "collections",
    "UserString": "collections",
}
"""Modules of Python 2 that it maps to Python 3, as far as they have allowed names."""


def is_allowed(module: str, name: str) -> bool:
    """Return whether ``torch.load(weights_only=True)`` allows ``module.name`` by default."""
    return f"{PYTHON_2.get(module, module)}.{name}" in ALLOWED


def why_refused(pickled: bytes) -> str | None:
    """Return the first name in a pickle that torch refuses, or an opcode that it does not know; None if neither."""
    found = read_pickle(BytesSource(pickled))
    for one in found.globals:
        if not is_allowed(one.module, one.name):
            return str(one)
    unknown = [op for op in found.opcodes if op not in OPCODES]
    return f"pickle opcode {unknown[0]}" if unknown else None


TORCHSCRIPT: Final = frozenset(
    ("torch.jit._pickle.build_tensor_from_id", *(name for name in BY_NAME if name.startswith("torch.jit._pickle.")))
)
"""Functions that ``torch.jit.save`` calls in its pickles; each returns its argument."""

_CLASS_OF_TORCH: Final = r"torch\.(nn|optim)\.[a-z0-9_.]+\.[A-Z]\w*"


def is_torchscripts(module: str, name: str) -> bool:
    """Return whether TorchScript writes ``module.name`` in its pickles: a class of the archive's code or a type tag."""
    return module.partition(".")[0] == "__torch__" or f"{module}.{name}" in TORCHSCRIPT


def is_of_index(module: str, name: str) -> bool:
    """Return whether a name is a usual one in indexes of ``torch.distributed.checkpoint``, which may have paths."""
    return module.startswith(("torch.distributed.checkpoint.", "pathlib")) and is_listed(f"{module}.{name}")


@lru_cache(maxsize=512)  # 4 MiB of the longest names
def is_usual(module: str, name: str) -> bool:
    """Return whether ``module.name`` only makes data, is allowed by torch, or is a class of torch.nn or torch.optim."""
    full = canonical(module, name)
    return is_listed(full) or is_allowed(module, name) or re.fullmatch(_CLASS_OF_TORCH, full) is not None
