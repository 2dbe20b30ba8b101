"""
What a checkpoint says beside its tensors, key by key.

That is the text of safetensors' ``__metadata__`` and of an index, and every value of a pickled tree that is no tensor.
Text stays as it is, but for JSON too long for a line; of what JSON has no value for, a line says what it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.errors import UnreadableFile
from ckptool.formats.strict_json import parse
from ckptool.messages import show
from ckptool.pickles import nodes
from ckptool.pickles.describe import describe, scalar_of
from ckptool.pickles.nodes import Inert

_LINE: Final = 100
_MOST_VALUES: Final = 1 << 16
"""In one entry: the same list may be held many times over."""
_DEEPEST: Final = 64


def metadata_lines(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield a line for each key, and more where its value is JSON, or holds others, and is long."""
    for key, text in checkpoint.metadata.items():
        yield from _lines(key, text, _in_json(text))
    for path, node in checkpoint.extras:
        if path.rpartition(".")[2] != "_metadata":
            value = _plain(node)
            yield from _lines(path or "(root)", value if isinstance(value, str) else _dumped(value), value)


def _lines(key: str, text: str, value: object) -> Iterator[str]:
    is_long = isinstance(value, dict | list) and len(text) > _LINE
    try:
        lines = _dumped(value, indent=2).split("\n") if is_long else [text]
    except RecursionError:  # one that parsers follow, and nobody reads
        lines = [text]
    yield f"{show(key)}: {show(lines[0])}"
    yield from map(show, lines[1:])


def _dumped(value: object, **how: Any) -> str:
    return json.dumps(value, ensure_ascii=False, **how)


def _in_json(text: str) -> object:
    """Return what a text is as JSON; None where it is none."""
    try:
        return parse(text.encode(), "an entry", "metadata") if text[:1] in ("{", "[") else None
    except (UnreadableFile, UnicodeEncodeError):
        return None


def _plain(root: Inert) -> object:
    """Return a value as JSON can have it: an object by its attributes, anything else that is none in words."""
    found: list[Any] = [None]
    todo: list[tuple[Any, Any, Inert, int]] = [(found, 0, root, 0)]
    left = _MOST_VALUES
    while todo:
        into, key, node, depth = todo.pop()
        pairs = nodes.mapping_pairs(node) or nodes.attribute_pairs(node)
        items = node if isinstance(node, list | tuple) else ()
        left -= 1 + len(pairs) + len(items)
        if left < 0 or depth > _DEEPEST or not (pairs or items):
            value = scalar_of(node)
            into[key] = node if node is None or isinstance(node, str) else describe(node) if value is None else value
            continue
        below = [(name if isinstance(name, str) else describe(name), one) for name, one in pairs] or enumerate(items)
        made = into[key] = dict.fromkeys(name for name, _ in below) if pairs else [None] * len(items)
        todo += [(made, name, one, depth + 1) for name, one in below]
    return found[0]
