"""Messages about a missing name, with the existing one that was probably meant."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Final

from ckptool.messages import quoted

if TYPE_CHECKING:
    from typing_extensions import Self  # typing has it since Python 3.11

_COMPARED: Final = 64
"""How many names are compared letter by letter: those that share most components with the missing one."""
_LONGEST: Final = 512
"""Characters of the longest name that is compared: the time grows with their square."""


class Missing(str):
    """
    A missing name: a string equal to that name, whose ``repr`` is the whole message.

    Programs may look up many missing names and show few, so the nearest name is searched only for the ``repr``.
    """

    __slots__ = ("_names",)
    _names: Collection[str]

    def __new__(cls, name: str, names: Collection[str]) -> Self:
        made = super().__new__(cls, name)
        made._names = names
        return made

    def __repr__(self) -> str:
        return not_there(str(self), self._names)

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)  # only the name is pickled, not the names of the file


def not_there(name: str, names: Collection[str]) -> str:
    """Return the message for a missing name, with the name that was probably meant and a prefix that differs."""
    fact = f"{_quoted(name)} is not there"
    longer = min((other for other in names if other.endswith(f".{name}")), key=len, default=None)
    if longer is not None:
        prefix = longer[: -len(name)]
        every = all(other.startswith(prefix) for other in names)
        return f"{fact}; {_quoted(longer)} is{f': every name begins with {_quoted(prefix)}' if every else ''}"
    shorter = max((other for other in names if other and name.endswith(f".{other}")), key=len, default=None)
    if shorter is not None:
        prefix = name[: -len(shorter)]
        none = not any(other.startswith(prefix) for other in names)
        return f"{fact}; {_quoted(shorter)} is{f': no name begins with {_quoted(prefix)}' if none else ''}"
    near = next(iter(_alike(name, names, 1)), None)
    return fact if near is None else f"{fact}; {_quoted(near)} is"


def by_likeness(name: str, names: Collection[str]) -> list[str]:
    """Return the names, those most similar to ``name`` first, and then the others in their order."""
    return list(dict.fromkeys((*_alike(name, names, _COMPARED), *names)))


def _alike(name: str, names: Iterable[str], most: int) -> list[str]:
    from difflib import get_close_matches
    from heapq import nlargest

    if len(name) > _LONGEST:
        return []
    components = set(name.split("."))
    short = (other for other in names if len(other) <= _LONGEST)
    compared = nlargest(_COMPARED, short, key=lambda other: len(components.intersection(other.split("."))))
    return get_close_matches(name, compared, most)


def _quoted(name: str) -> str:
    return quoted(name, 200)
