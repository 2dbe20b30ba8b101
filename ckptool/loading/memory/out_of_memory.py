"""What an allocation says that fails, as OutOfMemory."""

from __future__ import annotations

from types import TracebackType
from typing import Final

import torch

from ckptool.errors import OutOfMemory

_SAID: Final = ("out of memory", "can't allocate memory", "not enough memory", "invalid buffer size")
"""By the driver of CUDA (when it loads a kernel, say), by torch of the CPU, there and on Windows, by Metal."""


class translate_out_of_memory:  # noqa: N801 - it is used like a function
    """
    Raise OutOfMemory for a block that runs out of memory on a device.

    No generator: the error would keep its frame alive, and with it the error and the block's memory on the device.

    Raises:
        OutOfMemory: They are not there. Any other error comes out as it is.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self.device = device

    def __enter__(self) -> None:
        """Do nothing yet."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_full = isinstance(error, torch.cuda.OutOfMemoryError)
        if is_full or (isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _SAID)):
            raise OutOfMemory(
                f"no {self.nbytes:,} bytes are free on {self.device}",
                hint="Choose another device, or a smaller dtype=.",
                needed=self.nbytes,
            ) from error
