"""Whether tensors are what torch made of the same file: type, shape, strides, bytes, and the memory that they share."""

from __future__ import annotations

import gc
import io
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests import where
from tests.against_torch import oracle
from tests.against_torch.oracle import saved as saved


def torch_load(source: Any, **options: Any) -> Any:
    """Return what torch itself reads, on the device of the tests; bytes are files here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source = io.BytesIO(source) if isinstance(source, bytes) else source
        return torch.load(source, **({"map_location": where.device, "weights_only": True} | options))


def assert_same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Fail unless both have the same names in the same order, with the same tensors that share the same memory."""
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert_same_tensor(found[name], tensor, name)
    assert sharing(found) == sharing(expected)


def assert_same_tensor(found: torch.Tensor, expected: torch.Tensor, name: str = "") -> None:
    """Fail unless two tensors are equal in all that a program can see but their address."""
    assert isinstance(found, torch.Tensor), name
    assert (found.dtype, found.shape, found.layout) == (expected.dtype, expected.shape, expected.layout), name
    assert found.device == expected.device, name
    parts = oracle.parts(expected)
    for part, tensor in parts.items():
        assert_same_tensor(oracle.parts(found)[part], tensor, f"{name}[{part}]")
    if parts:
        assert expected.layout != torch.sparse_coo or found.is_coalesced() == expected.is_coalesced(), name
        return
    assert found.stride() == expected.stride(), name
    assert (found.is_conj(), found.is_neg()) == (expected.is_conj(), expected.is_neg()), name
    if expected.is_quantized:
        assert_same_scheme(found, expected)
    if expected.device.type != "meta":
        assert oracle.tensor_bytes(found) == oracle.tensor_bytes(expected), name


def assert_same_scheme(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.qscheme() == expected.qscheme()
    if expected.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        assert (found.q_scale(), found.q_zero_point()) == (expected.q_scale(), expected.q_zero_point())
        return
    assert found.q_per_channel_axis() == expected.q_per_channel_axis()
    assert_same_tensor(found.q_per_channel_scales(), expected.q_per_channel_scales())
    assert_same_tensor(found.q_per_channel_zero_points(), expected.q_per_channel_zero_points())


def sharing(tensors: Mapping[str, Any]) -> dict[str, tuple[str, int]]:
    """Return for each tensor the first one of its storage, and how many bytes behind that it begins."""
    first: dict[int, tuple[str, int]] = {}
    found = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.is_meta:
            continue
        if not tensor.numel():
            continue  # no memory to share
        begins = tensor.storage_offset() * tensor.itemsize
        owner, start = first.setdefault(tensor.untyped_storage().data_ptr(), (name, begins))
        found[name] = (owner, begins - start)
    return found


def descriptors() -> int:
    """Return how many files this process has open; 0 where the system does not say."""
    gc.collect()  # what is mapped is open, until it is garbage no more
    try:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - the list, without an open file of ours in it
    except OSError:
        return 0


def resident_nbytes() -> int:
    """Return how much of this process is in memory; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def tensors_only(tree: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in tree.items() if isinstance(value, torch.Tensor)}
