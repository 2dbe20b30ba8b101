"""Files whose tensors are unusual: views, layouts, element types, quantised values, absent devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tests.fixture_set.cases import CONTAINERS, Case, Place, torch_cases
from tests.fixture_set.forging import mixed, tagged

if TYPE_CHECKING:
    from collections.abc import Iterator

# fmt: off
_DTYPES = (
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
    "complex128", "complex64", "complex32", "uint16", "uint32", "uint64",
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
    "float4_e2m1fn_x2", "bits8",
)
# fmt: on
_TAGS = ("cuda:0", "cuda:3", "mps", "xpu:0", "npu:0", "hpu", "xla:0", "meta", "warp:7")


def odd_tensors(trained_lstm: nn.Module) -> Iterator[Case]:
    """Yield every kind of tensor that torch can save and that is not simply an array of its own."""
    for name, content, shows in (
        ("views", views(), "slices, strides and transposes of one storage"),
        ("expanded", expanded(), "expanded tensors: strides of 0"),
        ("lstm-one-storage", one_storage(trained_lstm),
         "an LSTM whose weights are slices of one storage, as cuDNN arranges them"),
        ("empty", empty(), "tensors of no elements and of no dimensions"),
        ("complex", complex_numbers(), "complex, conjugated and negated views"),
        ("sparse", sparse(), "every sparse layout"),
        ("quantised", quantised(), "quantised per tensor and per channel"),
        ("parameters", parameters(), "parameters and tensors with a gradient"),
        ("one-storage-two-dtypes", one_storage_two_dtypes(), "uint8 and uint16 tensors of the same bytes"),
        ("tensor-list", list(views().values()), "a list of tensors"),
        ("every-dtype", every_dtype(), "each element type that torch can save"),
    ):  # fmt: skip
        form = "tensors" if isinstance(content, list) else "state_dict"
        loads = ["zip"] if "dtype" in name else CONTAINERS
        yield from torch_cases(name, content, form=form, shows=shows, torch_loads=loads)


def views() -> dict[str, Tensor]:
    """Return views that share one storage of 48 elements."""
    base = torch.arange(48, dtype=torch.float32).reshape(6, 8)
    return {
        "base": base,
        "rows": base[2:4],
        "every_other_column": base[:, ::2],
        "transposed": base.t(),
        "diagonal": base.diagonal(),
        "last": base[-1, -1],
        "overlapping": base.flatten().unfold(0, 6, 2),
        "channels_last": torch.arange(48.0).reshape(2, 3, 2, 4).contiguous(memory_format=torch.channels_last),
        "small_part_of_large": torch.arange(4096.0)[1000:1004],
    }


def expanded() -> dict[str, Tensor]:
    """Return tensors larger than their storage."""
    row = torch.arange(4, dtype=torch.float32)
    return {
        "row": row,
        "three_times": row.expand(3, 4),
        "scalar": torch.tensor(2.5).expand(5, 7),
        "column": row[:, None].expand(4, 2),
    }


def one_storage(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's tensors with those of its LSTM laid end to end."""
    state = dict(model.state_dict())
    names = [name for name in state if name.startswith("lstm.")]
    flat = torch.cat([state[name].flatten() for name in names])
    position = 0
    for name in names:
        shape = state[name].shape
        state[name] = flat[position : position + shape.numel()].view(shape)
        position += shape.numel()
    return state


def empty() -> dict[str, Tensor]:
    """Return tensors whose element counts are 0 and 1."""
    return {
        "none": torch.empty(0),
        "no_rows": torch.empty(0, 5, dtype=torch.float16),
        "no_columns": torch.empty(3, 0, 2, dtype=torch.int64),
        "scalar": torch.tensor(3.25),
        "counter": torch.tensor(7),
        "flag": torch.tensor(True),
        "empty_slice": torch.arange(10.0)[4:4],
    }


def complex_numbers() -> dict[str, Tensor]:
    """Return complex tensors, two of them with work still to be done on their bytes."""
    z = torch.complex(torch.arange(6.0), -torch.arange(6.0)).reshape(2, 3)
    return {
        "z": z,
        "conjugated": z.conj(),
        "adjoint": z.mH,
        # Copies: torch.save refuses one storage that is seen as complex by one tensor and as real by another.
        "real": z.clone().real,
        "imaginary": z.clone().imag,
        "negated": z.clone().conj().imag,
        "double": z.to(torch.complex128),
    }


def sparse() -> dict[str, Tensor]:
    """Return the same small matrix in each sparse layout, and a COO tensor with an index given twice."""
    dense = torch.tensor([[0.0, 1, 0, 2], [0, 0, 0, 0], [3, 0, 0, 0], [0, 4, 5, 0]])
    return {
        "dense": dense,
        "coo": dense.to_sparse(),
        "coo_twice": torch.sparse_coo_tensor(torch.tensor([[0, 0, 1], [2, 2, 0]]), torch.tensor([1.0, 2, 3]), (2, 3)),
        "coo_hybrid": dense.to_sparse(1),
        "csr": dense.to_sparse_csr(),
        "csc": dense.to_sparse_csc(),
        "bsr": dense.to_sparse_bsr((2, 2)),
        "bsc": dense.to_sparse_bsc((2, 2)),
    }


def quantised() -> dict[str, Tensor]:
    """Return quantised tensors of each whole-byte integer type."""
    values = torch.linspace(-1, 1, 12).reshape(3, 4)
    scales, zeros = torch.tensor([0.01, 0.02, 0.04], dtype=torch.float64), torch.tensor([0, 1, -2])
    return {
        "qint8": torch.quantize_per_tensor(values, 0.01, 0, torch.qint8),
        "quint8": torch.quantize_per_tensor(values, 0.01, 128, torch.quint8),
        "qint32": torch.quantize_per_tensor(values, 1e-6, 0, torch.qint32),
        "per_channel": torch.quantize_per_channel(values, scales, zeros, 0, torch.qint8),
        "per_channel_transposed": torch.quantize_per_channel(values.t(), scales, zeros, 1, torch.qint8),
    }


def parameters() -> dict[str, Tensor]:
    """Return tensors that differ only in what autograd knows of them."""
    values = torch.arange(6, dtype=torch.float32)
    return {
        "parameter": nn.Parameter(values.clone()),
        "frozen": nn.Parameter(values.clone(), requires_grad=False),
        "leaf": values.clone().requires_grad_(),
        "plain": values.clone(),
        "buffer": nn.Buffer(values.clone()),
    }


def every_dtype() -> dict[str, Tensor]:
    """Return 16 bytes in each element type; an older torch leaves out those it does not have."""
    raw = torch.arange(16, dtype=torch.uint8)
    found: dict[str, Tensor] = {}
    for name in _DTYPES:
        dtype = getattr(torch, name, None)
        if dtype is not None:
            # Bytes of a bool are 0 or 1, whatever else memory allows.
            found[name] = (raw % 2).view(dtype) if dtype is torch.bool else raw.clone().view(dtype)
    return found


def one_storage_two_dtypes() -> dict[str, Tensor]:
    """Return 16 bytes seen as two types, which torch.save takes: it calls the storage of either bytes."""
    raw = torch.arange(16, dtype=torch.uint8)
    return {"uint8": raw, "uint16": raw.view(torch.uint16)}


def every_device(model: nn.Module) -> Iterator[Case]:
    """Yield a small state_dict tagged with each kind of device, forged; ``meta`` also as it really is."""
    state = model.state_dict()
    for tag in _TAGS:
        shows = f"the state_dict; MLP, location tag {tag}"
        # There is no such backend, and no torch could say where these tensors belong.
        shows += ", a device that does not exist" if tag == "warp:7" else ""
        place = Place(tag, forged=True, tag_of=tagged(tag))
        yield from torch_cases("device", state, form="state_dict", shows=shows, place=place)
    tags = zip(state.values(), ("cpu", "cuda:0", "cuda:1"), strict=False)
    place = Place("mixed", forged=True, tag_of=mixed(tags))
    shows = "the state_dict; MLP, layers on cpu, cuda:0 and cuda:1"
    yield from torch_cases("device", state, form="state_dict", shows=shows, place=place)
    on_meta = {name: tensor.to("meta") for name, tensor in state.items()}
    shows = "the state_dict; MLP on meta, which has no storages to tag"
    yield from torch_cases("device", on_meta, form="state_dict", shows=shows, place=Place("meta"))

    yield from _from_xla(state)


class _OnXla:
    """Pickles as a tensor of torch_xla does: the device is named in the call that rebuilds it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> tuple[object, ...]:
        # The name is private, and stands in every such pickle.
        rebuild = torch._utils._rebuild_device_tensor_from_cpu_tensor
        return rebuild, (self.tensor, self.tensor.dtype, "xla:0", self.tensor.requires_grad)


def _from_xla(state: dict[str, Tensor]) -> Iterator[Case]:
    yield from torch_cases(
        "device-rebuilt",
        {name: _OnXla(tensor) for name, tensor in state.items()},
        form="state_dict",
        shows="the state_dict; MLP, xla:0 as torch_xla says it today, in the call that rebuilds a tensor",
        place=Place("xla:0", forged=True, tag_of=tagged("xla:0")),
        torch_loads=["zip"],
        stands_for=state,
    )
