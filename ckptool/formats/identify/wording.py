"""How what was found is said: one line, safe to print, in the style that ``ckptool.errors`` describes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptool.errors import NotACheckpoint

if TYPE_CHECKING:
    from collections.abc import Sequence


AGAIN = "Download the file again."
ACCESS = "Check the address and whether it asks for a login, then download the file again."
EXPORTED = "Use the PyTorch file that it was exported from."
UNPACK = "Unpack it and open the file inside."
IN_TENSORFLOW = "Read it with TensorFlow."


def not_a_checkpoint(what: str, kind: str, hint: str | None = None) -> NotACheckpoint:
    """Return the error for a file that is ``what``."""
    return NotACheckpoint(f"not a checkpoint: {what}", kind=kind, hint=hint)


def quoted(text: str, limit: int = 80) -> str:
    """Quote on one line, with what could steer a terminal or turn the reading direction escaped."""
    line = " ".join(text[: 16 * limit].split())
    cut = line[:limit]
    while len(repr(cut)) > limit + 2:  # escapes are longer than what they stand for
        cut = cut[:-1]
    return repr(cut if cut == line else cut + "…")


def count(number: int, noun: str) -> str:
    """Return the number with its noun."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return the first names, and how many more there are."""
    shown = ", ".join(quoted(name, 40) for name in names[:most])
    return shown + (f" and {len(names) - most:,} more" if len(names) > most else "")
