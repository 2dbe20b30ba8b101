"""Folders that are written, and journals of edits, at their bounds: the first descriptor, none at all, no bytes."""

from __future__ import annotations

import os
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from ckptool.migration.output.opening import OutputFolder
from ckptool.sources.journal import journal_name
from tests.each import each

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc, modes")


def test_progress_never_stands_still(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    with OutputFolder(str(tmp_path / "out"), progress=lambda *numbers: told.append(numbers)) as folder:
        folder.reserve(9)
        for name in ("a", "b", "c"):
            with folder.file(name) as output:
                output.write(name.encode() * 3)
                output.flush()
                output.flush()
                output.publish()
        folder.publish()

    assert told == [(3, 9), (6, 9), (9, 9)]


@each("character", ["a", "\u00e9", "\u20ac", "\U0001f600", "\udc80"])
def test_journals_have_names_that_fit_and_are_plain_where_they_can_be(character: str) -> None:
    for length in range(1, 256):
        plain = f".{character * length}.ckptool-undo"
        found = journal_name(character * length)
        if len(os.fsencode(plain)) <= 255 - len(".new"):
            assert found == plain
        else:
            assert found == f".{sha256(os.fsencode(character * length)).hexdigest()}.ckptool-undo"
