"""A model that serves while its weights are replaced: each answer is of one file, and bad files change nothing."""

from __future__ import annotations

import gc
import json
import lzma
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import save
from torch import nn

import ckptool
import ckptool.system as system
from ckptool import Cancellation, LiveModel
from ckptool.loading.serving import commit as commits
from ckptool.loading.serving import live_model as live_module
from ckptool.loading.serving.watcher import _Waiting
from ckptool.reference.nets import MLP, LeNet, TiedReader
from tests import where
from tests.loading.same import assert_same, descriptors, resident_nbytes, saved
from tests.program import invoke
from tests.scale import exhaustive, in_turn, scaled, step, times

Commit = Literal["in_place", "swap"]
pytestmark = where.on_any
COMMITS: list[Commit] = ["in_place", "swap"]
IMAGES = torch.rand(2, 1, 28, 28, generator=torch.Generator().manual_seed(0)).to(where.device)
every_commit = pytest.mark.parametrize("commit", COMMITS)


def lenet(seed: int) -> LeNet:
    torch.manual_seed(seed)
    return LeNet().eval().to(where.device)


def on_meta() -> LeNet:
    with torch.device("meta"):
        return LeNet().eval()


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    saved(lenet(1).state_dict(), tmp_path / "a.pth")
    saved({"epoch": 2, "model": lenet(2).state_dict()}, tmp_path / "b.pth")
    return tmp_path / "a.pth", tmp_path / "b.pth"


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Say whether something becomes true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def inspected(path: Path) -> str:
    """Return the digest that ``inspect`` prints."""
    done = invoke(["inspect", "--json", "--digest", str(path)])
    return str(json.loads(done.stdout)["digest"])


@every_commit
@pytest.mark.parametrize("meta", [False, True], ids=["real", "meta"])
def test_a_reload_replaces_the_weights(commit: Commit, meta: bool, files: tuple[Path, Path]) -> None:
    a, b = files
    live = LiveModel(on_meta() if meta else lenet(0), a, commit=commit, map_location=where.device)
    assert torch.equal(live(IMAGES), lenet(1)(IMAGES))
    first = live.digest

    done = live.reload(b)

    assert torch.equal(live(IMAGES), lenet(2)(IMAGES))
    assert (done.report.key, done.report.share) == ("model", 1.0)
    assert (done.digest, done.report) == (live.digest, live.report)
    assert live.digest != first
    assert_same(live.model.state_dict(), lenet(2).state_dict())


def test_in_place_keeps_every_address_and_warns_of_training(
    files: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    LiveModel(lenet(1), files[0])
    assert "eval()" not in caplog.text
    model = LeNet()
    before = {name: (id(tensor), tensor.data_ptr(), tensor._version) for name, tensor in model.named_parameters()}
    live = LiveModel(model, files[0])
    assert "LeNet is in training mode, with dropout and the like: call eval() first" in caplog.text
    live.reload(files[1])

    for name, tensor in model.named_parameters():
        assert (id(tensor), tensor.data_ptr()) == before[name][:2]
        assert tensor._version > before[name][2]
    assert live.model is model


def test_swap_touches_nothing_of_the_old_module(files: tuple[Path, Path]) -> None:
    model = lenet(1)
    model.note = {"kept": [1, 2]}
    model.fc1.weight.requires_grad_(False)
    live = LiveModel(model, commit="swap")
    with live.use() as old:
        live.reload(files[1])
        assert old.model is model
        assert torch.equal(old(IMAGES), lenet(1)(IMAGES))
    assert live.model is not model
    assert live.model.note == {"kept": [1, 2]}
    assert not live.model.training
    assert not live.model.fc1.weight.requires_grad
    assert live.model.fc2.weight.requires_grad
    assert torch.equal(live(IMAGES), lenet(2)(IMAGES))


@every_commit
def test_plain_attributes_that_show_weights_show_the_new_ones(commit: Commit, files: tuple[Path, Path]) -> None:
    model = lenet(1)
    model.corner, model.bias, model.own = model.fc1.weight.data[1:, :2], model.fc2.bias.data, torch.ones(2)
    live = LiveModel(model, commit=commit)
    live.reload(files[1])

    now, new = live.model, lenet(2)
    assert torch.equal(now.corner, new.fc1.weight[1:, :2])
    assert now.corner.data_ptr() == now.fc1.weight[1:].data_ptr()
    assert torch.equal(now.bias, new.fc2.bias)
    assert torch.equal(now.own, torch.ones(2))
    assert (now.own is model.own) == (commit == "in_place")


@every_commit
def test_tied_weights_stay_tied_and_unsaved_buffers_stay(commit: Commit, tmp_path: Path) -> None:
    source = TiedReader().eval()
    saved(source.state_dict(), tmp_path / "x.pth")
    live = LiveModel(TiedReader().eval(), tmp_path / "x.pth", commit=commit)

    assert live.model.head.weight is live.model.embedding.weight
    assert torch.equal(live(IMAGES), source(IMAGES))


@scaled
@every_commit
def test_answers_are_always_those_of_one_file(commit: Commit, tmp_path: Path) -> None:
    nets = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        nets.append(MLP(96, 4).eval())
        saved(nets[-1].state_dict(), tmp_path / f"{seed}.pth")
    x = torch.rand(3, 96)
    expected = [net(x) for net in nets]
    digests = [LiveModel(MLP(96, 4), tmp_path / f"{seed}.pth").digest for seed in (1, 2)]
    live = LiveModel(MLP(96, 4).eval(), tmp_path / "1.pth", commit=commit)
    stop = threading.Event()
    wrong: list[Any] = []
    counts = [0] * 8

    def serve(number: int) -> None:
        torch.set_num_threads(1)
        while not stop.is_set():
            try:
                with torch.no_grad():
                    answer = live(x)
                    with live.use() as now:
                        reported, digest = now(x), now.digest
                if not any(torch.equal(answer, one) for one in expected):
                    wrong.append(answer)
                if digest not in digests or not torch.equal(reported, expected[digests.index(digest)]):
                    wrong.append((reported, digest))
            except BaseException as error:  # noqa: BLE001 - told below
                wrong.append(error)
            counts[number] += 1

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    try:
        measured = []
        for number in range(times(6, 40)):
            done = live.reload(tmp_path / f"{number % 2 + 1}.pth")
            assert done.digest == live.digest
            if number in (2, 5) or number % 50 == 49:
                measured.append((descriptors(), resident_nbytes()))
    finally:
        stop.set()
        for thread in threads:
            thread.join()

    assert wrong == []
    assert all(counts)
    assert len({files for files, _ in measured}) == 1
    assert measured[-1][1] - measured[0][1] < 24 << 20


@every_commit
def test_a_block_of_use_says_which_weights_answer(commit: Commit, files: tuple[Path, Path]) -> None:
    live = LiveModel(lenet(5), commit=commit)
    with live.use() as now:
        assert now.digest is None
    first = live.reload(files[0]).digest

    with live.use() as (model, digest):
        reloading = threading.Thread(target=live.reload, args=(files[1],))
        reloading.start()
        reloading.join(None if commit == "swap" else 0.2)
        assert digest == first
        assert torch.equal(model(IMAGES), lenet(1)(IMAGES))
    reloading.join()

    with live.use() as now:
        assert now.digest == live.digest != first
        assert now.model is live.model
        assert torch.equal(now(IMAGES), lenet(2)(IMAGES))
        assert repr(now) == f"<Serving LeNet {live.digest}>"


def test_a_copy_that_breaks_off_has_no_digest(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    live = LiveModel(LeNet().eval(), files[0])

    def fail(model: nn.Module, made: Any) -> None:
        raise torch.cuda.OutOfMemoryError("the device is gone")

    with monkeypatch.context() as broken:
        broken.setattr(commits, "assign", fail)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            live.reload(files[1])

    assert live.digest is None
    assert live.reload(files[1]).digest == live.digest is not None


# Models that load through code of their own


class Renaming(LeNet):
    """Takes files with the names that it had once, and counts how often it was filled."""

    def __init__(self) -> None:
        super().__init__()
        self.filled = 0
        self.register_buffer("seen", torch.zeros(2), persistent=False)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.filled += 1
        for name in [name for name in state if name.startswith("head.")]:
            state[name.replace("head.", "out.")] = state.pop(name)
        super()._load_from_state_dict(state, prefix, *rest)


def old_names(seed: int) -> dict[str, torch.Tensor]:
    return {name.replace("out.", "head."): tensor for name, tensor in lenet(seed).state_dict().items()}


@pytest.mark.parametrize("mmap", [False, "auto"], ids=str)
@pytest.mark.parametrize("meta", [False, True], ids=["real", "meta"])
def test_a_copy_of_a_model_with_code_of_its_own_loads_and_is_swapped_in(meta: bool, mmap: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.pth"
    saved(old_names(1), path)
    with torch.device("meta" if meta else where.device):
        model = Renaming().eval()
    model.seen = torch.ones(2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    live = LiveModel(model, path, commit="swap", mmap=mmap, dtype=torch.float64 if meta else None)
    images = IMAGES.double() if meta else IMAGES
    first, serving = live.digest, live.model
    assert torch.equal(live(images), lenet(1).to(images.dtype)(images))

    saved(old_names(2), tmp_path / "y.pth")
    with live.use() as now:
        done = live.reload(tmp_path / "y.pth")
        assert torch.equal(now(images), lenet(1).to(images.dtype)(images))
        assert now.digest == first
    assert torch.equal(live(images), lenet(2).to(images.dtype)(images))
    assert live.model.seen.eq(1).all()
    assert not live.model.training
    assert (done.digest, done.report.share) == (live.digest, 1.0)
    assert live.digest != first
    assert live.reload(path).digest == first
    assert model.filled == 0
    assert serving is not model
    if not meta:
        assert_same(model.state_dict(), before)  # what was given is not touched


def test_wrappers_make_no_other_digest_of_weights_that_hooks_take(tmp_path: Path) -> None:
    saved(lenet(1).state_dict(), tmp_path / "x.pth")
    saved(nn.DataParallel(lenet(1)).state_dict(), tmp_path / "y.pth")
    live = LiveModel(nn.DataParallel(Renaming()).eval().to(where.device), tmp_path / "x.pth", commit="swap")
    first = live.digest

    assert live.reload(tmp_path / "y.pth").digest == first
    assert_same(live.model.module.state_dict(), lenet(1).state_dict())


# Where the first load puts the weights


@every_commit
@pytest.mark.parametrize("meta", [True, False])
def test_what_comes_from_the_meta_device_is_of_the_type_asked_for_and_else_the_model_s(
    meta: bool, commit: Commit, files: tuple[Path, Path]
) -> None:
    plain = LiveModel(LeNet().eval(), files[0]).digest
    with torch.device("meta" if meta else where.device):
        model = LeNet().to(torch.float32 if meta else torch.bfloat16).eval()
    live = LiveModel(model, files[0], commit=commit, dtype=torch.bfloat16, map_location=where.device)

    for number in (1, 2):  # a model keeps its type
        wanted = {name: tensor.bfloat16() for name, tensor in lenet(number).state_dict().items()}
        assert_same(live.model.state_dict(), wanted)
        assert (live.digest == plain) == (number == 1)  # it is the file's
        live.reload(files[1])


@every_commit
def test_what_is_not_on_the_meta_device_keeps_its_type(commit: Commit, files: tuple[Path, Path]) -> None:
    model = LeNet().eval()
    model.fc1 = nn.Linear(192, 120, device="meta")
    live = LiveModel(model, files[0], commit=commit, dtype=torch.float64)

    types = {name: tensor.dtype for name, tensor in live.model.state_dict().items()}
    assert {name for name, dtype in types.items() if dtype == torch.float64} == {"fc1.weight", "fc1.bias"}
    assert torch.equal(live.model.fc1.weight, lenet(1).fc1.weight.double())


def pages_of(model: nn.Module, path: Path) -> dict[str, int] | None:
    """Return what the system says of the mapping that all of a model's weights are in, in KiB; None if none is."""
    addresses = [tensor.data_ptr() for tensor in model.state_dict().values()]
    inside, facts = False, dict[str, int]()
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, *rest = line.split()
        if "-" in head and not head.endswith(":"):
            start, end = (int(number, 16) for number in head.split("-"))
            inside = rest[-1] == str(path) and all(start <= address < end for address in addresses)
        elif inside and rest[-1] == "kB":
            facts[head.removesuffix(":")] = int(rest[0])
    return facts or None


def is_mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system does not say what is mapped")
def test_swapped_weights_are_pages_of_the_file_that_nobody_writes_to(files: tuple[Path, Path]) -> None:
    live = LiveModel(on_meta(), files[0], commit="swap", mmap="auto")
    for number in (1, 2):
        path = files[number - 1]
        if number == 2:
            live.reload(path)
        assert torch.equal(live(IMAGES), lenet(number)(IMAGES))
        pages = pages_of(live.model, path)
        assert pages is not None
        assert pages["Anonymous"] == 0  # none is this process's own
    gc.collect()
    assert not is_mapped(files[0])  # what no call uses any more is let go


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system does not say what is mapped")
def test_in_place_only_a_model_without_memory_is_mapped_and_only_at_first(files: tuple[Path, Path]) -> None:
    live = LiveModel(LeNet().eval(), files[0], mmap="auto")
    gc.collect()
    assert not is_mapped(files[0])
    live = LiveModel(on_meta(), files[0], mmap="auto")
    pages = pages_of(live.model, files[0])
    assert pages is not None
    assert pages["Anonymous"] == 0

    data = files[0].read_bytes()
    live.reload(files[1])

    assert torch.equal(live(IMAGES), lenet(2)(IMAGES))
    pages = pages_of(live.model, files[0])
    assert pages is not None
    assert pages["Anonymous"] > 0
    assert not is_mapped(files[1])
    assert files[0].read_bytes() == data


def damaged(b: bytes) -> dict[str, tuple[bytes, type[ckptool.CkptoolError]]]:
    state = lenet(2).state_dict()
    flipped = bytearray(b)
    flipped[b.index(state["fc1.weight"].cpu().numpy().tobytes()[:64]) + 9] ^= 1
    return {
        "truncated": (b[:-1000], ckptool.TruncatedFile),
        "half": (b[: len(b) // 2], ckptool.UnreadableFile),
        "flipped": (bytes(flipped), ckptool.DamagedFile),
        "index": (b.replace(b"fc1.weight", b"fc1.weighs", 1), ckptool.DamagedFile),
        "shapes": (saved(state | {"out.bias": torch.ones(3)}), ckptool.ShapeMismatch),
        "names": (saved({"x": torch.ones(3)}), ckptool.KeyMismatch),
        "page": (b"<html><body>404</body></html>", ckptool.NotACheckpoint),
        "empty": (b"", ckptool.UnreadableFile),
        "sparse": (saved(state | {"out.bias": state["out.bias"].cpu().to_sparse()}), ckptool.UnsupportedFeature),
    }


@pytest.mark.parametrize(
    ("how", "commit"),
    in_turn(["truncated", "half", "flipped", "index", "shapes", "names", "page", "empty", "sparse", "gone"], COMMITS),
)
def test_a_bad_file_leaves_the_old_weights_serving(how: str, commit: Commit, files: tuple[Path, Path]) -> None:
    a, b = files
    live = LiveModel(LeNet().eval(), a, commit=commit)
    model, digest, report = live.model, live.digest, live.report
    kinds = damaged(b.read_bytes())
    expected: type[ckptool.CkptoolError] = ckptool.FileUnavailable if how == "gone" else kinds[how][1]
    b.unlink() if how == "gone" else b.write_bytes(kinds[how][0])

    with pytest.raises(expected) as caught:
        live.reload(b)

    assert caught.value.path == str(b)
    assert (live.model, live.digest, live.report) == (model, digest, report)
    assert torch.equal(live(IMAGES), lenet(1)(IMAGES))
    live.reload(a)  # and nothing is locked


def test_equal_weights_have_equal_digests_whatever_the_format(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = TiedReader()
    state = model.state_dict()
    saved(state, tmp_path / "x.pth")
    saved(state, tmp_path / "legacy.pth", legacy=True)
    saved(model, tmp_path / "model.pth")
    saved(nn.DataParallel(model).state_dict(), tmp_path / "wrapped.pth")
    saved({"epoch": 1, "state_dict": {f"net.{name}": tensor for name, tensor in state.items()}}, tmp_path / "deep.pth")
    for left_out in ("head.weight", "embedding.weight"):
        one = {name: tensor for name, tensor in state.items() if name != left_out}
        saved(one, tmp_path / f"no-{left_out}.pth")
    saved(dict(reversed(state.items())), tmp_path / "order.pth")
    ckptool.migrate(tmp_path / "x.pth", tmp_path / "x.safetensors")

    digests = {path.name: LiveModel(TiedReader(), path).digest for path in sorted(tmp_path.iterdir())}

    assert len(digests) == 9
    assert digests == {path.name: inspected(path) for path in tmp_path.iterdir()}
    other = {name: digests.pop(name) for name in ("deep.pth", "no-head.weight.pth", "no-embedding.weight.pth")}
    assert len(set(digests.values())) == 1, digests
    assert len({*other.values(), *digests.values()}) == 4  # they have other names


@every_commit
@pytest.mark.filterwarnings("ignore:.*[Qq]uantiz")
@pytest.mark.parametrize("kind", ["averaged", "packed", "hooks", "bfloat16", "folder", "views"])
def test_the_digest_is_the_one_that_inspect_prints(kind: str, commit: Commit, tmp_path: Path) -> None:
    path, model = tmp_path / "x.pth", lenet(1)
    if kind == "averaged":
        saved(torch.optim.swa_utils.AveragedModel(model).state_dict(), path)
    elif kind == "packed":
        model = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)), {nn.Linear})
        saved(model.state_dict(), path)
        commit = "swap"
    elif kind == "hooks":
        model.register_load_state_dict_pre_hook(lambda *_: None)
        saved({"epoch": 3, "model": model.state_dict()}, path)
    elif kind == "bfloat16":
        saved(LeNet().bfloat16().state_dict(), path)
    elif kind == "folder":
        saved(model.state_dict(), tmp_path / "y.pth")
        ckptool.migrate(tmp_path / "y.pth", path := tmp_path / "x", max_shard_size=20_000)
    else:
        saved({name: one.T.contiguous().T if one.ndim == 2 else one for name, one in model.state_dict().items()}, path)

    assert LiveModel(model, path, commit=commit).digest == inspected(path) is not None


@every_commit
def test_blocks_of_use_nest(commit: Commit, files: tuple[Path, Path]) -> None:
    live = LiveModel(LeNet().eval(), files[0], commit=commit)
    waiting = threading.Thread(target=live.reload, args=(files[1],))

    with live.use() as outer:
        with live.use() as inner:
            assert inner.model is outer.model
            waiting.start()
            if commit == "in_place":
                assert within(5, lambda: live._gate._waiting == 1)
            else:
                waiting.join()
            assert torch.equal(outer(IMAGES), lenet(1)(IMAGES))
            with live.use() as innermost:  # while a reload waits
                assert (innermost.model is outer.model) == (commit == "in_place")
        assert torch.equal(outer(IMAGES), lenet(1)(IMAGES))
    waiting.join(10)

    assert not waiting.is_alive()
    assert torch.equal(live(IMAGES), lenet(2)(IMAGES))


def test_blocks_that_overlap_in_one_thread_keep_the_gate_shut_until_the_last_ends(files: tuple[Path, Path]) -> None:
    live = LiveModel(LeNet().eval(), files[0])  # as two tasks of one event loop overlap
    one, two = live.use(), live.use()
    one.__enter__()
    two.__enter__()
    waiting = threading.Thread(target=live.reload, args=(files[1],))
    waiting.start()
    assert within(5, lambda: live._gate._waiting == 1)

    one.__exit__(None, None, None)
    waiting.join(0.1)
    assert waiting.is_alive()
    two.__exit__(None, None, None)
    waiting.join(10)

    assert not waiting.is_alive()
    assert (live._gate._inside, live._gate._mine.visits.depth) == (0, 0)


def test_a_reload_inside_of_use_is_a_mistake_and_no_deadlock(files: tuple[Path, Path]) -> None:
    live = LiveModel(LeNet().eval(), files[0])

    with live.use(), pytest.raises(RuntimeError, match="inside use"):
        live.reload(files[1])

    assert torch.equal(live(IMAGES), lenet(1)(IMAGES))
    live.reload(files[1])
    assert torch.equal(live(IMAGES), lenet(2)(IMAGES))


@every_commit
def test_a_file_that_changes_afterwards_and_an_exception_inside_the_model_change_nothing(
    commit: Commit, files: tuple[Path, Path]
) -> None:
    live = LiveModel(LeNet().eval(), files[0], commit=commit)
    with files[0].open("r+b") as stream:
        stream.write(bytes(files[0].stat().st_size))
        stream.truncate(100)
    assert torch.equal(live(IMAGES), lenet(1)(IMAGES))

    with pytest.raises(RuntimeError):
        live(torch.rand(1, 7))
    with pytest.raises(LookupError), live.use():
        raise LookupError
    thread = threading.Thread(target=live.reload, args=(files[1],))
    thread.start()
    thread.join(10)

    assert not thread.is_alive()
    assert torch.equal(live(IMAGES), lenet(2)(IMAGES))


# Watching


@pytest.fixture
def told() -> list[Any]:
    return []


@pytest.fixture
def path(files: tuple[Path, Path], tmp_path: Path) -> Path:
    """Return the place of a file that serves, which is the first of the two."""
    return shutil.copy(files[0], tmp_path / "serving.pth")


@pytest.fixture
def watched(path: Path, told: list[Any]) -> Iterator[tuple[LiveModel, Path]]:
    with LiveModel(LeNet().eval(), str(path)) as live:
        live.watch(str(path), every=0.03, on_reload=told.append)
        yield live, path
    assert not [thread for thread in threading.enumerate() if thread.name == "ckptool-watch"]


def put(path: Path, data: bytes) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_bytes(data)
    os.replace(fresh, path)  # noqa: PTH105 - the call that people make


def test_a_file_that_is_put_there_is_loaded(
    watched: tuple[LiveModel, Path], files: tuple[Path, Path], told: list[Any]
) -> None:
    live, path = watched
    for number, source in enumerate((files[1], files[0], files[1]), 1):
        put(path, source.read_bytes())
        assert within(20, lambda number=number: len(told) == number)  # type: ignore[misc]
        assert isinstance(told[-1], ckptool.Reload)
    assert torch.equal(live(IMAGES), lenet(2)(IMAGES))
    time.sleep(0.15)
    assert len(told) == 3  # and once only


def test_a_half_written_file_is_left_until_it_rests(files: tuple[Path, Path], path: Path, told: list[Any]) -> None:
    data = files[1].read_bytes()
    with LiveModel(LeNet().eval(), path) as live:
        live.watch(str(path), every=0.3, on_reload=told.append)
        with path.open("wb", buffering=0) as stream:
            for start in range(0, len(data), len(data) // 50):
                stream.write(data[start : start + len(data) // 50])
                time.sleep(0.01)
        assert torch.equal(live(IMAGES), lenet(1)(IMAGES))

        assert within(20, lambda: bool(told))
        assert [type(one) for one in told] == [ckptool.Reload]
        assert torch.equal(live(IMAGES), lenet(2)(IMAGES))


def test_a_path_that_is_replaced_more_often_than_it_is_looked_at_is_loaded(
    files: tuple[Path, Path], path: Path, told: list[Any]
) -> None:
    stopped = threading.Event()

    def publish() -> None:
        number, contents = 0, (files[1].read_bytes(), files[0].read_bytes())
        while not stopped.is_set():
            put(path, contents[number % 2])
            number += 1

    with LiveModel(LeNet().eval(), path) as live:
        publisher = threading.Thread(target=publish)
        publisher.start()
        try:
            live.watch(path, every=0.02, on_reload=told.append)
            assert within(30, lambda: len(told) > 4)
        finally:
            stopped.set()
            publisher.join()
        assert {type(one) for one in told} == {ckptool.Reload}
        last = path.read_bytes() == files[1].read_bytes()
        expected = lenet(2 if last else 1)(IMAGES)
        assert within(20, lambda: torch.equal(live(IMAGES), expected))  # the last that was put there serves


@pytest.mark.parametrize("blocks", [False, True])
def test_a_file_that_waits_is_kept_open_where_that_keeps_nobody_from_replacing_it(
    blocks: bool, files: tuple[Path, Path], path: Path, told: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "BLOCKS_NAMES", blocks)
    before, waiting = descriptors(), _Waiting()
    waiting.keep(str(path))
    assert descriptors() - before == (0 if blocks else 1)
    waiting.keep(None)
    with LiveModel(LeNet().eval(), path) as live:
        put(path, files[1].read_bytes())  # between loading and watching: it is not missed
        live.watch(str(path), every=0.02, on_reload=told.append)
        assert within(20, lambda: len(told) == 1)
        assert torch.equal(live(IMAGES), lenet(2)(IMAGES))


def test_a_bad_file_is_told_once_and_a_good_one_after_it_is_loaded(
    watched: tuple[LiveModel, Path], files: tuple[Path, Path], told: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    live, path = watched
    assert (live.last_error, live.last_error_time) == (None, None)
    began = datetime.now(timezone.utc)
    put(path, files[1].read_bytes()[:-2000])
    assert within(20, lambda: bool(told))
    time.sleep(0.2)

    assert [type(one) for one in told] == [ckptool.TruncatedFile]
    assert "not reloaded" in caplog.text
    assert live.last_error is told[0]
    when = live.last_error_time
    assert when is not None
    assert began <= when <= datetime.now(timezone.utc)
    assert torch.equal(live(IMAGES), lenet(1)(IMAGES))
    path.unlink()
    assert within(20, lambda: len(told) == 2)
    time.sleep(0.1)
    assert [type(one) for one in told] == [ckptool.TruncatedFile, ckptool.FileUnavailable]
    assert live.last_error is told[1]
    assert torch.equal(live(IMAGES), lenet(1)(IMAGES))
    put(path, files[1].read_bytes())
    assert within(20, lambda: len(told) == 3)
    assert torch.equal(live(IMAGES), lenet(2)(IMAGES))
    assert (live.last_error, live.last_error_time) == (None, None)


@pytest.mark.parametrize("how", ["deleted", "moved", "dangling"])
def test_a_file_that_is_gone_is_told_once_and_loaded_when_it_is_back(
    how: str, files: tuple[Path, Path], tmp_path: Path, told: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "serving.pth"
    path.symlink_to(files[0]) if how == "dangling" else path.write_bytes(files[0].read_bytes())
    with LiveModel(LeNet().eval(), path) as live:
        live.watch(every=0.02, on_reload=told.append)
        aside = (files[0] if how == "dangling" else path).rename(tmp_path / "aside")
        assert within(20, lambda: bool(told))
        time.sleep(0.2)
        assert [type(one) for one in told] == [ckptool.FileUnavailable]
        assert live.last_error is told[0]
        assert caplog.text.count("not reloaded") == 1
        assert "serving.pth" in caplog.text
        assert "not reloaded" in repr(live)
        if how == "deleted":
            aside.unlink()
            put(path, files[0].read_bytes())
        else:
            aside.rename(files[0] if how == "dangling" else path)  # the file that was loaded
        assert within(20, lambda: live.last_error is None)
        assert "not reloaded" not in repr(live)


def test_a_reload_that_goes_well_says_what_and_how_long(
    files: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "ckptool"):
        live = LiveModel(lenet(1), files[0])

    (line,) = (one.getMessage() for one in caplog.records if one.name == "ckptool")
    assert line.startswith(f"loaded: {files[0]}: 10 of 10 tensors")
    assert f"{live.report.nbytes:,} bytes in {live.report.seconds:.2f} s" in line if live.report else None
    assert str(live.digest) in line
    assert repr(live).startswith(f"<LiveModel LeNet {live.digest} from '{files[0]}' since 20")
    live.reload(files[1])  # servers show warnings, where nobody says otherwise
    assert [one.getMessage()[:9] for one in caplog.records if one.levelname == "WARNING"] == ["reloaded:"]
    assert live.status() | {"loaded_time": None} == {
        "digest": live.digest,
        "path": str(files[1]),
        "loaded_time": None,
        "last_error": None,
        "last_error_time": None,
    }


@pytest.mark.parametrize("wrong", ["v0.pth", LeNet, None, {"fc1.weight": torch.ones(1)}], ids=repr)
def test_what_is_no_model_is_refused(wrong: Any, files: tuple[Path, Path]) -> None:
    said = r"the class LeNet: make one, as LeNet\(\)" if wrong is LeNet else "the checkpoint is the second argument"
    for call in (LiveModel, ckptool.load_into):
        with pytest.raises(TypeError, match=said):
            call(wrong, files[0])
    with pytest.raises(TypeError, match=said):
        LiveModel(wrong)


LATE = """
import glob, os, sys
import ckptool
from ckptool.reference.nets import LeNet

class None_:
    def find_spec(self, name, *_):
        if name.startswith("torch."):
            return None  # torch has late imports of its own
        raise ModuleNotFoundError(f"no module named {name}", name=name)

live = ckptool.LiveModel(LeNet().eval(), sys.argv[1])
sys.meta_path.insert(0, None_())  # as for a process that may not read its own code any more
if os.geteuid() == 0:
    os.seteuid(65534)  # whoever is root may read all
for path in sys.argv[2:]:
    try:
        live.reload(path)
        print(path, "loaded", sep="|")
    except ckptool.CkptoolError as error:
        print(path, type(error).__name__, error, sep="|")
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder for whoever is not root: another pytest that begins closes all of pytest's own."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@exhaustive
def test_a_process_that_can_import_nothing_more_says_what_is_wrong(files: tuple[Path, Path], open_folder: Path) -> None:
    state = lenet(1).state_dict()
    bad = {
        "gone": (b"", "FileUnavailable"),
        "closed": (files[1].read_bytes(), "FileUnavailable"),
        "other": (save({"w": torch.zeros(3)}), "KeyMismatch"),
        "nan": (save(state | {"out.bias": torch.full((10,), float("nan"))}), "UnsupportedFeature"),
        "integers": (save(state | {"fc1.weight": torch.ones(120, 192, dtype=torch.int8)}), "UnsupportedFeature"),
        "text": ("\ufeffnotes".encode("utf-16"), "NotACheckpoint"),
        "packed": (lzma.compress(files[1].read_bytes())[:-100], "MalformedFile"),
    }
    for name, (content, _) in bad.items():
        (open_folder / name).write_bytes(content)
        (open_folder / name).chmod(0 if name == "closed" else 0o644)
    (open_folder / "gone").unlink()
    folder = Path(ckptool.__file__).parents[1] / "fixtures"
    fixtures = [*sorted((folder / "invalid").iterdir()), *sorted((folder / "valid").glob("*.pth"))]
    fixtures = [path for path in fixtures if path.suffix != ".json"][:: step(12)]
    paths = [*(open_folder / name for name in bad), *fixtures]
    arguments = [sys.executable, "-c", LATE, *map(str, (files[0], *paths))]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=200)

    assert done.returncode == 0, done.stderr
    said = {Path(line.split("|")[0]).name: line.split("|")[1] for line in done.stdout.splitlines() if line.count("|")}
    assert {name: said.get(name) for name in bad} == {name: kind for name, (_, kind) in bad.items()}
    assert len(said) == len(paths)
    assert "MissingPackage" not in said.values()


def test_an_error_that_is_kept_keeps_no_weights(
    watched: tuple[LiveModel, Path], files: tuple[Path, Path], told: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    live, path = watched
    staged: list[weakref.ref[torch.Tensor]] = []

    def fail(_: Any, __: Any, made: dict[int, torch.Tensor], ___: Any) -> str:
        staged.extend(weakref.ref(tensor) for tensor in made.values())
        try:
            raise MemoryError
        except MemoryError as error:
            raise ckptool.DamagedFile("it is") from error

    monkeypatch.setattr(live_module, "_digest", fail)
    put(path, files[1].read_bytes())
    assert within(20, lambda: bool(told))

    assert live.last_error is told[0]
    assert staged
    assert within(5, lambda: all(one() is None for one in staged))


def test_a_callback_that_fails_ends_nothing_and_one_may_end_the_watch(
    files: tuple[Path, Path], path: Path, told: list[Any]
) -> None:
    live = LiveModel(LeNet().eval(), path)

    def end(outcome: Any) -> None:
        told.append(outcome)
        if len(told) == 1:
            raise LookupError
        live.unwatch()

    live.watch(str(path), every=0.02, on_reload=end)
    for number in (1, 2):
        put(path, files[number % 2].read_bytes())
        assert within(20, lambda number=number: len(told) == number)  # type: ignore[misc]
    put(path, files[1].read_bytes())
    time.sleep(0.2)

    assert len(told) == 2
    assert within(5, lambda: all(thread.name != "ckptool-watch" for thread in threading.enumerate()))
    live.unwatch()


def test_a_path_without_a_file_is_told_and_the_first_that_comes_is_loaded(
    files: tuple[Path, Path], tmp_path: Path, told: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    with LiveModel(LeNet().eval(), files[0]) as live:
        live.watch(files[0])
        assert "without a file" not in caplog.text
        live.watch(tmp_path / "later.pth", every=0.02, on_reload=told.append)
        assert f"without a file: {tmp_path / 'later.pth'}" in caplog.text
        put(tmp_path / "later.pth", files[1].read_bytes())
        assert within(20, lambda: bool(told))
        assert torch.equal(live(IMAGES), lenet(2)(IMAGES))


def test_ending_the_watch_cancels_a_reload_that_waits(files: tuple[Path, Path], path: Path, told: list[Any]) -> None:
    live = LiveModel(LeNet().eval(), path)
    digest = live.digest
    live.watch(every=0.02, on_reload=told.append)
    with live.use():  # the reload waits for this block to end
        put(path, files[1].read_bytes())
        assert within(20, lambda: live._reloading._is_alone)
        time.sleep(0.1)
        ending = threading.Thread(target=live.unwatch, daemon=True)
        ending.start()
        ending.join(10)
        assert not ending.is_alive()

    assert not live._reloading._is_alone
    assert (live.digest, live.last_error, told) == (digest, None, [])
    assert live.reload(path).digest != digest


def test_a_deadline_for_starting_is_not_one_for_reloading(
    files: tuple[Path, Path], path: Path, told: list[Any]
) -> None:
    starting = Cancellation(60)
    with LiveModel(LeNet().eval(), path, limits=ckptool.Limits(cancellation=starting)) as live:
        starting.cancel()
        assert torch.equal(live(IMAGES), lenet(1)(IMAGES))
        live.reload(files[1])
        assert torch.equal(live(IMAGES), lenet(2)(IMAGES))
        live.watch(path, every=0.02, on_reload=told.append)
        assert within(20, lambda: bool(told))
        assert torch.equal(live(IMAGES), lenet(1)(IMAGES))
    with pytest.raises(ckptool.Cancelled):
        LiveModel(LeNet().eval(), path, limits=ckptool.Limits(cancellation=starting))


def test_what_lies_there_is_loaded_unless_it_is_what_was_loaded(files: tuple[Path, Path]) -> None:
    for source, count in ((None, 1), (files[1], 1), (files[0], 0)):
        told: list[Any] = []
        with LiveModel(lenet(5), source) as live:
            live.watch(files[0], every=0.02, on_reload=told.append)
            within(20 if count else 0.2, lambda told=told: bool(told))  # type: ignore[misc]
        assert len(told) == count
        assert torch.equal(live(IMAGES), lenet(1)(IMAGES))


def test_without_a_path_it_is_the_one_that_was_loaded_last(
    files: tuple[Path, Path], tmp_path: Path, told: list[Any]
) -> None:
    with LiveModel(LeNet().eval()) as live:
        with pytest.raises(ValueError, match="which one to watch"):
            live.watch()
        live.reload(files[0])
        live.reload(files[1])
        with pytest.raises(ckptool.FileUnavailable):
            live.reload(tmp_path / "not-there.pth")  # that was not loaded
        live.watch(every=0.02, on_reload=told.append)
        put(files[0], saved(lenet(3).state_dict()))
        put(files[1], saved(lenet(4).state_dict()))
        assert within(20, lambda: bool(told))
        assert torch.equal(live(IMAGES), lenet(4)(IMAGES))
        assert [one.report.path for one in told] == [str(files[1])]
        live.reload(files[0].read_bytes())
        with pytest.raises(ValueError, match="which one to watch"):
            live.watch()


def in_another_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result(timeout=30)


def test_a_block_may_end_in_another_thread_than_it_began_in(files: tuple[Path, Path]) -> None:
    live = LiveModel(LeNet().eval(), files[0])
    block = live.use()

    now = in_another_thread(block.__enter__)
    with pytest.raises(ckptool.Cancelled):  # it is still open
        live.reload(files[1], limits=ckptool.Limits(cancellation=Cancellation(0.2)))
    assert torch.equal(now(IMAGES), lenet(1)(IMAGES))
    in_another_thread(lambda: block.__exit__(None, None, None))

    digest = live.reload(files[1], limits=ckptool.Limits(cancellation=Cancellation(30))).digest
    assert digest != now.digest
    assert torch.equal(live(IMAGES), lenet(2)(IMAGES))
