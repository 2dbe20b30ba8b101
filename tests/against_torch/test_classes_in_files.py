"""Whole models whose classes the file itself defines, as dill and cloudpickle write those of scripts."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool


@pytest.mark.parametrize("library", ["cloudpickle", "dill"])
def test_a_class_that_the_file_defines_is_named(library: str) -> None:
    pickler = pytest.importorskip(library)
    made: Any = type("InScript", (torch.nn.Linear,), {"__module__": "__main__"})
    file = io.BytesIO()
    torch.save(made(2, 3), file, pickle_module=pickler)
    with ckptool.open_checkpoint(file.getvalue()) as checkpoint:
        ((_, walk),) = checkpoint.walks

        assert walk.foreign_classes == ["InScript (defined in the file)"]
        assert list(checkpoint.tensors) == ["weight", "bias"]


SCRIPT = """
import dataclasses, enum, importlib, sys
import torch

class Plain:
    def __init__(self):
        self.scale = 2
    def forward(self, x):
        return x * self.scale

@dataclasses.dataclass
class Options:
    rate: float = 0.1
    layers: list = dataclasses.field(default_factory=list)

class Kind(enum.Enum):
    FIRST = 1

class Restored(Plain):
    def __setstate__(self, state):
        self.__dict__.update(state)

class Named(dict):
    def __getattr__(self, name):
        return self[name]

pickler = importlib.import_module(sys.argv[1])
for value in (Plain(), Options(), Kind.FIRST, Restored(), Named(a=1)):
    name = f"{sys.argv[2]}/{type(value).__name__}"
    torch.save({"x": value}, f"{name}.pt", pickle_module=pickler)
    with open(f"{name}.pkl", "wb") as file:
        pickler.dump({"x": value}, file)
"""


@pytest.mark.parametrize("library", ["cloudpickle", "dill"])
def test_classes_in_a_file_are_code_until_it_is_known_what_they_reach(library: str, tmp_path: Path) -> None:
    pytest.importorskip(library)
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "files").mkdir()
    subprocess.run([sys.executable, tmp_path / "script.py", library, tmp_path / "files"], check=True)

    grades = {path.name: ckptool.check(path).grade for path in (tmp_path / "files").iterdir()}
    assert set(grades.values()) == {"code"}
