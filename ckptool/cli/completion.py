"""``ckptool completion``: what makes a shell complete verbs, options and files."""

from __future__ import annotations

import os

import click

from ckptool.cli.verbs import Command

_SHELLS = ("bash", "zsh", "fish", "powershell")


@click.command(cls=Command)
@click.argument("shell", required=False, type=click.Choice(_SHELLS), metavar="[bash|zsh|fish|powershell]")
def completion(shell: str | None) -> None:
    """
    Print the code with which a shell completes verbs, options and files.

    Without a name, it is for the shell that you use ($SHELL). Put the line for your shell, below, into the file that
    the shell reads when it starts.
    """
    from click.shell_completion import get_completion_class

    from ckptool.cli import cli

    name = shell or os.path.basename(os.environ.get("SHELL", "")).removesuffix(".exe")
    found = get_completion_class(name) if name in _SHELLS else None
    if found is None:
        needs = "for PowerShell, click 8.5 or newer is needed: pip install -U click"
        raise click.UsageError(needs if name in _SHELLS else f"name a shell: {', '.join(_SHELLS)}")
    click.echo(found(cli, {}, "ckptool", "_CKPTOOL_COMPLETE").source())
