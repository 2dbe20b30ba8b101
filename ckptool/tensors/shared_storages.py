"""
Checksums of storages of which many tensors have a part each, as flat buffers of optimizers are.

The parts are noted as they are read, in whatever order; together they tell the checksum of the whole, so that no byte
is read twice.
"""

from __future__ import annotations

import threading

from ckptool.errors import DamagedFile
from ckptool.sources.checksums import checksum_of_range, joined_crc32
from ckptool.tensors.tensor import StorageRef


class SharedStorages:
    """What was read of the storages of one folder. Threads may share it."""

    def __init__(self) -> None:
        self._parts: dict[tuple[int, int], dict[int, tuple[int, int]]] = {}
        self._lock = threading.Lock()

    def note(self, storage: StorageRef, start: int, nbytes: int, crc32: int) -> None:
        """Note the checksum of bytes of a storage, as they were read."""
        with self._lock:
            self._parts.setdefault(_place(storage), {})[start] = nbytes, crc32

    def compare(self, storage: StorageRef) -> None:
        """
        Compare a storage with the checksum that its file has; what was not noted is read.

        Raises:
            DamagedFile: It is not what was saved.
        """
        with self._lock:
            parts = sorted(self._parts.pop(_place(storage), {}).items())
        found = end = 0
        for start, (nbytes, of_part) in [*parts, (storage.nbytes, (0, 0))]:
            if start < end:  # it overlaps one before: what is behind that is read
                continue
            if start > end:
                of_gap = checksum_of_range(storage.source, storage.offset + end, storage.offset + start)
                found = joined_crc32(found, of_gap, start - end)
            found = joined_crc32(found, of_part, nbytes)
            end = start + nbytes
        if found != storage.crc32:
            raise DamagedFile(
                f"storage {storage.key!r} is damaged: its CRC-32 is {found:08x}, not {storage.crc32:08x}",
                hint="Get the file again.",
            )


def _place(storage: StorageRef) -> tuple[int, int]:
    return id(storage.source), storage.offset
