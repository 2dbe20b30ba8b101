"""The program ``ckptool``, run in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from click.testing import CliRunner, Result

from ckptool.cli import cli


def invoke(arguments: Sequence[object] = (), **options: Any) -> Result:
    """Run a verb; ``options`` are those of Click's runner."""
    return CliRunner().invoke(cli, list(map(str, arguments)), **options)
