"""
A tree as it goes into a new file: storages numbered anew, device tags set, some nodes replaced by others.

``TreeRewriter`` is the ``substitute`` of ``pickle_writer``: it is asked about every node, and collects on the way the
storages that the new pickle refers to. What it does not know, it leaves as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from ckptool.errors import MigrationRefused
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Call, Dict, Global, Inert, PersistentId
from ckptool.pickles.writer import PlainTensor
from ckptool.tensors import dtypes
from ckptool.tensors.payloads import StoragePayload
from ckptool.tensors.rebuild import Rebuilder
from ckptool.tensors.tensor import StorageRef, TensorInfo

Place: TypeAlias = tuple[Global, str, str, int]
"""Class, key, location and size in elements of a storage, as a persistent id says them."""

_UNTYPED = Global("torch.storage", "UntypedStorage")
_CLASSES: dict[str | None, Global] = {
    None: _UNTYPED,
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
"""Calls round that of a plain tensor: their first argument is the tensor, or the first two are how to make it."""


class TreeRewriter:
    """Answers with the node to write in place of each node, and knows the storages that were written."""

    def __init__(
        self, rebuilder: Rebuilder, location: str | None, recast: Callable[[TensorInfo], TensorInfo] | None = None
    ) -> None:
        self._rebuilder = rebuilder
        self._location = location
        self._recast = recast or (lambda info: info)
        self._replacements: dict[int, Inert] = {}
        self._answers: dict[int, Inert] = {}
        self._final: set[int] = set()
        self._kept: list[Inert] = []  # an id is a node's only while it lives
        self._keys: dict[tuple[int, int, int], str] = {}
        self._units: dict[str, int] = {}
        self.storages: list[StoragePayload] = []
        """The storages of the new file, in the order of their keys."""
        self.retagged: dict[str, int] = {}
        """Storages and devices by the tag that they had before, where it changed."""

    def replace(self, node: Inert, other: Inert) -> None:
        """Write ``other`` wherever ``node`` stands."""
        self._kept += [node, other]
        self._replacements[id(node)] = other

    def __call__(self, node: Inert) -> Inert:
        """Return the node to write in place of ``node``; the same one each time, so that ties stay ties."""
        while id(node) in self._replacements:
            node = self._replacements[id(node)]
        if id(node) in self._final or not isinstance(node, Call | PersistentId):
            return node
        answer = self._answers.get(id(node))
        if answer is None:
            answer = self._persistent_id(node) if isinstance(node, PersistentId) else self._call(node)
            self._kept.append(node)
            self._answers[id(node)] = answer
        return answer

    def tensor(self, info: TensorInfo, *, detached: bool = False) -> Inert:
        """
        Return the calls that make a tensor, as ``torch.save`` would write them; not a parameter if ``detached``.

        Raises:
            MigrationRefused: It is of a layout that only its own class can write.
        """
        info = self._recast(info)
        requires_grad = info.requires_grad is True and not detached
        made = self._made(info, requires_grad=requires_grad and info.kind != "parameter")
        if info.kind == "parameter" and not detached:
            made = self._finish(
                Call(Global("torch._utils", "_rebuild_parameter"), (made, requires_grad, Call(_ORDERED_DICT, ())))
            )
        return made

    def _made(self, info: TensorInfo, *, requires_grad: bool, spelled: bool = False) -> Inert:
        """Return what makes a tensor: a call if it is to be ``spelled`` out, else maybe something shorter."""
        if info.layout == "strided" and info.storage is not None:
            return self._strided(info, info.storage, requires_grad=requires_grad, spelled=spelled)
        hooks = Call(_ORDERED_DICT, ())
        parts = dict(info.parts)
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
            place, offset = self._place(info.storage, info)
            args = (self._reference(place), offset, info.shape, info.stride, quantizer, requires_grad, hooks)
            return self._finish(Call(Global("torch._utils", "_rebuild_qtensor"), args))
        raise MigrationRefused(
            f"a tensor that only its own class can write: {info.subclass or info.layout}", kind="unsupported-tensor"
        )

    def _strided(self, info: TensorInfo, storage: StorageRef, *, requires_grad: bool, spelled: bool) -> Inert:
        place, offset = self._place(storage, info)
        if info.dtype.storage_class is not None and not (info.conj or info.neg or spelled):
            return PlainTensor(*place, offset, info.shape, info.stride, requires_grad)
        hooks = Call(_ORDERED_DICT, ())
        args: tuple[Inert, ...] = (self._reference(place), offset, info.shape, info.stride, requires_grad, hooks)
        flags: nodes.Pairs = [(name, True) for name in ("conj", "neg") if getattr(info, name)]
        if info.dtype.storage_class is None:
            args = (*args, Global("torch", info.dtype.name))
        if flags:
            args = (*args, Dict(flags))
        name = "_rebuild_tensor_v2" if info.dtype.storage_class else "_rebuild_tensor_v3"
        return self._finish(Call(Global("torch._utils", name), args))

    def _place(self, storage: StorageRef, info: TensorInfo) -> tuple[Place, int]:
        """Return a tensor's storage, and its offset in it in elements: views refer to what they view."""
        name = info.dtype.storage_class
        itemsize = info.dtype.itemsize if name else 1
        offset = info.storage_offset
        if storage.whole is not None:
            offset += (storage.offset - storage.whole.offset) * info.dtype.packed // info.dtype.itemsize
            storage = storage.whole
        return self._storage(storage, _CLASSES[name], itemsize, info.dtype.swap_nbytes), offset

    def _storage(self, storage: StorageRef, cls: Global, itemsize: int, unit: int) -> Place:
        known = (id(storage.source), storage.offset, storage.nbytes)
        key = self._keys.get(known)
        if key is None:
            key = self._keys[known] = str(len(self.storages))
            self.storages.append(StoragePayload(storage, unit))
            self._count(storage.location)
        if self._units.setdefault(key, unit) != unit and storage.big_endian:
            raise MigrationRefused(
                f"storage {storage.key!r} is big-endian, and of two sizes of elements", kind="unsupported-tensor"
            )
        return cls, key, self._location or storage.location, storage.nbytes // itemsize

    def _persistent_id(self, node: PersistentId) -> Inert:
        sourced = nodes.sourced_class(node.pid)
        if sourced:
            return sourced[0]  # the class alone: its source has no place in a zip
        info = self._rebuilder.tensor(node)
        if info is not None:  # 0.1.x refers to whole tensors
            return self.tensor(info)
        found = self._rebuilder.storage(node)
        if found is None:
            return node
        named = nodes.global_of(node.pid[1]) if isinstance(node.pid, tuple) and len(node.pid) > 1 else None
        untyped = named is not None and "Untyped" in named.name
        cls = _UNTYPED if untyped else _CLASSES[found.dtype.storage_class or "ByteStorage"]
        unit = found.dtype.swap_nbytes
        if untyped and found.ref.big_endian:
            raise MigrationRefused(
                f"storage {found.ref.key!r} is big-endian and does not say of what", kind="unsupported-tensor"
            )
        itemsize = 1 if untyped else found.dtype.itemsize
        # A view that no tensor of its own is made of stands for its own elements alone.
        return self._reference(self._storage(found.ref, cls, itemsize, unit))

    def _call(self, node: Call) -> Inert:
        func = nodes.global_of(node.func)
        if func is None:
            return node
        if func.name == "_rebuild_tensor_v2":
            info = self._rebuilder.tensor(node)
            if info is not None and _is_plain(node, info):
                return self.tensor(info)
        named = (func.module, func.name)
        if named == ("torch.storage", "_load_from_bytes"):
            found = self._rebuilder.storage(node)
            if found is not None:
                cls = _CLASSES[found.dtype.storage_class or "ByteStorage"]
                place = self._storage(found.ref, cls, found.dtype.itemsize, found.dtype.swap_nbytes)
                return self._reference(place)
        if self._location is not None and named == ("torch", "device") and isinstance(node.args, tuple):
            return self._device(node)
        if self._location is not None and func.name in _DEVICE_ARGUMENT and isinstance(node.args, tuple):
            self._count(str(node.args[2]) if len(node.args) > 2 and isinstance(node.args[2], str) else "unknown")
            return self._finish(Call(node.func, (*node.args[:2], self._location, *node.args[3:])))
        info = self._rebuilder.tensor(node)
        return node if info is None or info.storage is None else self._tensor_call(node, func, info, info.storage)

    def _tensor_call(self, node: Call, func: Global, info: TensorInfo, storage: StorageRef) -> Inert:
        """Return the call to write for one that makes a tensor: itself, unless its memory is not to be what it was."""
        changed = self._recast(info) is not info
        if storage.whole is None and not storage.big_endian and not changed:
            return node
        if func.name in _DEVICE_ARGUMENT:  # names the type once more, and keeps its values in ways of its own
            if changed:
                raise MigrationRefused(
                    "a tensor that is built on its device cannot be cast where it stands",
                    kind="unsupported-cast",
                    hint="Take the weights alone: `form='state_dict'` or `form='safetensors'`.",
                )
            return node
        if func.name in _PARAMETER or (func.name in _FROM_TYPE and info.kind == "parameter"):
            return node  # what it is made of is a call of its own
        if func.name in _FROM_TYPE and isinstance(node.args, tuple):
            made = self._made(self._recast(info), requires_grad=info.requires_grad is True, spelled=True)
            assert isinstance(made, Call)  # noqa: S101 - one of torch._utils
            return self._finish(Call(node.func, (made.func, node.args[1], made.args, *node.args[3:])))
        return self.tensor(info)

    def _device(self, node: Call) -> Inert:
        assert self._location is not None  # noqa: S101 - the caller looked
        old = ":".join(str(part) for part in node.args if isinstance(part, str | int))
        kind, _, index = self._location.partition(":")
        args: tuple[Inert, ...] = (kind, int(index)) if index else (kind,)
        if old != self._location:
            self._count(old)
        return self._finish(Call(node.func, args))

    def _count(self, old: str) -> None:
        if self._location is not None and old != self._location:
            self.retagged[old] = self.retagged.get(old, 0) + 1

    def _reference(self, place: Place) -> Inert:
        return self._finish(PersistentId(("storage", *place)))

    def _finish(self, node: Inert) -> Inert:
        self._kept.append(node)
        self._final.add(id(node))
        return node


def _is_plain(node: Call, info: TensorInfo) -> bool:
    """Say whether all that a call says of a tensor is in ``info``: that it has no hooks, and no state of its own."""
    storage = info.storage
    if storage is None or storage.whole is not None:
        return storage is not None  # a view of a storage is written as a view of the whole
    if len(node.args) != 6 or not _is_bare(node):
        return False
    place, _, _, _, requires_grad, hooks = node.args
    if type(place) is not PersistentId or type(requires_grad) is not bool:
        return False
    if type(hooks) is not Call or hooks.args != () or not _is_bare(hooks):
        return False
    cls, made = nodes.global_of(place.pid[1]), nodes.global_of(hooks.func)
    typed = cls is not None and cls.name == info.dtype.storage_class
    return typed and made is not None and made.name == "OrderedDict" and made.module == "collections"


def _is_bare(node: Call) -> bool:
    return node.state is None and node.pairs is None and node.items is None
