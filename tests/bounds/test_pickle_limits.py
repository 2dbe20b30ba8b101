"""How many opcodes a compressed pickle may have, and how deep anything may nest: to the byte, and to the level."""

from __future__ import annotations

from struct import pack

import pytest

from ckptool import LimitExceeded, Limits, open_checkpoint
from ckptool.pickles.reader import read_pickle
from ckptool.sources.source import BytesSource
from tests.build import torch_zip

MOST = 1 << 20
"""Bytes of opcodes that a small file may have in a compressed pickle."""
WINDOW = 1 << 16


def text(nbytes: int) -> bytes:
    """Return an opcode that pushes a text, and is so long with it."""
    return b"X" + pack("<I", nbytes - 5) + b"a" * (nbytes - 5)


def read(opcodes: bytes, packed_nbytes: int = 1) -> None:
    """Read a pickle of a tuple as if so many bytes had been inflated to it."""
    read_pickle(BytesSource(b"(" + opcodes + b"t.", packed_nbytes=packed_nbytes))


@pytest.mark.parametrize(("before", "is_refused"), [(MOST - 2, False), (MOST - 1, False), (MOST, True)])
def test_as_many_opcodes_as_allowed_are_read_and_not_one_more(before: int, is_refused: bool) -> None:
    opcodes = b"N" * before + text(WINDOW + 1)  # so long that a window has to begin at it
    if is_refused:
        with pytest.raises(LimitExceeded) as caught:
            read(opcodes)
        assert caught.value.kind == "pickle-bomb"
    else:
        read(opcodes)


def test_long_texts_are_no_opcodes() -> None:
    read(text(WINDOW + 1) * 40)
    with pytest.raises(LimitExceeded):
        read(text(WINDOW) * 40)


def test_a_pickle_may_ask_for_as_many_names_as_allowed_and_not_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptool.pickles.machine._MOST_NAMES", 3)
    asked = [b"cmodule\nname%d\n" % number for number in (1, 2, 3, 1, 4)]

    read(b"".join(asked[:4]))
    with pytest.raises(LimitExceeded) as caught:
        read(b"".join(asked))
    assert caught.value.kind == "too-many-names"


def test_things_nest_as_deep_as_allowed_and_no_deeper() -> None:
    data = torch_zip(b")" + b"\x85" * 9, {})

    open_checkpoint(data, limits=Limits(depth=10)).close()
    with pytest.raises(LimitExceeded) as caught:
        open_checkpoint(data, limits=Limits(depth=9))
    assert caught.value.kind == "too-deep"
