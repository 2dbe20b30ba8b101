"""Small dicts that share their keys say what those with pairs of their own say."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from ckptool.pickles.fields import FieldNames, Fields
from ckptool.pickles.nodes import Dict, Inert
from ckptool.pickles.reader import read_pickle
from ckptool.sources.source import BytesSource


def read(value: object, *, shared: bool) -> list[list[tuple[Inert, Inert]]]:
    source = BytesSource(pickle.dumps(value, protocol=2))
    root = read_pickle(source, field_names=FieldNames() if shared else None).root
    return [list(one.pairs) for one in root]


@pytest.mark.parametrize(
    "dicts",
    [
        [{"a": 1, "b": 2}, {"a": 3, "b": 4}, {"b": 5, "a": 6}],
        [{str(key): key for key in range(count)} for count in range(2, 40)],
        [{f"{number}a": 1, f"{number}b": 2} for number in range(40)],
        [{1: 1, "b": 2}, {True: 1, "b": 2}, {(1, 2): 3, None: 4}, {"1": 1, "b": 2}],
    ],
)
def test_nothing_reads_otherwise(dicts: list[dict[Any, Any]]) -> None:
    assert read(dicts, shared=True) == read(dicts, shared=False) == [list(one.items()) for one in dicts]


def test_equal_keys_are_held_once() -> None:
    root = read_pickle(BytesSource(pickle.dumps([{"a": n, "b": n} for n in range(3)])), field_names=FieldNames()).root
    pairs = [one.pairs for one in root]

    assert all(type(one) is Fields for one in pairs)
    assert len({id(one._names) for one in pairs}) == 1


def test_it_is_a_sequence_of_pairs() -> None:
    pairs = FieldNames().pairs(["a", 1, "b", 2])

    assert pairs is not None
    assert (len(pairs), pairs[0], pairs[-1:], list(reversed(pairs))) == (
        2,
        ("a", 1),
        [("b", 2)],
        [("b", 2), ("a", 1)],
    )


def test_a_dict_that_is_added_to_has_all() -> None:
    own = FieldNames().pairs(["a", 1, "b", 2])
    assert own is not None
    grown = Dict(own)
    grown.update([("a", 3)])

    assert list(grown.pairs) == [("a", 1), ("b", 2), ("a", 3)]
