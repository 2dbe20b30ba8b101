"""Bytes that are made while they are read, from the first to the last: those of a tensor in another type, say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptool.cancellation import steps
from ckptool.errors import OutputFailed
from ckptool.sources.source import Source
from ckptool.tensors.dtypes import DType
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import StorageRef, TensorInfo, row_major


class MadeSource(Source):
    """``nbytes`` bytes that pieces are made of, one after the other, each time that it is read from its begin."""

    def __init__(self, name: str, nbytes: int) -> None:
        self.nbytes = nbytes
        self.name = name
        self._pieces: Iterator[bytes] = iter(())
        self._ahead = b""
        self._position = 0

    def made(self) -> Iterator[bytes]:
        """Yield the bytes in pieces, anew."""
        raise NotImplementedError

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return the bytes that follow those of the read before; one at 0 begins again."""
        if offset == 0:
            self._pieces, self._ahead, self._position = self.made(), b"", 0
        if offset != self._position:
            raise OutputFailed(f"tensor {self.name!r} was not read in order", kind="output-failed")
        found = [self._ahead]
        missing = nbytes - len(self._ahead)
        while missing > 0:
            found.append(next(self._pieces))
            missing -= len(found[-1])
        last = found.pop()
        end = len(last) + missing
        self._ahead = last[end:]
        self._position += nbytes
        if self._position >= self.nbytes:
            self._pieces = iter(())  # what they were made of takes memory
        return b"".join((*found, last[:end]))

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill a buffer, piece by piece."""
        for part in steps(buffer, self.cancellation):
            part[:] = self.read(offset, part.nbytes)
            offset += part.nbytes

    @property
    def was_read(self) -> bool:
        """Whether any of it was read."""
        return self._position > 0

    def tensor(self, like: TensorInfo, dtype: DType, shape: tuple[int, ...] | None = None) -> TensorInfo:
        """Return what has these bytes: in all else, and in its shape unless one is given, a tensor ``like`` this."""
        location = like.storage.location if like.storage is not None else like.location
        storage, size = StorageRef(self.name, location, self.nbytes, self, 0), like.shape if shape is None else shape
        made = like._replace(dtype=dtype, shape=size, stride=row_major(size), storage_offset=0, storage=storage)
        return made._replace(conj=False, neg=False, parts=())


class MadeWeight(MadeSource):
    """The bytes of a weight that is computed of others."""

    def __init__(self, name: str, nbytes: int, said: str, parts: Sequence[LazyTensor]) -> None:
        super().__init__(name, nbytes)
        self.said = said
        """What it is made of, for people; the same for many."""
        self.parts = parts
        """What it is made of, beside the tensor that had its name."""
