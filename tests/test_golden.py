"""Every verb makes of the fixtures what the record says: facts, codes and bytes."""

from __future__ import annotations

import os

import pytest

from tests import golden, scale

torch = pytest.importorskip("torch")


@scale.exhaustive
@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the record is of PyTorch 2.13")
def test_every_verb_makes_of_the_fixtures_what_the_record_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(golden.ROOT)
    monkeypatch.setitem(os.environ, "CKPTOOL_TRACEBACK", "1")
    found = {fact["command"]: fact for fact in golden.run(golden.fixtures()[:: 1 if scale.scale > 1 else 3])}
    recorded = golden.recorded()

    changed = list(golden.differences({command: recorded.get(command, {}) for command in found}, found))
    assert not changed, "\n".join(changed[:20])


def test_a_fact_that_changes_is_shown_with_what_is_around_it() -> None:
    old = {"a": {"command": "a", "exit": 0, "codes": ["CK101"]}, "b": {"command": "b", "exit": 0}}
    new = {"a": {"command": "a", "exit": 0, "codes": ["CK102"]}, "c": {"command": "c", "exit": 0}}

    assert list(golden.differences(old, new)) == ["a\n  codes: ['CK101'] -> ['CK102']", "gone: b", "new: c"]
    assert list(golden.differences(old, old)) == []
