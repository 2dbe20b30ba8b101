"""A picture of a terminal, drawn from what a real one is sent: `docs/terminal.svg`, which the README shows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape

from tests.cli.pty_run import on_terminal

COMMANDS = (
    "ckptool migrate -b example.pth weights.safetensors --strip-module",
    "ckptool diff --ignore-wrappers example.pth weights.safetensors",
    "ckptool stat weights.safetensors",
    "ckptool check -b weights.safetensors example.pth fixtures/invalid/truncated-zip.pth",
)
COLUMNS = 110
_CELL, _LINE, _EDGE = 8.4, 19, 20
_STYLE = re.compile(r"\x1b\[([0-9;]*)m")
_COLOURS = {"31": "#ff8a80", "32": "#7ee2a0", "33": "#ffd166"}
_TEXT, _BACK = "#e6e8eb", "#17191d"


def picture() -> str:
    """Return the picture. The commands run in the current folder."""
    lines: list[str] = []
    for command in COMMANDS:
        quiet = "import ckptool.cli.text as text; text._SECONDS_UNTIL_SHOWN = 1e9"  # no progress, however slow it is
        screen = on_terminal(command.split()[1:], COLUMNS, before=quiet)
        lines += ["", f"$ \x1b[1m{command}\x1b[0m", *screen.styled]
    lines = lines[1:]
    width, height = round(COLUMNS * _CELL) + 2 * _EDGE, len(lines) * _LINE + 2 * _EDGE
    drawn = [text for at, line in enumerate(lines) for text in _drawn(line, _EDGE + (at + 0.75) * _LINE)]
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
            "<title>ckptool on a terminal</title>",
            f'<rect width="{width}" height="{height}" rx="10" fill="{_BACK}"/>',
            f'<g font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,monospace" font-size="14" fill="{_TEXT}">',
            *drawn,
            "</g>",
            "</svg>",
            "",
        )
    )


def _drawn(line: str, y: float) -> Iterator[str]:
    """Yield the words of a line, each in its column, whatever font there is."""
    column, colour, is_bold = 0, _TEXT, False
    for at, part in enumerate(_STYLE.split(line)):
        if at % 2:
            codes = part.split(";")
            is_bold = "0" not in codes and (is_bold or "1" in codes)
            colour = _TEXT if "0" in codes else next((_COLOURS[one] for one in codes if one in _COLOURS), colour)
            continue
        for found in re.finditer(r"\S+(?: \S+)*", part):
            start, text = column + found.start(), found[0]
            style = f' fill="{colour}"' if colour != _TEXT else ""
            style += ' font-weight="bold"' if is_bold else ""
            length = f' textLength="{len(text) * _CELL:.1f}"'
            yield f'<text x="{_EDGE + start * _CELL:.1f}" y="{y:g}"{length}{style}>{escape(text)}</text>'
        column += len(part)
