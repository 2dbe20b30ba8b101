"""
Bytes of a file as memory of an accelerator, in one pass: file → pinned staging → device.

Several threads read into staging buffers while the copies of others are under way, each buffer used again as soon as
its copy is done. Nothing else of the file is ever in host memory, and nothing is on the device twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import torch

from ckptool.errors import OutOfMemory
from ckptool.loading.memory.host import PIECE, Memory, Progress, Range, buffer_of
from ckptool.loading.memory.threads import translate_out_of_memory
from ckptool.sources.source import Source
from ckptool.torch_ops.devices import Accelerator, accelerator

_BUFFERS = 6
_READERS = 4


class DeviceMemory(Memory):
    """Allocates memory of one device."""

    STAGING_NBYTES: Final = _BUFFERS * PIECE
    """Most bytes that the staging buffers need on the host."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._accelerator = accelerator(device.type)

    def check_room(self, nbytes: int) -> None:
        """Raise OutOfMemory if the device is known to have less than ``nbytes`` free."""
        room = None if self._accelerator is None else self._accelerator.room(self._device)
        if room is not None and nbytes > room:
            raise OutOfMemory(
                f"the weights need {nbytes:,} bytes on {self._device}, which has {room:,} free",
                hint="Choose another device, or a smaller dtype=.",
                needed=nbytes,
                actual=room,
            )

    def take(self, source: Source, offset: int, nbytes: int, itemsize: int = 1) -> torch.Tensor:  # noqa: ARG002
        """Return memory for ``nbytes`` bytes from ``offset``; memory of devices is aligned for any element."""
        with translate_out_of_memory(nbytes, self._device):
            target = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        if self._device.type != "meta":
            self.read_into(source, offset, target)
        return target

    def fill(self, progress: Progress) -> None:
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
            with ThreadPoolExecutor(_READERS) as pool:
                for group in _groups(ranges):
                    while not free:
                        if len(reading) >= _READERS or not sent:
                            send_oldest()
                        else:
                            event, buffer = sent.popleft()
                            sender.wait(event)
                            free.append(buffer)
                    buffer = free.pop()
                    reading.append((pool.submit(_read, group, buffer), group, buffer))
                while reading:
                    send_oldest()
        finally:
            sender.finish()  # after an error, too: copies under way must not write to memory that is used again


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


def _read(group: list[Range], buffer: torch.Tensor) -> None:
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
