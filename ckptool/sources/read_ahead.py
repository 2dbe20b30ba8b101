"""Many small reads of one source in few calls: for readers that walk through headers."""

from __future__ import annotations

from ckptool.sources.source import Source


class ReadAhead:
    """
    Many small reads in rising order, with few calls and few bytes.

    Reads that lie close together share blocks, larger the more of them there are; a read far from the last one
    fetches little more than it needs, so that walking the headers of a large file does not read the data between them.
    """

    BLOCK = 65_536
    SINGLE = 256

    def __init__(self, source: Source) -> None:
        self._source = source
        self._start = 0
        self._block = b""
        self._span = self.SINGLE

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return up to ``nbytes`` bytes from ``offset``: fewer only at the end of the source."""
        block, begin = self.window(offset, nbytes)
        return block[begin : begin + nbytes]

    def window(self, offset: int, nbytes: int) -> tuple[bytes, int]:
        """Return the block that holds what ``read`` would return, and where in the block that begins."""
        begin = offset - self._start
        if begin < 0 or begin + nbytes > len(self._block):
            near = 0 <= begin <= len(self._block) + self.SINGLE
            self._span = min(self.BLOCK, 8 * self._span) if near else self.SINGLE
            span = max(nbytes, self._span)
            self._block = self._source.read(offset, max(0, min(span, self._source.nbytes - offset)))
            self._start, begin = offset, 0
        return self._block, begin
