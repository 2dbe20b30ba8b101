"""The table of codes is what the checks give, no more and no less."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import ckptool.checking
import ckptool.formats
from ckptool.checking.finding import CODES
from tests.program import invoke

SOURCES = sorted(Path(ckptool.checking.__file__).parent.glob("*.py"))
FORMATS = sorted(Path(ckptool.formats.__file__).parent.rglob("*.py"))


def severities_by_code() -> dict[str, set[str]]:
    """Return the codes of all findings that are made, and their severities as far as the source says them."""
    found: dict[str, set[str]] = {}
    for node in (node for path in SOURCES for node in ast.walk(ast.parse(path.read_text("utf-8")))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Finding":
            code, severity, *_ = node.args
            if not isinstance(code, ast.Constant):
                continue  # a table shows an error as a row of its own, under its kind
            texts = [one.value for one in ast.walk(severity) if isinstance(one, ast.Constant)]
            found.setdefault(str(code.value), set()).update(map(str, texts))
    # What a format remarks on has the severity that the table gives it.
    for node in (node for path in FORMATS for node in ast.walk(ast.parse(path.read_text("utf-8")))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Remark" and isinstance(node.args[0], ast.Constant):
            code = str(node.args[0].value)
            found.setdefault(code, set()).add(str(CODES[code].severity))
    return dict(sorted(found.items()))


def test_every_code_that_is_used_is_in_the_table_and_every_code_in_it_is_used() -> None:
    assert sorted(severities_by_code()) == list(CODES)


def test_every_code_is_expected_by_a_test() -> None:
    tests = "".join(path.read_text("utf-8") for path in sorted(Path(__file__).parents[1].rglob("test_*.py")))
    assert [code for code in CODES if f'"{code}"' not in tests] == []


def test_a_severity_in_the_table_is_that_of_every_finding() -> None:
    changes = {"CK101": {"error"}, "CK115": {"error", "warning"}}  # with strict; as its findings have it
    found = {code: given | changes.get(code, set()) for code, given in severities_by_code().items()}

    assert {code: entry.severity for code, entry in CODES.items()} == {
        code: next(iter(given)) if len(given) == 1 else None for code, given in sorted(found.items())
    }


def test_the_table_is_printed_for_people_and_programs() -> None:
    lines = invoke(["check", "--list"], catch_exceptions=False).stdout.splitlines()
    assert len(lines) == len(CODES)
    assert lines[2] == f"CK103  error    {CODES['CK103'].says}"
    assert lines[0] == f"CK101           {CODES['CK101'].says}"

    found = json.loads(invoke(["check", "--list", "--json"]).stdout)
    assert found["schema"] == "ckptool.codes/1"
    assert found["codes"][2] == {"code": "CK103", "severity": "error", "says": CODES["CK103"].says}


def test_what_a_code_says_is_one_sentence() -> None:
    for entry in CODES.values():
        assert entry.says[0].isupper()
        assert entry.says.endswith(".")
        assert ". " not in entry.says
