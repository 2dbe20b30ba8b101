"""``load`` gives what ``torch.load`` gives: every type, every view, every kind of file, and the memory they share."""

from __future__ import annotations

import io
import sys
import tarfile
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from safetensors.torch import save as save_safetensors
from torch import nn

import ckptool
from ckptool.loading.memory import assembly
from ckptool.reference.nets import CifarNet, LeNet, TiedReader
from ckptool.reference.trainer import process_group
from tests import build, where
from tests.against_torch import oracle
from tests.against_torch import test_byte_order as big
from tests.against_torch.test_saved_tensors import (
    KINDS,
    QUANTISED,
    SAVABLE,
    VIEWS,
    WITHOUT_STORAGE_CLASS,
    of_dtype,
    quantised_per_channel,
    quantised_per_tensor,
)
from tests.loading.same import assert_same, assert_same_tensor, saved, sharing, tensors_only, torch_load
from tests.scale import in_turn, one_of_twins

pytestmark = [
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
    pytest.mark.filterwarnings("ignore:Sparse "),
    pytest.mark.filterwarnings("ignore:.*[Qq]uantiz"),
    pytest.mark.filterwarnings("ignore:Couldn't retrieve source code"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]
FIXTURES = Path(__file__).parents[2] / "fixtures" / "valid"
MMAPS: list[Any] = [True, False, "auto"]
SPARSE = [kind for kind in KINDS if kind.startswith("sparse")]


def load(source: Any, device: Any = None, **options: Any) -> Any:
    """Return what is loaded under the names in the file, on the device of the tests."""
    return ckptool.load(source, device or where.device, **({"strip": None} | options))


def of_every_type(legacy: bool) -> dict[str, Any]:
    names = [name for name in SAVABLE if not (legacy and name.startswith(WITHOUT_STORAGE_CLASS))]
    whole = {name: of_dtype(name) for name in names}
    return {f"{name}.{part}": view for name, t in whole.items() for part, view in [("a", t), ("b", t[2:7:2])]}


def views(_: bool) -> dict[str, Any]:
    content = {f"{name.replace(' ', '-')}": make() for name, make in VIEWS.items()}
    # Views of nothing at all keep their strides.
    content |= {"no-columns": torch.ones(4, 6)[:, 3:3], "no-rows": torch.ones(4, 6).t()[2:2]}
    return content | {"no-conjugates": torch.ones(4, 0, dtype=torch.complex64).conj()}


def shared(_: bool = False) -> dict[str, Any]:
    return {**KINDS["tied tensors and views of one storage"](), "alone": torch.ones(3)}


def seen_as_two_types(legacy: bool) -> dict[str, Any]:
    raw = torch.arange(11, dtype=torch.uint8)
    # torch cannot load what it writes of them in the old format.
    return (
        {"whole": raw} if legacy else {"pairs": raw[:10].view(torch.uint16), "eighths": raw.view(torch.float8_e5m2)[3:]}
    )


def sparse(_: bool) -> dict[str, Any]:
    return {kind.replace(" ", "-"): KINDS[kind]() for kind in SPARSE} | {"plain": torch.ones(2)}


def quantised(_: bool) -> dict[str, Any]:
    content = {f"whole.{name}": quantised_per_tensor(dtype) for name, dtype in QUANTISED.items()}
    for axis in (0, 1):
        content |= {f"by.{axis}.{name}": quantised_per_channel(dtype, axis) for name, dtype in QUANTISED.items()}
    content["floating"] = quantised_per_channel(torch.quint4x2, 0)
    content["part"] = content["whole.qint8"][1:3, ::2]
    content["nothing"] = torch.quantize_per_tensor(torch.zeros(0, 3), 0.1, 0, torch.qint8)
    content["nothing.by.0"] = torch.quantize_per_channel(
        torch.zeros(2, 0), torch.ones(2), torch.zeros(2), 0, torch.quint8
    )
    return content


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize(
    "contents",
    [
        *(pytest.param(one, marks=where.on_any) for one in (of_every_type, views, shared, seen_as_two_types)),
        sparse,
        quantised,
    ],
)
def test_whatever_torch_saves_is_loaded_as_torch_loads_it(
    contents: Callable[[bool], dict[str, Any]], legacy: bool, tmp_path: Path
) -> None:
    data = saved(contents(legacy), tmp_path / "x.pth", legacy=legacy)
    expected = torch_load(data)
    for mmap in MMAPS:
        found = load(tmp_path / "x.pth", mmap=mmap, key="")
        assert_same(found, expected)
    if contents in (sparse, quantised):
        dense = torch.Tensor.to_dense if contents is sparse else torch.Tensor.dequantize
        assert all(torch.equal(dense(found[name]), dense(expected[name])) for name in expected)


@where.on_any
def test_quantised_tensors_are_refused_on_devices_that_have_none(tmp_path: Path) -> None:
    for name, content in (("some", quantised_per_tensor(torch.qint8)), ("none", quantised_per_tensor(torch.qint8)[:0])):
        saved({name: content, "w": torch.rand(4)}, tmp_path / "x.pth")

        with pytest.raises(ckptool.UnsupportedFeature, match=r"no tensors of torch\.qint8 on meta"):
            load(tmp_path / "x.pth", "meta")


def test_the_parameters_of_quantised_tensors_are_not_cast(tmp_path: Path) -> None:
    content = {"q": quantised_per_channel(torch.qint8, 0), "w": torch.rand(4)}
    saved(content, tmp_path / "x.pth")

    found = load(tmp_path / "x.pth", dtype=torch.float16)

    assert_same_tensor(found["q"], content["q"])
    assert_same_tensor(found["w"], content["w"].half())


@pytest.mark.parametrize("dtype", [*big.TYPED, *big.UNTYPED], ids=str)
def test_files_of_big_endian_machines_hold_the_same_numbers(dtype: torch.dtype, tmp_path: Path) -> None:
    views = big.views_of(big.example(dtype))
    (tmp_path / "x.pth").write_bytes(big.big_endian_zip(big.example(dtype), views))

    for mmap in (True, False):
        assert_same(load(tmp_path / "x.pth", mmap=mmap), views)
    assert all(tensor.is_meta for tensor in load(tmp_path / "x.pth", "meta").values())
    assert_same(load(tmp_path / "x.pth", mmap=True), views)  # swapping has not changed the file
    if dtype in (torch.complex64, torch.float32):
        whole = big.example(dtype).t()
        view = whole.conj() if dtype.is_complex else torch._neg_view(whole)
        assert_same(load(big.big_endian_zip(big.example(dtype), {"view": view})), {"view": view})


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """Be a process group of one: torch wants one to load what DistributedDataParallel wrapped."""
    with process_group(torch.device("cpu")):
        yield


TORCH_FIXTURES = sorted(path.name for path in FIXTURES.glob("*.pth"))


@where.on_any
@pytest.mark.parametrize("name", one_of_twins(TORCH_FIXTURES, 2))
@pytest.mark.usefixtures("group")
def test_every_fixture_is_loaded_as_torch_loads_it(name: str) -> None:
    path = FIXTURES / name
    with ckptool.open_checkpoint(path) as checkpoint:
        weights, names = checkpoint.weights, list(checkpoint.tensors)
    if weights is None:
        with pytest.raises(ckptool.WeightsNotFound):
            load(path)
        return
    try:
        tree = torch_load(path, weights_only=False)
    except (AttributeError, NotImplementedError) as error:  # old files of new types, xla without xla
        pytest.skip(f"torch does not load its own file here: {str(error).splitlines()[0][:60]}")
    for component in weights.key.split(".") if weights.key else ():
        tree = tree[component] if isinstance(tree, dict) else tree[int(component)]
    if not isinstance(tree, dict | nn.Module):
        tree = tree.__self__ if hasattr(tree, "__self__") else dict(zip(names, tree, strict=True))
    expected = tree.state_dict() if isinstance(tree, nn.Module) else tree

    for mmap in (True, False):
        found = load(path, mmap=mmap)
        assert list(found) == list(expected)
        assert_same(tensors_only(found), tensors_only(expected))
        if hasattr(expected, "_metadata"):
            assert found._metadata == expected._metadata


@pytest.mark.parametrize(("net", "legacy"), in_turn([LeNet, CifarNet, TiedReader], [False, True]))
def test_a_whole_model_gives_its_state_dict(net: Any, legacy: bool, tmp_path: Path) -> None:
    model = net()
    saved(model, tmp_path / "x.pth", legacy=legacy)

    found = load(tmp_path / "x.pth")

    assert_same(found, model.state_dict())
    assert found._metadata == model.state_dict()._metadata


def test_a_whole_model_is_loaded_without_its_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("gone")
    monkeypatch.setitem(sys.modules, "gone", module)
    module.Gone = type("Gone", (nn.Sequential,), {"__module__": "gone"})
    model = module.Gone(nn.Linear(3, 2), nn.BatchNorm1d(2))
    saved(model, tmp_path / "x.pth")
    monkeypatch.delitem(sys.modules, "gone")

    found = load(tmp_path / "x.pth")

    assert_same(found, model.state_dict())
    assert found._metadata == model.state_dict()._metadata
    with pytest.raises(ModuleNotFoundError):
        torch_load(tmp_path / "x.pth", weights_only=False)


@where.on_any
@pytest.mark.parametrize("key", [None, "model", "inner.net"])
def test_a_key_picks_a_state_dict(key: str | None, tmp_path: Path) -> None:
    model, other = LeNet(), nn.Linear(5, 5)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(1, 1, 28, 28)).sum().backward()
    optimizer.step()
    content = {"model": model.state_dict(), "inner": {"net": other.state_dict()}, "optimizer": optimizer.state_dict()}
    data = saved(content, tmp_path / "x.pth")
    tree = torch_load(data)

    found = load(tmp_path / "x.pth", key=key)

    expected = tree["inner"]["net"] if key == "inner.net" else tree["model"]
    assert_same(found, expected)
    assert found._metadata == expected._metadata


@pytest.mark.filterwarnings("ignore:.*[Qq]uantiz")
@pytest.mark.parametrize("place", ["", "model"])
@pytest.mark.parametrize("layers", [1, 3])
def test_weights_that_are_all_quantised_dynamically_need_no_key(layers: int, place: str, tmp_path: Path) -> None:
    def quantised() -> nn.Module:
        plain = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
        return torch.ao.quantization.quantize_dynamic(plain, {nn.Linear})  # type: ignore[no-any-return]

    model, fresh = quantised(), quantised()
    state = model.state_dict()
    x = torch.rand(2, 4)
    saved({place: state, "epoch": 1} if place else state, tmp_path / "x.pth")
    found = load(tmp_path / "x.pth")
    assert list(found) == list(state)
    fresh.load_state_dict(found)
    assert torch.equal(fresh(x), model(x))
    again = quantised()
    ckptool.load_into(again, tmp_path / "x.pth")
    assert torch.equal(again(x), model(x))
    ckptool.migrate(tmp_path / "x.pth", tmp_path / "y.pth", form="state_dict")
    assert list(torch_load(tmp_path / "y.pth")) == list(state)
    assert list(load(saved({place or "net": dict(state), "epoch": 1}))) == list(state)  # who copies loses _metadata


@where.on_any
def test_weights_that_nobody_can_choose_are_told_with_their_keys(tmp_path: Path) -> None:
    state = LeNet().state_dict()
    several = saved({"a": state, "b": LeNet().state_dict(), "optimizer": {"state": {}, "param_groups": []}})
    none = saved({"epoch": 3})

    with pytest.raises(ckptool.AmbiguousWeights, match="several state dicts could be the weights") as caught:
        load(several)
    assert not isinstance(caught.value, ckptool.MigrationRefused)
    assert caught.value.candidates == ("a", "b")
    assert caught.value.hint == "Pick one with `key=`: 'a', 'b'; or all of them, with names from the top: `key='(all)'`"
    with pytest.raises(ckptool.WeightsNotFound, match="there are no averaged weights") as missing:
        load(several, weights="ema")
    assert missing.value.candidates == ("a", "b")
    assert not isinstance(missing.value, ckptool.AmbiguousWeights)
    with pytest.raises(ckptool.WeightsNotFound, match="there are no weights") as nothing:
        load(none)
    assert (nothing.value.candidates, nothing.value.kind) == ((), "which-weights")


@where.on_any
@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.bool, torch.complex64, torch.quint8, "bfloat17", *big.FLOAT4], ids=str
)
def test_a_type_that_weights_cannot_be_cast_to_is_refused_before_anything_is_read(dtype: Any, tmp_path: Path) -> None:
    path = tmp_path / "not-there.pth"
    verbs: list[Callable[[], Any]] = [
        lambda: load(path, dtype=dtype),
        lambda: ckptool.load_into(LeNet(), path, dtype=dtype),
        lambda: ckptool.predict_memory(path, dtype=dtype),
        lambda: ckptool.LiveModel(LeNet(), path, dtype=dtype),
        lambda: ckptool.LiveModel(LeNet(), dtype=dtype),
    ]
    for verb in verbs:
        with pytest.raises(ValueError, match="nothing to cast weights to: name a floating type"):
            verb()


@where.on_any
def test_hints_name_the_command_that_tells_more(tmp_path: Path) -> None:
    path = tmp_path / "it's new.pth"
    data = bytearray(saved({"a": torch.arange(1000.0), "b": torch.arange(999.0)}))
    quoted = f"'{tmp_path}/it'\"'\"'s new.pth'"

    def told(content: bytes, **options: Any) -> tuple[str | None, str | None]:
        path.write_bytes(content)
        with pytest.raises(ckptool.CkptoolError) as caught:
            load(path, **options)
        return caught.value.hint, caught.value.command

    left = "Download the file again, or see what is left of it.", f"ckptool check {quoted}"
    assert told(data[:5000]) == left
    for verb in (ckptool.predict_memory, partial(ckptool.load_into, LeNet()), partial(ckptool.LiveModel, LeNet())):
        with pytest.raises(ckptool.TruncatedFile) as caught:
            verb(path)  # type: ignore[operator]
        assert (caught.value.hint, caught.value.command) == left
    with pytest.raises(ckptool.TruncatedFile) as nameless:
        load(bytes(data[:5000]))
    assert nameless.value.hint == "Download the file again."
    data[data.index(torch.arange(1000.0).numpy().tobytes()) + 8] ^= 1
    deep = "Download the file again, or see which parts are damaged.", f"ckptool check {quoted} --deep"
    assert told(bytes(data), verify=True) == deep
    assert told(saved({"epoch": 3})) == ("See what it holds.", f"ckptool inspect {quoted} --all")
    assert told(b"<html></html>") == ("Download the file itself: the address gave a page about it.", None)


@pytest.mark.parametrize("mmap", [True, False], ids=str)
def test_safetensors_are_loaded_as_the_reference_reader_loads_them(mmap: bool, tmp_path: Path) -> None:
    names = ["float32", "float16", "bfloat16", "int64", "uint8", "bool", "float8_e4m3fn", "float64", "int16"]
    path = tmp_path / "x.safetensors"
    # Odd lengths, so that wider types begin at odd places of the file.
    path.write_bytes(save_safetensors({f"t{i}": of_dtype(name, 2 * i + 1) for i, name in enumerate(names)}))

    found, expected = load(path, mmap=mmap), load_file(path)

    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert_same_tensor(found[name], tensor, name)


@pytest.mark.parametrize("mmap", [True, False], ids=str)
def test_tied_names_that_safetensors_leaves_out_are_there_again(mmap: bool, tmp_path: Path) -> None:
    model = TiedReader()
    saved(model.state_dict(), tmp_path / "x.pth")
    ckptool.migrate(tmp_path / "x.pth", tmp_path / "x.safetensors")

    found = load(tmp_path / "x.safetensors", mmap=mmap)

    assert_same(found, model.state_dict())
    assert found["head.weight"].data_ptr() == found["embedding.weight"].data_ptr()
    assert found._metadata == model.state_dict()._metadata


@pytest.mark.parametrize("mmap", [True, False], ids=str)
def test_torchscript_gives_the_state_dict_of_the_script(mmap: bool, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script = torch.jit.script(LeNet())
        torch.jit.save(script, path)
        expected = torch.jit.load(path).state_dict()

    assert_same(load(path, mmap=mmap), expected)


def test_old_tars_are_loaded(tmp_path: Path) -> None:
    (tmp_path / "x.pth").write_bytes(build.torch_tar())
    expected = torch_load(tmp_path / "x.pth", weights_only=False)

    found = load(tmp_path / "x.pth")

    assert_same(found, dict(oracle.named_tensors(expected)))


@where.on_any
@pytest.mark.parametrize(
    ("mmap", "dtype", "legacy"),
    in_turn(MMAPS, [torch.float16, torch.bfloat16, torch.float32, torch.float64], [False, True]),
)
def test_casts_are_those_of_torch_and_keep_what_is_shared(
    dtype: torch.dtype, legacy: bool, mmap: Any, tmp_path: Path
) -> None:
    whole = torch.randn(64, 33) * 1e3
    content = {
        "whole": whole,
        "row": whole[3],
        "turned": whole.t()[1:],
        "again": whole,
        "odd": torch.randn(7, dtype=torch.float64)[1::2],
        "half": torch.randn(5).half(),
        "expanded": torch.randn(4).expand(3, 4),
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
        "integers": torch.arange(4),
        "flags": torch.tensor([True, False]),
        "complex": torch.randn(2, dtype=torch.complex64),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(1.5),
    }
    data = saved(content, tmp_path / "x.pth", legacy=legacy)
    expected = torch_load(data)

    found = load(tmp_path / "x.pth", dtype=dtype, mmap=mmap)

    assert list(found) == list(expected)
    for name, tensor in expected.items():
        wanted = tensor.to(dtype) if tensor.is_floating_point() else tensor
        assert (found[name].dtype, found[name].shape) == (wanted.dtype, wanted.shape), name
        assert found[name].stride() == tensor.stride(), name
        assert oracle.tensor_bytes(found[name]) == oracle.tensor_bytes(wanted), name
    assert {n: owner for n, (owner, _) in sharing(found).items()} == {
        n: owner for n, (owner, _) in sharing(expected).items()
    }
    found["row"].fill_(9)
    assert found["whole"][3].eq(9).all()


def test_casts_of_more_than_one_batch_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "_CAST_NBYTES", 1000)
    content = {str(n): torch.randn(100 + n) for n in range(20)}
    data = saved(content, tmp_path / "x.pth")
    told: list[tuple[int, int]] = []

    found = load(data, dtype=torch.bfloat16, progress=lambda done, total: told.append((done, total)))

    assert_same(found, {name: tensor.bfloat16() for name, tensor in content.items()})
    assert told[-1][0] == told[-1][1]
    assert told == sorted(told)


@where.on_any
@pytest.mark.parametrize(("mmap", "dtype"), in_turn([True, False, "auto"], [None, torch.float64]))
def test_writing_to_what_was_loaded_changes_nobody_else(mmap: Any, dtype: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.pth"
    data = saved({"a": torch.ones(10_000), "b": torch.arange(5.0)}, path)

    found, other = load(path, mmap=mmap, dtype=dtype), load(path, mmap=mmap, dtype=dtype)
    for tensor in found.values():
        tensor.fill_(7)

    assert path.read_bytes() == data
    assert other["a"].eq(1).all()
    assert load(path, mmap=mmap)["b"].tolist() == [0, 1, 2, 3, 4]
    assert found["a"].eq(7).all()


def test_bytes_paths_file_objects_and_members_hold_the_same(tmp_path: Path) -> None:
    content = OrderedDict(a=torch.rand(3, 4), b=torch.arange(3))
    path = tmp_path / "x.pth"
    data = saved(content, path)
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as archive:
        archive.add(path, "deep/x.pth")
        (tmp_path / "y.pth").write_bytes(saved({"other": torch.ones(1)}))
        archive.add(tmp_path / "y.pth", "y.pth")
    sources: list[Any] = [str(path), path, data, bytearray(data), memoryview(data), io.BytesIO(data)]
    sources += [f"{tmp_path}/x.tar.gz::deep/x.pth"]

    for source in sources:
        assert_same(load(source), content)
    with path.open("rb") as stream:
        stream.seek(17)
        assert_same(load(stream), content)
        assert not stream.closed


@where.on_any
def test_bytes_can_be_thrown_away_after_loading() -> None:
    data = bytearray(saved({"a": torch.arange(4.0)}))

    found = load(data)
    data[:] = bytes(len(data))

    assert found["a"].tolist() == [0, 1, 2, 3]


@where.on_any
def test_wrappers_are_taken_off_only_where_every_name_has_them(tmp_path: Path) -> None:
    model = LeNet()
    plain = model.state_dict()
    wrapped = nn.DataParallel(model).state_dict()
    data = saved(wrapped)

    assert_same(ckptool.load(data), plain)
    assert ckptool.load(data)._metadata == plain._metadata
    assert_same(ckptool.load(data, strip=None), wrapped)
    assert ckptool.load(data, strip=None)._metadata == wrapped._metadata
    mixed = saved({"module.a": torch.ones(1), "b": torch.ones(1)})
    assert list(ckptool.load(mixed)) == ["module.a", "b"]
    compiled = saved({f"_orig_mod.module.{name}": tensor for name, tensor in plain.items()})
    assert list(ckptool.load(compiled)) == list(plain)
    assert list(ckptool.load(compiled, strip="module")) == list(ckptool.load(compiled, strip=None))


@where.on_any
def test_an_entry_that_only_code_can_make_is_left_out_and_named(caplog: pytest.LogCaptureFixture) -> None:
    data = build.torch_zip(
        {"weight": build.tensor(build.storage()), "extra": build.call(build.named("strange", "Thing"), 1), "n": 3},
        {"0": build.floats()},
    )

    with caplog.at_level("WARNING", "ckptool"):
        found = load(data)

    assert list(found) == ["weight", "n"]
    assert found["n"] == 3
    assert "'extra'" in caplog.text


@where.on_any
@pytest.mark.parametrize("option", [{"weights": "best"}, {"strip": "no"}, {"mmap": "no"}, {"dtype": "float17"}])
def test_an_option_that_is_misspelt_is_refused(option: dict[str, Any], tmp_path: Path) -> None:
    saved({"a": torch.ones(1)}, tmp_path / "x.pth")

    with pytest.raises(ValueError, match=next(iter(option))):
        ckptool.load(tmp_path / "x.pth", **option)
    if "strip" not in option:
        with pytest.raises(ValueError, match=next(iter(option))):
            ckptool.predict_memory(tmp_path / "x.pth", **option)
        with pytest.raises(ValueError, match=next(iter(option))):
            ckptool.load_into(torch.nn.Linear(1, 1), tmp_path / "x.pth", **option)


@pytest.mark.parametrize("mmap", [True, False])
def test_a_quantised_type_without_a_scale_ends_no_process(mmap: bool, tmp_path: Path) -> None:
    stored = build.tensor(build.storage(dtype="QInt8Storage"))
    (tmp_path / "x.pth").write_bytes(build.torch_zip(b"}" + build.ops("w") + stored + b"s", {"0": bytes(4)}))

    with pytest.raises(ckptool.errors.UnsupportedFeature, match="a tensor of qint8 without a scale"):
        ckptool.load(tmp_path / "x.pth", mmap=mmap)
