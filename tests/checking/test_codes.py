"""The table of codes is what the checks give, no more and no less."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import ckptool
from tests.program import invoke

TABLE = json.loads(invoke(["check", "--list", "--json"]).stdout)
CODES = {one["code"]: one for one in TABLE["codes"]}
SOURCES = [path.read_text("utf-8") for path in sorted(Path(ckptool.__file__).parent.rglob("*.py"))]
NODES = [node for text in SOURCES if '"CK' in text for node in ast.walk(ast.parse(text))]


def codes_in(node: ast.AST) -> set[str]:
    texts = (one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str))
    return {text for text in texts if re.fullmatch(r"CK\d{3}", text)}


def test_every_code_that_is_used_is_in_the_table_and_every_code_in_it_is_used() -> None:
    calls = [one for one in NODES if isinstance(one, ast.Call)]
    given = [one.args[0] for one in calls if ast.unparse(one.func) in ("note", "Remark", "Stubs", "_finding")]
    chosen = [one.value for one in NODES if isinstance(one, ast.Assign | ast.AnnAssign) and one.value is not None]
    assert set().union(*map(codes_in, (*given, *(one for one in chosen if not isinstance(one, ast.Dict))))) == set(
        CODES
    )


def test_every_code_is_expected_by_a_test() -> None:
    tests = "".join(path.read_text("utf-8") for path in sorted(Path(__file__).parents[1].rglob("test_*.py")))
    assert [code for code in CODES if f'"{code}"' not in tests] == []


def test_a_severity_is_given_only_where_the_table_has_none() -> None:
    for call in (one for one in NODES if isinstance(one, ast.Call)):
        if ast.unparse(call.func) == "note" and any(one.arg == "severity" for one in call.keywords):
            assert {CODES[code]["severity"] for code in codes_in(call.args[0])} <= {None}, ast.unparse(call)


def test_the_table_is_printed_for_people_and_programs() -> None:
    lines = invoke(["check", "--list"], catch_exceptions=False).stdout.splitlines()
    assert len(lines) == len(CODES)
    assert lines[2] == f"CK103  error    {CODES['CK103']['says']}"
    assert lines[0] == f"CK101           {CODES['CK101']['says']}"

    assert TABLE["schema"] == "ckptool.codes/1"
    assert TABLE["codes"][2] == {"code": "CK103", "severity": "error", "says": CODES["CK103"]["says"]}


def test_what_a_code_says_is_one_sentence() -> None:
    for says in (entry["says"] for entry in CODES.values()):
        assert says[0].isupper()
        assert says.endswith(".")
        assert ". " not in says
