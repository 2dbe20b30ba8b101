"""Elements of 16 bits as float32, which loses nothing: a source of the wider bytes, made while they are read."""

from __future__ import annotations

from struct import pack, unpack
from typing import Final

from ckptool.tensors import dtypes
from ckptool.tensors.pieces import Piece, PiecesSource
from ckptool.tensors.tensor import StorageRef, TensorInfo, row_major

NARROW: Final = ("float16", "bfloat16")


def widened(info: TensorInfo) -> TensorInfo:
    """Return the facts of a tensor of float16 or bfloat16 as one of float32, packed; its bytes are made when read."""
    source = _WideningSource(info)
    storage = StorageRef("widened", info.location, source.nbytes, source, 0)
    return TensorInfo(dtypes.BY_NAME["float32"], info.shape, row_major(info.shape), 0, storage, info.location)


class _WideningSource:
    is_compressed = False

    def __init__(self, info: TensorInfo) -> None:
        assert info.storage is not None and info.dtype.name in NARROW  # noqa: PT018 - the caller saw it
        whole = Piece((0,) * len(info.shape), info.shape, "", lambda: info)
        self._dtype = info.dtype.name
        self._narrow = PiecesSource(info.shape, info.dtype, [whole], info.storage.source.cancellation)
        self.cancellation = info.storage.source.cancellation
        self.nbytes = 4 * info.numel

    def read(self, offset: int, nbytes: int) -> bytes:
        first, last = offset // 4, -(-(offset + nbytes) // 4)
        narrow = self._narrow.read(2 * first, 2 * (last - first))
        if self._dtype == "bfloat16":  # the upper half of a float32
            wide = bytearray(2 * len(narrow))
            wide[2::4], wide[3::4] = narrow[0::2], narrow[1::2]
        else:
            count = last - first
            wide = bytearray(pack(f"<{count}f", *unpack(f"<{count}e", narrow)))
        start = offset - 4 * first
        return bytes(wide[start : start + nbytes])

    def file_offset(self, offset: int) -> None:  # noqa: ARG002 - a source
        """No file has these bytes."""
        return

    def close(self) -> None:
        """Its bytes are another source's."""
