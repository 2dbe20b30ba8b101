"""
The graphs of exported programs, in JSON: which of their texts reach the system. Nothing of them runs.

``torch.export`` evaluates the symbolic sizes and the guards, looks up the names of operators, writes the names of
values into source code that it compiles, and imports what the layouts of arguments name.
"""

from __future__ import annotations

import builtins
import io
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Final, NamedTuple

from ckptool.formats.runnable.scripts import end_of, opens_files, strings
from ckptool.formats.runnable.unpacking import Act, of_program
from ckptool.messages import cut
from ckptool.pickles.alarms import is_known, reaching
from ckptool.pickles.dangerous_names import EVALUATES, FILES, LOADS, UNFOLLOWED, words
from ckptool.pickles.judge import is_listed

_LONGEST: Final = 120
_DEEPEST: Final = 8
"""Texts of JSON inside each other: there are two in what torch writes."""
_END_IN_JSON: Final = re.compile(r'\\.|"', re.DOTALL).search
_COLON: Final = re.compile(r"\s*:").match
_NAMING: Final = re.compile(r"(?:\w*_)?names?|fqn").fullmatch
"""Keys of names that are written into source code."""
_NAME: Final = re.compile(r"[\w.@:-]*").fullmatch
_CODE: Final = re.compile(r"[()\[\]=;\n\r]").search
"""What is in no key."""

_CALLED: Final = re.compile(r"(?<![\w.])([\w.]+)\s*\(").finditer
_CALLED_RESULT: Final = re.compile(r"[)\]}'\"]\s*\(").search
_FUNCTIONS: Final = words(
    "sqrt floor ceiling log exp sin cos tan sinh cosh tanh asin acos atan atan2 abs sign gamma size stride"
    " storage_offset max min cast_symbool_to_symint_guardless sym_int sym_float sym_not sym_max sym_min sym_ite"
    " is_integer int float bool len range all any not and or is if else in _check _assert"
)
"""What formulas and guards call, beside sympy's classes, which begin with a capital."""
_WORDS_IN: Final = re.compile(r"(?<![\w.])[A-Za-z_]\w*").findall
_FORBIDDEN: Final = (frozenset(dir(builtins)) | words("lambda key sympify parse_expr lambdify")) - (
    _FUNCTIONS | words("True False None isinstance tuple list dict str")
)
"""Words that only what is more than a formula has: functions that evaluate, and what gives one to another."""
_FORMULA: Final = re.compile(r"[\w\s().,+\-*/%<>=!&|~^'\"\[\]:@]*").fullmatch


class _Text(NamedTuple):
    """A string in JSON."""

    key: str
    value: str
    offset: int
    is_key: bool


def of_graph(data: bytes, record: str) -> Iterator[Act]:
    """Yield what of an exported program is more than formulas, guards, operators that reckon, and names."""
    if not any(one in data for one in (b"graph", b"expr_str", b"guards_code", b"_spec", b"\\u")):
        return  # other JSON: settings, most likely
    for one in _texts(str(data, "utf-8", "replace")):
        if one.is_key:
            why = EVALUATES if _CODE(one.value) else None
        elif one.key in ("expr_str", "guards_code"):
            why = None if _is_formula(one.value, is_guard=one.key == "guards_code") else EVALUATES
        elif one.key == "target":
            why = _of_target(one.value)
        elif one.key.endswith("_spec"):
            why = _of_layout(one.value)
        else:
            why = EVALUATES if _NAMING(one.key) and not _NAME(one.value) else None
        if why:
            name = one.value if one.key == "target" else one.key or "a key"
            text = one.value if one.key == "target" else f"{name} {cut(one.value, _LONGEST)}"
            yield of_program(name, text, why, record, one.offset)


def _texts(text: str) -> Iterator[_Text]:
    """Yield the strings, each with the key that stands before it."""
    key, end = "", 0
    while start := text.find('"', end) + 1:
        end = end_of(text, start, _END_IN_JSON)
        value = text[start : end - 1]
        if "\\" in value:
            with suppress(ValueError):
                value = json.loads(f'"{value}"', strict=False)
        if is_key := _COLON(text, end) is not None:
            key = value
        yield _Text(key, value, start, is_key)


def _of_target(value: str) -> str | None:
    if not value.startswith(("torch", "_operator", "math")):
        return None
    library, _, operator = value.removeprefix("torch.ops.").partition(".")
    if value.startswith("torch.ops.") and operator:
        return FILES if opens_files(library, operator.partition(".")[0]) else None
    _, _, rest = value.partition(".")
    return (reaching(value, rest) if rest else None) or (FILES if opens_files("", rest.rpartition(".")[2]) else None)


def _of_layout(value: str) -> str | None:
    """Return what the layout of arguments reaches: members of enumerations, and factories, are imported by name."""
    todo = [(value, 0)]
    while todo:
        text, depth = todo.pop()
        if depth > _DEEPEST:
            return UNFOLLOWED
        named: dict[str, str] = {}
        for one in _texts(text):
            if one.is_key:
                continue
            named[one.key] = one.value
            if one.key in ("fqn", "default_factory_name") and (why := _of_import(named, one.key)):
                return why
            if one.key == "default_factory_module" and "default_factory_name" in named:
                return LOADS  # in another order than torch's
            if '"' in one.value:
                todo.append((one.value, depth + 1))
    return None


def _of_import(named: dict[str, str], key: str) -> str | None:
    if key == "fqn":
        module, _, name = named[key].partition(":")
        return LOADS if is_known(f"{module}.{name}") else reaching(f"{module}.{name}", name)
    module, name = named.get("default_factory_module", ""), named[key]
    return LOADS if not module or not is_listed(f"{module}.{name}") else None


def _is_formula(text: str, *, is_guard: bool) -> bool:
    """Say whether a text only reckons with numbers and sizes: it calls nothing but what is known for that."""
    if "__" in text.replace("__torch_function__", "") and not is_guard:
        return False
    bare, quoted = _bare(text)
    if "__" in bare or _FORMULA(bare) is None or _CALLED_RESULT(bare) or not _FORBIDDEN.isdisjoint(_WORDS_IN(bare)):
        return False
    if not is_guard and ("[" in bare or any(not re.fullmatch(r".\w*.", one) for one in quoted)):
        return False
    for found in _CALLED(bare):
        *_, last = found[1].split(".")
        if not (last[:1].isupper() or last in _FUNCTIONS):
            return False
    return is_guard or re.search(r"(?:\b[A-Za-z_]\w*|[)\]'\"])\s*\.\s*[A-Za-z_]", bare) is None


def _bare(text: str) -> tuple[str, list[str]]:
    """Return a formula with empty strings in it, and its strings."""
    code, quoted, at = io.StringIO(), [], 0
    for begin, end in strings(text):
        code.write(text[at:begin] + "''")
        quoted.append(text[begin:end])
        at = end
    code.write(text[at:])
    return code.getvalue(), quoted
