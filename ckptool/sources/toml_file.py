"""Read small text files that people write for ckptool: policies and recipes, in TOML."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from ckptool.arguments import as_utf8
from ckptool.errors import MalformedFile, MissingPackage, about
from ckptool.sources.files import open_source


def read_text(path: str) -> bytes:
    """
    Return the content of a small file as UTF-8; a byte order mark may say that it is UTF-16.

    Raises:
        FileUnavailable: It cannot be read.
    """
    with about(path):
        source, _ = open_source(path)
    with about(path), closing(source):
        return as_utf8(source.read(0, source.nbytes))


def read_toml(path: str, kind: str, hint: str) -> dict[str, Any]:
    """
    Return the table in a file of TOML; ``kind`` and ``hint`` are for the error if it is malformed.

    Raises:
        MalformedFile: It is not TOML, or nested too deep.
        FileUnavailable: It cannot be read.
        MissingPackage: This Python cannot read TOML, and tomli is not installed.
    """
    try:
        import tomllib  # Python 3.10, whose support ended in 2026, has none
    except ImportError:
        try:
            import tomli as tomllib  # type: ignore[no-redef]
        except ImportError as error:
            raise MissingPackage.named("tomli", "pip install tomli") from error
    try:
        return tomllib.loads(str(read_text(path), "utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise MalformedFile(f"no TOML: {error}", kind=kind, path=path, hint=hint) from error
    except RecursionError:
        raise MalformedFile("nested too deep", kind=kind, path=path, hint=hint) from None
