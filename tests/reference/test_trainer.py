from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from ckptool.reference import trainer
from ckptool.reference.nets import MLP, LeNet
from ckptool.reference.trainer import Recipe, accuracy, train
from tests.fixture_set.expected import entries
from tests.fixture_set.forging import true_tag
from tests.scale import exhaustive

if find_spec("sklearn") is None:
    pytest.skip("the reference nets train on scikit-learn's digits", allow_module_level=True)

CPU = torch.device("cpu")


def small() -> torch.nn.Module:
    return MLP(16, 2, inputs=64, outputs=10)


def digests(model: torch.nn.Module) -> list[str]:
    return [entry["sha256"] for entry in entries(model, true_tag)]


@exhaustive
def test_lenet_learns_the_digits():
    split = trainer.digits(28, seed=0)
    trained = train(LeNet, split, Recipe(), CPU)

    assert trained.epochs[-1].accuracy >= 0.95
    assert accuracy(trained.model, split.held_out, CPU) == trained.epochs[-1].accuracy
    assert trained.epochs[-1].loss < trained.epochs[0].loss / 4


def test_a_run_repeats_and_another_seed_does_not_and_the_random_numbers_of_the_process_are_left_alone():
    split = trainer.digits(8, seed=0)
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    runs = [train(small, split, Recipe(epochs=1, seed=seed), CPU) for seed in (3, 3, 4)]

    assert torch.equal(torch.rand(3), expected)
    assert digests(runs[0].model) == digests(runs[1].model)
    assert digests(runs[0].model) != digests(runs[2].model)


def test_each_epoch_is_told_of_and_the_average_follows_every_step():
    seen: list[int] = []
    trained = train(small, trainer.digits(8, seed=0), Recipe(epochs=2), CPU, lambda epoch: seen.append(epoch.number))

    assert seen == [1, 2]
    assert int(trained.ema.n_averaged) == 2 * 45  # 1438 images, 32 at a time
    assert digests(trained.ema.module) != digests(trained.model)


def test_a_wrapped_run_trains_the_same_model():
    split = trainer.digits(8, seed=0)
    runs = [train(small, split, Recipe(epochs=1, wrap=wrap), CPU) for wrap in ("none", "data-parallel")]

    assert digests(runs[0].model) == digests(runs[1].model)
    assert list(runs[1].wrapped.state_dict()) == ["module.layers.0.weight", "module.layers.2.weight"]
