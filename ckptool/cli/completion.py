"""``ckptool completion``: what makes a shell complete verbs, options and files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import click

from ckptool.cli.verbs import Command

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_SHELLS = ("bash", "zsh", "fish")


def choices(found: Callable[[], Iterable[str]], *, is_list: bool = False) -> Callable[..., list[CompletionItem]]:
    """Return what completes the value of an option by one of several; with ``is_list``, the last of some by commas."""

    def complete(_ctx: click.Context, _param: click.Parameter, typed: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        before, comma, last = typed.rpartition(",") if is_list else ("", "", typed)
        return [CompletionItem(f"{before}{comma}{one}") for one in found() if one.startswith(last)]

    return complete


@click.command(cls=Command)
@click.argument("shell", required=False, type=click.Choice(_SHELLS), metavar="[bash|zsh|fish]")
def completion(shell: str | None) -> None:
    """
    Print the code with which a shell completes verbs, options and files.

    Without a name, it is for the shell that you use ($SHELL). Put the line for your shell, below, into the file that
    the shell reads when it starts.
    """
    from click.shell_completion import get_completion_class

    from ckptool.cli import cli

    name = shell or os.path.basename(os.environ.get("SHELL", ""))
    found = get_completion_class(name) if name in _SHELLS else None
    if found is None:
        raise click.UsageError(f"name a shell: {', '.join(_SHELLS)}")
    click.echo(found(cli, {}, "ckptool", "_CKPTOOL_COMPLETE").source())
