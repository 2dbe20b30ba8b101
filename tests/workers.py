"""Processes that work for a command, and do first what a test wants them to."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def do_first(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each new process that works for this one, or for a command that it starts, run code before all else."""
    folder.mkdir()
    starts = "import sys\nif any('spawn_main' in one for one in sys.orig_argv):\n"
    (folder / "sitecustomize.py").write_text(starts + textwrap.indent(code, "    "), "utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(ROOT)]))
