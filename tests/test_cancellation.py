"""Every call can be stopped, at any time: it ends in ``Cancelled`` or as it would have, and leaves nothing behind."""

from __future__ import annotations

import gzip
import io
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool import Cancellation, Cancelled, LimitExceeded, Limits, LiveModel
from ckptool.cancellation import STEP_NBYTES
from ckptool.checking.safety import survey_origin
from ckptool.checkpoints.training import training_states
from ckptool.sources.files import FileSource, open_source
from ckptool.sources.source import SliceSource
from tests import build
from tests.loading.same import descriptors, saved
from tests.scale import scaled, some, step, times

TIMES = times(1, 5)
SECONDS = 3.0
"""In which a call must answer, on a busy machine too. On one that is quiet: far less than a tenth of a second."""
OLD = b"what stood there before"


class At(Cancellation):
    """Cancelled by its ``at``-th check, and knows from where it is asked."""

    def __init__(self, at: int = sys.maxsize) -> None:
        super().__init__()
        self.at, self.count, self.since = at, 0, 0.0
        self.places = dict[tuple[str, int], int]()
        """The first check that each line of the program asked for."""

    def check(self) -> None:
        self.count += 1
        frame = sys._getframe(1)
        while frame.f_back is not None and _is_between(frame.f_code.co_filename, frame.f_code.co_name):
            frame = frame.f_back
        self.places.setdefault((frame.f_code.co_name, frame.f_lineno), self.count)
        if self.count == self.at:
            self.since = time.perf_counter()
            self.cancel()
        super().check()


@cache
def _is_between(path: str, name: str) -> bool:
    """Say whether code only hands on what another asks for."""
    return Path(path).name in ("cancellation.py", "files.py", "read_ahead.py", "source.py") or name[0] == "<"


class Big(torch.nn.Module):
    """What is in the big files."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.ones(9 << 20))
        self.b = torch.nn.Parameter(torch.ones(5, 3))


def migrated(name: str) -> Callable[[Path, Limits], Any]:
    def call(path: Path, limits: Limits) -> Any:
        target = path.parent / "out" / name
        ckptool.migrate(path, target, force=True, limits=limits)
        return target.read_bytes()

    return call


def filled(path: Path, limits: Limits) -> Any:
    model = Big()
    ckptool.load_into(model, path, limits=limits)
    return weights_of(model.state_dict())


def reloaded(path: Path, limits: Limits) -> Any:
    return LiveModel(Big(), path, limits=limits).digest


def weights_of(state: Any) -> Any:
    return {name: bytes(memoryview(tensor.numpy().reshape(-1)).cast("B")) for name, tensor in state.items()}


def opened(path: Path, limits: Limits) -> Any:
    with ckptool.open_checkpoint(path, limits=limits) as found:
        return list(found.tensors)


CALLS: dict[str, Callable[[Path, Limits], Any]] = {
    "open": opened,
    "read": lambda path, limits: weights_of(ckptool.load(path, mmap=False, limits=limits)),
    "verified": lambda path, limits: weights_of(ckptool.load(path, mmap=False, verify=True, limits=limits)),
    "mapped": lambda path, limits: list(ckptool.load(path, limits=limits)),
    "predicted": lambda path, limits: ckptool.predict_memory(path, limits=limits),
    "filled": filled,
    "reloaded": reloaded,
    "to safetensors": migrated("x.safetensors"),
    "to torch": migrated("x.pth"),
    "checked": lambda path, limits: ckptool.check(path, deep=True, limits=limits),
    "looked at": lambda path, limits: ckptool.check(path, values=True, limits=limits),
    "compared": lambda path, limits: ckptool.diff(path, path.with_name("other"), limits=limits),
}


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 36 MiB, large enough for threads, and beside it another one with the same weights."""
    folder = tmp_path_factory.mktemp("big")
    (folder / "out").mkdir()
    state = {name: tensor.detach() for name, tensor in Big().state_dict().items()}
    saved(state, folder / "file.pth")
    saved(state, folder / "other", legacy=True)
    for name in ("x.safetensors", "x.pth"):
        (folder / "out" / name).write_bytes(OLD)
    return folder / "file.pth"


class Expected(dict[str, Any]):
    """What each call gives that nobody stops, found when it is first asked for."""

    def __init__(self, big: Path) -> None:
        super().__init__()
        self._big = big

    def __missing__(self, name: str) -> Any:
        return self.setdefault(name, CALLS[name](self._big, Limits()))


@pytest.fixture(scope="module")
def expected(big: Path) -> Expected:
    return Expected(big)


@pytest.fixture
def tidy(big: Path) -> Iterator[None]:
    """Whatever happens to a call, no file stays open, no thread runs on, nothing but the targets is in the folder."""
    before = descriptors(), set(threading.enumerate())
    yield
    assert descriptors() == before[0]
    assert set(threading.enumerate()) == before[1]
    assert {entry.name for entry in (big.parent / "out").iterdir()} <= {"x.safetensors", "x.pth"}
    assert {entry.name for entry in big.parent.iterdir()} == {"file.pth", "other", "out"}


def renewed(folder: Path) -> dict[str, bytes]:
    kept = {"x.safetensors": OLD, "x.pth": OLD}
    for name, data in kept.items():
        (folder / "out" / name).write_bytes(data)
    return kept


@scaled
@pytest.mark.usefixtures("tidy")
@pytest.mark.parametrize("name", some(CALLS, 5))
def test_a_call_that_is_cancelled_at_any_check_changes_nothing(name: str, big: Path, expected: Expected) -> None:
    everything = At()
    assert CALLS[name](big, Limits(cancellation=everything)) == expected[name]
    chosen = random.Random(name)
    for _ in range(TIMES):
        kept = renewed(big.parent)
        cancellation = At(chosen.randint(1, everything.count))
        try:
            found = CALLS[name](big, Limits(cancellation=cancellation))
        except Cancelled:
            assert time.perf_counter() - cancellation.since < SECONDS
            assert {target: (big.parent / "out" / target).read_bytes() for target in kept} == kept
        else:  # threads ask more often or less, by a few
            assert found == expected[name]
            assert cancellation.count < everything.count + 16


@pytest.mark.usefixtures("tidy")
@pytest.mark.parametrize("name", some(CALLS, 5))
def test_a_deadline_that_has_passed_lets_nothing_begin(
    name: str, big: Path, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert expected[name] is not None
    kept = renewed(big.parent)
    monkeypatch.setattr(FileSource, "__init__", None)
    with pytest.raises(Cancelled, match=r"not done after 0\.\d\d\d seconds, 0\.000 were given") as caught:
        CALLS[name](big, Limits(cancellation=Cancellation(0)))
    assert caught.value.kind == "deadline-exceeded"
    assert caught.value.hint == "Give it more seconds."
    assert {target: (big.parent / "out" / target).read_bytes() for target in kept} == kept


def test_a_deadline_ends_a_call_in_the_middle(tmp_path: Path) -> None:
    path = sparse(tmp_path)
    for at, call in enumerate((CALLS["checked"], CALLS["read"], migrated("x.pth"))):
        (tmp_path / "out").mkdir(exist_ok=True)
        started = time.perf_counter()
        with pytest.raises(Cancelled, match=r"seconds, 0\.0[12]0 were given") as caught:
            call(path, Limits(cancellation=Cancellation(0.02 if at else 0.01)))
        assert time.perf_counter() - started < SECONDS
        assert caught.value.kind == "deadline-exceeded"
        assert caught.value.path == str(path)
    assert not list((tmp_path / "out").iterdir())


def sparse(folder: Path) -> Path:
    """Return a safetensors file of 512 MiB that takes no room: it takes longer to read than any deadline here."""
    header = b'{"a":{"dtype":"U8","shape":[536870912],"data_offsets":[0,536870912]}}'
    path = folder / "sparse.safetensors"
    with path.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + (512 << 20))
    return path


@pytest.mark.parametrize("seconds", [-1, float("nan")])
def test_a_deadline_is_a_time(seconds: float) -> None:
    with pytest.raises(ValueError, match="seconds="):
        Cancellation(seconds)


def test_calls_that_share_a_cancellation_stop_together(tmp_path: Path) -> None:
    path, cancellation, errors = sparse(tmp_path), At(100), list[BaseException]()

    def run() -> None:
        try:
            CALLS["checked"](path, Limits(cancellation=cancellation))
        except Cancelled as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 2
    assert errors[0] is not errors[1]
    with pytest.raises(Cancelled):  # and every later one
        ckptool.open_checkpoint(path, limits=Limits(cancellation=cancellation))


# Small files, at every check


def packed() -> dict[str, bytes]:
    each = build.one_of_each()
    two = {"a/model.pt": each["torch_zip"], "a/other.pt": each["torch_legacy"], "a/notes.txt": b"no checkpoint"}
    cut = each["torch_zip"][:-40]
    return each | {
        "two in a zip": build.zip_file(two, deflated=["a/model.pt"]),
        "two in a tar": build.tar_file(two),
        "gzip": gzip.compress(each["torch_zip"]),
        "a deflated zip": deflated(each["torch_zip"]),
        "protocol 0": build.pickled({"weight": 1, "epoch": 7}, protocol=0),
        "cut zip": cut,
        "cut legacy": each["torch_legacy"][:-3],
        "pickle in a pickle": build.pickled({"epoch": 7, "inside": build.pickled({"deep": 1})}, protocol=4),
    }


def deflated(data: bytes) -> bytes:
    with ckptool.open_checkpoint(data) as found:
        (archive,) = found.archives
        members = {name: archive.open(name).read(0, record.nbytes) for name, record in archive.items()}
    return build.zip_file(members, deflated=list(members))


PACKED = packed()
SMALL: dict[str, Callable[[Any, Limits], Any]] = {
    "open": lambda origin, limits: ckptool.open_checkpoint(origin, limits=limits).close(),
    "check": lambda origin, limits: ckptool.check(origin, deep=True, limits=limits),
    "migrate": lambda origin, limits: ckptool.migrate(
        origin, origin.with_name("small.pth"), form="state_dict", force=True, limits=limits
    ),
}


@scaled
@pytest.mark.parametrize(("name", "verb"), some(product(PACKED, SMALL), 4))
def test_no_check_is_taken_for_something_else(name: str, verb: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(PACKED[name])
    everything = At()
    with suppress(ckptool.CkptoolError):  # some are cut
        SMALL[verb](path, Limits(cancellation=everything))
    (tmp_path / "small.pth").write_bytes(OLD)
    before = descriptors()
    assert everything.count > 2
    # Each check in a full run; else one for each second line of the program that asks, and some more.
    places = sorted(everything.places.values())
    for at in sorted({*places[:: step(2)], *range(1, everything.count + 1, step(40, 5))}):
        with pytest.raises(Cancelled) as caught:
            SMALL[verb](path, Limits(cancellation=At(at)))
        assert caught.value.path == str(path)
    assert descriptors() == before
    assert (tmp_path / "small.pth").read_bytes() == OLD
    assert {entry.name for entry in tmp_path.iterdir()} == {"file", "small.pth"}


@pytest.mark.parametrize("wrap", [bytes, io.BytesIO], ids=["bytes", "stream"])
def test_what_is_no_path_can_be_cancelled_too(wrap: Callable[[bytes], Any]) -> None:
    everything = At()
    ckptool.open_checkpoint(wrap(PACKED["torch_zip"]), limits=Limits(cancellation=everything)).close()
    assert everything.count > 3
    for at in range(1, everything.count + 1):
        with pytest.raises(Cancelled):
            ckptool.open_checkpoint(wrap(PACKED["torch_zip"]), limits=Limits(cancellation=At(at)))


# Who asks, and how often


MANY = 1000


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with many tensors in two forms, and two with a list of lists."""
    folder = tmp_path_factory.mktemp("many")
    saved({f"layer.{number}.weight": torch.zeros(2) for number in range(MANY)}, folder / "a.pth")
    ckptool.migrate(folder / "a.pth", folder / "b.safetensors")
    for name in ("objects.pth", "others.pth"):
        saved({"weight": torch.zeros(2), "log": [[n, [n]] for n in range(MANY)]}, folder / name)
    return folder


def asked(call: Callable[[Limits], Any]) -> At:
    cancellation = At()
    call(Limits(cancellation=cancellation))
    return cancellation


def test_the_walks_through_many_tensors_and_objects_ask(tensors: Path) -> None:
    (tensors / "out").mkdir(exist_ok=True)
    a, b, objects, others = (tensors / name for name in ("a.pth", "b.safetensors", "objects.pth", "others.pth"))

    def migrated_to(source: Path, name: str, **options: Any) -> Callable[[Limits], Any]:
        return lambda limits: ckptool.migrate(source, tensors / "out" / name, force=True, limits=limits, **options)

    for times_each, call in (
        (1, lambda limits: ckptool.open_checkpoint(a, limits=limits).close()),
        (1, lambda limits: ckptool.load(a, limits=limits)),
        (3, lambda limits: ckptool.load(a, mmap=False, limits=limits)),
        (5, lambda limits: ckptool.load(objects, limits=limits)),
        (2, migrated_to(a, "1.safetensors")),
        (4, migrated_to(b, "2.pth")),
        (6, migrated_to(objects, "3.pth", form="same")),
        (1, lambda limits: ckptool.check(a, deep=True, limits=limits)),
        (4, lambda limits: ckptool.diff(a, b, limits=limits)),
        (4, lambda limits: ckptool.diff(objects, others, limits=limits)),
    ):
        assert asked(call).count >= MANY * times_each


def test_a_check_comes_with_so_many_opcodes_and_objects(tensors: Path, tmp_path: Path) -> None:
    opcodes = times(200_000, 1_000_000)
    ones = b"\x80\x02](" + b"K\1" * (opcodes // 2 - 4) + b"e."
    path = tmp_path / "file"
    zipped = build.torch_zip(ones[2:-1], {})
    for data in (ones, zipped, deflated(zipped), gzip.compress(ones)):
        path.write_bytes(data)
        found = asked(lambda limits: ckptool.open_checkpoint(path, limits=limits).close())
        assert found.count >= opcodes // 65_536
    for name in ("a.pth", "b.safetensors", "objects.pth"):
        found = asked(lambda limits, name=name: ckptool.open_checkpoint(tensors / name, limits=limits).close())
        assert found.count >= (MANY if name != "objects.pth" else 2 * MANY // 64)


def test_a_little_that_inflates_to_much_is_asked_about(tmp_path: Path) -> None:
    path = tmp_path / "file"
    nbytes = 16 << 20
    tree = {"weight": build.tensor(build.storage(numel=nbytes // 4), (nbytes // 4,))}
    path.write_bytes(deflated(build.torch_zip(tree, {"0": bytes(nbytes)})))
    assert asked(lambda limits: ckptool.check(path, deep=True, limits=limits)).count >= 16
    path.write_bytes(gzip.compress(os.urandom(2 << 20)))
    cancellation = At()
    with pytest.raises(ckptool.CkptoolError):  # what is inside is not a checkpoint
        ckptool.open_checkpoint(path, limits=Limits(cancellation=cancellation))
    assert cancellation.count >= path.stat().st_size // 65_536


def test_no_read_is_larger_than_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(3 * STEP_NBYTES + 5)
    path = tmp_path / "file"
    path.write_bytes(data)
    sizes: list[int] = []
    pread, preadv = os.pread, os.preadv

    def read(fd: int, nbytes: int, offset: int) -> bytes:
        sizes.append(nbytes)
        return pread(fd, nbytes, offset)

    def read_into(fd: int, buffers: list[memoryview], offset: int) -> int:
        sizes.append(buffers[0].nbytes)
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "pread", read)
    monkeypatch.setattr(os, "preadv", read_into)
    for cancellation, most in ((At(), STEP_NBYTES), (None, len(data))):
        source, _ = open_source(str(path), cancellation)
        sizes.clear()
        assert source.read(1, len(data) - 1) == data[1:]
        buffer = memoryview(bytearray(len(data)))
        assert isinstance(source, FileSource)
        source.read_into(0, buffer)
        assert buffer == data
        assert max(sizes) == most or max(sizes) == most - 1
        assert len(sizes) == (8 if cancellation else 2)  # who cannot be cancelled reads at once
        assert cancellation is None or cancellation.count >= 8
        source.close()


@pytest.mark.parametrize("kind", ["path", "bytes", "seekable", "stream"])
def test_every_source_carries_its_cancellation_and_slices_that_of_the_whole(kind: str, tmp_path: Path) -> None:
    data = os.urandom(STEP_NBYTES + 5)
    (tmp_path / "file").write_bytes(data)
    stream = io.BytesIO(data)
    if kind == "stream":
        stream.seekable = lambda: False  # type: ignore[method-assign]
    origin = {"path": tmp_path / "file", "bytes": data}.get(kind, stream)
    cancellation = At()
    source, _ = open_source(origin, cancellation)
    part = SliceSource(SliceSource(source, 1, source.nbytes - 1), 1, source.nbytes - 2)
    assert source.cancellation is part.cancellation is cancellation
    before = cancellation.count
    assert part.read(0, part.nbytes) == data[2:]
    assert cancellation.count >= before + 2  # two steps
    cancellation.cancel()
    with pytest.raises(Cancelled):
        part.read(0, 1)
    source.close()


# What was there before


def test_a_model_is_as_it_was_until_its_memory_is_read_into(big: Path) -> None:
    index = asked(lambda limits: ckptool.open_checkpoint(big, limits=limits).close()).count
    for at in (1, index // 2, index):
        model = Big()
        before = weights_of({name: tensor.detach() for name, tensor in model.state_dict().items()})
        model.a.data.fill_(2.0)
        cancellation = At(at)
        with pytest.raises(Cancelled):
            ckptool.load_into(model, big, limits=Limits(cancellation=cancellation))
        assert bool((model.a == 2).all()), f"{at} of {index}: {cancellation.count}, {cancellation.places}"
        assert weights_of({"b": model.b.detach()})["b"] == before["b"]


def test_a_model_on_the_meta_device_gets_all_or_nothing(big: Path) -> None:
    with torch.device("meta"):
        model = Big()
    everything = asked(lambda limits: ckptool.load_into(Big().to("meta"), big, limits=limits))
    for at in range(1, everything.count, max(1, everything.count // 8)):
        with pytest.raises(Cancelled):
            ckptool.load_into(model, big, limits=Limits(cancellation=At(at)))
        assert model.a.is_meta
        assert model.b.is_meta


@pytest.mark.parametrize("commit", ["in_place", "swap"])
def test_a_reload_that_is_cancelled_leaves_what_serves(big: Path, tmp_path: Path, commit: Any) -> None:
    saved({"a": torch.zeros(9 << 20), "b": torch.zeros(5, 3)}, tmp_path / "new.pth")
    live = LiveModel(Big(), big, commit=commit)
    served, digest = live.model, live.digest
    everything = At()
    LiveModel(Big(), big, commit=commit).reload(tmp_path / "new.pth", limits=Limits(cancellation=everything))
    places = times(3, 8)
    for at in sorted({*range(1, everything.count, max(1, everything.count // places)), everything.count - 4}):
        cancellation = At(at)
        with pytest.raises(Cancelled):
            live.reload(tmp_path / "new.pth", limits=Limits(cancellation=cancellation))
        assert time.perf_counter() - cancellation.since < SECONDS
        assert live.model is served
        assert live.digest == digest
        assert bool((live.model.a == 1).all())
    assert live.reload(tmp_path / "new.pth").digest == live.digest != digest  # its own limits have none
    assert bool((live.model.a == 0).all())


def test_a_reload_does_not_wait_for_calls_longer_than_it_may(big: Path) -> None:
    live, inside, leave = LiveModel(Big(), big), threading.Event(), threading.Event()

    def call() -> None:
        with live.use():
            inside.set()
            leave.wait(20)

    caller = threading.Thread(target=call)
    caller.start()
    inside.wait(20)
    cancellation = Cancellation()
    timer = threading.Timer(0.5, cancellation.cancel)
    timer.start()
    waiting = threading.Thread(target=live.reload, args=(big,))
    try:
        with pytest.raises(Cancelled):  # the gate
            live.reload(big, limits=Limits(cancellation=cancellation))
        entered = threading.Thread(target=lambda: live.use().__enter__())
        entered.start()
        entered.join(10)
        assert not entered.is_alive()  # the gate is open to calls again
    finally:
        leave.set()
        caller.join()
        timer.join()
    live = LiveModel(Big(), big)
    with live._reloading.alone():
        waiting = threading.Thread(target=live.reload, args=(big,))
        with pytest.raises(Cancelled) as caught:  # another reload
            live.reload(big, limits=Limits(cancellation=Cancellation(0.05)))
        assert caught.value.kind == "deadline-exceeded"
        waiting.start()
    waiting.join(20)
    assert not waiting.is_alive()


def test_what_is_opened_stays_bound_to_its_cancellation(big: Path) -> None:
    cancellation = Cancellation()
    with ckptool.open_checkpoint(big, limits=Limits(cancellation=cancellation)) as found:
        tensor = found.tensors["b"]
        assert len(tensor.read()) == 60
        cancellation.cancel()
        cancellation.cancel()
        with pytest.raises(Cancelled, match=r"^cancelled after [\d.]+ seconds$"):
            tensor.read()


def test_other_limits_hold_beside_it(big: Path) -> None:
    with pytest.raises(LimitExceeded):
        ckptool.open_checkpoint(big, limits=Limits(tensors=1, cancellation=Cancellation()))


def test_what_a_training_was_at_is_not_less_for_a_cancellation(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1), foreach=False)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pth")
    with ckptool.open_checkpoint(tmp_path / "a.pth") as checkpoint:
        known = training_states(checkpoint)
    cancellation = Cancellation()
    with ckptool.open_checkpoint(tmp_path / "a.pth", limits=Limits(cancellation=cancellation)) as checkpoint:
        cancellation.cancel()
        with pytest.raises(Cancelled):
            training_states(checkpoint)

    assert known[0].steps == 1


def test_a_file_that_is_no_checkpoint_is_not_fine_for_a_cancellation(tmp_path: Path) -> None:
    (tmp_path / "a.pth").write_bytes(b"no checkpoint")
    cancellation = Cancellation()
    cancellation.cancel()

    with pytest.raises(Cancelled):
        survey_origin(tmp_path / "a.pth", Limits(cancellation=cancellation))
