"""The rule of ``Module.state_dict()``, applied to graphs that no class could have made too."""

from __future__ import annotations

import importlib
import inspect
import time
from typing import Any

import pytest
import torch
from torch import nn

from ckptool import Global, LimitExceeded, Limits
from ckptool.checkpoints import modules
from ckptool.checkpoints.modules import ModuleGraph, StateDictWalk
from ckptool.names.wrappers import COMPONENTS
from ckptool.pickles.nodes import Call, Dict, Inert
from tests.each import each
from tests.scale import exhaustive

LIMITS = Limits()


def pairs(found: dict[str, Inert] | list[tuple[Any, Inert]]) -> Dict:
    return Dict(list(found.items()) if isinstance(found, dict) else found)


def module(name: str = "models.Net", **state: Any) -> Call:
    """Return a pickled module; ``p``, ``b`` and ``c`` are its parameters, buffers and children."""
    names = {"p": "_parameters", "b": "_buffers", "c": "_modules"}
    attributes = {full: pairs(state.pop(short, {})) for short, full in names.items()}
    node = Call(Global(*name.rsplit(".", 1)), (), "newobj")
    node.state = pairs({"training": True} | attributes | state)
    return node


def tensor() -> Call:
    return Call(Global("torch._utils", "_rebuild_tensor_v2"), ())


def walk(node: Inert, limits: Limits = LIMITS) -> StateDictWalk:
    return ModuleGraph().walk(node, limits)


def names(node: Inert) -> list[str]:
    return [entry.name for entry in walk(node).entries]


def test_files_from_before_persistence_keep_every_buffer() -> None:
    assert names(module(b={"mean": tensor(), "cache": tensor()})) == ["mean", "cache"]


@exhaustive
def test_children_shared_again_and_again_are_stopped_by_the_limit_on_names() -> None:
    node = module(p={"w": tensor()})
    for _ in range(60):
        node = module(c={"a": node, "b": node})
    start = time.process_time()

    with pytest.raises(LimitExceeded):
        walk(node, Limits(tensors=1_000))
    assert time.process_time() - start < 15  # without a bound it is never done


def test_deep_models_are_walked_without_recursion() -> None:
    node = module(p={"w": tensor()})
    for _ in range(3_000):
        node = module(c={"a": node})

    assert names(node) == ["a." * 3_000 + "w"]


@pytest.mark.parametrize(
    "node",
    [
        None,
        5,
        Dict(),
        tensor(),
        Call(Global("models", "Net"), ()),
        Call(Global("builtins", "getattr"), (5, "x")),
        Call(Global("builtins", "getattr"), (module(), 7)),
    ],
    ids=repr,
)
def test_what_is_no_module_is_none(node: Inert) -> None:
    assert not ModuleGraph().is_module(node)


@each("missing", ["_parameters", "_buffers", "_modules"])
@each("instead", [None, 5, "text", []])
def test_an_object_without_all_three_mappings_is_no_module(missing: str, instead: Inert) -> None:
    node = module()
    node.state = Dict([(key, instead if key == missing else value) for key, value in node.state.pairs])

    assert not ModuleGraph().is_module(node)


def test_modules_that_save_what_is_not_known_are_named_one_by_one() -> None:
    quantised = "torch.ao.nn.quantized.dynamic.modules.linear.Linear"  # without a scale, so not as torch writes it
    other = "bitsandbytes.nn.modules.Linear4bit"
    children = {str(n): module(name) for n, name in enumerate([quantised, "models.Block", other, quantised])}
    found = walk(module("torch.nn.modules.container.Sequential", c=children))

    assert found.unlisted == [("0", quantised), ("2", other), ("3", quantised)]


def torch_modules() -> list[type[nn.Module]]:
    found = {cls for _, cls in inspect.getmembers(nn, inspect.isclass) if issubclass(cls, nn.Module)}
    return sorted(found, key=lambda cls: cls.__qualname__)


@each("cls", torch_modules())
def test_versions_of_torchs_own_classes_are_known(cls: type[nn.Module]) -> None:
    assert modules.version_of(f"{cls.__module__}.{cls.__qualname__}") == cls._version


@pytest.mark.parametrize("name", COMPONENTS)
def test_wrappers_are_where_the_table_says(name: str) -> None:
    path, _, cls = name.rpartition(".")
    assert issubclass(getattr(importlib.import_module(path), cls), nn.Module)


def test_a_child_that_is_no_module_is_passed_over() -> None:
    assert names(module(c={"odd": Dict(), "text": "x", "net": module(p={"w": torch})})) == ["net.w"]
