"""How tensors get their names, what groups they form, and what becomes of everything else."""

from __future__ import annotations

from typing import Any

import pytest

from ckptool import AmbiguousFile, Checkpoint, LimitExceeded, Limits, MalformedFile, open_checkpoint
from ckptool.checking.structure import examine
from ckptool.checkpoints import contents
from ckptool.checkpoints.weights import NameChanges, prepare
from ckptool.pickles import nodes
from tests.build import call, floats, named, ops, storage, tensor, torch_zip
from tests.each import each

T = tensor(storage())


def opened(tree: Any, **limits: int) -> Checkpoint:
    return open_checkpoint(torch_zip(tree, {"0": floats()}), limits=Limits(**limits))


def module(parameters: Any = None, buffers: Any = None, children: Any = None, **attributes: Any) -> bytes:
    """Return an nn.Module as pickle writes one."""
    own = {"_parameters": parameters or {}, "_buffers": buffers or {}, "_modules": children or {}}
    return named("models", "Net") + b")\x81" + ops(own | attributes) + b"b"


@each(
    ("tree", "names"),
    [
        (T, [""]),
        ({"a": T, "b": T}, ["a", "b"]),
        ({"b": T, "a": T}, ["b", "a"]),
        ({"state_dict": {"conv.weight": T}, "epoch": 3}, ["state_dict.conv.weight"]),
        ([T, 1, (T,)], ["0", "2.0"]),
        ({0: T, -1: T, True: T}, ["0", "-1", "True"]),
        ({None: T, 1.5: T}, ["None", "1.5"]),
        ({("a", 1): T}, ["(a, 1)"]),
        (b"}C\2a\xffrN\0\0\0"[:5] + T + b"s", ["a\ufffd"]),
        (b"}" + ops(1 << 500) + T + b"s", ["0"]),
        (b"}]" + T + b"s", ["0"]),
        (call(named("collections", "OrderedDict")) + ops("a") + T + b"s", ["a"]),
        (b"\x8f(" + T + b"\x90", ["0"]),
        (call(named("my", "Batch"), 1, T), ["1"]),
        (named("my", "Batch") + b")\x81" + ops({"x": T}) + b"b", ["x"]),
        (named("my", "List") + b")\x81" + T + b"a", ["0"]),
        ({"": T, "a": {"": T}}, ["", "a."]),
        ({"\ud800\n\u202e": T}, ["\ud800\n\u202e"]),
    ],
)
def test_tensors_are_named_by_the_path_to_them(tree: Any, names: list[str]) -> None:
    assert list(opened(tree).tensors) == names


def test_a_tied_tensor_stands_under_each_of_its_names() -> None:
    for tree in ({"first": T + b"q\1", "second": [b"h\1"]}, {"first": [T + b"q\1"], "second": b"h\1"}):
        names = [name for name, _ in nodes.children(opened(tree).root)]
        found = opened(tree).tensors

        assert [name.partition(".")[0] for name in found] == names == ["first", "second"]
        assert len({id(tensor.info) for tensor in found.values()}) == 1


def test_the_rest_is_kept_as_the_largest_parts_without_tensors() -> None:
    found = opened({"model": {"w": T}, "epoch": 3, "config": {"deep": {"lr": 0.1}}, "log": [1, 2]})

    assert [name for name, _ in found.extras] == ["epoch", "config", "log"]
    assert dict(found.extras)["epoch"] == 3


@pytest.mark.parametrize(
    ("tree", "names"),
    [
        ({"a.b": T, "a": {"b": T}}, ["a.b", "a.b#2"]),
        (b"}(" + ops(1) + T + ops("1") + T + ops(1.0) + T + b"u", ["1", "1#2", "1.0"]),
        (b"}(" + ops("x#2") + T + ops("x") + T + b"C\1x" + T + b"u", ["x#2", "x", "x#3"]),
        (b"}(" + ops(None) + T + ops("None") + T + b"u", ["None", "None#2"]),
        (b"}(]" + T + ops(0) + T + b"]" + T + b"u", ["1", "0", "2"]),
    ],
)
def test_names_that_are_equal_are_told_apart(tree: Any, names: list[str]) -> None:
    found = opened(tree)

    assert list(found.tensors) == names
    assert {finding.code for finding in examine(found)} >= {"CK109"} or not found.contents.clashes


def test_a_key_that_a_mapping_has_twice_is_refused() -> None:
    with pytest.raises(AmbiguousFile) as caught:
        opened(b"}(" + ops("a") + T + ops("a") + T + b"u")

    assert caught.value.kind == "ambiguous-name"


def test_only_what_needs_both_under_one_name_refuses() -> None:
    found = opened({"model": {"w": T}, "log": {"a.b": T, "a": {"b": T}}})

    assert prepare(found, found.weights, NameChanges()).names == ["w"]
    with pytest.raises(AmbiguousFile):
        prepare(found, next(one for one in found.state_dicts if one.key == "log.a"), NameChanges())


@pytest.mark.parametrize(
    "tree",
    [
        b"]q\1(" + T + b"h\1e",
        b"}q\1(" + ops("w") + T + ops("self") + b"h\1u",
        b"]q\1(" + T + b"](h\1h\1ee",
    ],
)
def test_a_container_inside_itself_is_followed_once(tree: bytes) -> None:
    assert len(opened(tree).tensors) == 1


def groups(tree: Any) -> list[tuple[str, str, int]]:
    return [(group.key, group.role, len(group)) for group in opened(tree).state_dicts]


def test_everything_below_an_optimizer_is_its_own() -> None:
    tree = {"optimizer": {"state": {0: {"step": T, "exp_avg": T}, 1: {"step": T}}, "param_groups": []}}

    assert groups(tree) == [("optimizer", "optimizer", 3)]
    assert list(opened(tree).state_dicts[0]) == ["state.0.step", "state.0.exp_avg", "state.1.step"]


def test_loose_tensors_beside_a_state_dict_are_no_weights() -> None:
    tree = {"model": {"w": T}, "rng": T, "epoch": 1, "best": 0.5}

    assert [(key, role) for key, role, _ in groups(tree)] == [("", "other"), ("model", "model")]
    assert opened(tree).form == "checkpoint"


def test_a_whole_model_has_the_names_of_its_state_dict() -> None:
    inner = module(
        {"w": T}, {"seen": T, "cache": T}, _non_persistent_buffers_set=call(named("builtins", "set"), ["cache"])
    )
    found = opened(module({"scale": T, "none": None}, None, {"fc": inner, "off": None}, extra=T))

    assert list(found.tensors) == ["scale", "fc.w", "fc.seen"]
    assert list(found.attributes) == ["fc.cache", "extra"]
    assert (found.form, found.state_dicts[0].class_name) == ("model", "models.Net")
    assert [tensor.info.kind for tensor in found.tensors.values()] == ["parameter", "parameter", "buffer"]


def test_a_model_that_stands_twice_has_its_names_twice() -> None:
    found = opened(b"}(" + ops("net") + module({"w": T}, cache=T) + b"q\1" + ops("ema") + b"h\1u")

    assert list(found.tensors) == ["net.w", "ema.w"]
    assert len(found.walks) == 2


def test_a_parameter_that_is_no_tensor_is_told_and_the_others_are_read() -> None:
    found = opened(module({"w": T, "v": call(named("a", "b"))}))

    assert list(found.tensors) == ["w"]
    assert list(found.contents.unreadable) == [("v", "a.b")]


def test_a_module_inside_itself_is_refused() -> None:
    looped = (
        named("models", "Net")
        + b")\x81q\1"
        + ops({"_parameters": {"w": T}, "_buffers": {}, "_modules": {"a": b"h\1"}})
        + b"b"
    )
    with pytest.raises(MalformedFile) as caught:
        opened(looped)

    assert caught.value.kind == "malformed-module"


def test_a_name_longer_than_the_limit_is_refused() -> None:
    assert len(opened({"a" * 10: T}, name_nbytes=10).tensors) == 1
    with pytest.raises(LimitExceeded) as caught:
        opened({"a" * 6: {"b" * 4: T}}, name_nbytes=10)

    assert (caught.value.kind, caught.value.needed, caught.value.actual) == ("name-too-long", 11, 10)
    assert list(opened({"a" * 10: T, "epoch": 3}, name_nbytes=10).tensors) == ["a" * 10]
    with pytest.raises(LimitExceeded):
        opened({"a" * 11: T, "epoch": 3}, name_nbytes=10)


@pytest.mark.parametrize("beside", [{}, {"epoch": 3}])
def test_paths_may_cost_just_as_much_as_they_may(beside: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "_PATH_NBYTES", 0)
    monkeypatch.setattr(contents, "_PATHS_NBYTES", sum(len(name) + 64 for name in {"w": 0} | beside))
    assert list(opened({"w": T} | beside).tensors) == ["w"]
    monkeypatch.setattr(contents, "_PATHS_NBYTES", 64)
    with pytest.raises(LimitExceeded, match="paths"):
        opened({"w": T} | beside)


def test_many_long_names_are_no_reason_to_refuse_a_file() -> None:
    names = (ops(f"{number:0250}") + b"h\1" for number in range(60_000))

    assert len(opened(T + b"q\0010}(" + b"".join(names) + b"u").tensors) == 60_000


def test_names_that_no_tensor_has_are_not_limited() -> None:
    assert opened({"a" * 100: {"b" * 100: 1}}, name_nbytes=10).form == "data"
