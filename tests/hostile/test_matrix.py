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
EVERY = {
    "P1": 11,
    "P7": 3,
    "P8": 8,
    "P11": 13,
    "P13": 2,
    "P14": 2,
    "P15": 4,
    "Z4": 8,
    "Z8": 4,
    "Z9": 4,
    "Z11": 4,
    "Z15": 3,
    "S1": 4,
    "S2": 6,
    "S7": 5,
    "F1": 4,
    "F3": 3,
    "F5": 3,
    "F8": 8,
    "I1": 6,
    "I4": 4,
}


def chosen() -> Iterator[Case]:
    """Yield the cases of this run: all of them with ``CKPTOOL_LONG=1``."""
    seen: Counter[str] = Counter()
    for case in CASES:
        seen[case.row] += 1
        if LONG or seen[case.row] % EVERY.get(case.row, 1) == 0:
            yield case


@pytest.mark.parametrize("case", list(chosen()), ids=lambda case: case.label)
def test_every_verb_refuses_it_or_answers_right(case: Case, child: Child, tmp_path: Path) -> None:
    assert problems(case, run(child, case, tmp_path)) == []


def test_no_two_cases_have_one_name() -> None:
    labels = [case.label for case in CASES]

    assert len(set(labels)) == len(labels)
