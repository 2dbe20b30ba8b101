"""
Host memory for tensors: bytes of a file that are mapped, or read by several threads at once.

A mapping is private: processes that load one file share its pages until one writes to them. Large reads go
into memory that returns to the system as soon as the tensor is gone; an allocator would keep it.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final, Literal, NamedTuple, TypeAlias

import torch

import ckptool.system as system
from ckptool.errors import OutOfMemory
from ckptool.sources.files import file_under
from ckptool.sources.source import Source, remote_under

Mmap: TypeAlias = bool | Literal["auto"]
Mapping: TypeAlias = mmap.mmap
Progress: TypeAlias = Callable[[int], None]
"""Called with the number of bytes that were just read."""

PIECE: Final = 16 << 20
"""Most bytes that are read at a time."""
_RETURNED = 4 << 20
"""From so many bytes on, memory is a mapping of its own, which returns to the system once it is free."""
_MOST_THREADS = 4


class Range(NamedTuple):
    """Bytes to read: their source, and where they go."""

    source: Source
    offset: int
    memory: torch.Tensor
    """A contiguous tensor of uint8, of ``PIECE`` bytes at most."""


class Memory:
    """Memory of one device, and the ranges of sources that ``fill`` reads into it."""

    def __init__(self) -> None:
        self._ranges: list[Range] = []

    def take(self, source: Source, offset: int, nbytes: int, itemsize: int = 1) -> torch.Tensor:
        """Return a tensor of uint8 that will hold these bytes once ``fill`` has run."""
        raise NotImplementedError

    def read_into(self, source: Source, offset: int, memory: torch.Tensor) -> None:
        """Fill a contiguous tensor of uint8 with the bytes from ``offset``, when ``fill`` runs."""
        if 0 < memory.numel() <= PIECE:
            self._ranges.append(Range(source, offset, memory))
            return
        for start in range(0, memory.numel(), PIECE):
            self._ranges.append(Range(source, offset + start, memory[start : start + PIECE]))

    def fill(self, progress: Progress) -> None:
        """
        Read all noted ranges, and call ``progress`` with the number of bytes of each. No thread outlives the call.

        Raises:
            FileUnavailable: The file cannot be read any more.
            SourceChanged: The file shrank.
        """
        raise NotImplementedError


class HostMemory(Memory):
    """
    Allocates host memory.

    ``wanted`` says whether local files are mapped; ``auto`` maps all but those on network file systems. Bytes that are
    misaligned for their element, encoded in the file, or not in a local file are read in any case.
    """

    def __init__(self, wanted: Mmap = "auto") -> None:
        super().__init__()
        self._wanted = wanted
        self._maps: dict[int, tuple[Mapping, int] | None] = {}
        self._sources: list[Source] = []  # keeps them alive, so that their ids stay unique

    def mapped(self, source: Source) -> tuple[Mapping, int] | None:
        """Return the mapping of a source's file, and the offset of the source in it; None if it is not mapped."""
        try:
            return self._maps[id(source)]
        except KeyError:
            self._sources.append(source)
            self._maps[id(source)] = found = self._map(source)
            return found

    def _map(self, source: Source) -> tuple[Mapping, int] | None:
        under = file_under(source, 0) if self._wanted is not False else None
        if under is None or not under[0].nbytes:
            return None
        file, start = under
        if file is not source:
            whole = self.mapped(file)
            return None if whole is None else (whole[0], start)
        with suppress(OSError):  # no room for a private mapping, or just closed, which reading reports
            return None if self._wanted == "auto" and file.is_on_network() else (file.map(), 0)
        return None

    def take(self, source: Source, offset: int, nbytes: int, itemsize: int = 1) -> torch.Tensor:
        """Return ``nbytes`` bytes from ``offset`` as a tensor of uint8, aligned for elements of ``itemsize``."""
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        mapping = self.mapped(source)
        if mapping is not None and self.can_map(source, offset, itemsize):
            return torch.frombuffer(mapping[0], dtype=torch.uint8, count=nbytes, offset=mapping[1] + offset)
        memory = allocate(nbytes)
        if source.is_compressed:
            source.read_into(offset, buffer_of(memory))
        else:
            self.read_into(source, offset, memory)
        return memory

    def can_map(self, source: Source, offset: int, itemsize: int) -> bool:
        """Return whether ``take`` would return a view of a mapping, and allocate nothing."""
        mapping = self.mapped(source)
        return mapping is not None and (mapping[1] + offset) % itemsize == 0

    def fill(self, progress: Progress) -> None:
        ranges, self._ranges = self._ranges, []
        threads = min(_MOST_THREADS, sum(one.memory.nbytes for one in ranges) // PIECE)
        # What is far away is fetched by threads of its own, in the order in which it is read.
        if threads < 2 or any(remote_under(one.source) for one in ranges):
            for one in ranges:
                progress(_read(one))
            return
        with ThreadPoolExecutor(threads) as pool:
            for nbytes in pool.map(_read, ranges):
                progress(nbytes)


def _read(one: Range) -> int:
    one.source.read_into(one.offset, buffer_of(one.memory))
    return one.memory.nbytes


def allocate(nbytes: int) -> torch.Tensor:
    """
    Return new host memory as a tensor of uint8 with undefined content.

    Raises:
        OutOfMemory: So many bytes are not free.
    """
    try:
        if nbytes < _RETURNED:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")  # whatever the default is
        memory = system.new_memory(nbytes)
    except (RuntimeError, MemoryError, OSError) as error:
        raise OutOfMemory(f"no {nbytes:,} bytes of host memory are free", needed=nbytes) from error
    return torch.frombuffer(memory, dtype=torch.uint8)


def buffer_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU. It is valid for as long as the tensor is."""
    if not tensor.nbytes:
        return memoryview(bytearray())
    array = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")
