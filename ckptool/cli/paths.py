"""Paths on the command line: the shell completes them, and whoever opens one says what is wrong with it."""

from __future__ import annotations

from typing import Any

import click


class AnyPath(click.Path):
    """A path as it was given; ``click.Path`` asks the system about it, which takes no NUL."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ARG002
        return value
