"""``ckptool scan`` of addresses: every checkpoint of a prefix, many at once, in about one request each."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result

from ckptool import migrate
from tests.cli.test_scan import CUT, DIES, FINE, rows
from tests.program import invoke
from tests.remote.buckets import bucket
from tests.remote.servers import Server, serving
from tests.workers import do_first

pytestmark = pytest.mark.usefixtures("keys")

pytest.importorskip("obstore", reason='obstore is not installed: pip install "ckptool[remote]"')


@pytest.fixture
def store() -> Iterator[Server]:
    files = {f"/b/runs/{number}/last.pth": FINE.read_bytes() for number in range(12)}
    files |= {"/b/runs/cut.pth": CUT.read_bytes(), "/b/runs/README.md": b"# About", "/b/runs-old/x.pth": b"none"}
    with bucket(files) as (found, _):
        yield found


def scan(*arguments: object, code: int = 0, given: bytes | None = None) -> Result:
    result = invoke(["scan", "--jobs", "1", *map(str, arguments)], input=given)
    assert result.exit_code == code, result.output
    return result


def saved(tensor: torch.Tensor) -> bytes:
    torch.save({"weight": tensor}, content := io.BytesIO())
    return content.getvalue()


def plain(found: dict[str, Any]) -> dict[str, Any]:
    """Return a row without what tells where it is, and which version it is of."""
    return {name: value for name, value in found.items() if name not in ("path", "version", "etag", "mtime_ns")}


def test_a_prefix_has_a_row_for_each_checkpoint_in_one_request_each(store: Server) -> None:
    found = rows(scan("s3://b/runs", "--endpoint", store.url, code=2).stdout)

    assert sorted(found) == sorted(["s3://b/runs/cut.pth", *(f"s3://b/runs/{one}/last.pth" for one in range(12))])
    (here,) = rows(scan(FINE).stdout).values()
    for path in found.keys() - {"s3://b/runs/cut.pth"}:
        assert plain(found[path]) == plain(here)
        assert found[path]["etag"]
    assert found["s3://b/runs/cut.pth"]["error"]["kind"] == "lfs-pointer"
    asked = [path for path, _ in store.requests if "list-type" not in path and path.endswith(".pth")]
    assert len(asked) <= 1.3 * len(found)
    whole = rows(scan("s3://b", "--endpoint", store.url, code=2).stdout)
    assert whole.keys() == found.keys() | {"s3://b/runs-old/x.pth"}


@pytest.mark.parametrize(("address", "kind"), [("s3://b/gone", "missing"), ("s3://b/notes/", "directory")])
def test_a_prefix_of_no_checkpoints_is_one_error(address: str, kind: str, store: Server) -> None:
    store.files["/b/notes/README.md"] = b"# About"
    found = rows(scan(address, "--endpoint", store.url, code=2).stdout)

    assert [one["error"]["kind"] for one in found.values()] == [kind]


def test_keys_that_are_refused_are_said_in_a_row(store: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    result = scan("s3://b/runs", "s3://b/runs/", "--endpoint", store.url, code=2)

    assert {one["error"]["kind"] for one in rows(result.stdout).values()} == {"permission"}
    assert "another" not in result.output


def test_a_worker_that_dies_costs_one_of_the_files_that_it_was_at(
    store: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    do_first(DIES.format("/3/last.pth"), tmp_path / "first", monkeypatch)
    found = rows(scan("s3://b/runs", "--endpoint", store.url, code=2).stdout)

    assert [path for path, one in found.items() if one["error"] and one["error"]["kind"] == "worker-ended"] == [
        "s3://b/runs/3/last.pth"
    ]
    assert len(found) == 13


def test_what_has_not_changed_in_a_store_is_skipped(store: Server, tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    scan("s3://b/runs/", "--endpoint", store.url, "-o", output, code=2)
    store.files["/b/runs/3/last.pth"] += b"\0"
    store.requests.clear()
    result = scan("s3://b/runs/", "--endpoint", store.url, "-o", output, code=2)

    assert "skipped      12 checkpoints that" in result.stderr
    assert {path for path, _ in store.requests if path.endswith(".pth")} == {"/b/runs/3/last.pth"}
    assert len(output.read_text().splitlines()) == 14


def test_shards_in_a_store_are_one_row(store: Server, tmp_path: Path) -> None:
    migrate(FINE, tmp_path / "cut", max_shard_size=60_000)
    for path in (tmp_path / "cut").iterdir():
        store.files[f"/b/cut/{path.name}"] = path.read_bytes()

    (found,) = rows(scan("s3://b/cut", "--digest", "--endpoint", store.url).stdout).values()
    (here,) = rows(scan(tmp_path / "cut", "--digest").stdout).values()
    assert plain(found) == plain(here)
    assert found["shards"] > 1


def test_addresses_of_a_list_are_read_and_known_again(tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    files = {f"/{number}.pth": FINE.read_bytes() for number in range(4)} | {"/big.pth": saved(torch.zeros(9 << 18))}
    with serving(files) as server:
        listed = "".join(f"{server.url}{name}?signature=secret\n" for name in [*files, "/gone.pth"]).encode()
        scan("-", "-o", output, given=listed, code=2)
        found = rows(output.read_text())
        asked = [path for path, _ in server.requests]
        server.requests.clear()
        result = scan("-", "-o", output, given=listed, code=2)

        assert sorted(found) == sorted(f"{server.url}{name}" for name in [*files, "/gone.pth"])
        assert "secret" not in output.read_text()
        assert all(sum(name in path for path in asked) == 1 for name in list(files)[:4])
        assert found[f"{server.url}/gone.pth"]["error"]["kind"] == "missing"
        assert "skipped      5 checkpoints that" in result.stderr
        assert len(output.read_text().splitlines()) == 7


def test_a_repository_has_a_row_for_each_checkpoint_and_an_index_stands_for_its_shards() -> None:
    pytest.importorskip("huggingface_hub", reason='huggingface_hub is not installed: pip install "ckptool[hub]"')
    sha = "0123456789abcdef0123456789abcdef01234567"
    names = ("config.json", "model.pth", "model-00001-of-00002.safetensors", "model.safetensors.index.json")

    def answers(handler: Any) -> bool:
        if not handler.path.startswith("/api/models/org/net"):
            return False
        known = [{"rfilename": one, "size": len(FINE.read_bytes()), "blobId": "0" * 40} for one in names]
        body = json.dumps({"id": "org/net", "sha": sha, "siblings": known}).encode()
        handler.answer(200, body, {"Content-Type": "application/json"})
        return True

    with serving({f"/org/net/resolve/{sha}/model.pth": FINE.read_bytes()}) as server:
        server.before = answers
        found = rows(scan("hf://org/net", "--endpoint", server.url, "--anonymous", code=2).stdout)

        place = f"hf://org/net@{sha}"
        assert sorted(found) == [f"{place}/model.pth", f"{place}/model.safetensors.index.json"]
        (here,) = rows(scan(FINE).stdout).values()
        assert plain(found[f"{place}/model.pth"]) == plain(here)
        assert [path for path, _ in server.requests if path.endswith("/model.pth")] == [
            f"/org/net/resolve/{sha}/model.pth"
        ]
