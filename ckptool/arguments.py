"""What callers of public functions pass: refused before anything is read, where it is not what the signature says."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import (
    Any,
    BinaryIO,
    Final,
    Literal,
    Optional,
    SupportsFloat,
    SupportsIndex,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

_WORDS: Final[dict[Any, str]] = {
    NoneType: "None",
    bool: "True or False",
    str: "a text",
    bytes: "bytes",
    int: "a whole number",
    float: "a number",
    os.PathLike: "a path",
    BinaryIO: "a binary file",
    Callable: "a function",
    Mapping: "a dict",
}
"""What people call the types of arguments."""
_UNIONS: Final = (Union, UnionType)
_SHOWN: Final = 60


def check_arguments(function: Callable[..., object], given: Mapping[str, object], within: str = "") -> None:
    """
    Compare arguments with the annotations of a function, or of a named tuple; what has no annotation is not looked at.

    Raises:
        TypeError: One is of another type. The message says which, what it takes, and what was given.
        ValueError: One is a text, and none of those that it takes.
    """
    hints = _hints(function)
    for name, value in given.items():
        kinds = hints.get(name, ())
        if kinds and type(value) not in kinds and not any(_fits(value, kind) for kind in kinds):
            if isinstance(value, str) and any(get_origin(kind) is Literal for kind in kinds):
                choices = [choice for kind in kinds for choice in _choices(kind)]
                raise ValueError(f"{within}{name}={value!r} is none of {', '.join(map(repr, choices))}")
            is_short = type(value).__module__ == "builtins" and len(repr(value)) <= _SHOWN
            shown = f"{value!r} ({type(value).__name__})" if is_short else type(value).__name__
            raise TypeError(f"{within}{name} takes {_words(kinds)}, not {shown}")
        if isinstance(value, tuple) and hasattr(value, "_asdict"):
            check_arguments(type(value), value._asdict(), f"{name}.")


@cache
def _hints(function: Callable[..., object]) -> dict[str, tuple[Any, ...]]:
    """Return the types that each argument takes."""
    newer = {"Unpack": Optional, "Self": Any}  # than Python 3.10, and of no argument
    return {name: _alternatives(hint) for name, hint in get_type_hints(function, localns=newer).items()}


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in _UNIONS else (hint,)


def _choices(kind: Any) -> tuple[object, ...]:
    return get_args(kind) if get_origin(kind) is Literal else {bool: (True, False), NoneType: (None,)}.get(kind, ())


def _fits(value: Any, hint: Any) -> bool:
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in _UNIONS:
        return any(_fits(value, one) for one in inner)
    if kind is Literal:
        return any(value is one or (type(value) is type(one) and value == one) for one in inner)
    if kind in (int, float):
        return isinstance(value, SupportsIndex if kind is int else SupportsFloat) and not isinstance(value, bool)
    if kind is BinaryIO:
        return hasattr(value, "read")
    if not isinstance(kind, type) or kind is Any or is_typeddict(kind):
        return True
    if not isinstance(value, kind) or isinstance(value, Mapping) != issubclass(kind, Mapping):
        return False
    held: Any = value
    if isinstance(value, Mapping):
        return not inner or all(_fits(key, inner[0]) and _fits(one, inner[1]) for key, one in value.items())
    if kind is tuple:
        return len(held) == len(inner) and all(map(_fits, held, inner))
    return not _is_list(kind, inner) or all(_fits(one, inner[0]) for one in held)


def _is_list(kind: Any, inner: tuple[Any, ...]) -> bool:
    return len(inner) == 1 and hasattr(kind, "__len__")


def _words(kinds: tuple[Any, ...]) -> str:
    words = [_word(kind) for kind in kinds]
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _word(hint: Any) -> str:
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind is Literal:
        return ", ".join(map(repr, inner))
    if _is_list(kind, inner):
        return f"a list (each {_words(_alternatives(inner[0]))})"
    if kind in _WORDS:
        return _WORDS[kind]
    package = "ckptool" if kind.__module__.startswith("ckptool.") else kind.__module__
    return f"{package}.{kind.__name__}".removeprefix("builtins.")
