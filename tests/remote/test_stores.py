"""Objects of stores, through obstore: a server on loopback that speaks as S3 does, and checks who signed."""

from __future__ import annotations

import pytest

from ckptool import Remote, check, diff, load, migrate, open_checkpoint
from tests.loading.same import assert_same
from tests.remote.buckets import SECRET, checks_keys
from tests.remote.servers import serving
from tests.remote.test_refusals import refused
from tests.remote.test_requests import LARGE, NUMEL, SMALL, tensors

pytestmark = pytest.mark.usefixtures("keys")

pytest.importorskip("obstore", reason='obstore is not installed: pip install "ckptool[remote]"')


def test_an_object_is_read_with_keys_in_few_requests(tmp_path) -> None:
    with serving({"/b/runs/x.pth": LARGE}) as server:
        checks_keys(server)
        address = Remote("s3://b/runs/x.pth", endpoint=server.url, region="eu-west-1")
        with open_checkpoint(address) as found:
            assert (found.path, len(found.tensors)) == ("s3://b/runs/x.pth", 200)
            assert len(server.requests) <= 3
        assert migrate(address, tmp_path / "x.pth").verified
        report = check(address, deep=True)
        assert (report.error, report.matching) == (None, report.records)
        assert diff(address, tmp_path / "x.pth").same
        assert_same(load(address), tensors(200, NUMEL))


def test_wrong_keys_and_no_keys_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving({"/b/x.pth": LARGE}) as server:
        checks_keys(server)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", f"{SECRET}x")
        for anonymous in (False, True):
            address = Remote("s3://b/x.pth", endpoint=server.url, anonymous=anonymous)
            assert refused(address, SECRET).kind == "permission"


@pytest.mark.parametrize(
    ("status", "kind"), [(401, "credentials"), (403, "permission"), (404, "missing"), (301, "region"), (418, "network")]
)
def test_an_answer_that_refuses_says_so(status: int, kind: str) -> None:
    with serving({}) as server:
        server.before = lambda handler: handler.answer(status) or True
        assert refused(Remote("s3://b/x.pth", endpoint=server.url)).kind == kind


@pytest.mark.parametrize("address", ["s3://", "s3://b"])
def test_an_address_without_an_object_is_refused(address: str) -> None:
    assert refused(address).kind == "address"


def test_small_and_empty_objects_are_read() -> None:
    with serving({"/b/x.pth": SMALL, "/b/empty": b""}) as server:
        with open_checkpoint(Remote("s3://b/x.pth", endpoint=server.url)) as found:
            assert len(found.tensors) == 3
        assert "empty" in refused(Remote("s3://b/empty", endpoint=server.url)).message


@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_stores_of_google_and_azure_are_read_too(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "someone")
    with serving({"/b/x.pth": LARGE, "/someone/b/x.pth": LARGE}) as server:
        server.modified = "Sun, 22 Nov 2026 00:00:00 GMT"
        with open_checkpoint(Remote(f"{scheme}://b/x.pth", endpoint=server.url, anonymous=True)) as found:
            assert len(found.tensors) == 200
        assert scheme == "gs" or not any((ranged or "").startswith("bytes=-") for _, ranged in server.requests)
