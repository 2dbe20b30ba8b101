"""Which values differ, by how much and where, held against torch."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import ckptool
from ckptool import StorageRef, TensorInfo
from ckptool.diffing import values
from ckptool.diffing.values import ValueComparer, ValueDiff
from ckptool.sources.source import BytesSource
from ckptool.tensors.dtypes import BY_NAME
from ckptool.torch_ops import differences
from ckptool.torch_ops.differences import Tolerance, compare, compare_bits
from tests.against_torch import oracle
from tests.each import each
from tests.property.test_strides import ITEMSIZES, View, lazy, views
from tests.scale import examples, in_turn

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SMALL_FLOATS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
INTEGERS = [
    torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
]  # fmt: skip

Layout = Callable[[torch.Tensor], torch.Tensor]
LAYOUTS: dict[str, Layout] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t(),
    "every other column": lambda x: x[:, ::2],
    "from the second row on": lambda x: x[1:],
    "one column": lambda x: x[:, 1:2],
    "a number": lambda x: x[2, 3],
}


def tensors(dtype: torch.dtype, numel: int = 48) -> torch.Tensor:
    generator = torch.Generator().manual_seed(numel)
    data = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    if dtype is torch.bool:
        return (data & 1).view(torch.bool)
    if dtype in INTEGERS:
        return data.view(dtype)
    real = torch.randn(numel, generator=generator, dtype=torch.float64)
    if dtype in COMPLEX:
        return torch.complex(real, real.flip(0)).to(dtype)
    return real.to(dtype)


def wide(tensor: torch.Tensor) -> list[Any]:
    """Return a tensor's values as Python numbers: floats of 64 bits, exact integers."""
    if tensor.dtype in INTEGERS:
        return list(tensor.reshape(-1).tolist())
    target = torch.complex128 if tensor.is_complex() else torch.float64
    return list(tensor.to(target).reshape(-1).tolist())


def assert_is_the_difference(found: ValueDiff | None, a: torch.Tensor, b: torch.Tensor) -> None:
    """Hold what was found against a comparison in Python, element by element."""
    size = a.dtype.itemsize
    raw = oracle.tensor_bytes(a), oracle.tensor_bytes(b)
    unlike = [
        index
        for index in range(a.numel())
        if raw[0][index * size : (index + 1) * size] != raw[1][index * size : (index + 1) * size]
    ]
    if not unlike:
        assert found is None
        return
    assert found is not None
    left, right = wide(a), wide(b)
    gaps = [distance(*pair) for pair in zip(left, right, strict=True)]
    shares = [relative(gap, other) for gap, other in zip(gaps, right, strict=True)]
    known = [gap for gap in gaps if gap is not None]
    largest = max(known, default=0)
    at = unravel(found.at, a.shape)
    assert (found.numel, found.differing) == (a.numel(), len(unlike))
    assert found.nan == sum((x != x) != (y != y) for x, y in zip(left, right, strict=True))
    assert found.max_abs == pytest.approx(largest, rel=1e-12)
    assert at in unlike
    assert gaps[at] == pytest.approx(largest, rel=1e-12) if largest else at == unlike[0]
    assert same_number(found.a, left[at])
    assert same_number(found.b, right[at])
    steepest = max((share for share in shares if share is not None), default=0)
    assert found.max_rel == pytest.approx(steepest, rel=1e-12)
    if steepest:
        assert shares[unravel(found.rel_at, a.shape)] == pytest.approx(steepest, rel=1e-12)


def distance(a: Any, b: Any) -> Any:
    if a == b:
        return 0
    if a != a or b != b:
        return None
    return abs(int(a) - int(b)) if isinstance(a, int) else abs(a - b) if abs(a - b) == abs(a - b) else None


def relative(gap: Any, b: Any) -> Any:
    if not gap:
        return gap
    return math.inf if abs(b) == 0 or math.isinf(gap) else gap / abs(b)


def unravel(index: tuple[int, ...], shape: torch.Size) -> int:
    flat = 0
    for position, size in zip(index, shape, strict=True):
        assert 0 <= position < size
        flat = flat * size + position
    return flat


def same_number(a: Any, b: Any) -> bool:
    return bool(a == b or (a != a and b != b))


def saved(tensor: torch.Tensor, path: Path, form: str) -> Path:
    if form == "safetensors":
        save_file({"x": tensor.contiguous()}, path)
    else:
        torch.save({"x": tensor}, path, _use_new_zipfile_serialization=form == "zip")
    return path


def difference(a: torch.Tensor, b: torch.Tensor, folder: Path, forms: tuple[str, str] = ("zip", "zip")) -> Any:
    report = ckptool.diff(saved(a, folder / "a", forms[0]), saved(b, folder / "b", forms[1]))
    assert report.same == (not report.values)
    return report.values[0] if report.values else None


@each(("layout", "dtype"), in_turn(LAYOUTS, [*FLOATS, *SMALL_FLOATS, *COMPLEX, *INTEGERS]))
def test_one_changed_element_is_found_where_torch_has_it(dtype: torch.dtype, layout: str, tmp_path: Path) -> None:
    numbers = tensors(dtype)
    changed = numbers.clone()
    raw = changed.view(torch.uint8).view(48, -1)
    raw[6 * 2 + 3] ^= 1  # row 2, column 3 of six columns
    raw[6 * 4 + 2] ^= 1
    a, b = (LAYOUTS[layout](tensor.view(8, 6)) for tensor in (numbers, changed))

    assert difference(a, a, tmp_path) is None
    assert_is_the_difference(difference(a, b, tmp_path), a, b)


@pytest.mark.parametrize(("other", "layout"), in_turn(["zip", "legacy", "safetensors"], LAYOUTS))
def test_views_are_equal_to_what_they_show(layout: str, other: str, tmp_path: Path) -> None:
    view = LAYOUTS[layout](tensors(torch.float32).view(8, 6))
    changed = view.contiguous().clone()
    changed.view(-1)[-1] += 1

    assert difference(view, view.contiguous(), tmp_path, ("zip", other)) is None
    assert_is_the_difference(difference(view, changed, tmp_path, ("zip", other)), view, changed)


def test_conjugate_and_negative_views_are_what_they_show(tmp_path: Path) -> None:
    numbers = tensors(torch.complex64)
    assert_is_the_difference(difference(numbers, numbers.conj(), tmp_path), numbers, numbers.conj().resolve_conj())
    for view in (numbers.conj(), numbers.conj().imag, numbers.conj()[3:]):
        resolved = view.resolve_conj().resolve_neg()
        assert difference(view, resolved, tmp_path) is None
        assert difference(view, view, tmp_path) is None
        changed = resolved.clone()
        changed[2] *= 3
        assert_is_the_difference(difference(view, changed, tmp_path), view.resolve_conj().resolve_neg(), changed)


@each(
    ("a", "b"),
    [
        ([0.0, 1.0], [-0.0, 1.0]),
        ([math.inf, 1.0], [1.0, 1.0]),
        ([1.0, 2.0, 5.0], [1.0, -math.inf, 9.0]),
        ([math.inf, -math.inf, 0.0], [math.inf, math.inf, 0.0]),
        ([math.nan, 1.0], [1.0, 1.0]),
        ([math.nan, 1.0, 4.0], [1.0, math.nan, 3.0]),
        ([math.nan, 0.0], [math.nan, 1e-30]),
        ([0.0, 5e-324], [0.0, 0.0]),
        ([1e308, 0.0], [-1e308, 0.0]),
    ],
)
def test_special_values(a: list[float], b: list[float], tmp_path: Path) -> None:
    left, right = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)

    assert_is_the_difference(difference(left, right, tmp_path), left, right)


@each(
    ("dtype", "a", "b", "distance"),
    [
        (torch.int64, [0, -(1 << 63)], [1, (1 << 63) - 1], (1 << 64) - 1),
        (torch.int64, [1 << 62, 0], [(1 << 62) + 1, 0], 1),
        (torch.uint64, [(1 << 64) - 1, 5], [0, 5], (1 << 64) - 1),
        (torch.uint64, [1 << 63, 5], [(1 << 63) - 1, 6], 1),
        (torch.uint32, [(1 << 32) - 1, 5], [0, 5], (1 << 32) - 1),
        (torch.uint16, [(1 << 16) - 1, 5], [0, 5], (1 << 16) - 1),
        (torch.uint8, [255, 5], [0, 5], 255),
        (torch.int8, [-128, 5], [127, 5], 255),
    ],
)
def test_integers_are_exact_however_large(
    dtype: torch.dtype, a: list[int], b: list[int], distance: int, tmp_path: Path
) -> None:
    found = difference(torch.tensor(a, dtype=dtype), torch.tensor(b, dtype=dtype), tmp_path)

    assert found.max_abs == distance
    assert (found.a, found.b) in zip(a, b, strict=True)


def test_what_many_pieces_come_to(tmp_path: Path) -> None:
    a = tensors(torch.float32, 1000)
    b = a.clone()
    b[::10] = math.nan
    b[555] += 100
    b[333] = -b[333]
    a[333] = b[333] = 0
    b[334] *= -1e6
    with mock.patch.object(values, "PIECE_NBYTES", 256), mock.patch.object(differences, "WIDE_NUMEL", 24):
        found = difference(a, b, tmp_path)

    assert found.nan == 100
    assert_is_the_difference(found, a, b)


def test_other_bits_of_nan_are_a_difference_until_a_tolerance_is_given(tmp_path: Path) -> None:
    bits = torch.tensor([0x7FC00000, 0x3F800000, 0x7F800000], dtype=torch.int32)
    other = torch.tensor([0x7FC00001, 0x3F800000, 0x7F800000], dtype=torch.int32)
    a, b = (saved(x.view(torch.float32), tmp_path / name, "zip") for name, x in (("a", bits), ("b", other)))

    (found,) = ckptool.diff(a, b).values
    assert (found.differing, found.nan, found.max_abs, found.at) == (1, 0, 0, (0,))
    assert ckptool.diff(a, b, atol=0).same


@each("dtype", [*FLOATS, torch.complex64])
@each(("rtol", "atol"), [(0.0, 0.01), (0.01, 0.0), (0.001, 0.02), (0.0, 0.0), (0.0, 10.0)])
def test_a_tolerance_is_that_of_torch_isclose(dtype: torch.dtype, rtol: float, atol: float, tmp_path: Path) -> None:
    a = tensors(dtype, 512)
    b = (a * (1 + 0.02 * tensors(torch.float64, 512))).to(dtype)
    special = torch.tensor([math.nan, math.inf, math.inf, 1.0, 0.0], dtype=dtype)
    a, b = torch.cat([a, special]), torch.cat([b, special.roll(0)])
    b[-2] = math.inf
    target = torch.complex128 if dtype.is_complex else torch.float64
    close = torch.isclose(a.to(target), b.to(target), rtol=rtol, atol=atol, equal_nan=True)
    paths = saved(a, tmp_path / "a", "zip"), saved(b, tmp_path / "b", "zip")
    report = ckptool.diff(*paths, rtol=rtol, atol=atol)

    assert sum(found.differing for found in report.values) == int((~close).sum())
    assert not report.same


def test_what_is_within_the_tolerance_is_reported_as_close(tmp_path: Path) -> None:
    a = tensors(torch.float32)
    paths = saved(a, tmp_path / "a", "zip"), saved(a + 0.001, tmp_path / "b", "zip")
    report = ckptool.diff(*paths, atol=0.01)

    assert report.same
    assert [(found.name, found.differing) for found in report.close] == [("x", 0)]
    assert report.close[0].max_abs == pytest.approx(0.001, rel=1e-3)


def test_integers_know_no_tolerance(tmp_path: Path) -> None:
    a = tensors(torch.int32)
    paths = saved(a, tmp_path / "a", "zip"), saved(a + 1, tmp_path / "b", "zip")

    assert ckptool.diff(*paths, atol=5, rtol=1).values[0].differing == 48


@pytest.mark.parametrize("target", [torch.float64, torch.bfloat16, torch.float8_e5m2, torch.int16, torch.complex64])
def test_two_types_are_compared_as_numbers(target: torch.dtype, tmp_path: Path) -> None:
    a = tensors(torch.float32, 4096) * 100
    b = a.to(target)
    wide_a, wide_b = a.to(torch.complex128), b.to(torch.complex128)
    paths = saved(a, tmp_path / "a", "zip"), saved(b, tmp_path / "b", "zip")
    report = ckptool.diff(*paths)

    assert [change.name for change in report.dtypes] == ["x"]
    assert sum(found.differing for found in report.values) == int((wide_a != wide_b).sum())
    if report.values:
        assert report.values[0].max_abs == float((wide_a - wide_b).abs().max())
    assert ckptool.diff(*paths, ignore_dtype=True, rtol=1.0, atol=1.0).same
    assert ckptool.diff(*paths, ignore_dtype=True).same == bool((wide_a == wide_b).all())


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (torch.tensor([2**62 + 1]), torch.tensor([2**62], dtype=torch.uint64), False),
        (torch.tensor([-5]), torch.tensor([2**64 - 5], dtype=torch.uint64), False),
        (torch.tensor([2**53 + 1]), torch.tensor([2.0**53], dtype=torch.float64), False),
        (torch.tensor([2**64 - 1], dtype=torch.uint64), torch.tensor([2.0**64], dtype=torch.float64), False),
        (torch.tensor([2**63 - 1]), torch.tensor([2.0**63]), False),
        (torch.tensor([1, 2]), torch.tensor([1.0, float("inf")]), False),
        (torch.tensor([2**63], dtype=torch.uint64), torch.tensor([2.0**63]), True),
        (torch.tensor([-5, 7, -(2**63)]), torch.tensor([-5.0, 7.0, -(2.0**63)]), True),
        (torch.tensor([0, 1]), torch.tensor([-0.0, 1.0]), True),
        (torch.tensor([1, 2]), torch.tensor([1 + 0j, 2 + 0j]), True),
        (torch.tensor([1, 2]), torch.tensor([1 + 0j, 2 + 1j]), False),
    ],
)
def test_integers_of_another_type_are_exact(a: torch.Tensor, b: torch.Tensor, same: bool, tmp_path: Path) -> None:
    paths = saved(a, tmp_path / "a", "zip"), saved(b, tmp_path / "b", "zip")

    for one, other in (paths, paths[::-1]):
        assert ckptool.diff(one, other, ignore_dtype=True).same == same
        assert ckptool.diff(one, other, ignore_dtype=True, atol=0.5).same == same


@pytest.mark.parametrize("pair", [("uint64", "int64"), ("bool", "float32"), ("uint8", "int64"), ("int8", "uint16")])
def test_equal_numbers_of_two_types_are_the_same_values(pair: tuple[str, str], tmp_path: Path) -> None:
    numbers = torch.tensor([0, 1, 1, 0])
    a, b = (numbers.to(getattr(torch, name)) for name in pair)
    paths = saved(a, tmp_path / "a", "zip"), saved(b, tmp_path / "b", "zip")

    assert ckptool.diff(*paths, ignore_dtype=True).same
    assert ckptool.diff(*paths).counts["values"] == 0


@each("dtype", [*FLOATS, *SMALL_FLOATS, *COMPLEX, *INTEGERS])
@each("changed", [[], [0], [47], [3, 17, 18, 40], list(range(48))])
def test_what_differs_is_counted_alike_without_torch(changed: list[int], dtype: torch.dtype) -> None:
    size, name = dtype.itemsize, str(dtype).removeprefix("torch.")
    a = bytearray(oracle.tensor_bytes(tensors(dtype)))
    b = bytearray(a)
    for element in changed:
        b[element * size + element % size] ^= 1  # in another byte of each

    computed, counted = compare(a, name, b, name, None), compare_bits(a, b, size)
    if not changed:
        assert computed is counted is None
        return
    assert computed is not None
    assert counted == (len(changed), 0, None, changed[0], None, None, None, changed[0])
    assert computed.differing == counted.differing


def test_types_that_are_no_numbers_differ_from_all_others() -> None:
    data = BytesSource(bytes(8))
    info = TensorInfo(BY_NAME["bits8"], (8,), (1,), 0, StorageRef("0", "cpu", 8, data, 0), "cpu")
    found = ValueComparer(1).difference("x", info, info._replace(dtype=BY_NAME["uint8"]))

    assert found is not None
    assert (found.differing, found.max_abs) == (8, None)


@pytest.mark.parametrize("name", ["bits16", "bcomplex32"])
def test_elements_that_are_no_numbers_are_counted_and_not_their_bytes(name: str) -> None:
    size = BY_NAME[name].itemsize

    def opaque(data: bytes) -> TensorInfo:
        return TensorInfo(BY_NAME[name], (4,), (1,), 0, StorageRef("0", "cpu", 4 * size, BytesSource(data), 0), "cpu")

    found = ValueComparer(1).difference(
        "x", opaque(bytes(4 * size)), opaque(bytes(size) + b"\1" * 2 * size + bytes(size))
    )
    assert found is not None
    assert (found.differing, found.max_abs) == (2, None)


def test_packed_bits_are_located_and_no_more() -> None:
    def packed(data: bytes) -> TensorInfo:
        return TensorInfo(
            BY_NAME["quint4x2"], (2, 5), (5, 1), 0, StorageRef("0", "cpu", 6, BytesSource(data), 0), "cpu"
        )

    found = ValueComparer(1).difference("x", packed(bytes(6)), packed(bytes([0, 0, 0, 0, 7, 0])))

    assert found is not None
    assert (found.at, found.max_abs, found.differing) == ((1, 2), None, 1)


def bytes_of(view: View, data: bytes) -> tuple[TensorInfo, torch.Tensor]:
    """Return what a view shows of some bytes, as ckptool has it and as torch has it."""
    storage = torch.frombuffer(bytearray(data), dtype=getattr(torch, ITEMSIZES[view.itemsize]))
    return lazy(view, storage).info, storage.as_strided(view.shape, view.stride, view.offset)


@settings(max_examples=examples(500))
@given(views(), st.integers(0, 1 << 30), st.sampled_from([(16, 1), (32, 3), (1 << 20, 1 << 16)]), st.booleans())
def test_any_flipped_bit_of_any_view_is_found_and_located(
    view: View, bit: int, pieces: tuple[int, int], gathered: bool
) -> None:
    data = bytearray(oracle.tensor_bytes(view.storage()))
    if not data:
        return
    a, left = bytes_of(view, bytes(data))
    bit %= 8 * len(data)
    data[bit // 8] ^= 1 << bit % 8
    b, right = bytes_of(view, bytes(data))
    if gathered:  # the same elements, packed: strides are others
        packed = View(view.itemsize, view.shape, right.contiguous().stride(), 0, 0)
        b, right = bytes_of(packed, oracle.tensor_bytes(right) or bytes(16))
    with (
        mock.patch.object(values, "PIECE_NBYTES", pieces[0]),
        mock.patch.object(differences, "WIDE_NUMEL", pieces[1]),
    ):
        found = ValueComparer(1).difference("x", a, b)

    assert_is_the_difference(found, left, right)


@settings(max_examples=examples(200))
@given(st.lists(st.floats(width=32), min_size=1, max_size=40), st.data())
def test_any_floats_within_any_tolerance(numbers: list[float], data: st.DataObject) -> None:
    others = [data.draw(st.just(number) | st.floats(width=32)) for number in numbers]
    tolerance = Tolerance(data.draw(st.floats(0, 2)), data.draw(st.floats(0, 1e6)))
    a, b = torch.tensor(numbers), torch.tensor(others)
    view = View(4, (len(numbers),), (1,), 0, 0)
    infos = (bytes_of(view, oracle.tensor_bytes(tensor))[0] for tensor in (a, b))
    with mock.patch.object(values, "PIECE_NBYTES", 16), mock.patch.object(differences, "WIDE_NUMEL", 3):
        found = ValueComparer(1, tolerance).difference("x", *infos)
    close = torch.isclose(a.double(), b.double(), rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True)

    assert (found.differing if found else 0) == int((~close).sum())


def test_big_endian_storages_are_compared_as_they_stand_and_as_they_read() -> None:
    numbers = tensors(torch.float32)
    little = oracle.tensor_bytes(numbers)
    big = b"".join(little[start : start + 4][::-1] for start in range(0, len(little), 4))

    def info(data: bytes, big_endian: bool) -> TensorInfo:
        storage = StorageRef("0", "cpu", len(data), BytesSource(data), 0, big_endian=big_endian)
        return TensorInfo(BY_NAME["float32"], (48,), (1,), 0, storage, "cpu")

    comparer = ValueComparer(1)
    changed = big[:5] + bytes([big[5] ^ 64]) + big[6:]
    assert comparer.difference("x", info(big, True), info(little, False)) is None
    assert comparer.difference("x", info(big, True), info(big, True)) is None
    for other in (info(little, False), info(big, True)):
        found = comparer.difference("x", info(changed, True), other)
        assert found is not None
        assert (found.differing, found.at) == (1, (1,))
        assert found.b == float(numbers[1])
    same_memory = comparer.difference("x", info(big, True), info(big, False))
    assert same_memory is not None
    assert same_memory.differing == 48


def test_a_stream_is_compared_as_a_file_is() -> None:
    stream = io.BytesIO()
    torch.save({"x": torch.arange(400_000)}, stream)
    infos = [ckptool.open_checkpoint(stream).tensors["x"].info for _ in range(2)]

    assert ValueComparer(1).difference("x", infos[0], infos[1]) is None


def test_tensors_without_values_are_not_called_the_same(tmp_path: Path) -> None:
    for name in ("a", "b"):
        torch.save({"w": torch.ones(2, device="meta"), "v": torch.ones(2)}, tmp_path / name)
    report = ckptool.diff(tmp_path / "a", tmp_path / "b")
    assert report.verdict == "the same but for what was not compared, 1 tensor without bytes: w: 2 tensors"
