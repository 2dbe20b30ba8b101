"""Strict JSON: nothing that two parsers could understand differently."""

from __future__ import annotations

from collections import Counter
from math import isinf

from ckptool.archives.archive import Archive
from ckptool.cancellation import Cancellation
from ckptool.errors import AmbiguousFile, MalformedFile

_ONLY_DIGITS = bytes(ord("0") if chr(byte) in "0123456789" else ord(" ") for byte in range(256))


def parse_object(
    data: bytes, what: str, kind: str, cancellation: Cancellation | None = None, *, has_constants: bool = False
) -> dict[str, object]:
    """
    Return a JSON object, as ``parse`` does.

    Raises:
        MalformedFile: It is not JSON, or not an object.
        AmbiguousFile: An object in it has a key twice.
    """
    found = parse(data, what, kind, cancellation, has_constants=has_constants)
    if not isinstance(found, dict):
        raise MalformedFile(f"{what} is not a JSON object", kind=f"malformed-{kind}")
    return found


def parse_member(archive: Archive, name: str, kind: str) -> dict[str, object]:
    """Return the JSON object in a member of an archive; raise what ``parse_object`` raises."""
    data = archive.open(name).read(0, archive[name].nbytes)
    return parse_object(data, repr(name), kind, archive.limits.cancellation)


def parse(
    data: bytes, what: str, kind: str, cancellation: Cancellation | None = None, *, has_constants: bool = False
) -> object:
    """
    Return a JSON value. ``what`` is its name in messages, ``kind`` ends the kinds of its errors. With
    ``has_constants``, it may contain ``NaN`` and ``Infinity``, which Python writes and JSON lacks.

    Raises:
        MalformedFile: It is not JSON (``malformed-KIND``).
        AmbiguousFile: An object in it has a key twice, however deep (``ambiguous-KIND``).
    """
    import json  # only files with JSON in them need it

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        if cancellation is not None:
            cancellation.check()
        found = dict(pairs)
        if len(found) != len(pairs):
            counts = Counter(name for name, _ in pairs)
            twice = next(name for name, count in counts.items() if count > 1)
            raise AmbiguousFile(f"{what} holds {twice!r} twice", kind=f"ambiguous-{kind}")
        return found

    # Some numbers may be integers for Python and floats for others, which takes a slower parser. A regular expression
    # takes ten times as long to find them, which for a header of 100 MB is seconds.
    has_odd_integer = (b"-" in data and b"-0" in data) or b"0" * 20 in data.translate(_ONLY_DIGITS)
    try:
        found: object = json.loads(
            str(data, "utf-8"),
            object_pairs_hook=unique,
            parse_int=_parse_number if has_odd_integer else None,
            parse_float=_parse_number,
            parse_constant=float if has_constants else _no_constant,
        )
        if b"\\" in data and (b"\\ud" in data or b"\\uD" in data):  # one byte is found ten times as fast as two
            json.dumps(found, ensure_ascii=False).encode()  # half a surrogate pair is a ValueError
    except (ValueError, RecursionError) as error:
        raise MalformedFile(f"{what} is not JSON: {_reason(error)}", kind=f"malformed-{kind}") from error
    return found


def _parse_number(text: str) -> int | float:
    number = int(text) if text.lstrip("-").isdigit() and text != "-0" else float(text)
    if isinf(number if isinstance(number, float) else float(text)):
        raise ValueError("a number out of range")
    return number


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _reason(error: Exception) -> str:
    position = getattr(error, "pos", None)  # a JSONDecodeError
    if position is not None:
        return f"broken at character {position:,}"
    return "nested too deeply" if isinstance(error, RecursionError) else "not UTF-8, or a number too long"
