"""The rule of ``Module.state_dict()``, applied to graphs that no class could have made too."""

from __future__ import annotations

import importlib
import inspect
import time
from typing import Any

import pytest
import torch
from torch import nn

from ckptool import Global, LimitExceeded, Limits, MalformedFile
from ckptool.checkpoints import modules
from ckptool.checkpoints.modules import PickledModules, StateDictWalk, walk_state_dict
from ckptool.names.wrappers import COMPONENTS, DATA_PARALLEL
from ckptool.pickles.nodes import Call, Dict, Inert, PersistentId, Set
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
    return walk_state_dict(node, limits)


def names(node: Inert) -> list[str]:
    return [entry.name for entry in walk(node).entries]


def test_parameters_come_before_buffers_and_both_before_children() -> None:
    child = module(p={"weight": tensor()}, b={"mean": tensor()})
    node = module(c={"z": child, "a": child}, b={"steps": tensor()}, p={"y": tensor(), "x": tensor()})

    assert names(node) == ["y", "x", "steps", "z.weight", "z.mean", "a.weight", "a.mean"]
    assert [entry.kind for entry in walk(node).entries] == ["parameter", "parameter", "buffer"] + [
        "parameter",
        "buffer",
    ] * 2


def test_what_is_none_is_skipped() -> None:
    assert names(module(p={"bias": None, "w": tensor()}, b={"m": None}, c={"none": None})) == ["w"]


@pytest.mark.parametrize(
    "hidden",
    [
        Set(["cache"]),
        Set(["cache"], frozen=True),
        Call(Global("__builtin__", "set"), (["cache"],)),
        Call(Global("builtins", "set"), (["cache", 5],)),
    ],
    ids=["a set", "a frozen set", "as protocol 2 writes it", "with something odd in it"],
)
def test_buffers_that_are_not_persistent_are_left_out(hidden: Inert) -> None:
    node = module(b={"mean": tensor(), "cache": tensor()}, _non_persistent_buffers_set=hidden)

    assert names(node) == ["mean"]


def test_files_from_before_persistence_keep_every_buffer() -> None:
    assert names(module(b={"mean": tensor(), "cache": tensor()})) == ["mean", "cache"]


def test_a_module_under_two_names_gives_its_tensors_two_names() -> None:
    shared = tensor()
    child = module(p={"w": shared})

    entries = walk(module(c={"a": child, "b": child})).entries
    assert [(entry.name, entry.node is shared) for entry in entries] == [("a.w", True), ("b.w", True)]


def test_attributes_are_not_followed() -> None:
    child = module(p={"w": tensor()})
    node = module(c={"child": child}, plain=tensor(), other=module(p={"w": tensor()}))
    child.state.pairs.append(("parent", node))

    assert names(node) == ["child.w"]


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_module_that_holds_itself_is_refused(steps: int) -> None:
    first = node = module()
    for _ in range(steps):
        inner = module()
        node.state.pairs[3] = ("_modules", pairs({"inner": inner}))
        node = inner
    node.state.pairs[3] = ("_modules", pairs({"loop": first}))

    with pytest.raises(MalformedFile) as caught:
        walk(first)
    assert caught.value.kind == "malformed-module"


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


def test_names_longer_than_the_limit_are_refused() -> None:
    with pytest.raises(LimitExceeded):
        walk(module(c={"x" * 100: module(c={"y": module(p={"w": tensor()})})}), Limits(name_nbytes=50))


@pytest.mark.parametrize("builtins", ["builtins", "__builtin__"])
@pytest.mark.parametrize("method", ["state_dict", "forward"])
def test_a_bound_method_stands_for_its_object(builtins: str, method: str) -> None:
    node = Call(Global(builtins, "getattr"), (module(p={"w": tensor()}), method))

    assert PickledModules().is_module(node)
    assert modules.is_bound_method(node)
    assert PickledModules().class_name(node) == "models.Net"
    assert names(node) == ["w"]


def test_a_compiled_model_puts_its_component_in_front() -> None:
    compiled = Call(Global("torch._dynamo.eval_frame", "OptimizedModule"), (module(p={"w": tensor()}), Dict()))

    assert PickledModules().is_module(compiled)
    assert names(compiled) == ["_orig_mod.w"]


def test_graph_modules_are_rebuilt_from_their_dict() -> None:
    state = module(p={"w": tensor()}).state
    node = Call(Global("torch.fx.graph_module", "reduce_graph_module"), (state, "import torch"))

    assert PickledModules().is_module(node)
    assert names(node) == ["w"]


def test_old_and_new_ways_to_write_an_object_are_the_same() -> None:
    node = module(p={"w": tensor()})
    old = Call(Global("copy_reg", "_reconstructor"), (Global("models", "Net"), Global("__builtin__", "object"), None))
    sourced = Call(PersistentId((Global("models", "Net"), "net.py", "class Net: …")), ())
    for other in (old, sourced):
        other.state = node.state
        assert PickledModules().class_name(other) == "models.Net"
        assert names(other) == ["w"]


def test_ordered_dicts_are_dicts() -> None:
    node = module()
    ordered = Call(Global("collections", "OrderedDict"), ())
    ordered.pairs = [("w", tensor())]
    node.state.pairs[1] = ("_parameters", ordered)

    assert names(node) == ["w"]


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
    assert not PickledModules().is_module(node)


@each("missing", ["_parameters", "_buffers", "_modules"])
@each("instead", [None, 5, "text", []])
def test_an_object_without_all_three_mappings_is_no_module(missing: str, instead: Inert) -> None:
    node = module()
    node.state = Dict([(key, instead if key == missing else value) for key, value in node.state.pairs])

    assert not PickledModules().is_module(node)


def test_doubts_name_each_class_once() -> None:
    children = {str(n): module("models.Block") for n in range(3)}
    found = walk(module("torch.nn.modules.container.Sequential", c=children))

    assert found.foreign_classes == ["models.Block"]


def test_modules_that_save_what_is_not_known_are_named_one_by_one() -> None:
    quantised = "torch.ao.nn.quantized.dynamic.modules.linear.Linear"  # without a scale, so not as torch writes it
    other = "bitsandbytes.nn.modules.Linear4bit"
    children = {str(n): module(name) for n, name in enumerate([quantised, "models.Block", other, quantised])}
    found = walk(module("torch.nn.modules.container.Sequential", c=children))

    assert found.unlisted == [("0", quantised), ("2", other), ("3", quantised)]


def test_hooks_are_told_of_unless_they_only_touch_metadata() -> None:
    hooks = {
        "0": Call(Global("torch.nn.utils.spectral_norm", "SpectralNormStateDictHook"), ()),
        "1": Global("models", "rename_keys"),
    }
    found = walk(module("torch.nn.modules.linear.Linear", _state_dict_hooks=pairs(hooks)))

    assert found.hooks == [("", "torch.nn.modules.linear.Linear", "models.rename_keys")]


def test_wrappers_are_known_by_class_and_not_by_the_name_of_a_child() -> None:
    inner = module(p={"w": tensor()})
    wrapped = module("torch.nn.parallel.data_parallel.DataParallel", c={"module": inner})
    alike = module("models.DataParallel", c={"module": inner})
    classes = frozenset(DATA_PARALLEL.classes)

    assert modules.unwrapped(wrapped, classes) is inner
    assert modules.unwrapped(alike, classes) is None
    assert names(alike) == names(wrapped) == ["module.w"]


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
