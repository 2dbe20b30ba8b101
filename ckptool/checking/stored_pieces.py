"""Tensors whose files are no archives as a whole, but have checksums inside: pieces, which are files of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.errors import Cancelled, CkptoolError
from ckptool.sources.checksums import checksum_of_range, checksums_of_file
from ckptool.sources.files import file_under
from ckptool.sources.source import Source
from ckptool.tensors.pieces import PiecesSource, Place, place_of
from ckptool.tensors.tensor import StorageRef, TensorInfo


class _Stored(NamedTuple):
    """A storage with a checksum, and where in a file it begins; 0 where it is in memory."""

    begin: int
    storage: StorageRef
    what: str

    @property
    def end(self) -> int:
        return self.begin + self.storage.nbytes


class StoredPieces:
    """
    Every storage outside the archives of a checkpoint, once, to be compared with the checksum that its file has.

    Files are read by ``read``, each as a whole; ``read_rest`` reads what no file has as it is.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.damaged: list[str] = []
        """What is wrong, a sentence for each."""
        self.bare: list[int] = []
        """Sizes of those that have no checksum, where others have one."""
        self.count = self.matching = 0
        self._by_file: dict[int, list[_Stored]] = {}
        self._rest: list[_Stored] = []
        archived = {id(archive.source) for archive in checkpoint.archives}
        bare: list[int] = []
        for storage, what in self._storages(checkpoint):
            under = file_under(storage.source, storage.offset)
            if under is not None and id(under[0]) in archived:
                continue
            if not storage.crc32:
                bare.append(storage.nbytes)
            elif under is None:
                self._rest.append(_Stored(0, storage, what))
            else:
                self._by_file.setdefault(id(under[0]), []).append(_Stored(under[1], storage, what))
        if self._by_file or self._rest:
            self.bare = bare
            self.count = len(bare)

    def _storages(self, checkpoint: Checkpoint) -> Iterator[tuple[StorageRef, str]]:
        known: set[Place | int] = set()
        tensors = (*checkpoint.tensors.items(), *checkpoint.attributes.items())
        todo = [(name, tensor.info) for name, tensor in reversed(tensors)]
        while todo:
            name, info = todo.pop()
            todo += [(name, part) for _, part in info.parts]
            for storage, what in self._of_tensor(name, info, known):
                place = place_of(storage)
                if place not in known:
                    known.add(place)
                    yield storage, what

    def _of_tensor(self, name: str, info: TensorInfo, known: set[Place | int]) -> Iterator[tuple[StorageRef, str]]:
        source = info.storage.source if info.storage is not None else None
        if not isinstance(source, PiecesSource):
            if info.storage is not None and info.storage.crc32 and info.storage.file_offset is not None:
                yield info.storage, f"{name!r}"
            return
        if id(source) in known:
            return
        known.add(id(source))
        for index in range(self._pieces(source)):
            try:
                yield source.storage(index)
            except Cancelled:
                raise
            except CkptoolError as error:
                self.damaged.append(error.message)

    def _pieces(self, source: PiecesSource) -> int:
        try:
            return len(source.pieces)
        except CkptoolError as error:
            self.damaged.append(error.message)
            return 0

    def read(self, file: Source) -> None:
        """Read a whole file, and compare the storages in it."""
        inside: list[_Stored] = []
        end = 0
        for one in sorted(self._by_file.pop(id(file), ()), key=lambda one: one.begin):
            if one.begin < end:  # part of another
                self._rest.append(one)
            else:
                inside.append(one)
                end = one.end
        found, _ = checksums_of_file(file, [(one.begin, one.end) for one in inside])
        for one, checksum in zip(inside, found, strict=True):
            self._compare(one, checksum)

    def read_rest(self) -> None:
        """Read what is in none of the files that were read, or twice in one."""
        for one in (*self._rest, *(one for some in self._by_file.values() for one in some)):
            storage = one.storage
            try:
                self._compare(one, checksum_of_range(storage.source, storage.offset, storage.offset + storage.nbytes))
            except Cancelled:
                raise
            except CkptoolError as error:  # what inflates it found it damaged
                self.damaged.append(f"the piece of {one.what}: {error.message}")

    def _compare(self, one: _Stored, found: int) -> None:
        self.count += 1
        if found == one.storage.crc32:
            self.matching += 1
        else:
            fact = f"its CRC-32 is {found:08x}, not {one.storage.crc32:08x}"
            self.damaged.append(f"the piece of {one.what} is damaged: {fact}")
