"""Arrays of numpy as tensors: type and shape come from the pickle, the bytes from a string in it or from behind it."""

from __future__ import annotations

from ckptool.pickles.nodes import Block, Inert
from ckptool.pickles.numpy_values import encoded_bytes, numpy_array, raw_bytes
from ckptool.sources.source import BytesSource, Source
from ckptool.tensors import dtypes
from ckptool.tensors.tensor import StorageRef, TensorInfo, check_extent, row_major


class ArrayTensors:
    """The arrays of one pickle. What they share, their strings and the bytes in these, is decoded once."""

    def __init__(self) -> None:
        self._sources: dict[int, BytesSource] = {}
        """The bytes of arrays, by the id of the string that has them, which lives as long as the source."""
        self._decoded: dict[int, bytes | None] = {}

    def tensor(self, node: Inert) -> TensorInfo | None:
        """
        Return an array as a tensor; None if it is none, or of a type that torch does not have.

        Raises:
            MalformedFile: It contradicts itself.
        """
        array = numpy_array(node, self.raw)
        if array is None or array.data is None or array.dtype not in dtypes.BY_NAME:
            return None
        source, offset, nbytes = self._elements(array.data)
        sizes = row_major([array.shape[axis] for axis in array.axes])
        stride = tuple(step for _, step in sorted(zip(array.axes, sizes, strict=True)))
        ref = StorageRef("numpy", "cpu", nbytes, source, offset, array.big_endian)
        info = TensorInfo(dtypes.BY_NAME[array.dtype], array.shape, stride, 0, ref, "cpu")
        check_extent(info)
        return info

    def raw(self, node: Inert) -> bytes | None:
        """Return the bytes that a text or a call of the codec stands for: once for each, however many share it."""
        text = encoded_bytes(node)
        if id(text) not in self._decoded:
            self._decoded[id(text)] = raw_bytes(text)
        return self._decoded[id(text)]

    def _elements(self, data: bytes | Block) -> tuple[Source, int, int]:
        """Return where an array's bytes are: a source, their offset in it, and how many they are."""
        if isinstance(data, Block):
            return data.source, data.offset, data.nbytes
        source = self._sources.get(id(data))
        if source is None:  # arrays may share their bytes
            source = self._sources[id(data)] = BytesSource(data)
        return source, 0, source.nbytes
