"""Plain data that Python's pickle module writes, at any protocol, means the same to the interpreter."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from math import isnan
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool import Global
from ckptool.pickles.nodes import Call, Dict, Set
from ckptool.pickles.reader import read_pickle
from ckptool.sources.source import BytesSource
from tests.scale import examples, in_turn

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)

# What older protocols call to make what newer ones have opcodes for.
MAKERS: dict[str, Callable[..., Any]] = {
    "_codecs.encode": lambda text, encoding: text.encode(encoding),
    "builtins.bytes": bytes,
    "builtins.bytearray": lambda data=b"", encoding=None: bytearray(data.encode(encoding) if encoding else data),
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "builtins.complex": complex,
}


def to_plain(node: Any, known: dict[int, Any] | None = None) -> Any:
    """Turn a tree of nodes into the data it stands for; one node becomes one object, also where it holds itself."""
    known = {} if known is None else known
    if id(node) in known:
        return known[id(node)]
    if isinstance(node, list):
        plain = known[id(node)] = []
        plain.extend(to_plain(item, known) for item in node)
    elif isinstance(node, Dict):
        plain = known[id(node)] = {}
        plain.update((to_plain(key, known), to_plain(value, known)) for key, value in node.pairs)
    elif isinstance(node, Set):
        plain = (frozenset if node.frozen else set)(to_plain(item, known) for item in node.items)
    elif isinstance(node, tuple):
        plain = tuple(to_plain(item, known) for item in node)
    elif isinstance(node, Call):
        assert isinstance(node.func, Global)
        assert (node.state, node.items, node.pairs, node.kwargs) == (None, None, None, None)
        name = str(node.func).replace("__builtin__", "builtins")
        plain = MAKERS[name](*to_plain(node.args, known))
    else:
        return node
    return known.setdefault(id(node), plain)


def assert_same(found: Any, expected: Any, pairs: dict[int, int] | None = None) -> None:
    """Fail unless two trees have equal values of equal types, and share containers in the same places."""
    pairs = {} if pairs is None else pairs
    assert type(found) is type(expected)
    if isinstance(expected, float):
        assert struct.pack("<d", found) == struct.pack("<d", expected) or (isnan(found) and isnan(expected))
    elif isinstance(expected, list | dict | tuple):
        if id(expected) in pairs:
            # Python itself may make one empty tuple of many.
            assert expected == () or pairs[id(expected)] == id(found)
            return
        pairs[id(expected)] = id(found)
        assert len(found) == len(expected)
        for left, right in zip(found, expected, strict=True):
            assert_same(left, right, pairs)
        if isinstance(expected, dict):
            for left, right in zip(found.values(), expected.values(), strict=True):
                assert_same(left, right, pairs)
    else:
        assert found == expected


def read(data: bytes) -> Any:
    pickled = read_pickle(BytesSource(data))
    assert pickled.end == len(data)
    return to_plain(pickled.root)


integers = (
    st.integers()
    | st.integers(-(1 << 3000), 1 << 3000)
    | st.sampled_from([255, 256, 65_535, 65_536, 1 << 31, -(1 << 31)])
)
texts = (
    st.text()
    | st.text(st.characters())
    | st.sampled_from(["\ud800", "a\ndc\udc80", "\\u0041\\", "\0\x1a\r\n", "é" * 300])
)
leaves = (
    st.none()
    | st.booleans()
    | integers
    | st.floats(allow_nan=False)
    | texts
    | st.binary()
    | st.sampled_from([b"a" * 300, bytearray(b"b" * 300), float("nan"), float("-inf"), -0.0, 5e-324, 1j])
    | st.binary().map(bytearray)
)
keys = st.recursive(
    st.none() | st.booleans() | integers | st.floats(allow_nan=False) | texts | st.binary(),
    lambda inner: st.lists(inner, max_size=4).map(tuple) | st.frozensets(inner, max_size=4),
    max_leaves=6,
)
values = st.recursive(
    leaves | st.sets(keys, max_size=4) | st.frozensets(keys, max_size=4),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(keys, inner, max_size=5)
        | inner.map(lambda value: [value, value])
        | inner.map(lambda value: {"a": value, "b": (value, value)})
    ),
    max_leaves=20,
)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@settings(max_examples=examples(150))
@given(values)
def test_what_pickle_writes_is_read_unchanged(protocol: int, value: Any) -> None:
    assert_same(read(pickle.dumps(value, protocol)), value)


def entangle(spine: list[Any], links: list[tuple[int, int]]) -> list[Any]:
    """Hang containers of ``spine`` into each other, which may make circles."""
    for holder, held in links:
        outer, inner = spine[holder % len(spine)], spine[held % len(spine)]
        if isinstance(outer, list):
            outer.append(inner)
        elif isinstance(outer, dict):
            outer[len(outer)] = inner
        else:
            outer[0].append(inner)  # the list inside a tuple
    return spine


@pytest.mark.parametrize("protocol", PROTOCOLS)
@given(
    st.lists(st.sampled_from(["list", "dict", "tuple"]), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12),
)
def test_references_that_run_in_circles_still_do(protocol: int, kinds: list[str], links: list[tuple[int, int]]) -> None:
    makers: dict[str, Callable[[], Any]] = {"list": list, "dict": dict, "tuple": lambda: ([], "end")}
    spine = entangle([makers[kind]() for kind in kinds], links)

    assert_same(read(pickle.dumps(spine, protocol)), spine)


@pytest.mark.parametrize(
    ("protocol", "count"), in_turn(PROTOCOLS, [0, 1, 2, 3, 4, 255, 256, 257, 999, 1000, 1001, 2001])
)
def test_containers_of_every_length_are_read(protocol: int, count: int) -> None:
    items = [f"item {number}" for number in range(count)]
    for value in (
        items,
        tuple(items),
        dict.fromkeys(items, 1),
        set(items),
        frozenset(items),
        [[item] for item in items],
    ):
        assert_same(read(pickle.dumps(value, protocol)), value)


@given(st.dictionaries(st.text(max_size=8), st.lists(st.integers(-(1 << 70), 1 << 70) | texts, max_size=5), max_size=5))
def test_the_pure_python_pickler_writes_nothing_else(value: Any) -> None:
    for protocol in PROTOCOLS:
        assert_same(read(pickle._dumps(value, protocol)), value)  # type: ignore[attr-defined]
