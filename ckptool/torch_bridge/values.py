"""Arithmetic on values: packed elements of one floating type as another."""

from __future__ import annotations

from ctypes import string_at
from typing import NamedTuple


class CastBytes(NamedTuple):
    """Elements in another type, and what the cast cost."""

    data: bytes
    max_error: float
    overflowed: int


def cast(data: bytes, source: str, target: str) -> CastBytes:
    """
    Return packed elements of one floating type as another, rounded as torch rounds.

    Finite values that ``target`` cannot hold become its largest, and are counted.
    """
    import torch

    if not data:
        return CastBytes(b"", 0.0, 0)
    values = torch.frombuffer(bytearray(data), dtype=getattr(torch, source))
    wanted = getattr(torch, target)
    exact = values.to(torch.float64)
    result = values.to(wanted)
    lost = exact.isfinite() & ~result.to(torch.float64).isfinite()
    overflowed = int(lost.sum())
    if overflowed:
        largest = torch.finfo(wanted).max
        result = torch.where(lost, exact.clamp(-largest, largest).to(wanted), result)
    finite = exact.isfinite() & ~lost
    errors = (result.to(torch.float64) - exact)[finite].abs()
    return CastBytes(
        string_at(result.data_ptr(), result.nbytes),
        float(errors.max()) if errors.numel() else 0.0,
        overflowed,
    )
