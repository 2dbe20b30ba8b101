"""What the metadata of a safetensors file says about its tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import ckptool
from tests.each import each


def file(*names: str, **metadata: str) -> bytes:
    header: dict[str, Any] = {"__metadata__": {key.replace("_", "."): text for key, text in metadata.items()}}
    for number, name in enumerate(names):
        header[name] = {"dtype": "U8", "shape": [1], "data_offsets": [number, number + 1]}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(range(len(names)))


def test_ties_order_and_facts_are_restored_beside_the_tensors_that_are_in_the_file(tmp_path: Path) -> None:
    modules = '{"":1,"bn":{"version":2,"kind":"x"}}'
    (tmp_path / "x.safetensors").write_bytes(
        file("a", "b", c="a", ckptool_order='["c","b","a"]', ckptool_modules=modules, title="b.")
    )

    with ckptool.open_checkpoint(tmp_path / "x.safetensors") as checkpoint:
        assert list(checkpoint.tensors) == list(checkpoint.state_dicts[0]) == ["a", "b"]
    report = ckptool.migrate(tmp_path / "x.safetensors", tmp_path / "x.pth")
    found = torch.load(tmp_path / "x.pth")
    assert list(found) == list(ckptool.load(tmp_path / "x.safetensors")) == ["c", "b", "a"]
    assert found["c"].data_ptr() == found["a"].data_ptr()
    assert found._metadata == {"": {"version": 1}, "bn": {"version": 2, "kind": "x"}}
    assert report.dropped == ("__metadata__.title",)


@each("order", ["", "[", '["b"]', '["b","b"]', '["b","a","c"]', "5", '[["b"],"a"]', '{"b":0,"a":1}'])
def test_an_order_of_other_names_is_ignored(order: str) -> None:
    assert list(ckptool.load(file("a", "b", ckptool_order=order))) == ["a", "b"]


@each("modules", ["", "{", "[]", "NaN", '{"":1,"":2}', '{"":{"version":1,"version":2}}', "[" * 5000, '{"":[]}'])
def test_facts_that_nobody_could_have_written_are_ignored(modules: str, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(file("a", ckptool_modules=modules))
    ckptool.migrate(tmp_path / "x.safetensors", tmp_path / "x.pth")
    assert not getattr(torch.load(tmp_path / "x.pth"), "_metadata", None)
