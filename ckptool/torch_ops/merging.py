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
    if any(size > 1 for size in down.shape[2:]):
        convolve = getattr(torch.nn.functional, f"conv{down.ndim - 2}d")
        added = convolve(down.transpose(0, 1), up).transpose(0, 1) * scale
    else:
        product = up.flatten(1) @ down.flatten(1)
        product *= scale
        added = (product.T if is_turned else product).reshape(weight.shape)
    if magnitude is None:
        weight += added.to(weight.dtype) if is_embedding else added
        return weight
    whole = weight + added
    rows = whole.T if is_turned else whole
    factor = (magnitude / torch.linalg.norm(rows, dim=1)).reshape(-1, 1)
    changed: torch.Tensor = ((factor.T if is_turned else factor) * whole).to(weight.dtype)
    return changed


def own(tensor: LazyTensor) -> torch.Tensor:
    """Return a tensor that shares memory with no other, in row-major order."""
    return tensor.torch().detach().contiguous()


def is_finite(tensor: torch.Tensor) -> bool:
    """Say whether no element is infinite or NaN."""
    import torch

    ends = (torch.stack(torch.aminmax(piece)) for piece in _pieces(tensor, BLOCK_NUMEL))  # NaN is both
    return all(bool(one.isfinite().all()) for one in ends)


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
        total = sum((one.double() * share for one, share in zip(some, shares, strict=True)), torch.tensor(0.0))
        result = total.to(some[0].dtype)
        made.append(string_at(result.data_ptr(), result.nbytes))
    return b"".join(made)


def _pieces(tensor: torch.Tensor, numel: int) -> Iterator[torch.Tensor]:
    flat = tensor.reshape(-1)
    yield from (flat[start : start + numel] for start in range(0, flat.numel(), numel))
