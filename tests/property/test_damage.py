"""
Whatever happens to a file, opening it and reading all its tensors gives a result or a CkptoolError, nothing else.

Small files are damaged at every byte, by one bit; Hypothesis makes others of any bytes, and of the words of torch's own
pickles.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool import Checkpoint, CkptoolError, open_checkpoint
from tests import build
from tests.scale import examples, scaled, some, step

FORMATS = sorted(build.one_of_each())


@cache
def sound(name: str) -> bytes:
    return build.one_of_each()[name]


def use(checkpoint: Checkpoint) -> int:
    """Ask a checkpoint for everything that it can tell, and return how many tensors could be read."""
    assert checkpoint.form
    assert checkpoint.weights is None or checkpoint.weights.numel >= 0
    read = 0
    for tensor in (*checkpoint.tensors.values(), *checkpoint.attributes.values()):
        info = tensor.info
        assert info.numel >= 0
        assert info.total_nbytes >= info.nbytes
        try:
            data = tensor.read()
        except CkptoolError:
            continue
        assert len(data) == info.nbytes
        read += 1
    return read


def survives(origin: bytes | Path) -> bool:
    """Return whether a file opens; any other error than a CkptoolError goes through."""
    error = None
    try:
        with open_checkpoint(origin) as checkpoint:
            use(checkpoint)
    except CkptoolError as caught:
        error = caught
    assert error is None or (
        error.kind and str(error) and error.path == str(origin if isinstance(origin, Path) else "<bytes>")
    )
    return error is None


@scaled
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("mask", some([1 << bit for bit in range(8)] + [0xFF], 8))
def test_a_file_with_any_bit_flipped_is_read_or_refused(name: str, mask: int) -> None:
    data = sound(name)
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


MAKERS = [
    "torch FloatStorage", "torch FloatTensor", "torch Size", "torch device", "torch float32", "torch sparse_coo",
    "torch per_tensor_affine", "torch._utils _rebuild_tensor", "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_tensor_v3", "torch._utils _rebuild_parameter", "torch._utils _rebuild_parameter_with_state",
    "torch._utils _rebuild_qtensor", "torch._utils _rebuild_sparse_tensor", "torch._utils _rebuild_nested_tensor",
    "torch._utils _rebuild_meta_tensor_no_storage", "torch._utils _rebuild_wrapper_subclass",
    "torch._utils _rebuild_device_tensor_from_numpy", "torch._utils _rebuild_device_tensor_from_cpu_tensor",
    "torch._tensor _rebuild_from_type_v2", "torch.nested._internal.nested_tensor _rebuild_njt",
    "torch.nn.parameter Parameter", "torch.nn.parameter UninitializedParameter", "torch.autograd.variable Variable",
    "torch.storage _load_from_bytes", "torch.fx.graph_module reduce_graph_module",
    "torch._dynamo.eval_frame OptimizedModule", "numpy.core.multiarray _reconstruct", "numpy.core.multiarray scalar",
    "numpy dtype", "_codecs encode", "collections OrderedDict", "builtins getattr", "builtins bytes",
    "copyreg _reconstructor", "__torch__ Net", "m C",
]  # fmt: skip
OPCODES = [
    b"(", b"t", b"l", b"d", b"\x85", b"\x86", b"\x87", b"]", b"}", b")", b"\x8f", b"\x90", b"\x91", b"a", b"e", b"s",
    b"u", b"R", b"\x81", b"\x92", b"b", b"Q", b"0", b"1", b"2", b"q\1", b"h\1", b"q\2", b"h\2", b"\x94", b"N", b"\x88",
]  # fmt: skip
MODULE = {"_parameters": {}, "_buffers": {}, "_modules": {}}
VALUES = ["cpu", "0", "storage", "latin1", "<", "f4", *MODULE, MODULE, 0, 4, -1, 1.5, (4,), (1,), (), {}, []]
PARTS = [
    build.storage(),
    build.tensor(build.storage()),
    build.inline_tensor(),
    build.raw(build.floats()),
    build.raw(b"\0" * 16),
]
PIECES = [*OPCODES, *PARTS, *map(build.ops, VALUES), *(build.named(*name.split()) for name in MAKERS)]


@settings(max_examples=examples(800))
@given(st.lists(st.sampled_from(PIECES), max_size=40))
def test_any_program_of_torch_s_own_words_is_refused_or_read(pieces: list[bytes]) -> None:
    # Whatever is left on the stack is gathered up, so that most programs end well.
    program = b"\x80\x02(" + b"".join(pieces) + b"l."
    survives(build.zip_file({"archive/data.pkl": program, "archive/data/0": build.floats(), "archive/version": b"3"}))
