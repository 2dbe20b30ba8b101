"""What is said of mutants is said of code that is there."""

from __future__ import annotations

import ast

from tests.mutation.__main__ import MODULES, ROOT, TESTS, path_of
from tests.mutation.equivalent import EQUIVALENT
from tests.mutation.mutants import checks


def test_the_modules_and_the_tests_are_there() -> None:
    assert [name for name in MODULES if not path_of(name).is_file()] == []
    assert [name for name in TESTS if not (ROOT / name).exists()] == []
    assert list(MODULES) == sorted(set(MODULES))


def test_each_mutant_that_is_said_to_be_equivalent_is_one_of_a_check_that_is_there() -> None:
    there = {
        (module, function, before)
        for module in {key[0] for key in EQUIVALENT}
        for function, before in checks(ast.parse(path_of(module).read_text("utf-8")))
    }

    assert [key for key in EQUIVALENT if key[0] not in MODULES] == []
    assert [key for key in EQUIVALENT if key[:3] not in there] == []
