"""Servers that send too much, too slowly, or lead elsewhere: memory, disk and time are bounded, no secret is said."""

from __future__ import annotations

import io
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ckptool import (
    Cancellation,
    Cancelled,
    CkptoolError,
    FileUnavailable,
    Limits,
    LiveModel,
    MalformedFile,
    Remote,
    check,
    load,
    open_checkpoint,
    system,
)
from ckptool.sources.address import check_peer, follow, place_of
from ckptool.sources.paths import shown_path
from ckptool.sources.remote import web
from tests.each import each
from tests.program import invoke
from tests.remote.servers import serving
from tests.remote.test_requests import LARGE, tensors, zipped
from tests.scale import in_turn

SECRET = "hunter2"
SECONDS = 4
"""What waits a fraction of a second ends by then, on a busy machine too; what nobody stops waits longer."""
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "_FIRST_SECONDS", 0.0001)


@contextmanager
def speaking(speak: Callable[[socket.socket], None]) -> Iterator[str]:
    """Give the address of a server that reads a request and then says what ``speak`` does."""
    listening = socket.create_server(("127.0.0.1", 0))

    def answer(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.recv(1 << 16)
            speak(connection)

    def serve() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(listening.accept()[0],), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/x"
    finally:
        listening.close()


def head(status: str, **fields: object) -> bytes:
    lines = [f"HTTP/1.1 {status}", *(f"{name.replace('_', '-')}: {value}" for name, value in fields.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


@pytest.mark.parametrize(
    "content_range",
    [
        f"bytes 0-{1500 * MIB - 1}/{1500 * MIB}", f"bytes 0-{(1 << 40) - 1}/{1 << 40}", "bytes 200-99/100",
        "bytes 0-99/50", f"bytes 5-{20 * MIB - 1}/{20 * MIB}",
    ],
)  # fmt: skip
def test_no_more_memory_is_taken_than_was_asked_for(content_range: str) -> None:
    sent = [0]

    def speak(connection: socket.socket) -> None:
        connection.sendall(head("206 Partial Content", Content_Range=content_range))
        while True:
            sent[0] += connection.send(bytes(1 << 16))

    with speaking(speak) as address, pytest.raises(FileUnavailable, match="another range") as caught:
        open_checkpoint(address)
    assert caught.value.kind == "no-ranges"
    assert sent[0] < 16 * MIB  # what the system itself takes


def endless(connection: socket.socket) -> None:
    connection.sendall(head("200 OK", Transfer_Encoding="chunked"))
    while True:
        connection.sendall(b"10000\r\n" + bytes(1 << 16) + b"\r\n")


def test_a_download_without_an_end_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "UNSIZED_NBYTES", 3 * MIB)
    with speaking(endless) as address:
        with pytest.raises(FileUnavailable, match="at most 3,145,728 are taken") as caught:
            open_checkpoint(Remote(address, download=True))
        assert caught.value.kind == "download"
        done = invoke(["inspect", "--download", address])
    assert (done.exit_code, "3,145,728" in done.output) == (2, True)


def test_a_download_leaves_room_on_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "free_room", lambda _: MIB)
    with serving({"/x": LARGE}) as server:
        with pytest.raises(FileUnavailable, match=f"it has {len(LARGE):,} bytes; at most 983,040 are taken"):
            open_checkpoint(Remote(f"{server.url}/x", download=True))
        assert server.sent < 2 * len(LARGE)
    with speaking(endless) as address, pytest.raises(FileUnavailable, match="983,040"):
        open_checkpoint(Remote(address, download=True))


def drip(begin: bytes) -> Callable[[socket.socket], None]:
    """Say something, and then a byte at a time, for ever."""

    def speak(connection: socket.socket) -> None:
        connection.sendall(begin)
        while True:
            connection.sendall(b"x")
            time.sleep(0.05)

    return speak


DRIPS = {
    "body": head("206 Partial Content", Content_Range="bytes 0-99999/100000", Content_Length=100_000),
    "header": b"HTTP/1.1 206 Partial Content\r\nX-",
    "status": b"HT",
    "chunks": head("200 OK", Transfer_Encoding="chunked") + b"100000\r\n",
    "silence": b"",
}


@pytest.mark.parametrize(("what", "download"), in_turn(DRIPS, [False, True]))
def test_bytes_that_drip_keep_no_call_behind_its_end(what: str, download: bool) -> None:
    by_deadline = (what in ("body", "status")) == download
    cancellation = Cancellation(0.2 if by_deadline else None)
    timer = threading.Timer(0.2, cancellation.cancel)
    with speaking(drip(DRIPS[what])) as address:
        timer.start()
        started = time.monotonic()
        with pytest.raises((Cancelled, FileUnavailable)) as caught:
            open_checkpoint(Remote(address, download=download), limits=Limits(cancellation=cancellation))
        timer.cancel()
    # Without a size, only a download begins to read.
    assert isinstance(caught.value, Cancelled) or (what, download) == ("chunks", False)
    assert time.monotonic() - started < SECONDS


def test_reads_and_file_objects_that_wait_end_at_a_deadline() -> None:
    with serving({"/x": LARGE}) as server:
        cancellation = Cancellation()
        with open_checkpoint(f"{server.url}/x", limits=Limits(cancellation=cancellation)) as found:
            server.before = lambda handler: time.sleep(SECONDS + 1) or False
            threading.Timer(0.1, cancellation.cancel).start()
            started = time.monotonic()
            with pytest.raises(Cancelled):
                found.tensors["layers.7.weight"].read()
        assert time.monotonic() - started < SECONDS

    class File(io.BytesIO):
        path, size, mode, cache = "bucket/x", 10 * MIB, "rb", None
        fs = SimpleNamespace(cat_file=lambda *_, **__: time.sleep(SECONDS + 1))

    file = File()
    started = time.monotonic()
    with pytest.raises(Cancelled):
        open_checkpoint(file, limits=Limits(cancellation=Cancellation(0.1)))
    assert time.monotonic() - started < SECONDS


def test_a_store_that_waits_ends_at_a_deadline() -> None:
    pytest.importorskip("obstore", reason='obstore is not installed: pip install "ckptool[remote]"')
    for name in ("x", "folder/"):
        with serving({}) as server:
            server.before = lambda handler: time.sleep(SECONDS + 1) or False
            address = Remote(f"s3://b/{name}", endpoint=server.url, region="eu", anonymous=True)
            started = time.monotonic()
            with pytest.raises(Cancelled):
                open_checkpoint(address, limits=Limits(cancellation=Cancellation(0.1)))
            assert time.monotonic() - started < SECONDS


def test_a_server_that_is_too_slow_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "_SECONDS", 0.1)
    for what in ("body", "header", "status"):
        with speaking(drip(DRIPS[what])) as address, pytest.raises(FileUnavailable, match="bytes came in") as caught:
            open_checkpoint(address)
        assert caught.value.kind == "network"


def test_a_model_stops_watching_a_server_that_drips() -> None:
    live = LiveModel(torch.nn.Linear(2, 2), commit="swap")
    with speaking(drip(DRIPS["body"])) as address, pytest.raises(Cancelled):
        live.reload(address, limits=Limits(cancellation=Cancellation(0.1)))
    with serving({"/x": LARGE}) as server:
        live.watch(f"{server.url}/x", every=0.01)
        server.before = lambda handler: time.sleep(SECONDS + 1) or False
        time.sleep(0.2)
        started = time.monotonic()
        live.unwatch()
    assert time.monotonic() - started < SECONDS


REFUSED = {
    "9.9.9.9": (
        "100.64.0.1 192.0.0.192 64:ff9b::a9fe:a9fe 64:ff9b::a00:1 64:ff9b:1::1 2002:a9fe:a9fe::1 ::7f00:1 224.0.0.1"
        " ff0e::1 240.0.0.1 ::ffff:100.64.0.1 198.18.0.1 127.0.0.1 ::1 ::ffff:127.0.0.1 fe80::1%eth0 0.0.0.0 10.1.2.3"
    ),
    "10.0.0.1": "0.1.2.3 100.64.0.2 169.254.169.254",
    "100.64.0.1": "100.100.100.200",
    "fd00::1": "fec0::1",
    None: "255.255.255.255 192.168.0.9",
}
"""By the address of the first server, those that it may not redirect to."""
FOLLOWED = {
    "9.9.9.9": "8.8.8.8 2606:4700::1",
    "10.0.0.1": "10.1.2.3 8.8.8.8",
    "fd00::1": "fd00::2",
    "100.64.0.1": "100.64.0.2",
    None: "64:ff9b::808:808",
}


def test_a_redirect_leads_to_what_the_world_can_reach() -> None:
    for home, peers in FOLLOWED.items():
        for peer in peers.split():
            check_peer(peer, home)
    for home, peers in REFUSED.items():
        for peer in peers.split():
            with pytest.raises(FileUnavailable, match="redirect"):
                check_peer(peer, home)
    for location in ("http://h/x", "file:///etc/passwd", "ftp://h/x", "data:,x"):
        with pytest.raises(FileUnavailable):
            follow(place_of("https://h/x"), location)


def test_the_first_name_leads_nowhere_else_later() -> None:
    check_peer("127.0.0.1", "127.0.0.1", is_first=True)
    check_peer("9.9.9.10", "9.9.9.9", is_first=True)
    for peer in ("127.0.0.1", "169.254.169.254", "10.0.0.1", "100.64.0.1"):
        with pytest.raises(FileUnavailable, match="redirect"):
            check_peer(peer, "9.9.9.9", is_first=True)


LOCATIONS = (
    "http://[::1", "http://a b/", "http://\x7f/", "http://a..b/", "http://.../", f"http://{'a' * 300}/", "http://h:x/",
    "http://h:99999/", "http://", "http:///x", "http://[fe80::1%25eth0", "//[", "http://\xe9..b/", "?\x00", "http://[v1.x]/",
)  # fmt: skip


@pytest.mark.parametrize("location", LOCATIONS)
def test_a_location_that_is_no_address_is_an_error_of_ours(location: str) -> None:
    with suppress(CkptoolError):
        follow(place_of("http://h/x"), location)

    def speak(connection: socket.socket) -> None:
        connection.sendall(f"HTTP/1.1 302 Found\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode("latin-1"))

    with speaking(speak) as address:
        with pytest.raises(CkptoolError):
            open_checkpoint(address)
        done = invoke(["inspect", address])
    assert (done.exit_code, done.exception) == (2, None) or isinstance(done.exception, SystemExit)
    assert "unforeseen" not in done.output


NAMES = (
    "%2e%2e/%2e%2e/admin/secret.safetensors", "..%2fsecret.safetensors", "a.safetensors?token=x", "a.safetensors#f",
    "a%00.safetensors", "a b;c.safetensors", "\ud800.safetensors",
)  # fmt: skip


LEADING = ("../x.safetensors", "/x.safetensors", "a/../../x.safetensors", "a\\..\\x.safetensors")


@each("name", [*NAMES, *LEADING])
def test_the_name_of_a_shard_is_a_name_and_leads_nowhere_else(name: str) -> None:
    index = json.dumps({"metadata": {}, "weight_map": {"w": name}}).encode()
    with serving({"/repo/model.safetensors.index.json": index}) as server:
        with (
            pytest.raises(MalformedFile if name in LEADING else CkptoolError) as caught,
            open_checkpoint(f"{server.url}/repo/model.safetensors.index.json?sig=S") as it,
        ):
            it.check_index()
        others = {path for path, _ in server.requests if "index.json" not in path}
    assert name not in LEADING or ("cannot be the name" in str(caught.value) and not others)
    assert all(path.startswith("/repo/") and path.endswith("?sig=S") and path.count("?") == 1 for path in others)
    assert all("/" not in path.removeprefix("/repo/").replace("%2e%2e/", "") or "%252e" in path for path in others)
    assert not any("%2e%2e" in path.lower() or "..%2f" in path.lower() or "%00" in path for path in others)


def test_a_shard_with_an_odd_name_is_found() -> None:
    from safetensors.torch import save

    name, weight = "part 1%2f#?.safetensors", torch.arange(4.0)
    index = json.dumps({"metadata": {}, "weight_map": {"w": name}}).encode()
    files = {"/r/model.safetensors.index.json": index, f"/r/{name}": save({"w": weight})}
    with serving(files) as server:
        found = load(f"{server.url}/r/model.safetensors.index.json")
    assert torch.equal(found["w"], weight)


VERBS: tuple[tuple[str, ...], ...] = (
    ("inspect",), ("inspect", "--json"), ("inspect", "-b"), ("check",), ("check", "--json"), ("check", "--sarif"),
    ("scan",), ("scan", "--tensors"), ("stat",), ("stat", "--json"), ("diff", "OTHER"), ("diff", "--json", "OTHER"),
    ("explain", "x"), ("explain", "Missing key(s) in state_dict: 'w'"), ("explain", "--json", "x"),
    ("explain", "PytorchStreamReader failed reading zip archive: failed finding central directory"),
    ("migrate", "--dry-run"), ("migrate", "--json", "--dry-run"), ("migrate", "--in-place", "--strip-module"),
    ("report", "-o", "OUT"), ("recover",), ("explain",),
)  # fmt: skip
SECRETS = (
    "http://bob:{s}@HOST/x?sig={s}", "http://bob:{s}@HOST/none.pth?X-Amz-Signature={s}#{s}", "http://b:a{s}/b?@HOST/x",
    "http://{s}@HOST/x", "s3://bucket/x?X-Amz-Signature={s}", "az://box/x?sv=1&sig={s}", "ftp://bob:{s}@HOST/x?token={s}",
    "hf://org/name/file?token={s}",
)  # fmt: skip


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_no_verb_says_what_is_secret_in_an_address(
    verb: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pytest.importorskip("huggingface_hub.constants"), "HF_HUB_OFFLINE", True)
    caplog.set_level(logging.DEBUG)
    other = tmp_path / "other.pth"
    data = zipped(tensors(3, 9))
    other.write_bytes(data)
    with serving({"/x": data}) as server:
        for text in SECRETS:
            address = text.format(s=SECRET).replace("HOST", server.url.removeprefix("http://"))
            words = [{"OTHER": str(other), "OUT": str(tmp_path / "page.html")}.get(word, word) for word in verb]
            if address.startswith(("s3", "az", "hf")) and verb[0] not in ("explain", "recover"):
                continue  # it would ask the provider
            done = invoke([*words, address])
            assert SECRET not in done.output, (address, done.output)
            assert SECRET not in repr(done.exception), (address, done.exception)
    assert SECRET not in caplog.text
    for page in tmp_path.glob("*.html"):
        assert SECRET not in page.read_text()


@pytest.mark.parametrize("address", SECRETS)
def test_what_an_address_is_called_has_nothing_secret(address: str) -> None:
    assert SECRET not in shown_path(address.format(s=SECRET))
    assert shown_path("https://host:80/a@b/c%20d") == "https://host:80/a@b/c%20d"
    assert shown_path("https://[::1]:80/x") == "https://[::1]:80/x"
    assert shown_path("s3://bucket/what?/x") == "s3://bucket/what?/x"
    with suppress(CkptoolError):
        check(address.format(s=SECRET).replace("HOST", "127.0.0.1:9"))
