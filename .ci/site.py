"""A hook of mkdocs: the pages outside of docs are pages of the site, and links lead to where things are."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

_ROOT = Path(__file__).parents[1]
_TOP = {
    _ROOT / "README.md": "index.md",
    _ROOT / "CHANGELOG.md": "CHANGELOG.md",
    _ROOT / "CONTRIBUTING.md": "CONTRIBUTING.md",
    _ROOT / ".github" / "SECURITY.md": "SECURITY.md",
    _ROOT / ".github" / "CODE_OF_CONDUCT.md": "CODE_OF_CONDUCT.md",
    _ROOT / ".github" / "RELEASING.md": "RELEASING.md",
}
_LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)([^)#\s]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the repository's top."""
    for path, page in _TOP.items():
        files.append(File.generated(config, page, content=_linked(path.read_text("utf-8"), path.parent)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:  # noqa: ARG001 - the names are mkdocs'
    """Let links out of ``docs`` lead to the pages above, or to the repository."""
    return markdown if page.file.generated_by else _linked(markdown, _ROOT / "docs")


def _linked(text: str, folder: Path) -> str:
    return _LINK.sub(lambda link: _target(link.group(1), folder), text)


def _target(link: str, folder: Path) -> str:
    target = (folder / link).resolve()
    if not target.exists():
        raise PluginError(f"a dead link: {link}")
    if target.parent == _ROOT / "docs":
        return target.name
    if target in _TOP:
        return _TOP[target]
    repository = os.environ.get("CKPTOOL_REPOSITORY", "").rstrip("/")
    if not repository:
        raise PluginError("CKPTOOL_REPOSITORY is not set: the address of the repository on the web")
    return f"{repository}/blob/main/{target.relative_to(_ROOT).as_posix()}"
