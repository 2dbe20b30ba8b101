"""What callers may pass for options of which there are only so many."""

from __future__ import annotations


def check_choice(option: str, given: object, choices: tuple[object, ...]) -> None:
    """Raise ValueError if an option is given what it does not take: a misspelling must not pass for another choice."""
    if given not in choices:
        raise ValueError(f"{option}={given!r} is none of {', '.join(map(repr, choices))}")
