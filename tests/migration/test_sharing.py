"""What a tree holds more than once stays one object, and what it holds once costs no note in the memo."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptool import migrate
from tests import build
from tests.build import call, named
from tests.each import each
from tests.migration.test_round_trips import loaded


def shapes() -> dict[str, Any]:
    inner: list[Any] = []
    ring: list[Any] = [1]
    ring.append((ring, {"ring": ring}))
    data = b"\xff" * 400
    key = (1, frozenset({2}))
    return {
        "twice": [inner, inner, {"a": inner}],
        "once": [[], [], {}, (1, [2]), {"a": {}, "b": [()]}],
        "ring": ring,
        "bytes": [data, data],
        "many": [[number] for number in range(400)] * 2,
        "key": {key: key, "other": [key]},
        "set": [frozenset({1}), {2}],
        "long": [inner, "x" * 300_000, inner],
    }


def ties(value: Any) -> list[Any]:
    """Return a nested value as a list of what is in it, where what was met before is its number."""
    known: dict[int, int] = {}
    found: list[Any] = []
    todo = [value]
    while todo:
        one = todo.pop()
        if isinstance(one, (list, tuple, dict, bytes)) and one:
            if id(one) in known:
                found.append(("again", known[id(one)]))
                continue
            known[id(one)] = len(known)
            found.append((type(one), len(one)))
            todo += [] if isinstance(one, bytes) else [*one.items()] if isinstance(one, dict) else [*one]
        else:
            found.append(one)
    return found


SAVED = [pickle.dumps(shape, protocol) for shape in shapes().values() for protocol in (0, 2, 3, 4, 5)]
OF_OTHERS = [
    b"\x80\2](]2e.",
    b"\x80\2](]r\xff\xff\xff\0j\xff\xff\xff\0e.",
    b"](]p7\ng7\ne.",
    b"](]p7\ng+7 \ne.",
    b"\x80\4]\x94(](N2\x94h\0e.",
    b"\x80\2](]q\1h\1]q\1h\1e.",
    b"\x80\4](]q\1h\1]q\7]q\2]\x94h\2h\7h\1e.",
    b"\x80\4](" + call(named("collections", "OrderedDict")) + b"\x94h\0" + b"e.",
]


@each("data", [*SAVED, *OF_OTHERS])
def test_what_is_written_again_has_the_same_ties(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.pkl").write_bytes(data)
    migrate(tmp_path / "a.pkl", tmp_path / "b.pth", form="same")

    assert ties(torch.load(tmp_path / "b.pth", weights_only=False)) == ties(pickle.loads(data))


def test_a_file_of_small_values_stays_as_small(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "lists": [[] for _ in range(2000)]}, tmp_path / "a.pth")
    migrate(tmp_path / "a.pth", tmp_path / "b.pth", form="same")
    loaded = torch.load(tmp_path / "b.pth", weights_only=True)
    assert len({id(one) for one in loaded["lists"]}) == 2000
    assert (tmp_path / "b.pth").stat().st_size < 4000


def test_objects_that_are_met_again_stay_one(tmp_path: Path) -> None:
    state = {"model": torch.nn.Linear(2, 2), "x": [1]}
    torch.save({"a": state, "b": state, "c": state["model"], "d": state["x"]}, tmp_path / "a.pth")
    migrate(tmp_path / "a.pth", tmp_path / "b.pth", form="same")
    loaded = torch.load(tmp_path / "b.pth", weights_only=False)
    assert loaded["a"] is loaded["b"]
    assert loaded["c"] is loaded["a"]["model"]
    assert loaded["d"] is loaded["a"]["x"]


# Storages that stand in a checkpoint for themselves keep the elements that torch finds in them

WHOLE, VIEW = build.storage(rest=(None,)), build.storage(rest=(("v", 1, 2),))
TREES = {
    "a storage": {"bare": WHOLE},
    "a view": {"bare": VIEW},
    "a view beside its whole": {"bare": VIEW, "other": WHOLE},
    "a view beside a tensor": {"bare": VIEW, "weight": build.tensor(WHOLE)},
    "a view beside a tensor of it": {"bare": VIEW, "weight": build.tensor(VIEW, (2,))},
}


@pytest.mark.filterwarnings("ignore:TypedStorage")
@pytest.mark.parametrize("tree", TREES)
def test_a_storage_keeps_its_elements(tree: str, tmp_path: Path) -> None:
    (tmp_path / "old.pth").write_bytes(build.legacy(TREES[tree], [("0", 4, build.floats())]))
    migrate(tmp_path / "old.pth", tmp_path / "new.pth", form="same")

    old, new = (loaded(tmp_path / name, weights_only=False) for name in ("old.pth", "new.pth"))
    assert {name: one.tolist() for name, one in new.items()} == {name: one.tolist() for name, one in old.items()}
