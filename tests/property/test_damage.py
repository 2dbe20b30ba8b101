"""
Whatever happens to a file, opening it and reading all its tensors gives a result or a CkptoolError, nothing else.

Small files are damaged at every byte, by one bit; Hypothesis makes others of any bytes. ``tests.fuzz`` makes programs.
"""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool import CkptoolError, open_checkpoint
from tests import build
from tests.scale import examples, scaled, some, step

FORMATS = build.one_of_each()


def survives(data: bytes) -> None:
    """Ask a file for everything that it can tell; any other error than a CkptoolError goes through."""
    error = None
    try:
        with open_checkpoint(data) as checkpoint:
            assert checkpoint.form
            assert checkpoint.weights is None or checkpoint.weights.numel >= 0
            for tensor in (*checkpoint.tensors.values(), *checkpoint.attributes.values()):
                assert tensor.info.numel >= 0
                assert tensor.info.nbytes <= tensor.info.total_nbytes
                with suppress(CkptoolError):
                    assert len(tensor.read()) == tensor.info.nbytes
    except CkptoolError as caught:
        error = caught
    assert error is None or (error.kind and str(error) and error.path == "<bytes>")


@scaled
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("mask", some([1 << bit for bit in range(8)] + [0xFF], 8))
def test_a_file_with_any_bit_flipped_is_read_or_refused(name: str, mask: int) -> None:
    data = FORMATS[name]
    for place in range(0, len(data), step(7, 3)):
        if name == "torch_tar" and place % 512 > 400 and not any(data[place : place + 16]):
            continue  # padding, of which a tar is mostly made
        survives(data[:place] + bytes([data[place] ^ mask]) + data[place + 1 :])


@settings(max_examples=examples(300))
@given(st.binary(max_size=400))
def test_any_bytes_are_refused_or_read(data: bytes) -> None:
    survives(data)
    for magic in (
        b"PK\x03\x04",
        b"\x80\x02",
        b"\x80\x04\x95",
        b"\x1f\x8b\x08",
        b"(",
        build.pickled(build.MAGIC_NUMBER),
    ):
        survives(magic + data)
