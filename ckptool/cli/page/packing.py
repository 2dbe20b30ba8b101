"""Columns of many rows in few bytes: what repeats is kept once, the result is deflated, and then written as text."""

from __future__ import annotations

import json
import math
import zlib
from base64 import b64encode
from collections.abc import Hashable, Iterable, Mapping
from os.path import commonprefix
from typing import Final

_DIGITS: Final = 6
"""Of a number that people look at."""


def packed(columns: Mapping[str, object]) -> str:
    """Return columns as JSON, deflated (zlib's format), in base64."""
    text = json.dumps(columns, allow_nan=False, separators=(",", ":"))
    return b64encode(zlib.compress(text.encode("ascii"), 9)).decode("ascii")


def front_coded(names: Iterable[str]) -> dict[str, list[object]]:
    """Return for each name how many characters, as JavaScript counts, it shares with the one before, and the rest."""
    shared: list[object] = []
    rests: list[object] = []
    before = ""
    for name in names:
        same = commonprefix((before, name))  # noqa: RUF071 - characters are what is meant
        shared.append(len(same) if same.isascii() else len(same.encode("utf-16-le")) // 2)
        rests.append(name[len(same) :])
        before = name
    return {"shared": shared, "rest": rests}


class Distinct:
    """The distinct ones of many values; each is told by its place among them."""

    def __init__(self) -> None:
        self._places: dict[Hashable, int] = {}

    def place(self, value: Hashable) -> int:
        return self._places.setdefault(value, len(self._places))

    def values(self) -> list[Hashable]:
        return list(self._places)


def rounded(value: object) -> object:
    """Return a number to six digits; what JSON does not have, infinities and complex numbers, as text."""
    if isinstance(value, complex):
        return str(value)
    if not isinstance(value, float):
        return value
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else str(value)
