"""Many threads, good and bad files, files that change: each load is as it would be alone, and nothing is left."""

from __future__ import annotations

import hashlib
import os
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
import ckptool.loading.load
from ckptool import loading
from ckptool.loading.memory.threads import in_own_thread
from ckptool.reference.nets import CifarNet, LeNet, TiedReader
from ckptool.sources.files import FileSource
from tests.loading.same import descriptors, resident_nbytes, saved
from tests.scale import in_turn, scaled, times

THREADS = 32
TIMES = times(2, 6)

pytestmark = pytest.mark.filterwarnings("ignore:Sparse ")


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    torch.manual_seed(0)
    state = LeNet().state_dict()
    saved(state, tmp_path / "zip.pth")
    saved(state, tmp_path / "legacy.pth", legacy=True)
    saved(TiedReader(), tmp_path / "model.pth")
    saved({"model": CifarNet().state_dict(), "epoch": 1}, tmp_path / "nested.pth")
    saved({"s": torch.eye(4).to_sparse(), "c": torch.ones(3, dtype=torch.complex64).conj()}, tmp_path / "kinds.pth")
    ckptool.migrate(tmp_path / "zip.pth", tmp_path / "x.safetensors")
    data = (tmp_path / "zip.pth").read_bytes()
    (tmp_path / "cut.pth").write_bytes(data[:-500])
    (tmp_path / "half.pth").write_bytes(data[: len(data) // 2])
    flipped = bytearray(data)
    flipped[data.index(state["fc1.weight"].numpy().tobytes()[:32]) + 40] ^= 16
    (tmp_path / "flipped.pth").write_bytes(flipped)
    (tmp_path / "page.pth").write_bytes(b"<html></html>")
    return [*sorted(tmp_path.iterdir()), tmp_path / "gone.pth"]


def digest_of(state: dict[str, torch.Tensor]) -> str:
    """Return a digest of the values; no thread of torch works for it, so a process can fork later."""
    found = hashlib.sha256()

    def add() -> None:
        for name, tensor in sorted(state.items()):
            dense = tensor.to_dense() if tensor.layout != torch.strided else tensor
            found.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
            found.update(dense.resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())

    in_own_thread(add)
    return found.hexdigest()


WAYS: dict[str, Callable[[Path], Any]] = {
    "mapped": lambda path: digest_of(ckptool.load(path, mmap=True)),
    "read": lambda path: digest_of(ckptool.load(path, mmap=False)),
    "cast": lambda path: digest_of(ckptool.load(path, dtype=torch.bfloat16)),
    "verified": lambda path: digest_of(ckptool.load(path, verify=True)),
    "filled": lambda path: ckptool.load_into(LeNet(), path).loaded,
    "predicted": lambda path: ckptool.predict_memory(path),
}


def outcome(way: str, path: Path) -> tuple[str, Any]:
    try:
        return "loaded", WAYS[way](path)
    except ckptool.CkptoolError as error:
        return type(error).__name__, str(error)


@scaled
def test_many_threads_find_what_one_finds(files: list[Path]) -> None:
    calls = [(way, path) for way in WAYS for path in files]
    expected = {call: outcome(*call) for call in calls}
    assert {kind for kind, _ in expected.values()} >= {
        "loaded",
        "TruncatedFile",
        "DamagedFile",
        "NotACheckpoint",
        "FileUnavailable",
        "KeyMismatch",
    }
    wrong: list[Any] = []

    def work(number: int) -> None:
        rng = random.Random(number)
        for _ in range(TIMES):
            call = rng.choice(calls)
            found = outcome(*call)
            if found != expected[call]:
                wrong.append((call, found))

    def run() -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(work, range(THREADS)))

    before = descriptors(), threading.active_count()
    run()
    resident = resident_nbytes()
    run()

    assert wrong == []
    assert (descriptors(), threading.active_count()) == before
    assert resident_nbytes() - resident < 48 << 20


def test_tensors_outlive_the_file_that_was_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x.pth"
    saved({"a": torch.arange(1 << 20).float()}, path)
    found = ckptool.load(path)
    saved({"a": torch.zeros(1 << 20)}, tmp_path / "y.pth")

    os.replace(tmp_path / "y.pth", path)  # noqa: PTH105 - the call that is promised to be safe

    assert torch.equal(found["a"], torch.arange(1 << 20).float())
    assert ckptool.load(path)["a"].eq(0).all()
    path.unlink()
    assert found["a"][-1] == (1 << 20) - 1


@pytest.mark.parametrize(
    ("how", "target"),
    in_turn(["truncated", "overwritten", "appended to"], ["load", "load, read", "load, cast", "load_into"]),
)
def test_a_file_that_changes_while_it_is_read_is_a_typed_error(
    target: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.pth"
    saved(LeNet().state_dict(), path)
    real = loading.load.choose

    def change(*arguments: Any) -> Any:
        """Once the index has been read, and before the tensors are."""
        with path.open("r+b") as stream:
            if how == "truncated":
                stream.truncate(5_000)
            elif how == "overwritten":
                stream.seek(2_000)
                stream.write(b"\xff" * 4_000)
            else:
                stream.seek(0, 2)
                stream.write(b"more")
        os.utime(path, ns=(1, 1))
        return real(*arguments)

    monkeypatch.setattr(loading.load, "choose", change)
    model = LeNet()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    options: dict[str, Any] = {"load, read": {"mmap": False}, "load, cast": {"dtype": torch.half, "mmap": False}}

    call = partial(ckptool.load_into, model) if target == "load_into" else ckptool.load
    with pytest.raises((ckptool.SourceChanged, ckptool.TruncatedFile)) as caught:
        call(path, **options.get(target, {}))
    assert caught.value.path == str(path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_disk_that_fails_is_a_typed_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.pth"
    saved(LeNet().state_dict(), path)

    def fail(self: FileSource, offset: int, buffer: memoryview) -> None:
        raise ckptool.FileUnavailable("cannot be read: input/output error", kind="io")

    monkeypatch.setattr(FileSource, "read_into", fail)
    for call in (lambda: ckptool.load(path, mmap=False), lambda: ckptool.load_into(LeNet(), path)):
        with pytest.raises(ckptool.FileUnavailable) as caught:
            call()
        assert caught.value.path == str(path)
