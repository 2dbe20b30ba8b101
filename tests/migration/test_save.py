"""``save``: what torch and safetensors read is what was given, and of an original nothing changes but that."""

from __future__ import annotations

import logging
import random
from collections import OrderedDict
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ckptool
from ckptool.errors import MigrationRefused, OutputExists, UnsupportedFeature
from tests.loading.same import assert_same, assert_same_tensor, tensors_only, torch_load
from tests.scale import one_of_twins, times

VALID = Path(ckptool.__file__).parents[1] / "fixtures" / "valid"
DDP = VALID / "checkpoint-ddp-forged-cuda0-zip.pth"
FILES = sorted(one for one in VALID.iterdir() if one.suffix in (".pth", ".pt", ".safetensors"))


def tied() -> dict[str, torch.Tensor]:
    weight = torch.arange(6.0).reshape(2, 3)
    return {"b": weight, "a": weight.t(), "n": torch.tensor(7), "half": torch.ones(3, dtype=torch.bfloat16)}


def test_torch_loads_what_was_saved(tmp_path: Path) -> None:
    state = tied() | {"sparse": torch.eye(3).to_sparse(), "view": torch.arange(9)[2:5], "none": None, "steps": [1, 2.5]}

    done = ckptool.save(state, tmp_path / "out.pth")

    found = torch_load(tmp_path / "out.pth")
    assert_same(tensors_only(found), tensors_only(state))
    assert list(found) == list(state)
    assert (found["none"], found["steps"]) == (None, [1, 2.5])
    assert done.verified
    assert done.written


def test_a_state_dict_keeps_its_metadata(tmp_path: Path) -> None:
    state = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).state_dict(keep_vars=True)

    ckptool.save(state, tmp_path / "out.pth")

    found = torch_load(tmp_path / "out.pth")
    assert found._metadata == state._metadata  # type: ignore[attr-defined]
    assert [type(one) for one in found.values()] == [type(one) for one in state.values()]


def test_safetensors_loads_what_was_saved_whatever_the_names_are(tmp_path: Path) -> None:
    state = {"optimizer.exp_avg": torch.randn(3), "ema.x": torch.arange(4).to(torch.float8_e5m2), **tied()}
    state["c"] = state["b"]

    done = ckptool.save(state, tmp_path / "out.safetensors")

    found = load_file(tmp_path / "out.safetensors")
    assert done.tied == {"c": "b"}
    for name, tensor in found.items():
        assert_same_tensor(tensor, state[name].contiguous(), name)
    assert list(ckptool.load(tmp_path / "out.safetensors")) == list(state)


def test_shards_are_filled_as_migrate_fills_them(tmp_path: Path) -> None:
    state = {f"layer.{number}": torch.randn(10) for number in range(5)}

    done = ckptool.save(state, tmp_path / "out", max_shard_size=100)

    assert [one.name for one in done.files][-1] == "model.safetensors.index.json"
    assert len(done.files) == 4
    assert_same(ckptool.load(tmp_path / "out"), state)


def test_a_name_of_a_class_of_its_own_is_a_text(tmp_path: Path) -> None:
    class Layer(str, Enum):
        FIRST = "first.weight"

    ckptool.save({np.str_("a"): torch.ones(2), Layer.FIRST: torch.ones(2)}, tmp_path / "out.pth")

    assert list(torch_load(tmp_path / "out.pth")) == ["a", "first.weight"]


def test_arrays_and_lazy_tensors_are_tensors(tmp_path: Path) -> None:
    big = np.arange(4, dtype=">i4")
    with ckptool.open_checkpoint(DDP) as checkpoint:
        assert checkpoint.weights is not None
        lazy = checkpoint.weights["module.norm.weight"]
        state = {"big": big, "column": np.arange(6.0).reshape(2, 3).T, "empty": np.zeros((0, 3)), "x": np.float32(2)}
        ckptool.save({**state, "lazy": lazy}, tmp_path / "out.pth")
        expected = {
            name: torch.from_numpy(np.array(one).astype(one.dtype.newbyteorder("="))) for name, one in state.items()
        }

        found = torch_load(tmp_path / "out.pth")

        assert_same_tensor(found.pop("lazy"), lazy.torch())
    assert {name: (one.dtype, one.tolist()) for name, one in found.items()} == {
        name: (one.dtype, one.tolist()) for name, one in expected.items()
    }


@pytest.mark.parametrize("value", ["a text inside", object(), {"weight": torch.ones(2)}, nn.Linear(1, 1)])
def test_what_is_no_tensor_is_a_type_error_that_names_it(value: Any, tmp_path: Path) -> None:
    if isinstance(value, str):
        value = [value, object()]

    with pytest.raises(TypeError, match=r"state\['x'\] takes torch\.Tensor"):
        ckptool.save({"x": value}, tmp_path / "out.pth")
    assert not list(tmp_path.iterdir())


def test_a_model_is_a_type_error_that_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"not Linear: give what its state_dict\(\) returns"):
        ckptool.save(nn.Linear(1, 1), tmp_path / "out.pth")  # type: ignore[arg-type]


def test_what_was_asked_for_beside_is_done_too(tmp_path: Path) -> None:
    state = ckptool.load(DDP)
    state["norm.bias"] += 1

    ckptool.save(state, tmp_path / "out.pth", like=DDP, dtype="bf16", to="cpu", strip_wrappers=True)

    found = torch_load(tmp_path / "out.pth", weights_only=False)
    assert torch.equal(found["model"]["norm.bias"], state["norm.bias"].bfloat16())
    assert found["optimizer"]["state"][0]["exp_avg"].dtype == torch.float32


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning", "ignore:.*quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("like", [False, True])
def test_sparse_and_quantised_tensors_change_too(like: bool, tmp_path: Path) -> None:
    def content(seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        scales, zeros = torch.rand(4) + 0.1, torch.zeros(4, dtype=torch.long)
        return {
            "tensor": torch.quantize_per_tensor(torch.randn(4, 4), 0.1 * seed, seed, torch.qint8),
            "channel": torch.quantize_per_channel(torch.randn(4, 4), scales, zeros, 0, torch.quint8),
            "coo": torch.eye(3).to_sparse() * seed,
            "csr": torch.eye(3).to_sparse_csr() * seed,
        }

    torch.save({"model": content(1), "epoch": 1}, tmp_path / "in.pth")

    ckptool.save(content(2), tmp_path / "out.pth", like=tmp_path / "in.pth" if like else None)

    found = torch_load(tmp_path / "out.pth")
    for name, one in (found["model"] if like else found).items():
        assert_same_tensor(one, content(2)[name], name)


def test_a_tensor_of_another_class_or_without_values_is_refused(tmp_path: Path) -> None:
    class Own(torch.Tensor):
        pass

    masked = np.ma.masked_array([1.0, 2.0], [False, True])  # type: ignore[no-untyped-call]
    for value in (torch.ones(2).as_subclass(Own), nn.UninitializedParameter(), np.array(["a"]), masked):
        with pytest.raises(UnsupportedFeature, match="tensor 'x' "):
            ckptool.save({"x": value}, tmp_path / "out.pth")
    with pytest.raises(MigrationRefused, match="on the meta device"):
        ckptool.save({"x": torch.ones(2, device="meta")}, tmp_path / "out.pth")
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten_and_nothing_written_without_being_asked(tmp_path: Path) -> None:
    ckptool.save(tied(), tmp_path / "out.pth", dry_run=True)
    assert not list(tmp_path.iterdir())
    ckptool.save(tied(), tmp_path / "out.pth")

    with pytest.raises(OutputExists):
        ckptool.save({"other": torch.ones(1)}, tmp_path / "out.pth")
    assert list(torch_load(tmp_path / "out.pth")) == list(tied())


def edited(state: OrderedDict[str, Any], pick: random.Random) -> OrderedDict[str, Any]:
    """Return a state dict with up to three other tensors: with other values, or another type and another shape, too."""
    names = [
        name
        for name, one in state.items()
        if isinstance(one, torch.Tensor) and one.layout == torch.strided and not one.is_quantized and not one.is_meta
    ]
    found = OrderedDict(state)
    for name in pick.sample(names, min(pick.randint(1, 3), len(names))):
        one = state[name]
        if pick.random() < 0.5:
            found[name] = torch.randn(pick.randint(0, 3), 2, dtype=torch.float64)
        elif one.dtype.is_floating_point and one.dtype.itemsize > 1:
            values = torch.randn(*one.shape, 2).to(one.dtype)
            found[name] = values[..., 1] if pick.random() < 0.5 else values[..., 1].contiguous()
    return found


def packed(one: torch.Tensor) -> torch.Tensor:
    return one.clone(memory_format=torch.contiguous_format)


@pytest.mark.filterwarnings("ignore::UserWarning")  # what torch says of its own types
@pytest.mark.parametrize("file", one_of_twins(FILES[::2], 3), ids=lambda file: file.name)
def test_nothing_of_an_original_changes_but_what_was_changed(
    file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    try:
        state = ckptool.load(file)
    except ckptool.CkptoolError:
        return
    with ckptool.open_checkpoint(file) as checkpoint:
        traits, weights = checkpoint.traits, checkpoint.weights
        assert weights is not None
    target = tmp_path / f"out{'.safetensors' if traits.is_plain else '.pth'}"
    pick = random.Random(file.name)
    for number in range(1 + times(1, 7)):
        changed = edited(state, pick) if number else state
        names = {name for name in state if changed[name] is not state[name]}
        try:
            done = ckptool.save(changed, target, like=file, force=True)
        except MigrationRefused as error:
            if weights.class_name is None or error.kind != "untied":  # one parameter of a model, under two names
                raise
            continue
        found = ckptool.load(target)

        assert list(found) == list(changed)
        for name, one in tensors_only(changed).items():
            is_packed = traits.is_plain or name in names
            pair = (found[name], one)
            assert_same_tensor(*(map(packed, pair) if is_packed else pair), name)
        if traits.program is None:
            report = ckptool.diff(file, target)
            differ = {one.name for kind in (report.values, report.shapes, report.dtypes) for one in kind}
            assert all(name.endswith(tuple(names)) for name in differ)
            rest = {kind: count for kind, count in report.counts.items() if count}
            # DistributedDataParallel has lists of the buffers, which keep their old values.
            lists = {"names"} if "Distributed" in (weights.class_name or "") else set()
            assert rest.keys() <= {"values", "shapes", "dtypes", "ties"} | lists
            assert bool(report.ties_a) <= any("were one tensor" in note for note in done.notes)


def test_a_wrapper_that_load_took_off_is_put_back(tmp_path: Path) -> None:
    state = ckptool.load(DDP)
    state["norm.bias"] += 1

    ckptool.save(state, tmp_path / "out.pth", like=DDP)

    before, after = (torch_load(path, weights_only=False) for path in (DDP, tmp_path / "out.pth"))
    assert list(after) == list(before)
    assert list(after["model"]) == list(before["model"])
    assert torch.equal(after["model"]["module.norm.bias"], before["model"]["module.norm.bias"] + 1)
    assert after["optimizer"]["param_groups"] == before["optimizer"]["param_groups"]
    ckptool.save(ckptool.load(DDP, strip=None), tmp_path / "same.pth", like=DDP)  # names as the file has them
    assert ckptool.diff(DDP, tmp_path / "same.pth").same


def test_a_name_that_one_side_lacks_is_refused_unless_it_is_meant(tmp_path: Path) -> None:
    path = tmp_path / "in.pth"
    torch.save({"model": {"module.a": torch.ones(2), "module.b": torch.zeros(2)}, "epoch": 3}, path)
    one = {"a": torch.full((2,), 5.0)}
    with pytest.raises(MigrationRefused, match=r"lacks 1 tensor of the file: 'b'") as caught:
        ckptool.save(one, tmp_path / "out.pth", like=path)
    assert "missing='keep'" in str(caught.value.hint)
    with pytest.raises(MigrationRefused, match=r"the file lacks 1 name of the state: 'c'"):
        ckptool.save({**one, "b": one["a"], "c": one["a"]}, tmp_path / "out.pth", like=path)

    ckptool.save(one, tmp_path / "keep.pth", like=path, missing="keep")
    assert ckptool.save(one, tmp_path / "drop.pth", like=path, missing="drop").dropped == ("model.module.b",)
    ckptool.save({**one, "b": one["a"], "c": one["a"]}, tmp_path / "new.pth", like=path, allow_new=True)

    kept, dropped, new = (torch_load(tmp_path / f"{name}.pth") for name in ("keep", "drop", "new"))
    assert [found["epoch"] for found in (kept, dropped, new)] == [3, 3, 3]
    assert {name: value.tolist() for name, value in kept["model"].items()} == {"module.a": [5, 5], "module.b": [0, 0]}
    assert list(dropped["model"]) == ["module.a"]
    assert list(new["model"]) == ["module.a", "module.b", "module.c"]
    assert new["model"]["module.a"].data_ptr() == new["model"]["module.c"].data_ptr()


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_tied_tensors_stay_tied_while_they_are_equal(suffix: str, tmp_path: Path) -> None:
    weight = torch.ones(2, 2)
    path = tmp_path / f"in.{suffix}"
    ckptool.save({"in": weight, "out": weight}, path)
    same = {"in": np.zeros((2, 2), np.float32), "out": np.zeros((2, 2), np.float32)}

    tied = ckptool.save(same, tmp_path / f"tied.{suffix}", like=path)
    apart = ckptool.save({**same, "in": weight}, tmp_path / f"apart.{suffix}", like=path)

    assert (tied.after.tied or len(tied.tied), apart.after.tied, len(apart.tied)) == (1, 0, 0)
    assert apart.notes[-1] == "'in', 'out' were one tensor, and are 2 now"
    found = ckptool.load(tmp_path / f"apart.{suffix}")
    assert (found["in"].sum(), found["out"].sum()) == (4, 0)


class Noted(nn.Linear):
    note: Any = None

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


def test_entries_that_are_no_tensors_are_compared_too(tmp_path: Path) -> None:
    model, path = Noted(1, 1), tmp_path / "in.pth"
    model.note = {"mean": torch.ones(2), "sum": 2.0, "size": torch.Size([2])}
    torch.save({"model": model.state_dict(), "epoch": 1}, path)
    state = ckptool.load(path)

    ckptool.save(state, tmp_path / "same.pth", like=path)
    state["_extra_state"] = {"mean": torch.zeros(2), "sum": 0.0}
    ckptool.save(state, tmp_path / "other.pth", like=path)

    assert ckptool.diff(path, tmp_path / "same.pth").same
    ckptool.save(state, tmp_path / "alone.pth")
    assert torch_load(tmp_path / "alone.pth")["_extra_state"]["sum"] == 0.0
    found = torch_load(tmp_path / "other.pth")["model"]["_extra_state"]
    assert (found["mean"].tolist(), found["sum"]) == ([0, 0], 0.0)


def test_an_original_can_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "it.pth"
    torch.save({"model": {"w": torch.ones(1000)}, "epoch": 1}, path)
    state = ckptool.load(path)  # which is a mapping of the file
    state["w"] *= 2

    ckptool.save(state, path, like=path, force=True)

    found = torch_load(path)
    assert (found["model"]["w"].sum(), found["epoch"]) == (2000, 1)


def test_a_layer_may_become_far_larger_than_its_file(tmp_path: Path) -> None:
    path = tmp_path / "in.safetensors"
    ckptool.save({"w": torch.ones(1)}, path)
    limits = ckptool.Limits(expanded_nbytes=1 << 10)

    ckptool.save({"w": torch.ones(10_000)}, tmp_path / "out.safetensors", like=path, limits=limits)

    assert ckptool.load(tmp_path / "out.safetensors")["w"].sum() == 10_000


def test_which_weights_are_meant_can_be_said(tmp_path: Path) -> None:
    path = tmp_path / "in.pth"
    torch.save({"model": {"w": torch.ones(2)}, "ema": {"w": torch.zeros(2)}}, path)

    ckptool.save({"w": torch.full((2,), 3.0)}, tmp_path / "out.pth", like=path, weights="ema")
    with pytest.raises(ValueError, match="there is no like"):
        ckptool.save({"w": torch.ones(1)}, tmp_path / "other.pth", key="ema")

    found = torch_load(tmp_path / "out.pth")
    assert (found["model"]["w"].tolist(), found["ema"]["w"].tolist()) == ([1, 1], [3, 3])


def test_dropping_what_scales_a_quantised_weight_is_refused_as_by_migrate(tmp_path: Path) -> None:
    weight = {"w.weight": torch.ones(2, 2, dtype=torch.int8)}
    ckptool.save(weight | {"w.scale": torch.ones(2)}, tmp_path / "a.pth")
    with pytest.raises(ckptool.MigrationRefused, match=r"w\.weight without w\.scale") as caught:
        ckptool.save(weight, tmp_path / "b.pth", like=tmp_path / "a.pth", missing="drop")
    assert caught.value.kind == "breaks-quantized"
    ckptool.save(weight, tmp_path / "b.pth", like=tmp_path / "a.pth", missing="drop", break_quantized=True)


@pytest.mark.parametrize("options", [{"missing": "keep"}, {"missing": "drop"}, {"allow_new": True}], ids=str)
def test_what_is_about_an_original_needs_one(options: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no like"):
        ckptool.save({"w": torch.ones(2)}, tmp_path / "a.pth", **options)


@pytest.mark.parametrize("like", [False, True])
def test_attributes_of_a_tensor_are_left_out_and_named(like: bool, tmp_path: Path) -> None:
    own = getattr(nn, "Buffer", nn.Parameter)  # torch itself gives a Buffer attributes
    state: Any = {"a": torch.ones(2), "b": nn.Parameter(torch.ones(2)), "c": own(torch.ones(2))}
    torch.save({name: one.detach() for name, one in state.items()}, tmp_path / "old.pth")
    state["a"].note, state["b"].note = "x", 3
    old = tmp_path / "old.pth" if like else None

    assert "attributes of 'a', 'b' are not written" in ckptool.save(state, tmp_path / "new.pth", old).notes
    assert torch_load(tmp_path / "new.pth").keys() == state.keys()


@pytest.mark.parametrize("missing", [None, "keep", "drop"])
def test_a_state_of_nothing_is_refused(missing: Any, tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "old.pth")
    options: Any = {} if missing is None else {"like": tmp_path / "old.pth", "missing": missing}
    with pytest.raises(MigrationRefused, match="the state has no names"):
        ckptool.save({}, tmp_path / "new.pth", **options)
    assert ckptool.save({}, tmp_path / "new.pth", **options, allow_empty=True).written


def test_a_number_of_numpy_is_a_size(tmp_path: Path) -> None:
    size: Any = np.int64(8)
    report = ckptool.save({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "shards", max_shard_size=size)
    assert len(report.files) == 3
