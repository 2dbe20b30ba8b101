"""The process that has the classes of ``models_of_strangers.py``, under a module name that exists nowhere else."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from functools import cached_property
from pathlib import Path

STRANGER = "module_of_a_stranger"
ROOT = Path(__file__).parents[2]
PATIENCE = 600.0
"""Seconds that saving them may take on a busy machine."""

LOOP = """
import sys
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""


class Strangers:
    """A folder of their models in every container, and their process, which can load them again."""

    def __init__(self, home: Path) -> None:
        """``home`` is one folder for all processes of the tests: the first of them has the models saved there."""
        self.folder, self._home, done = home / "saved", home, home / "done"
        try:
            self.folder.mkdir(parents=True)
        except FileExistsError:
            until = time.monotonic() + PATIENCE
            while not done.exists():
                assert time.monotonic() < until, "the process that saves them has failed"
                time.sleep(0.05)
        else:
            shutil.copy(Path(__file__).with_name("models_of_strangers.py"), home / f"{STRANGER}.py")
            self.run(f"{STRANGER}.save_all({str(self.folder)!r})")
            done.touch()
        assert importlib.util.find_spec(STRANGER) is None  # here

    @cached_property
    def _process(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", f"import {STRANGER}\n{LOOP}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(self._home), str(ROOT)])},
        )

    def run(self, statements: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(statements, file=self._process.stdin, flush=True)
        while (line := self._process.stdout.readline()) != "done\n":
            assert line, "it failed, and says why on stderr"

    def close(self) -> None:
        if "_process" in vars(self):
            self._process.communicate()
