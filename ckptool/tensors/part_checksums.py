"""CRC-32 checksums of pieces of tensors, whose parts threads read in any order."""

from __future__ import annotations

import threading
from zlib import crc32

from ckptool.sources.checksums import joined_crc32


class PartChecksums:
    """CRC-32 checksums of the parts of pieces, in whatever order threads read them."""

    def __init__(self) -> None:
        self._parts: dict[int, list[tuple[int, int, int]]] = {}
        self._lock = threading.Lock()

    def add(self, index: int, start: int, data: memoryview) -> None:
        """Note the bytes of a piece from ``start`` on."""
        with self._lock:
            parts = self._parts.setdefault(index, [])
            goes_on = bool(parts) and parts[-1][0] + parts[-1][1] == start
            begin, nbytes, found = parts.pop() if goes_on else (start, 0, 0)
        found = crc32(data, found)
        with self._lock:
            parts.append((begin, nbytes + data.nbytes, found))

    def noted(self) -> list[int]:
        """Return the numbers of the pieces of which something was noted."""
        with self._lock:
            return sorted(self._parts)

    def of(self, index: int, nbytes: int) -> int | None:
        """Return the checksum of a piece; None if not each of its bytes was noted once."""
        found = end = 0
        for start, part_nbytes, of_part in sorted(self._parts.get(index, ())):
            if start != end:
                return None
            found = joined_crc32(found, of_part, part_nbytes)
            end += part_nbytes
        return found if end == nbytes else None
