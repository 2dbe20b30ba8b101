"""The program ``ckptool``, run in this process, and the files of the project that it is run on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from ckptool.cli import cli

VALID = Path(__file__).parents[1] / "fixtures" / "valid"
INVALID = VALID.parent / "invalid"
OURS = [path for path in sorted(VALID.iterdir()) if path.suffix != ".json"]
"""The valid fixtures."""


def invoke(arguments: Sequence[object] = (), **options: Any) -> Result:
    """Run a verb; ``options`` are those of Click's runner."""
    return CliRunner().invoke(cli, list(map(str, arguments)), **options)


def run(*arguments: object, code: int = 0, **options: Any) -> Result:
    """Run a verb, which ends with this exit code."""
    result = invoke(arguments, **options)
    assert result.exit_code == code, result.output
    return result


def as_json(*arguments: object, code: int = 0) -> Any:
    """Return what a verb prints with ``--json``."""
    return json.loads(run(*arguments, "--json", code=code).stdout)


def validated(found: Any, schema: str) -> Any:
    """Return JSON that is what the schema of this name in the package says."""
    _validator(schema).validate(found)
    return found


@cache
def _validator(schema: str) -> Any:
    from jsonschema import Draft202012Validator  # which few environments of tests have

    text = files("ckptool.cli").joinpath("schemas", f"{schema}.json").read_text("utf-8")
    return Draft202012Validator(json.loads(text))
