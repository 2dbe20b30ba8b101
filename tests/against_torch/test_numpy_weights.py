"""State dicts of numpy arrays, as numpy itself pickles them: what torch.from_numpy makes of the same arrays."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import ckptool
from ckptool import MigrationRefused
from tests import build
from tests.against_torch.oracle import saved
from tests.scale import in_turn

BASE = np.arange(24, dtype="f4").reshape(4, 6)
ARRAYS: dict[str, Any] = {
    "rows": BASE,
    "columns": np.asfortranarray(BASE),
    "transposed": BASE.T,
    "slice": BASE[::2, 1:4],
    "permuted": np.arange(24.0).reshape(2, 3, 4).transpose(1, 0, 2),
    "big": BASE.astype(">f4"),
    "big integers": np.arange(5, dtype=">i8"),
    "big complex": (BASE * 1j).astype(">c16"),
    "scalar": np.array(3.5),
    "empty": np.zeros((0, 3)),
    "true": BASE > 3,
    **{code: BASE.astype(code) for code in ("f2", "f8", "c8", "c16", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8")},
}
ARRAYS["tied"] = ARRAYS["rows"]

WRITERS: dict[str, Any] = {
    f"pickle-{protocol}": lambda tree, p=protocol: pickle.dumps(tree, p) for protocol in range(6)
}


WRITERS |= {f"torch-zip-{protocol}": lambda tree, p=protocol: saved(tree, protocol=p) for protocol in (2, 4, 5)}
WRITERS["torch-legacy"] = lambda tree: saved(tree, legacy=True)

TREES = {
    "flat": lambda arrays: arrays,
    "ordered": OrderedDict,
    "detectron2": lambda arrays: {"model": arrays, "__author__": "Model Zoo", "matching_heuristics": True},
    "caffe2": lambda arrays: {"blobs": arrays, "cfg": "a: 1"},
    "beside a random state": lambda arrays: {
        "state_dict": arrays,
        "rng_state": {"cpu": torch.zeros(5, dtype=torch.uint8)},
    },
}


def as_torch(array: Any) -> torch.Tensor:
    native = np.asarray(array)
    return torch.from_numpy(native.astype(native.dtype.newbyteorder("=")).reshape(native.shape))


@pytest.mark.parametrize(("writer", "tree"), in_turn(WRITERS, TREES))
def test_the_arrays_are_the_weights(writer: str, tree: str) -> None:
    loaded = ckptool.load(WRITERS[writer](TREES[tree](ARRAYS)))

    assert list(loaded) == list(ARRAYS)
    for name, array in ARRAYS.items():
        expected = as_torch(array)
        assert loaded[name].dtype == expected.dtype
        assert torch.equal(loaded[name], expected), name


@pytest.mark.parametrize("protocol", [4, 5])
def test_arrays_that_are_one_are_tied_and_keep_their_memory_order(protocol: int) -> None:
    loaded = ckptool.load(pickle.dumps(ARRAYS, protocol))

    assert loaded["tied"].data_ptr() == loaded["rows"].data_ptr()
    assert loaded["columns"].stride() == torch.from_numpy(ARRAYS["columns"]).stride()


def test_arrays_that_are_equal_are_not_tied(tmp_path: Path) -> None:
    arrays = {
        "a": np.ones(4, "f4"),
        "b": np.zeros(4, "f4"),
        "c": np.zeros(4, "f4"),
        "z": np.zeros(300),
        "y": np.zeros(300),
    }
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(arrays))
    # What is written has the bytes of equal arrays once.
    ckptool.migrate(tmp_path / "a.pkl", tmp_path / "b.pth")
    report = ckptool.migrate(tmp_path / "b.pth", tmp_path / "c.safetensors")
    ckptool.migrate(tmp_path / "b.pth", tmp_path / "d.pth", form="state_dict", drop_unsupported=True)

    assert report.before.tied == 0
    assert not report.tied
    assert load_file(tmp_path / "c.safetensors").keys() == arrays.keys()
    loaded = torch.load(tmp_path / "d.pth")
    assert len({tensor.data_ptr() for tensor in loaded.values()}) == len(arrays)
    for name, array in arrays.items():
        assert np.array_equal(loaded[name].numpy(), array)


def test_arrays_that_repeat_far_more_bytes_than_there_are_are_not_loaded() -> None:
    one = np.zeros(1 << 20, "u1").__reduce__()

    class Again:
        def __reduce__(self) -> Any:
            return one

    data = pickle.dumps({f"{number}.weight": Again() for number in range(100)}, 4)
    assert len(data) < 2 << 20
    with pytest.raises(ckptool.LimitExceeded, match="its tensors repeat them"):
        ckptool.load(data)
    assert len(ckptool.load(data, include=["1*.weight"])) == 11


@pytest.mark.parametrize("target", ["x.safetensors", "x.pth"])
def test_migrate_writes_tensors(target: str, tmp_path: Path) -> None:
    arrays = {name: array for name, array in ARRAYS.items() if "c16" not in name and "complex" not in name}
    (tmp_path / "zoo.pkl").write_bytes(pickle.dumps({"model": arrays}, 4))
    report = ckptool.migrate(
        tmp_path / "zoo.pkl", tmp_path / target, form=None if target.endswith("s") else "state_dict"
    )

    found = ckptool.load(tmp_path / target)
    assert report.after is not None
    assert list(found) == list(arrays)
    assert all(torch.equal(found[name], as_torch(array)) for name, array in arrays.items())
    if target == "x.pth":
        stock = torch.load(tmp_path / target)
        assert all(torch.equal(stock[name], as_torch(array)) for name, array in arrays.items())


def test_form_same_keeps_arrays(tmp_path: Path) -> None:
    tree = {"model": ARRAYS, "n": 3}
    (tmp_path / "zoo.pkl").write_bytes(pickle.dumps(tree, 4))
    ckptool.migrate(tmp_path / "zoo.pkl", tmp_path / "same.pth", form="same", to="cuda:0")

    found = torch.load(tmp_path / "same.pth", weights_only=False)
    assert found["n"] == 3
    for name, array in ARRAYS.items():
        assert isinstance(found["model"][name], np.ndarray)
        assert found["model"][name].dtype == array.dtype.newbyteorder("=")  # numpy swaps them
        assert np.array_equal(found["model"][name], array)


def test_arrays_are_not_cast_in_place_and_those_of_objects_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "odd.pkl").write_bytes(pickle.dumps({"w": BASE, "odd": np.array([None, {}], dtype=object)}))

    with pytest.raises(MigrationRefused):
        ckptool.migrate(tmp_path / "odd.pkl", tmp_path / "half.pth", form="same", dtype="float16")
    with pytest.raises(MigrationRefused, match="odd"):
        ckptool.migrate(tmp_path / "odd.pkl", tmp_path / "odd.safetensors")
    assert list(ckptool.load(tmp_path / "odd.pkl")) == ["w"]


@pytest.mark.parametrize("dtype", ["f16", "U5", "M8[s]", [("a", "f4"), ("b", "i4")]])
def test_types_that_torch_does_not_have_are_data(dtype: Any) -> None:
    with ckptool.open_checkpoint(pickle.dumps({"w": BASE, "odd": np.zeros(3, dtype)})) as checkpoint:
        assert list(checkpoint.tensors) == ["w"]
        assert [path for path, _ in checkpoint.extras] == ["odd"]


def test_arrays_beside_the_weights_of_torch_are_data() -> None:
    net = torch.nn.Linear(3, 2)
    data = saved({"model": net.state_dict(), "losses": np.arange(5), "curves": {"train": BASE, "test": BASE}})

    with ckptool.open_checkpoint(data) as checkpoint:
        assert list(checkpoint.tensors) == ["model.weight", "model.bias"]
    assert list(ckptool.load(data)) == ["weight", "bias"]
    net.register_buffer("none", None)
    net.table = BASE  # type: ignore[assignment]
    assert list(ckptool.load(saved(net))) == ["weight", "bias"]


@pytest.mark.parametrize("generator", ["MT19937", "Philox", "SFC64", "PCG64"])
def test_the_state_of_a_random_generator_is_no_weights(generator: str) -> None:
    random = np.random.Generator(getattr(np.random, generator)(0))
    data = pickle.dumps({"net": {"w": BASE, "b": BASE[0]}, "rng": random, "state": random.bit_generator.state})

    assert list(ckptool.load(data)) == ["w", "b"]


def test_curves_beside_an_optimizer_are_no_weights() -> None:
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()

    for curves in ({"losses": BASE}, {"train": BASE[0], "test": BASE[1], "n": 3}):
        with ckptool.open_checkpoint(saved({"optimizer": optimizer.state_dict(), **curves})) as checkpoint:
            assert checkpoint.weights is None
            assert not any(tensor.info.is_array for tensor in checkpoint.tensors.values())


PIXELS = np.zeros((4, 12), "u1")
DATA_SETS: dict[str, Any] = {
    "a batch of CIFAR": {"batch_label": "1 of 5", "labels": [1, 2, 3, 4], "data": PIXELS, "filenames": ["a.png"] * 4},
    "parts": {"x_train": BASE, "y_train": np.zeros(3, int), "x_test": BASE, "mean": np.zeros(3)},
    "features": {"Features": BASE, "ids": np.arange(3)},
    "one below another": {"train": {"x": BASE, "y": np.arange(3)}, "test": {"x": BASE, "y": np.arange(3)}},
}


@pytest.mark.parametrize("name", DATA_SETS)
def test_examples_for_a_model_are_no_weights(name: str) -> None:
    data = pickle.dumps(DATA_SETS[name])
    with ckptool.open_checkpoint(data) as found:
        assert found.weights is None
        assert {one.role for one in found.state_dicts} == {"other"}
        keys = [one.key for one in found.state_dicts]
    with pytest.raises(ckptool.WeightsNotFound):
        ckptool.load(data)
    assert all(ckptool.load(data, key=key) for key in keys)


@pytest.mark.parametrize(
    "names", [("W1", "b1", "x"), ("data.weight", "data.bias"), ("kernel", "target"), ("means", "scales")]
)
def test_arrays_with_names_of_weights_are_weights(names: tuple[str, ...]) -> None:
    assert list(ckptool.load(pickle.dumps(dict.fromkeys(names, BASE)))) == list(names)
    assert list(ckptool.load(pickle.dumps({"params": {"x": BASE}}))) == ["x"]


def test_check_says_that_they_are_arrays() -> None:
    found = {one.code: one for one in ckptool.check(pickle.dumps({"model": ARRAYS, "n": 1})).findings}

    assert found["CK130"].severity == "warning"
    assert found["CK130"].command is not None
    assert "CK502" not in found
    net = torch.nn.Linear(3, 2)
    assert "CK130" not in {one.code for one in ckptool.check(saved({"model": net.state_dict(), "a": BASE})).findings}


def test_types_of_ml_dtypes_are_torchs() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.arange(6, dtype="f4")
    kinds = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
    tree = {kind: values.astype(getattr(ml_dtypes, kind)) for kind in kinds}

    loaded = ckptool.load(pickle.dumps(tree))
    for kind, array in tree.items():
        assert loaded[kind].dtype == getattr(torch, kind)
        assert torch.equal(loaded[kind].float(), torch.from_numpy(array.astype("f4")))


def test_a_state_dict_of_bfloat16_as_ml_dtypes_pickles_it() -> None:
    values = torch.tensor([0.0, 1.5, -2.0]).bfloat16()
    stored = values.view(torch.uint8).numpy().tobytes()
    dtype = build.call(build.named("numpy", "dtype"), build.named("ml_dtypes", "bfloat16"), False, True)
    dtype += build.ops((3, "<", None, None, None, 2, 2, 64)) + b"b"
    array = build.call(build.named("numpy.core.multiarray", "_reconstruct"), build.named("numpy", "ndarray"), (0,), "b")
    array += build.ops((1, (3,), dtype, False, build.raw(stored))) + b"b"
    data = build.pickled({"w": array})

    assert torch.equal(ckptool.load(data)["w"], values)


@pytest.mark.parametrize("size", [3, 5, 1 << 62, 1 << 70, -1, True, None])
def test_an_array_without_its_bytes_makes_nothing_unreadable(size: Any) -> None:
    dtype = build.call(build.named("numpy", "dtype"), "f4", False, True) + build.ops((3, "<", None)) + b"b"
    array = build.call(build.named("numpy.core.multiarray", "_reconstruct"), build.named("numpy", "ndarray"), (0,), "b")
    whole = array + build.ops((1, (2,), dtype, False, build.raw(bytes(8)))) + b"b"
    cut = array + build.ops((1, (size,), dtype, False, build.raw(bytes(8)))) + b"b"
    turned = build.call(
        build.named("numpy.core.numeric", "_frombuffer"), build.raw(bytes(24)), dtype, (2, 3), "K", (0, size)
    )

    with ckptool.open_checkpoint(build.pickled({"w": whole, "cut": cut, "turned": turned})) as checkpoint:
        assert list(checkpoint.tensors) == ["w"]
        assert [path for path, _ in checkpoint.extras] == ["cut", "turned"]
