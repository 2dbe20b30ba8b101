"""
A pickled tree to that of a new file: storages numbered anew, device tags set, nodes replaced.

``TreeRewriter`` is the ``substitute`` of ``pickles.writer``, which calls it for every node and writes what it returns.

1. Nodes of the source are never changed; each gets one answer, however often it is met, so that ties stay ties. A plain
   tensor gets an equal answer each time: the writer identifies it by the source's node.
2. Nodes that it makes are final: the writer calls it for them too, and a device tag must not be counted again.
3. An id is a node's only while the node lives, so everything whose id is kept is kept as well.
4. Nodes that it does not know stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from ckptool.errors import MigrationRefused
from ckptool.migration.changes import DeviceTags, new_tag
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Call, Dict, Global, Inert, PersistentId, PlainTensor
from ckptool.pickles.numpy_values import as_numpy_writes_it, is_array
from ckptool.tensors import dtypes
from ckptool.tensors.payloads import StoragePayload
from ckptool.tensors.rebuild import Rebuilder
from ckptool.tensors.tensor import StorageRef, TensorInfo

StorageId: TypeAlias = tuple[Global, str, str, int]
"""Class, key, location and number of elements of a storage, as in its persistent id."""

UNTYPED = Global("torch.storage", "UntypedStorage")
_CLASSES: dict[str | None, Global] = {
    None: UNTYPED,
    **{name: Global("torch", name) for name in dtypes.BY_STORAGE_CLASS},
}
_ORDERED_DICT = Global("collections", "OrderedDict")
_LAYOUT = Global("torch.serialization", "_get_layout")

_DEVICE_ARGUMENT = {
    "_rebuild_device_tensor_from_cpu_tensor",
    "_rebuild_device_tensor_from_numpy",
    "_rebuild_xla_tensor",
}
"""Calls whose third argument names the device that a tensor goes to."""

_PARAMETER = {"_rebuild_parameter", "_rebuild_parameter_with_state"}
_FROM_TYPE = {"_rebuild_from_type", "_rebuild_from_type_v2"}
"""Calls with a plain tensor inside: their first argument, or for ``_FROM_TYPE`` made by the first with the third."""


def same(info: TensorInfo) -> TensorInfo:
    """Return a tensor as it is."""
    return info


class TreeRewriter:
    """Returns the node to write instead of each node, and collects the storages that the written nodes refer to."""

    swaps_bytes = True
    """Whether big-endian storages are written in little-endian order."""

    def __init__(
        self, rebuilder: Rebuilder, location: DeviceTags | None, recast: Callable[[TensorInfo], TensorInfo] = same
    ) -> None:
        self._rebuilder = rebuilder
        self._location = location
        self._cast = recast
        self._replacements: dict[int, Inert] = {}
        self._answers: dict[int, Inert] = {}
        self._final: set[int] = set()
        self._kept: list[Inert] = []
        self._keys: dict[tuple[int, int, int], str] = {}
        """New key of each storage, by its source, offset and size."""
        self._units: dict[str, int] = {}
        """Size of the numbers in each storage, by new key: big-endian bytes are swapped by it."""
        self.storages: list[StoragePayload] = []
        """The storages of the new file, in the order of their keys."""
        self.retagged: dict[str, int] = {}
        """Storages and devices by the tag that they had before, where it changed."""

    def replace(self, node: Inert, other: Inert) -> None:
        """Write ``other`` wherever ``node`` is."""
        self._kept += [node, other]
        self._replacements[id(node)] = other

    def replaced(self, node: Inert) -> Inert:
        """Return what replaces a node, or the node itself."""
        while id(node) in self._replacements:  # a replacement may be replaced too: a wrapper in a wrapper
            node = self._replacements[id(node)]
        return node

    def for_another_file(self) -> TreeRewriter:
        """Return a rewriter with the same replacements and without storages; both share ``retagged``."""
        other = TreeRewriter(self._rebuilder, self._location, self._cast)
        other._replacements, other.retagged = self._replacements, self.retagged
        return other

    def __call__(self, node: Inert) -> Inert:
        """Return the node to write instead of ``node``; the same one each time, so that ties stay ties."""
        if id(node) in self._replacements:
            node = self.replaced(node)
        own, kind = id(node), type(node)
        if own in self._final or (kind is not Call and kind is not PersistentId):
            return node
        if own in self._answers:
            return self._answers[own]
        answer = self._call(node) if kind is Call else self._persistent_id(node)
        if answer is not node and type(answer) is not PlainTensor:
            self._kept.append(node)
            self._answers[own] = answer
        return answer

    def tensor(self, info: TensorInfo, *, detached: bool = False) -> Inert:
        """Return the calls that make a tensor, as ``torch.save`` would write them; not a parameter if ``detached``."""
        info = self._cast(info)
        requires_grad, is_parameter = info.requires_grad is True and not detached, info.kind == "parameter"
        made = self._made(info, requires_grad=requires_grad and not is_parameter)
        if not is_parameter or detached:
            return made
        facts = (made, requires_grad, Call(_ORDERED_DICT, ()))
        return self._finish(Call(Global("torch._utils", "_rebuild_parameter"), facts))

    def _made(self, info: TensorInfo, *, requires_grad: bool, spelled: bool = False) -> Inert:
        """Return the node that makes a tensor: a call if ``spelled``, else perhaps a shorter ``PlainTensor``."""
        storage = info.storage
        if info.layout == "strided" and storage is not None:
            storage_id, offset = self._storage_of(storage, info)
            is_classic = info.dtype.storage_class is not None
            if is_classic and not (info.conj or info.neg or spelled):  # most tensors
                return PlainTensor(*storage_id, offset, info.shape, info.stride, requires_grad)
            view: tuple[Inert, ...] = (self._reference(storage_id), offset, info.shape, info.stride)
            view += (requires_grad, Call(_ORDERED_DICT, ()))
            view += () if is_classic else (Global("torch", info.dtype.name),)
            bits: nodes.PairList = [(name, True) for name in ("conj", "neg") if getattr(info, name)]
            view += (Dict(bits),) if bits else ()
            name = "_rebuild_tensor_v2" if is_classic else "_rebuild_tensor_v3"
            return self._finish(Call(Global("torch._utils", name), view))
        hooks, parts = Call(_ORDERED_DICT, ()), dict(info.parts)
        if info.storage is None and info.location == "meta" and info.layout == "strided":
            facts = (Global("torch", info.dtype.name), info.shape, info.stride, requires_grad)
            return self._finish(Call(Global("torch._utils", "_rebuild_meta_tensor_no_storage"), facts))
        if info.layout.startswith("sparse_"):
            made = tuple(self._made(part, requires_grad=False) for part in parts.values())
            layout = Call(_LAYOUT, (f"torch.{info.layout}",))
            flags = (True,) if dict(info.details).get("is_coalesced") else ()
            whole = (layout, (*made, info.shape, *flags))
            return self._finish(Call(Global("torch._utils", "_rebuild_sparse_tensor"), whole))
        if info.storage is not None and info.layout.startswith("per_"):
            numbers = dict(info.details)
            scales = (parts.get("scales"), parts.get("zero_points"))
            values: tuple[Inert, ...] = (numbers.get("scale"), numbers.get("zero_point"))
            if scales[0] is not None and scales[1] is not None:
                values = (*(self._made(part, requires_grad=False) for part in scales if part), numbers.get("axis"))
            quantizer = (Global("torch", info.layout), *values)
            storage_id, offset = self._storage_of(info.storage, info)
            args = (self._reference(storage_id), offset, info.shape, info.stride, quantizer, requires_grad, hooks)
            return self._finish(Call(Global("torch._utils", "_rebuild_qtensor"), args))
        raise MigrationRefused(
            f"a tensor that only its own class can write: {info.subclass or info.layout}", kind="unsupported-tensor"
        )

    def _storage_of(self, storage: StorageRef, info: TensorInfo) -> tuple[StorageId, int]:
        """Return the id of a tensor's storage, and its offset in elements; views refer to the whole storage."""
        dtype, offset = info.dtype, info.storage_offset
        name, itemsize = dtype.storage_class, dtype.itemsize
        if storage.whole is not None:  # legacy files have views of storages; zips have whole storages alone
            offset += (storage.offset - storage.whole.offset) * dtype.packed // itemsize
            storage = storage.whole
        return self._storage(storage, _CLASSES[name], itemsize if name else 1, dtype.part_nbytes or itemsize), offset

    def _storage(self, storage: StorageRef, cls: Global, itemsize: int, unit: int) -> StorageId:
        nbytes, new = storage.nbytes, new_tag(self._location, storage.location)
        known = (id(storage.source), storage.offset, nbytes)
        key = self._keys.get(known)
        if key is None:
            key = self._keys[known] = self._new_key(storage)
            self.storages.append(StoragePayload(storage, unit))
            self._count(storage.location, new)
        # Bytes that two types share can be swapped for one of them only.
        if storage.big_endian and self.swaps_bytes and self._units.setdefault(key, unit) != unit:
            raise MigrationRefused(
                f"storage {storage.key!r} is big-endian, and of two sizes of elements", kind="unsupported-tensor"
            )
        return cls, key, new, nbytes // itemsize

    def _new_key(self, storage: StorageRef) -> str:  # noqa: ARG002 - for those that keep keys
        return str(len(self.storages))

    def _persistent_id(self, node: PersistentId) -> Inert:
        sourced = nodes.sourced_class(node.pid)
        if sourced:
            return sourced[0]  # the class alone: a zip does not hold its source
        info = self._rebuilder.tensor(node)
        if info is not None:  # 0.1.x refers to whole tensors
            return self.tensor(info)
        named = nodes.global_of(node.pid[1]) if isinstance(node.pid, tuple) and len(node.pid) > 1 else None
        return self._lone_storage(node, is_untyped=named is not None and "Untyped" in named.name)

    def _lone_storage(self, node: Inert, *, is_untyped: bool = False) -> Inert:
        """Return the reference to a storage that no tensor refers to; the same node if it is none."""
        found = self._rebuilder.storage(node)
        if found is None:
            return node
        if is_untyped and found.ref.big_endian:
            fact = f"storage {found.ref.key!r} is big-endian and does not say of what"
            raise MigrationRefused(fact, kind="unsupported-tensor")
        cls = UNTYPED if is_untyped else _CLASSES[found.dtype.storage_class or "ByteStorage"]
        itemsize = 1 if is_untyped else found.dtype.itemsize
        # It may be a view: only its own elements are written.
        return self._reference(self._storage(found.ref, cls, itemsize, found.dtype.swap_nbytes))

    def _call(self, node: Call) -> Inert:
        func = nodes.global_of(node.func)
        if func is None:
            return node
        if func.name == "_rebuild_tensor_v2":  # most calls: what they say is in ``info``, and shorter to write
            info = self._rebuilder.tensor(node)
            if info is not None and _is_plain(node, info):
                return self.tensor(info)
        if func.name == "NumpyArrayWrapper" and is_array(node):  # only joblib finds what follows it
            return self._finish(as_numpy_writes_it(node))
        named = (func.module, func.name)
        other = self._lone_storage(node) if named == ("torch.storage", "_load_from_bytes") else node
        other = self._moved(node, func) if other is node else other
        if other is not node:
            return other
        # Any other call that makes a tensor: a parameter, a sparse or quantised tensor, a subclass.
        info = self._rebuilder.tensor(node)
        if info is None or info.storage is None or info.is_array:
            return node
        return self._tensor_call(node, func, info, info.storage)

    def _tensor_call(self, node: Call, func: Global, info: TensorInfo, storage: StorageRef) -> Inert:
        """Return the call to write for one that makes a tensor: itself, unless the tensor's memory changes."""
        changed = self._cast(info) is not info
        if storage.whole is None and not storage.big_endian and not changed:
            return node
        if func.name in _DEVICE_ARGUMENT:  # it names the type too, and stores values its own way
            if changed:
                raise MigrationRefused(
                    "a tensor that is built on its device cannot be cast in place",
                    kind="unsupported-cast",
                    hint="Take the weights alone: `form='state_dict'` or `form='safetensors'`.",
                )
            return node
        if func.name in _PARAMETER or (func.name in _FROM_TYPE and info.kind == "parameter"):
            return node  # what it is made of is a call of its own
        if func.name in _FROM_TYPE and isinstance(node.args, tuple):
            made = self._made(self._cast(info), requires_grad=info.requires_grad is True, spelled=True)
            assert isinstance(made, Call)  # one of torch._utils
            return self._finish(Call(node.func, (made.func, node.args[1], made.args, *node.args[3:])))
        return self.tensor(info)

    def _moved(self, node: Call, func: Global) -> Inert:
        """Return the call to write for one that names a device; the same node if it names none, or the tag stays."""
        if not isinstance(node.args, tuple):
            return node
        is_device = self._location is not None and (func.module, func.name) == ("torch", "device")
        if is_device:
            old = ":".join(str(part) for part in node.args if isinstance(part, str | int))
        elif func.name in _DEVICE_ARGUMENT:
            old = str(node.args[2]) if len(node.args) > 2 and isinstance(node.args[2], str) else "unknown"
        else:
            return node
        new = new_tag(self._location, old)
        if new == old:
            return node
        self._count(old, new)
        if not is_device:
            return self._finish(Call(node.func, (*node.args[:2], new, *node.args[3:])))
        kind, _, index = new.partition(":")
        return self._finish(Call(node.func, (kind, int(index)) if index else (kind,)))

    def _count(self, old: str, new: str) -> None:
        if new != old:
            self.retagged[old] = self.retagged.get(old, 0) + 1

    def _reference(self, storage_id: StorageId) -> Inert:
        return self._finish(PersistentId(("storage", *storage_id)))

    def _finish(self, node: Inert) -> Inert:
        self._kept.append(node)
        self._final.add(id(node))
        return node


def _is_plain(node: Call, info: TensorInfo) -> bool:
    """Return whether ``info`` has everything that a call states about a tensor: no hooks, no state of its own."""
    storage, args = info.storage, node.args
    if storage is None or storage.whole is not None:
        return storage is not None  # a view of a storage is written as a view of the whole
    if len(args) != 6 or not node.state is node.pairs is node.items is None:
        return False
    reference, requires_grad, hooks = args[0], args[4], args[5]
    if type(reference) is not PersistentId or type(requires_grad) is not bool or type(hooks) is not Call:
        return False
    if hooks.args != () or not hooks.state is hooks.pairs is hooks.items is None:
        return False
    cls, made = nodes.global_of(reference.pid[1]), hooks.func
    typed = cls is not None and cls.name == info.dtype.storage_class
    return typed and type(made) is Global and made.name == "OrderedDict" and made.module == "collections"
