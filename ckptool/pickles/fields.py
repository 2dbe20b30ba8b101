"""
Small dicts with the same keys again and again, as the states of many objects of one class: the keys are held once.

A list of pairs takes thrice the memory, which counts where a pickle has hundreds of thousands of objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, overload

from ckptool.pickles.nodes import Inert, Pairs

_MOST_NAMES: Final = 16
_MOST_KINDS: Final = 16


class Fields(Sequence[tuple[Inert, Inert]]):
    """The pairs of a dict, made when they are asked for."""

    __slots__ = ("_names", "_values")

    def __init__(self, names: tuple[str, ...], values: tuple[Inert, ...]) -> None:
        self._names = names
        self._values = values

    def __iter__(self) -> Iterator[tuple[Inert, Inert]]:
        return zip(self._names, self._values, strict=True)

    def __reversed__(self) -> Iterator[tuple[Inert, Inert]]:
        return zip(reversed(self._names), reversed(self._values), strict=True)

    def __len__(self) -> int:
        return len(self._names)

    @overload
    def __getitem__(self, at: int) -> tuple[Inert, Inert]: ...
    @overload
    def __getitem__(self, at: slice) -> Pairs: ...
    def __getitem__(self, at: int | slice) -> tuple[Inert, Inert] | Pairs:
        return list(self)[at]


class FieldNames:
    """The keys that were met."""

    __slots__ = ("_kinds",)

    def __init__(self) -> None:
        self._kinds: list[tuple[str, ...]] = []

    def pairs(self, items: list[Inert]) -> Pairs | None:
        """Return pairs of keys and values in turn; None if they are not of the first kinds of small dict."""
        if len(items) > 2 * _MOST_NAMES:
            return None
        names = tuple(items[::2])
        for known in self._kinds:  # compared, not hashed: nobody has looked at them
            if known == names:
                return Fields(known, tuple(items[1::2]))
        if len(self._kinds) == _MOST_KINDS or not all(type(name) is str for name in names):
            return None
        self._kinds.append(names)
        return Fields(names, tuple(items[1::2]))
