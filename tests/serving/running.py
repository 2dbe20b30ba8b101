"""Servers as their users start them: a process on the loopback, asked over HTTP with the standard library alone."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckptool.reference.nets import LeNet
from tests.fixture_set.forging import forged, pretend, tagged

ROOT = Path(__file__).parents[2]
RECIPES = Path(__file__).parent / "recipes"
PATIENCE = 120.0
"""Seconds that anything may take on a busy machine."""

IMAGES = torch.rand(2, 1, 28, 28, generator=torch.Generator().manual_seed(7))


def save_as_gpus_do(path: Path, seed: int, *, whole: bool = False, legacy: bool = False) -> list[list[float]]:
    """Save a net in DataParallel, with the tags of cuda:0, by renaming; return what it answers to ``IMAGES``."""
    torch.manual_seed(seed)
    net = LeNet().eval()
    wrapped = nn.DataParallel(net)
    pretend(wrapped, torch.device("cuda:0"))
    fresh = path.with_suffix(".new")
    with forged(tagged("cuda:0")):
        torch.save(wrapped if whole else wrapped.state_dict(), fresh, _use_new_zipfile_serialization=not legacy)
    fresh.replace(path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the servers: answers are compared to the last bit
    try:
        with torch.inference_mode():
            return net(IMAGES).tolist()
    finally:
        torch.set_num_threads(threads)


class Server:
    """A running server, and what it has written so far."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process, self.port, self._log = process, port, log

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    @contextmanager
    def connection(self) -> Iterator[Client]:
        """Give a connection that stays: the same worker answers all of its requests."""
        client = Client(self.port)
        try:
            yield client
        finally:
            client.close()

    def ask(self, path: str, value: Any = None) -> Any:
        """Ask once, over a connection of its own."""
        with self.connection() as client:
            return client.ask(path, value)

    def until(self, what: Callable[[], Any]) -> Any:
        """Return what is found once it is true; fail, and show the log, if that never happens."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log
            try:
                if found := what():
                    return found
            except (OSError, http.client.HTTPException):
                pass
            time.sleep(0.05)
        raise AssertionError(f"waited in vain\n{self.log}")

    def stop(self) -> None:
        """Ask it to end, as a supervisor does; fail if it does not end well, or anything in it did not."""
        self.process.send_signal(signal.SIGTERM)
        # Some die of the signal once they have shut down, as the shell's programs do.
        assert self.process.wait(PATIENCE) in (0, -signal.SIGTERM), self.log
        assert "Traceback" not in self.log, self.log


class Client:
    """One connection."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        self.close = self._connection.close

    def ask(self, path: str, value: Any = None) -> Any:
        """Return the JSON of an answer; GET without a value, else POST."""
        status, text = self.answer(path, value)
        if status != 200:
            raise http.client.HTTPException(f"{status}: {text}")
        return json.loads(text)

    def answer(self, path: str, value: Any = None) -> tuple[int, str]:
        """Return the status of an answer, and its text."""
        body = None if value is None else json.dumps(value)
        headers = {"Content-Type": "application/json"}
        self._connection.request("GET" if value is None else "POST", path, body, headers)
        answer = self._connection.getresponse()
        return answer.status, answer.read().decode()


def free_ports(number: int) -> list[int]:
    """Return ports of the loopback that nothing listens on."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextmanager
def serving(
    command: str, checkpoint: Path, *, port: int | None = None, program: str = sys.executable, **environment: str
) -> Iterator[Server]:
    """Run ``PROGRAM COMMAND`` among the recipes, with PORT in it replaced by a free one, until the block ends."""
    port = port or free_ports(1)[0]
    found = {"CHECKPOINT": str(checkpoint), "PORT": str(port), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    log = checkpoint.parent / "log.txt"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [program, *command.replace("PORT", str(port)).split()],
            cwd=RECIPES,
            env={**os.environ, **found, **environment},
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield Server(process, port, log)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its workers too: a session of its own holds no one else
            process.wait()
