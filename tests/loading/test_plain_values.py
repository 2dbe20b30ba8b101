"""Entries that are not tensors: all that torch.load() makes by default is made, and the rest is said to be missing."""

from __future__ import annotations

import argparse
import collections
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptool
from tests.scale import in_turn


class Noted(nn.Linear):
    """A layer with a state of its own, as Transformer Engine's have."""

    note: Any = None

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


VALUES: dict[str, Any] = {
    "bytes": bytes(range(256)) * 3,
    "no bytes": b"",
    "changeable bytes": bytearray(b"\x00\xff"),
    "a complex number": 1 - 2j,
    "a set": {1, "two", b"three", None},
    "an empty set": set(),
    "bytes as keys": {b"a": 1},
    "a counter": collections.Counter("aab"),
    "a size": torch.Size([2, 3]),
    "a device": torch.device("cuda:1"),
    "a device without a number": torch.device("cpu"),
    "an element type": torch.bfloat16,
    "a layout": torch.sparse_coo,
    "all in one": {"a": [(b"x", {2}), {"b": torch.Size([]), "c": torch.ones(2)}]},
}


def same(one: Any, other: Any) -> bool:
    if isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(other, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in other)
    if isinstance(other, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


@pytest.mark.parametrize(("zipped", "what"), in_turn([True, False], VALUES))
def test_what_torch_load_makes_by_default_is_made(what: str, zipped: bool, tmp_path: Path) -> None:
    model = Noted(2, 2)
    model.note = VALUES[what]
    torch.save(model.state_dict(), tmp_path / "made.pth", _use_new_zipfile_serialization=zipped)
    real = torch.load(tmp_path / "made.pth", weights_only=what != "no bytes")
    found = ckptool.load(tmp_path / "made.pth")
    assert list(found) == list(real)
    assert same(found["_extra_state"], dict(real)["_extra_state"])
    filled = Noted(2, 2)
    ckptool.load_into(filled, tmp_path / "made.pth")
    assert same(filled.note, VALUES[what])


def test_what_only_code_could_make_is_named_where_the_model_needs_it(tmp_path: Path) -> None:
    model = Noted(2, 2)
    model.note = argparse.Namespace()
    torch.save(model.state_dict(), tmp_path / "made.pth")
    with pytest.raises(ckptool.KeyMismatch) as caught:
        ckptool.load_into(Noted(2, 2), tmp_path / "made.pth")
    assert caught.value.missing == ("_extra_state",)
    assert "The file has _extra_state, but only code could make what it holds." in (caught.value.hint or "")


@pytest.mark.parametrize("kind", ["in a dict", "alone"])
def test_a_bare_storage_is_not_left_out_in_silence(kind: str, tmp_path: Path) -> None:
    storage = torch.arange(3.0).untyped_storage()
    torch.save({"w": torch.ones(2), "s": storage if kind == "alone" else {"a": storage}}, tmp_path / "made.pth")
    with pytest.raises(ckptool.IncompleteWeights, match="'s' holds tensors"):
        ckptool.load(tmp_path / "made.pth", key="")
