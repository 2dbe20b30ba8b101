"""How alike the elements of two tensors are as vectors, in one pass, with numpy."""

from __future__ import annotations

import math
from typing import NamedTuple

from ckptool.torch_ops.needed import needed
from ckptool.torch_ops.statistics import as_float64


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
