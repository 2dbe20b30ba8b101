"""What inert nodes say of themselves: class names, pairs, attributes, what they hold."""

from __future__ import annotations

from typing import Any

from ckptool import Global
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Call, Dict, PersistentId, Set
from ckptool.pickles.reader import read_pickle
from ckptool.sources.source import BytesSource
from tests.build import call, named, ops, pickled
from tests.each import each

CLASS = Global("models", "Net")
OBJECT = Global("builtins", "object")
SOURCED = (CLASS, "models.py", "class Net: ...")


@each(
    ("node", "name"),
    [
        (Call(CLASS, ()), "models.Net"),
        (Call(Global("copy_reg", "_reconstructor"), (CLASS, OBJECT, None)), "models.Net"),
        (Call(Global("copyreg", "__newobj__"), (CLASS, 1)), "models.Net"),
        (Call(PersistentId(("module", *SOURCED)), ()), "models.Net"),
        (Call(PersistentId(SOURCED), ()), "models.Net"),
        (Call(Call(CLASS, ()), ()), "object"),
        (Call(PersistentId("7"), ()), "object"),
        (Call(PersistentId(("storage", CLASS, "f", "s")), ()), "object"),
        (Set([], frozen=True), "frozenset"),
        (PersistentId("7"), "persistent id"),
        (None, "NoneType"),
    ],
)
def test_every_node_has_a_name_for_people(node: Any, name: str) -> None:
    assert nodes.class_name(node) == name
    assert (nodes.class_of(node) is CLASS) == (name == "models.Net")


ORDERED, B = named("collections", "OrderedDict"), ops("b") + b"K\2"


@each(
    ("value", "pairs"),
    [
        ({"a": 1, "b": 2}, [("a", 1), ("b", 2)]),
        (call(ORDERED, [["a", 1], ("b", 2)]), [("a", 1), ("b", 2)]),
        (call(named("collections", "Counter"), {"a": 1, "b": 2}), [("a", 1), ("b", 2)]),
        (call(ORDERED, [["a", 1]]) + B + b"s", [("a", 1), ("b", 2)]),
        (call(named("my", "Config")) + B + b"s", [("b", 2)]),
        *((call(ORDERED, *args), []) for args in ((), (7,), ([1, 2],), ([("a",)],))),
        *((one, None) for one in ([], (), None, "text", call(named("m", "C"), [("a", 1)]))),
    ],
)
def test_every_mapping_gives_its_pairs_in_order(value: Any, pairs: Any) -> None:
    node = read_pickle(BytesSource(pickled(value))).root
    assert nodes.mapping_pairs(node) == pairs
    assert pairs is None or list(nodes.children(node)) == pairs


@each(
    ("state", "pairs"),
    [
        (Dict([("a", 1)]), [("a", 1)]),
        ((Dict([("a", 1)]), Dict([("b", 2)])), [("a", 1), ("b", 2)]),
        ((None, Dict([("b", 2)])), [("b", 2)]),
        *((one, []) for one in (None, 7, [Dict()], (Dict(), 7), (Dict(), Dict(), Dict()))),
    ],
)
def test_attributes_are_those_of_the_dict_and_of_the_slots(state: Any, pairs: Any) -> None:
    node = Call(CLASS, (), "newobj")
    node.state = state
    assert nodes.attribute_pairs(node) == pairs


def test_the_last_of_two_equal_keys_counts() -> None:
    pairs = [("a", 1), (b"a", 2), ("a", 3), (Dict(), 4)]
    assert (nodes.lookup(pairs, "a"), nodes.lookup(pairs, "b")) == (3, None)


def test_what_an_object_holds_is_told_by_name_and_as_it_is_stored() -> None:
    node = Call(CLASS, (1,), "newobj", Dict())
    node.state, node.items = Dict([("x", 3)]), [2]
    assert list(nodes.children(node)) == [(0, 1), ("kwargs", node.kwargs), (0, 2), ("x", 3)]
    node.pairs = [("k", 4)]
    assert list(nodes.held(node)) == [node.args, node.kwargs, node.state, 2, 4]


def test_nodes_cannot_be_called_and_compare_by_identity() -> None:
    for make in (
        lambda: Global("os", "system"),
        lambda: Call(CLASS, ()),
        lambda: PersistentId(1),
        Dict,
        lambda: Set([]),
    ):
        assert not callable(make())
        assert make() != make()
