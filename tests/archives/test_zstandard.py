"""Zstandard, unpacked by the package that packed it: to its limit, and refused where it is cut off or damaged."""

from __future__ import annotations

import pytest

from ckptool import Limits
from ckptool.archives.compressed import unpack
from ckptool.errors import LimitExceeded, MalformedFile
from tests.each import each

zstandard = pytest.importorskip("zstandard", reason="zstandard is not installed")
DATA = bytes(range(256)) * 400


def packed(data: bytes, *, sized: bool = True) -> bytes:
    found: bytes = zstandard.ZstdCompressor(write_content_size=sized).compress(data)
    return found


@each("sized", [True, False])
@each("data", [b"", b"x", DATA])
def test_what_was_packed_comes_back(data: bytes, sized: bool) -> None:
    assert unpack(packed(data, sized=sized), Limits()) == data


def test_several_frames_are_one() -> None:
    assert unpack(packed(b"one ", sized=False) + packed(b"two", sized=False), Limits()) == b"one two"


def test_it_may_grow_to_its_limit_and_not_further() -> None:
    limits = Limits(inflation_ratio=1, inflated_nbytes=len(DATA))
    assert unpack(packed(DATA), limits) == DATA
    with pytest.raises(LimitExceeded) as caught:
        unpack(packed(DATA), limits._replace(inflated_nbytes=len(DATA) - 1))
    assert caught.value.actual == len(DATA) - 1


def test_what_is_damaged_or_cut_off_is_refused() -> None:
    for data in (
        b"",
        b"no zstandard",
        packed(DATA)[:-1],
        packed(DATA)[:40],
        b"\x28\xb5\x2f\xfd\xff" + packed(DATA)[5:],
    ):
        with pytest.raises(MalformedFile):
            unpack(data, Limits())
