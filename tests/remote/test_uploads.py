"""Results that are objects of a store: whole or not at all, never over another, read back before they appear."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load as load_safetensors

from ckptool import CkptoolError, MigrationRefused, OutputExists, OutputFailed, Remote, load, migrate
from ckptool.migration.output import remote
from ckptool.sources.remote import bucket as buckets
from ckptool.sources.remote import bucket as upload
from tests import scale
from tests.program import invoke
from tests.remote.buckets import SECRET, Bucket, bucket
from tests.remote.servers import Server
from tests.remote.test_requests import tensors, zipped

pytestmark = pytest.mark.usefixtures("keys")

pytest.importorskip("obstore", reason='obstore is not installed: pip install "ckptool[remote]"')

PART_NBYTES = 1 << 20
LARGE = tensors(2, 400_000)
"""3.2 MB: three parts, and some more."""


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "_PART_NBYTES", PART_NBYTES)
    monkeypatch.setattr(Bucket, "least_nbytes", PART_NBYTES)


@pytest.fixture
def store() -> Iterator[tuple[Server, type[Bucket]]]:
    with bucket({}) as kept:
        yield kept


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("uploads") / "x.pth"
    path.write_bytes(zipped(LARGE))
    return path


def at(server: Server, name: str) -> Remote:
    return Remote(f"s3://b/{name}", endpoint=server.url)


def test_a_file_in_parts_is_what_is_written_here(store, source: Path, tmp_path: Path) -> None:
    server, kept = store
    report = migrate(source, at(server, "runs/y.pth"), to="cpu")
    assert (report.verified, report.written, report.target) == (True, True, "s3://b/runs/y.pth")
    migrate(source, tmp_path / "y.pth", to="cpu")
    assert server.files == {"/b/runs/y.pth": (tmp_path / "y.pth").read_bytes()}
    assert not kept.parts
    # The last request that writes is the one that gives it its name, after everything was read back.
    names = [path for command, path in kept.log if command in ("PUT", "POST") and path.startswith("/b/runs/y.pth")]
    assert "uploadId" in names[-1]
    assert sum("partNumber" in path for _, path in kept.log) == 5  # four of them, and the copy


def test_safetensors_and_names_in_a_folder(store, source: Path) -> None:
    server, _ = store
    migrate(source, at(server, "y.safetensors"))
    assert load_safetensors(server.files["/b/y.safetensors"]).keys() == LARGE.keys()
    report = migrate(source, at(server, "runs/"), to="cpu")
    assert report.target == "s3://b/runs/x.pth"
    assert load(at(server, "runs/x.pth")).keys() == LARGE.keys()


def test_nothing_is_replaced_unasked(store, source: Path) -> None:
    server, kept = store
    server.files["/b/y.pth"] = b"old"
    with pytest.raises(OutputExists, match="exists already"):
        migrate(source, at(server, "y.pth"), to="cpu")
    assert server.files == {"/b/y.pth": b"old"}
    assert [command for command, _ in kept.log] == ["HEAD"]
    assert migrate(source, at(server, "y.pth"), to="cpu", force=True).verified
    assert len(load(at(server, "y.pth"))) == 2
    assert len(server.files) == 1


def test_a_name_that_is_taken_in_the_last_moment_is_kept(store, source: Path) -> None:
    server, kept = store
    signed = server.before

    def takes(handler) -> bool:
        if handler.command == "PUT" and "x-amz-copy-source" in handler.headers:
            server.files["/b/y.pth"] = b"somebody's"
        return signed(handler)

    server.before = takes
    with pytest.raises(OutputExists):
        migrate(source, at(server, "y.pth"), to="cpu")
    assert server.files == {"/b/y.pth": b"somebody's"}
    assert not kept.parts


def is_write(command: str, path: str) -> bool:
    return command != "GET" or "list-type" in path


def failing(server: Server, kept: type[Bucket], first: int, *, only: bool) -> None:
    """Let requests fail from a certain one on that is not a plain read, or only that one."""
    signed = server.before
    seen = []

    def fails(handler) -> bool:
        if not is_write(handler.command, handler.path):
            return signed(handler)
        with server.lock:
            seen.append(None)
            number = len(seen) - 1
        if number == first or (number > first and not only):
            handler.close_connection = True
            handler.connection.shutdown(2)
            return True
        return signed(handler)

    server.before = fails


def at_each_step(save, whole: dict[str, bytes], last: str, monkeypatch: pytest.MonkeyPatch, *, every: int) -> None:
    """Let a store go away at each request of a save: what has its name is whole."""
    monkeypatch.setattr(buckets, "_RETRIES", {"max_retries": 0, "retry_timeout": buckets._CONNECTING})
    with bucket({}) as (server, kept):
        save(server)
        writes = [one for one in kept.log if is_write(*one)]
        assert server.files == whole
    for first in range(0, len(writes), every):
        with bucket({}) as (server, kept):
            failing(server, kept, first, only=False)
            try:
                save(server)
            except OutputFailed:
                shown = {name: data for name, data in server.files.items() if ".part" not in name}
                assert last not in shown, first
            assert all(whole[name] == data for name, data in server.files.items() if ".part" not in name)
            assert last not in server.files or all(name in server.files for name in whole)


def test_a_store_that_goes_away_at_any_step_has_nothing_under_the_name(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    migrate(source, tmp_path / "y.pth", to="cpu")
    whole = {"/b/y.pth": (tmp_path / "y.pth").read_bytes()}
    at_each_step(
        lambda server: migrate(source, at(server, "y.pth"), to="cpu"),
        whole,
        "/b/y.pth",
        monkeypatch,
        every=1 if scale.scale else 3,
    )


KILLED = f"""
import sys
from ckptool import Remote, migrate
from ckptool.sources.remote import bucket as upload
upload._PART_NBYTES = {PART_NBYTES}
migrate(sys.argv[1], Remote("s3://b/y.pth", endpoint=sys.argv[2]), to="cpu", force=True)
"""


@pytest.mark.parametrize("old", scale.some([b"the old one", None], 2))
def test_a_process_that_is_killed_at_any_step_leaves_what_had_the_name(
    source: Path, tmp_path: Path, old: bytes | None
) -> None:
    migrate(source, tmp_path / "y.pth", to="cpu")
    new = (tmp_path / "y.pth").read_bytes()
    process: list[subprocess.Popen[bytes]] = []

    def killing(server: Server, first: int) -> list[None]:
        """Kill the process that writes at one of its requests, which the store has by then, and may still carry out."""
        signed, seen = server.before, []

        def kills(handler: Any) -> bool:
            if is_write(handler.command, handler.path):
                with server.lock:
                    seen.append(None)
                    if len(seen) - 1 == first:
                        process[-1].kill()
                        process[-1].wait()
            return signed(handler)

        server.before = kills
        return seen

    def run(first: int) -> tuple[int, int, dict[str, bytes]]:
        with bucket({"/b/y.pth": old} if old else {}) as (server, _):
            seen = killing(server, first)
            process.append(subprocess.Popen([sys.executable, "-c", KILLED, str(source), server.url]))
            code = process[-1].wait()
        return code, len(seen), {name: data for name, data in server.files.items() if ".part" not in name}

    code, requests, files = run(-1)
    assert (code, files) == (0, {"/b/y.pth": new})
    outcomes = set()
    for first in range(0, requests, 1 if scale.scale else 5):
        code, _, files = run(first)
        assert code == -signal.SIGKILL
        assert files in ({"/b/y.pth": old} if old else {}, {"/b/y.pth": new})
        outcomes.add(files.get("/b/y.pth") == new)
    assert False in outcomes


def test_shards_get_their_names_before_their_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "x.pth"
    source.write_bytes(zipped(tensors(6, 1000)))
    migrate(source, tmp_path / "shards", max_shard_size=9000)
    whole = {f"/b/runs/s/{one.name}": one.read_bytes() for one in (tmp_path / "shards").iterdir()}
    assert len(whole) == 4
    index = "/b/runs/s/model.safetensors.index.json"

    def save(server: Server) -> None:
        report = migrate(source, at(server, "runs/s/"), max_shard_size=9000)
        assert (report.target.rstrip("/"), len(report.files)) == ("s3://b/runs/s", 4)

    at_each_step(save, whole, index, monkeypatch, every=1 if scale.scale else 4)
    with bucket({}) as (server, _):
        save(server)
        assert load(at(server, "runs/s/model.safetensors.index.json")).keys() == tensors(6, 1).keys()
        with pytest.raises(OutputExists, match="objects already"):
            migrate(source, at(server, "runs/s/"), max_shard_size=9000, force=True)


def test_shards_get_their_names_at_once_and_the_index_after_them(store, tmp_path: Path) -> None:
    server, kept = store
    torch.save({f"{number}": torch.randn(1000) for number in range(4)}, tmp_path / "source.pth")
    signed, all_are_here = server.before, threading.Barrier(4, timeout=10)

    def before(handler) -> bool:
        if handler.headers.get("x-amz-copy-source", "index").endswith("safetensors"):
            all_are_here.wait()  # or nobody goes on
        return signed(handler)

    server.before = before
    migrate(tmp_path / "source.pth", at(server, "s/"), max_shard_size=5000)

    copies = [path.partition("?")[0] for command, path in kept.log if command == "PUT" and ".part" not in path]
    assert len(copies) == 5
    assert copies[-1] == "/b/s/model.safetensors.index.json"
    assert [path for command, path in kept.log if command == "DELETE" or path.endswith("?delete")] == ["/b?delete"]


def test_what_passes_is_tried_again(source: Path) -> None:
    for first in range(0, 12, 1 if scale.scale else 4):
        with bucket({}) as (server, kept):
            failing(server, kept, first, only=True)
            assert migrate(source, at(server, "y.pth"), to="cpu").verified
            assert load(at(server, "y.pth")).keys() == LARGE.keys()
            assert not kept.parts


def test_what_fails_or_is_stopped_under_way_is_aborted(store, source: Path) -> None:
    server, kept = store

    def stop(written: int, _: int) -> None:
        if written > 2 << 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        migrate(source, at(server, "y.pth"), to="cpu", progress=stop)
    assert server.files == {}
    assert not kept.parts
    assert any(command == "DELETE" for command, _ in kept.log)


def test_what_was_not_kept_as_it_was_written_does_not_appear(store, source: Path, monkeypatch) -> None:
    server, _ = store
    kept = Bucket.publish

    def spoils(self, path: str, data: bytes) -> bool:
        return kept(self, path, data[:-5000] + bytes([data[-5000] ^ 1]) + data[-4999:])

    monkeypatch.setattr(Bucket, "publish", spoils)
    with pytest.raises(OutputFailed) as caught:
        migrate(source, at(server, "y.pth"), to="cpu")
    assert caught.value.kind == "verification-failed"
    assert server.files == {}


def test_what_is_too_large_to_be_copied_goes_to_its_own_name(store, source: Path, monkeypatch) -> None:
    server, kept = store
    monkeypatch.setattr(upload, "_MOST_COPIED", 1 << 20)
    assert migrate(source, at(server, "y.pth"), to="cpu").verified
    assert list(server.files) == ["/b/y.pth"]
    assert not any(".part" in path for _, path in kept.log)
    with pytest.raises(OutputFailed, match="5 GiB at once"):
        migrate(source, at(server, "s/"), max_shard_size="2MB")
    assert list(server.files) == ["/b/y.pth"]

    signed = server.before
    server.before = lambda handler: server.files.setdefault("/b/z.pth", b"somebody's") is None or signed(handler)
    del server.files["/b/y.pth"]
    with pytest.raises(OutputExists):
        migrate(source, at(server, "z.pth"), to="cpu")
    assert server.files == {"/b/z.pth": b"somebody's"}


def test_parts_are_as_large_as_they_must_be() -> None:
    made = []

    class Library:
        def open_writer(self, store, key, *, buffer_size: int, max_concurrency: int) -> None:
            made.append((buffer_size, max_concurrency))

    stored = upload.Stored.__new__(upload.Stored)
    stored.remote, stored.library, stored.store = Remote("s3://b/x", connections=3), Library(), None
    for nbytes in (0, 1 << 30, 5 << 40):
        stored.writer("x", nbytes)
    assert made[0] == made[1] == (PART_NBYTES, 3)
    assert made[2][0] * 10_000 > 5 << 40


def test_memory_stays_bounded_by_parts() -> None:
    """What is written waits for parts that are under way."""
    with bucket({}) as (server, kept):
        gate = threading.Event()
        signed = server.before
        server.before = lambda handler: ("partNumber" in handler.path and not gate.wait(60)) or signed(handler)
        output = remote.RemoteOutput(at(server, "y"))
        output.reserve(40 * PART_NBYTES)
        done = []

        def write() -> None:
            for _ in range(40):
                output.write(bytes(PART_NBYTES))
                done.append(None)

        thread = threading.Thread(target=write)
        thread.start()
        thread.join(1)
        assert len(done) <= 12
        gate.set()
        thread.join()
        output.close()
        assert (server.files, kept.parts) == ({}, {})


@pytest.mark.parametrize("address", ["https://host/x.pth", "hf://org/name/x.pth"])
def test_addresses_that_cannot_be_written_to_are_refused_by_name(address: str, source: Path) -> None:
    with pytest.raises(MigrationRefused, match=f"{address.partition(':')[0]}:// cannot be written to") as caught:
        migrate(source, address)
    assert "s3://" in str(caught.value.hint)


def test_a_model_that_torch_saves_is_refused(source: Path) -> None:
    with pytest.raises(MigrationRefused, match="saved by torch"):
        migrate(source, "s3://b/x.pth", model="torch.nn:Linear")


def test_googles_store_takes_them_too(store, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, kept = store
    account = {"gcs_base_url": server.url, "disable_oauth": True, "client_email": "", "private_key": ""}
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps({**account, "private_key_id": ""}))
    server.modified = "Sun, 22 Nov 2026 00:00:00 GMT"

    def takes(handler) -> bool:
        if kept.taken and "x-goog-copy-source" in handler.headers:
            server.files["/b/z.pth"] = b"somebody's"
        return False

    kept.taken = False  # type: ignore[attr-defined]
    server.before = takes
    answer = Bucket.answer
    monkeypatch.setattr(
        Bucket,
        "answer",
        lambda self, status, body=b"", headers=None: answer(self, status, body, {"ETag": '"x"', **(headers or {})}),
    )
    assert migrate(source, Remote("gs://b/y.pth", endpoint=server.url), to="cpu").verified
    migrate(source, tmp_path / "y.pth", to="cpu")
    assert server.files == {"/b/y.pth": (tmp_path / "y.pth").read_bytes()}
    kept.taken = True  # type: ignore[attr-defined]
    with pytest.raises(OutputExists):
        migrate(source, Remote("gs://b/z.pth", endpoint=server.url), to="cpu")
    assert server.files["/b/z.pth"] == b"somebody's"
    assert not any(".part" in name for name in server.files)


def refused(source: Path, address: Remote) -> CkptoolError:
    with pytest.raises(OutputFailed) as caught:
        migrate(source, address, to="cpu")
    assert SECRET not in f"{caught.value}{caught.value.hint}"
    assert "\n" not in str(caught.value)
    return caught.value


def test_stores_that_refuse_say_so(store, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, _ = store
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    assert refused(source, at(server, "y.pth")).kind == "permission"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    signed = server.before
    server.before = lambda handler: signed(handler) or (handler.command == "PUT" and bool(handler.answer(404) or 1))
    assert "no such bucket" in refused(source, at(server, "y.pth")).message


def test_a_far_file_becomes_another(store, source: Path) -> None:
    server, _ = store
    server.files["/b/x.pth"] = source.read_bytes()
    assert migrate(at(server, "x.pth"), at(server, "y.safetensors")).verified
    found = load_safetensors(server.files["/b/y.safetensors"])
    assert all(torch.equal(found[name], one) for name, one in LARGE.items())
    assert migrate(at(server, "x.pth"), at(server, "x.pth"), to="cpu", force=True).verified
    assert sorted(server.files) == ["/b/x.pth", "/b/y.safetensors"]


def test_the_command_line_writes_there(store, source: Path) -> None:
    server, _ = store
    far_away = ["--endpoint", server.url]
    done = invoke(["migrate", str(source), "s3://b/y.pth", "--to", "cpu", *far_away])
    assert done.exit_code == 0, done.output
    assert done.output.startswith("s3://b/y.pth\n")
    done = invoke(["migrate", str(source), "--out-dir", "s3://b/all", "--to", "cpu", *far_away])
    assert done.exit_code == 0, done.output
    assert sorted(server.files) == ["/b/all/x.pth", "/b/y.pth"]
