"""
Paths and addresses on the command line: the shell completes paths, and whoever opens one says what is wrong with it.

How a file far away is reached is said by options, which are read before any path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

_ASKED: Final = "ckptool.remote"
"""Where a context keeps how files far away are reached."""


class AnyPath(click.Path):
    """A path as it was given; ``click.Path`` asks the system about it, which takes no NUL."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ARG002
        asked = ctx.meta.get(_ASKED) if ctx is not None else None
        if asked and isinstance(value, str) and "://" in value:
            from ckptool.sources.remote.address import Remote  # few files are far away

            return Remote(value, **asked)
        return value


def _ask(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    if value not in (None, False):
        ctx.meta.setdefault(_ASKED, {})[param.name] = value


_OPTIONS: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    (
        "--endpoint",
        {"metavar": "URL", "help": "Address of the store for s3://, gs:// and az://, or of the hub for hf://."},
    ),
    ("--region", {"metavar": "NAME", "help": "Region of a bucket of s3://."}),
    ("--anonymous", {"is_flag": True, "help": "Use no keys: for what everybody may read."}),
    (
        "--connections",
        {"type": click.IntRange(1, 64), "metavar": "N", "help": "Fetch N parts of 6 MiB at once; by default 16."},
    ),
    ("--download", {"is_flag": True, "help": "Fetch into a temporary file what https:// gives only as a whole."}),
)


def as_asked(path: str) -> str:
    """Return a path of a list; an address of it with how files far away are reached."""
    found: str = AnyPath().convert(path, None, click.get_current_context())
    return found


def reach_options(command: F) -> F:
    """Add the options that say where stores are, and who asks."""
    return _added(command, _OPTIONS[:3])


def far_options(command: F) -> F:
    """Add the options that say how files far away are reached."""
    return _added(command, _OPTIONS)


def _added(command: F, options: tuple[tuple[str, dict[str, Any]], ...]) -> F:
    for name, how in reversed(options):
        command = click.option(name, expose_value=False, is_eager=True, callback=_ask, **how)(command)
    return command
