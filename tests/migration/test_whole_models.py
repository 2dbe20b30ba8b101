"""
Whole models to whole models without their classes: a process that has the classes finds the same module in both.

The classes stand in ``against_torch/models_of_strangers.py``. One process saves them under a module name that exists
nowhere where ckptool migrates the files; then it loads sources and targets and compares.
"""

from __future__ import annotations

import json
import pickle
import shutil
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptool import MigrationReport, migrate, open_checkpoint
from tests.against_torch import oracle
from tests.against_torch.models_of_strangers import CONTAINERS, MODELS
from tests.against_torch.strangers import STRANGER, Strangers
from tests.migration.test_round_trips import live
from tests.scale import in_turn, scaled, step

ROOT = Path(__file__).parents[2]

# How a file is migrated, and which models that is done to.
MODES: dict[str, dict[str, Any]] = {
    "same": {"form": "same", "to": "cpu"},
    "model": {"form": "model", "to": "cpu"},
    "strip_module": {"form": "same", "strip_module": True},
    "strip_wrappers": {"form": "same", "strip_wrappers": True},
}
KEPT = [name for name in MODELS if name not in ("distributed", "activation_checkpointed")]
WRAPPED = ["data_parallel", "averaged", "compiled", "compiled_inside", "bound_method_of_wrapped", "net", "trained"]
# Without a tensor there is no weight; several models are none in particular.
NOT_ONE_MODEL = {"bare", "trained", "list_of_models", "bound_method_inside"}


TELLING = ["tied", "odd", "containers", "slotted", "data_parallel", "traced", "trained", "bound_method"]


def jobs() -> Iterator[tuple[str, str, str]]:
    for container in CONTAINERS:
        yield from ((model, container, "same") for model in (KEPT if container in ("zip", "legacy") else TELLING))
    yield from ((model, "zip", "model") for model in TELLING if model not in NOT_ONE_MODEL)
    for container in ("zip", "legacy"):
        yield from ((model, container, mode) for model in WRAPPED for mode in ("strip_module", "strip_wrappers"))


JOBS = [job for number, job in enumerate(jobs()) if number % step(9, 2) == 0 or job[2].startswith("strip")]


Outcome = tuple[Path, dict[str, MigrationReport], dict[str, Any]]


@pytest.fixture(scope="module")
def outcome(strangers: Strangers, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Return the folder, the report of each migration, and what the process with the classes says of each pair."""
    folder = tmp_path_factory.mktemp("models") / "copies"
    shutil.copytree(strangers.folder, folder)
    reports = {}
    for model, container, mode in JOBS:
        source = folder / f"{model}.{container}"
        if source.exists():
            target = folder / f"{model}.{container}.{mode}"
            reports[target.name] = migrate(source, target, keep_calls=source.name.startswith("traced"), **MODES[mode])
    assert STRANGER not in sys.modules
    strangers.run(f"from tests.migration.test_whole_models import compare_all; compare_all({str(folder)!r})")
    return folder, reports, json.loads((folder / "compared.json").read_text())


# What runs in the process that has the classes.


def compare_all(folder: str) -> None:
    """Load each source and each target, and write down in what they differ."""
    warnings.simplefilter("ignore")
    found = {}
    for model, container, mode in jobs():
        source, target = Path(folder) / f"{model}.{container}", Path(folder) / f"{model}.{container}.{mode}"
        if target.exists():
            found[target.name] = compared(source, target, mode)
    (Path(folder) / "compared.json").write_text(json.dumps(found))


def compared(source: Path, target: Path, mode: str) -> list[str]:
    is_plain = source.suffix == ".pickle"
    before = pickle.loads(source.read_bytes()) if is_plain else torch.load(source, weights_only=False)
    after = torch.load(target, weights_only=False)
    peel = partial(peeled, mode=mode)
    differences = [] if live(before, peel=peel) == live(after) else ["another tree, or others in it are one object"]
    if mode in ("same", "model") or isinstance(before, nn.DataParallel):
        expected, found = outputs_of(peel(before)), outputs_of(after)
        if len(expected) != len(found) or not all(map(torch.equal, expected, found)):
            differences.append("forward gives other outputs")
    return differences


def peeled(tree: Any, mode: str) -> Any:
    """Return what is inside the wrappers that a mode removes."""
    if mode.startswith("strip"):
        while isinstance(tree, nn.DataParallel):
            tree = tree.module
    if mode == "strip_wrappers":
        while isinstance(tree, nn.Module) and hasattr(tree, "_orig_mod"):
            tree = tree._orig_mod
    return tree


def modules_in(tree: Any) -> list[nn.Module]:
    tree = getattr(tree, "__self__", tree)
    if isinstance(tree, nn.Module):
        return [tree]
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [module for item in items for module in modules_in(item)]


INPUTS: dict[str, Any] = {"Net": lambda: torch.ones(2, 1, 5, 5), "Sequential": lambda: torch.ones(2, 3)}


def outputs_of(tree: Any) -> list[torch.Tensor]:
    """Return what each module in a tree makes of the same input, where one is known for it."""
    found = []
    for module in modules_in(tree):
        inner = module.module if isinstance(module, nn.DataParallel) else getattr(module, "_orig_mod", module)
        make = INPUTS.get(type(inner).__name__)
        if make is not None:
            inner.eval()
            try:
                found.append(inner(make()).detach())
            except (RuntimeError, NotImplementedError, AttributeError, ValueError, TypeError):
                found.append(torch.tensor(-1.0))  # this one wants another input: both do
    return found


# What is promised of the pairs.


@scaled
@pytest.mark.parametrize(("model", "container", "mode"), JOBS, ids=map("-".join, JOBS))
def test_the_module_is_equal_and_computes_the_same(outcome: Outcome, model: str, container: str, mode: str) -> None:
    folder, _, found = outcome
    if not (folder / f"{model}.{container}").exists():
        pytest.skip("torch cannot save it")

    assert found[f"{model}.{container}.{mode}"] == []


@scaled
@pytest.mark.parametrize("container", CONTAINERS)
def test_every_target_is_a_zip_without_the_source_of_a_class(outcome: Outcome, container: str) -> None:
    folder, reports, _ = outcome

    for name in reports:
        if f".{container}." in name:
            with open_checkpoint(folder / name) as target:
                assert target.format == "torch_zip"
                assert target.class_sources == ()


@scaled
@pytest.mark.parametrize(("container", "mode"), in_turn(["zip", "legacy"], ["strip_module", "strip_wrappers"]))
def test_a_peeled_data_parallel_is_the_model_inside(outcome: Outcome, mode: str, container: str) -> None:
    folder, _, _ = outcome

    with open_checkpoint(folder / f"data_parallel.{container}.{mode}") as target:
        assert target.weights is not None
        assert target.weights.class_name == f"{STRANGER}.Net"
        assert all(not name.startswith("module.") for name in target.tensors)
        assert not [name for name in map(str, target.globals) if "DataParallel" in name]


@scaled
def test_a_compiled_model_is_peeled_by_strip_wrappers_alone(outcome: Outcome) -> None:
    folder, _, _ = outcome
    classes = {}
    for mode in ("strip_module", "strip_wrappers"):
        with open_checkpoint(folder / f"compiled.zip.{mode}") as target:
            assert target.weights is not None
            classes[mode] = target.weights.class_name

    assert classes["strip_wrappers"] == f"{STRANGER}.Net"
    assert str(classes["strip_module"]).endswith("OptimizedModule")


@scaled
@pytest.mark.parametrize(
    ("container", "model"), in_turn(CONTAINERS, ["net", "tied", "odd", "containers", "normed", "data_parallel"])
)
def test_a_whole_model_gives_its_state_dict_without_its_class(
    outcome: Outcome, model: str, container: str, tmp_path: Path
) -> None:
    folder, _, _ = outcome
    rows = json.loads((folder / f"{model}.json").read_text())
    source = folder / f"{model}.{container}"
    if not source.exists():
        pytest.skip("torch cannot save it")

    migrate(source, tmp_path / "x.pth", form="state_dict")

    found = torch.load(tmp_path / "x.pth", weights_only=True)
    assert list(found) == [row["name"] for row in rows]
    assert all(not tensor.requires_grad and type(tensor) is torch.Tensor for tensor in found.values())
    addresses = oracle.torch_ties(list(found.values()))
    ties = [row["tie"] if 0 not in row["shape"] else number for number, row in enumerate(rows)]
    assert addresses == ties or container == "pickle"  # there, a view has a storage of its own


@pytest.mark.parametrize(
    "name", ["data-parallel-forged-cuda0-zip", "ddp-forged-cuda0-legacy", "compiled-forged-cuda0-zip"]
)
def test_a_wrapped_fixture_from_a_gpu_computes_here_what_the_plain_one_does(name: str, tmp_path: Path) -> None:
    valid = ROOT / "fixtures" / "valid"
    migrate(valid / f"model-{name}.pth", tmp_path / "x.pth", strip_wrappers=True, to="cpu")

    found = torch.load(tmp_path / "x.pth", weights_only=False).eval()
    plain = torch.load(valid / "model-plain-cpu-zip.pth", weights_only=False).eval()
    images = torch.rand(2, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    assert type(found) is type(plain)
    assert found.head.weight is found.embedding.weight
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(found(images), plain(images))
