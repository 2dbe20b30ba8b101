"""
Models that load through code of their own: tried on a copy first where that can be, and else told to be partial. Hooks
for after loading run on what is loaded, in the order and with the names that torch gives them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

import ckptool
from ckptool import LiveModel
from ckptool.loading import custom_loading
from tests import where
from tests.each import each
from tests.loading.same import assert_same, saved
from tests.scale import in_turn

Commit = Literal["in_place", "swap"]
Hook = Callable[[nn.Module, Any], Any]
pytestmark = where.on_any
every_commit = pytest.mark.parametrize("commit", ["in_place", "swap"])
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


def with_attribute(value: Any) -> Counting:
    model = Counting()
    model.kept = value
    return model


class Single(Counting):
    """Is its own copy."""

    def __deepcopy__(self, memo: Any) -> Any:
        return self


class Hooked(nn.Module):
    """Counts by a hook that knows the model, and not the module that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.register_buffer("loads", torch.zeros(()), persistent=False)
        self._register_load_state_dict_pre_hook(lambda *given: self.loads.add_(1))


UNTRIED: dict[str, Callable[[], Any]] = {
    "a lock": lambda: with_attribute(threading.Lock()),
    "a hook": Hooked,
    "itself": Single,
}


def state(value: float = 4.0) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(one, value) for name, one in Counting().state_dict().items()}


BAD: dict[str, tuple[dict[str, torch.Tensor], type[ckptool.CkptoolError]]] = {
    "names": ({name: one for name, one in state().items() if name != "second.bias"}, ckptool.KeyMismatch),
    "more names": (state() | {"third": torch.ones(1)}, ckptool.KeyMismatch),
    "shapes": (state() | {"second.bias": torch.ones(3)}, ckptool.ShapeMismatch),
}


@each("what", ["a copy", *UNTRIED])
def test_a_model_is_loaded_once_with_the_result_of_torch(what: str) -> None:
    build = UNTRIED.get(what, Counting)
    theirs, ours = build(), build()
    theirs.load_state_dict(state())

    report = ckptool.load_into(ours, saved(state()))

    assert_same(ours.state_dict(), theirs.state_dict())
    assert ours.loads == theirs.loads == 1
    assert report.is_tried == (what == "a copy")
    assert ("not tried on a copy first: a failure would have left a part" in str(report)) == (what != "a copy")


@each("how", list(BAD))
def test_what_fails_on_a_copy_leaves_the_model_as_it_was_and_else_it_is_told(how: str) -> None:
    data, error = BAD[how]
    model = Counting()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    with pytest.raises(error) as caught:
        ckptool.load_into(model, saved(data))
    assert ("may be new" in str(caught.value), float(model.loads)) == (False, 0)
    assert_same(model.state_dict(), before)
    live = LiveModel(Counting(), saved(state(1)))
    digest = live.digest
    with pytest.raises(error):
        live.reload(saved(data))
    assert (live.digest, live.model.first.bias.tolist()) == (digest, [1, 1])

    for build in UNTRIED.values():
        with pytest.raises(error, match=PART):
            ckptool.load_into(build(), saved(data))


@each("what", list(UNTRIED))
def test_a_model_without_a_copy_is_reloaded_in_place_and_not_to_swap(what: str) -> None:
    live = LiveModel(UNTRIED[what](), saved(state(1)))
    assert live.report is not None
    assert not live.report.is_tried
    digest = live.reload(saved(state(2))).digest
    assert (live.digest, live.model.first.bias.tolist()) == (digest, [2, 2])
    with pytest.raises(ckptool.KeyMismatch, match=PART):
        live.reload(saved(BAD["names"][0]))
    assert live.digest is None
    assert live.reload(saved(state(2))).digest == live.digest == digest

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


# Hooks for after loading


class Cached(nn.Module):
    """Computes a buffer, in its own memory, and a plain tensor from its weights."""

    inverse: torch.Tensor

    def __init__(self, own: bool = False, hook: Hook | None = None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("inverse", torch.ones(3), persistent=False)
        self.doubled = torch.full((3,), 2.0)
        self.register_load_state_dict_post_hook(hook or (lambda module, keys: module.refresh()))
        if own:
            self.register_load_state_dict_pre_hook(lambda *given: None)

    def refresh(self) -> None:
        if self.inverse.is_meta:
            self.inverse = torch.ones(3)
        self.inverse.copy_(1 / self.scale.detach())
        self.doubled = 2 * self.scale.detach()

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values * self.scale * self.inverse  # the same as it was, if both are of one file


def scaled(value: float, **more: torch.Tensor) -> bytes:
    return saved({"scale": torch.full((3,), float(value)), **more})


def assert_fresh(model: Any, value: float) -> None:
    assert model.scale.tolist() == [value] * 3
    assert model.inverse.tolist() == [1 / value] * 3
    assert model.doubled.tolist() == [value * 2] * 3


def clear(module: Any, keys: Any) -> None:
    keys.missing_keys.clear()
    keys.unexpected_keys.clear()
    module.refresh()


@every_commit
@pytest.mark.parametrize(("device", "own"), [("", False), ("", True), ("meta", False), ("inference", True)])
def test_what_a_model_computes_from_its_weights_is_computed(device: str, own: bool, commit: Commit) -> None:
    with torch.inference_mode(device == "inference"), torch.device("meta" if device == "meta" else where.device):
        model, served = Cached(own), Cached(own)
    report = ckptool.load_into(model, scaled(4))
    assert_fresh(model, 4)
    assert (report.loaded, report.share, report.still_meta) == (1, 1.0, ())

    live = LiveModel(served, scaled(4), commit=commit)
    first = live.model
    assert_fresh(first, 4)
    live.reload(scaled(8))
    assert_fresh(live.model, 8)
    if commit == "swap":
        assert_fresh(first, 4)  # a call that has begun still uses it


def nested(calls: list[Any]) -> nn.Module:
    """Return a model that notes each call of a hook: the module, whether it is loaded, and the names."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)), nn.Linear(2, 2))
    model[2].weight = model[1][1].weight = nn.Parameter(torch.zeros(2, 2))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)

    def note(label: str) -> Hook:
        def hook(module: nn.Module, keys: Any) -> None:
            own = [tensor.sum().item() for tensor in module.parameters(recurse=False)]
            calls.append((label, type(module), own, type(keys), list(keys.missing_keys), list(keys.unexpected_keys)))

        return hook

    for name, module in model.named_modules():
        for number in range(2):
            module.register_load_state_dict_post_hook(note(f"{name} {number}"))
    return model


def filled(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for number, tensor in enumerate(model.parameters()):
            tensor.fill_(number + 1)
    return model


@pytest.mark.parametrize(
    ("keeps_metadata", "without", "more"),
    in_turn(
        [True, False],
        [(), ("0.weight",), ("1.0.num_batches_tracked",), ("2.weight",), ("1.0.running_mean", "1.1.bias", "2.bias")],
        [(), ("extra",), ("0.extra", "1.1.more", "1.nested.deep", "none.weight")],
    ),
)
def test_hooks_are_called_as_torch_calls_them(
    more: tuple[str, ...], without: tuple[str, ...], keeps_metadata: bool, tmp_path: Path
) -> None:
    expected: list[Any] = []
    found: list[Any] = []
    state = filled(nested([])).state_dict()
    for name in without:
        del state[name]
    state.update({name: torch.ones(2) for name in more})
    saved(state if keeps_metadata else dict(state), tmp_path / "x.pth")
    by_torch, by_us = nested(expected), nested(found)

    left = by_torch.load_state_dict(torch.load(tmp_path / "x.pth"), strict=False)
    report = ckptool.load_into(by_us, tmp_path / "x.pth", strict=False)

    assert found == expected
    assert_same(by_us.state_dict(), by_torch.state_dict())
    assert [*report.missing, *(name for name, _ in report.tied)] == left.missing_keys
    assert list(report.unexpected) == left.unexpected_keys


@pytest.mark.parametrize("own", [False, True], ids=["plain", "own"])
def test_hooks_decide_about_names(own: bool) -> None:
    """They may take them out, leave some or add some; as long as names do not fit, they run on a copy alone."""
    more = {"old": torch.ones(1)}
    for load in (ckptool.load_into, LiveModel):
        model = Cached(own, clear)
        model.added = nn.Parameter(torch.ones(1))
        found: Any = load(model, scaled(4, **more))
        report = found if load is ckptool.load_into else found.report
        assert_fresh(model, 4)
        assert (report.loaded, report.expected, report.missing, report.unexpected) == (1, 2, (), ())

    given: list[float] = []
    model = Cached(own, lambda module, keys: given.extend(module.scale.tolist()))
    with pytest.raises(ckptool.KeyMismatch, match="old") as caught:
        ckptool.load_into(model, scaled(4, **more))
    assert (caught.value.unexpected, given, model.scale.tolist()) == (("old",), [4, 4, 4], [1, 1, 1])
    ckptool.load_into(model, scaled(8))
    assert given[3:] == [8, 8, 8]

    def demand(module: nn.Module, keys: Any) -> None:
        keys.missing_keys.append("more")

    with pytest.raises(ckptool.KeyMismatch, match="more"):
        ckptool.load_into(Cached(own, demand), scaled(4))
    assert ckptool.load_into(Cached(own, demand), scaled(4), strict=False).missing == ("more",)


def test_hooks_see_the_model_s_names() -> None:
    told: list[str] = []
    data = saved({"module.scale": torch.full((3,), 4.0), "module.other": torch.ones(1)})
    model = Cached(hook=lambda _, keys: told.extend(keys.unexpected_keys))
    report = ckptool.load_into(model, data, strict=False)
    assert (told, report.unexpected) == (["other"], ("other",))
    assert [str(change) for change in report.changes] == ["--strip-module"]


class Refused(Exception):
    """What a model raises that will not have its weights."""


def refuse_eights(module: Any, keys: Any) -> None:
    if module.scale[0] == 8:
        raise Refused(module.scale.tolist())
    module.refresh()


@pytest.mark.parametrize("own", [False, True], ids=["plain", "own"])
def test_what_a_hook_raises_is_raised_as_by_torch(own: bool, tmp_path: Path) -> None:
    by_torch, by_us = Cached(own, refuse_eights), Cached(own, refuse_eights)
    with pytest.raises(Refused) as expected:
        by_torch.load_state_dict({"scale": torch.full((3,), 8.0)})
    with pytest.raises(Refused) as found:
        ckptool.load_into(by_us, scaled(8))
    assert found.value.args == expected.value.args
    assert_same(by_us.state_dict(), by_torch.state_dict())

    live = LiveModel(Cached(own, refuse_eights), scaled(4), commit="swap")
    before = live.model, live.digest, live.report
    with pytest.raises(Refused):
        live.reload(scaled(8))
    assert (live.model, live.digest, live.report) == before
    assert_fresh(live.model, 4)

    live = LiveModel(Cached(own, refuse_eights), scaled(4))
    with pytest.raises(Refused):
        live.reload(scaled(8))
    assert live.digest is None
    assert live(torch.ones(3)).tolist() == [2, 2, 2]  # the weights are new, and calls do not wait for ever
    live.reload(scaled(2))
    assert live.digest is not None
    assert_fresh(live.model, 2)


# Hooks that use the model itself, and not the module that they are given


def through_a_closure(model: Any) -> Hook:
    def hook(_: nn.Module, keys: Any) -> None:
        model.refresh()
        keys.unexpected_keys.clear()

    return hook


def through_a_default(model: Any) -> Hook:
    return lambda _, keys, model=model: through_a_closure(model)(_, keys)  # type: ignore[misc]


def through_a_list(model: Any) -> Hook:
    models = {"all": [model]}
    return lambda _, keys: through_a_closure(models["all"][0])(_, keys)


def through_a_reference(model: Any) -> Hook:
    reference = weakref.ref(model)
    return lambda _, keys: through_a_closure(reference())(_, keys)


def through_its_tensor(model: Any) -> Hook:
    scale = model.scale

    def hook(module: Any, keys: Any) -> None:
        module.inverse.copy_(1 / scale.detach())
        module.doubled = 2 * scale.detach()
        keys.unexpected_keys.clear()

    return hook


held: Any = None


def through_a_global(model: Any) -> Hook:
    global held
    held = model
    return lambda _, keys: through_a_closure(held)(_, keys)


@each(
    "through",
    [through_a_closure, through_a_default, through_a_list, through_a_reference, through_its_tensor, through_a_global],
)
def test_hooks_that_use_the_model_itself_are_not_run_for_a_copy(through: Callable[[Any], Hook]) -> None:
    def build() -> Any:
        model = Cached(hook=lambda *_: None)
        model.register_load_state_dict_post_hook(through(model))
        return model

    model = build()
    ckptool.load_into(model, scaled(4))
    assert_fresh(model, 4)
    with pytest.raises(ckptool.KeyMismatch, match="old"):
        ckptool.load_into(model, scaled(8, old=torch.ones(1)))
    assert_fresh(model, 4)
    assert_fresh(LiveModel(build(), scaled(4)).model, 4)

    live = LiveModel(build(), commit="swap")
    with pytest.raises(ckptool.UnsupportedFeature, match="a load hook of Cached uses the model itself") as caught:
        live.reload(scaled(4))
    assert (caught.value.kind, live.digest, live.model.scale.tolist()) == ("not-copyable", None, [1, 1, 1])


def test_a_method_of_the_model_is_the_copy_s_own() -> None:
    class Bound(Cached):
        def __init__(self) -> None:
            super().__init__(hook=lambda *_: None)
            self.register_load_state_dict_post_hook(self.loaded)

        def loaded(self, module: Any, keys: Any) -> None:
            self.refresh()

    live = LiveModel(Bound(), scaled(4), commit="swap")
    first = live.model
    live.reload(scaled(8))
    assert_fresh(live.model, 8)
    assert_fresh(first, 4)


@every_commit
def test_no_call_meets_new_weights_before_the_hooks_have_run(commit: Commit) -> None:
    calls: list[Future[list[float]]] = []
    met_before: list[bool] = []

    def slow(module: Any, keys: Any) -> None:
        calls.append(caller.submit(lambda: live(torch.ones(3)).tolist()))
        wait(calls, timeout=0.2 if commit == "in_place" else 10)
        met_before.append(calls[0].done())
        module.refresh()

    with ThreadPoolExecutor(1) as caller:
        live = LiveModel(Cached(hook=slow), commit=commit)
        live.reload(scaled(4))

        assert calls[0].result(10) == [1, 1, 1]
    assert met_before == [commit == "swap"]  # to swap, no call waits


def test_a_wrapped_model_with_a_hook_gets_the_names_of_its_wrapper(tmp_path: Path) -> None:
    source, model = nn.Linear(2, 2), nn.DataParallel(nn.Linear(2, 2))
    model.module._register_load_state_dict_pre_hook(lambda *_: None)
    torch.save(source.state_dict(), tmp_path / "x.pth")

    report = ckptool.load_into(model, tmp_path / "x.pth")

    assert torch.equal(model.module.weight, source.weight)
    assert "--add-prefix module" in str(report)
    assert report.own_loading == "a hook of Linear"
