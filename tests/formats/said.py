"""What is said of a checkpoint, in short, and what it keeps open."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

import ckptool
from ckptool import CheckReport, CkptoolError
from tests.program import invoke


def run(*words: object) -> Result:
    """Run a verb of the program, however it ends."""
    return invoke(words)


def said(path: Path | str, **options: Any) -> dict[str, str]:
    """Return the codes of all findings, with the severity of each."""
    return {one.code: one.severity for one in ckptool.check(path, **options).findings}


def message(path: Path | str, code: str) -> str:
    """Return what the one finding of a code says."""
    (found,) = [one.message for one in ckptool.check(path).findings if one.code == code]
    return found


def wrong(of: Path | CheckReport) -> list[str]:
    """Return the codes of what is more than told, in order."""
    report = of if isinstance(of, CheckReport) else ckptool.check(of)
    return [one.code for one in report.findings if one.severity != "info"]


def refused(
    origin: Any,
    error: type[CkptoolError] | tuple[type[CkptoolError], ...] = CkptoolError,
    match: str | None = None,
    *,
    by: Callable[..., object] = ckptool.open_checkpoint,
    **options: Any,
) -> CkptoolError:
    """Return the error of opening something, or of another call with it, which is of this type, and says that."""
    with pytest.raises(error, match=match) as caught:
        by(origin, **options)
    return caught.value


def descriptors() -> int:
    """Return how many files are open: those that only the collector would close, too."""
    return len(list(Path("/dev/fd").iterdir()))
