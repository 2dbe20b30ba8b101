"""
Text on a terminal: errors, reports in colours, progress, and the pager.

``ProgressLine`` shows the progress of long reading or writing on a terminal: share, bytes, rate, time that remains.
"""

from __future__ import annotations

import codecs
import io
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import click

import ckptool.system as system
from ckptool.errors import OPTION, CkptoolError
from ckptool.messages import show, show_nbytes
from ckptool.sections import Fact, Lines, Section, Table, cut_middle, fitted, section_lines
from ckptool.sources.paths import local_name

_HANGING: Final = " " * 15
"""The indent of lines that continue a labelled one."""
_SENTENCE: Final = re.compile(r"(?:Error|Hint|Note): |[AB]  |(?:different|the same)\b")
"""How lines without an indent begin that are not paths: errors, and what `diff` prints about both files."""
_NARROWEST: Final = 40
"""Text in narrower columns than this is not readable: the terminal may break it."""
_PLAIN: Final = {"…": "...", "→": "->", "·": ".", "×": "x", "–": "-"}
"""What is printed instead of these if an encoding does not have them."""
pages: list[list[str]] = []
"""Text that waits for the pager, while there is one."""


def print_in_any_encoding() -> None:
    """Print escapes of characters that the encoding of standard output does not have, as a code page of Windows."""
    if isinstance(sys.stdout, io.TextIOWrapper) and codecs.lookup(sys.stdout.encoding).name != "utf-8":
        codecs.register_error("ckptool", _escaped)
        sys.stdout.reconfigure(errors="ckptool")


def can_print(text: str) -> bool:
    """Return whether the encoding of standard output has all characters of a text."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _escaped(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    found = error.object[error.start : error.end]
    return "".join(_PLAIN.get(one) or one.encode("ascii", "backslashreplace").decode() for one in found), error.end


def with_options(text: str) -> str:
    """Return a hint with its options as they are written on the command line: `force=True` as --force."""

    def spelled(found: re.Match[str]) -> str:
        name, value = found.groups()
        flag = f"--{name.replace('_arguments', '-arg').replace('_', '-')}"
        return flag if value in ("", "True") else f"{flag} {system.quoted(value.strip(chr(39)))}"

    return re.sub(OPTION, spelled, text)


def in_options(sections: Iterable[Section]) -> Iterator[Section]:
    """Yield sections with the options in their lines and facts spelled as on the command line."""
    for section in sections:
        if isinstance(section, Fact):
            section = section._replace(items=[with_options(item) for item in section.items])
        yield with_options(section) if isinstance(section, str) else section


def error_text(error: CkptoolError) -> str:
    """Return the one to three lines that a person sees of an error."""
    command = error.command if error.command and error.command not in error.message else None
    return advised(f"Error: {error}", hint=error.hint, command=command)


def advised(*facts: str, hint: str | None = None, command: str | None = None) -> str:
    """Return facts, what to do about them and what to run, each as a line that is safe to print."""
    lines = (*facts, hint and f"Hint: {with_options(hint)}", command and f"Run: {command}")
    return "\n".join(show(line) for line in lines if line)


_GOOD: Final = ("fine", "written", "edited in place", "nothing wrong found", "the same")
_COLOURS: Final = {"error": "red", "warning": "yellow", "Error:": "red"} | dict.fromkeys(_GOOD, "green")
_BOLD: Final = ("error", "Error:", "Hint:", "Run:")
# The names of tensors begin lines, too: those of reports are followed by more blanks.
_BEFORE: Final = (
    *(r"  (?=(?:error|warning) {4})", r" *(?=(?:Error|Hint|Run): )"),
    *(r"  (?:result|verdict) +", r"(?=the same(?::| but | within ))", r".*: (?=written$)"),
)
_MARKED: Final = rf"(?m)^({'|'.join(_BEFORE)})(error|warning|Error:|Hint:|Run:|{'|'.join(_GOOD)})(.*)$"


def say(text: str, *, err: bool = False) -> None:
    """Print text; on a terminal, in colours by severity, and with commands that stand out."""
    if err and not pages and (room := terminal_width(err=True)) is not None:
        text = "\n".join(wrapped(text.split("\n"), room))
    shown = re.sub(_MARKED, _painted, text) if _shows_colours(err=err) else text
    if pages:
        pages[-1].append(f"{shown}\n")
    else:
        click.echo(shown, err=err)


def painted(word: str) -> str:
    """Return a word for the state of something in its colour, if standard output shows colours."""
    return _styled(word) if _shows_colours(err=False) else word


def _painted(line: re.Match[str]) -> str:
    indent, word, rest = line.groups()
    return f"{indent}{_styled(word)}{click.style(rest, bold=True) if word == 'Run:' else rest}"


def _styled(word: str) -> str:
    return click.style(word, fg=_COLOURS.get(word), bold=word in _BOLD or None)


def _shows_colours(*, err: bool) -> bool:
    """Return whether to colour: as --color asks, else on a terminal that has them (https://no-color.org)."""
    context = click.get_current_context(silent=True)
    asked = context.find_root().color if context is not None else None
    has_none = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    return asked if asked is not None else (sys.stderr if err else sys.stdout).isatty() and not has_none


def terminal_width(*, err: bool = False) -> int | None:
    """Return how many columns the terminal has that standard output, or error, goes to; None if it goes elsewhere."""
    stream = sys.stderr if err else sys.stdout
    if not stream.isatty():
        return None
    return os.get_terminal_size(stream.fileno()).columns or None


def wrapped(lines: Iterable[str], room: int | None) -> Iterator[str]:
    """Yield the lines of a report so that they fit, broken between words. Commands stay whole: they are copied."""
    for line in lines:
        fits = room is None or room < _NARROWEST or len(line) <= room
        if fits or line.lstrip().startswith("Run: "):
            yield line
        elif line.startswith((" ", "…")):
            yield from _broken(line, line[: len(_HANGING)] if line.startswith(" ") else "", _HANGING, room or 0)
        elif start := _SENTENCE.match(line):
            label = start[0] if start[0].endswith(" ") else ""
            yield from _broken(line, label, " " * (len(label) or 2), room or 0)
        else:
            yield line


def no_room(headers: Sequence[str]) -> str:
    """Return a line about columns that the terminal has no room for."""
    return f"… no room for {', '.join(headers)}; --wide shows all"


def say_sections(sections: Iterable[Section], width: int | None, before: Sequence[str] = ()) -> bool:
    """Print a report for a terminal of so many columns, with lines ``before`` it, and return whether there is one."""
    is_empty = True
    for section in sections:
        spared: Sequence[str] = ()
        if isinstance(section, Table) and width is not None:
            section, spared = fitted(section, width)
        lines = section_lines(section, width)
        if not isinstance(section, Lines | Table):
            lines = wrapped(lines, width)
        if all_lines := [*(before if is_empty else ()), *lines, *wrapped([no_room(spared)] if spared else [], width)]:
            say("\n".join(all_lines))
        is_empty = False
    return not is_empty


def _broken(line: str, label: str, hanging: str, room: int) -> Iterator[str]:
    """Yield a line in several. A name too long for any line of its column is cut in the middle; a path stays whole."""
    from textwrap import TextWrapper  # most lines fit

    if label.startswith(" "):
        most = room - len(hanging)
        words = (one if "/" in one or os.sep in one else cut_middle(one, most) for one in line[len(label) :].split(" "))
        line = label + " ".join(words)
    wrapper = TextWrapper(room, label, hanging, break_long_words=False, break_on_hyphens=False)
    yield from wrapper.wrap(line[len(label) :])


@contextmanager
def pager(*, asked: bool) -> Iterator[None]:
    """Show what a block prints in the user's pager, if that is requested and there is a terminal."""
    if not asked or not sys.stdout.isatty():
        yield
        return
    pages.append([])
    try:
        yield
    finally:
        click.echo_via_pager("".join(pages.pop()))


_SECONDS_UNTIL_SHOWN: Final = 0.5
_SECONDS_BETWEEN: Final = 0.1
_SHARE_OF_A_RATE: Final = 0.02
_SECONDS_OF_A_RATE: Final = 3.0
"""After this share, or these seconds, the rate is used to predict the rest: the first bytes take longer."""
_BAR: Final = 24
_ROOM_FOR_BAR: Final = 100
"""Columns of a terminal from which on there is room for a bar beside the figures."""
_CLEAR: Final = "\r\x1b[2K"


class ProgressLine:
    """
    Called with the bytes that are done, and those of all. Shown on stderr, if that is a terminal, after half a second,
    and cleared at the end. A verb has one for all its files; ``next`` begins another file.
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
        seconds, columns = now - begun, os.get_terminal_size(sys.stderr.fileno()).columns or _ROOM_FOR_BAR
        share = min(1.0, done / total) if total else 1.0
        rate = done / seconds if seconds > 0 else 0.0
        facts = f"{share:4.0%}  {show_nbytes(min(done, total))} of {show_nbytes(total)}"
        facts += f"  {show_nbytes(int(rate))}/s" if rate else ""
        is_steady = share >= _SHARE_OF_A_RATE or seconds >= _SECONDS_OF_A_RATE
        facts += f"  {_clock((total - done) / rate)} left" if rate and is_steady and done < total else ""
        before = f"{self._number:,}/{self._files:,} {what}" if self._files > 1 else what
        full = round(share * _BAR)
        bar = f"{'━' * full}{'─' * (_BAR - full)} " if columns >= _ROOM_FOR_BAR else ""
        room = max(8, columns - 1 - len(before) - len(bar) - len(facts) - 2)
        line = f"{before}{cut_middle(self._name, room)}  {bar}{facts}"[: columns - 1]
        click.echo(f"{_CLEAR}{line}", nl=False, err=True)

    def read_back(self, done: int, total: int) -> None:
        """Show the progress of reading back what was written."""
        if self._read_back_begun is None:
            self._read_back_begun = time.monotonic()
        self._show(done, total, self._read_back_begun, "reading back ")

    def clear(self) -> None:
        """Make room for what is printed next."""
        if self._last:
            click.echo(_CLEAR, nl=False, err=True)
            self._last = 0.0


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
