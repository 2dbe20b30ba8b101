"""Every hostile file through inspect, check, migrate and load: a typed error or the right answer, in bounds."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import build, scale
from tests.each import each
from tests.hostile.cases import Case
from tests.hostile.cases.every import CASES
from tests.hostile.child import Watch
from tests.hostile.conftest import Opened
from tests.hostile.harness import VERBS, Process, problems, run
from tests.scale import step

pytest.importorskip("resource", reason="Windows: it has no limits on memory for a process")


@pytest.fixture(scope="module")
def child() -> Iterator[Process]:
    started = Process("child")
    yield started
    started.close()


FIGURES = os.environ.get("CKPTOOL_FIGURES")
"""A file that gets what each verb took of time, and by how much its process has grown at most, up to its end."""
# Of rows with very many cases alike, and of those that cost seconds each, a full run takes some; --scale 64, all.
EVERY = {
    "P1": 64,
    "P4": 8,
    "P5": 8,
    "P7": 10,
    "P8": 22,
    "P11": 20,
    "P13": 4,
    "P14": 4,
    "P15": 16,
    "Z4": 64,
    "Z8": 16,
    "Z6": 8,
    "Z9": 16,
    "Z11": 16,
    "Z12": 8,
    "Z13": 8,
    "Z15": 12,
    "S1": 16,
    "S2": 24,
    "S4": 8,
    "S6": 8,
    "S7": 20,
    "D1": 8,
    "D2": 8,
    "F1": 16,
    "F3": 12,
    "F5": 6,
    "F7": 24,
    "F8": 32,
    "I1": 24,
    "I3": 16,
    "I4": 32,
}
SMALL = 24
"""Of those a small run takes every so manyth, and one of each row,"""
DEAR = {"P11", "P12", "Z11"}
"""but none of rows that cost seconds a case: some of them are opened alone."""


def chosen() -> Iterator[Any]:
    """Yield the cases of this run."""
    seen: Counter[str] = Counter()
    for case in CASES:
        rank, rest = divmod(seen[case.row], max(1, EVERY.get(case.row, 1) // max(1, scale.scale)))
        seen[case.row] += 1
        if rest == 0 and rank % SMALL == 0 and case.row not in DEAR:
            yield case
        elif rest == 0 and scale.scale:
            yield pytest.param(case, marks=scale.exhaustive)


@pytest.mark.parametrize("case", list(chosen()), ids=lambda case: case.label)
def test_every_verb_refuses_it_or_answers_right(case: Case, child: Process, tmp_path: Path) -> None:
    found = run(child, case, tmp_path)
    if FIGURES:
        with Path(FIGURES).open("a") as stream:
            stream.writelines(
                f"{one['seconds']:.2f} s\t{one['grown'] >> 20} MiB\t{name}\t{case.label}\n"
                for name, one in found.get("verbs", {}).items()
            )
    assert problems(case, found) == []


def alone() -> dict[str, list[Case]]:
    """Return the cases that are opened by themselves, by their rows: of rows that take long, few."""
    rows: dict[str, list[Case]] = {}
    for case in CASES:
        if isinstance(case.make, bytes):
            rows.setdefault(case.row, []).append(case)
    return {row: cases[:: step(12) if row in {"P8", *DEAR} else step(3)] for row, cases in rows.items()}


ALONE = alone()


@pytest.mark.parametrize("row", ALONE)
def test_every_case_opens_with_its_bytes_or_is_refused_for_its_reason_and_costs_little(
    row: str, opened: Opened
) -> None:
    for case in ALONE[row]:
        found = opened(case.make, nbytes=case.nbytes)
        kind = found["error"] or "read"
        is_right = kind == case.expect or (case.expect == "refused" and kind != "read")
        assert is_right or case.expect in ("any", "one"), (case.label, kind)
        is_told = case.expect == "read" or (case.expect == "one" and kind == "read" and found["unread"] is None)
        if is_told and isinstance(case.weights, dict):
            right = {name: hashlib.sha256(data).hexdigest() for name, data in case.weights.items()}
            assert found["digests"] == right, case.label


def test_no_two_cases_have_one_name() -> None:
    labels = [case.label for case in CASES]

    assert len(set(labels)) == len(labels)


SOUND = build.one_of_each()["torch_zip"]
WRONG = {
    "it is read": Case("", "", SOUND, "refused"),
    "it is no such error": Case("", "", b"PK", "malformed-zip"),
    "it is refused": Case("", "", b"", "read"),
    "there are other weights": Case("", "", SOUND, "read", {"weight": b"other"}),
    "there are weights": Case("", "", SOUND, "read", False),
    "there are none": Case("", "", build.torch_zip({}), "read", True),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_as_it_should_be_is_told_of(name: str, child: Process, tmp_path: Path) -> None:
    assert problems(WRONG[name], run(child, WRONG[name], tmp_path))


FOUND: dict[str, Any] = {"happened": [], "changed": False, "nbytes": 0}
FINE = {"seconds": 0.1, "left": [], "said": "fine\n", "code": 2, "error": "malformed-zip"}


@pytest.mark.parametrize(
    "worse",
    [
        {"seconds": 3.0},
        {"left": [".part"]},
        {"said": "\x1b[2J"},
        {"said": "\u202e"},
        {"untyped": "IndexError"},
        {"error": None},
        {"error": "other"},
    ],
    ids=str,
)
def test_each_promise_can_be_broken(worse: dict[str, Any]) -> None:
    case = Case("", "", b"", "refused")
    verbs = {name: dict(FINE) for name in VERBS}
    assert problems(case, {**FOUND, "verbs": verbs}) == []

    for more in ({"happened": ["import os"]}, {"changed": True}, {"broken": "killed by signal 11"}):
        assert problems(case, {**FOUND, "verbs": verbs, **more})
    verbs["migrate"] |= worse
    assert problems(case, {**FOUND, "verbs": verbs})


@each(
    ("event", "args", "allowed"),
    [
        ("open", ("/in/file", "r", os.O_RDONLY), True),
        ("open", ("/in/file", "w", os.O_WRONLY), False),
        ("open", ("/out/new", "w", os.O_WRONLY | os.O_CREAT), True),
        ("open", ("/etc/passwd", "r", os.O_RDONLY), False),
        ("os.rename", ("/out/a", "/out/b", -1, -1), True),
        ("os.remove", ("/etc/passwd", -1), False),
        ("import", ("canary", None, None, None, None), False),
        ("os.system", (b"true",), False),
        ("pickle.find_class", ("os", "system"), False),
        ("socket.connect", (None, None), False),
        ("fcntl.ioctl", (0, 0x40049409, 5), False),  # on what is not in the folder
        ("fcntl.ioctl", (0, 0x5412, b"x"), False),
    ],
)
def test_the_watch_knows_what_is_needed(event: str, args: tuple[Any, ...], allowed: bool) -> None:
    watch = Watch("/in/file", "/out")
    watch(event, args)
    assert not watch.happened
    watch.armed = True
    watch(event, args)

    assert (watch.happened == []) == allowed


@pytest.mark.parametrize(
    ("path", "flags", "allowed"),
    [
        ("a", os.O_RDONLY | os.O_NOFOLLOW, True),
        ("a", os.O_RDONLY, False),
        ("a", os.O_WRONLY | os.O_NOFOLLOW, False),
        ("b", os.O_RDONLY | os.O_NOFOLLOW, False),
        ("/in/a", os.O_RDONLY | os.O_NOFOLLOW, False),
        ("..", os.O_RDONLY | os.O_NOFOLLOW, False),
        ("/in", os.O_RDONLY | os.O_DIRECTORY, True),
        ("/in", os.O_RDONLY, False),
        ("/", os.O_RDONLY | os.O_DIRECTORY, False),
    ],
)
def test_the_watch_knows_what_may_be_opened_beside_a_file(path: str, flags: int, allowed: bool) -> None:
    watch = Watch("/in/file", "/out", ("a",))
    watch.armed = True
    watch("open", (path, None, flags))
    assert (watch.happened == []) == allowed

    alone = Watch("/in/file", "/out")
    alone.armed = True
    alone("open", (path, None, flags))
    assert alone.happened
