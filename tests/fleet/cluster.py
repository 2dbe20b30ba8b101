"""A real Ray cluster on loopback: a head and a second node, each with a worker, as processes of their own."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

COMMAND = 'pip install "ckptool[ray]"'
ROOT = Path(__file__).parents[2]
_AT_WORK = re.compile(rb"ray::(?!IDLE|\w*Agent)")


class Cluster:
    """
    Used in a ``with`` block; ``address`` is where the head is, ``imports`` what each process has in front.

    ``own`` is what the environment of a node, by its number, has besides. With ``own_core``, each node has one core to
    itself, as machines have their own.
    """

    def __init__(
        self,
        imports: Path | None = None,
        nodes: int = 2,
        own: Callable[[int], dict[str, str]] = lambda _: {},
        *,
        own_core: bool = False,
    ) -> None:
        self.address = ""
        self._folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # paths of sockets are short
        path = os.pathsep.join(map(str, (*([imports] if imports else ()), ROOT)))
        self.environment = {
            **os.environ,
            "PYTHONPATH": path,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",  # its ports are open to the network
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }
        self._nodes: list[subprocess.Popen[bytes]] = []
        self._count = nodes
        self._own = own
        self._own_core = own_core

    def __enter__(self) -> Self:
        try:
            self._start("--head", "--port=0", f"--temp-dir={self._folder}", "--include-dashboard=false")
            self.address = self._wait_for(r"--address='([^']+)'")
            for _ in range(self._count - 1):
                self._start(f"--address={self.address}")
                self._wait_for("Ray runtime started")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node in reversed(self._nodes):
            node.terminate()
        for node in self._nodes:
            try:
                node.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(node.pid, signal.SIGKILL)
                node.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, *options: str) -> None:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options, "--num-cpus=1", "--block"]
        command += [
            "--node-ip-address=127.0.0.1",
            "--min-worker-port=0",
            "--max-worker-port=0",
            "--disable-usage-stats",
        ]
        command += ["--object-store-memory=100000000"]
        number = len(self._nodes)
        environment = {**self.environment, **self._own(number)}
        with self._log(number).open("wb") as said:
            node = subprocess.Popen(
                command, stdout=said, stderr=said, env=environment, cwd=self._folder, start_new_session=True
            )
        self._nodes.append(node)
        if self._own_core:
            os.sched_setaffinity(node.pid, {sorted(os.sched_getaffinity(0))[number]})  # what it starts has the same

    def _log(self, number: int) -> Path:
        return self._folder / f"node-{number}.log"

    def _wait_for(self, pattern: str) -> str:
        path = self._log(len(self._nodes) - 1)
        until = time.monotonic() + 90
        while True:
            text = path.read_text(errors="replace")
            found = re.search(pattern, text)
            if found:
                return found[found.re.groups]
            if time.monotonic() > until or self._nodes[-1].poll() is not None:
                raise RuntimeError(f"a node of Ray did not start: {text}")
            time.sleep(0.05)

    def at_work(self) -> list[int]:
        """Return the worker processes that run a task now."""
        return [pid for pid in self._processes() if _AT_WORK.match(_command(pid))]

    def _processes(self) -> list[int]:
        """Return all processes of the nodes."""
        found = [node.pid for node in self._nodes]
        for pid in found:
            try:
                found += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
            except OSError:  # it has ended
                continue
        return found


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
