"""A parent loads, the workers that it forks answer: the memory of one, and no call that never returns."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from ckptool.reference.nets import MLP
from tests.scale import exhaustive
from tests.serving.running import IMAGES, PATIENCE, ROOT, Server, save_as_gpus_do, serving

GUNICORN = "-m gunicorn --bind 127.0.0.1:PORT --graceful-timeout 2 -c gunicorn_conf.py gunicorn_app:app"

# The tensors are large enough, and the threads many enough, that torch would compute with its pool in the parent:
# a pool does not survive a fork, and a worker that needs it would wait for ever.
FORKING = """
import os, sys, torch
import ckptool
from ckptool.reference.nets import MLP

torch.set_num_threads(4)
with torch.device("meta"):
    model = MLP(1024, 3).eval()
ckptool.load_into(model, sys.argv[1], dtype=torch.bfloat16)
weights = ckptool.load(sys.argv[1], dtype=torch.float64)
live = ckptool.LiveModel(MLP(1024, 3).eval(), sys.argv[1])

def worker():
    inputs = torch.ones(64, 1024)
    with torch.inference_mode():
        found = [model(inputs.bfloat16()), live(inputs), sum(x.sum() for x in weights.values())]
    torch.save(found, f"{os.getpid()}.pt")

children = []
for _ in range(2):
    child = os.fork()
    if not child:
        worker()
        os._exit(0)
    children.append(child)
for child in children:
    assert os.waitpid(child, 0)[1] == 0
print(*children)
"""


@exhaustive
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_workers_that_are_forked_after_loading_and_casting_answer(tmp_path: Path) -> None:
    torch.manual_seed(3)
    net = MLP(1024, 3).eval()
    torch.save(net.state_dict(), tmp_path / "model.pth")
    process = subprocess.Popen(
        [sys.executable, "-c", FORKING, "model.pth"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        children = process.communicate(timeout=PATIENCE)[0].split()
        assert process.returncode == 0
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # children that wait for ever, if it comes to that
    for child in children:
        halved, whole, total = torch.load(tmp_path / f"{child}.pt")
        with torch.inference_mode():
            torch.testing.assert_close(whole, net(torch.ones(64, 1024)))
            torch.testing.assert_close(halved.float(), whole, rtol=0.1, atol=0.1)
            assert total.dtype == torch.float64
            torch.testing.assert_close(total, sum(x.double().sum() for x in net.state_dict().values()))


@exhaustive
def test_a_worker_that_the_parent_forks_later_serves_what_is_there_then(tmp_path: Path) -> None:
    pytest.importorskip("gunicorn", reason="gunicorn is not installed")
    checkpoint = tmp_path / "model.pth"
    a = save_as_gpus_do(checkpoint, seed=1)

    def ask(server: Server) -> tuple[int, list[list[float]]]:
        answer = server.ask("/", IMAGES.tolist())
        return answer["worker"], answer["scores"]

    with serving(GUNICORN, checkpoint) as server:
        assert server.until(lambda: ask(server))[1] == a
        b = save_as_gpus_do(checkpoint, seed=2)
        old = {pid for pid, _ in (ask(server) for _ in range(10))}
        server.until(lambda: all(ask(server)[1] == b for _ in range(10)))
        for pid in old:
            os.kill(pid, signal.SIGKILL)  # by the system, say, for want of memory
        server.until(lambda: all((got := ask(server))[0] not in old and got[1] == b for _ in range(10)))
        server.stop()
