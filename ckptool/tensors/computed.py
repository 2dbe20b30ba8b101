"""Sources whose bytes are computed while they are read in order, for example those of a cast tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptool.cancellation import steps
from ckptool.errors import OutputFailed
from ckptool.sources.source import Source
from ckptool.tensors.dtypes import DType
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import StorageRef, TensorInfo, row_major


class ComputedSource(Source):
    """``nbytes`` bytes that are computed in pieces, in order, anew each time that it is read from offset 0."""

    def __init__(self, name: str, nbytes: int) -> None:
        self.nbytes = nbytes
        self.name = name
        self._pieces: Iterator[bytes] = iter(())
        self._ahead = b""
        self._position = 0

    def made(self) -> Iterator[bytes]:
        """Yield all bytes in pieces, computed anew."""
        raise NotImplementedError

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return ``nbytes`` bytes. The offset must be 0, to begin again, or the end of the last read."""
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
            self._pieces = iter(())  # frees the memory of their inputs
        return b"".join((*found, last[:end]))

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill a buffer, in pieces of at most 4 MiB."""
        for part in steps(buffer, self.cancellation):
            part[:] = self.read(offset, part.nbytes)
            offset += part.nbytes

    @property
    def was_read(self) -> bool:
        """Whether any of it was read."""
        return self._position > 0

    def tensor(self, like: TensorInfo, dtype: DType, shape: tuple[int, ...] | None = None) -> TensorInfo:
        """Return the facts of a tensor with these bytes and this dtype, and by default the shape; else as ``like``."""
        location = like.storage.location if like.storage is not None else like.location
        storage, size = StorageRef(self.name, location, self.nbytes, self, 0), like.shape if shape is None else shape
        made = like._replace(dtype=dtype, shape=size, stride=row_major(size), storage_offset=0, storage=storage)
        return made._replace(conj=False, neg=False, parts=())


class ComputedWeight(ComputedSource):
    """The bytes of a weight that is computed from others."""

    def __init__(self, name: str, nbytes: int, said: str, parts: Sequence[LazyTensor]) -> None:
        super().__init__(name, nbytes)
        self.said = said
        """How it is made, as text for people; many weights have the same."""
        self.parts = parts
        """The tensors that it is made from, besides the one that had its name."""
