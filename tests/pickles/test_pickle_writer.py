"""Whatever pickle writes comes back equal out of ``read_pickle`` and ``write_pickle``, and what is shared still is."""

from __future__ import annotations

import copyreg
import io
import math
import pickle
import pickletools
import zipfile
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typing_extensions import Self

from ckptool import Global
from ckptool.errors import MigrationRefused
from ckptool.pickles.nodes import Call, Dict, PlainTensor, Set, children, is_container
from ckptool.pickles.reader import read_pickle
from ckptool.pickles.writer import write_pickle
from ckptool.sources.source import BytesSource
from tests import build
from tests.each import each
from tests.scale import examples, in_turn

PROTOCOLS = range(6)


class Plain:
    """An object with attributes."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Slots:
    """An object whose state is a pair: attributes and slots."""

    __slots__ = ("__dict__", "x")


class Keywords:
    """Made by ``NEWOBJ_EX``."""

    seen: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        made = super().__new__(cls)
        made.seen = (args, kwargs)
        return made

    def __getnewargs_ex__(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self.seen

    class Inside:
        """A class with a dot in its name."""


class Items(list[Any]):
    """A list with attributes."""


class Table(dict[Any, Any]):
    """A dict with attributes."""


def again(data: bytes) -> bytes:
    return write_pickle(read_pickle(BytesSource(data)).root)


def round_trip(value: Any, protocol: int) -> Any:
    return pickle.loads(again(pickle.dumps(value, protocol)))


def shape_of(value: Any, seen: dict[int, int] | None = None) -> Any:
    """Return what a value is, down to its leaves, with a number where an object was met before."""
    seen = {} if seen is None else seen
    if value is None or isinstance(value, bool | int | str | type | bytes):
        return type(value).__name__, value
    if isinstance(value, float):
        return "float", "nan" if math.isnan(value) else value.hex()
    if isinstance(value, tuple) and not value:
        return ()
    if id(value) in seen:
        return "again", seen[id(value)]
    seen[id(value)] = len(seen)
    found: list[Any] = [type(value).__name__]
    if isinstance(value, bytearray):
        found.append(bytes(value))
    if isinstance(value, list | tuple | deque):
        found += [shape_of(item, seen) for item in value]
    if isinstance(value, set | frozenset):  # an order would be somebody's choice
        found += (
            sorted((shape_of(item, seen) for item in value), key=repr) if all(map(is_leaf, value)) else [len(value)]
        )
    if isinstance(value, dict):
        found += [(shape_of(key, seen), shape_of(item, seen)) for key, item in value.items()]
    if hasattr(value, "__dict__"):
        found.append([(key, shape_of(item, seen)) for key, item in value.__dict__.items()])
    if isinstance(value, Slots):
        found.append(shape_of(value.x, seen))
    return found


def is_leaf(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | str | float | bytes)


TEXTS = st.text(max_size=12) | st.sampled_from(["\n", "\\u0000", "ü", "\ud800", "a" * 300, "storage"])
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | TEXTS
    | st.binary(max_size=300)
    | st.sampled_from([int, Plain])
)
HASHABLE = st.recursive(LEAVES, lambda inside: st.lists(inside, max_size=4).map(tuple), max_leaves=8)


@st.composite
def graphs(draw: st.DrawFn, *, plain: bool = False) -> Any:
    """Return objects of many kinds that refer to one another, back and forth."""
    made: list[Any] = [draw(LEAVES), draw(HASHABLE)]
    for _ in range(draw(st.integers(1, 10))):
        refer = st.sampled_from(range(len(made))).map(made.__getitem__)
        many = draw(st.lists(refer, max_size=5))
        kinds = [
            "list",
            "tuple",
            "dict",
            "ordered",
            "plain",
            "bytearray",
            *([] if plain else ["slots", "items", "table"]),
        ]
        kind = draw(st.sampled_from(kinds))
        pairs = {f"k{number}": item for number, item in enumerate(many)}
        made.append(_object(kind, many, pairs))
    for _ in range(draw(st.integers(0, 3))):  # and back: what was made early gets what was made late
        holder, held = draw(st.sampled_from(made)), draw(st.sampled_from(made))
        if isinstance(holder, list):
            holder.append(held)
        elif isinstance(holder, dict):
            holder["back"] = held
        elif isinstance(holder, Plain):
            holder.back = held  # type: ignore[attr-defined]
    return made


def _object(kind: str, many: list[Any], pairs: dict[str, Any]) -> Any:
    if kind in ("list", "tuple"):
        return list(many) if kind == "list" else tuple(many)
    if kind == "bytearray":
        return bytearray(b"ab" * len(many))
    if kind == "slots":
        made = Slots()
        made.x, made.__dict__ = many, dict(pairs)
        return made
    if kind == "items":
        items = Items(many)
        items.__dict__.update(pairs)
        return items
    return {"dict": dict, "ordered": OrderedDict, "table": Table}.get(kind, lambda pairs: Plain(**pairs))(pairs)


# Protocols 0 and 1 know no slots, and make a list of a class from its items, so that none can lead back to it.
GRAPHS = st.tuples(graphs(), st.sampled_from(PROTOCOLS[2:])) | st.tuples(
    graphs(plain=True), st.sampled_from(PROTOCOLS[:2])
)


@settings(max_examples=examples(80))
@given(GRAPHS)
def test_any_graph_of_objects_comes_back_with_what_is_shared_and_recursive(given: tuple[Any, int]) -> None:
    assert shape_of(round_trip(*given)) == shape_of(pickle.loads(pickle.dumps(*given)))


KEYS = HASHABLE.filter(lambda key: key == key)
DATA = (
    HASHABLE | st.dictionaries(KEYS, LEAVES, max_size=4) | st.sets(KEYS, max_size=4) | st.frozensets(KEYS, max_size=4)
)


@settings(max_examples=examples(150))
@given(DATA, st.sampled_from(PROTOCOLS), st.sampled_from([pickle.dumps, pickle._dumps]))  # type: ignore[attr-defined]
@example(b"\x00\xff" * 200, 5, pickle.dumps)
@example(bytearray(b"\x00\xff"), 5, pickle.dumps)
@example({b"key": "\ud800"}, 0, pickle.dumps)
def test_any_plain_data_comes_back(value: Any, protocol: int, dumps: Callable[[Any, int], bytes]) -> None:
    found, expected = pickle.loads(again(dumps(value, protocol))), pickle.loads(dumps(value, protocol))

    assert shape_of(found) == shape_of(expected)
    assert repr(found) == repr(expected) or isinstance(found, set | frozenset)  # an order would be somebody's choice


@settings(max_examples=examples(50))
@given(graphs(), st.sampled_from(PROTOCOLS[2:]))
def test_what_was_written_is_written_again_byte_for_byte(value: Any, protocol: int) -> None:
    # Protocol 2 has no bytes: once, they become the call that makes them.
    written = again(again(pickle.dumps(value, protocol)))

    assert again(written) == written


@pytest.mark.parametrize("protocol", PROTOCOLS[:2])
@pytest.mark.parametrize("made", [Items, Table])
def test_items_that_lead_back_to_what_is_made_of_them_are_refused(made: type, protocol: int) -> None:
    # The oldest protocols make a list or dict of a class from a copy of its items: no order of words can say this.
    value, holder = made(), Plain()
    holder.back = value  # type: ignore[attr-defined]
    if isinstance(value, list):
        value.append(holder)
    else:
        value["holder"] = holder
    with pytest.raises(MigrationRefused) as caught:
        round_trip(value, protocol)

    assert caught.value.kind == "unsupported-cycle"
    assert shape_of(round_trip(value, 2)) == shape_of(value)


OBJECTS: dict[str, Any] = {
    "a set": {1, 2, "three"},
    "a frozenset": frozenset({(1, 2), "x"}),
    "a defaultdict": defaultdict(list, {"a": [1]}),
    "a counter": Counter("abca"),
    "a deque": deque([1, 2, 3], maxlen=5),
    "a complex number": 3 - 4j,
    "a range": range(3, 9, 2),
    "a path": Path("a/b"),
    "a nested class": Keywords.Inside,
    "a builtin": len,
    "a slice": slice(1, None, 2),
    "lists": [[f"{number}" for number in range(count)] for count in (0, 1, 255, 256, 257, 999, 1000, 1001, 2500)],
    "tuples": [tuple(range(count)) for count in (0, 1, 2, 3, 4, 255, 256, 257, 1001)],
    "numbers": [side * (1 << bits) - off for bits in (8, 16, 31, 63, 2040, 3000) for off in (0, 1) for side in (1, -1)],
    "floats": [-0.0, 5e-324, float("inf"), 1e300],
    "a long dict": {number: str(number) for number in range(2500)},
    "a long set": set(range(2500)),
    "NotImplemented and Ellipsis": [NotImplemented, ...],
}


@each(("protocol", "what"), in_turn(PROTOCOLS, OBJECTS))
def test_what_python_has_of_its_own_comes_back(what: str, protocol: int) -> None:
    value = OBJECTS[what]
    try:
        data = pickle.dumps(value, protocol)
    except (pickle.PicklingError, TypeError, AttributeError):
        pytest.skip("pickle itself cannot write it in this protocol")

    found = pickle.loads(again(data))

    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_keyword_arguments_of_a_constructor_come_back(protocol: int) -> None:
    value = Keywords(1, [2], name="three")

    found = round_trip([value, value], protocol)

    assert found[0] is found[1]
    assert found[0].seen == ((1, [2]), {"name": "three"})


@each("protocol", PROTOCOLS)
@each("count", [1, 3, 5])
def test_a_tuple_that_holds_itself_stays_one_object(protocol: int, count: int) -> None:
    box: list[Any] = []
    value = (box, *range(1, count))
    box.append(value)

    found = round_trip([value, value], protocol)

    assert found[0] is found[1]
    assert found[0][0][0] is found[0]


@pytest.mark.parametrize("protocol", [4, 5])
def test_a_frozenset_that_an_item_leads_back_to_stays_one_object(protocol: int) -> None:
    item = Plain()
    value = frozenset({item})
    item.__dict__["home"] = value

    found, after, last = round_trip([value, ["after"], value], protocol)

    (inside,) = found
    assert inside.home is found is last
    assert after == ["after"]


def test_a_class_of_python_2_comes_back_under_its_new_name_where_protocol_4_is_needed() -> None:
    old = Call(Global("copy_reg", "_reconstructor"), (Global(__name__, "Plain"), Global("__builtin__", "object"), None))

    found = pickle.loads(write_pickle([old, Set([1], frozen=True)]))

    assert type(found[0]) is Plain
    assert found[1] == frozenset({1})


@pytest.mark.parametrize("name", ["Klasse_ü", "名", "a.b", "a\nb", "\ud800", "a b"])
def test_any_name_that_a_pickle_can_ask_for_comes_back(name: str) -> None:
    read = read_pickle(BytesSource(write_pickle([Global("ünter", name), Global("ünter", name)])))

    assert [(one.module, one.name) for one in read.root] == [("ünter", name)] * 2
    assert len(read.globals) == 1


def test_a_node_that_is_replaced_is_replaced_wherever_it_stands() -> None:
    old, other = Dict([("a", 1)]), Dict([("b", 2)])

    data = write_pickle([old, (old,), old], lambda node: other if node is old else node)

    found = pickle.loads(data)
    assert found == [{"b": 2}, ({"b": 2},), {"b": 2}]
    assert found[0] is found[1][0] is found[2]


class Recorder(pickle.Unpickler):
    """Shows what a pickle would call, without calling it."""

    def find_class(self, module: str, name: str) -> Any:
        return lambda *args: [f"{module}.{name}", *args]

    def persistent_load(self, pid: Any) -> Any:
        return ["stored", *(part()[0] if callable(part) else part for part in pid)]


SIZES = [(), (0,), (7,), (255, 256), (1, 65_535, 65_536), (2, 3, 4, 5), (1 << 31, 1 << 40, *range(5)), (1 << 62,)]


@pytest.mark.parametrize("beside", [[], [{1, 2}]], ids=["protocol 2", "protocol 4"])
def test_a_plain_tensor_is_written_as_torch_calls_it(beside: list[Any]) -> None:
    tensors = [
        PlainTensor(Global("torch", cls), key, location, sum(shape), offset, shape, shape[::-1], number % 2 == 0)
        for cls, location in (("FloatStorage", "cpu"), ("LongStorage", "cpu"), ("FloatStorage", "cuda:0"))
        for number, (shape, offset, key) in enumerate(
            zip(SIZES, (0, 1, 255, 256, 65_535, 65_536, 1 << 31, 1 << 62), ("0", "cpu", "ü", *"12345"), strict=True)
        )
    ]

    data = write_pickle([*tensors, "cpu", "0", *(Set(list(one)) for one in beside), tensors[3]])

    assert data[1] == (4 if beside else 2)
    for word in (b"_rebuild_tensor_v2", b"FloatStorage", b"OrderedDict", b"cuda:0"):
        assert data.count(word) == 1, word  # and is referred to from then on
    found = Recorder(io.BytesIO(data)).load()
    for made, said in zip(found, tensors, strict=False):
        stored = ["stored", "storage", f"torch.{said.cls.name}", said.key, said.location, said.numel]
        facts = [stored, said.offset, said.shape, said.stride, said.requires_grad, ["collections.OrderedDict"]]
        assert made == ["torch._utils._rebuild_tensor_v2", *facts]
    assert len({id(made[-1]) for made in found[: len(tensors)]}) == len(tensors)  # hooks are each tensor's own
    assert found[len(tensors) : len(tensors) + 2] == ["cpu", "0"]
    assert found[-1] is found[3]


@pytest.mark.parametrize(
    ("value", "protocol"),
    [([1, "a", (), {"x": 2.5}, None, True], 2), ({1, 2}, 4), ([frozenset({1})], 4), (Keywords.Inside, 4)],
)
def test_the_oldest_protocol_that_can_say_it_is_written(value: Any, protocol: int) -> None:
    data = again(pickle.dumps(value, 5))

    assert data[:2] == bytes([0x80, protocol])
    assert max(op.proto for op, _, _ in pickletools.genops(data)) <= protocol


# torch's own pickles


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(2, 3)
        self.b = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Dropout())
        self.tied = self.a


CONTENTS: dict[str, Callable[[], Any]] = {
    "state_dict": lambda: Net().state_dict(),
    "checkpoint": lambda: {
        "model": Net().state_dict(),
        "epoch": 3,
        "optimizer": torch.optim.Adam(Net().parameters()).state_dict(),
    },
    "model": Net,
}


@each(("what", "protocol"), in_turn(CONTENTS, range(2, 6)))
def test_a_pickle_of_torch_asks_for_the_same_and_says_the_same(what: str, protocol: int) -> None:
    stream = io.BytesIO()
    torch.save(CONTENTS[what](), stream, pickle_protocol=protocol)
    data = zipfile.ZipFile(stream).read("archive/data.pkl")

    written = again(data)

    before, after = read_pickle(BytesSource(data)), read_pickle(BytesSource(written))
    assert facts(after.root) == facts(before.root)
    assert list(map(str, after.globals)) == list(map(str, before.globals))


def facts(node: Any, seen: dict[int, int] | None = None) -> Any:
    """Return what an inert tree says, with a number where a node was met before."""
    seen = {} if seen is None else seen
    if isinstance(node, Global):
        return str(node)
    if not is_container(node) or node == ():
        return node
    if id(node) in seen:
        return "again", seen[id(node)]
    seen[id(node)] = len(seen)
    if isinstance(node, Call):
        return (
            node.how,
            *(facts(part, seen) for part in (node.func, node.args, node.kwargs, node.state)),
            *(facts(part, seen) for part in (node.items, node.pairs)),
        )
    return type(node).__name__, [(facts(key, seen), facts(child, seen)) for key, child in children(node)]


def test_the_extension_registry_is_never_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(copyreg._extension_registry, (__name__, "Plain"), 240)  # type: ignore[attr-defined]

    assert again(build.pickled([build.named(__name__, "Plain")])).count(b"Plain") == 1
