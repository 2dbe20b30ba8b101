"""A parent loads, and the workers that it forks answer, also those that it forks later."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.scale import exhaustive
from tests.serving.running import IMAGES, Server, save_as_gpus_do, serving

GUNICORN = "-m gunicorn --bind 127.0.0.1:PORT --graceful-timeout 2 -c gunicorn_conf.py gunicorn_app:app"


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
