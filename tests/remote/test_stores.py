"""Objects of stores, through obstore: a server on loopback that speaks as S3 does, and checks who signed."""

from __future__ import annotations

import pytest

from ckptool import CkptoolError, Remote, check, diff, load, migrate, open_checkpoint
from tests.remote.buckets import SECRET, checks_keys
from tests.remote.servers import serving
from tests.remote.test_requests import NUMEL, tensors, zipped

pytestmark = pytest.mark.usefixtures("keys")

pytest.importorskip("obstore", reason='obstore is not installed: pip install "ckptool[remote]"')

DATA = zipped(tensors(200, NUMEL))


def refused(address: str) -> CkptoolError:
    with pytest.raises(CkptoolError) as caught:
        open_checkpoint(address)
    assert "\n" not in str(caught.value)
    assert caught.value.hint
    assert SECRET not in f"{caught.value}{caught.value.hint}"
    return caught.value


def test_an_object_is_read_with_keys_in_few_requests(tmp_path) -> None:
    wanted = tensors(200, NUMEL)
    with serving({"/b/runs/x.pth": DATA}) as server:
        checks_keys(server)
        address = Remote("s3://b/runs/x.pth", endpoint=server.url, region="eu-west-1")
        with open_checkpoint(address) as found:
            assert (found.path, len(found.tensors)) == ("s3://b/runs/x.pth", 200)
            assert len(server.requests) <= 3
        assert migrate(address, tmp_path / "x.pth").verified
        report = check(address, deep=True)
        assert (report.error, report.matching) == (None, report.records)
        assert diff(address, tmp_path / "x.pth").same
        assert {name: one.tolist() for name, one in load(address).items()} == {
            name: one.tolist() for name, one in wanted.items()
        }


def test_wrong_keys_and_no_keys_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving({"/b/x.pth": DATA}) as server:
        checks_keys(server)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", f"{SECRET}x")
        assert refused(Remote("s3://b/x.pth", endpoint=server.url)).kind == "permission"
        assert refused(Remote("s3://b/x.pth", endpoint=server.url, anonymous=True)).kind == "permission"


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
    with serving({"/b/x.pth": zipped(tensors(3, 4)), "/b/empty": b""}) as server:
        with open_checkpoint(Remote("s3://b/x.pth", endpoint=server.url)) as found:
            assert len(found.tensors) == 3
        assert "empty" in refused(Remote("s3://b/empty", endpoint=server.url)).message


def test_googles_store_is_read_too() -> None:
    with serving({"/b/x.pth": DATA}) as server:
        server.modified = "Sun, 22 Nov 2026 00:00:00 GMT"
        address = Remote("gs://b/x.pth", endpoint=server.url, anonymous=True)
        with open_checkpoint(address) as found:
            assert len(found.tensors) == 200


def test_azures_store_is_read_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "someone")
    with serving({"/b/x.pth": DATA, "/someone/b/x.pth": DATA}) as server:
        server.modified = "Sun, 22 Nov 2026 00:00:00 GMT"
        address = Remote("az://b/x.pth", endpoint=server.url, anonymous=True)
        with open_checkpoint(address) as found:
            assert len(found.tensors) == 200
        assert not any((ranged or "").startswith("bytes=-") for _, ranged in server.requests)
