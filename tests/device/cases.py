"""
What loading and serving do on a device whose work is late, case by case:  python -m tests.device.cases [LEFT OUT]...

Prints one JSON object: for ``nothing``, what each case came to, true or what was wrong; for each of ``WAITS``, the same
with that wait left out, of the cases that need it, up to the first that is wrong. Arguments say which of these to try.
A process of its own, one for all: torch keeps a device once it is registered.

Kernels run as the host's, whose results are late and whose inputs are not; only copies read late. So models here copy.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ckptool
from ckptool.loading.memory import device as device_memory
from ckptool.torch_ops.accelerators import Accelerator
from tests.device import tags, waits
from tests.device.register import KIND, register

CASES: dict[str, Callable[[], object]] = {}
Case = Callable[..., object]
NOTHING = "nothing"
MEMORY_NBYTES = 256 << 20
"""The device's: a file that does not fit into it is this long."""
WEIGHTS = 10
FOLDER = tempfile.TemporaryDirectory(prefix="ckptool-device-")  # goes with the process
FILES = Path(FOLDER.name)
BIG = [torch.randn(700, 700) for _ in range(20)]


def case(name: str) -> Callable[[Case], Case]:
    def add(function: Case) -> Case:
        CASES[name] = function
        return function

    return add


def device() -> torch.device:
    return torch.device(KIND, 0)


def api() -> Any:
    return getattr(torch, KIND)


@contextmanager
def on_own_stream(own: bool = True) -> Iterator[None]:
    before = api().current_stream()
    api().set_stream(api().Stream(device()) if own else before)
    try:
        yield
    finally:
        api().set_stream(before)


@contextmanager
def having(where: Any, attribute: str, value: Any) -> Iterator[None]:
    kept = getattr(where, attribute)
    setattr(where, attribute, value)
    try:
        yield
    finally:
        setattr(where, attribute, kept)


def linear(seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(64, 64, dtype=dtype)


def saved(state: Any, name: str) -> Path:
    path = FILES / name
    if not path.exists():
        torch.save(state, path)
    return path


def compared(state: Any, wanted: Any) -> object:
    api().synchronize(device())
    return all(torch.equal(state[name].cpu(), wanted[name]) for name in wanted) or "not the weights of the file"


def big() -> Path:
    return saved({f"w{number}": one for number, one in enumerate(BIG)}, "big.pth")


class Copies(nn.Module):
    """Answers with a copy of each weight, which is made late."""

    def __init__(self, value: float, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.ParameterList([torch.full((500,), value, dtype=dtype) for _ in range(WEIGHTS)])

    def forward(self) -> list[torch.Tensor]:
        with torch.no_grad():
            return [one.clone() for one in reversed(list(self.w))]


class LoadsApart(Copies):
    """Loads in its own way, on a stream of its own."""

    def load_state_dict(self, *given: Any, **named: Any) -> Any:
        with on_own_stream():
            return super().load_state_dict(*given, **named)


def load_into(own: bool, dtype: torch.dtype) -> object:
    path = saved(linear(1, dtype).state_dict(), f"{dtype}.pth")
    model = linear(2).to(device())
    zeros = [torch.zeros_like(one) for one in model.parameters()]
    api().synchronize(device())
    with on_own_stream(own):
        with torch.no_grad():
            for _ in range(5):
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


@case("it is listed")
def listed() -> object:
    from ckptool.torch_ops.devices import devices

    found = [one for one in devices().devices if one.tag.startswith(KIND)]
    said = [(one.tag, one.name, one.free_nbytes is not None) for one in found]
    return said == [(f"{KIND}:{number}", "Simulated device", True) for number in range(2)] or said


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


@case("LiveModel swap, an answer that is still to come")
def late_answer() -> object:
    files = [saved(Copies(value).state_dict(), f"{value}-torch.float32.pth") for value in (1.0, 2.0, 3.0)]
    model = ckptool.LiveModel(Copies(1.0).to(device()), files[0], commit="swap")
    api().synchronize(device())
    with on_own_stream():
        pause = torch.zeros(1 << 24, device=device())
        for _ in range(20):
            pause.clone()
        answer = model()
    for path in (files[1], files[2]):
        model.reload(path)  # whose weights may take the place of those that served
    api().synchronize(device())
    values = {float(value) for one in answer for value in one.cpu().unique()}
    return values == {1.0} or f"values of {sorted(values)}"


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


@case("LiveModel swap, called as soon as it has the weights")
def early_call() -> object:
    return called_at_once("swap")


@case("LiveModel in_place, called after hooks that fail")
def hooks_fail() -> object:
    def fail(module: nn.Module, keys: Any) -> None:
        raise KeyError

    return called_at_once("in_place", hook=fail)


@case("LiveModel in_place, called after it loaded on a stream of its own")
def loaded_apart() -> object:
    return called_at_once("in_place", LoadsApart)


@case("LiveModel in_place, while it loads on a stream of its own")
def loads_apart() -> object:
    return live("in_place", True, torch.float64, LoadsApart)


@case("LiveModel in_place, the only device of its kind")
def only_one() -> object:
    with having(Accelerator, "is_single", property(lambda self: True)):
        return live("in_place", True, torch.float32)


@case("LiveModel swap, called as soon as it has the weights, without streams to wait for")
def without_streams() -> object:
    with having(Accelerator, "has_streams", property(lambda self: False)):
        return early_call()


@case("load, which its caller waits for once, and on whose stream nothing is changed")
def waited_for() -> object:
    native, path = sys.modules["tests.device.native"], saved(Copies(1.0).state_dict(), "1.0-torch.float32.pth")
    with on_own_stream():
        stream, before = api().current_stream(), native.blocked()
        ckptool.load(path, device())
        found = native.blocked() - before, api().current_stream()
    return found == (1, stream) or f"{found[0]} times, and on {found[1]}"


@case("load_into behind queued work, on another device than the current one")
def elsewhere() -> object:
    path = saved(linear(1, torch.float64).state_dict(), "float64.pth")
    model = linear(2).to(f"{KIND}:1")
    zeros = [torch.zeros_like(one) for one in model.parameters()]
    api().synchronize(1)
    before = api().current_stream(1)
    api().set_stream(api().Stream(torch.device(KIND, 1)))
    api().set_device(0)  # which a stream of another may have made the current one
    try:
        with torch.no_grad():
            for _ in range(5):
                for one, zero in zip(model.parameters(), zeros, strict=True):
                    one.copy_(zero)
        ckptool.load_into(model, path)
    finally:
        api().set_stream(before)
        api().set_device(0)
    api().synchronize(1)
    return compared(model.state_dict(), {name: one.float() for name, one in torch.load(path).items()})


for _own in (True, False):  # streams of their own come first: they are where most waits are missed
    _where = "a stream of its own" if _own else "the default stream"
    for _dtype in (torch.float32, torch.float64):
        _what = f"{_dtype} on {_where}".removeprefix("torch.")
        CASES[f"load_into behind queued work, {_what}"] = lambda own=_own, dtype=_dtype: load_into(own, dtype)
        for _how in ("in_place", "swap"):
            CASES[f"LiveModel {_how}, {_what}"] = lambda how=_how, own=_own, dtype=_dtype: live(how, own, dtype)
if KIND == "sim" and find_spec("sklearn"):  # the reference nets train on its digits
    CASES["what the reference trainer saved here"] = trained_here
CASES["load, used on the same stream"] = lambda: load(None, False)
CASES["load with a cast, used on the same stream"] = lambda: load(torch.bfloat16, False)
CASES["load, used on another stream"] = lambda: load(None, True)


@contextmanager
def without(wait: str) -> Iterator[str]:
    """Leave one wait out, and say how the cases begin that need it."""
    if wait == NOTHING:
        yield ""
        return
    try:
        with waits.without(waits.places()[wait]):
            yield waits.WAITS[wait]
    finally:
        for index in range(api().device_count()):
            api().synchronize(index)  # what is late is not the next one's


def came_to(name: str) -> object:
    api().empty_cache()  # memory is taken as if by the first case
    try:
        return CASES[name]()
    except Exception as error:  # noqa: BLE001 - a result as others
        return f"{type(error).__name__}: {error}"


def tried(left_out: str) -> dict[str, object]:
    found: dict[str, object] = {}
    with without(left_out) as begin:
        for name in (name for name in CASES if name.startswith(begin)):
            found[name] = came_to(name)
            if left_out != NOTHING and found[name] is not True:
                break
    return found


def main() -> None:
    os.environ["SIM_MEMORY"] = str(MEMORY_NBYTES)
    native = register()
    device_memory._BUFFER_NBYTES = 1 << 20  # each buffer is used again
    found = {}
    for left_out in sys.argv[1:] or [NOTHING, *waits.WAITS]:
        found[left_out] = tried(left_out)
        if left_out == NOTHING:
            found[left_out]["pinned memory is let go of"] = native.pinned_nbytes() == 0 or native.pinned_nbytes()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
