"""Weights of which the file does not have all: refused by name, until it is said that the rest may be missing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ckptool
from ckptool.errors import CkptoolError, IncompleteWeights, MigrationRefused, UnsupportedFeature, WeightsNotFound
from tests.build import call, floats, named, ops, storage, tensor, torch_zip
from tests.each import each
from tests.migration.refused import refused
from tests.program import invoke
from tests.scale import in_turn

T = tensor(storage())
MODULE = {"_parameters": {"weight": T}, "_buffers": {}, "_modules": {}}


def module(cls: tuple[str, str], **state: Any) -> bytes:
    return named(*cls) + b")\x81" + ops(MODULE | state) + b"b"


def whole(folder: Path, cls: tuple[str, str], **state: Any) -> Path:
    """Write a whole model: a plain layer, and one of a class that need not exist."""
    children = {"a": module(("torch.nn.modules.linear", "Linear")), "q": module(cls, **state)}
    root = module(("models", "Net"), _parameters={}, _modules=children)
    (folder / "net.pt").write_bytes(torch_zip(root, {"0": floats()}))
    return folder / "net.pt"


def partitioned(folder: Path, *, stage: int = 3) -> Path:
    """Write what DeepSpeed writes for one rank: with ZeRO-3, parameters without elements, and buffers as they are."""
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 2))
    shapes = OrderedDict((name, one.shape) for name, one in model.named_parameters())
    state = model.state_dict()
    for name in shapes if stage == 3 else ():
        state[name] = torch.empty(0)
    torch.save({"module": state, "param_shapes": [shapes], "global_steps": 1}, folder / "mp_rank_00_model_states.pt")
    return folder / "mp_rank_00_model_states.pt"


SAVES_MORE = [
    ("bitsandbytes.nn.modules", "Linear4bit"),
    ("optimum.quanto.nn.qlinear", "QLinear"),
    ("torch.ao.nn.quantized.modules.linear", "LinearPackedParams"),
    ("torch.ao.nn.sparse.quantized.linear", "Linear"),
    ("torch.nn.quantized.modules.conv", "Conv2d"),
]


@each(("cls", "target"), in_turn(SAVES_MORE, ["out.safetensors", "out.pth"]))
def test_a_module_that_saves_more_than_can_be_named_is_refused(
    cls: tuple[str, str], target: str, tmp_path: Path
) -> None:
    path = whole(tmp_path, cls)
    options = {"form": "state_dict"} if target == "out.pth" else {}

    for attempt in (lambda: ckptool.migrate(path, tmp_path / target, **options), lambda: ckptool.load(path)):
        with pytest.raises(IncompleteWeights) as caught:
            attempt()

        assert caught.value.missing == ("q",)
        assert f"q ({'.'.join(cls)})" in str(caught.value)
        assert caught.value.option == "allow_missing"
    assert not (tmp_path / target).exists()
    arguments = ["migrate", str(path), str(tmp_path / target), *(["--form", "state_dict"] if options else [])]
    assert invoke(arguments).exit_code == 1
    assert invoke([*arguments, "--allow-missing"]).exit_code == 0
    assert list(ckptool.load(path, allow_missing=True)) == ["a.weight", "q.weight"]


def test_a_module_that_is_not_taken_may_be_what_it_likes(tmp_path: Path) -> None:
    path = whole(tmp_path, ("bitsandbytes.nn.modules", "Linear4bit"))

    assert ckptool.migrate(path, tmp_path / "a.safetensors", include=["a.*"]).tensors == 1
    assert ckptool.migrate(path, tmp_path / "b.safetensors", exclude=["q.*"]).tensors == 1
    refused(path, tmp_path / "c.safetensors", include=["q.*"], error=IncompleteWeights)


def test_a_module_without_tensors_and_what_is_written_whole_lose_nothing(tmp_path: Path) -> None:
    assert ckptool.migrate(whole(tmp_path, SAVES_MORE[0], _parameters={}), tmp_path / "a.safetensors").tensors == 1
    assert ckptool.migrate(whole(tmp_path, SAVES_MORE[0]), tmp_path / "a.pt", to="cpu").tensors == 2


@pytest.mark.parametrize("kept", ["plain attribute", "buffer that is not persistent"])
def test_a_hook_may_add_what_its_module_keeps_as_an_attribute(kept: str, tmp_path: Path) -> None:
    hooks = {"_state_dict_hooks": {"0": named("models", "add_table")}}
    own = {"table": T} if kept == "plain attribute" else {"_buffers": {"table": T}, "_non_persistent_buffers_set": None}
    if "_buffers" in own:
        own["_non_persistent_buffers_set"] = call(named("builtins", "set"), ["table"])  # type: ignore[assignment]
    path = whole(tmp_path, ("models", "Table"), **hooks, **own)

    if kept == "plain attribute":
        with pytest.raises(IncompleteWeights, match=r"q \(models.Table, with the state-dict hook models.add_table\)"):
            ckptool.load(path)
    else:
        assert list(ckptool.load(path)) == ["a.weight", "q.weight"]


def test_a_parameter_that_only_its_class_can_read_is_not_left_out_in_silence(tmp_path: Path) -> None:
    path = whole(tmp_path, ("models", "Odd"), _parameters={"weight": call(named("odd", "Weight"), T)})

    with pytest.raises(IncompleteWeights, match=r"q.weight \(odd.Weight\)"):
        ckptool.load(path)
    assert list(ckptool.load(path, allow_missing=True)) == ["a.weight"]


def test_stubs_of_partitioned_weights_are_named_for_what_they_are(tmp_path: Path) -> None:
    path = partitioned(tmp_path)
    parameters = 64 * 64 + 64 + 64 + 64 + 64 * 2 + 2
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 2))

    (finding,) = [one for one in ckptool.check(path).findings if one.code == "CK120"]

    assert f"param_shapes says {parameters:,} parameters" in finding.message
    for attempt in (
        lambda: ckptool.migrate(path, tmp_path / "out.safetensors"),
        lambda: ckptool.load(path),
        lambda: ckptool.load_into(model, path),
        lambda: ckptool.load_into(model, path, strict=False),
        lambda: ckptool.LiveModel(model, path),
    ):
        with pytest.raises(CkptoolError, match=f"{parameters:,} parameters: ZeRO-3 partitions") as caught:
            attempt()
        assert isinstance(caught.value, IncompleteWeights)
        assert len(caught.value.missing) == 6
    assert len(ckptool.load(path, allow_missing=True)) == 9
    assert ckptool.migrate(path, tmp_path / "buffers.safetensors", include=["1.running_*"]).tensors == 2


def test_weights_that_were_not_partitioned_are_taken_as_they_are(tmp_path: Path) -> None:
    path = partitioned(tmp_path, stage=2)

    assert "CK120" not in [one.code for one in ckptool.check(path).findings]
    assert len(ckptool.load(path)) == 9


def test_weights_that_are_mostly_empty_are_told_of_though_nothing_says_what_they_were(tmp_path: Path) -> None:
    torch.save({"a.weight": torch.empty(0), "b.weight": torch.empty(0), "mean": torch.ones(2)}, tmp_path / "stubs.pth")
    torch.save({"a.weight": torch.ones(2), "b.weight": torch.empty(0)}, tmp_path / "sound.pth")

    (finding,) = [one for one in ckptool.check(tmp_path / "stubs.pth").findings if one.code == "CK121"]

    assert finding.message.startswith("2 of 3 tensors have no elements: a.weight, b.weight")
    assert "CK121" not in [one.code for one in ckptool.check(tmp_path / "sound.pth").findings]


def test_tensors_that_a_state_dict_would_not_hold_are_named_in_the_report(tmp_path: Path) -> None:
    path = whole(tmp_path, ("models", "Table"), table=T)

    (note,) = [one for one in ckptool.migrate(path, tmp_path / "out.safetensors").notes if "outside" in one]

    assert note.startswith("1 tensor outside the state_dict() is left out: q.table; models.Net, models.Table may save")


def test_tensors_in_the_extra_state_of_a_module_are_not_weights_of_their_own(tmp_path: Path) -> None:
    state = {"0.weight": torch.ones(2), "1.weight": torch.ones(2), "0._extra_state": {"table": torch.arange(3)}}
    torch.save(state, tmp_path / "saved.pth")

    with ckptool.open_checkpoint(tmp_path / "saved.pth") as checkpoint:
        assert checkpoint.weights is not None
        assert checkpoint.weights.key == ""
    assert ckptool.check(tmp_path / "saved.pth").findings == ()
    loaded = ckptool.load(tmp_path / "saved.pth")
    assert list(loaded) == list(state)
    assert loaded["0._extra_state"]["table"].tolist() == [0, 1, 2]


def hollow(names: int, empty: int, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return weights of which some are stubs that nothing tells of."""
    stubs = {f"layers.{n}.weight": torch.empty(0) if n < empty else torch.ones(2, 2) for n in range(names)}
    return stubs | more


@pytest.mark.parametrize(
    "state",
    [
        hollow(24, 21),
        hollow(3, 3),
        hollow(4, 3, **{f"layers.{n}.running_{kind}": torch.ones(2) for n in range(4) for kind in ("mean", "var")}),
        {"module": hollow(6, 5), "global_steps": 3},
    ],
    ids=["most", "all", "beside buffers", "in a checkpoint"],
)
def test_weights_that_are_mostly_stubs_are_refused(state: dict[str, Any], tmp_path: Path) -> None:
    path, target = tmp_path / "stubs.pt", tmp_path / "out.safetensors"
    torch.save(state, path)

    assert "CK121" in [one.code for one in ckptool.check(path).findings]
    for options in ({"form": "safetensors"}, {"form": "same"}, {"form": "state_dict"}):
        refused(path, tmp_path / "out", **options, match="no elements")
    for attempt in (lambda: ckptool.load(path), lambda: ckptool.load_into(nn.Linear(2, 2), path, strict=False)):
        with pytest.raises(IncompleteWeights, match="no elements"):
            attempt()
    assert ckptool.load(path, allow_missing=True)
    assert ckptool.migrate(path, target, allow_missing=True, allow_empty=True).notes
    if target.stat().st_size > 2000:
        with pytest.raises(IncompleteWeights):
            ckptool.load(target)


def test_some_weights_without_elements_are_noted(tmp_path: Path) -> None:
    path = tmp_path / "some.pt"
    torch.save(hollow(8, 2), path)

    assert [one.severity for one in ckptool.check(path).findings if one.code == "CK124"] == ["info"]
    for form in ("safetensors", "same"):
        notes = ckptool.migrate(path, tmp_path / f"{form}.out", form=form).notes
        assert any(note.startswith("2 of 8 tensors have no elements") for note in notes)
    assert not ckptool.migrate(path, tmp_path / "b.pt", exclude=["layers.[01].*"]).notes
    torch.save({"seen": torch.empty(0)}, tmp_path / "one.pt")
    assert ckptool.load(tmp_path / "one.pt").keys() == {"seen"}
    honest = {"w.weight": torch.ones(2), "cache": torch.empty(0), "rows": torch.empty(0, 4), "cols": torch.empty(2, 0)}
    torch.save(honest, path)
    assert ckptool.load(path).keys() == honest.keys()
    assert not {"CK121", "CK124"} & {one.code for one in ckptool.check(path).findings}


# Files without tensors, and tensors without values


def optimizer() -> dict[str, object]:
    return {"optimizer": torch.optim.Adam(nn.Linear(2, 2).parameters()).state_dict()}


EMPTY: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty.pth": (lambda path: torch.save({}, path), "and nothing else"),
    "settings.pth": (lambda path: torch.save({"lr": 0.1, "name": "x"}, path), "only lr, name"),
    "optimizer.pth": (lambda path: torch.save(optimizer(), path), "only optimizer"),
    "kept.pth": (lambda path: torch.save({"state_dict": {}, "epoch": 3}, path), "only epoch"),
    "empty.safetensors": (lambda path: save_file({}, path), "and nothing else"),
}


@pytest.mark.parametrize(("name", "form"), in_turn(EMPTY, ["state_dict", "safetensors", "shards"]))
def test_no_weights_are_written_of_a_file_without_tensors_and_it_is_said_what_it_has(
    tmp_path: Path, name: str, form: str
) -> None:
    write, held = EMPTY[name]
    write(tmp_path / name)
    options = {"max_shard_size": "1GB"} if form == "shards" else {"form": form}

    with pytest.raises(WeightsNotFound, match="there is no tensor in it, ") as caught:
        ckptool.migrate(tmp_path / name, tmp_path / "out", **options)  # type: ignore[arg-type]

    assert held in str(caught.value)
    assert [one.name for one in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("target", ["out.safetensors", "out.pth"])
def test_tensors_on_meta_stay_there_or_are_refused(tmp_path: Path, target: str) -> None:
    path = tmp_path / "meta.pth"
    torch.save({"w": torch.ones(3), "m": torch.empty(3, device="meta")}, path)

    if target == "out.safetensors":
        refused(path, tmp_path / target, match=r"'m' \(meta float32\)")
        return
    report = ckptool.migrate(path, tmp_path / target, to="cpu", dtype="fp16")

    assert torch.load(tmp_path / target)["m"].is_meta
    assert "1 tensor on the meta device, without values: they stay as they are" in report.notes
    (found,) = (one for one in ckptool.check(path).findings if one.code == "CK126")
    assert (found.severity, "m" in found.message) == ("warning", True)


def test_no_model_is_built_of_tensors_without_values(tmp_path: Path) -> None:
    path = tmp_path / "meta.pth"
    torch.save(nn.Linear(2, 2, device="meta").state_dict(), path)
    arguments = {"in_features": 2, "out_features": 2}

    with pytest.raises(UnsupportedFeature, match="it is on the meta device"):
        ckptool.migrate(path, tmp_path / "out.pth", form="model", model="torch.nn:Linear", model_arguments=arguments)
    with pytest.raises(UnsupportedFeature, match="has no bytes"):
        ckptool.load_into(nn.Linear(2, 2), path)


def test_half_an_adapter_is_not_left(tmp_path: Path) -> None:
    pairs = {f"base_model.model.m.{one}.lora_{side}.weight": torch.ones(4, 4) for one in "qv" for side in "AB"}
    source, target = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    ckptool.save(pairs, source)
    for options in ({"exclude": "*q.lora_B*"}, {"include": "*lora_A*"}, {"rename": "lora_A=lora_x"}):
        with pytest.raises(MigrationRefused, match="it would leave halves"):
            ckptool.migrate(source, target, **options)  # type: ignore[arg-type]
    ckptool.migrate(source, target, include="*.q.*")
    ckptool.migrate(source, target, include="*lora_A*", allow_missing=True, force=True)
    assert len(ckptool.load(target, allow_missing=True)) == 2
