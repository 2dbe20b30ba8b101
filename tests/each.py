"""Many small cases in one test: each is run, and one that fails is named."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


def each(name: str, cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """Do what ``parametrize`` does, for cases that take less than a millisecond, in one test."""

    def fold(test: Callable[..., None]) -> Callable[[], None]:
        def folded() -> None:
            for case in cases:
                try:
                    test(**{name: case})
                except Exception as error:
                    raise AssertionError(f"{name} = {case!r}") from error

        folded.__name__, folded.__doc__, folded.__module__ = test.__name__, test.__doc__, test.__module__
        return folded

    return fold
