"""
Nodes to ``TensorInfo``: the table ``_RULES`` of calls that torch pickles for a tensor.

Strategy: ``_RULES`` maps the exact ``(module, name)`` that the pickle calls to a method that reads the arguments as
data. Calls of any other name are not tensors; no name is looked up. The meaning of persistent ids depends on the
container, which passes two functions for them.

Argument layouts: torch/_utils.py, torch/_tensor.py and torch/storage.py; the old ones, Tensor.__setstate__.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import copysign, inf
from struct import pack
from typing import Final, TypeAlias

from ckptool.errors import LimitExceeded, MalformedFile
from ckptool.limits import TENSOR_DEPTH, TENSOR_PARTS, refuse_long
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Block, Call, Dict, Global, Inert, PersistentId
from ckptool.pickles.numpy_values import array_of, encoded_bytes, raw_bytes
from ckptool.sources.source import BytesSource
from ckptool.tensors import dtypes
from ckptool.tensors.dtypes import DType
from ckptool.tensors.tensor import (
    ARRAY,
    MAX_RANK,
    SPARSE_PARTS,
    StorageRef,
    TensorInfo,
    TypedStorage,
    check_extent,
    is_countable,
    is_size,
    malformed_tensor,
    row_major,
)

Resolve: TypeAlias = Callable[[Inert], TypedStorage | TensorInfo | None]
"""Returns the storage or tensor of a persistent id, or None if it is neither."""

Nested: TypeAlias = Callable[[bytes], TypedStorage | None]
"""Returns the storage in a complete stream inside the pickle (``_load_from_bytes``), or None."""
Args: TypeAlias = tuple[Inert, ...]
Parts: TypeAlias = tuple[tuple[str, TensorInfo], ...]
_LONGEST_LAYOUT: Final = 64


class Rebuilder:
    """Recognises the tensors of one pickle. The same node gives the same ``TensorInfo``, so ties stay ties."""

    def __init__(self, resolve: Resolve = lambda _: None, nested: Nested = lambda _: None) -> None:
        self.resolve = resolve
        """Returns the storage or tensor of a persistent id, or None if it is neither."""
        self._nested_storage = nested
        self._known: dict[int, TensorInfo | None] = {}
        self._takes_arrays = False
        self._streams: dict[int, TypedStorage | None] = {}
        self._part_counts: dict[int, int] = {}
        self._states: dict[int, tuple[int, Parts, bool]] = {}
        """For each state of a subclass: how many parts were counted, its tensors, and whether it is a buffer's."""
        self._unfinished: set[int] = set()
        self._cycles = 0  # how often a tensor was met inside itself
        self._parts_left = TENSOR_PARTS
        self._depth = 0
        self._plain: Global | None = None
        """The node of ``_rebuild_tensor_v2``, once it was met: most calls of most files are of it."""
        self._decoded: dict[int, bytes | None] = {}
        """The bytes of arrays by the id of their text: one that several share is decoded once."""

    def tensor(self, node: Inert) -> TensorInfo | None:
        """
        Return the tensor that ``node`` would become, or None if it is not a tensor.

        Raises:
            MalformedFile: It is a tensor, and contradicts itself or its storage.
            LimitExceeded: The tensors so far have more than 1,000,000 parts and attributes.
        """
        kind = type(node)
        if kind is not Call and kind is not PersistentId:
            return None
        key = id(node)
        known = self._known
        if key in known:
            if key in self._unfinished:
                self._cycles += 1
            return known[key]
        if kind is Call and node.func is self._plain and type(node.args) is tuple and len(node.args) == 6:
            storage, offset, size, stride, requires_grad, _ = node.args
            known[key] = plain = self._strided(storage, offset, size, stride, requires_grad)
            return plain
        if kind is Call and not self._takes_arrays and not _makes_tensors(node.func):
            return None  # it is not recorded, which would double the memory of such calls
        known[key] = None  # a tensor inside itself is not a tensor
        self._unfinished.add(key)
        known[key] = info = self._recognise(node)
        self._unfinished.remove(key)
        if info is None and kind is PersistentId:
            del known[key]
        elif info is not None and info.parts:
            count = sum(1 + self._part_counts.get(id(part), 0) for _, part in info.parts)
            self._part_counts[id(info)] = count
            self._spend(count)
        return info

    def take_arrays(self, *, take: bool = True) -> None:
        """From now on, count numpy arrays as tensors, or no longer: for files in which they are weights."""
        self._takes_arrays = take
        self._known = {key: info for key, info in self._known.items() if info is not None and not info.is_array}

    def _from_numpy(self, node: Inert) -> TensorInfo | None:
        """
        Return an array as a tensor; None if the node is not an array, or torch does not have its type.

        Each gets a source of its own, so that arrays are not tied: a pickle may share the bytes of equal arrays.

        Raises:
            MalformedFile: It contradicts itself.
        """
        array = array_of(node, self._raw)
        if array is None or array.data is None or array.dtype not in dtypes.BY_NAME:
            return None
        if isinstance(array.data, Block):
            source, offset, nbytes = array.data.source, array.data.offset, array.data.nbytes
        else:
            source, offset, nbytes = BytesSource(array.data), 0, len(array.data)
        sizes = row_major([array.shape[axis] for axis in array.axes])
        stride = tuple(step for _, step in sorted(zip(array.axes, sizes, strict=True)))
        ref = StorageRef("numpy", "cpu", nbytes, source, offset, array.big_endian)
        info = TensorInfo(dtypes.BY_NAME[array.dtype], array.shape, stride, 0, ref, "cpu")
        check_extent(info)
        return info

    def _raw(self, node: Inert) -> bytes | None:
        """Return the bytes of ``raw_bytes``, decoded once for each text."""
        text = encoded_bytes(node)
        if id(text) not in self._decoded:
            self._decoded[id(text)] = raw_bytes(text)
        return self._decoded[id(text)]

    def _spend(self, count: int) -> None:
        # Tensors may share parts and attributes, so a short file can refer to more of them than it has bytes.
        self._parts_left -= count
        if self._parts_left < 0:
            raise LimitExceeded(f"tensors with more than {TENSOR_PARTS:,} parts and attributes", actual=TENSOR_PARTS)

    def storage(self, node: Inert) -> TypedStorage | None:
        """Return the storage that ``node`` refers to, or None if it refers to none."""
        if isinstance(node, PersistentId):
            found = self.resolve(node.pid)
            return found if isinstance(found, TypedStorage) else None
        if isinstance(node, Call) and isinstance(node.func, Global) and isinstance(node.args, tuple):
            named = (node.func.module, node.func.name)
            if named == ("torch.storage", "_load_from_bytes") and len(node.args) == 1:
                stream = self._raw(node.args[0])
                if id(stream) not in self._streams:
                    self._streams[id(stream)] = self._nested_storage(stream) if stream is not None else None
                return self._streams[id(stream)]
        return None

    def _recognise(self, node: Call | PersistentId) -> TensorInfo | None:
        if self._depth == TENSOR_DEPTH:
            raise malformed_tensor(f"tensors inside tensors, more than {TENSOR_DEPTH} deep")
        if isinstance(node, PersistentId):
            found = self.resolve(node.pid)
            return found if isinstance(found, TensorInfo) else None
        func = nodes.partial_of(node.func) if isinstance(node.func, Call) else node.func
        if not isinstance(func, Global):
            return None
        rule = _RULES.get((func.module, func.name))
        if rule is not None:
            if not isinstance(node.args, tuple):
                raise malformed_tensor(f"{func} without arguments")
            self._depth += 1
            try:
                return rule(self, node, node.args[:_MOST_ARGS] + _NO_ARGS[len(node.args) :])
            finally:
                self._depth -= 1
        if is_tensor_class(func):
            # torch.FloatTensor, made by NEWOBJ, gets (storage, offset, size, stride) as its state.
            if isinstance(node.state, tuple) and len(node.state) == 4:
                return self._strided(*node.state, None)
            return None
        if not self._takes_arrays:
            return None
        try:
            info = self._from_numpy(node)
        except MalformedFile:
            return None  # an array that numpy would refuse is data
        return None if info is None else info._replace(subclass=ARRAY)

    # One method for each form in which torch writes a tensor. ``args`` are the pickle's, with None for missing ones.

    def _v2(self, call: Call, args: Args) -> TensorInfo:
        storage, offset, size, stride, requires_grad, _hooks, metadata, *_rest = args
        self._plain = call.func
        return self._strided(storage, offset, size, stride, requires_grad, metadata=metadata)

    def _v3(self, _: Call, args: Args) -> TensorInfo:
        storage, offset, size, stride, requires_grad, _hooks, dtype, metadata = args
        return self._strided(storage, offset, size, stride, requires_grad, dtype=as_dtype(dtype), metadata=metadata)

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
        found = self.resolve(storage.pid) if type(storage) is PersistentId else self.storage(storage)
        if not isinstance(found, TypedStorage):
            raise malformed_tensor("a tensor without a storage")
        ref, of_storage = found
        shape = size if type(size) is tuple else as_sequence(size)
        steps = stride if type(stride) is tuple else as_sequence(stride)
        flag = requires_grad if type(requires_grad) is bool else None
        info = TensorInfo(dtype or of_storage, shape, steps, offset, ref, ref.location, flag)
        if isinstance(metadata, Dict):
            flags = metadata.pairs[:_MOST_ARGS]
            conj, neg = (nodes.lookup(flags, name) is True for name in ("conj", "neg"))
            info = info._replace(conj=conj, neg=neg)
        check_extent(info)
        return info

    def _parameter(self, node: Call, args: Args) -> TensorInfo | None:
        data, requires_grad = args[:2]
        # Before torch 0.4: called with the data, and the state (requires_grad, volatile, hooks); earlier: called
        # without arguments, and the state (data, grad, hooks, requires_grad, volatile).
        state = node.state if isinstance(node.state, tuple) else ()
        gradient = None
        if data is None and len(state) == 5:
            data, gradient, requires_grad = state[0], state[1], state[3]
        elif requires_grad is None and len(state) == 3:
            requires_grad = state[0]
        info = self.tensor(data)
        if info is None:
            return None
        parts = info.parts + self._tensors([("grad", gradient)])
        return info._replace(requires_grad=as_flag(requires_grad), kind="parameter", parts=parts)

    def _parameter_with_state(self, node: Call, args: Args) -> TensorInfo | None:
        info = self._parameter(node, args)
        return None if info is None else info._replace(parts=info.parts + self._attributes(args[3])[0])

    def _variable(self, node: Call, args: Args) -> TensorInfo | None:
        info = self._parameter(node, args)
        return None if info is None else info._replace(kind=None)

    def _quantized(self, _: Call, args: Args) -> TensorInfo:
        """A tensor of integers with its scheme."""
        storage, offset, size, stride, quantizer, requires_grad, *_rest = args
        info = self._strided(storage, offset, size, stride, requires_grad)
        if not (isinstance(quantizer, tuple) and quantizer and isinstance(quantizer[0], Global)):
            raise malformed_tensor("a quantised tensor without a quantiser")
        scheme = quantizer[0].name
        names = ("scale", "zero_point") if scheme == "per_tensor_affine" else ("scales", "zero_points", "axis")
        values = list(zip(names, quantizer[1:], strict=False))
        details = tuple((name, value) for name, value in values if isinstance(value, int | float))
        return info._replace(layout=scheme, parts=self._tensors(values), details=details)

    def _sparse(self, _: Call, args: Args) -> TensorInfo:
        """A COO tensor, or a compressed one of rows, columns or blocks."""
        layout, data = as_layout(args[0]), args[1]
        fields = SPARSE_PARTS.get(layout)
        if fields is None or not isinstance(data, tuple) or len(data) <= len(fields):
            raise malformed_tensor(f"a sparse tensor of layout {layout!r} without its parts")
        parts = self._tensors(zip(fields, data, strict=False))
        if len(parts) != len(fields):
            raise malformed_tensor(f"a {layout} tensor with parts that are not tensors")
        info = _composite(layout, parts, parts[-1][1], as_sizes(data[len(fields)]))
        coalesced = layout == "sparse_coo" and len(data) > 3 and data[3] is True
        return info._replace(details=(("is_coalesced", True),)) if coalesced else info

    def _nested(self, _: Call, args: Args) -> TensorInfo:
        """A nested tensor of the strided layout."""
        parts = self._tensors(zip(("buffer", "sizes", "strides", "offsets"), args, strict=False))
        if not parts or parts[0][0] != "buffer":
            raise malformed_tensor("a nested tensor without a buffer")
        return _composite("nested", parts, parts[0][1], parts[0][1].shape)

    def _jagged(self, _: Call, args: Args) -> TensorInfo:
        """A nested tensor of the jagged layout, from the pairs of its state."""
        pairs = nodes.state_pairs(args[0])
        self._spend(len(pairs))
        parts = self._tensors((field, nodes.lookup(pairs, field)) for field in ("values", "offsets", "lengths"))
        if not parts or parts[0][0] != "values":
            raise malformed_tensor("a jagged tensor without values")
        return _composite("jagged", parts, parts[0][1], parts[0][1].shape)

    def _from_type(self, _: Call, args: Args) -> TensorInfo | None:
        func, cls, arguments, state, *_rest = args
        # Not self.tensor(), which records the id of the node: this one is freed here, and its id may be reused.
        info = self._recognise(Call(func, arguments)) if isinstance(arguments, tuple) else None
        if info is None:
            return None  # the walk goes on and finds the tensors that it wraps
        named = nodes.global_of(cls)
        plain = named is not None and (named.module, named.name) in _PLAIN_CLASSES
        attributes, is_buffer = self._attributes(state)
        kind = "buffer" if is_buffer else info.kind
        known = {id(part) for _, part in info.parts}
        parts = tuple((name, part) for name, part in attributes if id(part) not in known)
        return info._replace(subclass=None if plain else nodes.class_name(cls), kind=kind, parts=info.parts + parts)

    def _on_manifold(self, node: Call, _: Args) -> TensorInfo | None:
        """
        A tensor of geoopt, a plain one with a manifold: ``functools.partial(…, build_fn=f)(*arguments of f, state,
        class, manifold, requires_grad)``.
        """
        made = node.func.state if isinstance(node.func, Call) else None
        pairs = nodes.mapping_pairs(made[2]) if isinstance(made, tuple) and made[2:] else None
        if not isinstance(node.args, tuple) or len(node.args) < 4:
            return None
        *arguments, _state, cls, manifold, requires_grad = node.args
        info = self._recognise(Call(nodes.lookup(pairs or [], "build_fn"), tuple(arguments)))
        if info is None:
            return None
        name, parts = nodes.class_name(cls), (*info.parts, *self._tensors([("manifold", manifold)]))
        kind = "parameter" if name.endswith("Parameter") else info.kind
        return info._replace(subclass=name, requires_grad=as_flag(requires_grad), kind=kind, parts=parts)

    def _from_cpu(self, _: Call, args: Args) -> TensorInfo | None:
        """An xla, mtia or maia tensor, saved as a CPU tensor or a numpy array with its values."""
        data, _dtype, device, requires_grad, *_rest = args
        info = self.tensor(data) or self._from_numpy(data)
        return info and info._replace(location=as_device(device), requires_grad=requires_grad is True)

    def _attributes(self, state: Inert) -> tuple[Parts, bool]:
        """Return the tensors in a state, and whether it has the attribute that marks plain tensors of nn.Buffer."""
        known = self._states.get(id(state))
        if known is not None:
            self._spend(known[0])
            return known[1:]
        pairs, cycles, left = nodes.state_pairs(state), self._cycles, self._parts_left
        self._spend(len(pairs))
        found = self._parts(pairs), nodes.lookup(pairs, "_is_buffer") is True
        if cycles == self._cycles:  # in a cycle, the result depends on where the walk began
            self._states[id(state)] = left - self._parts_left, *found
        return found

    def _parts(self, attributes: nodes.Pairs) -> Parts:
        """Return the tensors among attributes, by name; those in a list or dict, too, but no deeper."""
        parts: list[tuple[str, TensorInfo]] = []
        for name, value in attributes:
            label = name if isinstance(name, str) else nodes.class_name(name)
            if isinstance(value, list | tuple | Dict):
                below = list(nodes.children(value))
                self._spend(len(below))
                parts += self._tensors(
                    (f"{label}.{c if isinstance(c, str | int) else '?'}", child) for c, child in below
                )
            else:
                parts += self._tensors([(label, value)])
        return tuple(parts)

    def _tensors(self, named: Iterable[tuple[str, Inert]]) -> Parts:
        """Return the tensors among named nodes, with their names."""
        return tuple((name, info) for name, node in named if (info := self.tensor(node)) is not None)


_MOST_ARGS = 8
_NO_ARGS = (None,) * _MOST_ARGS

_PLAIN_CLASSES = {
    ("torch", "Tensor"),
    ("torch._tensor", "Tensor"),
    ("torch.tensor", "Tensor"),
    ("torch.nn.parameter", "Parameter"),
    ("torch.nn.parameter", "Buffer"),
}


_Rule: TypeAlias = "Callable[[Rebuilder, Call, Args], TensorInfo | None]"

_RULES: dict[tuple[str, str], _Rule] = {
    ("torch._utils", "_rebuild_tensor"): Rebuilder._v2,  # without what v2 added
    ("torch._utils", "_rebuild_tensor_v2"): Rebuilder._v2,
    ("torch._utils", "_rebuild_tensor_v3"): Rebuilder._v3,
    ("torch._utils", "_rebuild_parameter"): Rebuilder._parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): Rebuilder._parameter_with_state,
    ("torch._utils", "_rebuild_qtensor"): Rebuilder._quantized,
    ("torch._utils", "_rebuild_sparse_tensor"): Rebuilder._sparse,
    ("torch._utils", "_rebuild_sparse_csr_tensor"): Rebuilder._sparse,
    ("torch._utils", "_rebuild_nested_tensor"): Rebuilder._nested,
    ("torch._utils", "_rebuild_meta_tensor_no_storage"): lambda _, _call, args: meta(args),
    ("torch._utils", "_rebuild_wrapper_subclass"): lambda _, _call, args: wrapper(args),
    ("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"): Rebuilder._from_cpu,
    ("torch._utils", "_rebuild_device_tensor_from_numpy"): Rebuilder._from_cpu,
    ("torch._utils", "_rebuild_xla_tensor"): Rebuilder._from_cpu,
    ("torch._tensor", "_rebuild_from_type"): Rebuilder._from_type,
    ("torch._tensor", "_rebuild_from_type_v2"): Rebuilder._from_type,
    ("torch.tensor", "_rebuild_from_type"): Rebuilder._from_type,
    ("torch.nested._internal.nested_tensor", "_rebuild_njt"): Rebuilder._jagged,
    ("torch", "tensor"): lambda _, _call, args: scalar(args[0]),  # by modules that keep numbers and save tensors
    ("geoopt.tensor", "_rebuild_manifold_tensor"): Rebuilder._on_manifold,
    ("torch.nn.parameter", "Parameter"): Rebuilder._parameter,
    ("torch.nn.parameter", "UninitializedParameter"): lambda _, _call, args: uninitialized(args),
    ("torch.nn.parameter", "UninitializedBuffer"): lambda _, _call, args: uninitialized(args),
    ("torch.autograd", "Variable"): Rebuilder._variable,
    ("torch.autograd.variable", "Variable"): Rebuilder._variable,
}


def _makes_tensors(func: Inert) -> bool:
    """Return whether calls of a function may make tensors, if arrays do not count as such."""
    func = nodes.partial_of(func) if type(func) is Call else func
    return type(func) is Global and ((func.module, func.name) in _RULES or is_tensor_class(func))


def _composite(layout: str, parts: Parts, main: TensorInfo, shape: tuple[int, ...]) -> TensorInfo:
    """Return a tensor whose bytes are those of its parts; ``main`` has its values."""
    return TensorInfo(main.dtype, shape, (), 0, None, main.location, main.requires_grad, layout=layout, parts=parts)


def meta(args: Args) -> TensorInfo:
    """Return a tensor on the meta device, which has no bytes."""
    dtype, size, stride, requires_grad, *_rest = args
    return _without_bytes(dtype, size, stride, 0, "meta", requires_grad)


def wrapper(args: Args) -> TensorInfo:
    """Return a wrapper subclass; the tensors that it wraps are in its state."""
    cls, dtype, size, stride, offset, layout, device, requires_grad = args
    info = _without_bytes(dtype, size, stride, offset, as_device(device), requires_grad)
    return info._replace(layout=as_layout(layout), subclass=nodes.class_name(cls))


def _without_bytes(
    dtype: Inert, size: Inert, stride: Inert, offset: Inert, device: str, requires_grad: Inert
) -> TensorInfo:
    shape, steps = as_sequence(size), as_sequence(stride)
    info = TensorInfo(as_dtype(dtype), shape, steps, offset, None, device, requires_grad is True)
    check_extent(info)
    return info


def uninitialized(args: Args) -> TensorInfo:
    """Return a lazy parameter or buffer that has no shape yet."""
    float32 = dtypes.BY_NAME["float32"]
    return TensorInfo(float32, (), (), 0, None, "cpu", args[0] is True, "parameter", "uninitialized")


def scalar(value: Inert) -> TensorInfo | None:
    """Return the tensor that ``torch.tensor`` makes from a number; None if it is not such a number."""
    if type(value) is float:
        try:
            name, data = "float32", pack("<f", value)
        except OverflowError:
            name, data = "float32", pack("<f", copysign(inf, value))
    elif type(value) is int and -(1 << 63) <= value < 1 << 63:
        name, data = "int64", value.to_bytes(8, "little", signed=True)
    else:
        return None
    ref = StorageRef("number", "cpu", len(data), BytesSource(data), 0)
    return TensorInfo(dtypes.BY_NAME[name], (), (), 0, ref, "cpu", requires_grad=False)


def as_sequence(node: Inert) -> tuple[Inert, ...]:
    """Return a shape or strides as a tuple; ``check_extent`` checks the numbers."""
    if type(node) is tuple:
        return node
    if isinstance(node, Call) and isinstance(node.args, tuple) and len(node.args) == 1:  # torch.Size((…,))
        node = node.args[0]
    if not isinstance(node, list | tuple):
        raise malformed_tensor("a tensor whose shape or strides are not a sequence")
    return tuple(node)


def as_sizes(node: Inert) -> tuple[int, ...]:
    """Return a shape, checked by itself, for tensors without strides and storage."""
    sizes = as_sequence(node)
    if len(sizes) > MAX_RANK or not all(map(is_size, sizes)) or not is_countable(sizes):
        raise malformed_tensor("a tensor whose shape is not a sequence of sizes")
    return sizes


def as_flag(node: Inert) -> bool | None:
    """Return the node if it is a bool, else None."""
    return node if isinstance(node, bool) else None


def as_dtype(node: Inert) -> DType:
    """Return the dtype that a name like ``torch.float32`` stands for; raise MalformedFile for others."""
    if isinstance(node, Global) and node.module == "torch" and node.name in dtypes.BY_NAME:
        return dtypes.BY_NAME[node.name]
    raise malformed_tensor(f"{nodes.class_name(node)} is not an element type")


def as_layout(node: Inert) -> str:
    """Return a layout's name without ``torch.``."""
    if isinstance(node, Call) and isinstance(node.args, tuple) and node.args:  # torch.serialization._get_layout
        node = node.args[0]
    name = node.name if isinstance(node, Global) else node
    return name.removeprefix("torch.") if isinstance(name, str) and len(name) <= _LONGEST_LAYOUT else "unknown"


def as_device(node: Inert) -> str:
    """Return the tag of a ``torch.device``, or of text in its place."""
    args = node.args[:2] if isinstance(node, Call) and isinstance(node.args, tuple) else (node,)
    texts = [str(arg) for arg in args if type(arg) is str or (type(arg) is int and 0 <= arg < 1 << 16)]
    refuse_long("a device tag", "", *texts)
    return ":".join(texts) or "unknown"


def is_tensor_class(func: Global) -> bool:
    """Return whether a name is an old tensor class of torch, such as ``torch.FloatTensor``."""
    return func.module in ("torch", "torch.cuda") and func.name.endswith("Tensor")
