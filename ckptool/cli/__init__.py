"""
The command line itself: runs a verb, and turns errors and interrupts into messages and exit codes. One module for each
verb, imported when it is used.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from errno import ENOMEM
from typing import Any

import click

import ckptool.system as system
from ckptool import __version__
from ckptool.cli.text import error_text, print_in_any_encoding, say
from ckptool.cli.verbs import Verbs, color_option
from ckptool.errors import CkptoolError, reason_of
from ckptool.messages import show


@contextmanager
def _ends_unread() -> Iterator[None]:
    """
    End quietly, by a signal, if nobody reads the output any more, as grep does before `head`.

    Until then the signal is ignored, because a worker or a server that has gone would raise it, too.
    """
    try:
        yield
    except OSError as error:
        if not system.is_unread(error):
            raise
        if hasattr(signal, "SIGPIPE"):
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            signal.raise_signal(signal.SIGPIPE)
        os._exit(2)  # at once, like a signal: what is left to print would fail again


class _Command(Verbs):
    """The verbs; it turns their errors into messages and exit codes."""

    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        """Parse arguments; this may print a help."""
        with _ends_unread():  # click would exit with another code
            try:
                return super().make_context(*arguments, **options)
            except KeyboardInterrupt:  # click would print a line
                raise click.exceptions.Exit(130) from None

    def invoke(self, ctx: click.Context) -> Any:
        """Run a verb; an error about a file or a device that it lets through is two lines, never a traceback."""
        with _ends_unread():
            try:
                return super().invoke(ctx)
            except CkptoolError as error:
                if _interrupts:
                    ctx.exit(130)
                say(error_text(error), err=True)
                ctx.exit(2)
            except KeyboardInterrupt:
                ctx.exit(130)


@click.group(cls=_Command, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", prog_name="ckptool")
@color_option()
@click.pass_context
def cli(ctx: click.Context) -> None:
    """
    Open any PyTorch checkpoint without running it.

    'ckptool FILE' is 'ckptool inspect FILE'. 'ckptool VERB --help' says more about a verb.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


_interrupts: list[int] = []
"""The interrupts so far; some became other errors in a package that was being imported."""


def _interrupt(number: int, _frame: object) -> None:
    _interrupts.append(number)
    raise KeyboardInterrupt


def main() -> None:
    """Run the command line; what ``ckptool`` and ``python -m ckptool`` call."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not in the background, where it is ignored
        signal.signal(signal.SIGINT, _interrupt)
    code = _exit_code()
    with suppress(OSError):
        sys.stderr.flush()
    # Freeing a tree of a million nodes one by one takes longer than printing it: the system does it at once.
    os._exit(code)


def _exit_code() -> int:
    """Run a verb and return its exit code. Each failure is a line on stderr; code 1 is for what a verb found."""
    if sys.stderr is None:  # closed: messages are lost
        sys.stderr = io.StringIO()
    if sys.stdin is None:
        sys.stdin = io.TextIOWrapper(io.BufferedReader(_ClosedInput()))
    if sys.stdout is None:
        return _failed("standard output is closed")
    print_in_any_encoding()
    try:
        with _ends_unread():
            try:
                code = cli.main(prog_name="ckptool", standalone_mode=False, windows_expand_args=False)
            except SystemExit as stop:
                code = stop.code
            sys.stdout.flush()
    except (KeyboardInterrupt, click.Abort):
        return 130
    except click.ClickException as error:
        return _said(error.show)
    except MemoryError:
        return _failed("there is not enough memory")
    except OSError as error:
        if error.errno == ENOMEM:
            return _failed("there is not enough memory")
        what = "the output cannot be written" if error.filename is None else os.fsdecode(error.filename)
        return _failed(f"{what}: {reason_of(error)}")
    except Exception as error:  # noqa: BLE001 - a traceback is for those who ask for it
        if os.environ.get("CKPTOOL_TRACEBACK"):
            import traceback

            _said(traceback.print_exc)
        what = " ".join(f"{type(error).__name__}: {error}".split())
        return _failed(f"unforeseen: {what}; report it with the output of CKPTOOL_TRACEBACK=1")
    return code if isinstance(code, int) else 0


class _ClosedInput(io.RawIOBase):
    """Stands for a standard input that is closed: reading it raises an error that says so."""

    def readable(self) -> bool:
        return True

    def readinto(self, _buffer: object) -> int:
        raise click.ClickException("standard input is closed")


def _failed(message: str) -> int:
    return _said(lambda: say(f"Error: {show(message)}", err=True))


def _said(say: Callable[[], object]) -> int:
    """Print what went wrong, if stderr can be written, and return 2; print nothing after an interrupt."""
    if _interrupts:
        return 130
    with suppress(OSError):
        say()
    return 2
