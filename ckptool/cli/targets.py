"""
Paths and addresses on the command line: the shell completes paths, and whoever opens one says what is wrong with it.

How a file far away is reached is said by options, which are read before any path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import click

from ckptool.cli.verbs import F, together

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


def _of_reach(name: str, says: str, **how: Any) -> Callable[[F], F]:
    return click.option(name, expose_value=False, is_eager=True, callback=_ask, help=says, **how)


reach_options = together(
    _of_reach("--endpoint", "Address of the store for s3://, gs:// and az://, or of the hub for hf://.", metavar="URL"),
    _of_reach("--region", "Region of a bucket of s3://.", metavar="NAME"),
    _of_reach("--anonymous", "Use no keys: for what everybody may read.", is_flag=True),
)
"""What says where stores are, and who asks."""
_HOW_MANY: Final = "Fetch N parts of 6 MiB at once; by default 16."
far_options = together(
    reach_options,
    _of_reach("--connections", _HOW_MANY, type=click.IntRange(1, 64), metavar="N"),
    _of_reach("--download", "Fetch into a temporary file what https:// gives only as a whole.", is_flag=True),
)
"""What says how files far away are reached."""


def as_asked(path: str) -> str:
    """Return a path of a list; an address of it with how files far away are reached."""
    found: str = AnyPath().convert(path, None, click.get_current_context())
    return found
