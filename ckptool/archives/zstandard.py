"""Zstandard: from Python itself since 3.14, and from a package before that."""

from __future__ import annotations

from io import BytesIO
from typing import Any, Final

from ckptool.archives.archive import too_large
from ckptool.errors import MalformedFile, MissingPackage
from ckptool.limits import Limits

_WINDOW: Final = 1 << 27
"""What unpacking may take for its window: that of the highest level of the usual ones."""
_COMMAND: Final = "pip install 'ckptool[zstd]'"


def unpack(data: bytes, limits: Limits) -> bytes:
    """
    Return what frames of Zstandard hold.

    Raises:
        LimitExceeded: It grows larger than ``limits`` allow for its size.
        MalformedFile: It is damaged or ends too early.
        MissingPackage: Nothing that unpacks it is installed.
    """
    zstandard = _package()
    allowed = limits.inflated(len(data))
    try:
        unpacker = zstandard.ZstdDecompressor(max_window_size=_WINDOW)
        with unpacker.stream_reader(BytesIO(data), read_across_frames=True) as reader:
            found: bytes = reader.read(allowed + 1)
        frame = zstandard.get_frame_parameters(data)
    except zstandard.ZstdError as error:
        raise MalformedFile(f"cannot be unpacked: {error}", kind="damaged-zstd") from error
    if len(found) > allowed:
        raise too_large("of Zstandard", len(found), allowed)
    announced = frame.content_size
    if announced < 1 << 63 and len(found) < announced:
        raise MalformedFile(
            f"the Zstandard frame ends after {len(found):,} of {announced:,} unpacked bytes",
            kind="truncated-zstd",
            needed=announced,
            actual=len(found),
        )
    return found


def _package() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise MissingPackage.named("zstandard", _COMMAND, kind="no-unpacker") from error
    return zstandard
