"""
Pickles that would cost a careless reader its memory or its evening: each is opened in a process of its own.

The process may use so much address space more than it has when the file is opened, and so much processor time. What
these files ask for is gigabytes and hours.
"""

from __future__ import annotations

from struct import pack

import pytest

from ckptool import AmbiguousFile, TruncatedFile, open_checkpoint
from tests.build import floats, pickled, torch_zip
from tests.each import each
from tests.hostile.cases.pickles import BOMBS, LENGTHS, RECURSIVE, T, zipped
from tests.hostile.conftest import MIB, Opened
from tests.scale import some


@pytest.mark.parametrize("name", LENGTHS)
def test_a_length_that_lies_is_found_out_before_anything_is_read(name: str, opened: Opened) -> None:
    found = opened(b"\x80\x04" + LENGTHS[name] + b"1" * 60, nbytes=16 * MIB)

    expected = ["LimitExceeded", "limit-exceeded"] if name == "LONG4" else ["TruncatedFile", "truncated-pickle"]
    assert found["error"] == expected


@pytest.mark.parametrize("name", ["LONG4", "BINSTRING"])
def test_a_negative_length_is_refused(name: str, opened: Opened) -> None:
    found = opened(b"\x80\x04" + LENGTHS[name][:1] + b"\xff\xff\xff\xff" + b"." * 60, nbytes=16 * MIB)

    assert found["error"] == ["MalformedFile", "malformed-pickle"]


@each("name", [name for name in LENGTHS if name.startswith(("BIN", "SHORT", "BYTE", "LONG"))])
def test_a_length_may_reach_to_the_end_and_not_beyond(name: str) -> None:
    code, width = LENGTHS[name][:1], len(LENGTHS[name]) - 1
    head = b"\x80\x04" + code + (40).to_bytes(width, "little")

    open_checkpoint(head + b"." * 41).close()
    with pytest.raises(TruncatedFile):
        open_checkpoint(head + b"." * 39)


@pytest.mark.parametrize("index", [1 << 8, 1 << 16, 1 << 31, (1 << 32) - 1])
def test_a_large_memo_index_costs_nothing(index: int, opened: Opened) -> None:
    data = b"\x80\x02N" + b"r" + pack("<I", index) + b"0j" + pack("<I", index) + b"."

    assert opened(data, nbytes=16 * MIB)["error"] is None


@pytest.mark.parametrize("name", some(BOMBS, 7))
def test_a_small_file_costs_little(name: str, opened: Opened) -> None:
    data, mib, error = BOMBS[name]
    found = opened(data, nbytes=mib * MIB)

    assert (found["error"] or [None])[0] == error


@pytest.mark.parametrize("more", [b".", b"\0", pickled(1), b"N", b"\n"])
def test_bytes_behind_the_pickle_in_a_zip_are_refused(more: bytes) -> None:
    members = {"archive/data.pkl": pickled({"w": T}) + more}
    with pytest.raises(AmbiguousFile) as caught:
        open_checkpoint(torch_zip({"w": T}, {"0": floats()}, members=members))

    assert caught.value.kind == "ambiguous-pickle"


@pytest.mark.parametrize("name", RECURSIVE)
def test_what_holds_itself_is_walked_once(name: str, opened: Opened) -> None:
    assert opened(zipped({"w": T, "x": RECURSIVE[name]}), nbytes=16 * MIB)["error"] is None
