"""
The persistent ids of storages: ``("storage", class, key, location, numel[, view])``.

``numel`` counts elements of the class's type, or bytes for UntypedStorage. The view, in legacy streams only, is
``(key, offset, numel)`` in elements of the same type. See persistent_id in torch/serialization.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from ckptool.errors import AmbiguousFile, MalformedFile, UnsupportedFeature
from ckptool.limits import refuse_long
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Global, Inert
from ckptool.tensors import dtypes
from ckptool.tensors.dtypes import DType
from ckptool.tensors.tensor import MAX_SIZE, StorageRef, is_size

_SHORT: Final = 256


class View(NamedTuple):
    """A storage that is a slice of another."""

    key: str
    offset: int
    """In bytes, from the start of the root storage."""
    nbytes: int


class StorageId(NamedTuple):
    """A persistent id, its types checked."""

    dtype: DType
    """uint8 for UntypedStorage, as torch has it: its tensors say their type themselves."""
    key: str
    location: str
    nbytes: int
    view: View | None


_make_storage_id: "Callable[[tuple[DType, str, str, int, View | None]], StorageId]" = partial(tuple.__new__, StorageId)


class TypedStorage(NamedTuple):
    """A storage, and the element type that the file gives it."""

    ref: StorageRef
    dtype: DType


make_typed_storage: "Callable[[tuple[StorageRef, DType]], TypedStorage]" = partial(tuple.__new__, TypedStorage)


def storage_id(pid: Inert) -> StorageId | None:
    """
    Return the parts of a storage's persistent id, or None if it is about something else.

    Raises:
        MalformedFile: It is about a storage, and its parts are of the wrong kind.
        UnsupportedFeature: It names a storage class that is not known.
        LimitExceeded: Its key or its device tag is longer than any that was ever written.
    """
    if not (isinstance(pid, tuple) and len(pid) >= 5 and pid[0] == "storage"):
        return None
    _, cls, key, location, numel = pid if len(pid) == 5 else pid[:5]
    if type(key) is int:
        key = str(key)  # litgpt writes numbers
    if type(key) is not str or type(location) is not str or type(numel) is not int or not 0 <= numel < MAX_SIZE:
        raise MalformedFile("a storage whose key, location or size is of the wrong kind", kind="malformed-storage")
    if len(key) + len(location) > _SHORT:
        refuse_long("a storage's key or device tag", key, location)
    dtype = dtypes.BY_STORAGE_CLASS.get(cls.name) if type(cls) is Global else None
    if dtype is None:
        dtype = _dtype(cls)
    itemsize = dtype.itemsize
    view = None if len(pid) == 5 else _view(pid[5], itemsize)
    return _make_storage_id((dtype, key, location, numel * itemsize, view))


def unify(seen: TypedStorage, again: TypedStorage) -> TypedStorage:
    """
    Return the storage that a second reference to one key means.

    An empty storage has no type of its own: torch, too, gives each reference the type that it asks for.

    Raises:
        AmbiguousFile: The two differ in type, size or device.
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


def _dtype(cls: Inert) -> DType:
    found = cls if isinstance(cls, Global) else nodes.global_of(cls)
    # torch, too, goes by the class's name alone: old files say torch.cuda.FloatStorage.
    if found is not None and found.name in dtypes.BY_STORAGE_CLASS:
        return dtypes.BY_STORAGE_CLASS[found.name]
    if found is not None and found.name in ("UntypedStorage", "_UntypedStorage"):
        return dtypes.BY_NAME["uint8"]
    raise UnsupportedFeature(f"storage class {nodes.class_name(cls)} is not known", kind="storage-class")


def _view(view: Inert, itemsize: int) -> View | None:
    if view is None:
        return None
    if not (isinstance(view, tuple) and len(view) == 3 and isinstance(view[0], str) and all(map(is_size, view[1:]))):
        raise MalformedFile("a storage view of the wrong kind", kind="malformed-storage")
    return View(view[0], view[1] * itemsize, view[2] * itemsize)
