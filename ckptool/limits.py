"""How much a file may make the reader do, in one object that callers can replace."""

from __future__ import annotations

from typing import NamedTuple


class Limits(NamedTuple):
    """
    Bounds that are checked before memory is allocated or time is spent.

    The defaults let every honest file through and keep a small hostile one from costing more than its size.
    """

    inflation_ratio: int = 4
    """A compressed file may grow to this many times its own size…"""
    inflated_nbytes: int = 64 << 20
    """…or to this many bytes, whichever is more."""
    expansion_ratio: int = 8
    """A tensor read out may be this many times as large as its storage (strides of 0 repeat elements)…"""
    expanded_nbytes: int = 64 << 20
    """…or this many bytes, whichever is more."""
    entries: int = 1_000_000
    """Members of an archive."""
    tensors: int = 1_000_000
    """Names of tensors; a tensor with two names counts twice."""
    name_nbytes: int = 65_536
    """Length of one full dotted name."""
    header_nbytes: int = 100_000_000
    """The safetensors header; the reference library's own limit."""

    def inflated(self, stored_nbytes: int) -> int:
        """Return how many bytes ``stored_nbytes`` compressed bytes may grow to."""
        return max(self.inflated_nbytes, self.inflation_ratio * stored_nbytes)


DEFAULT_LIMITS = Limits()
