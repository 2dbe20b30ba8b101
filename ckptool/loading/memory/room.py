"""Memory that a device does not have, as an error of ours, whatever torch says of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from ckptool.errors import OutOfMemory

_SAID: Final = ("out of memory", "can't allocate memory", "not enough memory", "invalid buffer size")
"""By the driver of CUDA (when it loads a kernel, say), by torch of the CPU, there and on Windows, by Metal."""


@contextmanager
def room_for(nbytes: int, device: torch.device) -> Iterator[None]:
    """
    Give a block that needs so many bytes on a device.

    Raises:
        OutOfMemory: They are not there. Any other error comes out as it is.
    """
    try:
        yield
    except RuntimeError as error:
        is_full = isinstance(error, torch.cuda.OutOfMemoryError)
        if not is_full and not any(text in str(error).lower() for text in _SAID):
            raise
        raise OutOfMemory(
            f"no {nbytes:,} bytes are free on {device}",
            hint="Choose another device, or a smaller dtype=.",
            needed=nbytes,
        ) from error
