"""What is beside weights in a file is called what it is, and is never taken for weights."""

from __future__ import annotations

import io
import json
import random
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

import ckptool
from ckptool.checkpoints.training import TrainingState, training_states
from tests.against_torch.optimizers import net, stepped
from tests.against_torch.oracle import saved
from tests.against_torch.test_optimizer_objects import OPTIMIZERS
from tests.program import invoke

AS_TORCH = [name for name in OPTIMIZERS if name in torch.optim.__all__ and name != "Adafactor"]


def described(value: object) -> list[TrainingState]:
    with ckptool.open_checkpoint(saved(value)) as checkpoint:
        return training_states(checkpoint)


@pytest.mark.parametrize("name", [*AS_TORCH, "Adafactor"])
def test_an_optimizer_is_described(name: str) -> None:
    model, optimizer = stepped(OPTIMIZERS[name], steps=3)
    (as_object,), (as_state,) = (
        described({"model": model.state_dict(), "optimizer": one}) for one in (optimizer, optimizer.state_dict())
    )
    groups = [(len(group["params"]), group["lr"]) for group in optimizer.param_groups]
    kept = optimizer.state_dict()["state"][0]
    steps = kept.get("n_iter", kept.get("step"))

    assert as_object.class_name is not None
    assert as_object.class_name.rpartition(".")[2] == as_object.kind == as_state.kind == name
    assert as_state.class_name is None
    for found in (as_object, as_state):
        assert (found.key, found.role, [tuple(group) for group in found.groups]) == ("optimizer", "optimizer", groups)
        assert found.steps == (None if steps is None else int(steps))


def test_a_class_of_ones_own_is_taken_for_none_of_torchs() -> None:
    _, optimizer = stepped(OPTIMIZERS["KeepsMore"])

    assert [one.kind for one in described(optimizer)] == ["KeepsMore"]
    assert [one.kind for one in described(optimizer.state_dict())] == [None]


def test_a_learning_rate_that_is_a_tensor_or_no_number() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    for rate, expected in ((torch.tensor(0.5), 0.5), (torch.tensor(float("nan")), None), (torch.ones(2), None)):
        state = torch.optim.SGD([weight], lr=0.1).state_dict()
        state["param_groups"][0]["lr"] = rate
        assert [one.groups[0].lr for one in described(state)] == [expected]


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1, momentum=0.9)


SCHEDULERS: dict[str, Any] = {
    "StepLR": lambda one: lr_scheduler.StepLR(one, 3),
    "MultiStepLR": lambda one: lr_scheduler.MultiStepLR(one, [3]),
    "ConstantLR": lr_scheduler.ConstantLR,
    "LinearLR": lr_scheduler.LinearLR,
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "ExponentialLR": lambda one: lr_scheduler.ExponentialLR(one, 0.9),
    "CosineAnnealingLR": lambda one: lr_scheduler.CosineAnnealingLR(one, 10),
    "CosineAnnealingWarmRestarts": lambda one: lr_scheduler.CosineAnnealingWarmRestarts(one, 10),
    "CyclicLR": lambda one: lr_scheduler.CyclicLR(one, 0.1, 0.2),
    "OneCycleLR": lambda one: lr_scheduler.OneCycleLR(one, 0.1, total_steps=10),
    "ReduceLROnPlateau": lr_scheduler.ReduceLROnPlateau,
    "SequentialLR": lambda one: lr_scheduler.SequentialLR(
        one, [lr_scheduler.LinearLR(one), lr_scheduler.ExponentialLR(one, 0.9)], [4]
    ),
    "ChainedScheduler": lambda one: lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(one, 0.9)]),
}


@pytest.mark.filterwarnings("ignore")  # of schedulers that make others
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_is_described(name: str) -> None:
    optimizer = sgd()
    scheduler = SCHEDULERS[name](optimizer)
    optimizer.step()
    scheduler.step(*[0.5] * (name == "ReduceLROnPlateau"))
    (found, *_), objects = described(scheduler.state_dict()), described({"scheduler": scheduler})

    assert (found.key, found.role, found.kind, found.class_name) == ("", "scheduler", name, None)
    assert found.steps == scheduler.state_dict().get("last_epoch")
    assert [group.lr for group in found.groups] == pytest.approx(scheduler.get_last_lr())
    assert ("scheduler", name) in {(one.role, one.kind) for one in objects}


def training_files() -> dict[str, tuple[Any, str, str]]:
    """Return what trainers write beside weights: the value, the form, and what load() says of it."""
    _, optimizer = stepped(OPTIMIZERS["AdamW"])
    generators = {"cpu": torch.get_rng_state(), "cuda": torch.zeros(16, dtype=torch.uint8)}
    accelerates = {"step": 3, "random_state": random.getstate(), "torch_manual_seed": torch.get_rng_state()}
    plain = {"python": random.getstate(), "numpy": np.random.get_state()}  # noqa: NPY002 - what trainers save
    rng = "only states of random number generators"
    return {
        "optimizer.pt": (optimizer.state_dict(), "training", "only the state of an optimizer"),
        "optimizer object": (optimizer, "training", "only the state of an optimizer"),
        "optimizers": ([optimizer.state_dict()], "training", "only the state of an optimizer"),
        "rng_state.pth": ({**plain, **generators}, "training", rng),
        "rng_state.pth of two devices": ({**plain, **generators, "cuda": [generators["cuda"]] * 2}, "training", rng),
        "rng_state.pth of CUDA": ({**plain, "cuda": generators["cuda"]}, "training", rng),
        "random_states_0.pkl": (accelerates, "training", rng),
        "scheduler.pt": (lr_scheduler.StepLR(sgd(), 3).state_dict(), "data", "there are no weights"),
        "integers": ({0: torch.ones(2), 1: torch.ones(3)}, "tensors", "no model has named"),
        "tuples": ({("a", 1): torch.ones(2), ("a", 2): torch.ones(3)}, "tensors", "no model has named"),
    }


@pytest.mark.parametrize("name", training_files())
def test_a_file_without_weights_says_so(name: str, tmp_path: Path) -> None:
    value, form, message = training_files()[name]
    path = tmp_path / "file.pt"
    torch.save(value, path)
    with ckptool.open_checkpoint(path) as checkpoint:
        assert checkpoint.form == form
    with pytest.raises(ckptool.WeightsNotFound, match=message) as caught:
        ckptool.load(path)
    for key in caught.value.candidates:  # what the hint names does work
        assert len(ckptool.load(path, key=key)) == 2
    ckptool.migrate(path, tmp_path / "again.pt", form="same")
    assert repr(torch.load(tmp_path / "again.pt", weights_only=False)) == repr(torch.load(path, weights_only=False))


def test_random_states_are_not_given_even_if_asked_for() -> None:
    file = saved({"model": net().state_dict(), "rng": {"cpu": torch.get_rng_state()}})

    assert list(ckptool.load(file)) == list(net().state_dict())
    with pytest.raises(ckptool.WeightsNotFound, match="states of random number generators"):
        ckptool.load(file, key="rng")
    weights = {"codes": torch.zeros(16, dtype=torch.uint8), "scale": torch.zeros(16, dtype=torch.uint8)}
    assert len(ckptool.load(saved(weights))) == 2


@pytest.mark.parametrize(
    ("saved_as", "listed"),
    [
        (("G", "D", "G_ema"), ("G", "D", "G_ema")),
        (("g_ema", "d"), ("g_ema", "d")),
        (("netG", "netD", "ema_G"), ("netG", "netD", "ema_G")),
        (("generator", "discriminator", "g_running"), ("generator", "discriminator", "g_running")),
        (("student", "teacher", "dino_loss"), ("student", "teacher")),
    ],
)
def test_all_that_could_be_meant_are_listed(saved_as: tuple[str, ...], listed: tuple[str, ...]) -> None:
    file = saved({key: net().state_dict() for key in saved_as})
    with pytest.raises(ckptool.AmbiguousWeights) as caught:
        ckptool.load(file)

    assert caught.value.candidates == listed
    assert all(repr(key) in (caught.value.hint or "") for key in listed)
    with ckptool.open_checkpoint(file) as checkpoint:
        from ckptool.checking.structure import examine

        (finding,) = (one for one in examine(checkpoint) if one.code == "CK302")
        assert all(key in finding.message for key in listed)


@pytest.mark.parametrize("keys", [("g_ema",), ("generator", "g_ema"), ("student", "ema")])
def test_one_model_and_its_average_are_no_two_models(keys: tuple[str, ...]) -> None:
    with ckptool.open_checkpoint(saved({key: net().state_dict() for key in keys})) as checkpoint:
        assert checkpoint.weights is not None
        assert checkpoint.weights.key == keys[0]


def archive(members: dict[str, object]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as packed:
        for name, value in members.items():
            packed.writestr(name, saved(value))
    return file.getvalue()


def test_the_policy_is_chosen_among_what_an_agent_keeps_and_of_several_models_none(tmp_path: Path) -> None:
    weights, kept = net().state_dict(), {"a.optimizer.pth": stepped(OPTIMIZERS["Adam"])[1].state_dict()}
    file = archive({**kept, "pytorch_variables.pth": {"log_ent_coef": torch.ones(1)}, "policy.pth": weights})
    assert list(ckptool.load(file)) == list(weights)
    (tmp_path / "agent.zip").write_bytes(archive({**kept, "actor.pth": weights, "critic.pth": weights}))
    with pytest.raises(ckptool.AmbiguousWeights) as caught:
        ckptool.load(tmp_path / "agent.zip")

    assert caught.value.candidates == tuple(f"{tmp_path / 'agent.zip'}::{name}.pth" for name in ("actor", "critic"))
    assert all(len(ckptool.load(one)) == 6 for one in caught.value.candidates)
    printed = invoke(["inspect", "-q", str(tmp_path / "agent.zip")]).output
    assert "agent.zip::actor.pth" in printed


@pytest.mark.parametrize("as_object", [True, False])
def test_what_an_optimizer_keeps_says_for_which_parameter(as_object: bool, tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.AdamW(list(model.named_parameters())[::-1])
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    path = tmp_path / "checkpoint.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer if as_object else optimizer.state_dict()}, path)
    if as_object:  # then the parameters themselves tell
        torch.save({"model": model, "optimizer": optimizer}, path)
        optimizer.param_groups[0].pop("param_names")
    result = json.loads(invoke(["inspect", "--json", str(path)]).output)
    found = {one["name"]: one["parameter"] for one in result["tensors"] if "parameter" in one}
    names = [f"model.{name}" for name, _ in model.named_parameters()][::-1]

    assert found == {
        f"optimizer.state.{number}.{key}": names[number]
        for number, kept in optimizer.state_dict()["state"].items()
        for key in kept
    }
    assert [(one["kind"], one["steps"]) for one in result["training"]] == [("AdamW", 1)]
    table = invoke(["inspect", "--columns", "name,parameter", str(path)]).output
    assert ["optimizer.state.0.exp_avg", names[0]] in [line.split() for line in table.splitlines()]
