"""What must be found in a file, told by the live tensors before they are saved."""

from __future__ import annotations

import hashlib
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ckptool.errors import UnsupportedFeature
from tests.against_torch import oracle

if TYPE_CHECKING:
    from tests.fixture_set.forging import TagOf


def entries(content: Any, tag_of: TagOf) -> list[dict[str, Any]]:
    """Describe every tensor of what is about to be saved; ``tag_of`` gives the tag it is saved with."""
    return [entry(name, tensor.detach(), tag_of) for name, tensor in oracle.named_tensors(content)]


def entry(name: str, tensor: Tensor, tag_of: TagOf) -> dict[str, Any]:
    """
    Describe one tensor: name, shape, dtype, device as saved, and the digest of its elements.

    The digest is SHA-256 over the contiguous little-endian elements, with conjugation and negation carried
    out; a quantised tensor's are its integers. It is null where there are no such bytes: a tensor on
    ``meta``, and a sparse one, whose ``parts`` have digests of their own.
    """
    found: dict[str, Any] = {"name": name, **_described(tensor, tag_of)}
    if tensor.layout != torch.strided:
        parts = oracle.parts(tensor)
        found |= {"device": tag_of(parts["values"].untyped_storage()), "sha256": None}
        found |= {"layout": str(tensor.layout).removeprefix("torch."), "parts": _all(parts, tag_of)}
    elif tensor.is_quantized:
        found["quantizer"] = _quantizer(tensor, tag_of)
    return found


def _described(tensor: Tensor, tag_of: TagOf) -> dict[str, Any]:
    dense = tensor.layout == torch.strided
    device = tag_of(tensor.untyped_storage()) if dense else None
    return {
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "device": device,
        "sha256": digest(tensor) if dense and device != "meta" else None,
    }


def _all(parts: dict[str, Tensor], tag_of: TagOf) -> dict[str, Any]:
    return {role: _described(part, tag_of) for role, part in parts.items()}


def _quantizer(tensor: Tensor, tag_of: TagOf) -> dict[str, Any]:
    scheme = tensor.qscheme()
    found: dict[str, Any] = {"scheme": str(scheme).removeprefix("torch.")}
    if scheme in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return found | {"scale": tensor.q_scale(), "zero_point": tensor.q_zero_point()}
    parts = {"scales": tensor.q_per_channel_scales(), "zero_points": tensor.q_per_channel_zero_points()}
    return found | {"axis": tensor.q_per_channel_axis(), "parts": _all(parts, tag_of)}


def digest(tensor: Tensor) -> str:
    """Return the SHA-256 of a strided tensor's elements, as ``entry`` says."""
    if sys.byteorder != "little":
        raise UnsupportedFeature("fixtures are written on little-endian machines only")
    return hashlib.sha256(oracle.tensor_bytes(tensor)).hexdigest()
