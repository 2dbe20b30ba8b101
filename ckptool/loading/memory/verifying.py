"""Whether what was read is what was saved, as the checksums in the file say, while it is loaded."""

from __future__ import annotations

from collections.abc import Callable

from ckptool.cancellation import Cancellation
from ckptool.errors import DamagedFile
from ckptool.sources.checksums import checksum_in_memory
from ckptool.sources.source import Source
from ckptool.tensors.pieces import PiecesSource, Place
from ckptool.tensors.tensor import StorageRef


class Verifier:
    """Compares storages with their checksums in the file, once they are in memory on the CPU; or does nothing."""

    def __init__(self, wanted: bool, cancellation: Cancellation | None) -> None:
        self.wanted = wanted
        self._cancellation = cancellation
        self._done: set[Place] = set()

    def source(self, storage: StorageRef) -> Source:
        """Return what a storage is to be read from."""
        pieces = storage.source
        return pieces.checked() if self.wanted and isinstance(pieces, PiecesSource) else pieces

    def compare(self, storage: StorageRef, source: Source, buffer: Callable[[], memoryview]) -> None:
        """
        Compare a storage that was read from ``source`` as a whole.

        Raises:
            DamagedFile: It is not what was saved.
        """
        if self.wanted and isinstance(source, PiecesSource):
            source.compare(self._done)
            source.check(self._done)
        elif self.wanted and storage.crc32 and checksum_in_memory(buffer(), self._cancellation) != storage.crc32:
            raise DamagedFile(
                f"storage {storage.key!r} of {storage.nbytes:,} bytes does not match its checksum",
                hint="Download the file again.",
            )
