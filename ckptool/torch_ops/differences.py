"""
By how much the elements of two tensors differ, and how alike they are as vectors.

torch computes the differences; without it, which elements differ is known. It is imported inside the functions, so that
importing this module costs nothing. Numpy computes the likeness, in one pass.
"""

from __future__ import annotations

import math
from operator import ne
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from ckptool.torch_ops.needed import needed
from ckptool.torch_ops.statistics import as_float64
from ckptool.torch_ops.values import BLOCK_NUMEL

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray


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

    def among(self, places: NDArray[Any]) -> BlockDiff:
        """Return it with the positions that these elements have among others."""
        if self.first is None:
            return self
        first, at, rel_at = (int(places[one]) for one in (self.first, self.at, self.rel_at))
        return self._replace(first=first, at=at, rel_at=rel_at)


def comparable(a_type: str, b_type: str) -> bool:
    """Say whether values of two types can be compared with each other."""
    return all(name in _INTEGERS or name in _FLOATS for name in (a_type, b_type))


def compare(a: bytearray, a_type: str, b: bytearray, b_type: str, tolerance: Tolerance | None) -> list[BlockDiff]:
    """
    Return how two packed runs of as many elements differ, in some parts.

    Values are widened to float64 or complex128, and are the same if they are the same number; integers are compared as
    integers. A tolerance is for floating values: integers must be equal.

    Raises:
        MissingPackage: torch is not installed.
    """
    needed()
    np = needed("numpy", "numpy")
    import torch

    if not all(name in _INTEGERS or hasattr(torch, _FLOATS.get(name, "")) for name in (a_type, b_type)):
        return [compare_bits(a, b)]  # float8 came with torch 2.1, float8_e8m0fnu with 2.7
    one, other = np.frombuffer(a, _bits(a_type)), np.frombuffer(b, _bits(b_type))
    # Elements of one type that are not the same bit for bit, which numpy finds with one thread; all of two types.
    found = np.flatnonzero(one != other) if a_type == b_type else np.arange(len(one))
    return [
        _compare(_wide(one[places], a_type), a_type, _wide(other[places], b_type), b_type, tolerance).among(places)
        for places in (found[start : start + BLOCK_NUMEL] for start in range(0, len(found), BLOCK_NUMEL))
    ]


def _compare(
    left: torch.Tensor, a_type: str, right: torch.Tensor, b_type: str, tolerance: Tolerance | None
) -> BlockDiff:
    """Compare values; those of one type all differ, bit for bit."""
    import torch

    integers = left.dtype == right.dtype == torch.int64
    if integers and (a_type == "uint64") == (b_type == "uint64"):
        return _compare_integers(left, right, unsigned=a_type == "uint64", boolean=a_type == b_type == "bool")
    other = _other_integers(left, a_type, right, b_type)
    left, right = _floating(left, a_type), _floating(right, b_type)
    equal = ((left == right) & ~other) | (left.isnan() & right.isnan())
    unlike = torch.ones_like(equal) if a_type == b_type else ~equal
    gap = torch.where(left == right, torch.where(other, 1.0, 0.0), (left - right).abs())
    size = right.abs()
    if tolerance is None:
        differing = unlike
    else:
        differing = ~(equal | (gap.isfinite() & (gap <= tolerance.atol + tolerance.rtol * size)))
    # Infinity to a number is infinitely far, and in proportion too; NaN is no distance at all.
    relative = torch.where(gap == 0, 0.0, torch.where(gap.isinf(), gap, gap / size))
    nan = left.isnan() ^ right.isnan()
    return _block(unlike, differing, int(nan.sum()), gap.nan_to_num(-1.0, float("inf")), relative, left, right)


def _other_integers(left: torch.Tensor, a_type: str, right: torch.Tensor, b_type: str) -> torch.Tensor:
    """Say where one is an integer that the other is not, though float64 has one number for both: beyond 2**53."""
    import torch

    if left.is_complex() or right.is_complex() or torch.int64 not in (left.dtype, right.dtype):
        return torch.zeros_like(left, dtype=torch.bool)
    (high, low), (other_high, other_low) = _halves(left, a_type), _halves(right, b_type)
    return (high != other_high) | (low != other_low)


def _halves(values: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return integers, and floats as far as they are integers, as multiples of 2**32 and what is left of each."""
    import torch

    if values.dtype != torch.int64:
        high = (values / 2.0**32).floor()
        return high, values - high * 2.0**32
    high = values >> 32
    return (high & 0xFFFFFFFF if name == "uint64" else high).to(torch.float64), (values & 0xFFFFFFFF).to(torch.float64)


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


def _bits(name: str) -> str:
    """Return the type of numpy for elements of a type as they are, bit for bit."""
    import torch

    nbytes = getattr(torch, _INTEGERS[name][0] if name in _INTEGERS else _FLOATS[name]).itemsize
    nbytes *= 2 if name.startswith("complex") else 1
    return f"u{nbytes}" if nbytes <= 8 else f"V{nbytes}"


def _wide(bits: NDArray[Any], name: str) -> torch.Tensor:
    """Return elements as int64, float64 or complex128."""
    import torch

    packed = torch.from_numpy(bits.view("u1"))
    if name in _INTEGERS:
        read_as, mask = _INTEGERS[name]
        values = packed.view(getattr(torch, read_as)).to(torch.int64)
        return values & mask if mask is not None else values
    values = packed.view(getattr(torch, _FLOATS[name])).to(torch.float64)
    return torch.view_as_complex(values.view(-1, 2)) if name.startswith("complex") else values


def _floating(values: torch.Tensor, name: str) -> torch.Tensor:
    import torch

    if values.dtype != torch.int64:
        return values
    wide = values.to(torch.float64)
    return torch.where(values < 0, wide + float(_MODULUS), wide) if name == "uint64" else wide


def _first(mask: torch.Tensor) -> int | None:
    import torch

    found = int(mask.to(torch.uint8).argmax())
    return found if bool(mask[found]) else None


def _number(values: torch.Tensor, at: int, *, unsigned: bool, boolean: bool) -> Number:
    found = int(values[at])
    return bool(found) if boolean else found % _MODULUS if unsigned else found


class Likeness(NamedTuple):
    """
    How alike the values of one tensor are in A and B: all pairs together, in float64.

    Pairs with NaN or an infinity are left out; what then has no value is None.
    """

    name: str
    cosine: float | None
    """Of the angle between the two as vectors; None where one of them is zero."""
    relative: float | None
    """The norm of their difference, as a share of that of B; None where B is zero."""
    norm_a: float | None
    norm_b: float | None
    left_out: int
    """Pairs with a value that is not finite."""


class Products:
    """The sums of products of the elements of two tensors, taken in piece by piece."""

    def __init__(self) -> None:
        self._np = needed("numpy", "numpy", "'ckptool[stat]'")
        self._aa = self._bb = self._ab = self._dd = 0.0
        self._left_out = 0

    def add(self, a: bytes | bytearray, a_type: str, b: bytes | bytearray, b_type: str) -> None:
        """
        Take in as many packed, little-endian elements of one as of the other.

        Raises:
            MissingPackage: numpy is not installed.
            UnsupportedFeature: A type is not known.
        """
        np = self._np
        one, other = as_float64(a, a_type), as_float64(b, b_type)
        finite = np.isfinite(one) & np.isfinite(other)
        if not finite.all():
            self._left_out += int(finite.size - finite.sum())
            one, other = one[finite], other[finite]
        with np.errstate(all="ignore"):
            self._aa += float(np.dot(one, one))
            self._bb += float(np.dot(other, other))
            self._ab += float(np.dot(one, other))
            one = one - other
            self._dd += float(np.dot(one, one))

    def likeness(self, name: str) -> Likeness:
        norm_a, norm_b = math.sqrt(self._aa), math.sqrt(self._bb)
        both = norm_a * norm_b
        cosine = max(-1.0, min(1.0, self._ab / both)) if both else None
        relative = math.sqrt(self._dd) / norm_b if norm_b else None
        found = [_or_none(value) for value in (cosine, relative, norm_a, norm_b)]
        return Likeness(name, found[0], found[1], found[2], found[3], self._left_out)


def _or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
