"""Models that load through code of their own: tried on a copy first where that can be, and else told to be partial."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ckptool
from ckptool import LiveModel
from ckptool.loading import custom_loading
from tests import where
from tests.loading.same import assert_same, saved

pytestmark = where.on_any
PART = "loads through its own code, and a part of it may be new"


class Counting(nn.Module):
    """Counts, in a tensor that is not saved, how often it was loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.register_buffer("loads", torch.zeros(()), persistent=False)

    def _load_from_state_dict(self, *given: Any) -> None:
        self.loads += 1
        super()._load_from_state_dict(*given)


def copied() -> Counting:
    return Counting()


def locked() -> Counting:
    model = Counting()
    model.lock = threading.Lock()
    return model


def generating() -> Counting:
    model = Counting()
    model.numbers = (number for number in range(3))
    return model


class Hooked(nn.Module):
    """Counts by a hook that knows the model, and not the module that it is given."""

    def __init__(self, known: Callable[[Any], Callable[[], Any]]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.register_buffer("loads", torch.zeros(()), persistent=False)
        model = known(self)
        self._register_load_state_dict_pre_hook(lambda *given: model().loads.add_(1))


def by_a_closure() -> Hooked:
    return Hooked(lambda model: lambda: model)


class Single(Counting):
    """Is its own copy."""

    def __deepcopy__(self, memo: Any) -> Any:
        return self


def by_a_reference() -> Hooked:
    return Hooked(weakref.ref)


UNTRIED = {
    "a lock": locked,
    "a generator": generating,
    "a closure": by_a_closure,
    "a reference": by_a_reference,
    "itself": Single,
}
BUILDS: dict[str, Callable[[], Any]] = {"a copy": copied, **UNTRIED}


def state(value: float = 4.0) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(one, value) for name, one in nn.ModuleDict(_layers()).state_dict().items()}


def _layers() -> dict[str, nn.Module]:
    return {"first": nn.Linear(2, 2), "second": nn.Linear(2, 2)}


BAD: dict[str, tuple[dict[str, torch.Tensor], type[ckptool.CkptoolError]]] = {
    "names": ({name: one for name, one in state().items() if name != "second.bias"}, ckptool.KeyMismatch),
    "more names": (state() | {"third": torch.ones(1)}, ckptool.KeyMismatch),
    "shapes": (state() | {"second.bias": torch.ones(3)}, ckptool.ShapeMismatch),
}


@pytest.mark.parametrize("what", BUILDS)
def test_a_model_is_loaded_once_with_the_result_of_torch(what: str) -> None:
    theirs, ours = BUILDS[what](), BUILDS[what]()
    theirs.load_state_dict(state())

    report = ckptool.load_into(ours, saved(state()))

    assert_same(ours.state_dict(), theirs.state_dict())
    assert ours.loads == theirs.loads == 1
    assert report.is_tried == (what == "a copy")
    assert ("not tried on a copy first: a failure would have left a part" in str(report)) == (what != "a copy")


@pytest.mark.parametrize("how", BAD)
def test_what_fails_on_a_copy_leaves_the_model_as_it_was(how: str) -> None:
    model = Counting()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    data, error = BAD[how]

    with pytest.raises(error) as caught:
        ckptool.load_into(model, saved(data))

    assert "may be new" not in str(caught.value)
    assert model.loads == 0
    assert_same(model.state_dict(), before)


@pytest.mark.parametrize("how", BAD)
@pytest.mark.parametrize("what", UNTRIED)
def test_what_fails_without_a_copy_says_that_a_part_may_be_new(what: str, how: str) -> None:
    data, error = BAD[how]

    with pytest.raises(error, match=PART):
        ckptool.load_into(UNTRIED[what](), saved(data))


@pytest.mark.parametrize("what", UNTRIED)
def test_in_place_a_model_without_a_copy_is_reloaded_and_a_failure_takes_the_digest(what: str) -> None:
    live = LiveModel(UNTRIED[what](), saved(state(1)))
    assert live.report is not None
    assert not live.report.is_tried
    digest = live.reload(saved(state(2))).digest
    assert (live.digest, live.model.first.bias.tolist()) == (digest, [2, 2])

    with pytest.raises(ckptool.KeyMismatch, match=PART):
        live.reload(saved(BAD["names"][0]))
    assert live.digest is None

    assert live.reload(saved(state(2))).digest == live.digest == digest


@pytest.mark.parametrize("what", UNTRIED)
def test_to_swap_a_model_without_a_copy_is_refused(what: str) -> None:
    live = LiveModel(UNTRIED[what](), commit="swap")
    model = live.model

    with pytest.raises(ckptool.UnsupportedFeature) as caught:
        live.reload(saved(state()))

    assert (caught.value.kind, live.model, float(model.loads)) == ("not-copyable", model, 0)


def test_without_room_for_a_copy_a_model_loads_and_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom_loading, "free_memory", lambda: 60)
    model = Counting()

    report = ckptool.load_into(model, saved(state()))

    assert_same(model.state_dict(), state())
    assert not report.is_tried
    with pytest.raises(ckptool.ShapeMismatch, match=PART):
        ckptool.load_into(model, saved(BAD["shapes"][0]))


def test_where_a_hook_takes_names_out_of_what_is_missing_they_do_not_count_as_loaded() -> None:
    for strict in (True, False):
        model = nn.Linear(2, 2)
        model.register_load_state_dict_post_hook(lambda _, keys: keys.missing_keys.clear())
        report = ckptool.load_into(model, saved({"weight": torch.ones(2, 2)}), strict=strict)
        assert (report.loaded, report.expected, report.missing) == (1, 2, ())
        assert report.share < 1
