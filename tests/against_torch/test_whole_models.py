"""
A model saved whole, by a process that had its classes: the names, order, ties and bytes of its real ``state_dict()``.

The classes stand in ``models_of_strangers.py``; they are pickled under a module name that exists nowhere any more when
the files are read.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from ckptool import Checkpoint, open_checkpoint
from tests.against_torch import oracle
from tests.against_torch.models_of_strangers import CONTAINERS, MODELS
from tests.against_torch.strangers import STRANGER, Strangers
from tests.each import each

# What their classes add to a state_dict is code, and not in the file.
WITH_CODE_OF_THEIR_OWN = {"renaming", "activation_checkpointed"}
UNWRAPPED = sorted(MODELS.keys() - WITH_CODE_OF_THEIR_OWN)


@pytest.fixture(scope="module")
def saved(strangers: Strangers) -> Path:
    """Return a folder of files that another process wrote, whose modules are not here."""
    return strangers.folder


def expected(saved: Path, model: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((saved / f"{model}.json").read_text())
    return rows


def opened(saved: Path, model: str, container: str) -> Checkpoint:
    path = saved / f"{model}.{container}"
    if not path.exists():
        pytest.skip(f"torch cannot save it: {path.with_suffix(f'.{container}.refused').read_text()}")
    return open_checkpoint(path)


def test_the_classes_are_not_here_when_the_files_are_read(saved: Path) -> None:
    assert importlib.util.find_spec(STRANGER) is None


@each("container", CONTAINERS)
@each("model", UNWRAPPED)
def test_tensors_are_those_of_the_real_state_dict(saved: Path, model: str, container: str) -> None:
    rows = expected(saved, model)

    with opened(saved, model, container) as checkpoint:
        assert list(checkpoint.tensors) == [row["name"] for row in rows]
        for row, tensor in zip(rows, checkpoint.tensors.values(), strict=True):
            info = tensor.info
            if row.get("uninitialized"):
                assert info.layout == "uninitialized"
                continue
            assert f"torch.{info.dtype}" == row["dtype"]
            assert (list(info.shape), list(info.stride)) == (row["shape"], row["stride"])
            assert hashlib.sha256(tensor.read()).hexdigest() == row["sha256"], row["name"]
            if container != "pickle":  # there, each storage holds its tensors' bytes alone
                assert info.storage_offset == row["offset"]


# Plain pickles tie tensors, not storages: a view has a storage of its own there.
@each("container", [name for name in CONTAINERS if name != "pickle"])
@each("model", [name for name in UNWRAPPED if name != "lazy"])
def test_ties_are_those_of_the_real_state_dict(saved: Path, model: str, container: str) -> None:
    rows = expected(saved, model)
    empty = [0 in row["shape"] for row in rows]

    with opened(saved, model, container) as checkpoint:
        found = oracle.ties(list(checkpoint.tensors.values()))
    for number, (row, tie) in enumerate(zip(rows, found, strict=True)):
        assert tie == (number if empty[number] else row["tie"])


@each("container", CONTAINERS)
@each("model", ["odd", "containers", "recurrent", "tied", "with_buffers", "normed", "pruned"])
def test_parameters_and_buffers_are_told_apart(saved: Path, model: str, container: str) -> None:
    with opened(saved, model, container) as checkpoint:
        kinds = [tensor.info.kind for tensor in checkpoint.tensors.values()]

    assert kinds == ["parameter" if row["parameter"] else "buffer" for row in expected(saved, model)]


@each("container", CONTAINERS)
def test_what_a_state_dict_leaves_out_is_kept_and_every_name_that_is_imported_listed(
    saved: Path, container: str
) -> None:
    with opened(saved, "odd", container) as checkpoint:
        assert {"hidden", "plain", "several.0", "several.1.deep"} <= set(checkpoint.attributes)
        assert checkpoint.attributes["plain"].read() == bytes.fromhex("00004040" * 2)
        names = {str(found) for found in checkpoint.globals}
    assert {f"{STRANGER}.Odd", "torch.nn.modules.linear.Linear", "torch._utils._rebuild_parameter"} <= names


@pytest.mark.parametrize("model", ["net", "tied", "data_parallel", "compiled", "traced", "averaged", "distributed"])
def test_one_model_is_the_form_model_and_its_weights(saved: Path, model: str) -> None:
    with opened(saved, model, "zip") as checkpoint:
        assert checkpoint.form == "model"
        assert checkpoint.weights is not None
        assert checkpoint.weights.class_name is not None
        assert list(checkpoint.weights) == list(checkpoint.tensors)


def test_models_nested_in_dicts_and_lists_are_state_dicts_of_their_own(saved: Path) -> None:
    with opened(saved, "trained", "zip") as checkpoint:
        roles = {group.key: group.role for group in checkpoint.state_dicts}
        assert roles == {
            "model": "model",
            "ema": "ema",
            "optimizer": "optimizer",
            "models.0": "model",
            "models.1.0": "model",
            "models.1.1": "model",
            "weights": "model",
            "best": "other",
            "7": "model",
        }
        assert checkpoint.form == "checkpoint"


@pytest.mark.parametrize("container", ["zip", "legacy", "legacy-4"])
@pytest.mark.parametrize("model", ["bound_method", "bound_method_of_wrapped"])
def test_a_method_saved_instead_of_its_result_is_rescued_and_told_of(saved: Path, model: str, container: str) -> None:
    with opened(saved, model, container) as checkpoint:
        assert checkpoint.contents.bound_method
        assert checkpoint.form == "model"


def test_classes_outside_torch_are_named_since_they_may_save_more_and_hooks_that_change_no_name_are_not(
    saved: Path,
) -> None:
    for model, classes in (("with_extra_state", [f"{STRANGER}.WithExtraState"]), ("normed", [])):
        with opened(saved, model, "zip") as checkpoint:
            ((_, walk),) = checkpoint.walks
        assert walk.foreign_classes == classes
    assert (walk.hooks, walk.unlisted) == ([], [])


@each("container", CONTAINERS)
def test_state_dict_hooks_are_named_with_their_class(saved: Path, container: str) -> None:
    with opened(saved, "renaming", container) as checkpoint:
        ((_, walk),) = checkpoint.walks

    assert len(walk.hooks) == 1
    assert walk.hooks[0][1] == f"{STRANGER}.Renaming"
    assert "rename" in walk.hooks[0][2]


@each("container", CONTAINERS)
def test_wrappers_for_activation_checkpointing_are_named(saved: Path, container: str) -> None:
    with opened(saved, "activation_checkpointed", container) as checkpoint:
        ((_, walk),) = checkpoint.walks
        data = [tensor.read() for tensor in checkpoint.tensors.values()]

    assert walk.hooks
    rows = expected(saved, "activation_checkpointed")
    assert [hashlib.sha256(found).hexdigest() for found in data] == [row["sha256"] for row in rows]


@pytest.mark.parametrize("container", ["legacy", "legacy-4"])
def test_legacy_files_show_the_source_of_their_classes(saved: Path, container: str) -> None:
    with opened(saved, "odd", container) as checkpoint:
        sources = {source.name: source for source in checkpoint.class_sources}

    assert f"{STRANGER}.Odd" in sources
    assert sources[f"{STRANGER}.Odd"].path.endswith(f"{STRANGER}.py")
    assert sources[f"{STRANGER}.Odd"].text.startswith("class Odd(nn.Module):")
