"""
The table of calls in pickles that only make data: names, forms of arguments, reasons.

A pickle is ``data`` if everything in it is a literal or made by a row of this table: see ``judge``. A row counts for
the exact full name as Python maps it at the protocol of the pickle. Its words are those of ``forms``. To add a row,
read what the callable does with each argument, state and item.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import chain
from typing import Final, NamedTuple

from ckptool.pickles.alarms import each
from ckptool.pickles.forms import (
    FORMS,
    NBYTES,
    REBUILDERS,
    Form,
    Values,
    bytes_of,
    dense,
    element_size,
    elements_of,
    extent,
    fits,
    is_state_of_dtype,
)
from ckptool.pickles.nodes import CONTAINERS, Call, Global, Inert


class Row(NamedTuple):
    """A callable that only makes data."""

    names: tuple[str, ...]
    """Full names in Python 3."""
    makes: str
    """The word for the result."""
    forms: str
    """Allowed arguments: words with commas between, bars between alternatives, an ellipsis after a repeated one."""
    why: str
    """All that the callable does."""
    source: str
    """The source file where that can be read."""
    builds: bool = False
    """Whether the object is made by ``__new__`` alone, and not by a call."""
    state: str | None = None
    """The word for the state that it may get, once; None if it may get none."""
    items: str = ""
    """Which items it may get: ``pairs`` (SETITEMS), ``items`` (APPENDS)."""
    whole: Callable[[Call, Values], bool] | None = None
    """A test of the arguments, state and items together."""


def _holds_elements(call: Call, values: Values) -> bool:
    data, dtype, shape, order, *axes = call.args
    if axes and (order != "K" or sorted(axes[0]) != list(range(len(shape)))):
        return False
    return (order in ("C", "F") or bool(axes)) and fits(shape, dtype, data, values)


def _is_one_element(call: Call, values: Values) -> bool:
    dtype, data = call.args
    return "V" not in dtype.args[0] and element_size(dtype, values) == bytes_of(data)


def _is_view(call: Call, values: Values) -> bool:
    """Test that a view is within its storage, and its type has no scales."""
    named = values.name(call.args[6]) if len(call.args) > 6 else ""
    is_quantised = named in _QUANTISED if named else id(call.args[0]) in values.quantised
    return not is_quantised and _lies_within(call, values)


def _lies_within(call: Call, values: Values) -> bool:
    stored, offset, size, stride, *others = call.args
    numel = values.storages[id(stored)]
    if len(others) > 2 and type(others[2]) is Global:  # the elements are of this type, whatever the storage's are
        numel //= NBYTES.get(values.name(others[2]), 1)
    found = extent(*(one if type(one) is tuple else one.args[0] for one in (size, stride)))
    return found is not None and 0 <= offset <= numel - found  # else torch would enlarge the storage


def _is_shallow(call: Call, values: Values) -> bool:
    """Test the nesting of a container that Python frees recursively: few may contain other containers."""
    given = call.args[0] if call.args and type(call.args[0]) is list else ()
    held = chain(given, call.items or (), (value for _, value in call.pairs or ()))
    return CONTAINERS.isdisjoint(map(type, held)) or values.nested.takes()


def _is_quantised(call: Call, values: Values) -> bool:
    """Test that a view has no more elements than its storage, and as many scales as the length of their axis."""
    size, (_, *numbers, axis) = call.args[2], call.args[4]
    if dense(call.args, values) is None or not _lies_within(call, values):
        return False
    if len(numbers) < 2:  # one scale, and one zero point
        return True
    return 0 <= axis < len(size) and all(elements_of(one, values) == size[axis] for one in numbers)


def _is_rebuilt(call: Call, values: Values) -> bool:
    """Test the arguments of a function that makes a tensor, where both are arguments of another call."""
    func, _, args, _ = call.args
    name = values.name(func)
    row = BY_NAME.get(name)
    return name in REBUILDERS and row is not None and type(args) is tuple and takes(row, Call(func, args), values)


_CORES: Final = ("numpy.core", "numpy._core")
_DCP: Final = "torch.distributed.checkpoint"
_OBJECT: Final = "object.__new__; the state is put into its __dict__"
_UTILS: Final = "torch/_utils.py"
_DATETIME: Final = "Modules/_datetimemodule.c"
_PATHS: Final = "Path PurePath PosixPath PurePosixPath WindowsPath PureWindowsPath"
_COLLECTIONS: Final = "Modules/_collectionsmodule.c"
_DATACLASSES: Final = "torch/distributed/checkpoint"


ROWS: Final = (
    # Python
    Row(("builtins.set",), "set", " | list of keys", "takes the items and their hashes", "Objects/setobject.c"),
    Row(("builtins.frozenset",), "set", " | list of keys", "takes the items and their hashes", "Objects/setobject.c"),
    Row(("builtins.bytearray",), "bytearray", " | bytes | text, 'latin1'", "copies", "Objects/bytearrayobject.c"),
    Row(("builtins.bytes",), "bytes", "", "gives the empty bytes", "Objects/bytesobject.c"),
    Row(("builtins.complex",), "number", "float, float", "keeps two numbers", "Objects/complexobject.c"),
    Row(("builtins.slice",), "slice", "int?, int?, int?", "keeps what it is given", "Objects/sliceobject.c"),
    Row(("builtins.range",), "range", "int, int, int", "keeps three numbers", "Objects/rangeobject.c"),
    Row(("builtins.object",), "object", "", "makes an empty object", "Objects/typeobject.c", builds=True),
    Row(("_codecs.encode",), "bytes", "text, 'latin1'", "encodes by Python's own codec", "Modules/_codecsmodule.c"),
    Row(
        ("collections.OrderedDict",), "ordered dict", " | list of pairs", "puts pairs into the dict that it is",
        "Objects/odictobject.c", state="_metadata", items="pairs",
    ),
    Row(
        ("collections.Counter",), "counter", " | dict", "updates the empty dict that it is", "Lib/collections",
        items="pairs",
    ),
    Row(
        ("collections.defaultdict",), "defaultdict", " | None | factory",
        "keeps the factory, which nothing calls before a key is missing", _COLLECTIONS, items="pairs",
        whole=_is_shallow,
    ),
    Row(
        ("collections.deque",), "deque", " | list | (), int? | list, int?", "appends the items", _COLLECTIONS,
        items="items", whole=_is_shallow,
    ),
    Row(
        ("argparse.Namespace",), "namespace", "", _OBJECT, "Lib/argparse.py", builds=True, state="fields",
    ),
    Row(
        ("copyreg._reconstructor",), "namespace", "the class Namespace, the class object, None", _OBJECT,
        "Lib/copyreg.py", state="fields",
    ),
    Row(("types.SimpleNamespace",), "namespace", "", _OBJECT, "Objects/namespaceobject.c", state="fields"),
    Row(("datetime.date",), "date", "4 bytes", "copies the bytes", _DATETIME),
    Row(("datetime.time",), "time", "6 bytes | 6 bytes, time zone", "copies the bytes", _DATETIME),
    Row(("datetime.datetime",), "date", "10 bytes | 10 bytes, time zone", "copies the bytes", _DATETIME),
    Row(("datetime.timedelta",), "duration", "int, int, int", "keeps three numbers", _DATETIME),
    Row(("datetime.timezone",), "time zone", "duration | duration, str", "keeps what it is given", _DATETIME),
    Row(("decimal.Decimal",), "number", "decimal", "reads the digits, and multiplies nothing", "Modules/_decimal"),
    Row(("fractions.Fraction",), "number", "ratio | number, number", "divides by a common divisor", "Lib/fractions.py"),
    Row(
        (*each("pathlib.{}", _PATHS), *each("pathlib._local.{}", _PATHS)), "path", "part of a path...",
        "splits text; looks at no file", "Lib/pathlib",
    ),
    # numpy
    Row(
        ("numpy.dtype",), "dtype", "code of a type, 0, 1", "makes a new type, not one of the process",
        "numpy/_core/src/multiarray/descriptor.c", state="the state of that code",
    ),
    Row(
        tuple(f"{core}.multiarray._reconstruct" for core in _CORES), "array",
        "the class ndarray, the shape of nothing, b",
        "makes an empty array, whose state is bytes of just its size", "numpy/_core/src/multiarray/methods.c",
        state="state of an array",
    ),
    Row(
        tuple(f"{core}.numeric._frombuffer" for core in _CORES), "array",
        "bytes, dtype, tuple of ints, str | bytes, dtype, tuple of ints, str, tuple of ints",
        "looks at bytes of just its size", "numpy/_core/numeric.py", whole=_holds_elements,
    ),
    Row(
        tuple(f"{core}.multiarray.scalar" for core in _CORES), "scalar", "dtype, bytes", "copies one element",
        "numpy/_core/src/multiarray/multiarraymodule.c", whole=_is_one_element,
    ),
    # torch
    Row(
        ("torch._utils._rebuild_tensor",), "tensor", "storage, int, ints, ints",
        "a view that lies in the storage", _UTILS, whole=_is_view,
    ),
    Row(
        ("torch._utils._rebuild_tensor_v2",), "tensor",
        "storage, int, ints, ints, bool, hooks | storage, int, ints, ints, bool, hooks, flags",
        "a view that lies in the storage", _UTILS, whole=_is_view,
    ),
    Row(
        ("torch._utils._rebuild_tensor_v3",), "tensor",
        "storage, int, ints, ints, bool, hooks, dtype of torch"
        " | storage, int, ints, ints, bool, hooks, dtype of torch, flags",
        "a view that lies in the storage", _UTILS, whole=_is_view,
    ),
    Row(
        ("torch._utils._rebuild_parameter",), "tensor", "any tensor, bool, hooks", "wraps the tensor", _UTILS,
    ),
    Row(
        ("torch._utils._rebuild_parameter_with_state",), "tensor with attributes",
        "any tensor, bool, hooks, attributes", "wraps the tensor, and sets its attributes", _UTILS,
    ),
    Row(
        ("torch._tensor._rebuild_from_type_v2",), "tensor with attributes",
        "name of a row for tensors, class of tensors, its arguments, attributes",
        "calls that row, and sets attributes of the tensor", "torch/_tensor.py", whole=_is_rebuilt,
    ),
    Row(
        ("torch._utils._rebuild_sparse_tensor",), "sparse tensor", "layout, parts", "keeps the tensors", _UTILS,
    ),
    Row(
        ("torch._utils._rebuild_qtensor",), "quantised tensor",
        "storage, int, ints, ints, quantizer, bool, hooks", "a view of the storage, of no more elements than it has",
        _UTILS, whole=_is_quantised,
    ),
    Row(
        ("torch._utils._rebuild_device_tensor_from_numpy",), "tensor of a device",
        "array, dtype of torch, device to copy to, bool", "copies to the device", _UTILS,
    ),
    Row(
        ("torch._utils._rebuild_device_tensor_from_cpu_tensor",), "tensor of a device",
        "dense tensor, dtype of torch, device to copy to, bool", "copies to the device", _UTILS,
    ),
    Row(
        ("torch._utils._rebuild_meta_tensor_no_storage",), "tensor without data",
        "dtype of torch, ints, ints, bool", "has no elements", _UTILS,
    ),
    Row(
        ("torch.storage._load_from_bytes",), "storage", "bytes of a storage",
        "unpickles them: they are judged alike", "torch/storage.py",
    ),
    Row(
        ("torch.serialization._get_layout",), "layout", "name of a layout",
        "looks the name up in a dict", "torch/serialization.py",
    ),
    Row(("torch.Size",), "size", "tuple of ints", "copies the numbers", "torch/csrc/Size.cpp"),
    Row(
        ("torch.device",), "device", "name of a device | name of a device, int",
        "keeps what it is given", "torch/csrc/Device.cpp",
    ),
    Row(
        each("torch.jit._pickle.{}", "build_intlist build_tensorlist build_doublelist build_boollist"), "list", "list",
        "gives what it is given", "torch/jit/_pickle.py",
    ),
    Row(
        ("torch.jit._pickle.restore_type_tag",), "list", "anything, str",
        "gives what it is given", "torch/jit/_pickle.py",
    ),
    # The index of torch.distributed.checkpoint
    Row(
        (
            *each(f"{_DCP}.metadata.{{}}", "Metadata StorageMeta TensorStorageMetadata BytesStorageMetadata"),
            f"{_DCP}.metadata.ChunkStorageMetadata",
            *each(f"{_DCP}.planner.{{}}", "SavePlan WriteItem TensorWriteData BytesIOWriteData"),
            f"{_DCP}.filesystem._StorageInfo",
        ),
        "dataclass", "", _OBJECT, _DATACLASSES, builds=True, state="fields",
    ),
    Row(
        (f"{_DCP}.metadata.MetadataIndex",), "index", "", _OBJECT, _DATACLASSES, builds=True,
        state="fields of an index",
    ),
    Row(
        (f"{_DCP}.metadata.TensorProperties",), "dataclass", "", "keeps five values", f"{_DATACLASSES}/metadata.py",
        builds=True, state="properties",
    ),
    Row(
        (f"{_DCP}.metadata._MEM_FORMAT_ENCODING",), "memory format", "number to 2",
        "gives a member of the enumeration", f"{_DATACLASSES}/metadata.py",
    ),
    Row(
        (f"{_DCP}.planner.WriteItemType",), "member", "number from 1 to 3", "gives a member of the enumeration",
        f"{_DATACLASSES}/planner.py",
    ),
)  # fmt: skip
"""All calls that count as data."""

BY_NAME: Final[Mapping[str, Row]] = {name: row for row in ROWS for name in row.names}

_STORAGE_NBYTES: Final = {
    "Float": 4, "Double": 8, "Half": 2, "BFloat16": 2, "Byte": 1, "Char": 1, "Short": 2, "Int": 4, "Long": 8,
    "Bool": 1, "ComplexFloat": 8, "ComplexDouble": 16, "QInt8": 1, "QUInt8": 1, "QInt32": 4, "QUInt4x2": 1,
    "QUInt2x4": 1,
}  # fmt: skip
STORAGES: Final[Mapping[str, int]] = {
    **{f"torch.{name}Storage": nbytes for name, nbytes in _STORAGE_NBYTES.items()},
    **{f"torch.cuda.{name}Storage": nbytes for name, nbytes in _STORAGE_NBYTES.items()},
    "torch.storage.UntypedStorage": 1,
    "torch.UntypedStorage": 1,
}
"""Classes of storages in persistent ids, and the bytes of their elements."""
_QUANTISED: Final = each("torch.{}", "qint8 qint32 quint8 quint4x2 quint2x4")

VALUES: Final = frozenset(
    each("builtins.{}", "Ellipsis NotImplemented int float str bool list dict tuple bytes")
    + each("numpy.{}", "ndarray bool_ int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64")
    + each(
        "numpy.{}", "complex64 complex128 str_ bytes_ bool generic number integer signedinteger unsignedinteger inexact"
    )
    + each("numpy.{}", "floating complexfloating flexible character longdouble clongdouble datetime64 timedelta64")
    + each("torch.{}", "Tensor _tensor.Tensor nn.parameter.Parameter nn.parameter.Buffer")
    + each("torch.{}", "strided sparse_coo sparse_csr sparse_csc sparse_bsr sparse_bsc jagged _mkldnn")
    + each("torch.{}", "contiguous_format preserve_format channels_last channels_last_3d")
    + each("torch._utils.torch.{}", "contiguous_format preserve_format channels_last channels_last_3d")
    + each("torch.{}", "per_tensor_affine per_channel_affine per_channel_affine_float_qparams")
    + each("torch.{}", "per_tensor_symmetric per_channel_symmetric")
)
"""Names that may be referred to but not called, besides rows, storages and torch's dtypes."""

OBJECT_NBYTES: Final = 256
"""Bytes of memory that most results of calls take, at most."""
TENSOR_NBYTES: Final = 640
AXIS_NBYTES: Final = 16
"""Bytes of a plain tensor, and of each of its axes."""
_OTHER_NBYTES: Final = 3072
"""Bytes of any tensor, with the most axes."""
_DEQUE_NBYTES: Final = 832
"""Bytes of an empty deque."""


def nbytes_made(row: Row, call: Call) -> int:
    """Return how many bytes of memory the result of a call takes at most, without the data that it copies."""
    if row.makes == "size":
        return 64 + 8 * len(call.args[0])
    if "tensor" in row.makes:
        return _OTHER_NBYTES
    return _DEQUE_NBYTES if row.makes == "deque" else OBJECT_NBYTES


@lru_cache(maxsize=256)
def _forms(text: str) -> tuple[tuple[tuple[Form, ...], Form | None], ...]:
    found = []
    for one in text.split(" | ") if text else [""]:
        words = [part for part in one.strip().split(", ") if part]
        more = FORMS[words.pop().removesuffix("...")] if words and words[-1].endswith("...") else None
        found.append((tuple(FORMS[one] for one in words), more))
    return tuple(found)


def takes(row: Row, call: Call, values: Values) -> bool:
    """Return whether the arguments of a call have a form of a row, and its items are of the allowed kind."""
    args = call.args
    if (call.how == "newobj") is not row.builds or call.kwargs is not None or type(args) is not tuple:
        return False
    if (call.pairs and row.items != "pairs") or (call.items and row.items != "items"):
        return False
    if not any(_has_form(args, words, more, values) for words, more in _forms(row.forms)):
        return False
    return row.whole is None or row.whole(call, values)


def takes_state(row: Row, call: Call, values: Values) -> bool:
    """Return whether the state that the result of a call gets has the form of a row."""
    if row.state is None:
        return False
    if row.makes == "dtype":
        return is_state_of_dtype(call, values)
    return FORMS[row.state](call.state, values)


def _has_form(args: tuple[Inert, ...], words: tuple[Form, ...], more: Form | None, values: Values) -> bool:
    count = len(words)
    if len(args) != count and (more is None or len(args) < count):
        return False
    if not all(form(one, values) for form, one in zip(words, args, strict=False)):
        return False
    return more is None or all(more(one, values) for one in args[count:])
