"""Files are the same far away as on the disk: fixtures, indexes with shards, members, files of strangers."""

from __future__ import annotations

import io
import json
import queue
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save as save_safetensors

from ckptool import FileUnavailable, LiveModel, MalformedFile, load, load_into, migrate, open_checkpoint
from ckptool.archives.zips import find_directory, placed, read_entries, read_zip
from ckptool.errors import CkptoolError
from ckptool.sources.remote import opening
from ckptool.sources.source import BytesSource
from tests import scale
from tests.program import invoke
from tests.remote.servers import serving
from tests.remote.test_requests import tensors, zipped

FIXTURES = Path(__file__).parents[2] / "fixtures"
CORPUS = Path(__file__).parents[3] / "shared" / "corpus"
FILES = sorted(path for path in FIXTURES.rglob("*") if path.is_file() and path.stat().st_size < 1 << 20)


@pytest.fixture
def ranged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files are read as large ones are."""
    monkeypatch.setattr(opening, "_WHOLE_NBYTES", 0)
    monkeypatch.setattr(opening, "TAIL_NBYTES", 4096)


def looked_into(path: str, *options: str) -> dict[str, Any]:
    """Return what inspect prints, but for its place and for what was left unread."""
    done = invoke(["inspect", "--json", path, *options])
    found = json.loads(done.output)
    for part in (found, found.get("error") or {}):
        part.pop("path", None)
        part.pop("hint", None)
        part.pop("command", None)
    found["findings"] = [
        {key: value for key, value in one.items() if key not in ("command", "hint")}
        for one in found.get("findings", ())
        if one["code"] not in ("CK170", "CK160", "CK161", "CK162", "CK163")  # the last four: what lies beside it
    ]
    return found


def compare(paths: list[Path]) -> None:
    files = {f"/{at}/{path.name}": path.read_bytes() for at, path in enumerate(paths)}
    with serving(files) as server:
        for (place, _), path in zip(files.items(), paths, strict=True):
            here, far = looked_into(str(path)), looked_into(f"{server.url}{place}")
            assert far == here, path


def test_fixtures_are_the_same_as_a_whole() -> None:
    compare([path for path in FILES if "folders" not in path.parts][:: 1 if scale.scale else 5])


@pytest.mark.usefixtures("ranged")
def test_fixtures_are_the_same_by_ranges() -> None:
    compare([path for path in FILES if "folders" not in path.parts][:: 1 if scale.scale else 8])


@pytest.mark.corpus
@pytest.mark.usefixtures("ranged")
@pytest.mark.skipif(not CORPUS.is_dir(), reason="there is no folder of strangers' files")
def test_files_of_strangers_are_the_same_by_ranges() -> None:
    # An index has shards beside it.
    found = (path for path in CORPUS.rglob("*") if path.is_file() and path.suffix != ".json")
    paths = sorted(path for path in found if path.stat().st_size < 1 << 20)
    compare(paths[:: 1 if scale.scale else 40])


def zips() -> list[Path]:
    paths = [path for folder in (FIXTURES, CORPUS) if folder.is_dir() for path in folder.rglob("*") if path.is_file()]
    return [path for path in sorted(paths) if path.stat().st_size < 4 << 20 and path.read_bytes()[:4] == b"PK\3\4"]


def test_places_found_without_local_headers_are_those_that_these_say() -> None:
    found = 0
    for path in zips()[:: 1 if scale.scale else 5]:
        data = BytesSource(path.read_bytes())
        try:
            records = {record.offset for record in read_zip(data).values()}
        except CkptoolError:
            continue
        directory = find_directory(data)
        entries = sorted(read_entries(data, directory), key=lambda entry: entry.header)
        for entry, place in zip(entries, placed(entries, directory.offset)[0], strict=True):
            if place is not None and not entry.name.endswith(b"/"):
                assert place[0] in records, (path, entry.name)
                found += 1
    assert found > 20


@pytest.mark.usefixtures("ranged")
def test_an_index_is_read_with_the_shards_beside_it() -> None:
    wanted = tensors(6, 64)
    names = list(wanted)
    shards = {"a.safetensors": names[:3], "b.safetensors": names[3:]}
    index = {"weight_map": {name: shard for shard, inside in shards.items() for name in inside}}
    files = {
        f"/m/{shard}": save_safetensors({name: wanted[name] for name in inside}) for shard, inside in shards.items()
    }
    with serving({**files, "/m/model.safetensors.index.json": json.dumps(index).encode()}) as server:
        address = f"{server.url}/m/model.safetensors.index.json?sig=1"
        found = load(address)
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
        del server.files["/m/b.safetensors"]
        with pytest.raises(FileUnavailable, match="1 of 2 shards"):
            open_checkpoint(address)
        server.files["/m/model.safetensors.index.json"] = json.dumps({"weight_map": {"x": "../../x"}}).encode()
        with pytest.raises(MalformedFile, match="cannot be the name"):
            open_checkpoint(address)


@pytest.mark.usefixtures("ranged")
def test_a_member_is_picked_and_migrated(tmp_path: Path) -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("policy.pth", zipped(tensors(3, 40)))
        archive.writestr("optimizer.pth", zipped(tensors(2, 9)), zipfile.ZIP_DEFLATED)
    with serving({"/x.zip": stream.getvalue()}) as server:
        with open_checkpoint(f"{server.url}/x.zip?sig=1::optimizer.pth") as found:
            assert (found.member, len(found.tensors)) == ("optimizer.pth", 2)
        assert migrate(f"{server.url}/x.zip::policy.pth", tmp_path / "y.pth").verified
    assert len(load(tmp_path / "y.pth")) == 3


def test_an_address_is_watched_by_its_version() -> None:
    first, second = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    with serving({"/x.pth": zipped(dict(first.state_dict()))}) as server:
        served = LiveModel(torch.nn.Linear(3, 2))
        served.reload(f"{server.url}/x.pth?sig=1")
        assert torch.equal(served.model.weight, first.weight)
        told = queue.Queue[Any]()
        served.watch(every=0.02, on_reload=told.put)
        try:
            server.files["/x.pth"] = zipped(dict(second.state_dict()))
            assert not isinstance(told.get(timeout=60), CkptoolError)
        finally:
            served.unwatch()
        assert torch.equal(served.model.weight, second.weight)


@pytest.mark.usefixtures("ranged")
def test_a_model_is_filled_from_far_away() -> None:
    model, other = torch.nn.Linear(30, 20), torch.nn.Linear(30, 20)
    with serving({"/x.pth": zipped(dict(model.state_dict()))}) as server:
        load_into(other, f"{server.url}/x.pth")
    assert torch.equal(model.weight, other.weight)
