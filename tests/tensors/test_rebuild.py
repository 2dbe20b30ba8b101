"""What each call that torch pickles for a tensor means; above all the forms that no torch of today writes any more."""

from __future__ import annotations

from struct import pack
from typing import Any

import pytest

from ckptool import AmbiguousFile, LazyTensor, UnsupportedFeature, open_checkpoint
from ckptool.errors import MalformedFile
from ckptool.pickles.numpy_values import numpy_scalar
from ckptool.pickles.reader import read_pickle
from ckptool.sources.source import BytesSource
from tests.build import call, floats, legacy, named, ops, pickled, raw, storage, tensor, torch_zip
from tests.each import each

HOOKS = call(named("collections", "OrderedDict"))
FLOATS = {"0": floats()}


def utils(function: str, *args: Any) -> bytes:
    return call(named("torch._utils", function), *args)


def numpy_values(data: bytes, code: str = "f4", shape: Any = (4,), order: str = "<", fortran: bool = False) -> bytes:
    """Return an array as numpy pickles one."""
    array = call(named("numpy.core.multiarray", "_reconstruct"), named("numpy", "ndarray"), (0,), raw(b"b"))
    dtype = call(named("numpy", "dtype"), code, 0, 1) + ops((3, order, None, None, None, -1, -1, 0)) + b"b"
    return array + ops((1, shape, dtype, fortran, raw(data))) + b"b"


def only(tree: bytes, storages: dict[str, bytes] | None = None) -> LazyTensor:
    """Return the one tensor that a zip of this tree holds."""
    (found,) = open_checkpoint(torch_zip({"w": tree}, FLOATS if storages is None else storages)).tensors.values()
    return found


PLAIN = tensor(storage())
OLD_TENSOR = named("torch", "FloatTensor") + b")\x81" + ops((storage(), 0, (4,), (1,))) + b"b"

FORMS = {
    "version 1": utils("_rebuild_tensor", storage(), 0, (4,), (1,)),
    "version 2": PLAIN,
    "version 2 with metadata": utils("_rebuild_tensor_v2", storage(), 0, (4,), (1,), False, HOOKS, {}),
    "version 3": utils(
        "_rebuild_tensor_v3",
        storage(numel=16, dtype="UntypedStorage"),
        0,
        (4,),
        (1,),
        False,
        HOOKS,
        named("torch", "float32"),
    ),
    "shape as torch.Size": tensor(storage(), call(named("torch", "Size"), (4,)), [1]),
    "0.1: built from a state": OLD_TENSOR,
    "0.1: on a GPU": OLD_TENSOR.replace(b"ctorch\nFloatTensor", b"ctorch.cuda\nFloatTensor"),
    "from its type": call(
        named("torch._tensor", "_rebuild_from_type_v2"),
        named("torch._utils", "_rebuild_tensor_v2"),
        named("torch", "Tensor"),
        (storage(), 0, (4,), (1,), False, HOOKS),
        {"note": 1},
    ),
    "storage of a GPU": tensor(storage().replace(b"ctorch\n", b"ctorch.cuda\n")),
    "storage with a number for a key": tensor(storage(0)),
}


@each("form", FORMS)
def test_every_form_of_a_plain_tensor_is_read(form: str) -> None:
    found = only(FORMS[form])

    assert (found.info.dtype.name, found.info.shape, found.info.stride, found.info.storage_offset) == (
        "float32",
        (4,),
        (1,),
        0,
    )
    assert (found.info.kind, found.info.subclass, found.info.layout, found.info.parts) == (None, None, "strided", ())
    assert found.read() == floats()


PARAMETERS = {
    "today": (utils("_rebuild_parameter", PLAIN, True, HOOKS), True),
    "frozen": (utils("_rebuild_parameter", PLAIN, False, HOOKS), False),
    "with a state": (utils("_rebuild_parameter_with_state", PLAIN, True, HOOKS, {"note": 1}), True),
    "called": (call(named("torch.nn.parameter", "Parameter"), PLAIN, True), True),
    "0.3": (
        named("torch.nn.parameter", "Parameter") + ops((PLAIN,)) + b"\x81" + ops((True, False, HOOKS)) + b"b",
        True,
    ),
    "0.1": (named("torch.nn.parameter", "Parameter") + b")\x81" + ops((PLAIN, None, HOOKS, True, False)) + b"b", True),
    "of a 0.1 tensor": (
        named("torch.nn.parameter", "Parameter") + b")\x81" + ops((OLD_TENSOR, None, HOOKS, False, False)) + b"b",
        False,
    ),
}


@pytest.mark.parametrize("age", PARAMETERS)
def test_parameters_of_every_age_are_read(age: str) -> None:
    tree, requires_grad = PARAMETERS[age]
    found = only(tree)

    assert (found.info.kind, found.info.requires_grad) == ("parameter", requires_grad)
    assert found.read() == floats()


def test_tensors_in_the_state_of_a_parameter_are_its_parts_and_a_variable_is_none() -> None:
    found = only(utils("_rebuild_parameter_with_state", PLAIN, True, HOOKS, {"main_grad": PLAIN, "note": 1}))
    assert [name for name, _ in found.info.parts] == ["main_grad"]
    variable = named("torch.autograd.variable", "Variable") + b")\x81" + ops((PLAIN, None, HOOKS, True, False)) + b"b"
    assert (only(variable).info.kind, only(variable).info.requires_grad) == (None, True)


@pytest.mark.parametrize(
    "function",
    [
        named("torch", "_rebuild_tensor_v2"),
        named("torch._utils", "_rebuild_tensor_v4"),
        named("torch", "_utils._rebuild_tensor_v2"),
        named("torch._utils._rebuild_tensor_v2", ""),
        named("Torch._utils", "_rebuild_tensor_v2"),
        named("evil", "FloatTensor"),
        call(named("builtins", "getattr"), named("torch", "_utils"), "_rebuild_tensor_v2"),
    ],
)
def test_only_the_exact_name_makes_a_tensor(function: bytes) -> None:
    found = open_checkpoint(torch_zip({"w": call(function, storage(), 0, (4,), (1,), False, HOOKS)}, FLOATS))

    assert found.tensors == {}
    assert found.form == "data"


INDICES = tensor(storage("1", 2, "LongStorage"), (1, 2), (2, 1))
WITH_INDICES = {"0": floats(), "1": pack("<2q", 0, 3)}


def test_a_wrapper_subclass_names_its_class_and_its_parts() -> None:
    outer = (named("mine", "Scaled"), named("torch", "bfloat16"), (4,), (1,), 0, named("torch", "strided"))
    args = (*outer, call(named("torch", "device"), "cuda", 1), True)
    state = {"inner": PLAIN, "more": [INDICES, 7], "scale": 2.0}
    tree = call(
        named("torch._tensor", "_rebuild_from_type_v2"),
        named("torch._utils", "_rebuild_wrapper_subclass"),
        outer[0],
        args,
        state,
    )
    found = only(tree, WITH_INDICES)

    assert (found.info.subclass, found.info.location, found.info.dtype.name) == ("mine.Scaled", "cuda:1", "bfloat16")
    assert [name for name, _ in found.info.parts] == ["inner", "more.0"]
    with pytest.raises(UnsupportedFeature):
        found.read()


def test_an_uninitialised_parameter_has_no_shape_yet() -> None:
    found = only(call(named("torch.nn.parameter", "UninitializedParameter"), True), {})

    assert (found.info.layout, found.info.shape, found.info.kind) == ("uninitialized", (), "parameter")
    assert found.info.requires_grad is True


def test_a_device_tensor_saved_as_a_cpu_tensor_keeps_its_device() -> None:
    found = only(utils("_rebuild_device_tensor_from_cpu_tensor", PLAIN, named("torch", "float32"), "mtia:0", True))

    assert (found.info.location, found.info.requires_grad) == ("mtia:0", True)
    assert found.read() == floats()


NUMPY_FORMS = {
    "plain": (numpy_values(floats()), (4,), (1,)),
    "big-endian": (numpy_values(pack(">4f", 0, 1, 2, 3), order=">"), (4,), (1,)),
    "row by row": (numpy_values(floats(), shape=(2, 2)), (2, 2), (2, 1)),
    "column by column": (numpy_values(pack("<4f", 0, 2, 1, 3), shape=(2, 2), fortran=True), (2, 2), (1, 2)),
    "renamed in numpy 2": (numpy_values(floats()).replace(b"numpy.core", b"numpy._core"), (4,), (1,)),
}


@each("form", NUMPY_FORMS)
def test_a_device_tensor_saved_as_a_numpy_array_is_read(form: str) -> None:
    array, shape, stride = NUMPY_FORMS[form]
    found = only(utils("_rebuild_device_tensor_from_numpy", array, named("torch", "float32"), "xla:0", False), {})

    assert (found.info.location, found.info.shape, found.info.stride) == ("xla:0", shape, stride)
    assert found.read() == floats()


STREAM = legacy(storage(rest=(None,)), [("0", 4, floats())])


@pytest.mark.parametrize(
    "data", [raw(STREAM), call(named("_codecs", "encode"), STREAM.decode("latin-1"), "latin1")], ids=["bytes", "text"]
)
def test_a_plain_pickle_holds_its_storages_in_its_bytes(data: bytes) -> None:
    found = open_checkpoint(pickled({"w": tensor(call(named("torch.storage", "_load_from_bytes"), data))}))

    assert found.tensors["w"].read() == floats()


def numpy_scalar_of(code: str, data: bytes, order: str = "<", encoded: bool = False) -> Any:
    dtype = call(named("numpy", "dtype"), code, 0, 1) + ops((3, order, None, None, None, -1, -1, 0)) + b"b"
    stored = call(named("_codecs", "encode"), data.decode("latin-1"), "latin1") if encoded else raw(data)
    pickle = pickled(call(named("numpy.core.multiarray", "scalar"), dtype, stored))
    return numpy_scalar(read_pickle(BytesSource(pickle)).root)


@each(
    ("code", "data", "order", "expected"),
    [
        ("f8", pack("<d", -1.5), "<", ("float64", -1.5)),
        ("f8", pack(">d", -1.5), ">", ("float64", -1.5)),
        ("i8", pack("<q", -7), "<", ("int64", -7)),
        ("u1", b"\xff", "|", ("uint8", 255)),
        ("b1", b"\1", "|", ("bool", True)),
        ("f2", pack("<e", 0.5), "<", ("float16", 0.5)),
        ("f8", b"\0" * 7, "<", ("float64", None)),
        ("c16", bytes(16), "<", ("complex128", None)),
        ("U4", bytes(16), "<", ("str_", "")),
        ("U4", "ab\0\0".encode("utf-32-be"), ">", ("str_", "ab")),
    ],
)
@each("encoded", [False, True])
def test_a_numpy_scalar_is_its_type_and_its_value(
    code: str, data: bytes, order: str, expected: tuple[str, object], encoded: bool
) -> None:
    assert numpy_scalar_of(code, data, order, encoded) == expected


def test_an_empty_storage_may_have_two_types_and_none_may_be_on_two_devices() -> None:
    empty = {"a": tensor(storage(numel=0), (0,)), "b": tensor(storage(numel=0, dtype="LongStorage"), (0,))}
    found = open_checkpoint(torch_zip(empty, {"0": b""})).tensors

    assert [tensor.info.dtype.name for tensor in found.values()] == ["float32", "int64"]
    with pytest.raises(AmbiguousFile) as caught:
        open_checkpoint(torch_zip({"a": PLAIN, "b": tensor(storage(location="cuda:0"))}, FLOATS))

    assert caught.value.kind == "ambiguous-storage"


def parts(tree: bytes) -> dict[str, list[str]]:
    """Return the names of the parts of each tensor in a zip of this tree."""
    found = open_checkpoint(torch_zip(tree, FLOATS)).tensors
    return {name: [part for part, _ in tensor.info.parts] for name, tensor in found.items()}


def with_state(state: bytes) -> bytes:
    """Return a subclass around a plain tensor, given a state."""
    inner = named("torch._utils", "_rebuild_tensor_v2") + named("a", "B")
    args = ops((storage(), 0, (4,), (1,), False, HOOKS))
    return named("torch._tensor", "_rebuild_from_type_v2") + b"(" + inner + args + state + b"tR"


MADE_BY = named("geoopt.tensor", "_rebuild_manifold_tensor")
MANIFOLD = (
    call(named("functools", "partial"), MADE_BY)
    + ops((MADE_BY, (), {"build_fn": named("torch._utils", "_rebuild_tensor_v2")}, None))
    + b"b"
)
ON_IT = (named("geoopt.tensor", "ManifoldParameter"), call(named("geoopt.manifolds.sphere", "Sphere")), True)


def test_a_tensor_on_a_manifold_is_a_plain_one_of_its_class() -> None:
    found = only(call(MANIFOLD, storage(), 0, (4,), (1,), False, HOOKS, {}, *ON_IT))

    assert (found.shape, found.info.kind, found.info.requires_grad) == ((4,), "parameter", True)
    assert found.info.subclass == "geoopt.tensor.ManifoldParameter"
    assert found.read() == floats()


def test_a_call_that_makes_none_is_no_tensor() -> None:
    for none in (call(MANIFOLD, *ON_IT), call(named("torch", "tensor"), 1 << 63)):
        with open_checkpoint(torch_zip({"x": none})) as checkpoint:
            assert not checkpoint.tensors
    with pytest.raises(MalformedFile, match="without a storage"):
        only(call(MANIFOLD, {}, *ON_IT))


def test_tensors_that_share_a_state_have_the_same_parts_but_themselves() -> None:
    state = ops({"note": 1, "scale": PLAIN})
    assert parts(b"](" + with_state(state + b"q\5") + with_state(b"h\5") + b"e") == {"0": ["scale"], "1": ["scale"]}
    first = with_state(b"}q\5") + b"q\6" + b"0h\5" + ops("me") + b"h\6s" + b"0"
    tree = first + b"](h\6" + with_state(b"h\5") + b"e"

    assert parts(tree) == {"0": [], "1": ["me"]}
