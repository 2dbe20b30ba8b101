"""The process that has the classes of ``models_of_strangers.py``, under a module name that exists nowhere else."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

STRANGER = "module_of_a_stranger"
ROOT = Path(__file__).parents[2]

LOOP = """
import sys
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""


class Strangers:
    """A folder of their models in every container, and their process, which can load them again."""

    def __init__(self, home: Path, folder: Path) -> None:
        shutil.copy(Path(__file__).with_name("models_of_strangers.py"), home / f"{STRANGER}.py")
        self._process = subprocess.Popen(
            [sys.executable, "-c", LOOP],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(home), str(ROOT)])},
        )
        self.folder = folder
        self.run(f"import {STRANGER}; {STRANGER}.save_all({str(folder)!r})")
        assert importlib.util.find_spec(STRANGER) is None  # here

    def run(self, statements: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(statements, file=self._process.stdin, flush=True)
        while (line := self._process.stdout.readline()) != "done\n":
            assert line, "it failed, and says why on stderr"

    def close(self) -> None:
        self._process.communicate()
