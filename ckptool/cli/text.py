"""The text of an error, as every verb prints it."""

from __future__ import annotations

from ckptool.errors import CkptoolError
from ckptool.messages import show


def error_text(error: CkptoolError) -> str:
    """Return the one to three lines that a person sees of an error: the fact, what to do about it, what to run."""
    hint = f"\nHint: {show(error.hint)}" if error.hint else ""
    command = f"\nRun: {show(error.command)}" if error.command and error.command not in error.message else ""
    return f"Error: {show(str(error))}{hint}{command}"
