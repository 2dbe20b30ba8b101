"""Checkpoints of more files than a process may have open: every verb does with few what it does with many."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptool
from ckptool import open_checkpoint
from tests.each import each
from tests.formats.dcp_folder import Writer, rows
from tests.formats.deepspeed_folder import Engine
from tests.formats.said import descriptors
from tests.scale import scale, times

_MANY = times(38, 100)
_ALLOWED = times(36, 64)


@contextmanager
def few_descriptors(allowed: int = _ALLOWED) -> Iterator[None]:
    resource = pytest.importorskip("resource", reason="Windows: it has no limits on descriptors that can be set")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(path.name) for path in Path("/proc/self/fd").iterdir()}  # also by what ran before in this process
    limit, left = 0, allowed - 12
    while left:
        left -= limit not in used
        limit += 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def weight(number: int) -> dict[str, torch.Tensor]:
    return {f"layer.{number}.weight": torch.full((2, 3), float(number))}


def _shards(folder: Path) -> None:
    for number in range(_MANY):
        save_file(weight(number), folder / f"model-{number + 1:05}-of-{_MANY:05}.safetensors", {"format": "pt"})


def _index(folder: Path) -> None:
    _shards(folder)
    names = {name: f"model-{at + 1:05}-of-{_MANY:05}.safetensors" for at in range(_MANY) for name in weight(at)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def _dcp(folder: Path) -> None:
    writer = Writer(folder)
    writer.tensor("model.weight", torch.randn(_MANY, 4), rows((_MANY, 4), _MANY))
    writer.close()


def _hf_storage(folder: Path) -> None:
    for number in range(_MANY):
        text = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [number, 0]}})}
        save_file({"w": torch.ones(1, 4)}, folder / f"shard-{number + 1:05}-model-00001-of-00001.safetensors", text)


def _megatron(folder: Path) -> None:
    for number in range(_MANY):
        (folder / f"mp_rank_{number:02}").mkdir()
        args = argparse.Namespace(tensor_model_parallel_size=_MANY)
        torch.save({"model": weight(number), "args": args}, folder / f"mp_rank_{number:02}/model_optim_rng.pt")


def _universal(folder: Path) -> None:
    for number in range(_MANY):
        (folder / f"zero/layer.{number}.weight").mkdir(parents=True)
        torch.save({"param": torch.ones(2, 3)}, folder / f"zero/layer.{number}.weight/fp32.pt")
    torch.save({"module": {}, "buffer_names": []}, folder / "mp_rank_00_model_states.pt")


def _pipeline(folder: Path) -> None:
    for number in range(min(_MANY, 60)):
        (folder / f"part{number}").mkdir()
        save_file(weight(number), folder / f"part{number}/model.safetensors")
    (folder / "model_index.json").write_text("{}")


def _folders(folder: Path) -> None:
    for number in range(min(_MANY, 60)):
        writer = Writer(folder / f"step-{number}")
        writer.tensor("w", torch.ones(2))
        writer.close()


LAYOUTS: dict[str, Callable[[Path], object]] = {
    "an index": _index,
    "a set": _shards,
    "dcp": _dcp,
    "safetensors of dcp": _hf_storage,
    "zero 2": lambda folder: Engine(2, _MANY).save(folder),
    "zero 3": lambda folder: Engine(3, _MANY).save(folder),
    "megatron": _megatron,
    "universal": _universal,
    "a pipeline": _pipeline,
    "several": _folders,
}
_LISTED = ("megatron", "a pipeline", "several")
"""Of these, no one state dict is the weights."""


@each("name", LAYOUTS)
def test_every_verb_does_with_few_descriptors_what_it_does_with_many(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    LAYOUTS[name](folder)
    with open_checkpoint(folder) as checkpoint:
        members = [one.name for one in checkpoint.members]
        expected = {name: tensor.read() for name, tensor in checkpoint.tensors.items()}
    is_deep = bool(scale) or name == "dcp"
    checked = str(ckptool.check(folder, deep=is_deep))
    with few_descriptors():
        with open_checkpoint(folder) as checkpoint, open_checkpoint(folder) as again:
            assert [one.name for one in checkpoint.members] == members
            for key, tensor in checkpoint.tensors.items():
                assert tensor.read() == again.tensors[key].read() == expected[key]
        assert str(ckptool.check(folder, deep=is_deep)) == checked
        if name in _LISTED or not is_deep:
            return
        loaded = ckptool.load(folder)
        assert ckptool.diff(folder, folder).same
        forms: dict[str, dict[str, Any]] = {
            "one.safetensors": {},
            "one.pt": {"form": "state_dict"},
            "shards": {"max_shard_size": 24},
            "dcp": {"form": "dcp"},
        }
        for target, options in forms.items():
            ckptool.migrate(folder, tmp_path / target, **options)
            found = ckptool.load(tmp_path / target)
            assert all(torch.equal(tensor, found[key]) for key, tensor in loaded.items())


def test_mappings_leave_descriptors_for_others(tmp_path: Path) -> None:
    _index(tmp_path)
    with few_descriptors():
        loaded = ckptool.load(tmp_path, mmap=True)
        with Path("/dev/null").open(), Path("/dev/null").open(), Path("/dev/null").open():
            assert len(loaded) == _MANY
    assert all(torch.equal(loaded[key], tensor) for at in range(_MANY) for key, tensor in weight(at).items())


def test_what_nobody_closed_leaves_nothing_open(tmp_path: Path) -> None:
    _dcp(tmp_path / "many")
    before = descriptors()
    open_checkpoint(tmp_path / "many").tensors["model.weight"].read()
    assert descriptors() == before
