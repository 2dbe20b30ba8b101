"""Whole models whose classes the file itself defines, as dill and cloudpickle write those of scripts."""

from __future__ import annotations

import io
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
