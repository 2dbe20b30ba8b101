"""Sources that tell what was asked of them, or are larger than anybody would write."""

from __future__ import annotations

from collections.abc import Iterator

from ckptool.sources.source import BytesSource, Source
from ckptool.tensors.payloads import Payload


class Asked(BytesSource):
    """Bytes in memory, and how many of them each read asked for; a read over the end is an error, as with a file."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data, is_file=True)
        self.sizes: list[int] = []

    def read(self, offset: int, nbytes: int) -> bytes:
        assert 0 <= offset <= offset + nbytes <= self.nbytes
        self.sizes.append(nbytes)
        return super().read(offset, nbytes)


class Holed(Source):
    """Some bytes, a hole of zeros, and some bytes more."""

    def __init__(self, head: bytes, hole: int, tail: bytes) -> None:
        self._head, self._tail = head, tail
        self.nbytes = len(head) + hole + len(tail)

    def read(self, offset: int, nbytes: int) -> bytes:
        assert 0 <= offset <= offset + nbytes <= self.nbytes
        assert nbytes < 1 << 24
        begin = self.nbytes - len(self._tail)
        head = self._head[offset : offset + nbytes]
        tail = self._tail[max(0, offset - begin) : max(0, offset + nbytes - begin)]
        return head + bytes(nbytes - len(head) - len(tail)) + tail


class BytesPayload(Payload):
    """Bytes in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.nbytes = len(data)

    def chunks(self) -> Iterator[bytes]:
        yield self._data
