"""The digest of weights that serve, ``live.digest``: not the one that ``scan`` computes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from ckptool.cancellation import Cancellation, steps
from ckptool.loading.memory.host import buffer_of
from ckptool.loading.memory.threads import in_own_thread


def digest_of(state: Mapping[str, Any], cancellation: Cancellation | None = None) -> str:
    """
    Return the SHA-256 of names, types, shapes and bytes, in order of names; equal weights have equal digests.

    What is no tensor counts by its ``repr``, and by what is in it if it is a tuple, a list or a dict.
    """
    found = hashlib.sha256()

    def add_all() -> None:
        for name, value in _flat((name, state[name]) for name in sorted(state)):
            if not isinstance(value, torch.Tensor):
                found.update(f"{name}\0{value!r}\0".encode())
                continue
            found.update(f"{name}\0{value.dtype}\0{value.layout}\0{list(value.shape)}\0".encode())
            for part in _parts(value):
                for piece in steps(buffer_of(part), cancellation):
                    found.update(piece)

    in_own_thread(add_all)
    return found.hexdigest()


def _flat(pairs: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    for name, value in pairs:
        if isinstance(value, Mapping):
            yield from _flat((f"{name}[{key!r}]", item) for key, item in value.items())
        elif isinstance(value, tuple | list):
            yield from _flat((f"{name}[{position}]", item) for position, item in enumerate(value))
        else:
            yield name, value


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return strided tensors that determine the value."""
    if tensor.is_quantized:
        is_whole = tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric)
        scales = torch.tensor(tensor.q_scale(), device="cpu") if is_whole else tensor.q_per_channel_scales()
        zeros = torch.tensor(tensor.q_zero_point(), device="cpu") if is_whole else tensor.q_per_channel_zero_points()
        parts = [tensor.int_repr(), scales.double(), zeros.double()]
    elif tensor.layout == torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    else:
        parts = [tensor]
    return [part.resolve_conj().resolve_neg().contiguous() for part in parts]
