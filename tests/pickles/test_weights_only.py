"""The stock loader's tables, held against torch's own."""

from __future__ import annotations

import inspect
import pickle
import pickletools

import pytest
import torch
from torch import _weights_only_unpickler as stock
from torch._utils import IMPORT_MAPPING, NAME_MAPPING

from ckptool.pickles import weights_only as allowed

TORCH = "2.13"


def test_the_names_are_those_of_torch() -> None:
    if not torch.__version__.startswith(f"{TORCH}."):
        pytest.skip(f"the table is that of torch {TORCH}")

    assert set(stock._get_allowed_globals()) == allowed.ALLOWED


def test_python_2_names_are_allowed_where_torch_maps_them_to_an_allowed_one() -> None:
    for old, new in IMPORT_MAPPING.items():
        for full in allowed.ALLOWED:
            module, _, name = full.rpartition(".")
            if module == new and (old, name) not in NAME_MAPPING:
                assert allowed.is_allowed(old, name)
    assert not [new for new in NAME_MAPPING.values() if ".".join(new) in allowed.ALLOWED]
    assert not allowed.is_allowed("__builtin__", "eval")
    assert not allowed.is_allowed("os", "system")


def test_the_opcodes_are_those_of_torchs_unpickler() -> None:
    source = inspect.getsource(stock.Unpickler.load)
    named = {op.name: op.code.encode("latin-1") for op in pickletools.opcodes}
    used = {
        getattr(pickle, name)
        for name in named
        if f" {name}[0]" in source or f"[{name}[0]" in source
    }  # fmt: skip

    assert {op[0] for op in used} == set(allowed.OPCODES)
