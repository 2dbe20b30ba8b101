"""What pickles say of storages, tensors and arrays: the last count that is right, and the first that is wrong."""

from __future__ import annotations

from struct import pack
from typing import Any

import pytest

from ckptool import Global, LimitExceeded, MalformedFile, StorageRef
from ckptool.pickles.nodes import Call, Dict, PersistentId
from ckptool.pickles.numpy_values import dtype_of, numpy_array, numpy_scalar
from ckptool.sources.source import BytesSource
from ckptool.tensors.dtypes import BY_NAME
from ckptool.tensors.rebuild import Rebuilder
from ckptool.tensors.tensor import TypedStorage, storage_id

MOST = (1 << 63) - 1
FLOATS = Global("torch", "FloatStorage")


def made(func: tuple[str, str], *args: Any, state: Any = None) -> Call:
    call = Call(Global(*func), args)
    call.state = state
    return call


# Storages


def test_a_key_and_a_device_tag_have_at_most_4096_characters() -> None:
    for key, tag in (("k" * 4096, "cpu"), ("0", "c" * 4096), ("k" * 253, "cpu"), ("k" * 254, "cpu")):
        found = storage_id(("storage", FLOATS, key, tag, 4))
        assert found is not None
        assert (found.key, found.location) == (key, tag)
    for key, tag in (("k" * 4097, "cpu"), ("0", "c" * 4097)):
        with pytest.raises(LimitExceeded):
            storage_id(("storage", FLOATS, key, tag, 4))


def one_storage(_: Any) -> TypedStorage:
    """Resolve every persistent id to the same storage."""
    return TypedStorage(StorageRef("0", "cpu", 16, BytesSource(bytes(16)), 0), BY_NAME["float32"])


@pytest.mark.parametrize("count", [5, 6, 7])
def test_a_plain_tensor_may_have_its_hooks_and_metadata_or_not(count: int) -> None:
    func = Global("torch._utils", "_rebuild_tensor_v2")
    args = (PersistentId("0"), 0, (4,), (1,), True, None, None)
    rebuilder = Rebuilder(one_storage)
    calls = [Call(func, args[:taken]) for taken in (6, count)]
    for call in calls:  # the first one makes the function known
        found = rebuilder.tensor(call)
        assert found is not None
        assert (found.shape, found.requires_grad) == ((4,), True)


# numpy


def array(shape: Any, *, state: int = 5) -> Any:
    dtype = made(("numpy", "dtype"), "f4", state=(3, ">"))
    return made(("numpy.core.multiarray", "_reconstruct"), state=(1, shape, dtype, False, b"abcd", 6)[:state])


@pytest.mark.parametrize("shape", [(), (0,), (1,), (MOST,), (1,) * 64])
def test_an_array_may_have_any_size_and_64_dimensions(shape: tuple[int, ...]) -> None:
    found = numpy_array(array(shape))

    assert found is not None
    assert (found.shape, found.dtype, found.big_endian) == (shape, "float32", True)


@pytest.mark.parametrize("shape", [(-1,), (MOST + 1,), (1,) * 65, (True,)])
def test_an_array_of_other_sizes_is_none(shape: tuple[int, ...]) -> None:
    assert numpy_array(array(shape)) is None


@pytest.mark.parametrize("state", [4, 6])
def test_an_array_has_a_state_of_five(state: int) -> None:
    assert numpy_array(array((1,), state=state)) is None


def from_buffer(*args: Any) -> Any:
    dtype = made(("numpy", "dtype"), "f4", state=(3, "<"))
    return numpy_array(made(("numpy.core.numeric", "_frombuffer"), bytes(24), dtype, *args))


def test_an_array_of_a_buffer_is_made_of_four_things_or_of_five_with_its_axes() -> None:
    for order, axes in (("C", (0, 1)), ("F", (1, 0))):
        found = from_buffer((2, 3), order)
        assert found is not None
        assert (found.shape, found.axes, found.data) == ((2, 3), axes, bytes(24))
        assert from_buffer((2, 3), order, None) == found
    transposed = from_buffer((2, 3), "K", (1, 0))
    assert transposed is not None
    assert (transposed.shape, transposed.axes) == ((3, 2), (1, 0))
    assert from_buffer((2, 3), "K", (0, 1)) is not None
    assert from_buffer((2, 3)) is None
    assert from_buffer((2, 3), "C", None, None) is None


@pytest.mark.parametrize("axes", [(0,), (0, 1, 2), (0, 2), (-1, 0), (2, 0), (True, False), None])
def test_axes_are_those_of_the_shape(axes: Any) -> None:
    assert from_buffer((2, 3), "K", axes) is None


@pytest.mark.parametrize("items", [0, 1, 2])
def test_an_array_of_joblib_has_one_row_of_elements(items: int) -> None:
    fields = {"shape": (2,), "dtype": made(("numpy", "dtype"), "f4", state=(3, "<")), "order": "C"}
    wrapper = made(("joblib.numpy_pickle", "NumpyArrayWrapper"), state=Dict(list(fields.items())))
    wrapper.items = [bytes(8)] * items

    assert (numpy_array(wrapper) is not None) == (items == 1)


@pytest.mark.parametrize(
    ("code", "state", "expected"),
    [
        ("f4", (), (4, False)),
        ("U3", (3, "<", None, None, None, 12, 4), (12, False)),
        ("U3", (3, "<", None, None, None, 12), (12, False)),
        ("U3", (3, "<", None, None, None), (3, False)),
        ("V8", (3, "|", None, None, None, 8, 1, 1), (8, True)),
        ("V8", (3, "|", None, None, None, 8, 1), (8, False)),
        ("O8", (), (8, True)),
        ("V1234567890", (), (1234567890, False)),
        ("V12345678901", (), None),
        ("f", (), None),
    ],
)
def test_an_element_is_as_long_as_its_type_or_its_state_says(code: str, state: Any, expected: Any) -> None:
    assert dtype_of(made(("numpy", "dtype"), code, state=state)) == expected


@pytest.mark.parametrize("value", [-MOST - 2, -MOST - 1, MOST, MOST + 1])
def test_a_number_is_a_tensor_if_64_bits_hold_it(value: int) -> None:
    found = Rebuilder().tensor(made(("torch", "tensor"), value))
    if not -MOST - 1 <= value <= MOST:
        assert found is None
        return
    assert found is not None
    assert found.storage is not None
    assert (found.dtype.name, found.storage.source.read(0, 8)) == ("int64", value.to_bytes(8, "little", signed=True))


def test_a_scalar_has_just_the_bytes_of_its_type() -> None:
    def scalar(*data: Any, state: Any = (3, "<")) -> Any:
        return numpy_scalar(
            made(("numpy.core.multiarray", "scalar"), made(("numpy", "dtype"), "f4", state=state), *data)
        )

    assert scalar(pack("<f", 0.5)) == ("float32", 0.5)
    assert scalar(pack(">f", 0.5), state=(3, ">")) == ("float32", 0.5)
    assert scalar(pack("<f", 0.5), state=(3,)) == ("float32", 0.5)
    assert scalar(pack("<f", 0.5), state=(3, 7)) == ("float32", 0.5)
    for wrong in ((), (b"abc",), (b"abcde",), (None,), ("\u20ac",)):
        assert scalar(*wrong) == ("float32", None)


# Tensors


def known() -> Rebuilder:
    """Return what knows one storage of sixteen bytes, by its id or as a stream inside the pickle."""
    found = storage_id(("storage", FLOATS, "0", "cpu", 4))
    assert found is not None
    typed = TypedStorage(StorageRef("0", "cpu", 16, BytesSource(bytes(16)), 0), found.dtype)
    return Rebuilder(lambda pid: typed if pid == "0" else None, lambda stream: typed if stream == b"stream" else None)


def plain(size: Any = (4,), offset: Any = 0) -> Call:
    stored = made(("torch.storage", "_load_from_bytes"), b"stream")
    return made(("torch._utils", "_rebuild_tensor_v2"), stored, offset, size, (1,) * len(size), False, None)


def test_a_stream_inside_a_pickle_is_loaded_from_just_one_string() -> None:
    load = ("torch.storage", "_load_from_bytes")
    rebuilder = known()

    assert rebuilder.storage(made(load, b"stream")) is not None
    assert rebuilder.storage(made(load)) is None
    assert rebuilder.storage(made(load, b"stream", b"stream")) is None


@pytest.mark.parametrize(("levels", "read"), [(31, True), (32, False)])
def test_tensors_stand_inside_tensors_up_to_a_depth(levels: int, read: bool) -> None:
    node: Any = plain()
    for _ in range(levels):
        node = made(("torch.nn.parameter", "Parameter"), node, True)
    if read:
        found = known().tensor(node)
        assert found is not None
        assert found.shape == (4,)
    else:
        with pytest.raises(MalformedFile):
            known().tensor(node)


def test_a_tensor_from_before_has_a_state_of_four() -> None:
    state = plain().args[0], 0, (4,), (1,)
    old = ("torch", "FloatTensor")

    found = known().tensor(made(old, state=state))
    assert found is not None
    assert found.shape == (4,)
    for wrong in (state[:3], (*state, None), None):
        assert known().tensor(made(old, state=wrong)) is None


@pytest.mark.parametrize(
    ("state", "flag"),
    [((False, True, None), False), ((True, False, None), True), ((True, False), None), ((True, False, None, 1), None)],
)
def test_a_parameter_from_before_has_a_state_of_three(state: tuple[Any, ...], flag: bool | None) -> None:
    found = known().tensor(made(("torch.nn.parameter", "Parameter"), plain(), state=state))

    assert found is not None
    assert found.requires_grad is flag


def test_a_parameter_from_long_before_has_a_state_of_five() -> None:
    parameter = ("torch.nn.parameter", "Parameter")
    found = known().tensor(made(parameter, state=(plain(), None, None, True, False)))

    assert found is not None
    assert found.requires_grad is True
    for wrong in ((plain(), None, None, True), (plain(), None, None, True, False, None)):
        assert known().tensor(made(parameter, state=wrong)) is None


def test_a_sparse_tensor_has_its_parts_its_size_and_maybe_a_flag() -> None:
    def sparse(*data: Any, layout: str = "torch.sparse_coo") -> Any:
        return known().tensor(made(("torch._utils", "_rebuild_sparse_tensor"), layout, data))

    found = sparse(plain(), plain(), (0, 9))
    assert (found.shape, found.details) == ((0, 9), ())
    assert sparse(plain(), plain(), (9,), True).details == (("is_coalesced", True),)
    assert sparse(plain(), plain(), (9,), False).details == ()
    rows = sparse(plain(), plain(), plain(), (2, 2), layout="torch.sparse_csr")
    assert [name for name, _ in rows.parts] == ["crow_indices", "col_indices", "values"]
    for wrong in ((plain(), plain()), (plain(), 5, (9,)), ()):
        with pytest.raises(MalformedFile):
            sparse(*wrong)


def test_the_state_of_a_subclass_is_a_dict_or_a_dict_and_slots() -> None:
    def parts(state: Any) -> list[str]:
        found = known().tensor(
            made(("torch._tensor", "_rebuild_from_type_v2"), plain().func, Global("m", "C"), plain().args, state)
        )
        assert found is not None
        return [name for name, _ in found.parts]

    first, second = Dict([("a", plain())]), Dict([("b", plain()), ("c", [plain(), Dict([("d", plain())])])])
    assert parts(first) == ["a"]
    assert parts((first, second)) == ["a", "b", "c.0"]
    assert parts((first,)) == parts((first, second, None)) == []


def test_an_array_of_a_device_tensor_has_strides_of_its_order() -> None:
    def strides(shape: tuple[int, ...], column_major: bool) -> tuple[int, ...]:
        dtype = made(("numpy", "dtype"), "f4", state=(3, "<"))
        state = (1, shape, dtype, column_major, bytes(24))
        values = made(("numpy.core.multiarray", "_reconstruct"), state=state)
        found = known().tensor(
            made(("torch._utils", "_rebuild_device_tensor_from_numpy"), values, None, "xla:0", False)
        )
        assert found is not None
        return found.stride

    assert strides((2, 3), False) == (3, 1)
    assert strides((2, 3), True) == (1, 2)
    with pytest.raises(MalformedFile):
        strides((7,), False)
