"""The pipeline from a file to a device, without a device: the CPU stands in, with buffers of a few bytes."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ckptool
from ckptool.errors import OutOfMemory, SourceChanged
from ckptool.loading.memory import assembly, filling, placement
from ckptool.loading.memory.filling import DeviceMemory, HostMemory, buffer_of
from ckptool.loading.memory.threads import translate_out_of_memory
from ckptool.sources.files import FileSource
from ckptool.sources.source import BytesSource
from ckptool.torch_ops.devices import Accelerator
from tests.each import each
from tests.fixture_set.forging import forged, mixed
from tests.loading.late_device import LateDevice
from tests.loading.same import assert_same, saved
from tests.scale import in_turn

CPU = torch.device("cpu")
FILE_NBYTES = 20_000
DATA = random.Random(1).randbytes(FILE_NBYTES)


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(filling, "PIECE", 256)
    before = threading.active_count()
    yield
    assert threading.active_count() == before  # whatever happened, no thread is left


@pytest.fixture
def file(tmp_path: Path) -> FileSource:
    (tmp_path / "x").write_bytes(DATA)
    return FileSource(str(tmp_path / "x"))


def ranges(count: int, seed: int = 0) -> list[tuple[int, int]]:
    """Return places and sizes: none at all, a byte, just a buffer, one more, many buffers."""
    rng = random.Random(seed)
    sizes = [0, 1, 255, 256, 257, 1000, 3000, *(rng.randrange(700) for _ in range(count))][:count]
    return [(rng.randrange(FILE_NBYTES - size), size) for size in sizes]


def slow_reads(monkeypatch: pytest.MonkeyPatch, fail_at: int | None = None, error: Exception | None = None) -> None:
    """Let each read take its own time, and one of them fail."""
    real, calls = FileSource.read_into, iter(range(1_000_000))

    def read_into(self: FileSource, offset: int, buffer: memoryview) -> None:
        number = next(calls)
        time.sleep(random.Random(number).random() / 500)
        if number == fail_at and error is not None:
            raise error
        real(self, offset, buffer)

    monkeypatch.setattr(FileSource, "read_into", read_into)


@pytest.mark.parametrize("slow", [False, True])
@each(("count", "kind"), [(1, "file"), (7, "file"), (40, "bytes"), (60, "file")])
def test_bytes_arrive_where_they_belong(
    count: int, kind: str, slow: bool, file: FileSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    if slow:
        slow_reads(monkeypatch)
    memory, source = DeviceMemory(CPU), file if kind == "file" else BytesSource(DATA)
    told: list[int] = []

    targets = [(offset, size, memory.take(source, offset, size)) for offset, size in ranges(count)]
    memory.fill(told.append)

    for offset, size, target in targets:
        assert bytes(buffer_of(target)) == DATA[offset : offset + size]
    assert sum(told) == sum(size for _, size, _ in targets)
    memory.fill(told.append)  # nothing is read twice
    assert sum(told) == sum(size for _, size, _ in targets)


# CUDA, as late as it may be


def on_cuda(patch: pytest.MonkeyPatch, *, pinnable: bool = True) -> tuple[LateDevice, DeviceMemory]:
    memory = DeviceMemory(CPU)
    memory._accelerator = Accelerator("cuda", torch.cuda)
    return LateDevice(patch, pinnable=pinnable), memory


@pytest.mark.parametrize(("count", "pinnable"), in_turn([1, 7, 80], [True, False]))
def test_a_stream_of_its_own_brings_everything_before_filling_ends(
    pinnable: bool, count: int, file: FileSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_reads(monkeypatch)
    device, memory = on_cuda(monkeypatch, pinnable=pinnable)

    targets = [(offset, size, memory.take(file, offset, size)) for offset, size in ranges(count)]
    memory.fill(lambda _: None)

    assert all(bytes(buffer_of(target)) == DATA[offset : offset + size] for offset, size, target in targets)
    assert bool(device.pinned) == (pinnable and count > 1)  # the first range is empty
    assert not any(stream.work for stream in device.streams)


def test_what_the_caller_still_does_with_the_memory_comes_first(
    file: FileSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, memory = on_cuda(monkeypatch)
    target = memory.take(file, 100, 1500)
    device.current.queue(target.zero_)  # by a kernel on memory that was freed and given out again

    memory.fill(lambda _: None)
    device.current.synchronize()

    assert bytes(buffer_of(target)) == DATA[100:1600]


@pytest.mark.parametrize("fail_at", [0, 5, 30])
def test_nothing_is_under_way_after_an_error(fail_at: int, file: FileSource, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_reads(monkeypatch, fail_at, SourceChanged("shrank"))
    device, memory = on_cuda(monkeypatch)
    for offset, size in ranges(60):
        memory.take(file, offset, size)

    with pytest.raises(SourceChanged):
        memory.fill(lambda _: None)

    assert not any(stream.work for stream in device.streams)


def test_no_more_is_pinned_than_is_needed(file: FileSource, monkeypatch: pytest.MonkeyPatch) -> None:
    device, memory = on_cuda(monkeypatch)
    memory.take(file, 0, 200)
    memory.take(file, 300, 10)

    memory.fill(lambda _: None)

    assert [buffer.nbytes for buffer in device.pinned] == [210]


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_a_whole_checkpoint_goes_through_the_pipeline(
    dtype: torch.dtype | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def views(whole: torch.Tensor) -> dict[str, torch.Tensor]:
        none = torch.empty(0, 2, dtype=whole.dtype)
        return {"whole": whole, "row": whole[3], "turned": whole.t(), "n": torch.arange(500), "none": none}

    whole = torch.randn(30, 20)
    data = saved(views(whole), tmp_path / "x.pth")
    # To the module that puts tensors together, the CPU is a device like others here.
    monkeypatch.setattr(assembly, "CPU", torch.device("cuda"))
    fills: list[DeviceMemory] = []
    real = DeviceMemory.fill
    monkeypatch.setattr(DeviceMemory, "fill", lambda self, count: (fills.append(self), real(self, count))[1])

    for source in (tmp_path / "x.pth", data):
        assert_same(ckptool.load(source, dtype=dtype), views(whole.to(dtype)))
    assert len(fills) == 2


def room_on(patch: pytest.MonkeyPatch, free: dict[str, int], used: int = 0) -> None:
    """Let each device have so much room, ``used`` of it in blocks that torch keeps for the next tensors."""
    patch.setattr(torch.cuda, "mem_get_info", lambda index: (free[f"cuda:{index}"] - used, 1 << 40))
    patch.setattr(torch.cuda, "memory_reserved", lambda device: 7 + used)
    patch.setattr(torch.cuda, "memory_allocated", lambda device: 7)


@pytest.mark.parametrize(("free", "full"), [((400, 800), None), ((399, 9000), "cuda:0"), ((9000, 799), "cuda:1")])
def test_each_device_has_to_have_room_for_what_goes_there(
    free: tuple[int, int], full: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tags = {"cuda:0": torch.device("cuda:0"), "cuda:1": torch.device("cuda:1")}
    a, b, c = torch.ones(50), torch.ones(50), torch.ones(200)
    with forged(mixed([(a, "cuda:0"), (b, "cuda:0"), (c, "cuda:1")], otherwise="cpu")):
        saved({"a": a, "b": b, "c": c, "d": torch.ones(3000)}, tmp_path / "x.pth")
    room_on(monkeypatch, {"cuda:0": free[0], "cuda:1": free[1]}, used=300)

    with ckptool.open_checkpoint(tmp_path / "x.pth") as checkpoint:
        made = assembly.Assembly(placement.Placement(None, tags))
        for name, tensor in checkpoint.tensors.items():
            made._note(name, tensor.info)
        assert made.cost({}).device_nbytes == 1200
        if full is None:
            made._check_room()
            return
        with pytest.raises(ckptool.OutOfMemory, match=f"on {full}, which has") as caught:
            made._check_room()
    assert (caught.value.needed, caught.value.actual) == ((400, 399) if full == "cuda:0" else (800, 799))


def test_large_reads_are_cut_between_threads(file: FileSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filling, "PIECE", 500)
    monkeypatch.setattr(filling, "_RETURNED", 1000)
    slow_reads(monkeypatch)
    memory, told = HostMemory(False), []

    targets = [(offset, size, memory.take(file, offset, size)) for offset, size in ranges(40, seed=5)]
    memory.fill(told.append)

    assert all(bytes(buffer_of(target)) == DATA[offset : offset + size] for offset, size, target in targets)
    assert sum(told) == sum(size for _, size, _ in targets)


# What is waited for


@pytest.mark.parametrize(("kind", "given"), [("mps", ()), ("npu", (torch.device("meta"),))])
def test_where_there_are_no_streams_all_work_is_waited_for(kind: str, given: tuple[object, ...]) -> None:
    waited: list[object] = []
    one = Accelerator(kind, SimpleNamespace(synchronize=lambda *device: waited.append(device)))

    one.wait_for_own(torch.device("meta"))
    one.wait_for_all(torch.device("meta"))

    assert waited == [given, given]


def test_a_thread_works_on_the_streams_that_its_caller_set_on_other_devices_too() -> None:
    streams = [SimpleNamespace(stream_id=number) for number in (0, 7, 0)]  # 0 is the one that every thread has
    api = SimpleNamespace(
        current_stream=lambda index=2: streams[index], device_count=lambda: 3, current_device=lambda: 2
    )

    assert Accelerator("npu", api).streams() == [streams[1], streams[2]]


def test_what_ran_out_of_memory_is_let_go_of_with_the_error_and_not_by_the_collector() -> None:
    kept = []

    def load() -> None:
        held = torch.ones(3)
        kept.append(weakref.ref(held))
        with translate_out_of_memory(held.nbytes, CPU):
            raise RuntimeError("out of memory")

    gc.disable()
    try:
        with suppress(OutOfMemory):
            load()
        assert kept[0]() is None
    finally:
        gc.enable()
