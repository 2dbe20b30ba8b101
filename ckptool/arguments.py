"""Check the arguments of public functions against their annotations, before anything is read."""

from __future__ import annotations

import codecs
import re
import sys
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, wraps
from inspect import signature
from types import UnionType
from typing import Any, BinaryIO, Final, Literal, SupportsFloat, SupportsIndex, Union, get_args, get_origin

if sys.version_info >= (3, 11):
    from typing import Unpack as Unpack
elif typing.TYPE_CHECKING:
    from typing_extensions import Unpack as Unpack
else:
    Unpack = typing.Optional  # for annotations alone

_P = typing.ParamSpec("_P")
_R = typing.TypeVar("_R")
_PLAIN: Final = {int: SupportsIndex, float: SupportsFloat}  # numpy's numbers are accepted like Python's
_MODULES: Final = re.compile(r"\b(typing|types|os|collections\.abc|torch\.optim|ckptool)(\.[a-z_]+)*\.(?=[A-Z])")
_UNIONS: Final = (Union, UnionType)
_MEANT: Final = {"device": "to", "map_location": "to", "to": "device", "overwrite": "force", "prefix": "strip_prefix"}
"""Wrong keywords that people use, and the argument that each means."""

UTF_16_MARKS: Final = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def as_utf8(text: bytes) -> bytes:
    """Return text in UTF-8 or UTF-16 as UTF-8 without a byte order mark: PowerShell's ``>`` writes UTF-16."""
    if text.startswith(UTF_16_MARKS):
        return text.decode("utf-16", "replace").encode()
    return text.removeprefix(codecs.BOM_UTF8)


def checked(*but: str, options: Collection[str] = ()) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """
    Decorate a function so that each call checks its arguments by ``check_arguments``, and its keywords' spelling.

    ``but`` names arguments that the function checks itself, ``options`` are the names of its ``**options``.
    """

    def of(function: Callable[_P, _R]) -> Callable[_P, _R]:
        takes = signature(function).parameters

        @wraps(function)
        def call(*args: _P.args, **given: _P.kwargs) -> _R:
            _refuse_unknown(function, given, (*takes, *options))
            named = {**dict(zip(takes, args, strict=False)), **given}
            check_arguments(function, {name: value for name, value in named.items() if name not in but})
            hints = _hints(function)
            plain = (_as_python(value, hints.get(name, ())) for name, value in zip(takes, args, strict=False))
            named = {name: _as_python(value, hints.get(name, ())) for name, value in given.items()}
            return function(*plain, *args[len(takes) :], **named)  # type: ignore[arg-type]

        return call

    return of


def spelled_right(fields: type[_R]) -> type[_R]:
    """Decorate a named tuple so that a misspelt field is refused with the nearest one."""
    new = fields.__new__

    @wraps(new)
    def make(cls: type[_R], *args: Any, **given: Any) -> _R:
        _refuse_unknown(fields, given, list(signature(new).parameters))
        return new(cls, *args, **given)

    fields.__new__ = staticmethod(make)  # type: ignore[assignment]
    return fields


def _refuse_unknown(function: Callable[..., object], given: Collection[str], known: Collection[str]) -> None:
    if unknown := next((name for name in given if name not in known), None):
        from difflib import get_close_matches  # imported only for unknown names

        words = {word: meant for word, meant in _MEANT.items() if meant in known} | {name: name for name in known}
        near = "".join(f": did you mean {words[one]!r}?" for one in get_close_matches(unknown, words, 1))
        raise TypeError(f"{function.__qualname__}() got an unexpected keyword argument {unknown!r}{near}")


def check_arguments(function: Callable[..., object], given: Mapping[str, object], within: str = "") -> None:
    """
    Compare arguments with the annotations of a function, or of a named tuple; skip those without an annotation.

    ``within`` is put before the names in messages.

    Raises:
        TypeError: One has another type. The message says which, what it takes, and what was given.
        ValueError: One is a text that is not among the allowed ones, or an empty text where a sequence is allowed.
    """
    hints = _hints(function)
    for name, value in given.items():
        kinds = hints.get(name, ())
        if kinds and type(value) not in kinds and not any(_fits(value, kind) for kind in kinds):
            choices = [one for kind in kinds if get_origin(kind) is Literal for one in get_args(kind)]
            if choices and isinstance(value, str):
                choices += [True, False] if bool in kinds else []
                raise ValueError(f"{within}{name}={value!r} is none of {', '.join(map(repr, choices))}")
            is_short = type(value).__module__ == "builtins" and len(repr(value)) <= 60
            shown = f"{value!r} ({type(value).__name__})" if is_short else type(value).__name__
            also = ": give what its state_dict() returns" if name == "state" and hasattr(value, "state_dict") else ""
            raise TypeError(f"{within}{name} takes {' | '.join(map(_spelled, kinds))}, not {shown}{also}")
        if value == "" and any(get_origin(kind) is Sequence for kind in kinds):
            raise ValueError(f"{within}{name}={value!r} is empty: leave it out, or fill it in")
        if isinstance(value, tuple) and hasattr(value, "_asdict"):
            check_arguments(type(value), value._asdict(), f"{name}.")


@cache
def _hints(function: Callable[..., object]) -> dict[str, tuple[Any, ...]]:
    """Return the types that each argument takes, by its name; a union as its members."""
    from typing import Optional, get_type_hints

    newer = {"Unpack": Optional, "Self": Any}  # names that ``typing`` of Python 3.10 lacks, and that no argument has
    hints = get_type_hints(function, localns=newer).items()
    return {name: get_args(hint) if get_origin(hint) in _UNIONS else (hint,) for name, hint in hints}


def _as_python(value: Any, kinds: tuple[Any, ...]) -> Any:
    """Return a number of another library as one of Python: sums with its own may be rounded, or overflow."""
    if isinstance(value, int | float | str):
        return value
    for kind, like in _PLAIN.items():
        if kind in kinds and isinstance(value, like):
            return kind(value)
    return value


def _spelled(kind: Any) -> str:
    """Return a type as annotations write it, without the names of modules."""
    text = str(kind) if get_args(kind) else f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    return _MODULES.sub("", text).replace("NoneType", "None")


def _fits(value: Any, hint: Any) -> bool:
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in _UNIONS:
        return any(_fits(value, one) for one in inner)
    if kind is Literal:
        return any(type(value) is type(one) and value == one for one in inner)
    if kind is BinaryIO:
        return hasattr(value, "read")
    if not isinstance(kind, type) or kind is Any or hasattr(kind, "__total__"):  # a TypedDict
        return True
    is_right = isinstance(value, _PLAIN.get(kind, kind)) and not (kind in _PLAIN and isinstance(value, bool))
    if not is_right or isinstance(value, Mapping) != issubclass(kind, Mapping):
        return False
    if isinstance(value, Mapping):
        return not inner or all(_fits(key, inner[0]) and _fits(one, inner[1]) for key, one in value.items())
    if kind is tuple:
        return len(value) == len(inner) and all(map(_fits, value, inner))
    return len(inner) != 1 or not hasattr(kind, "__len__") or all(_fits(one, inner[0]) for one in value)
