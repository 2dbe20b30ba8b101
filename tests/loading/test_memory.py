"""What loading costs, measured by the system in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool import OutOfMemory
from ckptool.loading.memory import assembly
from tests.scale import scaled, times

MIB = 1 << 20
LAYERS = times(8, 16)
WEIGHTS_NBYTES = LAYERS * 4 * MIB

pytestmark = [
    scaled,
    pytest.mark.skipif(
        not Path("/proc/self/smaps_rollup").exists(), reason="the system does not say what a process has in memory"
    ),
]

SCRIPT = """
import gc, json, os, sys
import torch, ckptool
from torch import nn

path, LAYERS = sys.argv[1], int(sys.argv[2])
ckptool.load, ckptool.load_into, ckptool.LiveModel, ckptool.predict_memory  # imports are not part of what is measured


def status(name):
    with open("/proc/self/status") as stream:
        return next(int(line.split()[1]) << 10 for line in stream if line.startswith(name + ":"))


def reset_peak():
    gc.collect()
    with open("/proc/self/clear_refs", "w") as stream:
        stream.write("5")
    return status("VmRSS")


def read_nbytes():
    with open("/proc/self/io") as stream:
        return int(stream.readline().split()[1])


def share():
    \"\"\"Return its share of the file, and what it alone has: how libraries are shared depends on who else runs.\"\"\"
    found, counted = 0, ""
    with open("/proc/self/smaps") as stream:
        for line in stream:
            word, *rest = line.split()
            if not word.endswith(":"):  # the line that a mapping begins with; the fifth of the rest is its file
                counted = "Pss:" if rest[4:] == [path] else "Private_Dirty:"
            elif word == counted:
                found += int(rest[0]) << 10
    return found


def touch(tensors):
    return sum(float(tensor.view(-1)[::256].double().sum()) for tensor in tensors)


def build(device="cpu", dtype=torch.float32):
    with torch.device(device):
        return nn.Sequential(*(nn.Linear(1024, 1024, bias=False, dtype=dtype) for _ in range(LAYERS)))


def save_small():
    \"\"\"Return a checkpoint to do first what is measured: the pages of torch's own code come when it first runs.\"\"\"
    torch.save({"x": torch.ones(1 << 20)}, path + ".small")
    return path + ".small"


def fill_small(device="meta", model_dtype=torch.float32, **options):
    small = nn.ParameterDict({"x": torch.empty(1 << 20, device=device, dtype=model_dtype)})
    ckptool.load_into(small, save_small(), **options)
    touch(small.values())


def fill(device="meta", model_dtype=torch.float32, **options):
    fill_small(device, model_dtype, **options)
    model = build(device, model_dtype)
    before, read = reset_peak(), read_nbytes()
    report = ckptool.load_into(model, path, **options)
    touch(model.parameters())
    return {"peak": status("VmHWM") - before, "read": read_nbytes() - read, "reported": report.nbytes}


def reload(commit):
    live = ckptool.LiveModel(build(), path, commit=commit)
    before = reset_peak()
    live.reload(path)
    peak = status("VmHWM") - before
    for _ in range(2):
        live.reload(path)
    gc.collect()
    return {"peak": peak, "left": status("VmRSS") - before}


def load(**options):
    touch(ckptool.load(save_small(), **options).values())
    predicted = ckptool.predict_memory(path, **options)
    before = reset_peak()
    anonymous, mapped = status("RssAnon"), status("RssFile")
    loaded = ckptool.load(path, **options)
    untouched = status("VmRSS") - before
    touch(loaded.values())
    return {
        "predicted": predicted._asdict(),
        "host": status("RssAnon") - anonymous,
        "mapped": status("RssFile") - mapped,
        "peak": status("VmHWM") - before,
        "untouched": untouched,
    }


def start(function, *arguments):
    \"\"\"Call a function in a child; return the pipe on which its result comes.\"\"\"
    ours, theirs = os.pipe()
    if os.fork():
        os.close(theirs)
        return os.fdopen(ours)
    torch.set_num_threads(1)
    os.write(theirs, json.dumps(function(*arguments)).encode())
    os._exit(0)


def apart(function, **options):
    with start(lambda: function(**options)) as stream:
        result = json.load(stream)
    assert os.wait()[1] == 0
    return result


def work(ready, measure, leave):
    before = share()
    weights, model = ckptool.load(path), build("meta")
    ckptool.load_into(model, path)
    touch(model.parameters()), touch(weights.values())
    os.write(ready, b"x")
    os.read(measure, 1)  # when all have it in memory
    found = share() - before
    os.write(ready, b"x")
    os.read(leave, 1)  # when all have measured; another pipe, or the first one here would take what another waits for
    return found


def workers():
    torch.set_num_threads(1)
    fill_small()  # once, before they fork: what torch and Python need at first is not part of what is measured
    gc.freeze()  # as servers do before they fork: a collection in a child copies what it looks at
    ready, measure, leave = os.pipe(), os.pipe(), os.pipe()
    streams = [start(work, ready[1], measure[0], leave[0]) for _ in range(4)]
    for _, go in (measure, leave):
        for _ in range(4):
            os.read(ready[0], 1)
        os.write(go, b"gggg")
    found = [json.load(stream) for stream in streams]
    assert [os.wait()[1] for _ in streams] == [0] * 4
    return found


half = torch.float16
ckptool.load, ckptool.load_into, ckptool.LiveModel  # imported now: reading modules is reading too
print(json.dumps({
    "meta": apart(fill),
    "meta, read": apart(fill, mmap=False),
    "meta, cast": apart(fill, dtype=half),
    "real": apart(fill, device="cpu"),
    "real, verified": apart(fill, device="cpu", verify=True),
    "real, cast": apart(fill, device="cpu", model_dtype=half),
    "in_place": apart(reload, commit="in_place"),
    "swap": apart(reload, commit="swap"),
    "loads": {
        "mapped": apart(load, mmap=True),
        "read": apart(load, mmap=False),
        "cast": apart(load, mmap=True, dtype=half),
    },
    "workers": workers(),
}))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a training checkpoint of 32 or 64 MiB of weights, and twice as much of an optimizer's state."""
    path = tmp_path_factory.mktemp("memory") / "training.pth"
    weights = {f"{number}.weight": torch.rand(1024, 1024) for number in range(LAYERS)}
    state = {n: {"step": torch.tensor(1.0), "exp_avg": w, "exp_avg_sq": w + 1} for n, w in enumerate(weights.values())}
    state = {n: {name: tensor.clone() for name, tensor in one.items()} for n, one in state.items()}
    groups = [{"lr": 0.1, "params": list(range(LAYERS))}]
    torch.save({"model": weights, "optimizer": {"state": state, "param_groups": groups}}, path)
    return path


@pytest.fixture(scope="module")
def measured(checkpoint: Path) -> dict[str, Any]:
    """Return what each way of loading cost, each in a process of its own that had torch before."""
    command = [sys.executable, "-c", SCRIPT, str(checkpoint), str(LAYERS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_filling_a_model_costs_its_weights(measured: dict[str, Any]) -> None:
    assert measured["meta"]["peak"] < WEIGHTS_NBYTES + 8 * MIB
    assert measured["meta, read"]["peak"] < WEIGHTS_NBYTES + 8 * MIB
    # Mapped pages that were cast are in memory too, until the system wants them back.
    assert measured["meta, cast"]["peak"] < WEIGHTS_NBYTES * 3 // 2 + 8 * MIB


@pytest.mark.parametrize("how", ["real", "real, verified", "real, cast"])
def test_filling_memory_that_is_there_costs_a_few_buffers(how: str, measured: dict[str, Any]) -> None:
    mapped = WEIGHTS_NBYTES if how == "real, cast" else 0  # pages of the file, which the system may drop
    assert measured[how]["peak"] < mapped + 18 * MIB


def test_the_optimizer_s_bytes_are_not_read(measured: dict[str, Any]) -> None:
    fills = {name: one["read"] for name, one in measured.items() if "reported" in one}
    near = 4 * MIB  # modules are read too

    assert all(one["reported"] == WEIGHTS_NBYTES for one in measured.values() if "reported" in one)
    assert max(fills["meta"], fills["meta, cast"]) < near
    for name, times_read in {"meta, read": 1, "real": 1, "real, verified": 2, "real, cast": 0}.items():
        assert times_read * WEIGHTS_NBYTES <= fills[name] < times_read * WEIGHTS_NBYTES + near, fills


@pytest.mark.parametrize("commit", ["in_place", "swap"])
def test_reloading_costs_the_weights_once_and_gives_them_back(commit: str, measured: dict[str, Any]) -> None:
    assert measured[commit]["peak"] < WEIGHTS_NBYTES + 16 * MIB
    assert measured[commit]["left"] < 16 * MIB


@pytest.mark.parametrize("how", ["mapped", "read", "cast"])
def test_what_is_predicted_is_what_is_needed(how: str, measured: dict[str, Any]) -> None:
    one, near = measured["loads"][how], 4 * MIB
    predicted = one["predicted"]

    whole = {"mapped": ("mapped_nbytes", 1), "read": ("host_nbytes", 1), "cast": ("host_nbytes", 0.5)}[how]
    assert predicted[whole[0]] == WEIGHTS_NBYTES * whole[1]
    assert abs(predicted["host_nbytes"] - one["host"]) < near
    assert abs(predicted["mapped_nbytes"] - one["mapped"]) < near
    assert predicted["device_nbytes"] == 0
    pages = WEIGHTS_NBYTES if how == "cast" else 0  # see above
    needed = predicted["host_nbytes"] + predicted["mapped_nbytes"] + predicted["passing_nbytes"]
    assert one["peak"] < needed + pages + near
    assert how != "mapped" or one["untouched"] < near  # mapped tensors cost nothing until they are read


def test_a_storage_that_is_cast_is_there_twice_however_large_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "_CAST_NBYTES", 1000)
    sizes = [300, 100, 1000, 50]  # floats: the third alone is more than is read in one go
    torch.save({str(size): torch.ones(size) for size in sizes}, tmp_path / "x.pth")

    cost = ckptool.predict_memory(tmp_path / "x.pth", dtype=torch.float16, mmap=False)

    assert (cost.host_nbytes, cost.passing_nbytes) == (2 * sum(sizes), 4 * (100 + 1000))


def test_workers_share_one_copy_of_a_file(measured: dict[str, Any]) -> None:
    assert len(measured["workers"]) == 4
    # Each copies 7 to 8 MiB of what it was forked with, for Python counts there who uses what.
    assert sum(measured["workers"]) <= 1.15 * WEIGHTS_NBYTES + 4 * 12 * MIB, measured["workers"]


# What does not fit


def test_what_does_not_fit_is_refused_before_anything_is_allocated(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(LAYERS)))
    monkeypatch.setattr(assembly, "free_memory", lambda: WEIGHTS_NBYTES - 1)
    monkeypatch.setattr(torch, "empty", None)

    for options in ({"mmap": False}, {"dtype": torch.float64}):
        with pytest.raises(OutOfMemory) as caught:
            ckptool.load(checkpoint, **options)
        needed = WEIGHTS_NBYTES * (2 if "dtype" in options else 1)
        assert (caught.value.needed, caught.value.actual) == (needed, WEIGHTS_NBYTES - 1)
        assert caught.value.path == str(checkpoint)
        assert "mmap=True" in str(caught.value.hint)
    with pytest.raises(OutOfMemory):
        ckptool.load_into(model, checkpoint, mmap=False)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_what_fits_just_so_is_loaded(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "free_memory", lambda: WEIGHTS_NBYTES)
    assert len(ckptool.load(checkpoint, mmap=False)) == LAYERS
    monkeypatch.setattr(assembly, "free_memory", lambda: 1)
    assert len(ckptool.load(checkpoint)) == LAYERS  # mapped pages can be dropped
    monkeypatch.setattr(assembly, "free_memory", lambda: None)  # nobody knows
    assert len(ckptool.load(checkpoint, mmap=False)) == LAYERS


def test_prediction_reads_the_index_alone(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ckptool.predict_memory(checkpoint, "meta") == (0, 0, 0, 0)
    monkeypatch.setattr(torch, "empty", None)
    monkeypatch.setattr(torch, "frombuffer", None)

    assert ckptool.predict_memory(checkpoint, mmap=False).host_nbytes == WEIGHTS_NBYTES
    assert ckptool.predict_memory(checkpoint, key="model").mapped_nbytes == WEIGHTS_NBYTES
