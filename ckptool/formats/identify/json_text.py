"""JSON: configurations, error messages, and the index that lists the shards of a checkpoint."""

from __future__ import annotations

import json
import re
from itertools import islice
from typing import TYPE_CHECKING

from ckptool.formats.identify.wording import ACCESS, count, not_a_checkpoint, quoted

if TYPE_CHECKING:
    from ckptool.errors import NotACheckpoint
    from ckptool.formats.identify.head import Head


_INDEX_NBYTES = 16 << 20
_SHARDS_TOLD_APART = 10_000
_LONGEST_ERROR = 8_192
_OBJECT = re.compile(r'\s*\{\s*(?:"(?:[^"\\\n]|\\.){0,1000}"\s*:|\}\s*\Z)')
_WEIGHT_MAP = re.compile(rb'"weight_map"\s{0,100}:\s{0,100}\{')
_WEIGHT = re.compile(rb'\s*"(?:[^"\\]|\\.){0,4000}"\s*:\s*"((?:[^"\\]|\\.){0,4000})"\s*(,|\})')
_ERRORS = ("error", "message", "detail", "error_description", "Message", "msg")
_BESIDE = "Open the weights beside it."
_KINDS = (
    (re.compile(r'\s*\{\s*"cells"\s*:'), "a Jupyter notebook", None),
    (re.compile(r'.*"peft_type"\s*:', re.DOTALL), "the configuration of an adapter", _BESIDE),
    (re.compile(r'.*"(?:architectures|model_type)"\s*:', re.DOTALL), "the configuration of a model", _BESIDE),
    (re.compile(r'.*"added_tokens"\s*:', re.DOTALL), "a tokenizer", _BESIDE),
)


def name_json(head: Head, text: str) -> NotACheckpoint | None:
    """Name an object, whole or cut short, or a whole list."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    value = _parsed(text)
    if isinstance(value, list):
        return not_a_checkpoint(f"a JSON file of {head.size}: a list of {count(len(value), 'value')}", "json")
    if not _OBJECT.match(text):
        return None
    index = _name_index(head)
    if index is not None:
        return index
    pairs = value if isinstance(value, dict) else {}
    said = _said_by(pairs) if head.nbytes <= _LONGEST_ERROR else None
    if said is not None:
        return not_a_checkpoint(f"a JSON error message: {quoted(said)}", "json", ACCESS)
    known = ((what, hint) for pattern, what, hint in _KINDS if pattern.match(text))
    what, hint = next(known, ("a JSON file", None))
    keys = ", ".join(quoted(key, 30) for key in islice(pairs, 4)) + (", …" if len(pairs) > 4 else "")
    return not_a_checkpoint(f"{what}, {head.size} of JSON" + (f" with {keys}" if keys else ""), "json", hint)


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _said_by(pairs: dict[str, object]) -> str | None:
    for key in _ERRORS:
        value = pairs.get(key)
        if isinstance(value, dict):
            value = value.get("message")
        if isinstance(value, str) and value.strip():
            return value
    return None


def _name_index(head: Head) -> NotACheckpoint | None:
    # Not json.loads: the index of a large model is megabytes, and the objects would take many times that.
    data = head.source.read(0, min(head.nbytes, _INDEX_NBYTES))
    match = _WEIGHT_MAP.search(data)
    if not match:
        return None
    tensors, at, end = 0, match.end(), b""
    shards: dict[bytes, None] = {}
    while end != b"}" and len(shards) < _SHARDS_TOLD_APART and (entry := _WEIGHT.match(data, at)):
        tensors += 1
        at, end = entry.end(), entry[2]
        shards.setdefault(entry[1])
    if not tensors:
        return None
    least = "" if end == b"}" else "at least "
    what = f"an index of {least}{count(tensors, 'tensor')} in {least}{count(len(shards), 'file')}"
    first = quoted(next(iter(shards)).decode("utf-8", "replace"))
    return not_a_checkpoint(
        what, "index-json", f"Open it by its path, beside the files that it names, such as {first}."
    )
