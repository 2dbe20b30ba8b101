"""
The accelerators that torch has here, each used by what its module in torch can do.

`torch.cuda` has streams, events, and numbers of free memory; `torch.mps` has one queue for everybody; other modules
have some of these. Where one is missing, the safe way is taken: all work is waited for, and copies are plain.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch

_OF_TORCH: Final = ("cuda", "xpu", "mps", "mtia", "hpu")
_HOSTS: Final = ("cpu", "meta")


class Accelerator(NamedTuple):
    """A kind of device: its name in torch, and torch's module for it."""

    kind: str
    api: Any

    @property
    def is_started(self) -> bool:
        """Whether it was used in this process: only then is there work to wait for. Asking does not start it."""
        is_initialized = getattr(self.api, "is_initialized", None)
        return True if is_initialized is None else bool(is_initialized())

    @property
    def has_streams(self) -> bool:
        """Whether work can be put on streams, and each stream waited for."""
        return all(hasattr(self.api, name) for name in ("Stream", "current_stream", "set_stream"))

    @property
    def is_single(self) -> bool:
        """Whether there is at most one device of the kind, so that its module takes no device as an argument."""
        return self.kind == "mps"

    def device_count(self) -> int:
        """Return how many devices of the kind are here."""
        if self.is_single:
            return int(torch.backends.mps.is_available())
        return int(self._call("is_available", default=True) and self._call("device_count", default=1))

    def name(self, index: int) -> str:
        """Return the product name of a device."""
        return "Apple GPU" if self.is_single else str(self._call("get_device_name", index, default=self.kind))

    def memory(self, index: int) -> tuple[int | None, int | None]:
        """Return the free and the total memory of a device in bytes, each None if it is not known."""
        if self.is_single:
            total = int(self.api.recommended_max_memory())
            return total - int(self.api.driver_allocated_memory()), total
        found = self._call("mem_get_info", index, default=None)
        if found is None:  # a full device does not answer this, but has a size
            properties = self._call("get_device_properties", index, default=None)
            return None, getattr(properties, "total_memory", None)
        return int(found[0]), int(found[1])

    def room(self, device: torch.device) -> int | None:
        """Return how many bytes can be allocated, with those that torch keeps for new tensors; None if not known."""
        index = device.index or 0
        free = self.memory(index)[0]
        reserved, used = (self._call(f"memory_{what}", index, default=0) for what in ("reserved", "allocated"))
        return None if free is None else free + max(0, reserved - used)

    def _call(self, name: str, *given: Any, default: Any) -> Any:
        ask = getattr(self.api, name, None)
        try:
            return default if ask is None else ask(*given)
        except (RuntimeError, NotImplementedError, TypeError):
            return default

    def streams(self) -> list[Any]:
        """Return this thread's streams: of other devices if it has set one there, then that of its current device."""
        current = self.api.current_stream()
        count = self.device_count()
        here = self.api.current_device() if count > 1 else 0
        others = [self.api.current_stream(index) for index in range(count) if index != here]
        return [*(stream for stream in others if stream.stream_id), current]

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Let this thread work on a stream for a block."""
        if hasattr(self.api, "stream"):
            with self.api.stream(stream):
                yield
            return
        before = self.api.current_stream(stream.device)
        self.api.set_stream(stream)
        try:
            yield
        finally:
            self.api.set_stream(before)

    def wait_for_all(self, device: torch.device) -> None:
        """Wait until a device has finished the work of all threads so far."""
        if self.is_single:
            self.api.synchronize()
        elif hasattr(self.api, "synchronize"):
            self.api.synchronize(device)

    def wait_for_own(self, device: torch.device) -> None:
        """Wait until a device has finished this thread's work on its current stream."""
        if self.has_streams:
            self.api.current_stream(device).synchronize()
        else:
            self.wait_for_all(device)


def accelerators() -> list[Accelerator]:
    """Return the kinds that this torch has modules for, whether or not there is such a device."""
    kinds = dict.fromkeys((*_OF_TORCH, torch._C._get_privateuse1_backend_name()))
    return [found for found in map(accelerator, kinds) if found is not None]


def of_extension() -> str | None:
    """Return the name of the kind of device that an extension added to torch; None if none did."""
    name = torch._C._get_privateuse1_backend_name()
    return None if name == "privateuseone" else name


def accelerator(kind: str) -> Accelerator | None:
    """Return the accelerator of a kind, as ``cuda``; None for ``cpu``, ``meta``, and those torch has no module for."""
    api = None if kind in _HOSTS else getattr(torch, kind, None)
    return None if api is None else Accelerator(kind, api)
