"""Many small cases in one test: each is run, and one that fails is named."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import pytest


def each(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """
    Do what ``parametrize`` does, for cases that take a few milliseconds, in one test.

    Fixtures are made once for all cases; but each case has a folder of its own in ``tmp_path``.
    """
    cases = list(cases)
    assert cases

    def fold(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)
        wanted = (names,) if isinstance(names, str) else names

        @wraps(test)
        def folded(**fixtures: Any) -> None:
            reasons = list[BaseException]()
            for number, case in enumerate(cases):
                given = {names: case} if isinstance(names, str) else dict(zip(names, case, strict=True))
                if "tmp_path" in fixtures:
                    given["tmp_path"] = fixtures["tmp_path"] / str(number) / "alone"
                    given["tmp_path"].mkdir(parents=True)
                try:
                    test(**{**fixtures, **given})
                except pytest.skip.Exception as skipped:
                    reasons.append(skipped)
                except (Exception, pytest.fail.Exception) as error:
                    shown = ", ".join(f"{name} = {given[name]!r}" for name in wanted)
                    raise AssertionError(shown) from error
            if len(reasons) == len(cases):
                raise reasons[0]

        rest = [one for one in signature.parameters.values() if one.name not in wanted]
        folded.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
        return folded

    return fold
