"""Checkpoints in pieces in memory, in models and beside each other: as torch puts them together."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckptool
from ckptool.errors import CkptoolError, DamagedFile, SourceChanged
from ckptool.loading.memory.filling import DeviceMemory, HostMemory
from ckptool.sources.folder import FolderSource
from ckptool.tensors.pieces import PiecesSource
from tests.each import each
from tests.formats.dcp_folder import Box, columns, rows, save

TENSORS = {
    "model.rows": torch.randn(60, 500),
    "model.columns": torch.randn(500, 70, dtype=torch.float64),
    "model.middle": torch.randint(0, 100, (7, 9, 30)).to(torch.int16),
    "model.narrow": torch.randn(33, 20).bfloat16(),
    "model.complex": torch.randn(6, 8, dtype=torch.complex128),
    "model.flags": torch.rand(50) < 0.5,
    "model.scalar": torch.tensor(2.5),
    "model.empty": torch.zeros(0, 4),
}
CUTS: dict[str, list[Box]] = {
    "model.rows": rows((60, 500), 4),
    "model.columns": columns((500, 70), 3),
    "model.middle": rows((7, 9, 30), 2, 1),
    "model.narrow": [((0, 0), (20, 20)), ((20, 0), (13, 7)), ((20, 7), (13, 13))],
    "model.complex": columns((6, 8), 3),
    "model.flags": rows((50,), 3),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("dcp") / "cut", TENSORS, CUTS, files=3)


@pytest.fixture(scope="module")
def truth(folder: Path) -> dict[str, torch.Tensor]:
    path = folder.parent / "whole.pt"
    dcp_to_torch_save(folder, path)
    found: dict[str, torch.Tensor] = torch.load(path)["model"]
    return found


def model_like(tensors: dict[str, torch.Tensor], device: str = "cpu") -> torch.nn.Module:
    model = torch.nn.Module()
    for name, value in tensors.items():
        model.register_buffer(name, torch.zeros_like(value, device=device))
    return model


def equal(found: dict[str, Any], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], value) for name, value in wanted.items())


@each("options", [{}, {"verify": True}, {"mmap": False}, {"mmap": True}])
def test_load_gives_what_torch_puts_together(
    folder: Path, truth: dict[str, torch.Tensor], options: dict[str, Any]
) -> None:
    assert equal(dict(ckptool.load(folder, **options)), truth)
    assert ckptool.predict_memory(folder).host_nbytes == sum(value.nbytes for value in truth.values())


def test_models_are_filled_on_any_device_and_in_any_type(folder: Path, truth: dict[str, torch.Tensor]) -> None:
    for device in ("cpu", "meta"):
        model = model_like(truth, device)
        ckptool.load_into(model, folder, verify=True)
        assert equal(dict(model.named_buffers()), truth)
    half = {name: value.half() if value.is_floating_point() else value for name, value in truth.items()}
    model = model_like(half)
    ckptool.load_into(model, folder)
    assert equal(dict(model.named_buffers()), half)
    assert equal(dict(ckptool.load(folder, dtype=torch.float16)), half)


def test_no_bytes_but_those_of_what_is_wanted_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two pieces of one tensor among large ones: their bytes, and the end of each, which says where they begin."""
    names = ("a", "wanted", "z")
    folder = save(
        tmp_path / "large", {name: torch.randn(256, 512) for name in names}, {"wanted": columns((256, 512), 2)}
    )
    counted: list[int] = []
    pread, preadv = os.pread, os.preadv

    def count(found: Any) -> Any:
        counted.append(len(found) if isinstance(found, bytes) else found)
        return found

    monkeypatch.setattr("os.pread", lambda *arguments: count(pread(*arguments)))
    monkeypatch.setattr("os.preadv", lambda *arguments: count(preadv(*arguments)))
    with ckptool.open_checkpoint(folder) as checkpoint:
        opened = sum(counted)
        assert opened < 32 << 10
        wanted = checkpoint.tensors["wanted"]
        found = wanted.read()
    assert sum(counted) - opened <= len(found) + 2 * (80 << 10)
    counted.clear()
    model = model_like({"wanted": torch.empty(256, 512)}, "meta")
    ckptool.load_into(model, folder, strict=False)
    assert dict(model.named_buffers())["wanted"].numpy().tobytes() == found
    assert sum(counted) <= opened + len(found) + 2 * (80 << 10)


@each("device", ["cpu", "meta"])
def test_several_threads_put_a_tensor_together(tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"w": torch.randn(600, 501), "x": torch.randn(501, 300)}
    folder = save(tmp_path / "cut", wanted, {"w": columns((600, 501), 4), "x": rows((501, 300), 3)}, files=4)
    threads: set[int] = set()
    both = threading.Barrier(2, timeout=30)
    real = PiecesSource.read_into

    def read_into(self: PiecesSource, offset: int, buffer: memoryview) -> None:
        if threading.get_ident() not in threads and len(threads) < 2:
            threads.add(threading.get_ident())
            both.wait()
        real(self, offset, buffer)

    monkeypatch.setattr(PiecesSource, "read_into", read_into)
    monkeypatch.setattr("ckptool.loading.memory.filling.PIECE", 1 << 16)
    model = model_like(wanted, device)
    ckptool.load_into(model, folder)
    assert len(threads) == 2
    assert equal(dict(model.named_buffers()), wanted)


def damage(folder: Path, tensor: torch.Tensor) -> None:
    """Change a byte of a piece, where the piece is some consecutive elements."""
    wanted = tensor.numpy().tobytes()
    for file in folder.glob("*.distcp"):
        data = bytearray(file.read_bytes())
        at = data.find(wanted)
        if at >= 0:
            data[at] ^= 1
            file.write_bytes(data)
            return
    raise AssertionError("not there")


@each("name", ["rows", "columns"])
def test_a_damaged_piece_is_found_by_whatever_verifies(tmp_path: Path, name: str) -> None:
    tensors = {one: TENSORS[one] for one in ("model.rows", "model.columns")}
    folder = save(tmp_path / "cut", tensors, CUTS)
    wide = TENSORS[f"model.{name}"][-2:, -10:]
    damage(folder, wide[:1] if name == "columns" else wide[1:])
    calls: list[Callable[[], object]] = [
        partial(ckptool.load, folder, verify=True),
        partial(ckptool.migrate, folder, tmp_path / "out.pth"),
        partial(ckptool.migrate, folder, tmp_path / "out.safetensors", form="safetensors"),
    ]
    for call in calls:
        with pytest.raises(DamagedFile, match=rf"the piece of 'model.{name}' at \[.*\] in '__\d_0.distcp' is damaged"):
            call()
    assert not list(tmp_path.glob("out*"))


def test_a_live_model_goes_on_serving_where_a_piece_is_damaged(tmp_path: Path) -> None:
    tensors = {"model.w": torch.randn(40, 30)}
    sound = save(tmp_path / "sound", tensors, {"model.w": columns((40, 30), 3)})
    live = ckptool.LiveModel(model_like({"w": tensors["model.w"]}))
    live.reload(sound)
    with live.use() as serving:
        assert torch.equal(dict(serving.model.named_buffers())["w"], tensors["model.w"])
    other = {"model.w": tensors["model.w"] + 1}
    broken = save(tmp_path / "broken", other, {"model.w": columns((40, 30), 3)})
    damage(broken, other["model.w"][3:4, 10:20])
    with pytest.raises(DamagedFile):
        live.reload(broken)
    with live.use() as serving:
        assert torch.equal(dict(serving.model.named_buffers())["w"], tensors["model.w"])
    live.reload(save(tmp_path / "next", other, {"model.w": rows((40, 30), 7)}))
    with live.use() as serving:
        assert torch.equal(dict(serving.model.named_buffers())["w"], other["model.w"])


def test_the_same_tensors_cut_differently_are_the_same(folder: Path, truth: dict[str, torch.Tensor]) -> None:
    other_cuts = {"model.rows": columns((60, 500), 7), "model.columns": rows((500, 70), 3)}
    other = save(folder.parent / "other", TENSORS, other_cuts, lay="transposed")
    assert ckptool.diff(folder, other).same
    whole = folder.parent / "weights.pt"
    torch.save(truth, whole)
    assert ckptool.diff(folder, whole, key_a="model").same

    changed = {**TENSORS, "model.columns": TENSORS["model.columns"].clone()}
    changed["model.columns"][411, 33] += 1
    (found,) = ckptool.diff(folder, save(folder.parent / "changed", changed, other_cuts)).values
    assert (found.name, found.differing, found.at) == ("model.columns", 1, (411, 33))


@each("change", ["cut", "written"])
def test_a_file_that_changes_meanwhile_leaves_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    values = {"model.w": torch.randn(800, 800), "model.v": torch.randn(900, 400)}
    cuts = {"model.w": columns((800, 800), 2), "model.v": rows((900, 400), 2)}
    real = PiecesSource.info
    done: list[Path] = []

    def info(self: PiecesSource, index: int) -> Any:
        found = real(self, index)
        if not done:
            file = folder / "__1_0.distcp"
            done.append(file)
            with file.open("r+b") as stream:
                if change == "cut":
                    stream.truncate(file.stat().st_size // 3)
                else:
                    stream.seek(100_000)
                    stream.write(b"changed")
        return found

    out = tmp_path / "out"
    out.mkdir()
    calls: list[Callable[[Path], object]] = [
        partial(ckptool.load, mmap=False),
        lambda folder: ckptool.migrate(folder, out / "x", form="state_dict"),
        lambda folder: ckptool.migrate(folder, out / "x", form="safetensors"),
    ]
    for number, call in enumerate(calls):
        folder = save(tmp_path / f"{number}", values, cuts)
        done.clear()
        with monkeypatch.context() as patch:
            patch.setattr(PiecesSource, "info", info)
            with pytest.raises(CkptoolError) as error:
                call(folder)
        assert isinstance(error.value, SourceChanged | DamagedFile) or error.value.kind == "truncated-piece"
        assert not list(out.iterdir())


def test_files_that_have_no_descriptor_now_are_mapped(tmp_path: Path) -> None:
    for number in range(200):
        (tmp_path / str(number)).write_bytes(number.to_bytes(4, "little") * 8)
    folder = FolderSource(str(tmp_path))
    files = [folder.open(str(number)) for number in range(200)]
    host = HostMemory()
    for number, file in enumerate(files):
        assert host.take(file, 0, 32).view(torch.int32)[0] == number
    folder.close()


def test_devices_are_filled_from_pieces(folder: Path, truth: dict[str, torch.Tensor]) -> None:
    with ckptool.open_checkpoint(folder) as checkpoint:
        memory, taken = DeviceMemory(torch.device("cpu")), {}
        for name, tensor in checkpoint.tensors.items():
            storage = tensor.info.storage
            assert storage is not None
            taken[name] = memory.take(storage.source, 0, storage.nbytes)
        memory.fill(lambda nbytes: None)
        for name, found in taken.items():
            assert found.numpy().tobytes() == checkpoint.tensors[name].read()
        assert bytes(taken["model.columns"].numpy()) == truth["columns"].numpy().tobytes()
