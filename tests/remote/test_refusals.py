"""What cannot be read far away: one line with the reason, and what to do. No secret is ever shown."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest
import torch

from ckptool import (
    CkptoolError,
    MigrationRefused,
    MissingPackage,
    Remote,
    check,
    load,
    migrate,
    open_checkpoint,
)
from tests.program import invoke
from tests.remote.servers import Server, serving
from tests.remote.test_requests import LARGE, NUMEL, SMALL, tensors

SECRET = "hunter2"


def refused(address: str, secret: str = SECRET) -> CkptoolError:
    with pytest.raises(CkptoolError) as caught:
        open_checkpoint(address)
    assert "\n" not in str(caught.value)
    assert caught.value.hint
    assert secret not in f"{caught.value}{caught.value.hint}{caught.value.path}"
    return caught.value


@pytest.mark.parametrize(
    ("status", "kind", "says"),
    [(401, "credentials", "(401)"), (403, "permission", "(403)"), (404, "missing", "(404)"), (410, "missing", "404"),
     (405, "network", "405")],
)  # fmt: skip
def test_an_answer_that_refuses_says_so(status: int, kind: str, says: str) -> None:
    with serving({}) as server:
        server.before = lambda handler: handler.answer(status, b"no") or True
        error = refused(f"{server.url}/x?key={SECRET}")
    assert (error.kind, says in error.message) == (kind, True)


def test_a_server_without_ranges_gives_small_files_and_offers_to_download_large_ones() -> None:
    with serving({"/small": SMALL, "/large": LARGE}) as server:
        server.has_ranges = False
        with open_checkpoint(f"{server.url}/small") as found:
            assert len(found.tensors) == 3
        error = refused(f"{server.url}/large")
        assert (error.kind, error.actual, error.option) == ("no-ranges", len(LARGE), "download")
        with open_checkpoint(Remote(f"{server.url}/large", download=True)) as found:
            assert found.tensors["layers.7.weight"].read() == tensors(200, NUMEL)["layers.7.weight"].numpy().tobytes()
        done = invoke(["inspect", "-q", "--download", f"{server.url}/large"])
        assert (done.exit_code, "200" in done.output) == (0, True)


@pytest.mark.parametrize("nbytes", [100, 20 << 20])
def test_a_page_to_sign_in_at_is_named(nbytes: int) -> None:
    page = b"\n<!doctype html><title>Sign in</title>".ljust(nbytes)
    with serving({}) as server:
        server.before = lambda handler: handler.answer(200, page, {"Content-Type": "text/html; charset=utf-8"}) or True
        assert "page" in refused(f"{server.url}/x").message


def test_nothing_there_to_answer_is_an_error() -> None:
    with serving({}) as server:
        address = f"{server.url}/x"
    assert "cannot be reached" in refused(address).message
    assert "no such host" in refused("https://nowhere.invalid/x").message


@pytest.mark.parametrize("address", ["https://", "https:///x", "https://h:x/y", "http://[/x"])
def test_no_address_is_an_error(address: str) -> None:
    assert refused(address).kind == "address"


def test_a_redirect_on_the_same_server_is_followed() -> None:
    with serving({"/x": LARGE}) as server:

        def elsewhere(handler) -> bool:
            if handler.path == "/old":
                handler.answer(302, b"", {"Location": "/x"})
                return True
            return False

        server.before = elsewhere
        with open_checkpoint(f"{server.url}/old") as found:
            assert len(found.tensors) == 200
        assert [path for path, _ in server.requests].count("/old") == 1


def test_a_redirect_to_another_server_inside_the_machine_and_one_that_never_ends_are_refused() -> None:
    with serving({"/x": LARGE}) as inside, serving({}) as server:
        for place, says in ((lambda _: f"{inside.url}/x?k={SECRET}", "into"), (lambda path: f"{path}x", "more than 5")):
            server.before = lambda it, place=place: it.answer(302, b"", {"Location": place(it.path)}) or True
            error = refused(f"{server.url}/x")
            assert (error.kind, says in error.message) == ("redirect", True)
        assert not inside.requests


def test_keys_in_an_address_are_sent_to_its_server_and_never_shown() -> None:
    seen = []
    with serving({"/x": LARGE}) as server:
        server.before = lambda handler: seen.append(handler.headers.get("Authorization")) or False
        address = server.url.replace("http://", f"http://me:{SECRET}@") + f"/x?sig={SECRET}#{SECRET}"
        with open_checkpoint(address) as found:
            assert SECRET not in found.path
        report = check(address)
        assert SECRET not in repr(report)
        for arguments in (["inspect", "-q"], ["inspect", "--json"], ["check"], ["check", "--json"]):
            done = invoke([*arguments, address])
            assert (done.exit_code, SECRET in done.output) == (0, False)
            done = invoke([*arguments, address.replace("/x?", "/none?")])
            assert (done.exit_code, SECRET in done.output) == (2, False)
    assert set(seen) == {"Basic bWU6aHVudGVyMg=="}


def test_no_result_is_written_to_an_address() -> None:
    with serving({"/x": SMALL}) as server, pytest.raises(MigrationRefused, match="cannot be written to"):
        migrate(f"{server.url}/x", f"{server.url}/y")


@pytest.mark.parametrize(("address", "package"), [("s3://b/x.pth", "obstore"), ("hf://org/name", "huggingface_hub")])
def test_a_package_that_is_missing_is_named(address: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(MissingPackage, match="pip install") as caught:
        open_checkpoint(address)
    assert caught.value.package == package
    assert invoke(["inspect", address]).exit_code == 2


@pytest.fixture
def secure(tmp_path: Path) -> tuple[Server, Path]:
    """A server with a certificate that was made just now."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(certificate), "-subj", "/CN=localhost", "-days", "2"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    with serving({"/x": LARGE}) as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        yield server, certificate


def test_https_is_read_where_the_certificate_is_trusted(
    secure: tuple[Server, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, certificate = secure
    address = f"https://localhost:{server.server_port}/x"
    assert refused(address).kind == "certificate"
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert torch.equal(load(address)["layers.9.weight"], tensors(200, NUMEL)["layers.9.weight"])
    server.before = lambda handler: (
        handler.answer(302, b"", {"Location": f"http://localhost:{server.server_port}/x"}) or True
    )
    assert "http://" in refused(address).message
