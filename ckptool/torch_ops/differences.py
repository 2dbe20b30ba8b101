"""
By how much the elements of two tensors differ, which torch computes; without it, which of them.

torch is imported inside the functions, so that importing this module costs nothing.
"""

from __future__ import annotations

from operator import ne
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from ckptool.torch_ops.needed import needed

if TYPE_CHECKING:
    import torch


_SIGN: Final = -(1 << 63)
_MODULUS: Final = 1 << 64

# Unsigned integers are read as signed ones: torch computes with the wide ones only since 2.3, and then with gaps.
_INTEGERS: Final = {
    "bool": ("uint8", 0xFF),
    "uint8": ("uint8", 0xFF),
    "quint8": ("uint8", 0xFF),
    "int8": ("int8", None),
    "qint8": ("int8", None),
    "int16": ("int16", None),
    "uint16": ("int16", 0xFFFF),
    "int32": ("int32", None),
    "qint32": ("int32", None),
    "uint32": ("int32", 0xFFFFFFFF),
    "int64": ("int64", None),
    "uint64": ("int64", None),
}
"""How torch is told to read them, and the bits to keep of what it widens."""

_FLOATS: Final = {
    **{name: name for name in ("float64", "float32", "float16", "bfloat16")},
    **{name: name for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")},
    "complex128": "float64",
    "complex64": "float32",
    "complex32": "float16",
}
"""The type of their real numbers."""


_CODES: Final[dict[int, Literal["B", "H", "I", "Q"]]] = {1: "B", 2: "H", 4: "I", 8: "Q"}
"""Unsigned integers of so many bytes: elements are compared as these, bit for bit."""

Number: TypeAlias = bool | int | float | complex


class Tolerance(NamedTuple):
    """Floating values count as the same where ``|a - b| <= atol + rtol * |b|``, as torch.allclose has it."""

    rtol: float
    atol: float


class BlockDiff(NamedTuple):
    """How two runs of elements differ; positions count from the first of them."""

    first: int | None
    """The first element that is not the same bit for bit, or not the same value of two types; None if all are."""
    differing: int = 0
    nan: int = 0
    max_abs: float | None = None
    at: int = 0
    a: Number | None = None
    b: Number | None = None
    max_rel: float | None = None
    rel_at: int = 0


def comparable(a_type: str, b_type: str) -> bool:
    """Say whether values of two types can be compared with each other."""
    return all(name in _INTEGERS or name in _FLOATS for name in (a_type, b_type))


def compare(a: bytearray, a_type: str, b: bytearray, b_type: str, tolerance: Tolerance | None) -> BlockDiff:
    """
    Return how two packed runs of as many elements differ.

    Values are widened to float64 or complex128; integers are compared as integers, but for unsigned 64-bit ones beside
    another type. A tolerance is for floating values: integers must be equal.

    Raises:
        MissingPackage: torch is not installed.
    """
    needed()
    import torch

    left, right = _wide(a, a_type), _wide(b, b_type)
    if left is None or right is None:
        return compare_bits(a, b)
    integers = not (left.dtype.is_floating_point or left.is_complex() or right.dtype.is_floating_point)
    if integers and (a_type == "uint64") == (b_type == "uint64"):
        return _compare_integers(left, right, unsigned=a_type == "uint64", boolean=a_type == b_type == "bool")
    left, right = _floating(left, a_type), _floating(right, b_type)
    equal = (left == right) | (left.isnan() & right.isnan())
    unlike = _unlike_bits(a, b, left.numel()) if a_type == b_type else ~equal
    gap = torch.where(left == right, 0.0, (left - right).abs())
    size = right.abs()
    if tolerance is None:
        differing = unlike
    else:
        differing = ~(equal | (gap.isfinite() & (gap <= tolerance.atol + tolerance.rtol * size)))
    # Infinity to a number is infinitely far, and in proportion too; NaN is no distance at all.
    relative = torch.where(gap == 0, 0.0, torch.where(gap.isinf(), gap, gap / size))
    nan = left.isnan() ^ right.isnan()
    return _block(unlike, differing, int(nan.sum()), gap.nan_to_num(-1.0, float("inf")), relative, left, right)


def _compare_integers(left: torch.Tensor, right: torch.Tensor, *, unsigned: bool, boolean: bool) -> BlockDiff:
    import torch

    flip = _SIGN if unsigned else 0
    # The distance as an unsigned number of 64 bits: exact, however far apart the two are.
    gap = torch.where((left ^ flip) < (right ^ flip), right - left, left - right)
    unlike = left != right
    at = int((gap ^ _SIGN).argmax())
    kind = "uint64" if unsigned else "int64"
    relative = torch.where(unlike, _floating(gap, "uint64") / _floating(right, kind).abs(), 0.0)
    first = _first(unlike)
    if first is None:
        return BlockDiff(None)
    rel_at = int(relative.argmax())
    a, b = (_number(values, at, unsigned=unsigned, boolean=boolean) for values in (left, right))
    distance = int(gap[at]) % _MODULUS
    return BlockDiff(first, int(unlike.sum()), 0, distance, at, a, b, float(relative[rel_at]), rel_at)


def _block(
    unlike: torch.Tensor,
    differing: torch.Tensor,
    nan: int,
    gap: torch.Tensor,
    relative: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
) -> BlockDiff:
    first = _first(unlike)
    if first is None:
        return BlockDiff(None)
    at = int(gap.argmax())
    max_abs = max(0.0, float(gap[at]))
    if max_abs == 0:  # negative zeros, NaN
        outside = _first(differing)
        at = first if outside is None else outside
    relative = relative.nan_to_num(-1.0, float("inf"))
    rel_at = int(relative.argmax())
    max_rel = max(0.0, float(relative[rel_at]))
    a, b = left[at].item(), right[at].item()
    return BlockDiff(first, int(differing.sum()), nan, max_abs, at, a, b, max_rel, rel_at if max_rel else at)


def compare_bits(a: bytearray, b: bytearray, itemsize: int = 1) -> BlockDiff:
    """Return how many elements of ``itemsize`` bytes differ, and where first, but not by how much. Needs no torch."""
    code = _CODES.get(itemsize, "B")
    left, right = memoryview(a).cast(code), memoryview(b).cast(code)
    differ = list(map(ne, left, right))
    if len(left) * itemsize != len(a):  # complex128: as many numbers as bytes, of 16 each
        differ = [any(differ[start : start + itemsize]) for start in range(0, len(a), itemsize)]
    count = sum(differ)
    first = differ.index(True) if count else None
    return BlockDiff(first, count, at=first or 0, rel_at=first or 0)


def _wide(data: bytearray, name: str) -> torch.Tensor | None:
    """Return elements as int64, float64 or complex128; None if torch does not compute with their type."""
    import torch

    if name in _INTEGERS:
        read_as, mask = _INTEGERS[name]
        values = torch.frombuffer(data, dtype=getattr(torch, read_as)).to(torch.int64)
        return values & mask if mask is not None else values
    real: Any = getattr(torch, _FLOATS.get(name, ""), None)  # float8 came with torch 2.1, float8_e8m0fnu with 2.7
    if real is None:
        return None
    values = torch.frombuffer(data, dtype=real).to(torch.float64)
    return torch.view_as_complex(values.view(-1, 2)) if name.startswith("complex") else values


def _floating(values: torch.Tensor, name: str) -> torch.Tensor:
    import torch

    if values.dtype != torch.int64:
        return values
    wide = values.to(torch.float64)
    return torch.where(values < 0, wide + float(_MODULUS), wide) if name == "uint64" else wide


def _unlike_bits(a: bytearray, b: bytearray, numel: int) -> torch.Tensor:
    import torch

    left, right = (torch.frombuffer(data, dtype=torch.uint8).view(numel, -1) for data in (a, b))
    return (left != right).any(dim=1)


def _first(mask: torch.Tensor) -> int | None:
    import torch

    found = int(mask.to(torch.uint8).argmax())
    return found if bool(mask[found]) else None


def _number(values: torch.Tensor, at: int, *, unsigned: bool, boolean: bool) -> Number:
    found = int(values[at])
    return bool(found) if boolean else found % _MODULUS if unsigned else found
