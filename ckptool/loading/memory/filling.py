"""
Memory on the host and on devices: mapped, pinned, and filled with bytes of files.

On the host, bytes are mapped, or read by several threads at once. A mapping is private: processes that load one file
share its pages until one writes to them. Large reads go into memory that returns to the system as soon as the tensor is
gone; an allocator would keep it.

On a device they come in one pass: file → pinned staging → device. Several threads read into staging buffers while the
copies of others are under way, each buffer used again as soon as its copy is done. Nothing else of the file is ever in
host memory, and nothing is on the device twice.
"""

from __future__ import annotations

import ctypes
import mmap
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import torch

from ckptool.loading.memory.threads import translate_out_of_memory
from ckptool.sources.files import file_under
from ckptool.sources.source import Source, memory_of, remote_under
from ckptool.torch_ops.devices import Accelerator, accelerator

Mmap: TypeAlias = bool | Literal["auto"]
Mapping: TypeAlias = mmap.mmap
Progress: TypeAlias = Callable[[int], None]
"""Called with the number of bytes that were just read."""

PIECE: Final = 16 << 20
"""Most bytes that are read at a time."""
_RETURNED = 4 << 20
"""From so many bytes on, memory is a mapping of its own, which returns to the system once it is free."""
_MOST_THREADS = 4
_BUFFERS = 6


class Range(NamedTuple):
    """Bytes to read: their source, and where they go."""

    source: Source
    offset: int
    memory: torch.Tensor
    """A contiguous tensor of uint8, of ``PIECE`` bytes at most."""


class _Ranges:
    """The ranges of sources that ``fill`` reads into memory."""

    def __init__(self) -> None:
        self._ranges: list[Range] = []

    def read_into(self, source: Source, offset: int, memory: torch.Tensor) -> None:
        """Fill a contiguous tensor of uint8 with the bytes from ``offset``, when ``fill`` runs."""
        if 0 < memory.numel() <= PIECE:
            self._ranges.append(Range(source, offset, memory))
            return
        for start in range(0, memory.numel(), PIECE):
            self._ranges.append(Range(source, offset + start, memory[start : start + PIECE]))


class HostMemory(_Ranges):
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
        """
        Return a tensor of uint8 that will hold ``nbytes`` bytes from ``offset`` once ``fill`` has run, aligned for
        elements of ``itemsize``.
        """
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        mapping = self.mapped(source)
        if mapping is not None and self.can_map(source, offset, itemsize):
            return torch.frombuffer(mapping[0], dtype=torch.uint8, count=nbytes, offset=mapping[1] + offset)
        if nbytes >= _RETURNED:
            memory = torch.frombuffer(memory_of(nbytes), dtype=torch.uint8)
        else:
            with translate_out_of_memory(nbytes, torch.device("cpu")):
                memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")  # whatever the default is
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
        """
        Read all noted ranges, and call ``progress`` with the number of bytes of each. No thread outlives the call.

        Raises:
            FileUnavailable: The file cannot be read any more.
            SourceChanged: The file shrank.
        """
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


class DeviceMemory(_Ranges):
    """Allocates memory of one device."""

    STAGING_NBYTES: Final = _BUFFERS * PIECE
    """Most bytes that the staging buffers need on the host."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._accelerator = accelerator(device.type)

    def take(self, source: Source, offset: int, nbytes: int, itemsize: int = 1) -> torch.Tensor:  # noqa: ARG002
        """Return memory for ``nbytes`` bytes from ``offset``; memory of devices is aligned for any element."""
        with translate_out_of_memory(nbytes, self._device):
            target = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        if self._device.type != "meta":
            self.read_into(source, offset, target)
        return target

    def fill(self, progress: Progress) -> None:
        """Read all noted ranges, as ``HostMemory.fill`` does."""
        ranges, self._ranges = self._ranges, []
        if not ranges:
            return
        api = self._accelerator
        sender = _Sender() if api is None or not api.has_streams else _StreamSender(self._device, api)
        total = sum(one.memory.numel() for one in ranges)
        buffers = min(_BUFFERS, -(-total // PIECE))
        free = [sender.buffer(min(PIECE, total)) for _ in range(buffers)]
        reading: deque[tuple[Future[None], list[Range], torch.Tensor]] = deque()
        sent: deque[tuple[Any, torch.Tensor]] = deque()

        def send_oldest() -> None:
            done, group, buffer = reading.popleft()
            done.result()
            sent.append((sender.send(group, buffer), buffer))
            progress(sum(one.memory.numel() for one in group))

        try:
            with ThreadPoolExecutor(_MOST_THREADS) as pool:
                for group in _groups(ranges):
                    while not free:
                        if len(reading) >= _MOST_THREADS or not sent:
                            send_oldest()
                        else:
                            event, buffer = sent.popleft()
                            sender.wait(event)
                            free.append(buffer)
                    buffer = free.pop()
                    reading.append((pool.submit(_read_group, group, buffer), group, buffer))
                while reading:
                    send_oldest()
        finally:
            sender.finish()  # after an error, too: copies under way must not write to memory that is used again


Memory: TypeAlias = HostMemory | DeviceMemory


def _read(one: Range) -> int:
    one.source.read_into(one.offset, buffer_of(one.memory))
    return one.memory.nbytes


def buffer_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU. It is valid for as long as the tensor is."""
    if not tensor.nbytes:
        return memoryview(bytearray())
    array = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")


def _groups(ranges: list[Range]) -> Iterator[list[Range]]:
    """Yield ranges in groups that fill one buffer."""
    group: list[Range] = []
    held = 0
    for one in ranges:
        if group and held + one.memory.numel() > PIECE:
            yield group
            group, held = [], 0
        group.append(one)
        held += one.memory.numel()
    yield group


def _read_group(group: list[Range], buffer: torch.Tensor) -> None:
    memory = buffer_of(buffer)
    position = 0
    for source, offset, target in group:
        source.read_into(offset, memory[position : position + target.numel()])
        position += target.numel()


class _Sender:
    """Copies buffers to a device, each one finished before the next. For devices without streams."""

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def send(self, group: list[Range], buffer: torch.Tensor) -> Any:
        position = 0
        is_pinned = buffer.is_pinned()  # this asks the driver
        for _, _, target in group:
            target.copy_(buffer[position : position + target.numel()], non_blocking=is_pinned)
            position += target.numel()
        return None

    def wait(self, event: Any) -> None:
        """Return once the copy for which ``send`` returned ``event`` is done."""

    def finish(self) -> None:
        """Return once everything is on the device."""


class _StreamSender(_Sender):
    """Copies pinned buffers on a stream of its own, while the next ones are read."""

    def __init__(self, device: torch.device, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._stream = accelerator.api.Stream(device)
        # The targets may be memory that work on the caller's stream has just freed.
        self._stream.wait_stream(accelerator.api.current_stream(device))

    def buffer(self, nbytes: int) -> torch.Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError:  # no more may be pinned here: copies from plain memory are slower, and each is waited for
            return super().buffer(nbytes)

    def send(self, group: list[Range], buffer: torch.Tensor) -> Any:
        with self._accelerator.on(self._stream):
            super().send(group, buffer)
        return self._stream.record_event()

    def wait(self, event: Any) -> None:
        event.synchronize()

    def finish(self) -> None:
        self._stream.synchronize()
