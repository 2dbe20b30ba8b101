"""A process that has loaded can fork, and its children can compute: no pool of threads is left in their way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.loading.same import saved
from tests.scale import exhaustive, times

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")

SCRIPT = """
import os, sys, time
import torch, ckptool
from torch import nn

path, times = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(4)  # so that there is a pool to start, however few cores there are


def model(**options):
    with torch.device(options.pop("device", "cpu")):
        return nn.Sequential(*(nn.Linear(512, 512, bias=False, **options) for _ in range(4)))


def optimizer_of(net):
    return torch.optim.Adam(net.parameters())


# What the parent has is made without arithmetic of its own: that is what is to be held.
with torch.device("meta"):
    empty = model(device="meta")
real = model(device="meta").to_empty(device="cpu").eval()
half = model(device="meta", dtype=torch.float16).to_empty(device="cpu").eval()
run = {
    "plain": lambda: ckptool.load(path, key="model"),
    "read": lambda: ckptool.load(path, key="model", mmap=False),
    "verified": lambda: ckptool.load(path, key="model", verify=True),
    "cast": lambda: ckptool.load(path, key="model", dtype=torch.bfloat16),
    "read and cast": lambda: ckptool.load(path, key="model", mmap=False, dtype=torch.float64),
    "kinds": lambda: ckptool.load(path, key="kinds", dtype=torch.float64),
    "meta": lambda: ckptool.load_into(empty, path, key="model"),
    "real": lambda: ckptool.load_into(real, path, key="model"),
    "real, cast": lambda: ckptool.load_into(half, path, key="model"),
    "real, views": lambda: ckptool.load_into(real, path, key="turned"),
    "optimizer": lambda: ckptool.load_into(half, path, key="model", optimizer=optimizer_of(half)),
    "in_place": lambda: ckptool.LiveModel(real, key="model").reload(path),
    "in_place, cast": lambda: ckptool.LiveModel(half, key="model").reload(path),
    "swap": lambda: ckptool.LiveModel(real, key="model", commit="swap").reload(path),
    "swap, cast": lambda: ckptool.LiveModel(half, key="model", commit="swap").reload(path),
}


def hangs(patience):  # says whether a child does not end in time
    children = []
    for _ in range(times):
        child = os.fork()
        if not child:
            with torch.no_grad():
                answer = real(torch.ones(128, 512))
                torch.ones(1 << 18).add(1)
            os._exit(0 if answer.isfinite().all() else 3)
        children.append(child)
    deadline = time.monotonic() + patience
    hanging = []
    for child in children:
        done, status = 0, 0
        while not done and time.monotonic() < deadline:
            time.sleep(0.005)
            done, status = os.waitpid(child, os.WNOHANG)
        if status:
            sys.exit(f"a child ended with {status}")
        if not done:
            hanging.append(child)
    for child in hanging:
        os.kill(child, 9)
        os.waitpid(child, 0)
    return bool(hanging)


run["real"]()
for name, load in run.items():
    load()
    if hangs(100):
        sys.exit(f"{name}: a child hangs")
# What is guarded against does happen here; if it ceases to, the guards can go.
torch.ones(1 << 22).add(1).exp()
print("a pool is noticed" if hangs(2) else "this torch survives forks")
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fork") / "x.pth"
    weights = {f"{number}.weight": torch.rand(512, 512) for number in range(4)}
    state = {n: {"step": torch.tensor(1.0), "exp_avg": w, "exp_avg_sq": w} for n, w in enumerate(weights.values())}
    kinds = {
        "sparse": torch.eye(600).add(torch.ones(600, 600)).to_sparse(),
        "rows": torch.ones(600, 600).to_sparse_csr(),
        "conj": torch.ones(600, 600, dtype=torch.complex64).conj(),
        "expanded": torch.rand(600, 1).expand(600, 600),
        "plain": torch.rand(600, 600),
    }
    content = {
        "model": weights,
        "turned": {name: tensor.t() for name, tensor in weights.items()},
        "kinds": kinds,
        "optimizer": {"state": state, "param_groups": [torch.optim.Adam(list(weights.values())).param_groups[0]]},
    }
    content["optimizer"]["param_groups"][0]["params"] = [0, 1, 2, 3]  # type: ignore[index]
    saved(content, path)
    return path


@exhaustive
@pytest.mark.filterwarnings("ignore:Sparse ")
def test_children_of_a_process_that_has_loaded_can_compute(checkpoint: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(checkpoint), str(times(1, 2))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1_000)

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in ("a pool is noticed", "this torch survives forks")
