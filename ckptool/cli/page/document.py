"""
A page of HTML that is one file: its style, its script, and what it shows.

Nothing from a checkpoint is markup. All of it is JSON in an element that no browser runs, and the script puts it on the
page as text. A policy in the page forbids everything but this style and this script, which it knows by their hashes.

The modules of the script are joined to one: the lines that import are left out, and names are unique in all of them.
https://www.w3.org/TR/CSP3/
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from html import escape
from pathlib import Path
from typing import Final

from ckptool.sources.files import FileSource

ASSETS: Final = Path(__file__).parent / "assets"
SCRIPTS: Final = (
    *("dom", "text", "data", "tree", "selection", "colours", "squares", "treemap"),
    *("histogram", "columns", "entries", "table", "panel", "head", "main"),
)
"""The modules of the script, each behind those that it imports."""

_IMPORT: Final = re.compile(r"^import [^;]*;\n", re.MULTILINE)
_EXPORT: Final = re.compile(r"^export ", re.MULTILINE)
_COMMENT: Final = re.compile(r"^ *(/\*.*?\*/|//.*?)$", re.MULTILINE | re.DOTALL)
_SPACE: Final = re.compile(r"\s*\n\s*")
_PLACE: Final = re.compile(r"\{\{(\w+)\}\}")
_IN_SCRIPT: Final = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"}


def document(title: str, content: Mapping[str, object]) -> bytes:
    """Return a page that shows this content. The same content makes the same bytes."""
    style, script = _lean(_asset("page.css")), joined_script()
    filled = {
        "title": escape(title),
        "policy": f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'",
        "style": style,
        "script": script,
        "content": json.dumps(content, allow_nan=False, separators=(",", ":")).translate(_IN_SCRIPT),
    }
    return _PLACE.sub(lambda place: filled[place[1]], _asset("page.html")).encode()


def joined_script() -> str:
    """Return the modules of the script as one."""
    return "".join(_EXPORT.sub("", _IMPORT.sub("", _lean(_asset(f"{name}.js")))) for name in SCRIPTS)


def _lean(text: str) -> str:
    """Return a script or a style without comments that stand by themselves, blank lines, and blanks around lines."""
    return _SPACE.sub("\n", _COMMENT.sub("", text)).lstrip()


def _asset(name: str) -> str:
    source = FileSource(str(ASSETS / name))
    try:
        return bytes(source.read(0, source.nbytes)).decode()
    finally:
        source.close()


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
