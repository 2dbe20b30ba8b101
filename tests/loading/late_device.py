"""
A stand-in for CUDA, in which the memory of the CPU is the device's, and nothing is done before it is waited for.

What is queued on a stream runs when that stream, an event on it, or a stream that waits for it is synchronised: as late
as a device may. A copy from pinned memory that does not block is queued on the stream that is current; any other copy
is done at once, after what was queued before it on the same stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import pytest


class Event:
    def __init__(self, stream: Stream) -> None:
        self.stream, self.position = stream, stream.queued

    def synchronize(self) -> None:
        self.stream.run_to(self.position)


class Stream:
    def __init__(self, device: object = None) -> None:
        self.device, self.work, self.queued = device, list[Callable[[], object]](), 0

    def queue(self, work: Callable[[], object]) -> None:
        self.work.append(work)
        self.queued += 1

    def run_to(self, position: int) -> None:
        while self.work and self.queued - len(self.work) < position:
            self.work.pop(0)()

    def record_event(self) -> Event:
        return Event(self)

    def wait_stream(self, other: Stream) -> None:
        self.queue(Event(other).synchronize)

    def synchronize(self) -> None:
        self.run_to(self.queued)


class LateDevice:
    """What it is asked for, and in which order."""

    def __init__(self, patch: pytest.MonkeyPatch, *, pinnable: bool = True) -> None:
        self.default = Stream()
        self.streams: list[Stream] = []
        self.pinned: list[torch.Tensor] = []
        self.pinnable = pinnable
        self._mine = threading.local()
        self._empty, self._copy = torch.empty, torch.Tensor.copy_
        patch.setattr(torch.cuda, "Stream", self._stream)
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "synchronize", lambda device=None: self._finish())
        patch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        patch.setattr(torch.cuda, "set_stream", lambda stream: setattr(self._mine, "stream", stream))
        patch.setattr(torch.cuda, "stream", self._on)
        patch.setattr(torch, "empty", self._new)
        patch.setattr(torch.Tensor, "is_pinned", lambda tensor: self._is_pinned(tensor))
        patch.setattr(torch.Tensor, "copy_", lambda target, *given, **options: self._send(target, *given, **options))

    @property
    def current(self) -> Stream:
        """The stream of the thread."""
        return getattr(self._mine, "stream", self.default)

    def _stream(self, device: object = None) -> Stream:
        self.streams.append(Stream(device))
        return self.streams[-1]

    def _finish(self) -> None:
        for stream in (self.default, *self.streams):
            stream.synchronize()

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before, self._mine.stream = self.current, stream
        try:
            yield
        finally:
            self._mine.stream = before

    def _new(self, *shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory and not self.pinnable:
            raise RuntimeError("CUDA error: out of memory")  # of cudaHostAlloc: torch.AcceleratorError
        made = self._empty(*shape, **options)
        if pin_memory:
            self.pinned.append(made)
        return made

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        mine = tensor.untyped_storage().data_ptr()
        return any(mine == one.untyped_storage().data_ptr() for one in self.pinned)

    def _send(self, target: torch.Tensor, values: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if non_blocking and self._is_pinned(values):
            self.current.queue(lambda: self._copy(target, values))
            return target
        self.current.synchronize()
        return self._copy(target, values)
