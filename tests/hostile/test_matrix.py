"""Every hostile file through inspect, check, migrate and load: a typed error or the right answer, in bounds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hostile.cases import Case
from tests.hostile.cases.every import CASES
from tests.hostile.harness import Child, problems, run

pytest.importorskip("resource", reason="limits on memory are POSIX's")


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    started = Child()
    yield started
    started.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_every_verb_refuses_it_or_answers_right(case: Case, child: Child, tmp_path: Path) -> None:
    assert problems(case, run(child, case, tmp_path)) == []


def test_no_two_cases_have_one_name() -> None:
    labels = [case.label for case in CASES]

    assert len(set(labels)) == len(labels)
