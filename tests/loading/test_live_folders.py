"""A live model that watches a folder: a new save into it is loaded when it is complete, and never some of each."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckptool import LiveModel, SourceChanged
from ckptool.reference.nets import LeNet
from ckptool.sources.files import FileSource
from ckptool.sources.paths import POINTERS
from ckptool.sources.versions import file_identity, is_committed
from tests.each import each
from tests.loading.test_live_model import IMAGES, lenet, within


def save_in_two(folder: Path, seed: int, *, index: bool = True) -> None:
    """Save a folder as libraries do: the shards one by one, in place of those before, then the index."""
    state = lenet(seed).state_dict()
    names = list(state)
    shard_of = {name: f"model-0000{1 + (place > 3)}-of-00002.safetensors" for place, name in enumerate(names)}
    for shard in dict.fromkeys(shard_of.values()):
        fresh = folder / f"{shard}.tmp"
        save_file({name: state[name] for name in names if shard_of[name] == shard}, fresh)
        fresh.rename(folder / shard)
    if index:
        commit(folder, shard_of)


def commit(folder: Path, shard_of: dict[str, str] | None = None) -> None:
    """Put an index there, or the same one anew."""
    path = folder / "model.safetensors.index.json"
    text = path.read_text() if shard_of is None else json.dumps({"weight_map": shard_of})
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


def test_a_folder_is_loaded_when_a_save_into_it_is_complete(tmp_path: Path) -> None:
    told: list[Any] = []
    save_in_two(tmp_path, 1)
    with LiveModel(LeNet().eval(), tmp_path) as live:
        live.watch(tmp_path, every=0.03, on_reload=told.append)
        (tmp_path / "checkpoint-600").mkdir()
        save_in_two(tmp_path / "checkpoint-600", 3)
        save_in_two(tmp_path, 2, index=False)
        time.sleep(0.3)
        assert told == []  # the index is the old one
        assert torch.equal(live(IMAGES), lenet(1)(IMAGES))
        commit(tmp_path)
        assert within(20, lambda: len(told) == 1)
        assert torch.equal(live(IMAGES), lenet(2)(IMAGES))


def test_a_name_of_an_older_save_beside_weights_holds_nothing_up(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("global_step500")
    save_file(lenet(1).state_dict(), tmp_path / "model.safetensors")
    with LiveModel(LeNet().eval(), tmp_path) as live:
        live.watch(tmp_path, every=0.03)
        save_file(lenet(2).state_dict(), tmp_path / "new")
        (tmp_path / "new").rename(tmp_path / "model.safetensors")
        assert within(20, lambda: torch.equal(live(IMAGES), lenet(2)(IMAGES)))


@each("pointer", POINTERS)
def test_a_save_into_a_subfolder_is_complete_when_its_name_is_written(pointer: str, tmp_path: Path) -> None:
    (tmp_path / pointer).write_text("1")
    (tmp_path / "1").mkdir()
    before = file_identity(tmp_path)
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "model.pt").write_bytes(b"x")
    without = file_identity(tmp_path)
    (tmp_path / pointer).write_text("2, now")
    after = file_identity(tmp_path)

    assert before is not None
    assert without is not None
    assert after is not None
    assert not is_committed(without, before)
    assert is_committed(after, before)


def test_a_folder_that_comes_whole_or_bit_by_bit_is_loaded(tmp_path: Path) -> None:
    folder, told = tmp_path / "serving", list[Any]()
    with LiveModel(LeNet().eval()) as live:
        live.watch(folder, every=0.03, on_reload=told.append)
        (tmp_path / "new").mkdir()
        save_in_two(tmp_path / "new", 1)
        (tmp_path / "new").rename(folder)
        assert within(20, lambda: len(told) == 1)
        (tmp_path / "next").mkdir()
        save_in_two(tmp_path / "next", 2)
        folder.rename(tmp_path / "old")
        (tmp_path / "next").rename(folder)
        assert within(20, lambda: len(told) == 2)
        assert torch.equal(live(IMAGES), lenet(2)(IMAGES))


def test_shards_of_two_saves_are_never_loaded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_in_two(tmp_path, 1)
    live = LiveModel(LeNet().eval(), tmp_path)
    before = live.digest
    real = FileSource.open_sibling

    def replacing(source: FileSource, name: str) -> FileSource:
        if "00002" in name:
            save_in_two(tmp_path, 2, index=False)
        return real(source, name)

    monkeypatch.setattr(FileSource, "open_sibling", replacing)
    with pytest.raises(SourceChanged):
        live.reload(tmp_path)
    monkeypatch.undo()
    assert live.digest == before
    assert live.reload(tmp_path).digest != before
