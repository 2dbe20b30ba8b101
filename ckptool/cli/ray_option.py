"""The option ``--ray`` of verbs, behind which an address may stand. What runs on Ray is imported where it is given."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

LOCAL: Final = "local"
_ADDRESS: Final = re.compile(r"(ray://.+|[\w.-]+:\d+|\[[0-9a-fA-F:]+\]:\d+|auto|local)")
"""What may follow the option: anything else is the next argument."""


class RayCommand(click.Command):
    """A command with ``--ray``, behind which an address may stand, or the next argument."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        for index in range(end):
            if args[index] == "--ray" and not (index + 1 < end and _ADDRESS.fullmatch(args[index + 1])):
                args[index] = f"--ray={LOCAL}"
        return super().parse_args(ctx, args)


def ray_option(what: str) -> Callable[[F], F]:
    """Return what adds ``--ray`` to a ``RayCommand``."""
    return click.option(
        "--ray", metavar="[ADDRESS]", help=f"{what} on Ray: the one at ADDRESS, or one that is started here."
    )
