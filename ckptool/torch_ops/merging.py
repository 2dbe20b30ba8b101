"""
Computes merged weights: what an adapter adds to a weight, and averages of weights.

An adapter is added as peft does it on a CPU: in float32, with one rounding to the type of the weight.
https://github.com/huggingface/peft; src/peft/tuners/lora/layer.py, variants.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ctypes import string_at
from typing import TYPE_CHECKING, Final

from ckptool.tensors.reading import LazyTensor
from ckptool.torch_ops import needed
from ckptool.torch_ops.values import BLOCK_NUMEL

if TYPE_CHECKING:
    import torch
else:
    torch = needed()  # the error says how to get it

_PIECE_NUMEL: Final = 1 << 20
_TOGETHER: Final = 192
"""A multiple of the number of rows that the kernels of MKL and OpenBLAS compute at a time."""


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
    Return a weight plus ``scale`` times the product of two matrices, or of two kernels; ``weight`` may be changed.

    ``down`` is [rank, inputs, …], ``up`` [outputs, rank, …]. If ``is_turned``, the product is transposed. With a
    ``magnitude``, each row of the sum (or column, if ``is_turned``) gets this length (DoRA).
    """
    down, up = (one if one.dtype == torch.float64 else one.float() for one in (down, up))
    kernel = None
    if any(size > 1 for size in down.shape[2:]):
        convolve = getattr(torch.nn.functional, f"conv{down.ndim - 2}d")
        kernel = (convolve(down.transpose(0, 1), up).transpose(0, 1) * scale).flatten(1)
    rows, down, up = weight.flatten(1), down.flatten(1), up.flatten(1)
    is_whole = is_turned and magnitude is not None  # lengths of columns need all rows
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
    Yield the start and end of runs of rows, of a few megabytes.

    All but the last have a multiple of the rows that kernels compute at a time. So each sum is made in the same order
    as in the product of all rows.
    """
    step = max(_PIECE_NUMEL // max(columns, 1) // _TOGETHER, 1) * _TOGETHER
    starts = range(0, max(rows - step, 0) + 1, step)
    yield from zip(starts, [*starts[1:], rows], strict=True)


def own(tensor: LazyTensor) -> torch.Tensor:
    """Return a tensor of a file as a torch.Tensor in row-major order, which shares memory with no other."""
    return tensor.torch().detach().contiguous()


def finite_count(tensor: torch.Tensor) -> int:
    """Return how many elements are finite."""
    return int(tensor.isfinite().sum())


def bytes_of(tensor: torch.Tensor) -> Iterator[bytes]:
    """Yield the elements in row-major order, in pieces."""
    for piece in _pieces(tensor.contiguous(), _PIECE_NUMEL):
        yield string_at(piece.data_ptr(), piece.nbytes)


def average(pieces: Sequence[bytes], types: Sequence[str], shares: Sequence[float]) -> bytes:
    """Return the sum of packed tensors, each times its share: made in float64, and rounded once to the first type."""
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
