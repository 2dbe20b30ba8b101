"""Files of joblib, by joblib itself where it is there, and byte by byte: the arrays that joblib.load gives."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptool
from ckptool import CkptoolError
from tests import build
from tests.against_torch.test_numpy_weights import ARRAYS, BASE, as_torch

COMPRESSIONS = [0, ("zlib", 3), ("gzip", 3), ("bz2", 3), ("lzma", 3), ("xz", 3)]
ODD: dict[str, Any] = {
    "objects": np.array([None, {"a": (1, 2)}], dtype=object),
    "text": np.array(["abc", "d"]),
    "records": np.zeros(3, [("a", "f4"), ("b", "i8")]),
    "records with objects": np.zeros(3, [("a", "f4"), ("b", "O")]),
    "times": np.zeros(3, "M8[s]"),
    "long": np.zeros(3, np.longdouble),
    "masked": np.ma.masked_array(BASE, BASE > 3),
}
if hasattr(np.dtypes, "StringDType"):
    ODD["words"] = np.array(["abc", "d"], np.dtypes.StringDType())


def dumped(tree: Any, compress: Any = 0, protocol: int | None = None) -> bytes:
    joblib = pytest.importorskip("joblib")
    buffer = io.BytesIO()
    joblib.dump(tree, buffer, compress, protocol)
    return buffer.getvalue()


@pytest.mark.parametrize("compress", COMPRESSIONS, ids=str)
@pytest.mark.parametrize("protocol", [None, 2, 5])
def test_arrays_are_the_weights_whatever_lies_beside_them(compress: Any, protocol: int | None) -> None:
    data = dumped({"odd": ODD, "net": ARRAYS, "objects": ODD["objects"], "n": 3}, compress, protocol)
    loaded = ckptool.load(data, key="net")

    assert list(loaded) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert torch.equal(loaded[name], as_torch(array)), name
    report = ckptool.check(data, deep=True)
    assert report.error is None
    assert "joblib.numpy_pickle.NumpyArrayWrapper" in {use.name for use in report.globals}


@pytest.mark.parametrize("protocol", [0, 1, 3, 4])
def test_other_protocols_of_pickles(protocol: int) -> None:
    assert torch.equal(ckptool.load(dumped(ARRAYS, 0, protocol))["transposed"], as_torch(ARRAYS["transposed"]))


def test_an_array_of_objects_is_data_and_told_of() -> None:
    with ckptool.open_checkpoint(dumped({"w": BASE, "odd": ODD["objects"], "text": ODD["text"]})) as checkpoint:
        found = dict(checkpoint.extras)

    assert list(checkpoint.tensors) == ["w"]
    assert list(found) == ["odd", "text"]


def test_arrays_larger_than_the_window_and_an_estimator(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    tree = {f"layer{number}.weight": random.normal(size=(200, 130)) for number in range(4)}
    (tmp_path / "x.joblib").write_bytes(dumped(tree))

    loaded = ckptool.load(tmp_path / "x.joblib")
    assert all(torch.equal(loaded[name], torch.from_numpy(array)) for name, array in tree.items())
    with ckptool.open_checkpoint(tmp_path / "x.joblib") as checkpoint:
        offsets = [tensor.info.storage.file_offset for tensor in checkpoint.tensors.values() if tensor.info.storage]
    assert all(offset is not None and offset % 16 == 0 for offset in offsets)


def test_a_model_of_torch_among_arrays() -> None:
    net = torch.nn.Linear(3, 2)
    data = dumped({"net": net, "mean": BASE, "odd": ODD["objects"]})

    loaded = ckptool.load(data)
    assert torch.equal(loaded["weight"], net.weight)
    assert ckptool.diff(data, data).same


def test_form_same_writes_what_any_numpy_reads(tmp_path: Path) -> None:
    tree = {"net": ARRAYS, "text": ODD["text"], "n": 3}
    (tmp_path / "x.joblib").write_bytes(dumped(tree))
    ckptool.migrate(tmp_path / "x.joblib", tmp_path / "x.pth", form="same")

    found = torch.load(tmp_path / "x.pth", weights_only=False)
    assert all(np.array_equal(found["net"][name], array) for name, array in ARRAYS.items())
    assert np.array_equal(found["text"], ODD["text"])


def wrapped(size: Any = (4,), *, code: str = "f4", order: str = "C", alignment: Any = None, elements: bytes) -> bytes:
    """Return the opcodes of an array as joblib writes it, and its elements."""
    dtype = (
        build.call(build.named("numpy", "dtype"), code, False, True) + build.ops((3, "<", None, None, None, -1)) + b"b"
    )
    state = {"subclass": build.named("numpy", "ndarray"), "shape": size, "order": order, "dtype": dtype}
    state |= {"allow_mmap": True, "numpy_array_alignment_bytes": alignment}
    return build.named("joblib.numpy_pickle", "NumpyArrayWrapper") + b")\x81" + build.ops(state) + b"b" + elements


def test_without_joblib_old_and_new_layout() -> None:
    old = wrapped(elements=build.floats())
    new = wrapped(alignment=16, elements=b"\x03\xff\xff\xff" + build.floats())
    none = wrapped(alignment=16, elements=b"\0" + build.floats())
    columns = wrapped((2, 2), order="F", elements=build.floats())

    with ckptool.open_checkpoint(build.pickled({"a": old, "b": new, "c": none, "d": columns, "n": 1})) as found:
        assert [one.read() for one in list(found.tensors.values())[:3]] == [build.floats()] * 3
        assert found.tensors["d"].info.stride == (1, 2)


@pytest.mark.parametrize(
    "opcodes",
    [
        wrapped((1 << 40,), elements=build.floats()),
        wrapped((1 << 62, 1 << 62), elements=build.floats()),
        wrapped((-1,), elements=build.floats()),
        wrapped("four", elements=build.floats()),
        wrapped(alignment=16, elements=b"\xff"),
        wrapped(alignment=16, elements=b""),
        wrapped(code="f", elements=build.floats()),
        wrapped(code="O8", elements=b"no pickle"),
        wrapped(elements=build.floats()[:-3]),
    ],
    ids=range(9),
)
def test_what_contradicts_itself_is_an_error(opcodes: bytes) -> None:
    with pytest.raises(CkptoolError):
        ckptool.open_checkpoint(build.pickled({"w": opcodes}))


def test_cut_anywhere_it_is_an_error() -> None:
    data = build.pickled({"a": wrapped(alignment=16, elements=b"\x03\xff\xff\xff" + build.floats()), "b": 1})

    for length in range(len(data)):
        with pytest.raises(CkptoolError):
            ckptool.open_checkpoint(data[:length])


def test_lz4_is_named() -> None:
    with pytest.raises(CkptoolError, match="LZ4"):
        ckptool.open_checkpoint(b"\x04\x22\x4d\x18" + bytes(40))


def test_the_same_object_in_a_file_of_pickle_is_no_array() -> None:
    class_of = build.named("joblib.numpy_pickle", "NumpyArrayWrapper") + b")\x81"

    assert ckptool.open_checkpoint(build.pickled({"x": class_of, "n": 1})).form == "data"
    assert pickle.loads(build.pickled({"n": 1})) == {"n": 1}
