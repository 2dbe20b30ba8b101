"""
What a checkpoint says beside its tensors, key by key.

That is the text of safetensors' ``__metadata__`` and of an index, and every value of a pickled tree that is no tensor.
Text stays as it is, but for JSON too long for a line; of what JSON has no value for, a line says what it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, Final

from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.errors import LimitExceeded, UnreadableFile, UnsupportedFeature
from ckptool.formats.strict_json import parse
from ckptool.messages import show
from ckptool.pickles import nodes
from ckptool.pickles.describe import describe
from ckptool.pickles.nodes import Inert
from ckptool.pickles.plain_values import plain_value

_LINE: Final = 100
_MOST_VALUES: Final = 1 << 16
"""In one entry: the same list may be held many times over."""


def metadata_lines(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield a line for each key, and more where its value is JSON, or holds others, and is long."""
    for key, text in checkpoint.metadata.items():
        yield from _lines(key, text, _in_json(text))
    for path, node in checkpoint.extras:
        if path.rpartition(".")[2] != "_metadata":
            text, value = _plain(node)
            yield from _lines(path or "(root)", text, value)


def _lines(key: str, text: str, value: object) -> Iterator[str]:
    is_long = isinstance(value, dict | list | tuple) and len(text) > _LINE
    try:
        lines = _dumped(value, indent=2).split("\n") if is_long else [text]
    except RecursionError:  # one that parsers follow, and nobody reads
        lines = [text]
    yield f"{show(key)}: {show(lines[0])}"
    yield from map(show, lines[1:])


def _dumped(value: object, **how: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=_of_no_json, **how)


def _of_no_json(value: Any) -> object:
    return list(value) if isinstance(value, set | frozenset) else describe(value)


def _in_json(text: str) -> object:
    """Return what a text is as JSON; None where it is none."""
    try:
        return parse(text.encode(), "an entry", "metadata") if text[:1] in ("{", "[") else None
    except (UnreadableFile, UnicodeEncodeError):
        return None


def _plain(node: Inert) -> tuple[str, object]:
    """Return a value on a line, and as JSON can have it: objects by their attributes, other code in words."""
    seen = count()

    def leaf(_: Inert) -> None:
        if next(seen) > _MOST_VALUES:
            raise LimitExceeded(f"more than {_MOST_VALUES:,} values")

    def other(node: Inert, value: Callable[[Inert], Any]) -> Any:
        return {str(key): value(one) for key, one in nodes.attribute_pairs(node)} or describe(node)

    try:
        found = plain_value(node, leaf, None, other)
        return found if isinstance(found, str) else _dumped(found), found
    except (UnsupportedFeature, LimitExceeded, TypeError):  # of what JSON has no key for
        return describe(node), None
