"""Every hostile file through inspect, check, migrate and load: a typed error or the right answer, in bounds."""

from __future__ import annotations

import os
from collections import Counter
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


LONG = bool(os.environ.get("CKPTOOL_LONG"))
# Of rows with very many cases alike, and of those that cost seconds each, an ordinary run takes some.
EVERY = {"P1": 7, "Z4": 6, "Z9": 3, "Z8": 3, "F8": 5, "I1": 4, "F1": 2, "S2": 4, "I4": 3, "P8": 4, "P11": 5, "P15": 3}


def chosen() -> Iterator[Case]:
    """Yield the cases of this run: all of them with ``CKPTOOL_LONG=1``."""
    seen: Counter[str] = Counter()
    for case in CASES:
        if LONG or seen[case.row] % EVERY.get(case.row, 1) == 0:
            yield case
        seen[case.row] += 1


@pytest.mark.parametrize("case", list(chosen()), ids=lambda case: case.label)
def test_every_verb_refuses_it_or_answers_right(case: Case, child: Child, tmp_path: Path) -> None:
    assert problems(case, run(child, case, tmp_path)) == []


def test_no_two_cases_have_one_name() -> None:
    labels = [case.label for case in CASES]

    assert len(set(labels)) == len(labels)
