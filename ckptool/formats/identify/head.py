"""The start of a file, as bytes and as text."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ckptool.errors import NotACheckpoint
from ckptool.messages import counted, quoted, some
from ckptool.sources.source import Source

_HEAD_NBYTES = 65_536
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0e-\x1a\x1c-\x1f\x7f]")
_MARKUP = re.compile(rb"\s*<(?:!doctype|\?xml|html)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Head:
    """The first 64 KiB."""

    source: Source
    nbytes: int
    """Of the whole file."""
    data: bytes
    text: str | None
    """``data`` as text without a byte order mark, None if it is none."""

    @classmethod
    def of(cls, source: Source) -> Head:
        """Read the start of a source."""
        data = source.read(0, min(source.nbytes, _HEAD_NBYTES))
        return cls(source, source.nbytes, data, _decoded(data, whole=source.nbytes <= _HEAD_NBYTES))

    @property
    def whole(self) -> bool:
        """Whether this is all of the file."""
        return self.nbytes <= _HEAD_NBYTES

    @property
    def size(self) -> str:
        """The size of the file in words."""
        return counted(self.nbytes, "byte")

    def has(self, mark: bytes, offset: int) -> bool:
        """Say whether the mark stands at the offset, which counts from the end if it is negative."""
        if offset >= 0:
            return self.data.startswith(mark, offset)
        return -offset <= self.nbytes and self.source.read(self.nbytes + offset, len(mark)) == mark


def _decoded(data: bytes, *, whole: bool) -> str | None:
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        try:
            text = codecs.getincrementaldecoder("utf-16")().decode(data, final=whole)
        except UnicodeDecodeError:
            return None
        plain = sum(" " <= character <= "~" or character in "\r\n\t" for character in text)
        return text if plain * 2 > len(text) else None  # almost any bytes are UTF-16
    if _CONTROL.search(data):
        return None
    try:
        return codecs.getincrementaldecoder("utf-8-sig")().decode(data, final=whole)
    except UnicodeDecodeError:
        plain = len(re.findall(rb"[\t\n\r -~]", data))
        legible = len(data) >= 64 and plain * 10 > len(data) * 6
        return data.decode("utf-8", "replace") if legible or _MARKUP.match(data) else None


AGAIN = "Download the file again."
ACCESS = "Check the address and whether it asks for a login, then download the file again."
EXPORTED = "Use the PyTorch file that it was exported from."
UNPACK = "Unpack it and open the file inside."
IN_TENSORFLOW = "Read it with TensorFlow."


def not_a_checkpoint(what: str, kind: str, hint: str | None = None) -> NotACheckpoint:
    """Return the error for a file that is ``what``."""
    return NotACheckpoint(f"not a checkpoint: {what}", kind=kind, hint=hint)


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return the first names, and how many more there are."""
    return some([*(quoted(name, 40) for name in names[:most]), *names[most:]], most)
