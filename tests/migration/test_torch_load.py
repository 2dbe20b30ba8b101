"""A state dict that is written opens with plain torch.load(): what needs other code is refused, or left out."""

from __future__ import annotations

import argparse
import datetime as dt
import enum
import fractions
import functools
import io
import pathlib
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from ckptool import Changes, check, migrate
from tests.migration.refused import refused
from tests.scale import some


class Colour(enum.Enum):
    RED = 1


class Named(dict[str, Any]):
    pass


class Stateful(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"when": dt.date(2020, 1, 1)}

    def set_extra_state(self, state: Any) -> None:
        del state


class Pair(NamedTuple):
    one: int
    other: int


FOREIGN: dict[str, Any] = {
    "an object": argparse.Namespace(lr=0.1),
    "an object in a dict": {"args": {"deep": argparse.Namespace()}},
    "an object in a list in a tuple": ([1, [argparse.Namespace()]],),
    "a key that is an object": {fractions.Fraction(1, 2): 3},
    "an attribute of a dict": OrderedDict(a=1),
    "a dict of another class": Named(a=1),
    "a named tuple": Pair(1, 2),
    "a class": argparse.Namespace,
    "a function": torch.nn.functional.gelu,
    "a call that is kept": functools.partial(max, 1),
    "an enum": Colour.RED,
    "a number of numpy": np.float64(0.5),
    "an array": np.ones(3),
    "a file in memory": io.BytesIO(b"extra"),
    "a path": pathlib.PurePosixPath("a/b"),
    "a date": dt.date(2020, 1, 1),
    "a slice": slice(1, 2),
    "a set of objects": {fractions.Fraction(1, 2)},
    "a number of 300 digits": 10**700,
    "an object with tensors": argparse.Namespace(t=torch.ones(2)),
}
FOREIGN["an attribute of a dict"].kept = argparse.Namespace()

PLAIN: dict[str, Any] = {
    "numbers": {"a": 1, "b": 0.5, "c": None, "d": True, "e": 2**40, "f": 1j},
    "text and bytes": ["a", b"b", bytearray(b"c")],
    "a set": {1, 2},
    "torch's own": [torch.float16, torch.device("cpu"), torch.Size([1]), torch.ones(2)],
    "a packed pair": (torch.ones(2, 2), None),
}


def saved(folder: Path, odd: Any) -> Path:
    state = nn.Linear(2, 3).state_dict()
    state["odd"] = odd
    torch.save({"model": state, "epoch": 3}, folder / "made.pth")
    return folder / "made.pth"


@pytest.mark.parametrize("what", some(FOREIGN, 3))
def test_entries_that_torch_load_refuses_are_refused_by_name_or_left_out(what: str, tmp_path: Path) -> None:
    source = saved(tmp_path, FOREIGN[what])
    error = refused(source, tmp_path / "new.pth", form="state_dict", kind="unsupported-entries")
    assert error.option == "keep_calls"  # weights, it may be: to keep it comes first
    assert "'odd'" in error.message

    report = migrate(source, tmp_path / "new.pth", form="state_dict", drop_unsupported=True)
    assert "model.odd" in report.dropped
    assert report.after.form == "state_dict"
    found = torch.load(tmp_path / "new.pth", weights_only=True)
    assert list(found) == ["weight", "bias"]
    assert found._metadata[""] == {"version": 1}
    assert not [one for one in check(tmp_path / "new.pth").findings if one.code == "CK202"]

    kept = migrate(source, tmp_path / "kept.pth", form="state_dict", keep_calls=True)
    assert kept.dropped == ("epoch",)
    assert list(torch.load(tmp_path / "kept.pth", weights_only=False)) == ["weight", "bias", "odd"]


@pytest.mark.parametrize("what", PLAIN)
def test_entries_that_torch_load_takes_are_kept(what: str, tmp_path: Path) -> None:
    source = saved(tmp_path, PLAIN[what])
    for changes in (Changes(form="state_dict"), Changes(form="state_dict", drop_unsupported=True)):
        migrate(source, tmp_path / "new.pth", changes, force=True)
        found = torch.load(tmp_path / "new.pth", weights_only=True)
        assert list(found) == ["weight", "bias", "odd"]
        assert same_value(found["odd"], PLAIN[what])


def same_value(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_value, one, other))
    return bool(one == other)


def test_the_extra_state_of_a_whole_model_is_refused_where_torch_load_would(tmp_path: Path) -> None:
    state = nn.Sequential(Stateful(2, 2), nn.Linear(2, 2)).state_dict()
    torch.save(state, tmp_path / "made.pth")
    refused(tmp_path / "made.pth", tmp_path / "new.pth", form="state_dict", match=r"'0\._extra_state' .*datetime\.date")


def test_what_is_excluded_is_not_refused(tmp_path: Path) -> None:
    migrate(saved(tmp_path, argparse.Namespace()), tmp_path / "new.pth", form="state_dict", exclude=["odd"])
    assert list(torch.load(tmp_path / "new.pth")) == ["weight", "bias"]


def test_as_many_entries_as_there_are_can_be_left_out_by_the_command_that_is_advised(tmp_path: Path) -> None:
    state = {f"{place}.{name}": tensor for place in range(40) for name, tensor in nn.Linear(1, 1).state_dict().items()}
    state |= {f"{place}._extra_state": io.BytesIO(b"x") for place in range(40)}  # as Transformer Engine once did
    torch.save(state, tmp_path / "made.pth")
    (finding,) = [one for one in check(tmp_path / "made.pth").findings if one.code == "CK202"]
    assert (finding.command or "").endswith("--form state_dict --drop-unsupported")
    assert "0._extra_state" in (finding.hint or "")


def test_a_model_is_built_of_tensors_and_the_report_says_what_else_there_was(tmp_path: Path) -> None:
    torch.save({**nn.Linear(2, 3).state_dict(), "note": 3}, tmp_path / "made.pth")
    options = {"in_features": 2, "out_features": 3}
    report = migrate(
        tmp_path / "made.pth", tmp_path / "new.pth", key="", model="torch.nn:Linear", model_arguments=options
    )
    assert report.dropped == ("note",)
