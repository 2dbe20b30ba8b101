"""
Statistics of one tensor's elements in one pass, for ``stat``; elements as arrays of numpy.

Strategy: every element is counted under the upper half of its bits as float32 (sign, exponent, 7 bits of fraction), of
which there are 65,536. Types of 16 bits or less have no more values than that, so the counts give exact statistics.
For wider types, mean and deviation are also summed in float64, piece by piece, and the counts are used only for the
histogram, to one part in 128.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ckptool.errors import UnsupportedFeature
from ckptool.tensors.dtypes import BY_NAME, DTYPES, FLOAT4
from ckptool.torch_ops import needed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from ckptool.limits import Limits
    from ckptool.tensors.reading import LazyTensor

BLOCKS: Final = 8
_PATTERNS: Final = 1 << 16
_AT_ONCE: Final = 1 << 16
"""Elements of wider types that are computed at a time: as float64, they stay in a core's cache."""

_WIDE: Final = {one.name: f"<{one.numpy}" for one in DTYPES if one.numpy and int(one.numpy[1]) > 2}
_MINIFLOATS: Final = {
    "bfloat16": (8, 7, 127, "ieee"),
    "float8_e5m2": (5, 2, 15, "ieee"),
    "float8_e4m3fn": (4, 3, 7, "finite"),
    "float8_e5m2fnuz": (5, 2, 16, "unsigned zero"),
    "float8_e4m3fnuz": (4, 3, 8, "unsigned zero"),
    "float8_e8m0fnu": (8, 0, 127, "scale"),
}
"""Bits of the exponent and of the fraction, the exponent's bias, and the kind of special values."""
_OF_FLOAT4: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Statistics(NamedTuple):
    """Statistics of values. All but the counts are of the finite values; None if there are none."""

    total: int
    """The number of all values."""
    nan: int
    infinite: int
    zeros: int
    mean: float | None
    std: float | None
    """The deviation of all values from their mean, divided by their number."""
    min: float | None
    max: float | None
    norm: float | None
    """The root of the sum of squares. It is None, as is the deviation, if float64 cannot hold it."""
    histogram: tuple[int, ...]
    """How many values are in each of eight equal parts of ``min`` to ``max``."""


class ValueFacts(NamedTuple):
    """Facts about the elements of a tensor. Counts are of elements."""

    nan: int
    infinite: int
    all_zero: bool
    only_minus_infinity_and_zero: bool
    far: int = 0
    """Elements a million deviations of all others away from zero, if they are one in a thousand or fewer."""
    zeros: tuple[int, int] | None = None
    """The first byte and the number of bytes of zeros, if all zeros are adjacent, and other values are there."""


class Tally:
    """Statistics of the values that were added so far. Tallies of several tensors can be joined."""

    def __init__(self) -> None:
        self._np: Any = needed("numpy", "numpy", '"ckptool[stat]"')
        self.counts: NDArray[Any] = self._np.zeros(_PATTERNS, dtype="i8")
        """Counts of finite values, by the upper half of their bits as float32."""
        self.finite = self.nan = self.infinite = self.zeros = 0
        self.mean = self.squares = 0.0
        """The mean, and the sum of the squared differences from it."""
        self.min, self.max = math.inf, -math.inf

    def join(self, other: Tally) -> None:
        """Add the values of another tally."""
        self.counts += other.counts
        self.nan += other.nan
        self.infinite += other.infinite
        self.zeros += other.zeros
        self._take(other.finite, other.mean, other.squares, other.min, other.max)

    def add(self, pieces: Iterable[bytes | bytearray], dtype: str) -> None:
        """
        Add elements of a type, packed and little-endian, in pieces of whole elements.

        Complex ones count as two, the real and the imaginary part; quantised ones as their integers.

        Raises:
            UnsupportedFeature: The type is not known.
        """
        if dtype not in _WIDE:
            self._add_narrow(pieces, dtype)
            return
        np = self._np
        for piece in pieces:
            whole = np.frombuffer(piece, dtype=_WIDE[dtype])
            for start in range(0, whole.size, _AT_ONCE):
                with np.errstate(all="ignore"):  # a NaN that signals does so when it is cast
                    self._add_float64(whole[start : start + _AT_ONCE].astype("f8"))

    def _add_narrow(self, pieces: Iterable[bytes | bytearray], dtype: str) -> None:
        np, values = self._np, _values(dtype)
        width = "<u2" if len(values) == _PATTERNS else "u1"
        counts = np.zeros(len(values), dtype="i8")
        for piece in pieces:
            counts += np.bincount(np.frombuffer(piece, dtype=width), minlength=len(values))
        if dtype == FLOAT4:  # two values in each byte
            halves = counts.reshape(16, 16)
            counts, values = halves.sum(axis=0) + halves.sum(axis=1), values[:16]
        finite = np.isfinite(values)
        self.nan += int(counts[np.isnan(values)].sum())
        self.infinite += int(counts[np.isinf(values)].sum())
        self.zeros += int(counts[values == 0].sum())
        np.add.at(self.counts, _patterns(np, values[finite]), counts[finite])
        there = finite & (counts > 0)
        values, counts = values[there], counts[there]
        number = int(counts.sum())
        if number:
            mean = inner(counts, values) / number
            squares = inner(counts, (values - mean) ** 2)
            self._take(number, mean, squares, float(values.min()), float(values.max()))

    def _add_float64(self, values: NDArray[Any]) -> None:
        np = self._np
        total = float(values.sum())
        if not math.isfinite(total):  # one of them is not, or the sum is too large
            nan, infinite = int(np.isnan(values).sum()), int(np.isinf(values).sum())
            self.nan += nan
            self.infinite += infinite
            if nan or infinite:
                values = values[np.isfinite(values)]
            total = float(values.sum())
        if not values.size:
            return
        self.zeros += values.size - int(np.count_nonzero(values))
        self.counts += np.bincount(_patterns(np, values), minlength=_PATTERNS)
        lowest, highest = float(values.min()), float(values.max())
        mean = total / values.size
        values = values - mean
        self._take(values.size, mean, inner(values, values), lowest, highest)

    def _take(self, number: int, mean: float, squares: float, lowest: float, highest: float) -> None:
        """Join the moments of more values with those so far: Chan, Golub and LeVeque, 1979."""
        if not number:
            return
        whole = self.finite + number
        apart = mean - self.mean
        self.squares += squares + apart * apart * self.finite * number / whole
        self.mean += apart * number / whole
        self.finite = whole
        self.min, self.max = min(self.min, lowest), max(self.max, highest)

    def result(self) -> Statistics:
        """Return the statistics of all values so far."""
        count = self.finite or 1
        known: Any = or_none if self.finite else lambda _: None
        return Statistics(
            self.finite + self.nan + self.infinite,
            self.nan,
            self.infinite,
            self.zeros,
            mean=known(self.mean),
            std=known(math.sqrt(self.squares / count)),
            min=known(self.min),
            max=known(self.max),
            norm=known(math.sqrt(self.squares + self.finite * self.mean * self.mean)),
            histogram=self._histogram(),
        )

    def _histogram(self) -> tuple[int, ...]:
        np = self._np
        there = np.flatnonzero(self.counts)
        with np.errstate(all="ignore"):
            values = np.clip((there.astype("u4") << 16).view("f4").astype("f8"), self.min, self.max)
            width = (self.max - self.min) / BLOCKS
            if not (width > 0 and math.isfinite(width)):
                return (int(self.counts.sum()), *(0,) * (BLOCKS - 1))
            at = np.minimum(((values - self.min) / width).astype("i8"), BLOCKS - 1)
        return tuple(int(number) for number in np.bincount(at, weights=self.counts[there], minlength=BLOCKS))


def as_float64(data: bytes | bytearray, dtype: str) -> NDArray[Any]:
    """
    Return packed, little-endian elements of a type as float64; complex ones as two.

    Raises:
        UnsupportedFeature: The type is not known.
    """
    np: Any = needed("numpy", "numpy", '"ckptool[stat]"')
    if dtype in _WIDE:
        with np.errstate(invalid="ignore"):
            wide: NDArray[Any] = np.frombuffer(data, dtype=_WIDE[dtype]).astype("f8")
        return wide
    values = _values(dtype)
    found: NDArray[Any]
    if dtype == FLOAT4:  # two values in each byte
        patterns = np.frombuffer(data, dtype="u1")
        found = values[np.stack((patterns & 15, patterns >> 4), axis=-1).ravel()]
    else:
        found = values[np.frombuffer(data, dtype="<u2" if len(values) == _PATTERNS else "u1")]
    return found


def inner(a: NDArray[Any], b: NDArray[Any]) -> float:
    """
    Return the sum of the products of elements, which this thread computes.

    The threads of ``np.dot`` wait for each other in a loop, which takes many times the processor time where other
    processes are at work.
    """
    return float(needed("numpy").einsum("i,i", a, b))


def or_none(value: float | None) -> float | None:
    """Return a number that is finite; None for others."""
    return value if value is not None and math.isfinite(value) else None


def _patterns(np: Any, values: NDArray[Any]) -> NDArray[Any]:
    """Return the upper half of the bits of values as float32; those too large for that count as its largest number."""
    with np.errstate(all="ignore"):
        single = np.clip(values, -3.4028234e38, 3.4028234e38).astype("<f4")
    patterns: NDArray[Any] = single.view("<u4") >> 16
    return patterns


@lru_cache(maxsize=8)
def _values(dtype: str) -> NDArray[Any]:
    """Return the value of each pattern of bits of a type of 16 bits or less, as float64."""
    np: Any = needed("numpy", "numpy", '"ckptool[stat]"')
    if dtype in _MINIFLOATS:
        exponent, fraction, bias, special = _MINIFLOATS[dtype]
        width = 16 if exponent + fraction > 8 else 8
        found = [_float(bits, exponent, fraction, bias, special) for bits in range(1 << width)]
    elif dtype in BY_NAME and BY_NAME[dtype].numpy:
        code = BY_NAME[dtype].numpy
        found = np.arange(1 << 8 * int(code[1]), dtype=f"u{code[1]}").view(code)
        found = np.minimum(found, 1) if dtype == "bool" else found  # torch takes any byte but 0 for True
    elif dtype == FLOAT4:
        found = [*_OF_FLOAT4, *(-value for value in _OF_FLOAT4)] * 16
    else:
        raise UnsupportedFeature(f"no statistics of {dtype}", kind="dtype")
    values: NDArray[Any] = np.array(found, dtype="f8")
    return values


def _float(bits: int, exponent: int, fraction: int, bias: int, special: str) -> float:
    """Return the value of a small floating type; see the formats of IEEE 754, and of the OCP 8-bit ones."""
    if special == "scale":
        return math.nan if bits == 0xFF else math.ldexp(1.0, bits - bias)
    sign = -1.0 if bits >> (exponent + fraction) else 1.0
    power, rest = bits >> fraction & ((1 << exponent) - 1), bits & ((1 << fraction) - 1)
    if special == "unsigned zero" and sign < 0 and not power and not rest:
        return math.nan
    is_last = power == (1 << exponent) - 1
    if special == "ieee" and is_last:
        return math.nan if rest else sign * math.inf
    if special == "finite" and is_last and rest == (1 << fraction) - 1:
        return math.nan
    if not power:
        return sign * math.ldexp(rest, 1 - bias - fraction)
    return sign * math.ldexp(rest + (1 << fraction), power - bias - fraction)


def as_numpy(tensor: LazyTensor, limits: Limits) -> NDArray[Any]:
    """Return a new array of a tensor's elements; see ``LazyTensor.numpy``."""
    of_type = tensor.info.dtype
    dtype = of_type.name
    if not of_type.numpy or of_type.is_quantised or dtype == "complex32":
        raise UnsupportedFeature(
            f"tensor {tensor.name!r} is {dtype}, and numpy has no such type",
            kind="no-such-dtype",
            hint="Take it as a torch.Tensor with torch(), or its bytes with read().",
        )
    np = needed("numpy", "numpy", "numpy")
    elements = np.frombuffer(bytearray(tensor.read(limits=limits)), np.dtype(dtype).newbyteorder("<"))
    found: NDArray[Any] = elements.reshape(tensor.info.shape)
    return found
