"""Tensors of a caller (for ``save``) as ``TensorInfo``; their bytes stay where they are."""

from __future__ import annotations

import sys
from ctypes import string_at
from typing import TYPE_CHECKING, Any, Final

from ckptool.errors import UnsupportedFeature
from ckptool.sources.source import BytesSource, Source
from ckptool.tensors import dtypes
from ckptool.tensors.dtypes import DType, spelled
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import SPARSE_PARTS, Kind, StorageRef, TensorInfo, row_major

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

_CLASSES: Final = ("Tensor", "Parameter", "Buffer")
_OF_BUFFERS: Final = frozenset({"persistent", "_is_buffer"})
"""Attributes that torch itself gives a Buffer."""


class StorageSource(Source):
    """The bytes of a storage of torch, on whichever device it is."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        import torch

        self.nbytes = storage.nbytes()
        self._bytes = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def read(self, offset: int, nbytes: int) -> bytes:
        piece = self._bytes[offset : offset + nbytes].cpu()
        return string_at(piece.data_ptr(), nbytes)


class CallerTensors:
    """Makes the facts of tensors that a file would have. Those with one storage, or array, share it here, too."""

    def __init__(self) -> None:
        self._storages: dict[tuple[object, ...], StorageRef] = {}
        self._kept: list[object] = []  # keeps arrays alive, so that their ids stay unique
        self.with_attributes: dict[str, None] = {}
        """Names of tensors with attributes, which are not among their facts."""

    def info(self, name: str, value: object, location: str | None = None) -> TensorInfo | None:
        """
        Return the facts of a tensor of torch, an array of numpy or a lazy tensor; None for anything else.

        Its device is ``location``, if one is given.

        Raises:
            UnsupportedFeature: It is of a class, a layout or a type that cannot be written.
        """
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        if isinstance(value, LazyTensor):
            info, storage = value.info, value.info.storage
            if location is None or storage is None:
                return info
            return info._replace(location=location, storage=storage._replace(location=location))
        if torch is not None and isinstance(value, torch.Tensor):
            return self._of_torch(name, value, location or str(value.device))
        if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
            return self._of_array(name, numpy.asanyarray(value), location or "cpu")
        return None

    def _of_torch(self, name: str, tensor: torch.Tensor, location: str) -> TensorInfo:
        layout, cls = str(tensor.layout).removeprefix("torch."), type(tensor)
        if cls.__name__ not in _CLASSES or cls.__module__.partition(".")[0] != "torch":
            raise _unsupported(name, f"is a {cls.__module__}.{cls.__name__}")
        if tensor.is_nested or (layout != "strided" and layout not in SPARSE_PARTS):
            raise _unsupported(name, f"has the layout {'nested' if tensor.is_nested else layout}")
        if not _OF_BUFFERS.issuperset(vars(tensor)):
            self.with_attributes[name] = None
        info = self._of_plain(name, tensor.detach(), layout, location)
        kind: Kind | None = "parameter" if cls.__name__ == "Parameter" else None
        return info._replace(kind=kind, requires_grad=tensor.requires_grad)

    def _of_plain(self, name: str, tensor: torch.Tensor, layout: str, location: str) -> TensorInfo:
        dtype, shape = _dtype(name, spelled(tensor.dtype)), tuple(tensor.shape)
        if layout != "strided":
            # The public names refuse a COO tensor that is not coalesced.
            mark = "_" if layout == "sparse_coo" else ""
            found = {part: getattr(tensor, mark + part)() for part in SPARSE_PARTS[layout]}
            parts = tuple((part, self._of_plain(name, one, "strided", location)) for part, one in found.items())
            details = (("is_coalesced", True),) if layout == "sparse_coo" and tensor.is_coalesced() else ()
            return TensorInfo(dtype, shape, (), 0, None, location, layout=layout, parts=parts, details=details)
        if tensor.is_meta:
            return TensorInfo(dtype, shape, tensor.stride(), 0, None, "meta")
        storage = tensor.untyped_storage()
        place = (str(storage.device), storage.data_ptr(), storage.nbytes() // dtype.itemsize * dtype.itemsize, location)
        known = self._storages.get(place)
        if known is None:
            known = StorageRef(name, location, place[2], StorageSource(storage), 0)
            if storage.data_ptr():  # empty storages have no memory to share
                self._storages[place] = known
        info = TensorInfo(dtype, shape, tensor.stride(), int(tensor.storage_offset()), known, location)
        info = info._replace(conj=tensor.is_conj(), neg=tensor.is_neg())
        return self._with_scheme(name, tensor, info) if tensor.is_quantized else info

    def _with_scheme(self, name: str, tensor: torch.Tensor, info: TensorInfo) -> TensorInfo:
        """Return the facts of a quantised tensor, with its scales and zero points."""
        scheme = str(tensor.qscheme()).removeprefix("torch.")
        if scheme.startswith("per_tensor"):
            details = (("scale", tensor.q_scale()), ("zero_point", tensor.q_zero_point()))
            return info._replace(layout="per_tensor_affine", details=details)
        found = {"scales": tensor.q_per_channel_scales(), "zero_points": tensor.q_per_channel_zero_points()}
        parts = tuple((part, self._of_plain(name, one, "strided", info.location)) for part, one in found.items())
        return info._replace(layout=scheme, parts=parts, details=(("axis", tensor.q_per_channel_axis()),))

    def _of_array(self, name: str, array: NDArray[Any], location: str) -> TensorInfo:
        import numpy as np

        if type(array) not in (np.ndarray, np.memmap):
            raise _unsupported(name, f"is a {type(array).__module__}.{type(array).__name__}")
        dtype = _dtype(name, array.dtype.name)
        known = self._storages.get((id(array), location))
        if known is None:
            self._kept.append(array)
            place = id(array), location
            if array.dtype.byteorder == ">":
                array = array.astype(array.dtype.newbyteorder("<"))
            packed = np.ascontiguousarray(array).reshape(-1)
            source: Source = BytesSource(packed.view(np.uint8).data if packed.size else b"")
            known = self._storages[place] = StorageRef(name, location, source.nbytes, source, 0)
        return TensorInfo(dtype, array.shape, row_major(array.shape), 0, known, location)


def _dtype(name: str, dtype: str) -> DType:
    if dtype not in dtypes.BY_NAME:
        raise _unsupported(name, f"is of type {dtype}")
    return dtypes.BY_NAME[dtype]


def _unsupported(name: str, fact: str) -> UnsupportedFeature:
    hint = "Give a plain torch.Tensor with its values."
    return UnsupportedFeature(f"tensor {name!r} {fact}, which cannot be written", kind="given-tensor", hint=hint)
