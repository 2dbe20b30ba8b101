"""The text of an error, as every verb prints it."""

from __future__ import annotations

import re

from ckptool.errors import OPTION, CkptoolError
from ckptool.messages import show


def with_options(text: str) -> str:
    """Return a hint with its options as they are written on the command line: `force=True` as --force."""
    return re.sub(OPTION, lambda found: _spelled(found[1], found[2]), text)


def _spelled(name: str, value: str) -> str:
    flag = "--model-arg" if name == "model_arguments" else f"--{name.replace('_', '-')}"
    return flag if value in ("", "True") else f"{flag} {value.strip(chr(39))}"


def error_text(error: CkptoolError) -> str:
    """Return the one to three lines that a person sees of an error: the fact, what to do about it, what to run."""
    hint = f"\nHint: {show(with_options(error.hint))}" if error.hint else ""
    command = f"\nRun: {show(error.command)}" if error.command and error.command not in error.message else ""
    return f"Error: {show(str(error))}{hint}{command}"
