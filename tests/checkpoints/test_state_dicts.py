"""Which of the state dicts in a file are the model's weights, and which are something else."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool import Checkpoint, open_checkpoint
from tests import build
from tests.each import each


def vector(key: str = "0", numel: int = 4) -> bytes:
    return build.tensor(build.storage("0", 4), (numel,))


def scalar() -> bytes:
    return build.tensor(build.storage("0", 4), (), ())


def weights(numel: int = 4) -> dict[str, bytes]:
    return {"layer.weight": vector(numel=numel), "layer.bias": vector(numel=numel)}


def opened(tree: Any) -> Checkpoint:
    return open_checkpoint(build.torch_zip(tree, {"0": build.floats()}))


def roles(tree: Any) -> dict[str, str]:
    return {group.key: group.role for group in opened(tree).state_dicts}


@each(
    ("key", "role"),
    [
        ("state_dict", "model"),
        ("model", "model"),
        ("anything", "model"),
        ("ema", "ema"),
        ("ema_state_dict", "ema"),
        ("model_ema", "ema"),
        ("averaged_model", "ema"),
        ("swa_state", "ema"),
        ("Shadow", "ema"),
        ("optimizer", "optimizer"),
        ("optim_d", "optimizer"),
        ("opt", "optimizer"),
        ("lr_scheduler", "scheduler"),
        ("callbacks", "other"),
        ("metrics", "other"),
        ("exp_avg", "other"),
        ("schema", "model"),
        ("emanuel", "model"),
        ("option", "model"),
    ],
)
def test_the_role_follows_from_whole_words_of_the_key(key: str, role: str) -> None:
    assert roles({key: weights(), "epoch": 3}) == {key: role}


_OF_TRAINING = (
    "exp_avg", "exp_avg_sq", "max_exp_avg_sqs", "momentum", "momentum_buffer", "grad", "grads", "gradients", "fisher",
    "masks", "scales", "activations", "delta", "updates",
)  # fmt: skip


@each("key", [*_OF_TRAINING, ""])
def test_what_training_keeps_of_each_parameter_is_taken_for_weights_only_if_asked(key: str, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    tree: Any = {key: model.state_dict(), "step": 4}
    if not key:
        tree = {
            f"{name}.{what}": torch.ones(2) for name in ("0.weight", "0.bias") for what in ("exp_avg", "exp_avg_sq")
        }
        tree["0.bias.step"] = torch.tensor(4.0)
    torch.save(tree, tmp_path / "x.pth")

    for take in (
        lambda: ckptool.migrate(tmp_path / "x.pth", tmp_path / "x.safetensors", dtype="bfloat16"),
        lambda: ckptool.load(tmp_path / "x.pth"),
        lambda: ckptool.load_into(model, tmp_path / "x.pth"),
    ):
        with pytest.raises((ckptool.WeightsNotFound, ckptool.KeyMismatch), match="there are no weights"):
            take()
    report = ckptool.migrate(tmp_path / "x.pth", tmp_path / "x.safetensors", key=key or "(root)")
    assert report.tensors == (2 if key else 5)


@each("names", [["grad.weight"], ["a.grad", "a.weight"], ["momentum.conv.weight", "momentum.conv.bias"]])
def test_a_layer_may_be_called_as_what_training_keeps(names: list[str]) -> None:
    assert roles(dict.fromkeys(names, vector())) == {"": "model"}


def test_a_bare_mapping_of_tensors_is_the_model() -> None:
    found = opened(weights())

    assert (found.form, roles(weights())) == ("state_dict", {"": "model"})
    assert found.weights is not None
    assert list(found.weights) == ["layer.weight", "layer.bias"]


def test_an_optimizer_is_known_by_its_two_keys() -> None:
    state = {"state": {0: {"exp_avg": vector(), "step": scalar()}}, "param_groups": [{"lr": 0.1, "params": [0]}]}

    assert roles({"anything": state}) == {"anything": "optimizer"}
    found = opened({"net": weights(), "anything": state})
    assert list(found.tensors)[2:] == ["anything.state.0.exp_avg", "anything.state.0.step"]
    assert roles(state) == {"": "optimizer"}


def test_a_few_tensors_among_other_things_are_no_state_dict() -> None:
    tree = {"model": weights(), "rng_state": vector(), "epoch": 3, "args": {"lr": 0.1}, "best": 0.5}

    assert roles(tree) == {"model": "model", "": "other"}
    found = opened(tree)
    assert found.weights is not None
    assert found.weights.key == "model"


def test_packed_weights_are_a_model_s_and_tuples_of_tensors_are_nobody_s() -> None:
    packed = {"fc.scale": scalar(), "fc._packed_params.dtype": 1, "fc._packed_params._packed_params": (vector(), None)}

    assert roles(packed) == {"": "model"}
    assert roles({"model": packed, "metrics": packed}) == {"model": "model", "metrics": "other"}
    assert roles({"fc.scale": scalar(), "a": 1, "b": (vector(), None)}) == {"": "other"}


def test_a_table_of_single_numbers_is_nobodys_weights() -> None:
    assert roles({"model": weights(), "scores": {"a": scalar(), "b": scalar()}}) == {
        "model": "model",
        "scores": "other",
    }


def test_state_dicts_inside_state_dicts_are_found() -> None:
    tree = {"models": {"first": weights(), "second": dict(reversed(weights().items()))}}

    assert roles(tree) == {"models.first": "model", "models.second": "model"}
    assert opened(tree).weights is None


@each(
    "key", ["state_dict", "model_state_dict", "model", "net", "network", "module", "model_state", "params", "weights"]
)
def test_the_best_known_key_wins(key: str) -> None:
    found = opened({"discriminator": weights(), key: weights(), "critic": weights()})

    assert found.weights is not None
    assert found.weights.key == key


@each(
    ("candidates", "chosen"),
    [
        ({}, None),
        ({"optimizer": 100, "metrics": 5}, None),
        ({"optimizer": 100, "b": 5}, "b"),
        ({"ema": 10, "model": 10}, "model"),
        ({"ema": 10, "optimizer": 10}, "ema"),
        ({"model": 1, "state_dict": 1000}, "state_dict"),
        ({"x.model": 1, "y.net": 1000}, "x.model"),
        ({"x.model": 1, "y.model": 1}, None),
        ({"x.model": 1, "y.model": 1, "z.net": 1}, "z.net"),
        ({"big": 999, "small": 1}, None),
        ({"state_dict": 1, "big": 999}, "state_dict"),
        ({"net": 5, "hyper_parameters": 5, "normalizer": 5}, "net"),
        ({"policy": 5, "hyper_parameters": 5, "image_std": 5}, None),
        ({"generator": 5, "discriminator": 95}, None),
        ({"generator": 95, "discriminator": 5}, None),
        ({"netG": 5, "netD": 95}, None),
        ({"G_state": 95, "D_state": 5}, None),
        ({"nets.actor": 5, "nets.critic": 95}, None),
        ({"generator": 5, "optimizer": 95}, "generator"),
        ({"generator": 5, "g_ema": 5}, "generator"),
        ({"state_dict": 5, "discriminator": 95}, "state_dict"),
        ({"g_ema": 95, "d_ema": 5}, None),
        ({"ema": 95, "swa": 5}, None),
        ({"a": 0, "b": 0}, None),
    ],
)
def test_one_stands_out_or_none(candidates: dict[str, int], chosen: str | None) -> None:
    tree: dict[str, Any] = {"epoch": 3}
    for number, (key, numel) in enumerate(candidates.items()):
        one: Any = {"w": build.tensor(build.storage(str(number), 1000), (numel,))}
        if key == "optimizer":
            one = {"state": {0: one}, "param_groups": []}
        above, _, last = key.rpartition(".")
        (tree.setdefault(above, {}) if above else tree)[last] = one
    values = {str(number): build.floats(1000) for number in range(len(candidates))}
    found = open_checkpoint(build.torch_zip(tree, values)).weights

    assert (found and found.key) == chosen


def test_names_inside_a_state_dict_are_relative_to_its_key() -> None:
    tensors = {"layer.weight": vector(), "layer.bias": vector(numel=2)}
    (group,) = opened({"a": {"b": tensors}}).state_dicts

    assert (group.key, list(group), len(group), group.numel) == ("a.b", ["layer.weight", "layer.bias"], 2, 6)
    assert group["layer.weight"].name == "a.b.layer.weight"
    assert "layer.weight" in group
    with pytest.raises(KeyError):
        group["a.b.layer.weight"]


def test_keys_with_dots_in_them_stay_whole() -> None:
    (group,) = opened({"my.model": weights()}).state_dicts

    assert (group.key, list(group)) == ("my.model", ["layer.weight", "layer.bias"])


@each(
    ("tree", "form"),
    [
        ({"epoch": 3}, "data"),
        ([1, 2], "data"),
        (weights(), "state_dict"),
        ({"state_dict": weights()}, "checkpoint"),
        ({**weights(), "epoch": 3}, "state_dict"),
        ({**weights(), "more": weights()}, "checkpoint"),
        (vector(), "tensors"),
        ([vector(), vector()], "tensors"),
    ],
)
def test_the_form_says_what_a_file_holds(tree: Any, form: str) -> None:
    assert opened(tree).form == form


@pytest.mark.parametrize("sizes", [(50, 50), (5, 95), (95, 5)], ids=str)
def test_of_two_models_that_were_trained_together_none_is_guessed(sizes: tuple[int, int], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    models = [
        {"layer.weight": build.tensor(build.storage(key, 100), (size,))} for key, size in zip("01", sizes, strict=True)
    ]
    path, like = tmp_path / "gan.pth", tmp_path / "like.pth"
    values = {"0": build.floats(100), "1": build.floats(100)}
    path.write_bytes(build.torch_zip({"generator": models[0], "discriminator": models[1]}, values))
    like.write_bytes(build.torch_zip(models[0], {"0": build.floats(100)}))

    verbs: dict[str, Callable[[], Any]] = {
        "load": lambda: ckptool.load(path),
        "migrate": lambda: ckptool.migrate(path, tmp_path / "x.safetensors"),
        "like": lambda: ckptool.check(like, like=path),
        "diff": lambda: ckptool.diff(path, like),
    }
    for name, verb in verbs.items():
        with pytest.raises(ckptool.AmbiguousWeights) as caught:
            verb()
        assert caught.value.candidates == ("generator", "discriminator"), name
        assert "generator" in str(caught.value.hint), name
        assert "discriminator" in str(caught.value.hint), name
    (finding,) = [one for one in ckptool.check(path, like=like).findings if one.code == "CK600"]
    assert "'generator', 'discriminator'" in str(finding.hint)
    assert any(
        one.code == "CK302" and "generator, discriminator" in one.message for one in ckptool.check(path).findings
    )
    with open_checkpoint(path) as found:
        assert found.weights is None
    assert list(ckptool.load(path, key="generator")) == list(models[0])


@pytest.mark.parametrize("has_buffers", [True, False])
def test_tensors_without_an_average_are_named(
    has_buffers: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = {"fc.weight": torch.ones(2, 2), "bn.running_mean": torch.ones(2), "bn.running_var": torch.ones(2)}
    averages = {name: one * 2 for name, one in model.items() if has_buffers or "running" not in name}
    inside = {f"model.{name}": one for name, one in model.items()} | {
        f"model_ema.{name}": one for name, one in averages.items()
    }
    wanted = "2 of 3 tensors of the model have no average, and are"
    for content in ({"model": model, "ema": {f"module.{name}": one for name, one in averages.items()}}, inside):
        torch.save(content, tmp_path / "m.pth")
        caplog.clear()
        with caplog.at_level(logging.WARNING, "ckptool"):
            ckptool.load(tmp_path / "m.pth", weights="ema")
        report = ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth", weights="ema", force=True)

        assert (wanted not in caplog.text) == has_buffers
        assert any(wanted in note for note in report.notes) != has_buffers
