"""Folders in a store are the same as on the disk: what is in them, what is missing, and what is beside."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptool import FileUnavailable, Remote, SourceChanged, check, load, migrate, open_checkpoint
from ckptool.sources import remote_folder
from tests import scale
from tests.program import invoke
from tests.remote.buckets import bucket
from tests.remote.servers import Server
from tests.remote.test_requests import NUMEL, tensors, zipped

pytestmark = pytest.mark.usefixtures("keys")

pytest.importorskip("obstore", reason='obstore is not installed: pip install "ckptool[remote]"')

FIXTURES = Path(__file__).parents[2] / "fixtures" / "folders"
CORPUS = Path(__file__).parents[3] / "shared" / "corpus-dirs"
FOLDERS = [
    path for folder in (FIXTURES, CORPUS) if folder.is_dir() for path in sorted(folder.iterdir()) if path.is_dir()
]


@pytest.fixture
def server() -> Iterator[Server]:
    with bucket({}) as (found, _):
        found.requests.clear()
        yield found


def put(server: Server, folder: Path, name: str) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            server.files[f"/b/{name}/{path.relative_to(folder)}"] = path.read_bytes()


def said(*words: str, place: str) -> Any:
    """Return what a verb prints, but for where the files are, and what was left unread of them."""
    done = invoke([*words, "--json"])
    found = json.loads(done.output.replace(place.rstrip("/"), "PLACE"))
    return done.exit_code, plain(found)


def plain(found: Any) -> Any:
    if isinstance(found, list):
        return [plain(one) for one in found if not (isinstance(one, dict) and one.get("code") == "CK170")]
    if isinstance(found, dict):
        return {key: plain(one) for key, one in found.items() if key not in ("command", "hint", "path")}
    return found


@pytest.mark.skipif(not FOLDERS, reason="there are no folders")
def test_folders_are_the_same_as_here(server: Server) -> None:
    different: list[tuple[str, list[str]]] = []
    at = list(range(0, len(FOLDERS), 1 if scale.scale else 9))
    for number in at:
        folder = FOLDERS[number]
        if folder.name == "hf-hub-cache":  # made of links, and stores have none
            continue
        name = f"{number}/{folder.name}"
        put(server, folder, name)
        far = f"s3://b/{name}/"
        for verb in (["inspect"], ["check"], ["check", "--deep"])[: 3 if scale.scale else 1]:
            there = said(*verb, far, "--endpoint", server.url, place=far)
            if there != said(*verb, str(folder), place=str(folder)):
                different.append((folder.name, verb))
    assert not different


def shards(server: Server, tmp_path: Path) -> dict[str, torch.Tensor]:
    wanted = tensors(12, NUMEL * 4)
    (tmp_path / "x.pth").write_bytes(zipped(wanted))
    migrate(tmp_path / "x.pth", tmp_path / "shards", max_shard_size="1MB")
    put(server, tmp_path / "shards", "m")
    return wanted


def test_shards_are_listed_once_and_read_by_ranges(server: Server, tmp_path: Path) -> None:
    wanted = shards(server, tmp_path)
    folder = Remote("s3://b/m/", endpoint=server.url)
    with open_checkpoint(folder) as found:
        assert (len(found.tensors), found.path) == (12, "s3://b/m/model.safetensors.index.json")
        count = len(found.shards)
        assert len(server.requests) <= count + 1  # and the listing, in pages
    loaded = load(folder)
    assert all(torch.equal(loaded[name], one) for name, one in wanted.items())


def test_a_folder_is_loaded_and_migrated(server: Server, tmp_path: Path) -> None:
    wanted = tensors(5, 3000)
    (tmp_path / "x.pth").write_bytes(zipped(wanted))
    far = Remote("s3://b/d/", endpoint=server.url)
    assert migrate(tmp_path / "x.pth", far, form="dcp").verified
    assert sorted(server.files) == ["/b/d/.metadata", "/b/d/__0_0.distcp"]
    found = load(far)
    assert all(torch.equal(found[name], one) for name, one in wanted.items())
    assert migrate(far, tmp_path / "y.safetensors").verified
    assert load(tmp_path / "y.safetensors").keys() == wanted.keys()


def test_a_file_that_changes_after_the_listing_is_an_error(server: Server, tmp_path: Path) -> None:
    shards(server, tmp_path)
    with closing(remote_folder.open_prefix(Remote("s3://b/m/", endpoint=server.url))) as folder:
        name = folder.files[0]
        server.files[f"/b/m/{name}"] = bytes(len(server.files[f"/b/m/{name}"]))
        with pytest.raises(SourceChanged):
            folder.open(name).read(0, 10)


def test_what_lies_beside_an_adapter_names_its_base(server: Server) -> None:
    stream = {f"base.layer.lora_{side}.weight": torch.ones(shape) for side, shape in (("A", (2, 8)), ("B", (8, 2)))}
    server.files["/b/a/adapter_model.bin"] = zipped(stream)
    server.files["/b/a/adapter_config.json"] = b'{"base_model_name_or_path": "somebody/net", "r": 2}'
    for address in ("s3://b/a/", "s3://b/a/adapter_model.bin"):
        done = invoke(["inspect", address, "--endpoint", server.url])
        assert "for somebody/net" in done.output, done.output


def test_many_files_of_a_folder_share_threads_and_memory(server: Server) -> None:
    for number in range(30):
        server.files[f"/b/m/{number}"] = bytes(3 << 20)
    folder = remote_folder.open_prefix(Remote("s3://b/m/", endpoint=server.url, connections=2))
    opened = [folder.open(str(number)) for number in range(30)]
    for start in range(0, 3 << 20, 1 << 20):
        for one in opened:
            assert one.read(start, 1 << 20) == bytes(1 << 20)
            assert folder._fetchers.held <= (2 * 8 + 8) << 20
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("ckptool-fetch")]
    assert len(names) <= 2
    folder.close()
    assert not any(thread.name.startswith("ckptool-fetch") for thread in threading.enumerate())


def test_what_is_not_there_is_said(server: Server, tmp_path: Path) -> None:
    shards(server, tmp_path)
    with pytest.raises(FileUnavailable, match="no object") as caught:
        open_checkpoint(Remote("s3://b/other/", endpoint=server.url))
    assert caught.value.kind == "missing"
    with pytest.raises(FileUnavailable) as caught:
        open_checkpoint(Remote("s3://b/m", endpoint=server.url))
    assert "slash" in str(caught.value.hint)
    del server.files[f"/b/m/{min(server.files).rpartition('/')[2]}"]
    with pytest.raises(FileUnavailable, match="shards"):
        open_checkpoint(Remote("s3://b/m/", endpoint=server.url))


@pytest.mark.parametrize("name", ["accelerate-fsdp2", "peft-beside-base"])
def test_what_lies_beside_is_opened_in_the_same_way(name: str, server: Server) -> None:
    folder = next((one for one in FOLDERS if one.name == name), None)
    if folder is None:
        pytest.skip("the folder is not there")
    put(server, folder, name)
    found = check(Remote(f"s3://b/{name}/", endpoint=server.url))

    assert found.error is None
    assert "CK169" not in {one.code for one in found.findings}
    with open_checkpoint(Remote(f"s3://b/{name}/", endpoint=server.url)) as checkpoint:
        assert checkpoint.beside
        for one in checkpoint.beside:
            assert str(one.path).rstrip("/") == f"s3://b/{name}/{one.name}"
