"""What to call a file: in messages and commands, without what is secret in an address, and as a copy in a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

from ckptool import system


def is_far(path: str) -> bool:
    """Say whether this is the address of something that is read, or written to, far away."""
    if "://" not in path:
        return False
    from ckptool.sources.remote.address import is_address

    return is_address(path)


def is_relative(path: str) -> bool:
    """Say whether a path starts from the folder that a process is in."""
    return not (is_far(path) or os.path.isabs(path))


def is_folder(path: str) -> bool:
    """Say whether a path leads to a folder, or an address is that of one."""
    return path.endswith("/") if is_far(path) else os.path.isdir(path)


def below(folder: str, name: str) -> str:
    """Return the path of something in a folder; of an address, reached in the same way."""
    path = os.path.join(folder, name)
    if not is_far(folder):
        return path
    from ckptool.sources.remote.address import as_remote

    return as_remote(folder).elsewhere(path)


def shown_path(path: str | os.PathLike[str]) -> str:
    """Return what to call a file in messages: its path; of an address, of any scheme, what is not secret in it."""
    text = os.fspath(path)
    if "://" not in text:
        return text
    from ckptool.sources.remote.address import as_remote

    return as_remote(text).shown


def local_name(path: str) -> str:
    """Return what a copy of a file would be called here: its path; of an address, the name at its end."""
    shown = shown_path(path)
    return shown.rpartition("/")[2] if "://" in shown else path


def command_line(path: str, verb: str, *words: str, **options: str | bool | Sequence[str]) -> str:
    """
    Return a command line for the shell of this system.

    ``options`` are those of the verb, each value of a sequence one option; what is false or empty is left out.
    ``words`` follow them as they are.
    """
    shown = f"./{path}" if path.startswith("-") else shown_path(path)  # or it would be taken for an option
    return system.command_line("ckptool", verb, shown, *_spelled(options), *words)


def _spelled(options: Mapping[str, str | bool | Sequence[str]]) -> Iterator[str]:
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            yield flag
        elif value:
            for one in (value,) if isinstance(value, str) else value:
                yield from (flag, one)
