"""Files of strangers through a store and through https: the same output as from the disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import scale
from tests.remote.buckets import bucket
from tests.remote.test_refusals import secure
from tests.remote.test_same_as_here import CORPUS, looked_into

__all__ = ["secure"]

pytestmark = [
    pytest.mark.corpus,
    pytest.mark.skipif(not CORPUS.is_dir(), reason="there is no folder of strangers' files"),
]


def chosen() -> dict[str, Path]:
    """Return the files by where they are in the corpus: what lies beside an index lies beside it there, too."""
    paths = sorted(path for path in CORPUS.rglob("*") if path.is_file())
    return {str(path.relative_to(CORPUS)): path for path in paths}


def tried() -> list[tuple[str, Path]]:
    return list(chosen().items())[:: scale.step(40)]


def different(address: str, *options: str) -> list[str]:
    return [name for name, path in tried() if looked_into(f"{address}/{name}", *options) != looked_into(str(path))]


@pytest.mark.usefixtures("keys")
def test_through_a_store() -> None:
    pytest.importorskip("obstore", reason='obstore is not installed: pip install "ckptool[remote]"')
    with bucket({f"/b/{name}": path.read_bytes() for name, path in chosen().items()}) as (server, _):
        assert different("s3://b", "--endpoint", server.url) == []


def test_through_https(secure, monkeypatch: pytest.MonkeyPatch) -> None:
    server, certificate = secure
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    server.files = {f"/{name}": path.read_bytes() for name, path in chosen().items()}
    assert different(f"https://localhost:{server.server_port}") == []
