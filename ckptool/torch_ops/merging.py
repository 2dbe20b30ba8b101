"""
Weights with what an adapter adds to them, and averages of weights.

What is added is computed as peft does it on a CPU: in float32, with one rounding to the type of the weight.
https://github.com/huggingface/peft; src/peft/tuners/lora/layer.py, variants.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ctypes import string_at
from typing import TYPE_CHECKING, Final

from ckptool.tensors.reading import LazyTensor
from ckptool.torch_ops.packages import needed
from ckptool.torch_ops.values import BLOCK_NUMEL

if TYPE_CHECKING:
    import torch

_PIECE_NUMEL: Final = 1 << 20
_TOGETHER: Final = 192
"""A multiple of the rows that the kernels of MKL and OpenBLAS compute at a time."""


def add_low_rank(
    weight: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    magnitude: torch.Tensor | None = None,
    *,
    scale: float,
    is_turned: bool,
    is_embedding: bool,
) -> torch.Tensor:
    """
    Return a weight with ``scale`` times the product of two matrices added, or two kernels; it may be changed itself.

    ``down`` is [rank, inputs, …], ``up`` [outputs, rank, …]. The product is turned round where ``is_turned``. With a
    ``magnitude``, each row of the sum gets this length (DoRA).
    """
    import torch

    down, up = (one if one.dtype == torch.float64 else one.float() for one in (down, up))
    kernel = None
    if any(size > 1 for size in down.shape[2:]):
        convolve = getattr(torch.nn.functional, f"conv{down.ndim - 2}d")
        kernel = (convolve(down.transpose(0, 1), up).transpose(0, 1) * scale).flatten(1)
    rows, down, up = weight.flatten(1), down.flatten(1), up.flatten(1)
    is_whole = is_turned and magnitude is not None  # the lengths are those of columns
    for start, end in [(0, len(rows))] if is_whole else _runs(*rows.shape):
        some = rows[start:end]
        if kernel is not None:
            added = kernel[start:end]
        elif is_turned:
            added = (up @ down[:, start:end]).mul_(scale).T
        else:
            added = (up[start:end] @ down).mul_(scale)
        if magnitude is None:
            some += added.to(weight.dtype) if is_embedding else added
            continue
        whole = some + added
        lengths = torch.linalg.norm(whole.T if is_turned else whole, dim=1)
        wanted = magnitude.flatten() if is_turned else magnitude.flatten()[start:end]
        factor = wanted / lengths
        some.copy_((factor if is_turned else factor[:, None]) * whole)
    return weight


def _runs(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """
    Yield runs of rows, of a few megabytes.

    Each has a multiple of what kernels for products take together, as the last may not: so that sums are made in the
    order in which they are in the product of all.
    """
    step = max(_PIECE_NUMEL // max(columns, 1) // _TOGETHER, 1) * _TOGETHER
    starts = range(0, max(rows - step, 0) + 1, step)
    yield from zip(starts, [*starts[1:], rows], strict=True)


def own(tensor: LazyTensor) -> torch.Tensor:
    """Return a tensor that shares memory with no other, in row-major order."""
    return tensor.torch().detach().contiguous()


def finite_count(tensor: torch.Tensor) -> int:
    """Return how many elements are finite."""
    return int(tensor.isfinite().sum())


def bytes_of(tensor: torch.Tensor) -> Iterator[bytes]:
    """Yield the elements in row-major order, in pieces."""
    for piece in _pieces(tensor.contiguous(), _PIECE_NUMEL):
        yield string_at(piece.data_ptr(), piece.nbytes)


def average(pieces: Sequence[bytes], types: Sequence[str], shares: Sequence[float]) -> bytes:
    """Return the sum of packed elements, each times its share, in float64 and rounded once to the first type."""
    needed()
    import torch

    given = zip(pieces, types, strict=True)
    blocks = [
        _pieces(torch.frombuffer(bytearray(one), dtype=getattr(torch, dtype)), BLOCK_NUMEL) for one, dtype in given
    ]
    made: list[bytes] = []
    for some in zip(*blocks, strict=True):
        total = sum(
            (one.double() * share for one, share in zip(some, shares, strict=True) if share), torch.tensor(-0.0)
        )
        result = total.to(some[0].dtype)
        made.append(string_at(result.data_ptr(), result.nbytes))
    return b"".join(made)


def _pieces(tensor: torch.Tensor, numel: int) -> Iterator[torch.Tensor]:
    flat = tensor.reshape(-1)
    yield from (flat[start : start + numel] for start in range(0, flat.numel(), numel))
