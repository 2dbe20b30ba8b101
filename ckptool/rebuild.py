"""
Inert tree → ``TensorInfo``: what each call that torch pickles for a tensor means.

Strategy: ``_RULES`` maps the exact ``(module, name)`` that the pickle asks for to a method that reads the arguments
as data. Names that are not in the table are no tensors; nobody looks them up. What a persistent id refers to is the
container's knowledge, given as ``Storages``.

Argument layouts: torch/_utils.py, torch/_tensor.py and torch/storage.py; the old ones, Tensor.__setstate__.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from ckptool import dtypes, inert
from ckptool.dtypes import DType
from ckptool.errors import AmbiguousFile, MalformedFile
from ckptool.files import BytesSource
from ckptool.inert import Call, Dict, Global, Inert, PersistentId
from ckptool.numpy_arrays import numpy_array, raw_bytes
from ckptool.tensors import StorageRef, TensorInfo, check_extent


class TypedStorage(NamedTuple):
    """A storage, and the element type that the file gives it."""

    ref: StorageRef
    dtype: DType


class Storages(Protocol):
    """What a container knows of the things that its pickle refers to."""

    def resolve(self, pid: Inert) -> TypedStorage | TensorInfo | None:
        """Return what a persistent id refers to, or None if that is neither a storage nor a tensor."""
        ...

    def nested(self, stream: bytes) -> TypedStorage | None:
        """Return the storage that a complete stream inside the pickle holds (``_load_from_bytes``), or None."""
        ...


class Rebuilder:
    """Recognises the tensors of one pickle. The same node gives the same ``TensorInfo``, so ties stay ties."""

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self._known: dict[int, TensorInfo | None] = {}

    def tensor(self, node: Inert) -> TensorInfo | None:
        """
        Return what the file says of the tensor that ``node`` stands for, or None if it is no tensor.

        Raises:
            MalformedFile: It is a tensor, and contradicts itself or its storage.
        """
        if not isinstance(node, Call | PersistentId):
            return None
        key = id(node)
        if key not in self._known:
            self._known[key] = None  # a tensor inside itself is none
            self._known[key] = self._recognise(node)
        return self._known[key]

    def storage(self, node: Inert) -> TypedStorage | None:
        """Return the storage that ``node`` refers to, or None if it refers to none."""
        if isinstance(node, PersistentId):
            found = self._storages.resolve(node.pid)
            return found if isinstance(found, TypedStorage) else None
        if isinstance(node, Call) and isinstance(node.func, Global) and isinstance(node.args, tuple):
            named = (node.func.module, node.func.name)
            if named == ("torch.storage", "_load_from_bytes") and len(node.args) == 1:
                stream = raw_bytes(node.args[0])
                return self._storages.nested(stream) if stream is not None else None
        return None

    def _recognise(self, node: Call | PersistentId) -> TensorInfo | None:
        if isinstance(node, PersistentId):
            found = self._storages.resolve(node.pid)
            return found if isinstance(found, TensorInfo) else None
        func = node.func
        if not isinstance(func, Global):
            return None
        rule = _RULES.get((func.module, func.name))
        if rule is not None:
            if not isinstance(node.args, tuple):
                raise _malformed(f"{func} without arguments")
            return rule(self, node, *node.args[:8])
        if func.module in ("torch", "torch.cuda") and func.name.endswith("Tensor"):
            return self._old_tensor(node)
        return None

    # One method for each way that torch writes a tensor; the arguments are the pickle's.

    def _v1(
        self,
        _: Call,
        storage: Inert = None,
        offset: Inert = None,
        size: Inert = None,
        stride: Inert = None,
        *_rest: Inert,
    ) -> TensorInfo:
        return self._strided(storage, offset, size, stride, None)

    def _v2(
        self,
        _: Call,
        storage: Inert = None,
        offset: Inert = None,
        size: Inert = None,
        stride: Inert = None,
        requires_grad: Inert = None,
        _hooks: Inert = None,
        metadata: Inert = None,
        *_rest: Inert,
    ) -> TensorInfo:
        return self._strided(storage, offset, size, stride, requires_grad, metadata=metadata)

    def _v3(
        self,
        _: Call,
        storage: Inert = None,
        offset: Inert = None,
        size: Inert = None,
        stride: Inert = None,
        requires_grad: Inert = None,
        _hooks: Inert = None,
        dtype: Inert = None,
        metadata: Inert = None,
    ) -> TensorInfo:
        return self._strided(storage, offset, size, stride, requires_grad, dtype=_dtype(dtype), metadata=metadata)

    def _strided(
        self,
        storage: Inert,
        offset: Inert,
        size: Inert,
        stride: Inert,
        requires_grad: Inert,
        *,
        dtype: DType | None = None,
        metadata: Inert = None,
    ) -> TensorInfo:
        found = self.storage(storage)
        if found is None:
            raise _malformed("a tensor without a storage")
        flags = metadata.pairs if isinstance(metadata, Dict) else []
        info = TensorInfo(
            dtype or found.dtype,
            _ints(size),
            _ints(stride),
            offset,
            found.ref,
            found.ref.location,
            requires_grad if isinstance(requires_grad, bool) else None,
            conj=inert.lookup(flags, "conj") is True if flags else False,
            neg=inert.lookup(flags, "neg") is True if flags else False,
        )
        check_extent(info)
        return info

    def _parameter(
        self, node: Call, data: Inert = None, requires_grad: Inert = None, *_rest: Inert
    ) -> TensorInfo | None:
        # Before 0.4: called with its data and (requires_grad, volatile, hooks) for a state, and before that with
        # nothing and (data, grad, hooks, requires_grad, volatile).
        state = node.state if isinstance(node.state, tuple) else ()
        if data is None and len(state) == 5:
            data, requires_grad = state[0], state[3]
        elif requires_grad is None and len(state) == 3:
            requires_grad = state[0]
        info = self.tensor(data)
        if info is None:
            return None
        return info._replace(requires_grad=requires_grad if isinstance(requires_grad, bool) else None, kind="parameter")

    def _parameter_with_state(
        self,
        node: Call,
        data: Inert = None,
        requires_grad: Inert = None,
        _hooks: Inert = None,
        state: Inert = None,
        *_rest: Inert,
    ) -> TensorInfo | None:
        info = self._parameter(node, data, requires_grad)
        return info._replace(parts=info.parts + self._parts(state)) if info is not None else None

    def _variable(self, node: Call, *args: Inert) -> TensorInfo | None:
        info = self._parameter(node, *args)
        return info._replace(kind=None) if info is not None else None

    def _old_tensor(self, node: Call) -> TensorInfo | None:
        """``torch.FloatTensor`` made by NEWOBJ and given ``(storage, offset, size, stride)`` as its state."""
        if isinstance(node.state, tuple) and len(node.state) == 4:
            return self._strided(*node.state, None)
        return None

    def _uninitialized(self, _: Call, requires_grad: Inert = None, *_rest: Inert) -> TensorInfo:
        return TensorInfo(
            dtypes.BY_NAME["float32"],
            (),
            (),
            0,
            None,
            "cpu",
            requires_grad is True,
            "parameter",
            "uninitialized",
        )

    def _quantized(
        self,
        _: Call,
        storage: Inert = None,
        offset: Inert = None,
        size: Inert = None,
        stride: Inert = None,
        quantizer: Inert = None,
        requires_grad: Inert = None,
        *_rest: Inert,
    ) -> TensorInfo:
        info = self._strided(storage, offset, size, stride, requires_grad)
        if not (isinstance(quantizer, tuple) and quantizer):
            raise _malformed("a quantised tensor without a quantiser")
        scheme = quantizer[0].name if isinstance(quantizer[0], Global) else str(quantizer[0])
        names = ("scale", "zero_point") if scheme == "per_tensor_affine" else ("scales", "zero_points", "axis")
        parts, details = [], []
        for name, value in zip(names, quantizer[1:], strict=False):
            part = self.tensor(value)
            if part is not None:
                parts.append((name, part))
            elif isinstance(value, int | float):
                details.append((name, value))
        return info._replace(layout=scheme, parts=tuple(parts), details=tuple(details))

    def _sparse(self, _: Call, layout: Inert = None, data: Inert = None, *_rest: Inert) -> TensorInfo:
        name = _layout(layout)
        fields = (
            ("indices", "values")
            if name == "sparse_coo"
            else _COMPRESSED.get(name, ("crow_indices", "col_indices", "values"))
        )
        if not isinstance(data, tuple) or len(data) <= len(fields):
            raise _malformed(f"a {name} tensor without its parts")
        parts = []
        for field, node in zip(fields, data, strict=False):
            part = self.tensor(node)
            if part is None:
                raise _malformed(f"a {name} tensor whose {field} are no tensor")
            parts.append((field, part))
        values = parts[-1][1]
        shape = _ints(data[len(fields)])
        return TensorInfo(
            values.dtype,
            shape,
            (),
            0,
            None,
            values.location,
            values.requires_grad,
            layout=name,
            parts=tuple(parts),
        )

    def _nested(self, _: Call, *args: Inert) -> TensorInfo:
        parts = []
        for field, node in zip(("buffer", "sizes", "strides", "offsets"), args, strict=False):
            part = self.tensor(node)
            if part is not None:
                parts.append((field, part))
        if not parts or parts[0][0] != "buffer":
            raise _malformed("a nested tensor without a buffer")
        buffer = parts[0][1]
        return TensorInfo(buffer.dtype, buffer.shape, (), 0, None, buffer.location, layout="nested", parts=tuple(parts))

    def _jagged(self, _: Call, arguments: Inert = None, *_rest: Inert) -> TensorInfo:
        pairs = arguments.pairs if isinstance(arguments, Dict) else []
        parts = []
        for field in ("values", "offsets", "lengths"):
            part = self.tensor(inert.lookup(pairs, field))
            if part is not None:
                parts.append((field, part))
        if not parts or parts[0][0] != "values":
            raise _malformed("a jagged tensor without values")
        values = parts[0][1]
        return TensorInfo(values.dtype, values.shape, (), 0, None, values.location, layout="jagged", parts=tuple(parts))

    def _meta(
        self,
        _: Call,
        dtype: Inert = None,
        size: Inert = None,
        stride: Inert = None,
        requires_grad: Inert = None,
        *_rest: Inert,
    ) -> TensorInfo:
        info = TensorInfo(_dtype(dtype), _ints(size), _ints(stride), 0, None, "meta", requires_grad is True)
        check_extent(info)
        return info

    def _wrapper(
        self,
        _: Call,
        cls: Inert = None,
        dtype: Inert = None,
        size: Inert = None,
        stride: Inert = None,
        offset: Inert = None,
        layout: Inert = None,
        device: Inert = None,
        requires_grad: Inert = None,
    ) -> TensorInfo:
        info = TensorInfo(
            _dtype(dtype),
            _ints(size),
            _ints(stride),
            offset,
            None,
            _device(device),
            requires_grad is True,
            layout=_layout(layout),
            subclass=inert.class_name(cls),
        )
        check_extent(info)
        return info

    def _from_type(
        self,
        _: Call,
        func: Inert = None,
        cls: Inert = None,
        args: Inert = None,
        state: Inert = None,
        *_rest: Inert,
    ) -> TensorInfo | None:
        # Not self.tensor(): a node made here dies here, and its id could be another's later.
        info = self._recognise(Call(func, args)) if isinstance(args, tuple) else None
        if info is None:
            return None  # what it wraps is found by walking on
        named = inert.global_of(cls)
        plain = named is not None and (named.module, named.name) in _PLAIN_CLASSES
        # nn.Buffer makes plain tensors with a mark.
        kind = "buffer" if inert.lookup(_state_pairs(state), "_is_buffer") is True else info.kind
        known = {id(part) for _, part in info.parts}
        parts = [(name, part) for name, part in self._parts(state) if id(part) not in known]
        return info._replace(subclass=None if plain else inert.class_name(cls), kind=kind, parts=(*info.parts, *parts))

    def _from_cpu(
        self,
        _: Call,
        data: Inert = None,
        dtype: Inert = None,
        device: Inert = None,
        requires_grad: Inert = None,
        *_rest: Inert,
    ) -> TensorInfo | None:
        """An xla, mtia or maia tensor, saved as the CPU tensor or the numpy array that holds its values."""
        info = self.tensor(data) or _from_numpy(data)
        if info is None:
            return None
        return info._replace(location=_device(device), requires_grad=requires_grad is True)

    def _parts(self, state: Inert) -> tuple[tuple[str, TensorInfo], ...]:
        """Return the tensors that a subclass's state holds, by attribute name; two levels deep is as far as it goes."""
        parts = []
        for name, value in _state_pairs(state):
            info = self.tensor(value)
            if info is not None:
                parts.append((str(name), info))
            elif isinstance(value, list | tuple | Dict):
                for inner, item in inert.children(value):
                    info = self.tensor(item)
                    if info is not None:
                        parts.append((f"{name}.{inner}", info))
        return tuple(parts)


def _state_pairs(state: Inert) -> inert.Pairs:
    states = state if isinstance(state, tuple) else (state,)
    return [pair for part in states if isinstance(part, Dict) for pair in part.pairs]


def _from_numpy(node: Inert) -> TensorInfo | None:
    array = numpy_array(node)
    if array is None or array.data is None or array.dtype not in dtypes.BY_NAME:
        return None
    source = BytesSource(array.data)
    dtype = dtypes.BY_NAME[array.dtype]
    strides, step = [], 1
    for size in array.shape if array.column_major else reversed(array.shape):
        strides.append(step)
        step *= size
    stride = tuple(strides if array.column_major else reversed(strides))
    ref = StorageRef("numpy", "cpu", source.nbytes, source, 0, array.big_endian)
    info = TensorInfo(dtype, array.shape, stride, 0, ref, "cpu")
    check_extent(info)
    return info


def _ints(node: Inert) -> tuple[int, ...]:
    if isinstance(node, Call) and isinstance(node.args, tuple) and len(node.args) == 1:  # torch.Size((…,))
        node = node.args[0]
    if isinstance(node, list):
        node = tuple(node)
    if not isinstance(node, tuple):
        raise _malformed("a tensor whose shape or strides are no sequence")
    return node


def _dtype(node: Inert) -> DType:
    if isinstance(node, Global) and node.module == "torch" and node.name in dtypes.BY_NAME:
        return dtypes.BY_NAME[node.name]
    raise _malformed(f"{inert.class_name(node)} is no element type")


def _layout(node: Inert) -> str:
    if isinstance(node, Call) and isinstance(node.args, tuple) and node.args:  # torch.serialization._get_layout
        node = node.args[0]
    name = node.name if isinstance(node, Global) else node
    return name.removeprefix("torch.") if isinstance(name, str) else "unknown"


def _device(node: Inert) -> str:
    args = node.args if isinstance(node, Call) else (node,)
    return ":".join(str(arg) for arg in args if isinstance(arg, str | int)) or "unknown"


def unify(seen: TypedStorage, again: TypedStorage) -> TypedStorage:
    """
    Return the storage that a second reference to one key means.

    An empty storage has no type of its own: torch, too, gives each reference the type that it asks for.

    Raises:
        AmbiguousFile: The two do not say the same of it.
    """
    same_place = (seen.ref.location, seen.ref.nbytes) == (again.ref.location, again.ref.nbytes)
    if not same_place or (seen.dtype != again.dtype and seen.ref.nbytes):
        raise AmbiguousFile(
            f"storage {seen.ref.key!r} is {_describe(seen)} in one place and {_describe(again)} in another",
            kind="ambiguous-storage",
        )
    return TypedStorage(seen.ref, again.dtype)


def _describe(storage: TypedStorage) -> str:
    return f"{storage.dtype}, {storage.ref.nbytes:,} bytes on {storage.ref.location!r}"


def _malformed(what: str) -> MalformedFile:
    return MalformedFile(what, kind="malformed-tensor")


_COMPRESSED = {
    "sparse_csr": ("crow_indices", "col_indices", "values"),
    "sparse_bsr": ("crow_indices", "col_indices", "values"),
    "sparse_csc": ("ccol_indices", "row_indices", "values"),
    "sparse_bsc": ("ccol_indices", "row_indices", "values"),
}

_PLAIN_CLASSES = {
    ("torch", "Tensor"),
    ("torch._tensor", "Tensor"),
    ("torch.tensor", "Tensor"),
    ("torch.nn.parameter", "Parameter"),
    ("torch.nn.parameter", "Buffer"),
}

_Rule = Callable[..., "TensorInfo | None"]

_RULES: dict[tuple[str, str], _Rule] = {
    ("torch._utils", "_rebuild_tensor"): Rebuilder._v1,
    ("torch._utils", "_rebuild_tensor_v2"): Rebuilder._v2,
    ("torch._utils", "_rebuild_tensor_v3"): Rebuilder._v3,
    ("torch._utils", "_rebuild_parameter"): Rebuilder._parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): Rebuilder._parameter_with_state,
    ("torch._utils", "_rebuild_qtensor"): Rebuilder._quantized,
    ("torch._utils", "_rebuild_sparse_tensor"): Rebuilder._sparse,
    ("torch._utils", "_rebuild_sparse_csr_tensor"): Rebuilder._sparse,
    ("torch._utils", "_rebuild_nested_tensor"): Rebuilder._nested,
    ("torch._utils", "_rebuild_meta_tensor_no_storage"): Rebuilder._meta,
    ("torch._utils", "_rebuild_wrapper_subclass"): Rebuilder._wrapper,
    ("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"): Rebuilder._from_cpu,
    ("torch._utils", "_rebuild_device_tensor_from_numpy"): Rebuilder._from_cpu,
    ("torch._utils", "_rebuild_xla_tensor"): Rebuilder._from_cpu,
    ("torch._tensor", "_rebuild_from_type"): Rebuilder._from_type,
    ("torch._tensor", "_rebuild_from_type_v2"): Rebuilder._from_type,
    ("torch.tensor", "_rebuild_from_type"): Rebuilder._from_type,
    ("torch.nested._internal.nested_tensor", "_rebuild_njt"): Rebuilder._jagged,
    ("torch.nn.parameter", "Parameter"): Rebuilder._parameter,
    ("torch.nn.parameter", "UninitializedParameter"): Rebuilder._uninitialized,
    ("torch.nn.parameter", "UninitializedBuffer"): Rebuilder._uninitialized,
    ("torch.autograd", "Variable"): Rebuilder._variable,
    ("torch.autograd.variable", "Variable"): Rebuilder._variable,
}
