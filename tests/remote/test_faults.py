"""Servers that are busy, cut answers short, and change files under way: right bytes, or an error that says so."""

from __future__ import annotations

import mmap
import random
import threading
from contextlib import closing

import pytest

from ckptool import (
    Cancellation,
    Cancelled,
    FileUnavailable,
    Limits,
    Remote,
    SourceChanged,
    load,
    migrate,
    open_checkpoint,
)
from ckptool.sources.remote import web
from ckptool.sources.remote.opening import open_remote
from ckptool.sources.remote.parts import PART_NBYTES, Fetchers, Parts
from ckptool.sources.source import memory_of
from tests import scale
from tests.loading.same import assert_same
from tests.remote.servers import serving
from tests.remote.test_requests import LARGE, NUMEL, legacy, tensors, zipped

NBYTES = 9 << 20


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "_FIRST_SECONDS", 0.0001)


def noise(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def ranges(count: int, seed: int) -> list[tuple[int, int]]:
    chance = random.Random(seed)
    starts = [chance.randrange(NBYTES) for _ in range(count)]
    return [(start, chance.randrange(min(NBYTES - start, 1 << chance.randrange(19)) + 1)) for start in starts]


@pytest.mark.parametrize(("has_etag", "checks_tag"), [(True, True), (True, False), (False, False)])
def test_a_file_that_changes_is_never_a_mixture(has_etag: bool, checks_tag: bool) -> None:
    old, new = noise(NBYTES, 2), noise(NBYTES + (not has_etag), 3)
    for seed in range(8 if scale.scale else 3):
        with serving({"/x": old}) as server:
            server.has_etag, server.checks_tag = has_etag, checks_tag
            source, _ = open_remote(f"{server.url}/x")
            changed = False
            for at, (start, nbytes) in enumerate(ranges(8, seed)):
                if at == seed:
                    server.files["/x"] = new
                try:
                    assert source.read(start, nbytes) == old[start : start + nbytes]
                except SourceChanged:
                    changed = True
            source.close()
            assert changed


@pytest.mark.parametrize("scheme", ["http", "s3"])
def test_throttled_cut_and_changed_at_once(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operation gives the bytes of the version that it began with, or says that the file was changed."""
    if scheme == "s3":
        pytest.importorskip("obstore", reason='obstore is not installed: pip install "ckptool[remote]"')
    versions = [noise(NBYTES, seed) for seed in (4, 5)]
    chance = random.Random(6)
    done = changed = 0
    with serving({"/b/x": versions[0]}) as server:
        server.cut = lambda: chance.random() < 0.1
        server.busy = lambda: chance.random() < 0.1
        path = f"{server.url}/b/x" if scheme == "http" else "s3://b/x"
        while done < scale.times(20, 300):
            now = chance.randrange(2)
            server.files["/b/x"] = versions[now]
            try:
                source, _ = open_remote(Remote(path, endpoint=server.url, anonymous=scheme == "s3"))
                with closing(source):
                    for start, nbytes in ranges(5, done):
                        if chance.random() < 0.1:
                            server.files["/b/x"] = versions[chance.randrange(2)]
                        done += 1
                        assert source.read(start, nbytes) == versions[now][start : start + nbytes]
            except SourceChanged:
                changed += 1
    assert 0 < changed < done


def test_a_server_that_stays_busy_is_an_error() -> None:
    with serving({"/x": noise(100)}) as server:
        server.busy = lambda: True
        with pytest.raises(FileUnavailable, match="503, 6 times") as caught:
            open_checkpoint(f"{server.url}/x")
    assert caught.value.kind == "network"


def test_parts_that_are_announced_are_fetched_once_and_in_bounded_memory() -> None:
    nbytes, fetched = 100 * PART_NBYTES, []
    held = most = 0

    def fetch(start: int, stop: int) -> bytes:
        fetched.append((start, stop))
        return bytes(1)  # of the bytes themselves nothing is read here

    parts = Parts(fetch, nbytes, Fetchers(4))
    parts.announce([(0, nbytes)])
    position = 0
    while position < nbytes:
        part = parts.at(position)
        part.data.result()
        held = sum(one.stop - one.start for one in parts._parts)
        most = max(most, held)
        position = part.stop
    parts.close()
    assert sorted(fetched) == [(start, start + PART_NBYTES) for start in range(0, nbytes, PART_NBYTES)]
    assert most <= 6 * PART_NBYTES


def test_all_connections_are_at_work_while_parts_are_read() -> None:
    """What was read makes room at once: of what is held, no more than two parts are not on their way."""
    nbytes, connections = 100 * PART_NBYTES, 8
    begun = threading.Semaphore(0)
    answer = threading.Semaphore(0)

    def fetch(start: int, stop: int) -> bytes:
        begun.release()
        answer.acquire()
        return bytes(stop - start)

    parts = Parts(fetch, nbytes, Fetchers(connections))
    parts.announce([(0, nbytes)])
    position = 0
    for _ in range(20):
        part = parts.at(position)
        if position == 0:
            assert all(begun.acquire(timeout=10) for _ in range(connections))
        answer.release()
        part.data.result(10)
        assert begun.acquire(timeout=10)  # another begins as soon as one ends
        parts.took(part, part.start, part.stop)
        position = part.stop
    answer.release(1000)
    parts.close()


def test_a_size_that_a_server_makes_up_costs_nothing() -> None:
    nbytes = 1 << 60
    parts = Parts(lambda start, stop: bytes(1), nbytes, Fetchers(4))
    parts.announce([(0, nbytes)])
    for position in (0, nbytes - 1, nbytes // 2, 5):
        part = parts.at(position)
        assert part.start <= position < part.stop <= part.start + PART_NBYTES
    parts.close()


@pytest.mark.parametrize("save", [zipped, legacy])
def test_a_migration_fetches_little_more_than_the_file(save, tmp_path) -> None:
    wanted = tensors(200, NUMEL)
    data = save(wanted)
    with serving({"/x.pth": data}) as server:
        report = migrate(f"{server.url}/x.pth", tmp_path / "x.safetensors")
        assert server.sent < 1.1 * len(data) + 1_000_000
        assert len(server.requests) < 12
    assert report.verified
    assert_same(load(tmp_path / "x.safetensors"), wanted)


def test_a_deadline_ends_what_waits_for_a_server() -> None:
    with serving({"/x": LARGE}) as server:
        server.seconds = 0.4
        with pytest.raises(Cancelled):
            open_checkpoint(f"{server.url}/x", limits=Limits(cancellation=Cancellation(0.6)))


def test_memory_of_parts_goes_back_to_the_system() -> None:
    """Memory of other kinds is kept for later by the allocator, which took twice what parts hold."""
    assert isinstance(memory_of(PART_NBYTES).obj, mmap.mmap)
    assert not isinstance(memory_of(1000).obj, mmap.mmap)
    assert memory_of(0).nbytes == 0
