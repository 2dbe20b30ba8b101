"""One line on a terminal that says how far a long reading or writing is: share, bytes, rate, what remains."""

from __future__ import annotations

import os
import sys
import time
from typing import Final

import click

from ckptool.checkpoints.tables import cut_middle
from ckptool.messages import show, show_nbytes
from ckptool.sources.naming import local_name

_SECONDS_UNTIL_SHOWN: Final = 0.5
_SECONDS_BETWEEN: Final = 0.1
_SHARE_OF_A_RATE: Final = 0.02
_SECONDS_OF_A_RATE: Final = 3.0
"""What must have been done, of either, for the rate to say how long the rest takes: the first bytes wait for much."""
_BAR: Final = 24
_ROOM_FOR_BAR: Final = 100
"""Columns of a terminal from which on there is room for a bar beside the figures."""
_CLEAR: Final = "\r\x1b[2K"


class ProgressLine:
    """
    Called with what is done and what there is in all. Shown on stderr where that is a terminal, once half a second has
    passed, and gone at the end. A verb has one for all its files, of which ``next`` begins another.
    """

    def __init__(self, files: int = 1, *, shown: bool = True) -> None:
        self._is_shown = shown and sys.stderr is not None and sys.stderr.isatty()
        self._files = files
        self._number = 0
        self._name = ""
        self._read_back_begun: float | None = None
        self._begun = self._file_begun = time.monotonic()
        self._last = 0.0

    def next(self, path: str) -> None:
        self._number += 1
        self._read_back_begun = None
        self._file_begun = time.monotonic()
        self._name = show(os.path.basename(local_name(path).rstrip(os.sep)) or path)

    def __call__(self, done: int, total: int) -> None:
        self._show(done, total, self._file_begun)

    def _show(self, done: int, total: int, begun: float, what: str = "") -> None:
        if not self._is_shown:
            return
        now = time.monotonic()
        if now - self._begun < _SECONDS_UNTIL_SHOWN or now - self._last < _SECONDS_BETWEEN:
            return
        self._last = now
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
        line = self._line(done, total, now - begun, columns or _ROOM_FOR_BAR, what)
        click.echo(f"{_CLEAR}{line}", nl=False, err=True)

    def read_back(self, done: int, total: int) -> None:
        """Show how far the reading of what was written has come."""
        if self._read_back_begun is None:
            self._read_back_begun = time.monotonic()
        self._show(done, total, self._read_back_begun, "reading back ")

    def clear(self) -> None:
        """Make room for what is printed next."""
        if self._last:
            click.echo(_CLEAR, nl=False, err=True)
            self._last = 0.0

    def _line(self, done: int, total: int, seconds: float, columns: int, what: str) -> str:
        share = min(1.0, done / total) if total else 1.0
        rate = done / seconds if seconds > 0 else 0.0
        facts = f"{share:4.0%}  {show_nbytes(min(done, total))} of {show_nbytes(total)}"
        facts += f"  {show_nbytes(int(rate))}/s" if rate else ""
        is_steady = share >= _SHARE_OF_A_RATE or seconds >= _SECONDS_OF_A_RATE
        facts += f"  {_clock((total - done) / rate)} left" if rate and is_steady and done < total else ""
        number = f"{self._number:,}/{self._files:,} " if self._files > 1 else ""
        number += what
        bar = f"{_bar(share)} " if columns >= _ROOM_FOR_BAR else ""
        room = max(8, columns - 1 - len(number) - len(bar) - len(facts) - 2)
        return f"{number}{cut_middle(self._name, room)}  {bar}{facts}"[: columns - 1]


def _bar(share: float) -> str:
    full = round(share * _BAR)
    return "━" * full + "─" * (_BAR - full)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
