"""Reports as JSON on stdout, piece by piece: a text of the file's may become six times as long, and is copied once."""

from __future__ import annotations

import json
from collections.abc import Iterator

import click

_AT_ONCE = 1 << 16
_DEPTH = 2
"""Of an object, the members of its members are pieces; a list of objects is one level more."""


def print_json(found: object) -> None:
    """Print a value as one line of ASCII."""
    waiting: list[str] = []
    length = 0
    for piece in _pieces(found, _DEPTH + isinstance(found, list)):
        waiting.append(piece)
        length += len(piece)
        if length >= _AT_ONCE:
            click.echo("".join(waiting), nl=False)
            waiting, length = [], 0
    click.echo("".join(waiting))


def _pieces(found: object, depth: int) -> Iterator[str]:
    if depth and isinstance(found, dict):
        for number, (key, value) in enumerate(found.items()):
            yield f"{', ' if number else '{'}{json.dumps(key)}: "
            yield from _pieces(value, depth - 1)
        yield "}" if found else "{}"
    elif depth and isinstance(found, list | tuple):
        for number, value in enumerate(found):
            yield ", " if number else "["
            yield from _pieces(value, depth - 1)
        yield "]" if found else "[]"
    else:
        yield json.dumps(found, ensure_ascii=True, allow_nan=False)
