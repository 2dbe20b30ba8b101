"""What inert nodes say of themselves: class names, pairs, attributes, children."""

from __future__ import annotations

from typing import Any

import pytest

from ckptool import Global
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Call, Dict, PersistentId, Set
from ckptool.pickles.reader import read_pickle
from ckptool.sources.source import BytesSource
from tests.build import call, named, ops, pickled
from tests.each import each

CLASS = Global("models", "Net")
ORDERED_DICT = Global("collections", "OrderedDict")


def tree(value: Any) -> Any:
    return read_pickle(BytesSource(pickled(value))).root


def built(state: Any) -> Call:
    node = Call(CLASS, (), "newobj")
    node.state = state
    return node


@pytest.mark.parametrize(
    "node",
    [
        Call(CLASS, ()),
        Call(CLASS, (), "newobj"),
        Call(Global("copy_reg", "_reconstructor"), (CLASS, Global("__builtin__", "object"), None)),
        Call(Global("copyreg", "_reconstructor"), (CLASS, Global("builtins", "object"), None)),
        Call(Global("copyreg", "__newobj__"), (CLASS, 1)),
        Call(PersistentId(("module", CLASS, "models.py", "class Net: ...")), ()),
        Call(PersistentId((CLASS, "models.py", "class Net: ...")), ()),
    ],
)
def test_every_way_to_make_an_object_names_its_class(node: Call) -> None:
    assert nodes.class_of(node) is CLASS
    assert nodes.class_name(node) == "models.Net"


@each(
    ("node", "name"),
    [
        (CLASS, "models.Net"),
        (Call(Call(CLASS, ()), ()), "object"),
        (Call(PersistentId("7"), ()), "object"),
        (Dict(), "dict"),
        (Set([]), "set"),
        (Set([], frozen=True), "frozenset"),
        (PersistentId("7"), "persistent id"),
        (None, "NoneType"),
        (True, "bool"),
        ([], "list"),
        (bytearray(), "bytearray"),
    ],
)
def test_every_node_has_a_name_for_people(node: Any, name: str) -> None:
    assert nodes.class_name(node) == name
    assert nodes.class_of(node) is None


@pytest.mark.parametrize("pid", ["module", ("module", CLASS, "f"), ("storage", CLASS, "f", "s"), ("a", "b", "c"), ()])
def test_other_persistent_ids_carry_no_source(pid: Any) -> None:
    assert nodes.sourced_class(pid) == ()
    assert nodes.global_of(PersistentId(pid)) is None


@each(
    "value",
    [
        {"a": 1, "b": 2},
        call(named("collections", "OrderedDict"), [["a", 1], ["b", 2]]),
        call(named("collections", "OrderedDict"), [("a", 1), ("b", 2)]),
        call(named("collections", "OrderedDict")) + b"(" + ops("a") + b"K\1" + ops("b") + b"K\2u",
        call(named("collections", "defaultdict"), named("builtins", "int"))
        + b"("
        + ops("a")
        + b"K\1"
        + ops("b")
        + b"K\2u",
        call(named("collections", "Counter"), {"a": 1, "b": 2}),
        call(named("collections", "OrderedDict"), [["a", 1]]) + ops("b") + b"K\2s",
        call(named("my", "Config")) + b"(" + ops("a") + b"K\1" + ops("b") + b"K\2u",
    ],
)
def test_every_mapping_gives_its_pairs_in_order(value: Any) -> None:
    assert nodes.mapping_pairs(tree(value)) == [("a", 1), ("b", 2)]
    assert list(nodes.children(tree(value))) == [("a", 1), ("b", 2)]


@each("node", [[], (), None, "text", Set([]), CLASS, Call(CLASS, ()), Call(CLASS, ([("a", 1)],))])
def test_what_is_no_mapping_has_no_pairs(node: Any) -> None:
    assert nodes.mapping_pairs(node) is None


@pytest.mark.parametrize("args", [(), None, (7,), ([1, 2],), ([("a",)],)])
def test_an_empty_mapping_has_no_pairs_either_way(args: Any) -> None:
    assert nodes.mapping_pairs(Call(ORDERED_DICT, args)) == []


def test_attributes_are_those_of_the_dict_and_of_the_slots() -> None:
    own, slots = Dict([("a", 1)]), Dict([("b", 2)])

    assert nodes.attribute_pairs(built(own)) == [("a", 1)]
    assert nodes.attribute_pairs(built((own, slots))) == [("a", 1), ("b", 2)]
    assert nodes.attribute_pairs(built((None, slots))) == [("b", 2)]


@pytest.mark.parametrize("state", [None, 7, [Dict()], (Dict(), 7), (Dict(), Dict(), Dict())])
def test_other_states_have_no_attributes(state: Any) -> None:
    assert nodes.attribute_pairs(built(state)) == []


def test_the_last_of_two_equal_keys_counts() -> None:
    pairs = [("a", 1), (b"a", 2), ("a", 3), (Dict(), 4)]

    assert nodes.lookup(pairs, "a") == 3
    assert nodes.lookup(pairs, "b") is None


def test_the_children_of_an_object_are_its_arguments_items_and_attributes() -> None:
    node = built(Dict([("x", 3)]))
    node.args, node.kwargs, node.items = (1,), Dict(), [2]

    assert list(nodes.children(node)) == [(0, 1), ("kwargs", node.kwargs), (0, 2), ("x", 3)]


def test_a_state_that_is_no_dict_is_a_child() -> None:
    assert list(nodes.children(built((1, 2)))) == [("state", (1, 2))]


def test_arguments_that_are_no_tuple_are_a_child() -> None:
    inner = Dict()

    assert list(nodes.children(Call(CLASS, inner))) == [("args", inner)]


def test_containers_are_what_has_children() -> None:
    containers = [[1], (1,), Dict([("a", 1)]), Set([1]), Call(CLASS, (1,)), PersistentId(1)]
    leaves = [None, 1, 1.5, "a", b"a", bytearray(b"a"), CLASS]

    assert [nodes.is_container(node) for node in (*containers, *leaves)] == [True] * 6 + [False] * 7
    assert all(list(nodes.children(node)) for node in containers)
    assert not any(list(nodes.children(node)) for node in leaves)


def test_what_a_node_holds_is_what_its_children_are_found_in() -> None:
    node = built(Dict([("x", 3)]))
    node.args, node.kwargs, node.items, node.pairs = (1,), Dict(), [2], [("k", 4)]

    assert list(nodes.held(node)) == [node.args, node.kwargs, node.state, 2, 4]
    for container in ([1, 2], (1, 2), Dict([("a", 1), ("b", 2)]), Set([1, 2])):
        assert list(nodes.held(container)) == [1, 2]
    assert list(nodes.held(PersistentId(7))) == [7]
    assert list(nodes.held("text")) == []


def test_nodes_cannot_be_called_and_compare_by_identity() -> None:
    for make in (
        lambda: Global("os", "system"),
        lambda: Call(CLASS, ()),
        lambda: PersistentId(1),
        Dict,
        lambda: Set([]),
    ):
        node, twin = make(), make()
        assert not callable(node)
        assert node != twin
