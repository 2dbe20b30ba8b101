"""Whatever tensor ``torch.save`` writes, ckptool finds what ``torch.load`` finds: every number and every byte."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptool
from ckptool import UnsupportedFeature, open_checkpoint
from tests.against_torch import oracle
from tests.against_torch.oracle import saved
from tests.each import each

pytestmark = [
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
    pytest.mark.filterwarnings("ignore:Sparse "),
    pytest.mark.filterwarnings("ignore:.*[Qq]uantiz"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype"),
    pytest.mark.filterwarnings("ignore:Couldn't retrieve source code"),
]

INTEGERS = {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}  # torch saves no others
SAVABLE = sorted(
    name
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype) and str(dtype) == f"torch.{name}"
    if name in INTEGERS or not name.startswith(("int", "uint", "q"))
)
QUANTISED = {"qint8": torch.qint8, "quint8": torch.quint8, "qint32": torch.qint32}
# torch.load fails on its own legacy files with these: they have no storage class.
WITHOUT_STORAGE_CLASS = ("uint16", "uint32", "uint64", "float8", "float4", "bits", "complex32")


class Labelled(torch.Tensor):
    """A subclass that torch pickles by its class and its attributes."""


def of_dtype(name: str, count: int = 12) -> torch.Tensor:
    dtype = getattr(torch, name)
    if dtype == torch.bool:
        return torch.arange(count) % 3 == 0
    pattern = torch.arange(count * dtype.itemsize, dtype=torch.int64) * 37 + 1
    return pattern.to(torch.uint8).view(dtype)


def quantised_per_tensor(dtype: torch.dtype) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.linspace(-3, 3, 24).reshape(4, 6), 0.25, 3, dtype)


def quantised_per_channel(dtype: torch.dtype, axis: int) -> torch.Tensor:
    zero_points = torch.tensor([0, 1, 2, 3], dtype=torch.int64)
    scales = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    values = torch.linspace(0, 5, 20).reshape(4, 5)[:, : 4 if axis else 5]
    if dtype.is_floating_point or dtype in (torch.quint4x2, torch.quint2x4):
        zero_points, scales = zero_points.float(), scales.float()
    return torch.quantize_per_channel(values, scales, zero_points, axis, dtype)


def labelled() -> torch.Tensor:
    tensor = torch.arange(6.0).reshape(2, 3).as_subclass(Labelled)
    tensor.label = "first"
    return tensor


def with_attribute() -> torch.Tensor:
    tensor = torch.arange(6.0)
    tensor.note = "plain tensors can have attributes too"
    return tensor


def tied() -> dict[str, Any]:
    whole = torch.arange(24.0).reshape(4, 6)
    return {"whole": whole, "again": whole, "row": whole[2], "column": whole[:, 3], "flat": whole.view(-1)[5:9]}


def two_types_in_one_storage() -> dict[str, torch.Tensor]:
    raw = torch.arange(8, dtype=torch.uint8)
    return {"halves": raw.view(torch.uint16), "eighths": raw.view(torch.float8_e5m2)[2:]}


def empty_storage_of_two_types() -> dict[str, torch.Tensor]:
    nothing = torch.empty(0)
    return {"floats": nothing, "integers": nothing.view(torch.int32), "again": nothing}


def parameters() -> OrderedDict[str, torch.Tensor]:
    buffer = nn.Buffer(torch.arange(3.0)) if hasattr(nn, "Buffer") else torch.arange(3.0)
    return OrderedDict(
        trained=nn.Parameter(torch.arange(4.0)),
        frozen=nn.Parameter(torch.arange(4.0), requires_grad=False),
        leaf=torch.zeros(2, requires_grad=True),
        buffer=buffer,
    )


def nested_in_anything() -> dict[str, Any]:
    return {
        "model": OrderedDict([("a.weight", torch.ones(2)), ("b", [torch.zeros(1), (torch.ones(1), 5)])]),
        7: torch.arange(2),
        "deep": {"er": {"and": {"deeper": torch.full((2, 2), 3)}}},
        "text": "none",
    }


VIEWS: dict[str, Callable[[], Any]] = {
    "a slice": lambda: torch.arange(24.0).reshape(4, 6)[1:3, 2:5],
    "steps": lambda: torch.arange(24, dtype=torch.int16)[1::3],
    "transposed": lambda: torch.arange(24.0).reshape(4, 6).t(),
    "permuted": lambda: torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
    "channels last": lambda: torch.arange(120.0).reshape(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "expanded": lambda: torch.arange(4.0).expand(3, 4),
    "expanded inside": lambda: torch.arange(4.0).reshape(2, 1, 2).expand(2, 5, 2),
    "expanded from one": lambda: torch.ones(1).expand(5),
    "unfolded": lambda: torch.arange(10.0).unfold(0, 4, 1),
    "a diagonal": lambda: torch.arange(25.0).reshape(5, 5).diagonal(),
    "0-d": lambda: torch.tensor(3.5),
    "0-d inside": lambda: torch.arange(5.0)[3],
    "empty": lambda: torch.empty(0),
    "empty with dimensions": lambda: torch.empty(3, 0, 2, dtype=torch.int64),
    "empty inside": lambda: torch.arange(5.0)[5:],
    "conjugate": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "conjugate of doubles, transposed": lambda: torch.randn(3, 2, dtype=torch.complex128).conj().t(),
    "negative": lambda: torch.tensor([1 + 2j, -3 - 4j]).conj().imag,
    "real parts": lambda: torch.tensor([1 + 2j, 3 - 4j]).real,
    "16 bytes apart": lambda: torch.arange(12).to(torch.complex128).reshape(3, 4)[:, ::2],
    "complex, conjugate and negative": lambda: torch._neg_view(torch.tensor([1 + 2j, -0.0 + 3j]).conj()),
    "negative zeros and NaN": lambda: torch._neg_view(torch.tensor([0.0, -0.0, float("nan"), float("inf")])),
    "a large stride of one": lambda: torch.arange(6.0).as_strided((1, 3), (1000, 2)),
    "overlapping": lambda: torch.arange(8.0).as_strided((4, 4), (1, 1), 1),
}
KINDS: dict[str, Callable[[], Any]] = {
    "a tensor subclass with an attribute": labelled,
    "a tensor with an attribute": with_attribute,
    "tied tensors and views of one storage": tied,
    "an empty storage of two types": empty_storage_of_two_types,
    "two types in one storage": two_types_in_one_storage,
    "parameters and buffers": parameters,
    "nested dicts, lists and tuples": nested_in_anything,
    "a lone tensor": lambda: torch.arange(3),
    "a list": lambda: [torch.arange(3), torch.ones(2)],
    "nothing": dict,
    "sparse COO": lambda: torch.eye(4).to_sparse(),
    "sparse COO, uncoalesced": lambda: torch.sparse_coo_tensor([[0, 0], [1, 1]], [2.0, 3.0], (2, 3)),
    "sparse COO, hybrid": lambda: torch.sparse_coo_tensor([[0, 2]], torch.ones(2, 5, dtype=torch.float64), (3, 5)),
    "sparse CSR": lambda: torch.eye(4).to_sparse_csr(),
    "sparse CSC": lambda: torch.eye(4).to_sparse_csc(),
    "sparse BSR": lambda: torch.arange(16.0).reshape(4, 4).to_sparse_bsr((2, 2)),
    "sparse BSC": lambda: torch.arange(16.0).reshape(4, 4).to_sparse_bsc((2, 2)),
    "meta": lambda: {"no": torch.empty(3, 4, device="meta"), "yes": torch.ones(2)},
    "bare storages beside a tensor": lambda: {"t": torch.ones(2), "s": torch.ones(3).untyped_storage()},
}


def check(content: Any, data: bytes | None = None, *, legacy: bool = False, protocol: int = 2) -> None:
    data = data or saved(content, legacy=legacy, protocol=protocol)
    with open_checkpoint(data) as checkpoint:
        oracle.assert_same(checkpoint, dict(oracle.named_tensors(oracle.load(io.BytesIO(data)))))


@each("name", SAVABLE)
def test_every_element_type_reads_as_torch_reads_it(name: str) -> None:
    tensor = of_dtype(name)
    content = {"whole": tensor, "rest": tensor[2:7], "steps": tensor[::3], "one": tensor[5]}
    check(content)
    if not name.startswith(WITHOUT_STORAGE_CLASS):
        check(content, legacy=True)
        return
    with open_checkpoint(saved(content, legacy=True)) as checkpoint:  # which torch writes, and cannot read again
        oracle.assert_same(checkpoint, content)


@each("protocol", [2, 3, 4, 5])
@each("legacy", [False, True])
@each("view", VIEWS)
def test_every_view_reads_as_torch_reads_it(view: str, legacy: bool, protocol: int) -> None:
    tensor = VIEWS[view]()
    check({"view": tensor, "beside it": torch.ones(3)}, legacy=legacy, protocol=protocol)


@each("protocol", [2, 3, 4, 5])
@each("legacy", [False, True])
@each("kind", KINDS)
def test_every_kind_of_tensor_reads_as_torch_reads_it(kind: str, legacy: bool, protocol: int) -> None:
    content = KINDS[kind]()
    data = saved(content, legacy=legacy, protocol=protocol)
    # torch writes legacy streams with untyped storages and cannot read them again: they must hold what was saved.
    torn = legacy and kind in ("two types in one storage", "bare storages beside a tensor")
    expected = content if torn else oracle.load(io.BytesIO(data))

    with open_checkpoint(data) as checkpoint:
        oracle.assert_same(checkpoint, dict(oracle.named_tensors(expected)))


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("name", QUANTISED)
def test_tensors_quantised_as_a_whole_keep_their_integers_scale_and_zero_point(name: str, legacy: bool) -> None:
    tensor = quantised_per_tensor(QUANTISED[name])
    data = saved({"q": tensor, "part": tensor[1:3, ::2]}, legacy=legacy)

    check(None, data)
    info = open_checkpoint(data).tensors["q"].info
    assert info.layout == "per_tensor_affine"
    assert dict(info.details) == {"scale": tensor.q_scale(), "zero_point": tensor.q_zero_point()}


@each(("name", "axis"), [*((name, axis) for name in QUANTISED for axis in (0, 1)), ("quint4x2", 0), ("quint2x4", 0)])
def test_tensors_quantised_by_channel_keep_their_scales_and_zero_points(name: str, axis: int) -> None:
    tensor = quantised_per_channel(getattr(torch, name), axis)
    data = saved([tensor])
    back = oracle.load(io.BytesIO(data))[0]

    found = open_checkpoint(data).tensors["0"]
    assert found.read() == oracle.tensor_bytes(back)
    assert (found.info.shape, found.info.stride) == (tuple(back.shape), back.stride())
    assert found.info.layout in ("per_channel_affine", "per_channel_affine_float_qparams")
    assert dict(found.info.details) == {"axis": axis}
    parts = dict(found.info.parts)
    assert list(parts) == ["scales", "zero_points"]
    assert _read(parts["scales"]) == oracle.tensor_bytes(back.q_per_channel_scales())
    assert _read(parts["zero_points"]) == oracle.tensor_bytes(back.q_per_channel_zero_points())


def test_nested_tensors_are_shown_by_their_buffer_and_its_tables() -> None:
    nested = torch.nested.nested_tensor([torch.arange(3.0), torch.arange(5.0)])
    data = saved({"n": nested})
    back = oracle.load(io.BytesIO(data))["n"]

    found = open_checkpoint(data).tensors["n"]
    parts = dict(found.info.parts)
    assert found.info.layout == "nested"
    assert _read(parts["buffer"]) == oracle.tensor_bytes(back.values())
    assert _read(parts["sizes"]) == oracle.tensor_bytes(back._nested_tensor_size())
    assert _read(parts["offsets"]) == oracle.tensor_bytes(back._nested_tensor_storage_offsets())
    with pytest.raises(UnsupportedFeature) as caught:
        found.read()
    assert caught.value.kind == "no-plain-bytes"


def test_jagged_nested_tensors_are_shown_by_their_values_and_offsets() -> None:
    jagged = torch.nested.nested_tensor([torch.arange(3.0), torch.arange(5.0)], layout=torch.jagged)

    found = open_checkpoint(saved({"n": jagged}))
    assert list(found.tensors) == ["n"]
    assert found.tensors["n"].info.layout == "jagged"
    parts = found.tensors["n"].info.parts
    assert [name for name, _ in parts[:2]] == ["values", "offsets"]
    assert _read(parts[0][1]) == oracle.tensor_bytes(jagged.values())
    assert _read(parts[1][1]) == oracle.tensor_bytes(jagged.offsets())


def test_meta_tensors_say_their_shape_and_have_no_bytes() -> None:
    found = open_checkpoint(saved({"m": torch.empty(3, 4, device="meta", dtype=torch.bfloat16)})).tensors["m"]

    assert (found.info.shape, found.info.stride, found.info.location) == ((3, 4), (4, 1), "meta")
    assert (str(found.info.dtype), found.info.nbytes) == ("bfloat16", 0)
    with pytest.raises(UnsupportedFeature):
        found.read()


def test_a_subclass_is_named_and_its_tensor_attributes_are_parts() -> None:
    tensor = labelled()
    tensor.scale = torch.tensor(0.5)

    info = open_checkpoint(saved({"x": tensor})).tensors["x"].info
    assert info.subclass is not None
    assert info.subclass.endswith("Labelled")
    assert [(name, _read(part)) for name, part in info.parts] == [("scale", oracle.tensor_bytes(tensor.scale))]


def test_parameters_and_buffers_are_told_apart() -> None:
    tensors = open_checkpoint(saved(parameters())).tensors

    kinds = {name: tensor.info.kind for name, tensor in tensors.items()}
    assert kinds == {"trained": "parameter", "frozen": "parameter", "leaf": None, "buffer": "buffer"}
    assert all(tensor.info.subclass is None for tensor in tensors.values())


@pytest.mark.parametrize("protocol", range(6))
def test_tensors_in_plain_pickles_read_as_pickle_reads_them(protocol: int) -> None:
    content = {"state": tied(), "views": [make() for make in list(VIEWS.values())[:16]], "n": 1, **parameters()}
    data = pickle.dumps(content, protocol)
    expected = dict(oracle.named_tensors(pickle.loads(data)))

    with open_checkpoint(data) as checkpoint:
        assert checkpoint.format == "pickle"
        assert list(checkpoint.tensors) == list(expected)
        for name, tensor in expected.items():
            oracle.assert_same_tensor(checkpoint.tensors[name], tensor)


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_locations_are_reported_as_saved(legacy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tags = iter(["cuda:3", "npu:0", "mps"])
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: next(tags))
    data = saved({"a": torch.ones(1), "b": torch.ones(2), "c": torch.ones(3)}, legacy=legacy)

    found = open_checkpoint(data)
    assert [tensor.info.location for tensor in found.tensors.values()] == ["cuda:3", "npu:0", "mps"]
    assert found.tensors["b"].read() == oracle.tensor_bytes(torch.ones(2))


def test_several_objects_saved_into_one_legacy_file_are_told_of() -> None:
    first, second = saved({"a": torch.ones(2)}, legacy=True), saved({"b": torch.zeros(2)}, legacy=True)

    found = open_checkpoint(first + second)
    assert list(found.tensors) == ["a"]
    assert len(found.notes) == 1


def _read(info: Any) -> bytes:
    from ckptool import LazyTensor

    return LazyTensor("part", info).read()


@pytest.mark.parametrize(
    ("shape", "stride"), [((3, 300_000), (1 << 20, 1)), ((2, 700_000), (1, 2)), ((2, 2, 90_000), (9, 1 << 20, 3))]
)
def test_a_view_whose_rows_are_long_and_far_apart(
    shape: tuple[int, ...], stride: tuple[int, ...], tmp_path: Path
) -> None:
    view = torch.arange(3 << 20, dtype=torch.float32).as_strided(shape, stride)
    torch.save({"w": view}, tmp_path / "a.pth")
    with ckptool.open_checkpoint(tmp_path / "a.pth") as checkpoint:
        assert checkpoint.tensors["w"].read() == view.contiguous().numpy().tobytes()
