"""
The order of work on devices that do it behind the caller's back, on streams: CUDA's, and Intel's.

What is on one stream is done in order; what is on two is in none. Each thread has a current stream for each device, and
a new thread the default one, whatever its maker works on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch

_STREAMED: Final = ("cuda", "xpu")


def streams_here() -> list[tuple[Any, Any]]:
    """Return the streams that this thread works on now, of devices that are started, for ``work_on``."""
    apis = [getattr(torch, name, None) for name in _STREAMED]  # torch.xpu is younger than the oldest torch supported
    return [(api, api.current_stream()) for api in apis if api is not None and api.is_initialized()]


def work_on(streams: list[tuple[Any, Any]]) -> None:
    """Let this thread work on the streams of another, which has to wait for it meanwhile."""
    for api, stream in streams:
        api.set_stream(stream)


def wait_for_all(devices: Iterable[torch.device]) -> None:
    """Return once devices have done all that any thread has asked of them so far."""
    for device in devices:
        if device.type in _STREAMED:
            getattr(torch, device.type).synchronize(device)


def wait_for_own(devices: Iterable[torch.device]) -> None:
    """Return once devices have done what this thread has asked of them, on the streams that it works on now."""
    for device in devices:
        if device.type in _STREAMED:
            getattr(torch, device.type).current_stream(device).synchronize()
