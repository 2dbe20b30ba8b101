"""
Table of element types: torch's name, size, and code in each format.

Sources: torch/storage.py (storage classes), torch/_export/serde/schema.py (pt2 numbers), the safetensors
specification (codes). A test compares this table with torch's own lists.
"""

from typing import NamedTuple


class DType(NamedTuple):
    """
    An element type.

    ``itemsize`` is the size in bytes of one element of the *tensor*; torch packs several values of a sub-byte type
    into one such element.
    """

    name: str
    """torch's spelling without ``torch.``"""
    itemsize: int
    storage_class: str | None = None
    """The storage class in persistent ids of ``torch.save``; None for types that only ``_rebuild_tensor_v3`` writes."""
    safetensors: str | None = None
    pt2: int | None = None
    part_nbytes: int = 0
    """Size of the unit whose bytes swap on a big-endian machine: half of ``itemsize`` for complex types."""
    numpy: str = ""
    """numpy's code of its numbers, or empty; for complex types of one part, for quantised types of the integers."""
    packed: int = 1
    """Elements in one byte of storage, for types whose tensors count more elements than bytes; else 1."""

    @property
    def is_quantised(self) -> bool:
        """Whether scales and zero points belong to the elements."""
        return self.name.startswith(("qint", "quint"))

    @property
    def swap_nbytes(self) -> int:
        return self.part_nbytes or self.itemsize

    def __str__(self) -> str:
        return self.name


FLOAT4 = "float4_e2m1fn_x2"

DTYPES: tuple[DType, ...] = (
    DType("float64", 8, "DoubleStorage", "F64", 8, numpy="f8"),
    DType("float32", 4, "FloatStorage", "F32", 7, numpy="f4"),
    DType("float16", 2, "HalfStorage", "F16", 6, numpy="f2"),
    DType("bfloat16", 2, "BFloat16Storage", "BF16", 13),
    DType("int64", 8, "LongStorage", "I64", 5, numpy="i8"),
    DType("int32", 4, "IntStorage", "I32", 4, numpy="i4"),
    DType("int16", 2, "ShortStorage", "I16", 3, numpy="i2"),
    DType("int8", 1, "CharStorage", "I8", 2, numpy="i1"),
    DType("uint8", 1, "ByteStorage", "U8", 1, numpy="u1"),
    DType("bool", 1, "BoolStorage", "BOOL", 12, numpy="u1"),
    DType("complex64", 8, "ComplexFloatStorage", "C64", 10, part_nbytes=4, numpy="f4"),
    DType("complex128", 16, "ComplexDoubleStorage", None, 11, part_nbytes=8, numpy="f8"),
    DType("complex32", 4, None, None, 9, part_nbytes=2, numpy="f2"),
    DType("qint8", 1, "QInt8Storage", numpy="i1"),
    DType("quint8", 1, "QUInt8Storage", numpy="u1"),
    DType("qint32", 4, "QInt32Storage", numpy="i4"),
    DType("quint4x2", 1, "QUInt4x2Storage", packed=2),
    DType("quint2x4", 1, "QUInt2x4Storage", packed=4),
    DType("uint16", 2, None, "U16", 28, numpy="u2"),
    DType("uint32", 4, None, "U32", 34, numpy="u4"),
    DType("uint64", 8, None, "U64", 35, numpy="u8"),
    DType("float8_e4m3fn", 1, None, "F8_E4M3", 29),
    DType("float8_e5m2", 1, None, "F8_E5M2", 30),
    DType("float8_e4m3fnuz", 1, None, "F8_E4M3FNUZ", 31),
    DType("float8_e5m2fnuz", 1, None, "F8_E5M2FNUZ", 32),
    DType("float8_e8m0fnu", 1, None, "F8_E8M0", 33),
    DType(FLOAT4, 1, None, "F4"),
    DType("bits1x8", 1),
    DType("bits2x4", 1),
    DType("bits4x2", 1),
    DType("bits8", 1),
    DType("bits16", 2),
    DType("bcomplex32", 4, part_nbytes=2),  # from torch 2.14 on
)

BY_NAME = {dtype.name: dtype for dtype in DTYPES}
# torch accepts both spellings of these; files have the one that the writer's version printed.
BY_NAME |= {
    alias: BY_NAME[name]
    for alias, name in {
        "double": "float64",
        "float": "float32",
        "half": "float16",
        "long": "int64",
        "int": "int32",
        "short": "int16",
        "cfloat": "complex64",
        "cdouble": "complex128",
        "chalf": "complex32",
    }.items()
}
BY_STORAGE_CLASS = {dtype.storage_class: dtype for dtype in DTYPES if dtype.storage_class}
BY_SAFETENSORS = {dtype.safetensors: dtype for dtype in DTYPES if dtype.safetensors}
BY_PT2 = {dtype.pt2: dtype for dtype in DTYPES if dtype.pt2}
_SHORT = {"fp16": "half", "bf16": "bfloat16", "fp32": "float", "fp64": "double"}


def spelled(dtype: object) -> str:
    """Return torch's name of a dtype, given as its name, a ``torch.dtype``, or an abbreviation (``fp16``, ``half``)."""
    text = str(dtype).removeprefix("torch.")
    found = BY_NAME.get(_SHORT.get(text.lower(), text.lower()))
    return text if found is None else found.name
