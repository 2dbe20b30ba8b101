"""Which form is written, which weights are taken, what is left out, and what the report says of it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ckptool import migrate, open_checkpoint
from ckptool.errors import AmbiguousWeights
from ckptool.names.renaming import add_prefix, strip_prefix, substitute
from ckptool.pickles.nodes import Call, Dict, PersistentId
from tests import build
from tests.each import each
from tests.migration.refused import refused
from tests.scale import in_turn

VALID = Path(__file__).parents[2] / "fixtures" / "valid"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.norm = nn.BatchNorm2d(2)


def trained() -> dict[str, Any]:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    sum(parameter.sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    averaged = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    content = {"epoch": 3, "state_dict": model.state_dict(), "ema_state_dict": averaged}
    return {**content, "optimizer": optimizer.state_dict(), "hyper_parameters": {"lr": 0.1, "name": "x"}}


def saved(content: Any, path: Path) -> Path:
    torch.save(content, path)
    return path


def equal(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return list(found) == list(wanted) and all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


# Forms and names of targets


@pytest.mark.parametrize(
    ("source", "target", "form"),
    [
        ("checkpoint-plain-cpu-zip.pth", "x.safetensors", "safetensors"),
        ("checkpoint-plain-cpu-zip.pth", "x.SAFETENSORS", "safetensors"),
        ("checkpoint-plain-cpu-zip.pth", "x.pth", "same"),
        ("checkpoint-plain-cpu-zip.pth", "x", "same"),
        ("safetensors-tied-cpu.safetensors", "x.pth", "state_dict"),
        ("safetensors-tied-cpu.safetensors", "x.bin", "state_dict"),
        ("safetensors-tied-cpu.safetensors", "x.safetensors", "safetensors"),
        ("torchscript-script-cpu.pt", "x.pt", "state_dict"),
        ("export-cpu.pt2", "x.pth", "state_dict"),
        ("model-plain-cpu-legacy.pth", "x.pt", "same"),
    ],
)
def test_the_form_goes_by_the_suffix_of_the_target(source: str, target: str, form: str, tmp_path: Path) -> None:
    report = migrate(VALID / source, tmp_path / target)

    assert report.form == form
    assert report.written
    with open_checkpoint(tmp_path / target) as found:
        assert found.format == ("safetensors" if form == "safetensors" else "torch_zip")


@pytest.mark.parametrize(
    ("source", "options", "target"),
    [
        ("a.pth", {"to": "cpu"}, "a.cpu.pth"),
        ("a.pt", {"to": "cuda:1"}, "a.cuda1.pt"),
        ("a.ckpt", {}, "a.migrated.ckpt"),
        ("a.b.pth", {"form": "safetensors"}, "a.b.safetensors"),
        ("a.pth", {"form": "state_dict"}, "a.state_dict.pth"),
        ("a.pth", {"form": "state_dict", "to": "cpu"}, "a.state_dict.cpu.pth"),
        ("a", {"to": "cpu"}, "a.cpu.pth"),
        ("a.tar", {"to": "cpu"}, "a.cpu.pth"),
    ],
)
def test_without_a_target_a_name_beside_the_source_says_what_was_done(
    source: str, options: dict[str, Any], target: str, tmp_path: Path
) -> None:
    report = migrate(saved(Net().state_dict(), tmp_path / source), **options)

    assert Path(report.target) == tmp_path / target
    assert (tmp_path / target).is_file()


@pytest.mark.parametrize(
    ("form", "numels", "name"),
    in_turn(
        ["state_dict", "same"],
        [(), (0,), (0, 1, 0, 15, 16, 17), range(200)],
        ["b.pth", "a name that is not ASCII \u00e9.pth", f"{'n' * 90}.pth"],
    ),
)
def test_a_dry_run_knows_the_size_to_the_byte(name: str, numels: Any, form: Any, tmp_path: Path) -> None:
    content = {f"layer.{index}": torch.ones(numel) for index, numel in enumerate(numels)} or {"x": torch.ones(0)}
    plan = migrate(saved(content, tmp_path / "a.pth"), tmp_path / name, form=form, dry_run=True, allow_empty=True)
    migrate(tmp_path / "a.pth", tmp_path / name, form=form, allow_empty=True)

    assert plan.nbytes == (tmp_path / name).stat().st_size


# Which weights


def test_a_training_checkpoint_gives_its_weights_alone(tmp_path: Path) -> None:
    content = trained()
    report = migrate(saved(content, tmp_path / "a.pth"), tmp_path / "b.pth", form="state_dict")

    assert equal(torch.load(tmp_path / "b.pth"), content["state_dict"])
    assert report.weights_key == "state_dict"
    dropped = " ".join(report.dropped)
    assert all(what in dropped for what in ("epoch", "ema_state_dict", "optimizer", "hyper_parameters"))
    assert not any(path.startswith("state_dict") for path in report.dropped)


@pytest.mark.parametrize(
    ("options", "key", "form"),
    [
        ({"weights": "ema"}, "ema_state_dict", "state_dict"),
        ({"weights": "raw"}, "state_dict", "safetensors"),
        ({"key": "ema_state_dict"}, "ema_state_dict", "safetensors"),
        ({"key": "state_dict"}, "state_dict", "state_dict"),
    ],
)
def test_weights_are_picked_by_key_or_kind(options: dict[str, Any], key: str, form: Any, tmp_path: Path) -> None:
    content = trained()
    report = migrate(saved(content, tmp_path / "a.pth"), tmp_path / "b", form=form, **options)

    with open_checkpoint(tmp_path / "b") as found:
        for name, tensor in content[key].items():
            assert found.tensors[name].read() == tensor.numpy().tobytes()
    assert report.weights_key == key


@pytest.mark.parametrize("options", [{"key": "no"}, {"key": "state_dict.conv"}])
def test_a_key_that_is_no_state_dict_is_refused_with_those_that_are(options: dict[str, Any], tmp_path: Path) -> None:
    error = refused(
        saved(trained(), tmp_path / "a.pth"), tmp_path / "b.pth", form="state_dict", **options, kind="no-state-dict"
    )
    assert "ema_state_dict" in str(error.hint)


def test_of_several_candidates_none_is_taken_and_all_are_listed(tmp_path: Path) -> None:
    content = {"left": nn.Linear(3, 3).state_dict(), "right": nn.Linear(3, 3).state_dict()}
    source = saved(content, tmp_path / "a.pth")
    error = refused(source, tmp_path / "b.pth", form="state_dict", kind="which-weights")
    assert str(error.hint).startswith("Pick one with `key=`: 'left', 'right'; or all of them,")
    assert error.option == "key"
    assert error.candidates == ("left", "right")
    assert pickle.loads(pickle.dumps(error)).candidates == ("left", "right")
    assert error.path == str(source)
    migrate(source, tmp_path / "b.pth", form="state_dict", key="right")
    assert equal(torch.load(tmp_path / "b.pth"), content["right"])


def test_of_many_candidates_the_first_are_listed_and_the_others_counted(tmp_path: Path) -> None:
    source = saved({f"n{index:02}": nn.Linear(3, 3).state_dict() for index in range(15)}, tmp_path / "a.pth")
    error = refused(source, tmp_path / "b.pth", form="state_dict", error=AmbiguousWeights)

    assert "'n11' and 3 more; or all of them" in str(error.hint)


@pytest.mark.parametrize("options", [{"form": "safetensor"}, {"weights": "averaged"}], ids=str)
def test_what_is_misspelt_is_refused_before_anything_is_read(options: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is none of"):
        migrate(tmp_path / "missing.pth", tmp_path / "b.pth", **options)


@pytest.mark.parametrize("which", ["raw", "ema"])
def test_a_kind_of_weights_that_is_not_there_is_refused(which: Any, tmp_path: Path) -> None:
    content = {"ema": Net().state_dict()} if which == "raw" else {"state_dict": Net().state_dict()}
    refused(
        saved(content, tmp_path / "a.pth"), tmp_path / "b.pth", form="state_dict", weights=which, kind="which-weights"
    )


NESTED: dict[str, Any] = {
    "Lightning": lambda state: {
        "epoch": 1,
        "pytorch-lightning_version": "2",
        "state_dict": state,
        "optimizer_states": [],
    },
    "fastai": lambda state: {"model": state, "opt": {"state": [], "hypers": []}},
    "CHGNet": lambda state: {"model": {"state_dict": state, "model_args": {"n": 1}}, "trainer_args": {}},
    "two deep": lambda state: {"a": {"b": {"net": state}}},
    "a whole model inside": lambda state: {"epoch": -1, "ema": None, "model": state, "train_args": {}},
    "a list": lambda state: [state, {"epoch": 3}],
    "fastai with its optimizer": lambda state: {
        "model": state,
        "opt": {"state": [{"grad_avg": torch.ones(3)}, {}], "hypers": [{"lr": 0.1}]},
    },
}


class Detector(Net):
    """A whole model beside which a trainer saves things, as ultralytics does."""

    stride = torch.tensor([8.0, 16.0])


def trainers_file(model: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    torch.stack([parameter.float().sum() for parameter in model.parameters()]).sum().backward()
    optimizer.step()
    return {"epoch": -1, "ema": None, "updates": None, "model": model, "optimizer": optimizer.state_dict()}


@pytest.mark.parametrize(("half", "form"), [(False, "state_dict"), (True, "safetensors")])
def test_a_whole_model_in_a_trainers_file_comes_out_as_weights(form: Any, half: bool, tmp_path: Path) -> None:
    model = Detector().half() if half else Detector()
    report = migrate(saved(trainers_file(model), tmp_path / "best.pt"), tmp_path / "b", form=form)

    with open_checkpoint(tmp_path / "b") as found:
        assert {name: tensor.read() for name, tensor in found.tensors.items()} == {
            name: tensor.numpy().tobytes() for name, tensor in model.state_dict().items()
        }
    assert report.weights_key == "model"
    assert report.loses_training


@pytest.mark.parametrize("form", ["state_dict", "safetensors", "same"])
def test_a_policy_in_a_zip_of_several_files_comes_out(form: Any, tmp_path: Path) -> None:
    policy = saved({"policy.net.weight": torch.arange(4.0)}, tmp_path / "policy.pth").read_bytes()
    rest = saved({"state": {0: {"exp_avg": torch.ones(4)}}, "param_groups": []}, tmp_path / "rest.pth").read_bytes()
    members = {"data": b"{}", "policy.pth": policy, "policy.optimizer.pth": rest, "_stable_baselines3_version": b"2"}
    (tmp_path / "agent.zip").write_bytes(build.zip_file(members))

    report = migrate(f"{tmp_path}/agent.zip::policy.pth", form=form)

    assert (
        Path(report.target).name
        == {
            "same": "agent.policy.pth",
            "state_dict": "agent.policy.state_dict.pth",
            "safetensors": "agent.policy.safetensors",
        }[form]
    )
    assert report.source == f"{tmp_path}/agent.zip::policy.pth"
    assert "the other files of the archive are left out" in report.notes
    with open_checkpoint(report.target) as found:
        assert found.tensors["policy.net.weight"].read() == torch.arange(4.0).numpy().tobytes()


@each(("nest", "form"), in_turn(NESTED, ["state_dict", "safetensors"]))
def test_nested_weights_come_out_plain(nest: str, form: Any, tmp_path: Path) -> None:
    state = Net().state_dict()
    migrate(saved(NESTED[nest](state), tmp_path / "a.ckpt"), tmp_path / "b", form=form)

    if form == "state_dict":
        assert equal(torch.load(tmp_path / "b"), state)
    else:
        with safe_open(tmp_path / "b", framework="pt") as found:
            assert set(found.keys()) == set(state)


# Names


def wrapped(count: int = 1) -> nn.Module:
    model: nn.Module = Net()
    for _ in range(count):
        model = nn.DataParallel(model)
    return model


@pytest.mark.parametrize(("what", "count"), [("state_dict", 2), ("checkpoint", 1), ("model", 2)])
def test_stripped_names_fit_the_bare_model(what: str, count: int, tmp_path: Path) -> None:
    model = wrapped(count)
    content = {
        "state_dict": model.state_dict(),
        "checkpoint": {"model": model.state_dict(), "epoch": 1},
        "model": model,
    }
    source = saved(content[what], tmp_path / "a.pth")

    report = migrate(source, tmp_path / "b.pth", form="state_dict", strip_module=True)

    bare = Net()
    found = torch.load(tmp_path / "b.pth")
    bare.load_state_dict(found)
    assert list(found) == list(bare.state_dict())
    assert found._metadata == bare.state_dict()._metadata  # type: ignore[attr-defined]
    assert report.renamed[0] == ("module." * count + "conv.weight", "conv.weight")
    assert len(report.renamed) == len(found)


@pytest.mark.parametrize("form", ["state_dict", "same"])
def test_metadata_follows_the_names(form: Any, tmp_path: Path) -> None:
    source = saved(wrapped().state_dict(), tmp_path / "a.pth")

    migrate(source, tmp_path / "b.pth", form=form, strip_module=True, rename=[add_prefix("net")])

    found = torch.load(tmp_path / "b.pth")
    expected = {f"net.{key}" if key else "net": value for key, value in Net().state_dict()._metadata.items()}
    assert dict(found._metadata) == expected
    nn.ModuleDict({"net": Net()}).load_state_dict(found)


def test_rules_run_after_stripping_and_in_order(tmp_path: Path) -> None:
    source = saved(wrapped().state_dict(), tmp_path / "a.pth")
    rules = [add_prefix("a"), substitute(r"^a\.conv", "a.first"), strip_prefix("a")]

    migrate(source, tmp_path / "b.pth", strip_module=True, rename=rules)

    names = [name.replace("conv", "first") for name in Net().state_dict()]
    assert list(torch.load(tmp_path / "b.pth")) == names


@pytest.mark.parametrize("form", ["state_dict", "safetensors", "same"])
def test_a_collision_is_refused_before_anything_is_written(form: Any, tmp_path: Path) -> None:
    source = saved(Net().state_dict(), tmp_path / "a.pth")
    refused(source, tmp_path / "b", form=form, rename=[substitute("conv|norm", "x")], kind="name-collision")


def test_an_averaged_model_keeps_its_own_names_beside_what_is_unwrapped(tmp_path: Path) -> None:
    whole = {"model": nn.DataParallel(Net()).state_dict(), "ema": AveragedModel(Net()).state_dict()}
    migrate(saved(whole, tmp_path / "a.pth"), tmp_path / "b.pth", strip_module=True)
    found = torch.load(tmp_path / "b.pth")

    assert list(found["model"]) == list(Net().state_dict())
    assert list(found["ema"]) == list(AveragedModel(Net()).state_dict())


AVERAGED: dict[str, Any] = {
    "a state dict": lambda averaged: averaged.state_dict(),
    "in a checkpoint": lambda averaged: {"model": averaged.state_dict(), "epoch": 1},
    "in a wrapper": lambda averaged: nn.DataParallel(averaged).state_dict(),
    "a whole model": lambda averaged: averaged,
}


@pytest.mark.parametrize(
    ("strip", "form", "kind"),
    in_turn(["strip_module", "strip_wrappers"], ["state_dict", "safetensors", "same"], AVERAGED),
)
def test_an_averaged_model_gives_the_names_of_the_model(kind: str, form: Any, strip: Any, tmp_path: Path) -> None:
    if (kind, form) == ("a whole model", "same"):
        pytest.skip("AveragedModel is the model there")
    averaged = AveragedModel(Net())
    source = saved(AVERAGED[kind](averaged), tmp_path / "a.pth")

    report = migrate(source, tmp_path / "b", form=form, **{strip: True})

    with open_checkpoint(tmp_path / "b") as found:
        assert found.weights is not None
        assert sorted(found.weights) == sorted(averaged.module.state_dict())
        for name, tensor in averaged.module.state_dict().items():
            assert found.weights[name].read() == tensor.numpy().tobytes()
    assert [name.rpartition(".")[2] for name in report.dropped if "epoch" not in name] == ["n_averaged"]
    if form == "state_dict":
        Net().load_state_dict(torch.load(tmp_path / "b"))


@pytest.mark.parametrize(
    ("options", "left", "form"),
    [
        ({"include": ["conv.*"]}, ["conv.weight", "conv.bias"], "state_dict"),
        ({"exclude": ["norm.*", "*.bias"]}, ["conv.weight"], "safetensors"),
        ({"include": ["*.bias"], "exclude": ["norm*"]}, ["conv.bias"], "same"),
    ],
)
def test_globs_say_which_names_are_taken(options: dict[str, Any], left: list[str], form: Any, tmp_path: Path) -> None:
    state = Net().state_dict()
    report = migrate(saved(state, tmp_path / "a.pth"), tmp_path / "b", form=form, **options)

    with open_checkpoint(tmp_path / "b") as found:
        assert sorted(found.tensors) == sorted(left)
    assert set(report.dropped) == set(state) - set(left)


def test_names_in_a_checkpoint_change_where_they_stand(tmp_path: Path) -> None:
    content = {"model": wrapped().state_dict(), "epoch": 3, "note": {"module.conv.weight": 1}}
    migrate(saved(content, tmp_path / "a.pth"), tmp_path / "b.pth", strip_module=True)

    found = torch.load(tmp_path / "b.pth")
    assert list(found["model"]) == list(Net().state_dict())
    assert found["model"]._metadata == Net().state_dict()._metadata  # type: ignore[attr-defined]
    assert (found["epoch"], found["note"]) == (3, {"module.conv.weight": 1})


@pytest.mark.parametrize(
    ("drop", "left"),
    [
        (["optimizer"], ["epoch", "state_dict", "ema_state_dict", "hyper_parameters"]),
        (["ema"], ["epoch", "state_dict", "optimizer", "hyper_parameters"]),
        (["optimizer", "ema", "epoch"], ["state_dict", "hyper_parameters"]),
        (["hyper_parameters.lr"], ["epoch", "state_dict", "ema_state_dict", "optimizer", "hyper_parameters"]),
    ],
)
def test_roles_and_keys_can_be_dropped(drop: list[str], left: list[str], tmp_path: Path) -> None:
    content = trained()
    report = migrate(saved(content, tmp_path / "a.pth"), tmp_path / "b.pth", drop=drop)

    found = torch.load(tmp_path / "b.pth")
    assert list(found) == left
    assert equal(found["state_dict"], content["state_dict"])
    assert ("lr" in found["hyper_parameters"]) == ("hyper_parameters.lr" not in drop)
    assert report.dropped
    assert (tmp_path / "b.pth").stat().st_size < (tmp_path / "a.pth").stat().st_size or "hyper_parameters.lr" in drop


@pytest.mark.parametrize(
    ("entries", "drop", "left"),
    [
        ({"optimizer_states": "m"}, "optimizer", []),
        ({"optimizer_states": "ms"}, "optimizer", []),
        ({"optimizer_states": "mm", "optimizer": "m"}, "optimizer", []),
        ({"optimizer_states": "mm"}, "optimizer_states", []),
        ({"optimizer": "m"}, "optimizer.state", ["optimizer"]),
    ],
)
def test_optimizers_are_dropped_with_their_list_and_training_is_lost(
    entries: dict[str, str], drop: str, left: list[str], tmp_path: Path
) -> None:
    net = torch.nn.Linear(2, 2)
    optimizers = {"m": torch.optim.Adam(net.parameters()), "s": torch.optim.SGD(net.parameters())}
    net(torch.ones(2)).sum().backward()
    optimizers["m"].step()
    content: dict[str, Any] = {"state_dict": net.state_dict(), "epoch": 1}
    for key, kinds in entries.items():
        states = [optimizers[kind].state_dict() for kind in kinds]
        content[key] = states if key.endswith("s") else states[0]
    report = migrate(saved(content, tmp_path / "a.pth"), tmp_path / "b.pth", drop=[drop])

    assert list(torch.load(tmp_path / "b.pth")) == ["state_dict", "epoch", *left]
    assert report.loses_training
    assert "training cannot be resumed from it: the optimizer's state is left out" in report.notes


@pytest.mark.parametrize("key", ["optimizer_states", "opt"])
def test_an_optimizer_without_tensors_is_dropped_by_its_role(key: str, tmp_path: Path) -> None:
    net = torch.nn.Linear(2, 2)
    state = torch.optim.SGD(net.parameters()).state_dict()
    torch.save({"state_dict": net.state_dict(), key: [state] if key != "opt" else state}, tmp_path / "x.ckpt")

    migrate(tmp_path / "x.ckpt", tmp_path / "y.ckpt", drop="optimizer")

    assert torch.load(tmp_path / "y.ckpt").keys() == {"state_dict"}


def test_a_list_with_more_than_optimizers_is_not_dropped_as_one(tmp_path: Path) -> None:
    content = {"model": Net().state_dict(), "all": [{"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": []}, 3]}
    refused(saved(content, tmp_path / "a.pth"), tmp_path / "b.pth", drop=["optimizer"], match="inside a list")


# What a tensor's call says beside its facts


def rebuilt(*args: Any, state: Any = None) -> bytes:
    call = build.call(build.named("torch._utils", "_rebuild_tensor_v2"), build.storage("0", 4), 0, (4,), (1,), *args)
    return call + (build.ops(state) + b"b" if state is not None else b"")


ORDERED = build.named("collections", "OrderedDict")


@each(
    "call",
    [
        rebuilt(False, build.call(ORDERED) + b"(" + build.ops(1) + build.named("m", "hook") + b"u"),
        rebuilt(False, build.call(ORDERED) + build.ops({"k": "v"}) + b"b"),
        rebuilt(False, build.call(ORDERED, [("k", "v")])),
        rebuilt(False, build.call(build.named("m", "OrderedDict"))),
        rebuilt(False, {}),
        rebuilt(False, None),
        rebuilt(1, build.call(ORDERED)),
        rebuilt(False, build.call(ORDERED), {"more": "facts"}),
        rebuilt(False, build.call(ORDERED), state={"name": "x"}),
    ],
)
def test_what_a_tensor_has_beside_its_facts_stays(call: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.pth").write_bytes(build.torch_zip({"w": call}, {"0": build.floats()}))

    migrate(tmp_path / "a.pth", tmp_path / "b.pth", to="cuda:3")

    with open_checkpoint(tmp_path / "a.pth") as old, open_checkpoint(tmp_path / "b.pth") as new:
        assert said(new.root) == said(old.root).replace("'cpu'", "'cuda:3'")


def said(node: Any) -> str:
    """Return what a tree of nodes says, all of it."""
    if isinstance(node, Call):
        parts = (node.func, node.args, node.state, node.items, node.pairs)
        return f"Call({', '.join(map(said, parts))})"
    if isinstance(node, list | tuple):
        return f"{type(node).__name__}({', '.join(map(said, node))})"
    if isinstance(node, Dict):
        return f"Dict{said(list(node.pairs))}"
    return (
        f"Persistent{said(node.pid)}" if isinstance(node, PersistentId) else str(node) if node is None else repr(node)
    )


def test_the_hooks_of_each_tensor_are_its_own(tmp_path: Path) -> None:
    saved({name: torch.ones(3, requires_grad=True) for name in "ab"}, tmp_path / "a.pth")

    migrate(tmp_path / "a.pth", tmp_path / "b.pth")

    found = torch.load(tmp_path / "b.pth")
    found["a"].register_hook(lambda gradient: gradient)
    assert found["a"]._backward_hooks
    assert not found["b"]._backward_hooks


def test_an_archive_of_several_checkpoints_is_refused_with_their_names(tmp_path: Path) -> None:
    one = build.torch_zip({"w": build.tensor(build.storage())}, {"0": build.floats()})
    (tmp_path / "both.zip").write_bytes(build.zip_file({"a.pt": one, "b.pt": one}))

    error = refused(tmp_path / "both.zip", tmp_path / "new.pth", kind="archive")
    assert f"{tmp_path / 'both.zip'}::a.pt" in str(error.hint)
