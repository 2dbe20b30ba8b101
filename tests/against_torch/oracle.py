"""What torch says of a tensor, to hold against what ckptool says."""

from __future__ import annotations

import inspect
import io
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ckptool import Checkpoint, LazyTensor, TensorInfo
from ckptool.tensors.tensor import SPARSE_PARTS


def load(source: Any) -> Any:
    """Return what torch itself reads, on the CPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.load(source, map_location="cpu", weights_only=False)


def saved(content: Any, path: Path | None = None, *, legacy: bool = False, protocol: int = 2) -> bytes:
    """Return what ``torch.save`` writes, and write it to a path too."""
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(content, stream, _use_new_zipfile_serialization=not legacy, pickle_protocol=protocol)
    if path is not None:
        path.write_bytes(stream.getvalue())
    return stream.getvalue()


def named_tensors(tree: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """
    Yield the tensors of nested dicts and lists under their full dotted names, in order.

    A module, or a method of one, stands for its ``state_dict()``.
    """
    module = tree.__self__ if inspect.ismethod(tree) else tree
    if isinstance(module, torch.nn.Module):
        yield from named_tensors(module.state_dict(), path)
    elif isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, dict | list | tuple):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from named_tensors(value, f"{path}.{key}" if path else str(key))


SAFETENSORS_DTYPES = (
    "bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16",
    "bfloat16", "float32", "float64", "complex64",
    "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn_x2",
)  # fmt: skip
"""Every element type that the reference library writes."""


def filled(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of a type with other bytes in each element."""
    wanted = getattr(torch, dtype)
    size = torch.empty(0, dtype=wanted).element_size()
    count = torch.Size(shape).numel()
    raw = (torch.arange(count * size, dtype=torch.int64) * 37 % 251).to(torch.uint8)
    return ((raw % 2 == 1) if dtype == "bool" else raw.view(wanted)).reshape(shape)


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """Return a tensor's elements in row-major order, without gaps; a quantised tensor's integers."""
    tensor = tensor.detach()
    if type(tensor) is not torch.Tensor:
        tensor = tensor.as_subclass(torch.Tensor)
    if tensor.is_quantized:
        if tensor.dtype in (torch.quint4x2, torch.quint2x4):  # several in one byte: no tensor of integers
            return bytes(tensor.untyped_storage().tolist())
        tensor = tensor.int_repr()
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    flat = tensor.as_strided((tensor.numel(),), (1,))  # reshape keeps an odd stride where there is one element
    return bytes(flat.view(torch.uint8).cpu().numpy())


def assert_same(found: Checkpoint, expected: dict[str, torch.Tensor]) -> None:
    """Fail unless a checkpoint holds just these tensors, in this order, with torch's strides and bytes."""
    assert list(found.tensors) == list(expected)
    for name, tensor in expected.items():
        assert_same_tensor(found.tensors[name], tensor)
    assert ties(list(found.tensors.values())) == torch_ties(list(expected.values()))


def assert_same_tensor(found: LazyTensor, expected: torch.Tensor) -> None:
    """Fail unless ckptool and torch agree on everything that can be said of one tensor."""
    info = found.info
    assert (f"torch.{info.dtype}", info.shape) == (str(expected.dtype), tuple(expected.shape)), found
    assert bool(info.requires_grad) == expected.requires_grad, found
    assert _layout(info) == str(expected.layout).removeprefix("torch."), found
    wanted = parts(expected)
    if wanted:
        assert [name for name, _ in info.parts] == list(wanted), found
        for name, part in info.parts:
            assert_same_tensor(LazyTensor(f"{found.name}.{name}", part), wanted[name])
    elif expected.device.type != "meta":
        assert (info.stride, info.storage_offset) == (expected.stride(), expected.storage_offset()), found
        assert (info.conj, info.neg) == (expected.is_conj(), expected.is_neg()), found
        data = found.read()
        assert data == tensor_bytes(expected), found
        assert info.nbytes == len(data), found


def ties(tensors: list[LazyTensor]) -> list[int]:
    """Return for each tensor the number of the first one in its storage, or its own."""
    refs = [tensor.info.storage for tensor in tensors]
    return [refs.index(ref) if ref is not None and ref.nbytes else own for own, ref in enumerate(refs)]


def torch_ties(tensors: list[torch.Tensor]) -> list[int]:
    """Return the same of torch's tensors."""
    addresses = [_address(tensor) for tensor in tensors]
    return [addresses.index(found) if found else own for own, found in enumerate(addresses)]


def _address(tensor: torch.Tensor) -> int:
    if tensor.layout != torch.strided or tensor.is_nested or tensor.device.type == "meta":
        return 0
    return tensor.untyped_storage().data_ptr()


def _layout(info: TensorInfo) -> str:
    quantised_or_plain = ("strided", "per_tensor_affine", "per_channel_affine", "per_channel_affine_float_qparams")
    return "strided" if info.layout in quantised_or_plain else info.layout


def parts(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what a sparse tensor is made of; nothing of others."""
    layout = str(tensor.layout).removeprefix("torch.")
    # The public names refuse a COO tensor that is not coalesced, and coalescing would change what is saved.
    mark = "_" if layout == "sparse_coo" else ""
    return {part: getattr(tensor, mark + part)() for part in SPARSE_PARTS.get(layout, ())}
