from __future__ import annotations

import json
import os
import re
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors import safe_open

from ckptool.errors import CkptoolError, FileUnavailable
from ckptool.reference.trainer import process_group, write_fixtures
from tests.fixture_set import writing
from tests.fixture_set.expected import digest, entries
from tests.fixture_set.forging import true_tag
from tests.reference.test_places import FOLDER, contents
from tests.scale import exhaustive, some

if TYPE_CHECKING:
    from collections.abc import Iterator

CPU = torch.device("cpu")
COMMITTED = Path(__file__).parents[2] / "fixtures"


@pytest.fixture(params=some(["committed", "written"], 2))
def valid(request: pytest.FixtureRequest) -> Path:
    """Return the set in the repository, and in a full run the one that was just written."""
    return (request.getfixturevalue("written_set") if request.param == "written" else COMMITTED) / "valid"


def rows(folder: Path, *formats: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in sorted(folder.glob("*.json")):
        row = json.loads(path.read_text(encoding="utf-8"))
        if not formats or row["format"] in formats:
            yield folder / row["file"], row


def loaded(path: Path) -> list[dict[str, Any]]:
    """Let torch load a file that torch wrote, and describe every tensor with the tag that torch found."""
    tags: dict[int, str] = {}

    def remember(storage: Any, tag: str) -> Any:
        tags[storage.data_ptr()] = tag
        return storage

    def tag_of(storage: Any) -> str:
        # A tensor on meta is rebuilt without asking where its storage goes, and an empty one has no address.
        return "meta" if storage.device.type == "meta" else tags.get(storage.data_ptr(), "cpu")

    content = torch.load(path, map_location=remember, weights_only=False)
    return json.loads(json.dumps(entries(content, tag_of)))


def test_torch_finds_in_every_file_what_its_json_says(valid):
    differ: list[str] = []
    # torch warns of quantised, sparse and typed storages when it meets them.
    with warnings.catch_warnings(), process_group(CPU):
        warnings.simplefilter("ignore")
        for path, row in rows(valid, "torch_zip", "torch_legacy"):
            if not row["torch_loads"] or path.name.startswith("device-rebuilt"):
                continue
            found = loaded(path)
            if row["device"] == "meta":
                found = [entry | {"sha256": None} for entry in found]
            if found != row["tensors"]:
                differ.append(path.name)

    assert differ == []


def test_torch_cannot_read_its_own_old_files_of_new_types(valid):
    refused = [path.name for path, row in rows(valid) if not row["torch_loads"]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in refused:
            with pytest.raises((AttributeError, NotImplementedError)):
                torch.load(valid / name, map_location="cpu", weights_only=False)

    assert sorted(refused) == [
        "device-rebuilt-forged-xla0-legacy.pth",
        "every-dtype-cpu-legacy.pth",
        "one-storage-two-dtypes-cpu-legacy.pth",
        "state-dict-float8-e4m3fn-cpu-legacy.pth",
        "state-dict-float8-e5m2-cpu-legacy.pth",
    ]


def test_safetensors_finds_the_same_tensors_in_the_same_order(valid):
    for path, row in rows(valid, "safetensors"):
        with safe_open(path, "pt") as found:
            assert [entry["name"] for entry in row["tensors"]] == found.offset_keys()
            assert [entry["sha256"] for entry in row["tensors"]] == [
                digest(found.get_tensor(entry["name"])) for entry in row["tensors"]
            ]


def test_the_tied_name_is_recorded_where_safetensors_dropped_it(valid):
    with safe_open(valid / "safetensors-tied-cpu.safetensors", "pt") as found:
        assert found.metadata() == {"format": "pt", "head.weight": "embedding.weight"}


def test_torchscript_and_export_give_the_same_tensors_back(valid):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for path, row in rows(valid, "torchscript"):
            assert entries(torch.jit.load(str(path)), true_tag) == row["tensors"]
        for path, row in rows(valid, "pt2"):
            assert entries(torch.export.load(path).state_dict, true_tag) == row["tensors"]


def test_every_file_has_one_line_in_the_readme(valid):
    lines = (valid.parent / "README.md").read_text(encoding="utf-8").splitlines()
    listed = Counter(line.split("`")[1] for line in lines if line.startswith("| `"))

    assert listed == Counter(path.name for path, _ in rows(valid))
    assert {path.name for path in valid.iterdir() if path.suffix != ".json"} == set(listed)


def test_the_set_is_small(valid):
    sizes = [path.stat().st_size for path in valid.iterdir()]

    assert max(sizes) <= 200_000
    assert sum(sizes) <= 6_000_000


@exhaustive
def test_the_committed_set_is_the_one_that_the_command_writes(written_set):
    # Digests depend on how a machine adds; names, shapes, dtypes and devices do not.
    def outline(folder: Path) -> dict[str, Any]:
        return {
            path.name: [row["form"], row["format"], *(entry["name"] for entry in row["tensors"])]
            for path, row in rows(folder)
        }

    committed, written = outline(COMMITTED / "valid"), outline(written_set / "valid")

    assert {name: committed.get(name) for name in written} == written


@exhaustive
def test_two_runs_write_the_same_tensors(written_set, tmp_path):
    writing.write_fixtures(tmp_path, CPU)

    for path in (written_set / "valid").glob("*.json"):
        assert (tmp_path / "valid" / path.name).read_text() == path.read_text()


def test_training_without_scikit_learn_is_refused_with_the_line_that_installs_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)

    with pytest.raises(CkptoolError) as caught:
        write_fixtures(tmp_path, CPU)
    assert caught.value.command == 'pip install "ckptool[train]"'


def test_a_folder_that_is_a_file_is_refused_with_a_hint(tmp_path):
    (tmp_path / "taken").write_text("")

    with pytest.raises(FileUnavailable) as caught:
        write_fixtures(tmp_path / "taken", CPU)
    assert caught.value.hint


@exhaustive
def test_what_is_written_here_names_no_folder_of_this_machine(written_set: Path) -> None:
    given = [*map(Path, sys.path), Path.cwd(), Path.home()]
    folders = {str(form) for folder in given for form in (folder.absolute(), folder.resolve())} - {"/"}
    own = re.compile(b"|".join(re.escape(os.fsencode(folder)) for folder in folders))
    found = {
        path.name: places
        for path in sorted((written_set / "valid").iterdir())
        for content in contents(path)
        if (places := {*own.findall(content), *FOLDER.findall(content)})
    }

    assert found == {}
