"""What is refused in place, and can be had as a copy."""

from __future__ import annotations

from ckptool.errors import MigrationRefused

_COPY = "Write a copy instead."


def not_in_place(fact: str) -> MigrationRefused:
    """Return the error for what cannot be done without a tensor being moved, or not so that every reader takes it."""
    return MigrationRefused(fact, kind="not-in-place", hint=_COPY)


def no_room(what: str, needed: int, room: int, fits: str = "Shorter names fit.") -> MigrationRefused:
    """Return the error for an index that would not have the size of the old one; ``fits`` says what would."""
    return MigrationRefused(what, kind="no-room", hint=f"{fits} Else write a copy instead.", needed=needed, actual=room)


def too_long(what: str, needed: int, room: int) -> MigrationRefused:
    """Return the error for an index that would be longer than the old one."""
    return no_room(f"{what} would have {needed:,} bytes, and there is room for {room:,}", needed, room)
