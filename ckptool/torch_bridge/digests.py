"""The digest of weights: equal weights have equal ones, whatever file they came from."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from ckptool.torch_bridge.arithmetic import in_own_thread
from ckptool.torch_bridge.host_memory import buffer_of


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 of names, types, shapes and bytes, in order of names; equal weights have equal digests."""
    found = hashlib.sha256()

    def add_all() -> None:
        for name in sorted(tensors):
            tensor = tensors[name]
            found.update(f"{name}\0{tensor.dtype}\0{tensor.layout}\0{list(tensor.shape)}\0".encode())
            for part in _parts(tensor):
                found.update(buffer_of(part))

    in_own_thread(add_all)
    return found.hexdigest()


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return plain memory that tells a tensor from every other of its type and shape."""
    if tensor.is_quantized:
        is_whole = tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric)
        scales = torch.tensor(tensor.q_scale()) if is_whole else tensor.q_per_channel_scales()
        zeros = torch.tensor(tensor.q_zero_point()) if is_whole else tensor.q_per_channel_zero_points()
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
