"""
What an error message means, and what to do about it.

A message says less than the file: every hint has a command that inspects the file, and if a file is given, ``in_file``
finds what in it causes the message.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from configparser import ConfigParser
from functools import cache
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from ckptool.arguments import checked
from ckptool.checking.explain.keys import INSPECT, OWN, Explanation, explain_keys
from ckptool.checking.finding import CODES
from ckptool.errors import CkptoolError
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.sources.files import packaged

__all__ = ["Explanation", "explain"]

_MOST_TEXT = 1 << 20
_OF_LISTS = frozenset(["load-report", "missing-tensors", "adapter-keys", "lora-layers", "left-over"])
"""Kinds of messages that add nothing to the lists of names in them, if these could be parsed."""
_CODE = re.compile(r"\bCK\d{3}\b")
_ERROR = re.compile(r"\b([A-Z][a-z]+[A-Z]\w+): ")
_STYLE = re.compile(r"\x1b\[[0-9;]*m|\r(?=\n)")
_ESCAPED = re.compile(r"\\([nt\"'\\])")
_WITHIN_LIST = re.compile(r"""(?<=['"],)\n|(?<=['"], )\n|(?<=['"])\n(?=, ?['"])""")
_WITHIN_NAME = re.compile(r"""((?:[,:\[] ?['"]|['"](?=[\w.]))[\w.]{0,200})\n(?=[\w.]{0,200}['"])""")
_IS_ESCAPED = re.compile(r"""\\n(?!')|\\["']""")
"""Signs that a text was quoted, as in logs of JSON; torch writes '\\n' of a file that begins with a line break."""


@checked()
def explain(
    text: str, origin: str | PathLike[str] | None = None, *, limits: Limits = DEFAULT_LIMITS
) -> tuple[Explanation, ...]:
    """
    Return what a pasted message means, most specific first; nothing if it is not known.

    With ``origin``, the checkpoint that the message is about, each says what in it causes the message.

    Raises:
        FileUnavailable: There is no such file, or it may not be read.
    """
    plain = _as_printed(text[:_MOST_TEXT])
    found = _explained(plain) or tuple(_own(plain))
    if origin is None:
        return found
    from ckptool.checking.explain.in_file import look_into

    return look_into(found, plain, origin, limits)


def _as_printed(text: str) -> str:
    """Return a message without colours, without the escapes of a quoted text, and with each list of names on a line."""
    plain = _STYLE.sub("", text)
    if _IS_ESCAPED.search(plain):
        plain = _ESCAPED.sub(lambda one: {"n": "\n", "t": "\t"}.get(one[1], one[1]), plain)
    return _WITHIN_NAME.sub(r"\1", _WITHIN_LIST.sub("", plain))


class Entry(NamedTuple):
    """A row of ``messages.ini``, which says what each field is."""

    kind: str
    pattern: str
    meaning: str
    do: str = f"See what is in it. $ {INSPECT}"
    beside: str = ""
    otherwise: str = ""
    part: str = ""

    def apply(self, text: str) -> Explanation | None:
        """Return the explanation if the text contains this message; else None."""
        found = re.search(self.pattern, text)
        if found is None or not re.search(self.beside, text):
            return None
        groups = [(group or "")[:200] for group in found.groups()]
        hint, _, command = self.do.partition(" $ ")
        return Explanation(self.kind, self.meaning.format(*groups), hint.format(*groups), command or None)


@cache
def entries() -> tuple[Entry, ...]:
    """Return the table of messages, in its order."""
    table = ConfigParser(interpolation=None, delimiters=("=",))
    table.read_string(packaged(Path(__file__).with_name("messages.ini")))
    return tuple(
        Entry(name.partition(" ")[0], **{field: value.replace("\n", " ") for field, value in table[name].items()})
        for name in table.sections()
    )


def _explained(text: str) -> tuple[Explanation, ...]:
    # Terminals break lines anywhere, and editors between words: then only the joined text contains the message.
    found = next(filter(None, map(_said, dict.fromkeys((text, text.replace("\n", ""), text.replace("\n", " "))))), [])
    found = found or list(islice(_applied(text, is_otherwise=True), 1))
    first = {one.kind: one for one in reversed(found)}
    return tuple(one for one in found if first[one.kind] is one)


def _said(text: str) -> list[Explanation]:
    """Return all explanations of a message, but for the general ones that count if there is no other."""
    keys, found = explain_keys(text), list(_applied(text, is_otherwise=False))
    if keys is not None and (keys.kind != "keys" or not found):  # the least specific kind
        found = [keys, *(one for one in found if one.kind not in _OF_LISTS)]
    return found


def _own(text: str) -> Iterator[Explanation]:
    """Yield explanations of the codes of findings, and of ckptool's own errors, in a text."""
    for code in dict.fromkeys(_CODE.findall(text)):
        if code in CODES:
            hint = "docs/check.md lists all codes. See where it is in a file."
            yield Explanation(code, CODES[code].says, hint, "ckptool check FILE")
    every: list[type[CkptoolError]] = [CkptoolError]
    for one in every:
        every += one.__subclasses__()
    for name in dict.fromkeys(_ERROR.findall(text)):
        error = next((one for one in every if one.__name__ == name), None)
        if error is not None:
            says = " ".join((error.__doc__ or "").split("\n\n")[0].split())
            yield Explanation(error.default_kind, f"ckptool's own {name}. {says}", OWN, "ckptool check FILE")
    if "not reloaded: " in text:
        fact = "A LiveModel goes on with the weights that it has: what follows is wrong with those that came."
        yield Explanation("not-reloaded", fact, OWN, "ckptool check FILE")


def _applied(text: str, *, is_otherwise: bool) -> Iterator[Explanation]:
    given = (entry.apply(text) for entry in entries() if bool(entry.otherwise) is is_otherwise)
    return filter(None, given)
