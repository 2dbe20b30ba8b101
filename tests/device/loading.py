"""Cases of loading: behind the caller's queued work, before what the caller does next, and where there is no room."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from importlib.util import find_spec

import torch

import ckptool
from tests.device import tags
from tests.device.ground import CASES, Copies, api, big, case, compared, device, linear, on_own_stream, saved
from tests.device.register import KIND


def load_into(own: bool, dtype: torch.dtype, index: int = 0) -> object:
    path = saved(linear(1, dtype).state_dict(), f"{dtype}.pth")
    model = linear(2).to(device(index))
    zeros = [torch.zeros_like(one) for one in model.parameters()]
    api().synchronize(index)
    with on_own_stream(own, index):
        with torch.no_grad():
            for _ in range(20):
                for one, zero in zip(model.parameters(), zeros, strict=True):
                    one.copy_(zero)  # queued: an initialisation, say
        ckptool.load_into(model, path)
    return compared(model.state_dict(), {name: one.float() for name, one in torch.load(path).items()})


def load(dtype: torch.dtype | None, elsewhere: bool) -> object:
    wanted = {name: one if dtype is None else one.to(dtype) for name, one in torch.load(big()).items()}
    with on_own_stream(not elsewhere):
        state = ckptool.load(big(), device(), dtype=dtype)
        with on_own_stream(elsewhere):
            copies = {name: one.clone() for name, one in reversed(state.items())}
    return compared(copies, wanted)


@case("memory that queued work has just let go of")
def reused() -> object:
    block = torch.ones(10_000_000, device=device())
    zeros = torch.zeros_like(block)
    api().synchronize(device())
    for _ in range(5):
        block.copy_(zeros)
    del block
    state = ckptool.load(big(), device())
    return compared(state, torch.load(big()))


@case("broken off while copies are under way")
def broken_off() -> object:
    def stop(done: int, total: int) -> None:
        raise KeyError

    with suppress(KeyError):
        ckptool.load(big(), device(), progress=stop)
    blocks = [torch.full((700, 700), 7.0, device=device()) for _ in range(20)]
    api().synchronize(device())
    time.sleep(0.1)
    return all(bool((one.cpu() == 7).all()) for one in blocks) or "copies came after others had the memory"


@case("two devices, each with its tag")
def two_devices() -> object:
    state = {"a": torch.ones(5, device=f"{KIND}:0"), "b": torch.ones(5, device=f"{KIND}:1")}
    path = saved(state, "two.pth")
    with ckptool.open_checkpoint(path) as checkpoint:
        tags = [one.device for one in checkpoint.tensors.values()]
    loaded = ckptool.load(path, {f"{KIND}:0": f"{KIND}:1", f"{KIND}:1": "cpu"})
    placed = [str(one.device) for one in loaded.values()]
    return [tags, placed] == [[f"{KIND}:0", f"{KIND}:1"], [f"{KIND}:1", "cpu"]] or f"{tags}, {placed}"


@case("no room")
def no_room() -> object:
    free = api().mem_get_info(device())[0]
    path = saved({"w": torch.empty(free // 4 + 1_000_000)}, "large.pth")
    try:
        ckptool.load(path, device())
    except ckptool.OutOfMemory as error:
        return error.actual == free or f"{error.actual} and not {free}"
    finally:
        path.unlink()
    return "it was loaded"


@case("it is listed, and can be trained on")
def listed() -> object:
    from ckptool.reference.trainer import choose
    from ckptool.torch_ops.devices import devices

    report = devices()
    found = [one for one in report.devices if one.tag.startswith(KIND)]
    said = [(one.tag, one.name, one.free_nbytes is not None) for one in found]
    if said != [(f"{KIND}:{number}", "Simulated device", True) for number in range(2)]:
        return said
    chosen = str(choose(f"{KIND}:1", report).device), choose(KIND, report).device.type
    return chosen == (f"{KIND}:1", KIND) or chosen


def trained_here() -> object:
    from ckptool.torch_ops.devices import devices

    files = tags.OfADevice(tags.saved(), f"{KIND}:0", f"{KIND}0")
    here = [one.tag for one in devices().devices]
    for path in files.files():
        lacking = [one.message for one in ckptool.check(path, devices=here).findings if one.code == "CK503"]
        if lacking:
            return lacking
    for container in ("zip", "legacy"):
        state = torch.load(files.file(container=container))  # to where it was
        model = ckptool.load_model(files.file("model", container), trust=True, map_location=device())
        for found in (ckptool.load(files.file(container=container), {files.tag: files.tag}), model.state_dict()):
            if [one.device for one in found.values()] != [one.device for one in state.values()]:
                return "not where it was"
            if compared(found, {name: one.cpu() for name, one in state.items()}) is not True:
                return "not the weights of the file"
    return True


@case("check asks this machine")
def checked() -> object:
    path = saved({"w": torch.ones(5, device=f"{KIND}:1")}, "one.pth")
    from ckptool.torch_ops.devices import devices

    here = [one.tag for one in devices().devices]
    worst = [one.severity for one in ckptool.check(path, devices=here).findings if one.code == "CK503"]
    return worst == [] or f"CK503: {worst}"


@case("sparse tensors are refused, not called damaged")
def sparse() -> object:
    path = saved({"s": torch.eye(3).to_sparse()}, "sparse.pth")
    try:
        ckptool.load(path, device())
    except ckptool.UnsupportedFeature:
        return True
    return "it was loaded"


@case("predicted memory is what is taken")
def predicted() -> object:
    cost = ckptool.predict_memory(big(), device())
    before = api().memory_allocated(device())
    state = ckptool.load(big(), device())
    taken = api().memory_allocated(device()) - before
    return (len(state) == 20 and abs(taken - cost.device_nbytes) <= 512 * 20) or f"{taken} and not {cost.device_nbytes}"


@case("load, which its caller waits for once, and on whose stream nothing is changed")
def waited_for() -> object:
    native, path = sys.modules["tests.device.native"], saved(Copies(1.0).state_dict(), "1.0-torch.float32.pth")
    with on_own_stream():
        stream, before = api().current_stream(), native.blocked()
        ckptool.load(path, device())
        found = native.blocked() - before, api().current_stream()
    return found == (1, stream) or f"{found[0]} times, and on {found[1]}"


for _own in (True, False):  # streams of their own come first: they are where most waits are missed
    for _dtype in (torch.float32, torch.float64):
        _what = f"{_dtype} on {'a stream of its own' if _own else 'the default stream'}".removeprefix("torch.")
        CASES[f"load_into behind queued work, {_what}"] = lambda own=_own, dtype=_dtype: load_into(own, dtype)
CASES["load_into behind queued work, on another device than the current one"] = lambda: load_into(
    True, torch.float64, 1
)
if KIND == "sim" and find_spec("sklearn"):  # the reference nets train on its digits
    CASES["what the reference trainer saved here"] = trained_here
CASES["load, used on the same stream"] = lambda: load(None, False)
CASES["load with a cast, used on the same stream"] = lambda: load(torch.bfloat16, False)
CASES["load, used on another stream"] = lambda: load(None, True)
