"""Hooks of models that run after loading: on what is loaded, in the order and with the names that torch gives them."""

from __future__ import annotations

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
from tests import where
from tests.loading.same import assert_same, saved
from tests.loading.test_live_model import every_commit, within
from tests.scale import in_turn

Commit = Literal["in_place", "swap"]
Hook = Callable[[nn.Module, Any], Any]
pytestmark = where.on_any
real_or_meta = pytest.mark.parametrize("device", ["cpu", "meta"])
plain_or_own = pytest.mark.parametrize("own", [False, True], ids=["plain", "own"])


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


def built(device: str, build: Callable[[], nn.Module]) -> Any:
    with torch.device(where.device if device == "cpu" else device):
        return build()


def scaled(value: float, **more: torch.Tensor) -> bytes:
    return saved({"scale": torch.full((3,), float(value)), **more})


def assert_fresh(model: Any, value: float) -> None:
    assert model.scale.tolist() == [value] * 3
    assert model.inverse.tolist() == [1 / value] * 3
    assert model.doubled.tolist() == [value * 2] * 3


# load_into


def test_names_that_a_hook_adds_do_not_make_a_file_one_of_which_nothing_fits() -> None:
    def add(_: nn.Module, keys: Any) -> None:
        keys.missing_keys.append("left")
        keys.unexpected_keys.append("right")

    model = Cached(own=True, hook=add)
    report = ckptool.load_into(model, scaled(4.0), strict=False)
    assert (report.missing, report.unexpected) == (("left",), ("right",))
    assert model.scale.tolist() == [4.0] * 3
    with pytest.raises(ckptool.KeyMismatch, match="missing left; unexpected right"):
        ckptool.load_into(Cached(own=True, hook=add), scaled(4.0))


@real_or_meta
@plain_or_own
def test_what_a_model_computes_from_its_weights_is_computed(own: bool, device: str) -> None:
    model = built(device, lambda: Cached(own))

    report = ckptool.load_into(model, scaled(4))

    assert_fresh(model, 4)
    assert (report.loaded, report.share, report.still_meta) == (1, 1.0, ())


@plain_or_own
def test_the_model_of_a_hook_may_be_made_in_inference_mode(own: bool) -> None:
    with torch.inference_mode():
        model = Cached(own)

    ckptool.load_into(model, scaled(4))

    assert_fresh(model, 4)


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


def test_where_all_names_fit_hooks_are_called_once(tmp_path: Path) -> None:
    calls: list[Any] = []
    saved(filled(nested([])).state_dict(), tmp_path / "x.pth")

    ckptool.load_into(nested(calls), tmp_path / "x.pth")

    assert len(calls) == 2 * 6


def test_hooks_see_the_model_s_names() -> None:
    told: list[str] = []
    state = {"module.scale": torch.full((3,), 4.0), "module.other": torch.ones(1)}
    model = Cached(hook=lambda _, keys: told.extend(keys.unexpected_keys))

    report = ckptool.load_into(model, saved(state), strict=False)

    assert told == ["other"]
    assert report.unexpected == ("other",)
    assert [str(change) for change in report.changes] == ["--strip-module"]


@plain_or_own
@real_or_meta
def test_a_hook_may_take_names_out(device: str, own: bool) -> None:
    def tolerate(module: Any, keys: Any) -> None:
        keys.unexpected_keys.remove("old")
        keys.missing_keys.clear()
        module.refresh()

    model = built(device, lambda: Cached(own, tolerate))
    model.added = nn.Parameter(torch.ones(1))

    report = ckptool.load_into(model, scaled(4, old=torch.ones(1)))

    assert_fresh(model, 4)
    assert (report.loaded, report.missing, report.unexpected) == (1, (), ())


@plain_or_own
def test_names_that_hooks_leave_are_a_mismatch_and_nothing_is_changed(own: bool) -> None:
    def tolerate(module: Any, keys: Any) -> None:
        keys.unexpected_keys[:] = [name for name in keys.unexpected_keys if name != "old"]

    model = Cached(own, tolerate)

    with pytest.raises(ckptool.KeyMismatch) as caught:
        ckptool.load_into(model, scaled(4, old=torch.ones(1), older=torch.ones(1)))

    assert caught.value.unexpected == ("older",)
    assert model.scale.tolist() == [1, 1, 1]


@plain_or_own
def test_names_that_a_hook_adds_are_a_mismatch(own: bool) -> None:
    def demand(module: nn.Module, keys: Any) -> None:
        keys.missing_keys.append("more")

    with pytest.raises(RuntimeError, match="Missing key"):
        Cached(own, demand).load_state_dict({"scale": torch.ones(3)})
    with pytest.raises(ckptool.KeyMismatch, match="more") as caught:
        ckptool.load_into(Cached(own, demand), scaled(4))
    assert caught.value.missing == ("more",)
    assert ckptool.load_into(Cached(own, demand), scaled(4), strict=False).missing == ("more",)


class Refused(Exception):
    """What a model raises that will not have its weights."""


def refuse(module: Any, keys: Any) -> None:
    raise Refused(module.scale.tolist())


@plain_or_own
@pytest.mark.parametrize("hook", [refuse, lambda *_: 1], ids=["raises", "returns"])
def test_what_a_hook_raises_is_raised_as_by_torch(hook: Hook, own: bool) -> None:
    by_torch, by_us = Cached(own, hook), Cached(own, hook)
    with pytest.raises((Refused, AssertionError)) as expected:
        by_torch.load_state_dict({"scale": torch.full((3,), 4.0)})

    with pytest.raises((Refused, AssertionError)) as found:
        ckptool.load_into(by_us, scaled(4))

    assert (type(found.value), found.value.args) == (type(expected.value), expected.value.args)
    assert_same(by_us.state_dict(), by_torch.state_dict())


@plain_or_own
def test_a_hook_is_tried_on_a_copy_where_names_do_not_fit_and_runs_once_where_they_do(own: bool) -> None:
    given: list[float] = []
    model = Cached(own, lambda module, keys: given.extend(module.scale.tolist()))

    with pytest.raises(ckptool.KeyMismatch, match="old"):
        ckptool.load_into(model, scaled(4, old=torch.ones(1)))
    assert given == [4, 4, 4]
    assert model.scale.tolist() == [1, 1, 1]

    ckptool.load_into(model, scaled(8))
    assert given[3:] == [8, 8, 8]


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


def knowing_itself(through: Callable[[Any], Hook], own: bool = False) -> Any:
    model = Cached(own, lambda *_: None)
    model.register_load_state_dict_post_hook(through(model))
    return model


through_anything = pytest.mark.parametrize(
    "through",
    [
        through_a_closure,
        through_a_default,
        through_a_list,
        through_a_reference,
        through_its_tensor,
        through_a_global,
    ],
)


@through_anything
def test_hooks_that_use_the_model_itself_work_on_what_is_loaded(through: Callable[[Any], Hook]) -> None:
    model = knowing_itself(through)
    ckptool.load_into(model, scaled(4))
    assert_fresh(model, 4)

    live = LiveModel(knowing_itself(through), scaled(4))
    assert_fresh(live.model, 4)


@plain_or_own
@through_anything
def test_hooks_that_use_the_model_itself_are_not_tried_on_a_copy(through: Callable[[Any], Hook], own: bool) -> None:
    model = knowing_itself(through, own)

    with pytest.raises(ckptool.KeyMismatch):
        ckptool.load_into(model, scaled(4, old=torch.ones(1)))

    assert (model.scale.tolist(), model.inverse.tolist(), model.doubled.tolist()) == ([1] * 3, [1] * 3, [2] * 3)


@plain_or_own
@through_anything
def test_to_swap_hooks_that_use_the_model_itself_are_refused(through: Callable[[Any], Hook], own: bool) -> None:
    live = LiveModel(knowing_itself(through, own), commit="swap")
    model = live.model

    with pytest.raises(ckptool.UnsupportedFeature, match="a load hook of Cached uses the model itself") as caught:
        live.reload(scaled(4))

    assert (caught.value.kind, live.model, live.digest) == ("not-copyable", model, None)
    assert (model.scale.tolist(), model.inverse.tolist(), model.doubled.tolist()) == ([1] * 3, [1] * 3, [2] * 3)


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


# LiveModel


@every_commit
@real_or_meta
def test_a_reload_computes_what_the_model_computes(device: str, commit: Commit) -> None:
    live = LiveModel(built(device, Cached), scaled(4), commit=commit)
    assert_fresh(live.model, 4)
    first = live.model

    live.reload(scaled(8))

    assert_fresh(live.model, 8)
    if commit == "swap":
        assert_fresh(first, 4)  # a call that has begun still uses it


def test_to_swap_a_model_with_code_of_its_own_computes_it_too() -> None:
    live = LiveModel(Cached(own=True), scaled(4), commit="swap")
    assert_fresh(live.model, 4)
    live.reload(scaled(8))
    assert_fresh(live.model, 8)


@every_commit
def test_a_hook_may_take_names_out_of_a_reload(commit: Commit) -> None:
    def tolerate(module: Any, keys: Any) -> None:
        keys.unexpected_keys.clear()
        module.refresh()

    live = LiveModel(Cached(hook=tolerate), commit=commit)

    done = live.reload(scaled(4, old=torch.ones(1)))

    assert_fresh(live.model, 4)
    assert done.report.unexpected == ()


def refuse_eights(module: Any, keys: Any) -> None:
    if module.scale[0] == 8:
        refuse(module, keys)
    module.refresh()


@plain_or_own
def test_to_swap_old_weights_serve_on_when_a_hook_raises(own: bool) -> None:
    live = LiveModel(Cached(own, refuse_eights), scaled(4), commit="swap")
    model, digest, report = live.model, live.digest, live.report

    with pytest.raises(Refused):
        live.reload(scaled(8))

    assert (live.model, live.digest, live.report) == (model, digest, report)
    assert_fresh(live.model, 4)


def test_in_place_the_digest_says_that_a_hook_raised_until_the_next_reload() -> None:
    live = LiveModel(Cached(hook=refuse_eights), scaled(4))

    with pytest.raises(Refused):
        live.reload(scaled(8))
    assert live.digest is None
    assert live(torch.ones(3)).tolist() == [2, 2, 2]  # the weights are new, and calls do not wait for ever

    live.reload(scaled(2))
    assert live.digest is not None
    assert_fresh(live.model, 2)


@every_commit
def test_a_watch_notes_what_a_hook_raised(commit: Commit, tmp_path: Path) -> None:
    path = tmp_path / "x.pth"
    path.write_bytes(scaled(4))
    with LiveModel(Cached(hook=refuse_eights), path, commit=commit) as live:
        live.watch(every=0.01)
        (tmp_path / "y.pth").write_bytes(scaled(8))
        (tmp_path / "y.pth").replace(path)

        assert within(10, lambda: live.last_error is not None)

        assert isinstance(live.last_error, Refused)
        if commit == "swap":
            assert_fresh(live.model, 4)


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
