"""Casting and building: what ``--dtype`` and ``--model`` promise, held against torch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ckptool
from ckptool import MigrationRefused
from tests import build
from tests.migration.refused import refused
from tests.scale import in_turn

LENET = Path(__file__).parents[2] / "fixtures" / "valid" / "lenet-state-dict-data-parallel-forged-cuda0-zip.pth"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(40, 30, generator=generator)
    tensors = {
        "weight": base,
        "tied": base,
        "transposed": base.t(),
        "norm": torch.randn(7, generator=generator),
        "steps": torch.arange(5),
        "odd": torch.tensor([float("nan"), float("inf"), 0.0, -0.0]),
    }
    torch.save(tensors, tmp_path / "saved.pth")
    return tmp_path / "saved.pth"


@pytest.mark.parametrize(("dtype", "suffix"), in_turn(["float16", "bfloat16", "float64"], ["pth", "safetensors"]))
def test_values_are_what_torch_casts_them_to(saved: Path, dtype: str, suffix: str) -> None:
    target = saved.with_name(f"cast.{suffix}")
    report = ckptool.migrate(saved, target, dtype=dtype, form="state_dict" if suffix == "pth" else "safetensors")
    found = torch.load(target) if suffix == "pth" else load_file(target)
    wanted = torch.load(saved)

    for name, tensor in found.items():
        expected = wanted[name].to(getattr(torch, dtype)) if wanted[name].is_floating_point() else wanted[name]
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor.nan_to_num(7), expected.nan_to_num(7)), name
    errors = {cast.name: cast.max_error for cast in report.casts}
    assert errors["weight"] == float(
        (wanted["weight"].to(getattr(torch, dtype)).double() - wanted["weight"]).abs().max()
    )
    assert "norm" in errors
    assert suffix != "pth" or found["weight"].data_ptr() == found["tied"].data_ptr()


def test_a_conjugate_view_is_not_taken_for_what_it_views(tmp_path: Path) -> None:
    z = torch.complex(torch.arange(4.0), torch.arange(4.0) + 1)
    torch.save({"a": z.imag, "b": z.conj().imag}, tmp_path / "z.pth")
    ckptool.migrate(tmp_path / "z.pth", tmp_path / "cast.pth", dtype="float16", form="state_dict")
    found = torch.load(tmp_path / "cast.pth")

    assert torch.equal(found["a"], z.imag.half())
    assert torch.equal(found["b"], z.conj().imag.half())


def test_overflow_is_refused_unless_it_is_to_saturate(tmp_path: Path) -> None:
    torch.save({"w": torch.tensor([1e30, -1e30, 1.0])}, tmp_path / "w.pth")
    with pytest.raises(MigrationRefused) as raised:
        ckptool.migrate(tmp_path / "w.pth", tmp_path / "half.pth", dtype="float16", form="state_dict")
    assert raised.value.kind == "overflow"
    assert not (tmp_path / "half.pth").exists()

    report = ckptool.migrate(
        tmp_path / "w.pth", tmp_path / "half.pth", dtype="float16", form="state_dict", saturate=True
    )
    assert report.casts[0].overflowed == 2
    assert torch.load(tmp_path / "half.pth")["w"].tolist() == [65504.0, -65504.0, 1.0]


@pytest.mark.parametrize("options", [{"form": "safetensors"}, {"form": "dcp"}])
def test_tensors_of_which_many_values_become_zero_are_named(options: Any, tmp_path: Path) -> None:
    large = torch.zeros(1 << 21)
    large[-1] = 1.0
    content = {"small": torch.full((4, 4), 1e-9), "some": torch.tensor([1e-9, 1.0]), "zeros": torch.zeros(3)}
    torch.save({**content, "late": large}, tmp_path / "w.pth")
    report = ckptool.migrate(tmp_path / "w.pth", tmp_path / "x", dtype="float16", **options)
    assert "values of 2 tensors are too small for float16, and zero in it: small (all), some (50.0%)" in report.notes
    report = ckptool.migrate(tmp_path / "w.pth", tmp_path / "y", dtype="bfloat16", **options)
    assert "too small" not in str(report)


@pytest.mark.parametrize("options", [{"form": "state_dict"}, {"form": "safetensors"}, {"form": "dcp"}])
def test_values_that_are_nan_are_told_of(options: Any, tmp_path: Path) -> None:
    large = torch.ones(1 << 21)
    large[[0, -1]] = torch.nan
    content = {"a": torch.tensor([torch.nan, torch.inf, 1.0]), "b": torch.ones(3), "large": large}
    torch.save(content, tmp_path / "w.pth")
    report = ckptool.migrate(tmp_path / "w.pth", tmp_path / "x", dtype="float16", **options)
    assert report.notes == ("3 values of what was cast, NaN before and after: a (1), large (2)",)


@pytest.mark.parametrize(
    ("own", "dtype", "advised"),
    [("float32", "float16", True), ("float32", "bfloat16", False), ("float64", "float32", False)],
)
def test_where_values_are_too_large_no_type_is_advised_that_is_too_small(
    own: str, dtype: Any, advised: bool, tmp_path: Path
) -> None:
    kind = getattr(torch, own)
    torch.save({"w": torch.tensor([torch.finfo(kind).max], dtype=kind)}, tmp_path / "w.pth")
    for take in (
        lambda: ckptool.migrate(tmp_path / "w.pth", tmp_path / "x.safetensors", dtype=dtype),
        lambda: ckptool.load(tmp_path / "w.pth", dtype=dtype),
    ):
        with pytest.raises(ckptool.CkptoolError, match="too large") as caught:
            take()
        assert ("bfloat16" in str(caught.value.hint)) == advised


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_is_built_from_a_state_dict(dtype: str, tmp_path: Path) -> None:
    from ckptool.reference.nets import LeNet

    target = tmp_path / "model.pth"
    model = "ckptool.reference.nets:LeNet"
    report = ckptool.migrate(LENET, target, strip_module=True, dtype=dtype, to="cpu", model=model)
    model = torch.load(target, weights_only=False)

    assert report.form == "model"
    assert isinstance(model, LeNet)
    wanted = torch.load(LENET, map_location="cpu")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, wanted[f"module.{name}"].to(getattr(torch, dtype)))
    assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())


def test_a_model_that_does_not_fit_is_refused_with_its_keys(tmp_path: Path) -> None:
    error = refused(LENET, tmp_path / "model.pth", model="ckptool.reference.nets:LeNet", kind="key-mismatch")
    assert "conv1.weight" in error.message
    assert list(tmp_path.iterdir()) == []


# Where the weights stand


class Net(nn.Module):
    """A model with ties, a buffer that is not persistent, an empty parameter, a strided and a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.norm = nn.BatchNorm2d(2)
        self.again = self.conv
        self.turned = nn.Parameter(torch.randn(5, 4).t(), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("angles", torch.randn(6), persistent=False)
        self.scale = torch.randn(3)


def trained(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(parameter for parameter in model.parameters() if parameter.requires_grad)
    torch.stack([parameter.sum() for parameter in model.parameters()]).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("legacy", [False, True])
def test_a_training_checkpoint_is_cast_where_its_weights_stand(legacy: bool, tmp_path: Path) -> None:
    model = Net()
    optimizer = trained(model)
    averaged = {name: tensor * 2 for name, tensor in model.state_dict().items()}
    content = {"model": model.state_dict(), "ema": averaged, "optimizer": optimizer.state_dict(), "best": 0.5}
    torch.save(content, tmp_path / "a.pth", _use_new_zipfile_serialization=not legacy)

    report = ckptool.migrate(tmp_path / "a.pth", tmp_path / "b.pth", dtype="bfloat16")

    found = torch.load(tmp_path / "b.pth")
    assert list(found) == list(content)
    for key in ("model", "ema"):
        for name, tensor in content[key].items():  # type: ignore[attr-defined]
            wanted = tensor.bfloat16() if tensor.is_floating_point() else tensor
            assert torch.equal(found[key][name], wanted), name
            assert found[key][name].dtype == wanted.dtype
    assert found["model"]["conv.weight"].data_ptr() == found["model"]["again.weight"].data_ptr()
    assert found["model"]._metadata == model.state_dict()._metadata  # type: ignore[attr-defined]
    for number, state in content["optimizer"]["state"].items():  # type: ignore[index]
        assert all(torch.equal(found["optimizer"]["state"][number][name], value) for name, value in state.items())
        assert found["optimizer"]["state"][number]["exp_avg"].dtype == torch.float32
    assert {cast.name.partition(".")[0] for cast in report.casts} == {"model", "ema"}
    assert report.form == "same"
    optimizer.load_state_dict(found["optimizer"])


@pytest.mark.parametrize(("inside", "legacy"), [(False, True), (True, False)])
def test_a_whole_model_is_cast_as_its_own_to_would(inside: bool, legacy: bool, tmp_path: Path) -> None:
    model = Net()
    content = {"epoch": 1, "net": model} if inside else model
    torch.save(content, tmp_path / "a.pth", _use_new_zipfile_serialization=not legacy)

    ckptool.migrate(tmp_path / "a.pth", tmp_path / "b.pth", dtype="float16")

    loaded = torch.load(tmp_path / "b.pth", weights_only=False)
    found, wanted = loaded["net"] if inside else loaded, copy.deepcopy(model).half()
    for name, tensor in [*wanted.named_parameters(remove_duplicate=False), *wanted.named_buffers()]:
        mine = found.get_parameter(name) if isinstance(tensor, nn.Parameter) else found.get_buffer(name)
        assert torch.equal(mine, tensor), name
        assert (mine.dtype, mine.requires_grad, type(mine)) == (tensor.dtype, tensor.requires_grad, type(tensor))
    assert found.again is found.conv
    assert torch.equal(found.scale, model.scale)  # ``to`` leaves plain attributes alone
    assert found.scale.dtype == torch.float32
    assert found.norm.num_batches_tracked.dtype == torch.int64


def test_what_is_left_out_is_not_cast(tmp_path: Path) -> None:
    state = Net().state_dict()
    torch.save({"model": state, "ema": dict(state)}, tmp_path / "a.pth")
    torch.save({"model": state, "ema": {name: tensor * 2 for name, tensor in state.items()}}, tmp_path / "b.pth")

    for name in ("a.pth", "b.pth"):
        report = ckptool.migrate(
            tmp_path / name, tmp_path / "c.pth", dtype="float16", drop=["ema"], exclude=["norm.*"], force=True
        )
        found = torch.load(tmp_path / "c.pth")
        assert found["model"]["conv.weight"].dtype == torch.float16
        assert {cast.name.split(".")[1] for cast in report.casts} == {"conv", "turned", "empty"}


@pytest.mark.parametrize("form", ["same", "state_dict"])
def test_a_tied_tensor_keeps_its_type_under_every_name(form: Any, tmp_path: Path) -> None:
    weight = torch.randn(4)
    torch.save({"embed": weight, "head": weight, "x": torch.randn(2)}, tmp_path / "a.pth")
    casts: dict[str, Any] = {"dtype": "float16", "form": form, "force": True}
    assert not ckptool.migrate(tmp_path / "a.pth", tmp_path / "b.pth", keep_dtype=["head", "embed"], **casts).notes
    report = ckptool.migrate(tmp_path / "a.pth", tmp_path / "b.pth", keep_dtype=["head"], **casts)
    found = torch.load(tmp_path / "b.pth")

    assert report.notes == ("what is tied to what keeps its type keeps its own: embed, tied to head",)
    assert [tensor.dtype for tensor in found.values()] == [torch.float32, torch.float32, torch.float16]
    assert found["embed"].data_ptr() == found["head"].data_ptr()


def test_attributes_of_a_tensor_survive_its_cast(tmp_path: Path) -> None:
    plain, parameter = torch.randn(4), nn.Parameter(torch.randn(4))
    plain.note, parameter.note = "seen", "kept"  # type: ignore[attr-defined]
    torch.save({"plain": plain, "parameter": parameter}, tmp_path / "a.pth")
    ckptool.migrate(tmp_path / "a.pth", tmp_path / "b.pth", dtype="bfloat16")
    found = torch.load(tmp_path / "b.pth", weights_only=False)

    assert (found["plain"].note, found["parameter"].note) == ("seen", "kept")
    assert torch.equal(found["plain"], plain.bfloat16())
    assert torch.equal(found["parameter"], parameter.bfloat16())
    assert isinstance(found["parameter"], nn.Parameter)


def test_damage_to_what_is_cast_is_noticed(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.arange(64.0)}, "epoch": 1}, tmp_path / "a.pth")
    data = bytearray((tmp_path / "a.pth").read_bytes())
    place = data.index(torch.arange(64.0).numpy().tobytes())
    data[place + 100] ^= 1
    (tmp_path / "a.pth").write_bytes(data)

    with pytest.raises(ckptool.MalformedFile) as caught:
        ckptool.migrate(tmp_path / "a.pth", tmp_path / "b.pth", dtype="bfloat16")
    assert caught.value.kind == "damaged-record"
    assert not (tmp_path / "b.pth").exists()


@pytest.mark.parametrize("deflated", [False, True])
def test_a_large_tensor_is_cast_piece_by_piece_however_it_lies(deflated: bool, tmp_path: Path) -> None:
    rows, columns = 2100, 1100  # more than two pieces
    data = torch.randn(rows, columns)
    storage = build.storage(numel=rows * columns)
    turned = build.tensor(storage, (columns, rows), (1, columns))
    members = {"archive/data.pkl": build.pickled({"turned": turned}), "archive/byteorder": b"little"}
    members |= {"archive/data/0": data.numpy().tobytes(), "archive/version": b"3\n"}
    packed = ["archive/data/0"] if deflated else []
    (tmp_path / "a.pth").write_bytes(build.zip_file(members, deflated=packed))

    ckptool.migrate(tmp_path / "a.pth", tmp_path / "b.pth", dtype="float64")

    assert torch.equal(torch.load(tmp_path / "b.pth")["turned"], data.t().double())


@pytest.mark.parametrize(
    "value", [torch.randn(3), {"optimizer": {"state": {0: torch.randn(3)}}}, {"w": torch.arange(3)}]
)
def test_a_cast_of_nothing_is_said(value: object, tmp_path: Path) -> None:
    torch.save(value, tmp_path / "a.pth")
    (note,) = ckptool.migrate(tmp_path / "a.pth", tmp_path / "b.pth", form="same", dtype="bfloat16").notes

    assert note.startswith("nothing is cast")


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_what_no_cast_is_about_is_named(dtype: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    waves, sparse = torch.randn(2, 2, dtype=torch.complex64), torch.randn(2, 2).to_sparse()
    torch.save({"waves": waves, "weight": torch.ones(2, 2), "bias": sparse}, tmp_path / "m.pth")
    report = ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth", dtype=dtype)
    made, loaded = torch.load(tmp_path / "o.pth"), ckptool.load(tmp_path / "m.pth", dtype=dtype)

    assert made["bias"].dtype == torch.float32
    assert made["waves"].dtype == loaded["waves"].dtype == torch.complex64
    said = "not cast, of types that no cast is about: waves (complex64)"
    assert f"2 tensors {said}, bias (sparse_coo float32)" in report.notes
    assert f"1 tensor {said}" in caplog.text


@pytest.mark.parametrize("form", ["same", "state_dict"])
def test_what_is_no_part_of_the_weights_is_said_to_keep_its_type(form: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.pth"
    torch.save({"embed.weight": torch.ones(3, 3), "layers": [torch.ones(2), torch.ones(2)]}, path)

    report = ckptool.migrate(path, tmp_path / "b.pth", form=form, dtype="float16")

    assert report.after.dtypes == {"float16": 1, "float32": 2}
    assert "2 tensors that are not part of the weights keep their type: layers.0, layers.1" in report.notes
