"""FastAPI under uvicorn, two workers on a machine without CUDA, from files that a GPU machine would have written."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import ckptool
from ckptool.reference.nets import LeNet
from tests.docs.pages import PASTED, text_of
from tests.scale import exhaustive
from tests.serving.running import IMAGES, PATIENCE, ROOT, Server, free_ports, save_as_gpus_do, serving

if find_spec("fastapi") is None or find_spec("uvicorn") is None:
    pytest.skip('needs pip install "ckptool[serve]"', allow_module_level=True)

WORKERS = 2
WATCH = f"-m uvicorn --host 127.0.0.1 --port PORT --workers {WORKERS} fastapi_watch:app"
RELOAD = "-m uvicorn --host 127.0.0.1 --port PORT fastapi_reload:app"
BODY = IMAGES.tolist()


def workers(server: Server) -> dict[int, str]:
    """Return the process of every worker, and the digest of the weights that it serves."""
    found: dict[int, str] = {}

    def all_found() -> bool:
        state = server.ask("/health")
        found[state["worker"]] = state["digest"]
        return len(found) == WORKERS

    server.until(all_found)
    return found


class Load:
    """Clients that ask without a pause, each over connections that stay for a while."""

    def __init__(self, server: Server, clients: int) -> None:
        self._server = server
        self._ended = threading.Event()
        self.answers: list[list[list[list[float]]]] = [[] for _ in range(clients)]
        self.failures: list[BaseException] = []
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(clients)]
        for thread in self._threads:
            thread.start()

    def go_on(self) -> list[int]:
        """Return how many answers each client has, once each has twenty more."""
        seen = [len(answers) for answers in self.answers]
        self._server.until(
            lambda: self.failures or all(len(x) > n + 20 for x, n in zip(self.answers, seen, strict=True))
        )
        return seen

    def end(self) -> None:
        """Stop asking; fail if anything but an answer ever came."""
        self._ended.set()
        for thread in self._threads:
            thread.join()
        assert self.failures == []

    def _ask(self, number: int) -> None:
        try:
            with self._server.connection() as client:
                while not self._ended.is_set():
                    self.answers[number].append(client.ask("/predict", BODY))
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.failures.append(error)


@exhaustive
def test_workers_answer_as_the_model_that_was_saved_and_change_to_another_under_load(tmp_path: Path) -> None:
    checkpoint = tmp_path / "model.pth"
    a = save_as_gpus_do(checkpoint, seed=1)
    with serving(WATCH, checkpoint) as server:
        first = workers(server)
        load = Load(server, clients=4)
        load.go_on()
        b = save_as_gpus_do(checkpoint, seed=2, whole=True, legacy=True)  # another form does as well
        digest = ckptool.LiveModel(LeNet(), checkpoint).digest
        server.until(lambda: load.failures or set(workers(server).values()) == {digest})
        swapped = load.go_on()
        load.end()

        for answers, n in zip(load.answers, swapped, strict=True):
            change = answers.index(b)
            assert 0 < change <= n + 1  # the one answer that may have been on its way
            assert answers == [a] * change + [b] * (len(answers) - change)
        assert workers(server).keys() == first.keys()  # none died
        server.stop()


@exhaustive
def test_a_file_that_cannot_be_loaded_leaves_the_old_weights_in_every_worker(tmp_path: Path) -> None:
    checkpoint, fresh, other = tmp_path / "model.pth", tmp_path / "fresh", tmp_path / "other"
    a = save_as_gpus_do(checkpoint, seed=1)
    data, middle = checkpoint.read_bytes(), checkpoint.stat().st_size // 2
    torch.save(torch.nn.Linear(3, 4).state_dict(), other)
    bad = {
        "does not match its checksum": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
        "truncated": data[:middle],
        "the weights do not fit": other.read_bytes(),
    }
    with serving(WATCH, checkpoint) as server:
        first = workers(server)
        load = Load(server, clients=2)
        for message, damaged in bad.items():
            fresh.write_bytes(damaged)
            fresh.replace(checkpoint)
            server.until(lambda message=message: load.failures or server.log.count(message) == WORKERS)
        load.go_on()
        load.end()
        assert all(answers == [a] * len(answers) for answers in load.answers)
        assert workers(server) == first

        b = save_as_gpus_do(checkpoint, seed=2)
        digest = ckptool.LiveModel(LeNet(), checkpoint).digest
        server.until(lambda: set(workers(server).values()) == {digest})
        assert server.ask("/predict", BODY) == b
        assert workers(server).keys() == first.keys()
        server.stop()


@exhaustive
def test_a_request_can_reload_and_is_told_why_not(tmp_path: Path) -> None:
    checkpoint = tmp_path / "model.pth"
    a = save_as_gpus_do(checkpoint, seed=1)
    with serving(RELOAD, checkpoint) as server:
        server.until(lambda: server.ask("/predict", BODY) == a)
        with server.connection() as client:
            checkpoint.write_bytes(checkpoint.read_bytes()[:5000])
            status, text = client.answer("/reload", {})
            answer = json.loads(text)
            assert status == 409
            assert answer["kind"] == "truncated-zip"
            assert answer["hint"] == "Download the file again, or see what is left of it."
            assert client.ask("/predict", BODY) == a

            b = save_as_gpus_do(checkpoint, seed=2)
            assert len(client.ask("/reload", {})["digest"]) == 71
            assert client.ask("/predict", BODY) == b
        server.stop()


@exhaustive
def test_the_server_of_the_readme_runs_as_it_is_pasted(tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    ((pasted, _, printed),) = PASTED.findall(text_of("README.md"))
    install, _, commands = pasted.partition("\n")
    assert install == 'pip install ".[serve]"'
    for name in ("fixtures", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    port = free_ports(1)[0]  # that of the page may be taken
    commands = commands.replace(" uvicorn ", f" uvicorn --port {port} ").replace(":8000/", f":{port}/")
    assert commands.count(str(port)) == 3
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    run = subprocess.run(
        ["bash", "-c", commands],
        cwd=tmp_path,
        env={**os.environ, "PATH": search, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )

    assert run.stdout == printed
    assert re.fullmatch("reloaded: model.pth: 10 of 10 tensors.*\n", run.stderr)


@exhaustive
def test_a_worker_that_cannot_load_does_not_start(tmp_path: Path) -> None:
    checkpoint = tmp_path / "model.pth"
    checkpoint.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with serving(RELOAD, checkpoint) as server:
        assert server.process.wait(120) != 0
        assert "a Git LFS pointer" in server.log
