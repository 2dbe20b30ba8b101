"""
What an error message means, and what to do about it.

A message tells less than the file: every hint ends at a command that looks at that, and with a file given, ``in_file``
says what in it causes the message.
"""

from __future__ import annotations

import re
from os import PathLike

from ckptool.checking.explain.keys import Entry, Explanation, explain_keys
from ckptool.checking.explain.reading import READING
from ckptool.checking.explain.using import FRAGMENTS, GENERAL, USING
from ckptool.limits import DEFAULT_LIMITS, Limits

__all__ = ["Explanation", "explain"]

_MOST_TEXT = 1 << 20
_STYLE = re.compile(r"\x1b\[[0-9;]*m")


def explain(
    text: str, origin: str | PathLike[str] | None = None, *, limits: Limits = DEFAULT_LIMITS
) -> tuple[Explanation, ...]:
    """
    Return what a pasted message means, most specific first; nothing if it is not known.

    With ``origin``, the checkpoint that the message is about, each says what in it causes the message.

    Raises:
        FileUnavailable: There is no such file, or it may not be read.
    """
    plain = _STYLE.sub("", text[:_MOST_TEXT])
    found = _explained(plain)
    if origin is None:
        return found
    from ckptool.checking.explain.in_file import look_into

    return look_into(found, plain, origin, limits)


def _explained(text: str) -> tuple[Explanation, ...]:
    keys = explain_keys(text)
    found = [*([keys] if keys else ()), *_applied(READING, text), *_applied(USING, text)]
    if not found:
        found = [*_applied(GENERAL, text), *_applied(FRAGMENTS, text)][:1]
    if any(one.kind in ("memory-training", "memory-loading") for one in found):
        found = [one for one in found if one.kind != "memory-device"]
    first = {one.kind: one for one in reversed(found)}
    return tuple(one for one in found if first[one.kind] is one)


def _applied(entries: tuple[Entry, ...], text: str) -> list[Explanation]:
    return [one for entry in entries if (one := entry.apply(text)) is not None]
