"""Types of elements as torch has them, and tensors that are more than strided memory: sparse and quantised ones."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ckptool.errors import MalformedFile, UnsupportedFeature
from ckptool.loading.memory.available import translate_out_of_memory
from ckptool.loading.memory.placement import CPU
from ckptool.tensors.tensor import TensorInfo

SPARSE = ("sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc")
QUANTIZED = ("per_tensor_affine", "per_channel_affine", "per_channel_affine_float_qparams")


def special_tensor(
    name: str, info: TensorInfo, parts: Mapping[str, torch.Tensor], integers: torch.Tensor | None
) -> torch.Tensor:
    """
    Return a tensor of one of the layouts above; ``integers`` is a quantised one's memory, seen as its type.

    Raises:
        MalformedFile: The parts do not belong together. torch would not look again, and read beside its memory.
    """
    device = next((part.device for part in parts.values()), CPU) if integers is None else integers.device
    try:
        with translate_out_of_memory(info.total_nbytes, device):
            if info.layout in SPARSE:
                return _sparse(info, parts)
            if integers is None:
                raise MalformedFile(f"tensor {name!r} is quantised and has no integers", kind="malformed-tensor")
            return _quantized(info, parts, integers)
    except NotImplementedError as error:  # no kernel
        raise UnsupportedFeature(
            f"torch has no {info.layout} tensors of {info.dtype} on {device}",
            kind="no-such-layout",
            hint="Load it to the CPU, or leave it out.",
        ) from error
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise MalformedFile(f"tensor {name!r}: {reason}", kind="malformed-tensor") from error


def _sparse(info: TensorInfo, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if info.layout == "sparse_coo":
        coalesced = dict(info.details).get("is_coalesced") == 1 or None
        made = torch.sparse_coo_tensor(
            parts["indices"], parts["values"], info.shape, device=parts["values"].device, check_invariants=True
        )
        return made if coalesced is None else made._coalesced_(True)
    compressed, plain, values = parts.values()
    layout = getattr(torch, info.layout)
    return torch.sparse_compressed_tensor(
        compressed, plain, values, info.shape, layout=layout, device=values.device, check_invariants=True
    )


def _quantized(info: TensorInfo, parts: Mapping[str, torch.Tensor], integers: torch.Tensor) -> torch.Tensor:
    """See torch._utils._rebuild_qtensor, which has no public counterpart either."""
    details = dict(info.details)
    made: torch.Tensor
    if info.layout == "per_tensor_affine":
        made = torch._empty_affine_quantized(
            info.shape,
            scale=details["scale"],
            zero_point=int(details["zero_point"]),
            dtype=integers.dtype,
            device=integers.device,
        )
    else:
        made = torch._empty_per_channel_affine_quantized(
            info.shape,
            scales=parts["scales"],
            zero_points=parts["zero_points"],
            axis=int(details["axis"]),
            dtype=integers.dtype,
            device=integers.device,
        )
    return made.set_(integers.untyped_storage(), integers.storage_offset(), info.shape, info.stride)


def torch_dtype(info: TensorInfo) -> torch.dtype:
    """Return torch's element type; raise UnsupportedFeature where this torch is older than the type."""
    found = getattr(torch, info.dtype.name, None)
    if not isinstance(found, torch.dtype):
        raise UnsupportedFeature(
            f"torch {torch.__version__} has no type {info.dtype}", kind="no-such-dtype", hint="Update torch."
        )
    return found
