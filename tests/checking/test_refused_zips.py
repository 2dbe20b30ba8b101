"""Zips that torch.load() refuses for their version, their folder or their volumes are not said to be fine."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Mapping

import pytest
import torch

import ckptool


def saved(changes: Mapping[str, bytes]) -> bytes:
    """Return a torch zip in which records are replaced, or added."""
    first, second = io.BytesIO(), io.BytesIO()
    torch.save({"w": torch.ones(4)}, first)
    with zipfile.ZipFile(first) as old, zipfile.ZipFile(second, "w") as new:
        records = {name: old.read(name) for name in old.namelist()}
        for name, data in {**records, **changes}.items():
            new.writestr(name, data)
    return second.getvalue()


@pytest.mark.parametrize(
    "changes",
    [{}, {"archive/version": b"3x\n"}, {"archive/version": b"  3\n"}, *({"archive/version": one} for one in (
        b"\n", b"x3", b"0", b"-1")), {"Data/0": b"text"}, {"other/x": b"text"}, {"__MACOSX/x": b"text"}],
)  # fmt: skip
def test_check_and_torch_agree(changes: dict[str, bytes]) -> None:
    data = saved(changes)
    try:
        torch.load(io.BytesIO(data), weights_only=True)
        opens = True
    except RuntimeError:
        opens = False
    report = ckptool.check(data, deep=True)
    assert ("CK202" not in {one.code for one in report.findings}) == opens


@pytest.mark.parametrize(("at", "byte"), [(16, 1), (20, 1), (72, 0), (72, 2)])
def test_a_zip64_of_several_volumes_is_refused(at: int, byte: int) -> None:
    data = saved({})
    end = data.rindex(b"PK\5\6")
    count, nbytes, offset = struct.unpack_from("<H2L", data, end + 10)
    end64 = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, nbytes, offset)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, end, 1)
    whole = (
        data[:end] + end64 + locator + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 65535, 65535, *[(1 << 32) - 1] * 2, 0)
    )
    assert list(ckptool.load(whole)) == ["w"]
    torch.load(io.BytesIO(whole), weights_only=True)
    flipped = bytearray(whole)
    flipped[end + at] = byte
    with pytest.raises(ckptool.UnsupportedFeature, match="several volumes"):
        ckptool.open_checkpoint(bytes(flipped))
    with pytest.raises(RuntimeError):
        torch.load(io.BytesIO(flipped), weights_only=True)
