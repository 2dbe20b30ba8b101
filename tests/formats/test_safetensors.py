"""What the metadata of a safetensors file says about its tensors."""

from __future__ import annotations

import json
from typing import Any

from ckptool import Checkpoint, open_checkpoint
from ckptool.checkpoints.parsed import Recorded
from ckptool.checkpoints.weights import NameChanges, Weights, prepare
from ckptool.formats.safetensors import decode, encode
from tests.each import each


def opened(*names: str, **metadata: str) -> Checkpoint:
    header: dict[str, Any] = {"__metadata__": {key.replace("_", "."): text for key, text in metadata.items()}}
    for number, name in enumerate(names):
        header[name] = {"dtype": "U8", "shape": [1], "data_offsets": [number, number + 1]}
    text = json.dumps(header).encode()
    return open_checkpoint(len(text).to_bytes(8, "little") + text + bytes(len(names)))


def weights(checkpoint: Checkpoint) -> Weights:
    return prepare(checkpoint, checkpoint.state_dicts[0], NameChanges())


def test_ties_order_and_facts_are_restored_beside_the_tensors_that_are_in_the_file() -> None:
    modules = '{"":1,"bn":{"version":2,"kind":"x"}}'
    checkpoint = opened("a", "b", c="a", ckptool_order='["c","b","a"]', ckptool_modules=modules, title="b.")

    assert list(checkpoint.tensors) == list(checkpoint.state_dicts[0]) == ["a", "b"]
    found = weights(checkpoint)
    assert list(found.tensors) == ["c", "b", "a"]
    assert found.tensors["c"] is checkpoint.tensors["a"]
    assert found.modules == {"": {"version": 1}, "bn": {"version": 2, "kind": "x"}}
    assert found.texts == (("title", "b."),)


@each("order", ["", "[", '["b"]', '["b","b"]', '["b","a","c"]', "5", '[["b"],"a"]', '{"b":0,"a":1}'])
def test_an_order_of_other_names_is_ignored(order: str) -> None:
    assert list(weights(opened("a", "b", ckptool_order=order)).tensors) == ["a", "b"]


@each("modules", ["", "{", "[]", "NaN", '{"":1,"":2}', '{"":{"version":1,"version":2}}', "[" * 5000, '{"":[]}'])
def test_facts_that_nobody_could_have_written_are_ignored(modules: str) -> None:
    assert weights(opened("a", ckptool_modules=modules)).modules == {}


def test_what_is_encoded_is_decoded() -> None:
    recorded = Recorded(
        {"c": "a"}, ("c", "a", "b"), {"": {"version": 1}, "bn": {"version": 2, "deep": {"x": None}}}, {"title": "tiny"}
    )

    assert decode(encode(recorded), {"a": 0, "b": 0}, None) == recorded
    assert decode(encode(Recorded()), {"a": 0}, None) == Recorded()
