"""Run the command line in a real terminal of so many columns."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from typing import NamedTuple

_DRAWN_OVER = re.compile(r"[^\n]*\r\x1b\[2K")
STYLES = re.compile(r"\x1b\[[0-9;]*m")
_END = b"\0all of it\0"


class Screen(NamedTuple):
    """What a terminal was sent, and how it ended."""

    raw: str
    code: int

    @property
    def styled(self) -> list[str]:
        """The lines that stay: what was drawn over is gone."""
        return _DRAWN_OVER.sub("", self.raw.replace("\r\n", "\n")).splitlines()

    @property
    def lines(self) -> list[str]:
        """The lines that stay, without styles."""
        return [STYLES.sub("", line) for line in self.styled]


def on_terminal(arguments: Sequence[object], columns: int = 80, *, before: str = "pass", **options: str) -> Screen:
    """Run ``ckptool`` with these arguments after a statement, on a terminal."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    code = (
        f"import sys; sys.argv = {['ckptool', *map(str, arguments)]!r}; {before}; from ckptool.cli import main; main()"
    )
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "PAGER", "LESS")}
    environment = kept | {"TERM": "xterm-256color"} | options
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=environment) as process:
        found = b""
        while process.poll() is None:
            if select.select([leader], [], [], 0.02)[0]:
                found += os.read(leader, 1 << 16)
    # Where the last one to have a terminal open closes it, Linux may lose what was written just before: this end stays
    # open until all has come, which a mark behind it shows.
    os.write(follower, _END)
    while not found.endswith(_END):
        found += os.read(leader, 1 << 16)
    os.close(follower)
    os.close(leader)
    return Screen(found.removesuffix(_END).decode(), process.returncode)
