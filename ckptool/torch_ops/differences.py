"""
By how much the elements of two tensors differ, and how alike they are, for ``diff``.

Without numpy, only the elements that differ are known. It is imported inside the functions, so that importing this
module costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from operator import ne
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from ckptool.errors import UnsupportedFeature
from ckptool.tensors.dtypes import BY_NAME, DTYPES, FLOAT4
from ckptool.tensors.reading import CODES, LazyTensor
from ckptool.tensors.tensor import identity
from ckptool.torch_ops import needed
from ckptool.torch_ops.statistics import as_float64, inner, or_none

if TYPE_CHECKING:
    from numpy.typing import NDArray


WIDE_NUMEL: Final = 1 << 14
"""Elements that are widened at a time: as float64, they stay in a core's cache."""
_CHUNK_NUMEL: Final = 1 << 18
_INTEGERS: Final = {one.name: one.numpy for one in DTYPES if one.numpy and one.numpy[0] in "iu"}
_FLOATS: Final = {one.name for one in DTYPES if "float" in one.name or "complex" in one.name} - {FLOAT4, "bcomplex32"}

Number: TypeAlias = bool | int | float | complex


class Tolerance(NamedTuple):
    """Floating values count as the same where ``|a - b| <= atol + rtol * |b|``, as torch.allclose has it."""

    rtol: float
    atol: float


class Difference(NamedTuple):
    """How two runs of elements differ; ``at`` and ``rel_at`` are indices in the runs."""

    differing: int
    nan: int = 0
    max_abs: float | None = None
    at: int = 0
    a: Number | None = None
    b: Number | None = None
    max_rel: float | None = None
    rel_at: int = 0

    def joined(self, before: Difference | None) -> Difference:
        """Return the difference of these elements together with those before them."""
        if before is None:
            return self
        larger = self if (self.max_abs or 0) > (before.max_abs or 0) else before
        steeper = self if (self.max_rel or 0) > (before.max_rel or 0) else before
        counts = larger._replace(differing=before.differing + self.differing, nan=before.nan + self.nan)
        return counts._replace(max_rel=steeper.max_rel, rel_at=steeper.rel_at)


def comparable(a_type: str, b_type: str) -> bool:
    """Return whether values of two types can be compared with each other."""
    return {a_type, b_type} <= _INTEGERS.keys() | _FLOATS


def compare(a: bytes, a_type: str, b: bytes, b_type: str, tolerance: Tolerance | None) -> Difference | None:
    """
    Return how two packed runs of equally many elements differ; None if all are the same, bit for bit or, of two types,
    as numbers.

    Values are widened to float64 or complex128; integers are compared as integers. A tolerance is for floating values:
    integers must be equal.

    Raises:
        MissingPackage: numpy is not installed.
    """
    np = needed("numpy", "numpy", '"ckptool[stat]"')
    if not comparable(a_type, b_type):
        return compare_bits(a, b, BY_NAME[a_type].itemsize)
    one, other = (np.frombuffer(data, _bits(name)) for data, name in ((a, a_type), (b, b_type)))
    # Elements of one type that are not the same bit for bit; all of two types.
    elements = np.flatnonzero(one != other) if a_type == b_type else np.arange(len(one))
    found: Difference | None = None
    with np.errstate(all="ignore"):  # infinity minus itself, a number by zero
        for start in range(0, len(elements), WIDE_NUMEL):
            places = elements[start : start + WIDE_NUMEL]
            block = _compare(one[places], a_type, other[places], b_type, tolerance)
            if block is not None:
                found = block._replace(at=int(places[block.at]), rel_at=int(places[block.rel_at])).joined(found)
    return found


def _bits(name: str) -> str:
    """Return the type of numpy that holds the bits of an element."""
    nbytes = BY_NAME[name].itemsize
    return f"u{nbytes}" if nbytes <= 8 else f"V{nbytes}"


def _compare(
    a: NDArray[Any], a_type: str, b: NDArray[Any], b_type: str, tolerance: Tolerance | None
) -> Difference | None:
    """Compare elements, given as their bits; if they are of one type, all of them differ."""
    np = needed("numpy")
    left, right = _wide(a, a_type), _wide(b, b_type)
    if left.dtype == right.dtype and left.dtype.kind in "iu":
        return _compare_integers(left, right, boolean=a_type == b_type == "bool")
    other = _other_integers(left, right)
    left, right = (one.astype("f8") if one.dtype.kind in "iu" else one for one in (left, right))
    nan_a, nan_b = np.isnan(left), np.isnan(right)
    equal = ((left == right) & ~other) | (nan_a & nan_b)
    unlike = np.ones_like(equal) if a_type == b_type else ~equal
    gap = np.where(left == right, np.where(other, 1.0, 0.0), np.abs(left - right))
    size = np.abs(right)
    differing = unlike
    if tolerance is not None:
        differing = ~(equal | (np.isfinite(gap) & (gap <= tolerance.atol + tolerance.rtol * size)))
    # Infinity to a number is infinitely far, and in proportion too; NaN is no distance at all.
    relative = np.where(gap == 0, 0.0, np.where(np.isinf(gap), gap, gap / size))
    gap, relative = (np.nan_to_num(one, nan=-1.0, posinf=math.inf) for one in (gap, relative))
    if not unlike.any():
        return None
    at, rel_at = int(gap.argmax()), int(relative.argmax())
    max_abs, max_rel = max(0.0, float(gap[at])), max(0.0, float(relative[rel_at]))
    if max_abs == 0:  # negative zeros, NaN
        at = int((differing if differing.any() else unlike).argmax())
    values = left[at].item(), right[at].item()
    nan = int((nan_a ^ nan_b).sum())
    return Difference(int(differing.sum()), nan, max_abs, at, *values, max_rel, rel_at if max_rel else at)


def _wide(bits: NDArray[Any], name: str) -> NDArray[Any]:
    """Return elements as integers or floats of 64 bits, or as complex128; only uint64 stays unsigned."""
    if name in _INTEGERS:
        values = bits.view(_INTEGERS[name])
        return values if name == "uint64" else values.astype("i8")
    values = as_float64(bits.tobytes(), name)
    return values.view("c16") if name.startswith("complex") else values


def _other_integers(left: NDArray[Any], right: NDArray[Any]) -> NDArray[Any]:
    """Return where two elements are different integers that are equal as float64, beyond 2**53."""
    np = needed("numpy")
    found: NDArray[Any] = np.zeros(len(left), dtype=bool)
    if "c" not in left.dtype.kind + right.dtype.kind and not left.dtype.kind == right.dtype.kind == "f":
        one, other = left.astype("f8"), right.astype("f8")
        large = np.flatnonzero((one == other) & (np.abs(one) >= 2.0**53) & np.isfinite(one))
        found[large] = [int(a) != int(b) for a, b in zip(left[large], right[large], strict=True)]
    return found


def _compare_integers(left: NDArray[Any], right: NDArray[Any], *, boolean: bool) -> Difference | None:
    np = needed("numpy")
    unlike = left != right
    if not unlike.any():
        return None
    # The distance as an unsigned number of 64 bits: exact, however far apart the two are.
    gap = np.where(left < right, right - left, left - right).view("u8")
    relative = np.where(unlike, gap.astype("f8") / np.abs(right.astype("f8")), 0.0)
    at, rel_at = int(gap.argmax()), int(relative.argmax())
    a, b = ((bool if boolean else int)(one[at]) for one in (left, right))
    return Difference(int(unlike.sum()), 0, int(gap[at]), at, a, b, float(relative[rel_at]), rel_at)


def compare_bits(a: bytes, b: bytes, itemsize: int) -> Difference | None:
    """Return how many elements of ``itemsize`` bytes differ, and the first of them. Needs no numpy."""
    code = CODES.get(itemsize, "B")
    left, right = memoryview(a).cast(code), memoryview(b).cast(code)
    differ = list(map(ne, left, right))
    if len(left) * itemsize != len(a):  # complex128: as many numbers as bytes, of 16 each
        differ = [any(differ[start : start + itemsize]) for start in range(0, len(a), itemsize)]
    if not any(differ):
        return None
    first = differ.index(True)
    return Difference(sum(differ), at=first, rel_at=first)


def differ(a: LazyTensor, b: LazyTensor) -> bool:
    """Return whether two tensors of one shape have different values; False if these are unknown, or not plain bytes."""
    if identity(a.info) == identity(b.info):
        return False
    if a.dtype != b.dtype and not comparable(a.dtype, b.dtype):
        return a.numel > 0
    with suppress(UnsupportedFeature):
        chunks = zip(*(one.chunks(_CHUNK_NUMEL * one.info.dtype.itemsize) for one in (a, b)), strict=True)
        unlike = (pair for pair in chunks if a.dtype != b.dtype or pair[0] != pair[1])
        return any(a.dtype == b.dtype or compare(x, a.dtype, y, b.dtype, None) for x, y in unlike)
    return False


class Likeness(NamedTuple):
    """
    How alike the values of one tensor are in A and B: all pairs together, in float64.

    Pairs with NaN or an infinity are left out; what then has no value is None.
    """

    name: str
    cosine: float | None
    """The cosine of the angle between the two as vectors; None if one of them is zero."""
    relative: float | None
    """The norm of their difference, as a share of that of B; None if B is zero."""
    norm_a: float | None
    norm_b: float | None
    left_out: int
    """Pairs with a value that is not finite."""


def likeness(name: str, pieces: Iterable[tuple[bytes, bytes]], a_type: str, b_type: str) -> Likeness:
    """
    Return how alike two tensors are, given as pairs of packed, little-endian pieces of equally many elements.

    Raises:
        MissingPackage: numpy is not installed.
        UnsupportedFeature: A type is not known.
    """
    np = needed("numpy", "numpy", '"ckptool[stat]"')
    aa = bb = ab = dd = 0.0  # the sums of products, d is the difference
    left_out = 0
    for left, right in pieces:
        a, b = as_float64(left, a_type), as_float64(right, b_type)
        finite = np.isfinite(a) & np.isfinite(b)
        if not finite.all():
            left_out += int(finite.size - finite.sum())
            a, b = a[finite], b[finite]
        with np.errstate(all="ignore"):
            aa, bb, ab = aa + inner(a, a), bb + inner(b, b), ab + inner(a, b)
            a = a - b
            dd += inner(a, a)
    norm_a, norm_b = math.sqrt(aa), math.sqrt(bb)
    cosine = max(-1.0, min(1.0, ab / (norm_a * norm_b))) if norm_a * norm_b else None
    relative = math.sqrt(dd) / norm_b if norm_b else None
    return Likeness(name, or_none(cosine), or_none(relative), or_none(norm_a), or_none(norm_b), left_out)
