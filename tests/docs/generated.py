"""What the pages say of the code, written from the code: findings, errors, names."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from re._parser import parse  # type: ignore[import-not-found]
from typing import Any

import ckptool
from ckptool import errors
from ckptool.checking.explain import entries
from ckptool.checking.finding import CODES
from ckptool.pickles.constructions import ROWS


def _paragraph(text: str | None) -> str:
    """Return the first paragraph of a docstring, on one line, in Markdown."""
    paragraph = inspect.cleandoc(text or "").partition("\n\n")[0]
    return " ".join(paragraph.split()).replace("``", "`").replace("|", r"\|")


def _sentence(text: str | None) -> str:
    return re.split(r"(?<=\.) (?=[A-Z`])", _paragraph(text))[0]


def _rows(*rows: Iterable[str]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def codes() -> str:
    """Return the table of findings."""
    rows = ((f"`{code}`", entry.severity or "depends", entry.says) for code, entry in CODES.items())
    return _rows(("code", "severity", "finding"), ("---", "---", "---"), *rows)


def exceptions(cls: type = errors.CkptoolError, depth: int = 0) -> str:
    """Return a list of the exceptions, each under its base."""
    below = [one for one in cls.__subclasses__() if one.__module__ == errors.__name__]
    own = f"{'  ' * depth}- `{cls.__name__}`: {_sentence(cls.__doc__)}\n"
    return own + "".join(exceptions(one, depth + 1) for one in below)


def names() -> str:
    """Return the table of public names that are not exceptions."""
    public = {name: getattr(ckptool, name) for name in ckptool.__all__}
    others = {
        name: value
        for name, value in public.items()
        if not (isinstance(value, type) and issubclass(value, errors.CkptoolError))
    }
    rows = ((f"`{name}`", _sentence(value.__doc__)) for name, value in others.items())
    return _rows(("name", "what it is"), ("---", "---"), *rows)


def constructions() -> str:
    """Return the calls that a pickle may have and be data."""
    header = ("name", "arguments", "state, items", "what it does", "source")
    rows = (
        (
            ", ".join(f"`{name}`" for name in row.names),
            " or ".join(f"`{one.strip()}`" if one.strip() else "none" for one in row.forms.split(" | ")),
            ", ".join(filter(None, (row.state, row.items))),
            ("made without a call; " if row.builds else "") + row.why,
            f"`{row.source}`",
        )
        for row in ROWS
    )
    return _rows(header, ("---",) * len(header), *rows)


def modules() -> str:
    """Return what each module is, below its package: the first sentence of its docstring."""
    package = Path(ckptool.__file__).parent
    listed = (package.parent / ".importlinter").read_text("utf-8").partition("ignore_imports")[0]
    order = re.findall(r"ckptool\.(\w+)", listed)[::-1]
    says = {path: _sentence(ast.get_docstring(ast.parse(path.read_text("utf-8")))) for path in package.rglob("*.py")}
    rooms = {room.name: room for room in sorted(path.parent for path in package.glob("*/__init__.py"))}
    in_order = [rooms[name] for name in order if name in rooms]
    others = [room for room in rooms.values() if room not in in_order]
    written = ""
    for room in (package, *in_order, *others):
        inside = sorted(path for path in says if path.is_relative_to(room) and (room != package or path.parent == room))
        written += f"\n### `{room.name}/`\n\n{says[room / '__init__.py']}\n\n"
        for path in inside:
            name = path.relative_to(room).as_posix().removesuffix(".py").removesuffix("/__init__")
            written += f"- `{name}`: {says[path].rstrip('.')}\n" if name != "__init__" else ""
    return written.lstrip("\n")


def shown(pattern: str) -> list[str]:
    """Return the texts that a pattern of a message stands for: one for each alternative of it as a whole."""
    parsed = list(parse(pattern))
    if len(parsed) == 1 and str(parsed[0][0]) == "BRANCH":
        return list(dict.fromkeys(_text(branch) for branch in parsed[0][1][1]))
    return [_text(parsed)]


def _text(parsed: Iterable[Any]) -> str:
    """Return what a parsed pattern stands for, with an ellipsis for what may be anything."""
    text = ""
    for kind, value in ((str(kind), value) for kind, value in parsed):
        if kind == "LITERAL":
            text += chr(value)
        elif kind == "IN":
            (of, char), *_ = value
            text += chr(char) if str(of) == "LITERAL" else "…"
        elif kind == "SUBPATTERN":
            text += _text(value[-1])
        elif kind == "BRANCH":
            text += _text(value[1][0])
        elif kind in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, inner = value
            one = _text(inner)
            text += one if least and len(inner) > 1 else "" if not least and (most == 1 or one != "…") else "…"
        elif kind in ("ANY", "NOT_LITERAL", "CATEGORY"):
            text += "…"
    return re.sub("…+", "…", text)


def messages() -> str:
    """Return each message that is known, as a heading, with what it means and what to do."""
    written, before = "", [""]
    for entry in entries():
        texts = [f"`` {text} ``" if "`" in text else f"`{text}`" for text in shown(entry.pattern)]
        written += f"## {entry.part}\n\n" if entry.part else ""
        written += f"### {texts[0]}\n\n" if texts != before else ""
        written += f"Also {', '.join(texts[1:])}.\n\n" if texts[1:] and texts != before else ""
        groups = ["…"] * re.compile(entry.pattern).groups
        hint, _, command = entry.do.partition(" $ ")
        meaning, hint = (re.sub("…+", "…", text.format(*groups)) for text in (entry.meaning, hint))
        written += f"{meaning} {hint}{f' `{command}`' if command else ''}\n\n"
        before = texts
    return written.rstrip("\n") + "\n"


PARTS: dict[str, Callable[[], str]] = {
    "constructions": constructions,
    "codes": codes,
    "exceptions": exceptions,
    "messages": messages,
    "modules": modules,
    "names": names,
}
"""Each part of a page that is generated, by the name in its markers."""
