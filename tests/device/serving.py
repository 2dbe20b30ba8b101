"""Cases of serving: no answer is of two files, whatever stream a call is on, and however late its kernels are."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import nn

import ckptool
from ckptool.torch_ops.devices import Accelerator
from tests.device.ground import CASES, Copies, LoadsApart, api, case, device, having, on_own_stream, saved


def live(how: str, own: bool, dtype: torch.dtype, kind: type[Copies] = Copies) -> object:
    files = [saved(Copies(value, dtype).state_dict(), f"{value}-{dtype}.pth") for value in (1.0, 2.0, 3.0)]
    model = ckptool.LiveModel(kind(1.0).to(device()), files[0], commit=how)  # type: ignore[arg-type]
    api().synchronize(device())
    torn: list[list[float]] = []
    calls: list[int] = []
    stop = threading.Event()

    def serve() -> None:
        with on_own_stream() if own else nullcontext():
            while not stop.is_set():
                answer = model()
                api().current_stream(device()).synchronize()
                values = {float(value) for one in answer for value in one.cpu().unique()}
                calls.append(1)
                if len(values) != 1:
                    torn.append(sorted(values))

    servers = [threading.Thread(target=serve) for _ in range(2)]
    for server in servers:
        server.start()
    for number in range(3):
        model.reload(files[1 + number % 2])
        time.sleep(0.03)
    stop.set()
    for server in servers:
        server.join()
    return (bool(calls) and not torn) or f"{len(torn)} of {len(calls)} answers mixed, {torn[:1]}"


def late_answer(how: str, kind: type[Copies] = Copies) -> object:
    files = [saved(Copies(value).state_dict(), f"{value}-torch.float32.pth") for value in (1.0, 2.0, 3.0)]
    model = ckptool.LiveModel(kind(1.0).to(device()), files[0], commit=how)  # type: ignore[arg-type]
    api().synchronize(device())
    with on_own_stream():
        pause = torch.zeros(1, device=device())
        for _ in range(60):
            pause.clone()
        answer = model()
    for path in (files[1], files[2]):
        model.reload(path)  # whose weights may take the place of those that served
    api().synchronize(device())
    values = {float(value) for one in answer for value in one.cpu().unique()}
    return values == {1.0} or f"values of {sorted(values)}"


CASES["LiveModel swap, an answer that is still to come"] = lambda: late_answer("swap")
CASES["LiveModel in_place, an answer that is still to come"] = lambda: late_answer("in_place")
CASES["LiveModel in_place, an answer of a model that loads on a stream of its own"] = lambda: late_answer(
    "in_place", LoadsApart
)


def called_at_once(how: str, kind: type[Copies] = Copies, hook: Callable[..., None] | None = None) -> object:
    native = sys.modules["tests.device.native"]
    first, second = (Copies(value, torch.float64).state_dict() for value in (1.0, 2.0))
    model = ckptool.LiveModel(kind(1.0).to(device()), saved(first, "1.0-torch.float64.pth"), commit=how)  # type: ignore[arg-type]
    held = model.model  # as a call does that is under way: so nothing waits for the end of the old weights
    if hook is not None:
        held.register_load_state_dict_post_hook(hook)
    api().synchronize(device())
    native.set_delay(30_000)
    with suppress(KeyError):
        model.reload(saved(second, "2.0-torch.float64.pth"))  # the last of them is converted on the device, late
    native.set_delay(0)
    with on_own_stream():
        answer = model()
    api().synchronize(device())
    native.set_delay(2_000)
    values = {float(value) for one in answer for value in one.cpu().unique()}
    return ((held is model.model) == (how == "in_place") and values == {2.0}) or f"values of {sorted(values)}"


@case("LiveModel in_place, called after hooks that fail")
def hooks_fail() -> object:
    def fail(module: nn.Module, keys: Any) -> None:
        raise KeyError

    return called_at_once("in_place", hook=fail)


CASES["LiveModel swap, called as soon as it has the weights"] = lambda: called_at_once("swap")
CASES["LiveModel in_place, called after it loaded on a stream of its own"] = lambda: called_at_once(
    "in_place", LoadsApart
)


@case("LiveModel in_place, the only device of its kind")
def only_one() -> object:
    with having(Accelerator, "is_single", property(lambda self: True)):
        return late_answer("in_place")


@case("LiveModel swap, without streams to wait for")
def without_streams() -> object:
    with having(Accelerator, "has_streams", property(lambda self: False)):
        return called_at_once("swap")


for _own in (True, False):
    for _dtype in (torch.float32, torch.float64):
        _what = f"{_dtype} on {'a stream of its own' if _own else 'the default stream'}".removeprefix("torch.")
        for _how in ("in_place", "swap"):
            CASES[f"LiveModel {_how}, {_what}"] = lambda how=_how, own=_own, dtype=_dtype: live(how, own, dtype)
