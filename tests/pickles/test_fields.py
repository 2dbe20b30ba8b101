"""Small dicts that share their keys say what those with pairs of their own say."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from ckptool.pickles.nodes import FieldNames, Inert
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
