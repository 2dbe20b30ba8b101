"""Calls that reach the system never go along unasked, and what else would be called is listed."""

from __future__ import annotations

import gzip
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptool import check, migrate
from tests.build import call, floats, legacy, named, raw, storage, tensor, torch_zip
from tests.each import each
from tests.migration.refused import refused
from tests.program import invoke


class Calls:
    """An object whose pickle calls a function of ``os``."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return getattr(os, self.name), ("true",)


SYSTEM = call(named("os", "system"), "true")
NAMESPACE = call(named("argparse", "Namespace"))


@pytest.fixture(params=["zip", "legacy"])
def evil(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "evil.pth"
    if request.param == "zip":
        data = torch_zip({"model": {"w": tensor(storage())}, "x": SYSTEM, "args": NAMESPACE}, {"0": floats()})
    else:
        tree = {"model": {"w": tensor(storage(rest=(None,)))}, "x": SYSTEM, "args": NAMESPACE}
        data = legacy(tree, [("0", 4, floats())])
    path.write_bytes(data)
    return path


def calls(path: Path) -> set[str]:
    return {act.name for act in check(path).acts if act.how != "refers"}


def test_they_are_refused_with_the_ways_out(evil: Path, tmp_path: Path) -> None:
    error = refused(evil, tmp_path / "new.pth", form="same", kind="kept-calls")

    assert "would call os.system('true'), which runs commands or programs" in error.message
    done = invoke(["migrate", str(evil), str(tmp_path / "new.pth"), "--form", "same"])
    assert done.exit_code == 1
    assert "--keep-calls" in done.output
    assert "--form state_dict" in done.output


def test_each_way_out_works(evil: Path, tmp_path: Path) -> None:
    migrate(evil, tmp_path / "a.pth", form="state_dict")
    migrate(evil, tmp_path / "b.safetensors")
    report = migrate(evil, tmp_path / "c.pth", form="same", drop=["x"])
    assert calls(tmp_path / "a.pth") == calls(tmp_path / "b.safetensors") == set()
    assert calls(tmp_path / "c.pth") == {"argparse.Namespace"} == set(report.calls)
    assert "calls        argparse.Namespace" in str(report)

    kept = migrate(evil, tmp_path / "d.pth", form="same", keep_calls=True)
    assert calls(tmp_path / "d.pth") == {"os.system", "argparse.Namespace"} == set(kept.calls)


@each(("nested", "form"), [(True, "same"), (False, "same"), (True, "state_dict"), (False, "state_dict")])
def test_a_call_that_is_an_entry_of_the_weights_goes_with_them_only_if_asked(
    nested: bool, form: Any, tmp_path: Path
) -> None:
    weights = {"layer.w": tensor(storage()), "layer._extra_state": SYSTEM}
    (tmp_path / "a.pth").write_bytes(torch_zip({"model": weights, "epoch": 1} if nested else weights, {"0": floats()}))
    new, name = tmp_path / "new.pth", f"{'model.' if nested else ''}layer._extra_state"
    kind = "kept-calls" if form == "same" else "unsupported-entries"
    refused(tmp_path / "a.pth", new, form=form, kind=kind, match=r"os\.system")

    assert migrate(tmp_path / "a.pth", new, form=form, keep_calls=True).calls == ("os.system",)
    without: Any = {"drop": [name]} if form == "same" else {"drop_unsupported": True}
    assert migrate(tmp_path / "a.pth", new, form=form, force=True, **without).calls == ()
    assert calls(new) == set()


def test_streams_inside_the_pickle_are_looked_into(tmp_path: Path) -> None:
    inner = call(named("torch.storage", "_load_from_bytes"), raw(legacy(SYSTEM)))
    (tmp_path / "a.pth").write_bytes(torch_zip({"w": tensor(storage()), "x": inner}, {"0": floats()}))
    refused(tmp_path / "a.pth", tmp_path / "b.pth", form="same", match=r"_load_from_bytes.* and 1 call more")


@pytest.mark.parametrize("packed", [False, True])
def test_bytes_that_are_a_pickle_are_looked_into_as_check_does(packed: bool, tmp_path: Path) -> None:
    plain = {"model": {"w": torch.ones(2)}, "state": b"\x80 but no pickle"}
    torch.save(plain, tmp_path / "plain.pth")
    assert migrate(tmp_path / "plain.pth", tmp_path / "b.pth", form="same").calls == ()
    inside = pickle.dumps(Calls("system"), protocol=2)
    evil = plain | {"state": gzip.compress(inside) if packed else inside}
    torch.save(evil, tmp_path / "evil.pth")
    assert calls(tmp_path / "evil.pth") == {f"{os.name}.system"}
    refused(tmp_path / "evil.pth", tmp_path / "b.pth", form="same", force=True, match=r"system\('true'\)")
    kept = migrate(tmp_path / "evil.pth", tmp_path / "b.pth", form="same", keep_calls=True, force=True)
    assert set(kept.calls) == calls(tmp_path / "b.pth")
