"""Files from big-endian machines, forged: torch on this machine says what they hold."""

from __future__ import annotations

import io
import zipfile
from typing import Any

import pytest
import torch

from ckptool import CkptoolError, open_checkpoint
from tests.against_torch import oracle
from tests.each import each

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

TYPED = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
]
FLOAT4 = [torch.float4_e2m1fn_x2] if hasattr(torch, "float4_e2m1fn_x2") else []  # since torch 2.8
UNTYPED = [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, *FLOAT4, torch.complex32]


def example(dtype: torch.dtype) -> torch.Tensor:
    pattern = (torch.arange(24 * dtype.itemsize, dtype=torch.int64) * 31 + 5).to(torch.uint8)
    return (pattern % 2).bool().reshape(4, 6) if dtype == torch.bool else pattern.view(dtype).reshape(4, 6)


def swapped(tensor: torch.Tensor) -> bytes:
    """Return the bytes that a big-endian machine has in memory."""
    unit = tensor.dtype.itemsize // (2 if tensor.dtype.is_complex else 1)
    data = oracle.tensor_bytes(tensor)
    return b"".join(data[i : i + unit][::-1] for i in range(0, len(data), unit))


def big_endian_zip(tensor: torch.Tensor, views: dict[str, torch.Tensor], order: bytes = b"big") -> bytes:
    """Return what ``torch.save(views)`` writes on a big-endian machine; ``tensor`` is the whole storage."""
    stream, forged = io.BytesIO(), io.BytesIO()
    torch.save(views, stream)
    writer = torch._C.PyTorchFileWriter(forged)
    with zipfile.ZipFile(stream) as archive:
        for name in archive.namelist():
            name = name.partition("/")[2]
            data = archive.read(f"archive/{name}")
            if name == "byteorder":
                data = order
            elif name == "data/0":
                data = swapped(tensor)
            if not name.startswith(".data"):
                writer.write_record(name, data, len(data))
    writer.write_end_of_file()
    return forged.getvalue()


def views_of(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"whole": tensor, "turned": tensor.t(), "part": tensor[1:3, 2::2], "one": tensor[2, 1]}


@each("dtype", [*TYPED, *UNTYPED])
def test_zips_that_say_big_are_read_as_torch_reads_them(dtype: torch.dtype) -> None:
    data = big_endian_zip(example(dtype), views_of(example(dtype)))

    with open_checkpoint(data) as checkpoint:
        if dtype in TYPED:  # of others, torch knows the storages as bytes, and gives numbers that nobody saved
            oracle.assert_same(checkpoint, oracle.load(io.BytesIO(data)))
        oracle.assert_same(checkpoint, views_of(example(dtype)))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.float32], ids=str)
def test_conjugate_and_negative_views_are_resolved_after_swapping(dtype: torch.dtype) -> None:
    tensor = example(dtype)
    view = tensor.t().conj() if dtype.is_complex else torch._neg_view(tensor.t())
    data = big_endian_zip(tensor, {"view": view})

    with open_checkpoint(data) as checkpoint:
        oracle.assert_same(checkpoint, oracle.load(io.BytesIO(data)))
        oracle.assert_same(checkpoint, {"view": view})


@pytest.mark.parametrize("order", [b"middle", b"BIG", b"big\n", b"", b"little" * 20])
def test_any_other_byte_order_is_refused_as_torch_refuses_it(order: bytes) -> None:
    data = big_endian_zip(example(torch.float32), views_of(example(torch.float32)), order)

    with pytest.raises((ValueError, UnicodeDecodeError)):
        oracle.load(io.BytesIO(data))
    with pytest.raises(CkptoolError) as caught:
        open_checkpoint(data)
    assert caught.value.kind == "byte-order"


@each("dtype", TYPED)
def test_legacy_streams_are_little_endian_whatever_the_machine_was(dtype: torch.dtype) -> None:
    data = big_endian_legacy(views_of(example(dtype)))

    with open_checkpoint(data) as checkpoint:
        oracle.assert_same(checkpoint, oracle.load(io.BytesIO(data)))
        assert len(checkpoint.notes) == 1


def test_legacy_streams_of_old_releases_on_big_endian_machines_count_elements_their_own_way() -> None:
    tensor = example(torch.float32)
    data = big_endian_legacy({"whole": tensor}).replace((24).to_bytes(8, "little"), (24).to_bytes(8, "big"))

    with open_checkpoint(data) as checkpoint:
        oracle.assert_same(checkpoint, {"whole": tensor})


def big_endian_legacy(content: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream, _use_new_zipfile_serialization=False)
    data = stream.getvalue()
    at = data.index(b"little_endian")
    true = data.index(b"\x88", at)
    return data[:true] + b"\x89" + data[true + 1 :]
