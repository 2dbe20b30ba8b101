"""One file has one verdict, from ``check`` of it and of its folder, from ``scan``, in JSON and on the page."""

from __future__ import annotations

import gzip
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptool import CheckReport, check
from ckptool.fleet import row
from tests.build import (
    call,
    floats,
    legacy,
    named,
    pickled,
    raw,
    safetensors,
    storage,
    tar_file,
    tensor,
    torch_zip,
    zip_file,
)
from tests.each import each
from tests.hostile.cases.canaries import CANARIES
from tests.program import invoke
from tests.scale import step

FIXTURES = Path(__file__).parents[2] / "fixtures"
SHELL = call(named("os", "system"), "true")
EVIL = pickled(SHELL)
WEIGHTS = torch_zip({"w": tensor(storage())}, {"0": floats()})
PLACES = {
    "beside tensors": lambda value: torch_zip({"w": tensor(storage()), "x": value}, {"0": floats()}),
    "a plain pickle": lambda value: pickled({"x": value}),
    "a legacy stream": lambda value: legacy({"w": tensor(storage(rest=(None,))), "x": value}, [("0", 4, floats())]),
    "bytes of a pickle": lambda value: torch_zip({"w": tensor(storage()), "x": raw(pickled(value))}, {"0": floats()}),
    "a member of a zip": lambda value: zip_file({"a.pth": WEIGHTS, "b": pickled(value)}),
    "a member of a tar": lambda value: tar_file({"a.pth": WEIGHTS, "b.pkl": pickled(value)}),
}
HELD = {
    "behind safetensors": safetensors({"w": floats()}) + zip_file({"x": EVIL}),
    "behind a pickle": pickled({"w": call(named("collections", "OrderedDict"))}) + EVIL,
    "behind a legacy stream": legacy({"w": tensor(storage(rest=(None,)))}, [("0", 4, floats())]) + EVIL,
    "a member that no format knows": WEIGHTS[:0]
    + zip_file({"m/data.pkl": pickled({"a": 1}), "m/version": b"3\n", "m/x": EVIL}),
    "a member of a usual name": zip_file({"m/data.pkl": pickled({"a": 1}), "m/version": EVIL}),
    "what is loaded as bytes": pickled(call(named("torch.storage", "_load_from_bytes"), raw(legacy(SHELL)))),
}


def known(report: CheckReport) -> str:
    """Return the grade, or that it is not known."""
    return report.known_grade


def worst(severity: object) -> object:
    """Return the severest finding; ``info`` says that nothing is wrong."""
    return None if severity == "info" else severity


def agrees(path: Path) -> CheckReport:
    report = check(path)
    rare = [one.severity for one in report.findings if one.code == "CK202" and "pickle opcode" in one.message]
    for asked in (False, True):
        found = row(path, check=asked)
        assert found["grade"] == known(report), asked
        # Which rare opcodes are there is known after a walk, and nothing but torch.load() refuses them.
        assert worst(found["worst"]) in (worst(report.worst), *([] if asked or not rare else [None]))
        assert set(found["findings"]) <= {one.code for one in report.findings}  # type: ignore[call-overload]
    return report


@each("path", sorted(path for path in FIXTURES.rglob("*") if path.suffix != ".json" and path.is_file())[:: step(3)])
def test_scan_says_of_fixtures_what_check_says(path: Path) -> None:
    agrees(path)


@pytest.mark.parametrize("place", PLACES)
def test_scan_says_of_hostile_files_what_check_says(place: str, tmp_path: Path) -> None:
    for number, value in list(enumerate(CANARIES.values()))[list(PLACES).index(place) :: len(PLACES)]:
        path = tmp_path / f"{number}.pkl"
        path.write_bytes(PLACES[place](value))
        agrees(path)


@pytest.mark.parametrize("name", HELD)
def test_scan_finds_what_is_held_elsewhere(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.pth"
    path.write_bytes(HELD[name])
    assert agrees(path).grade == "system"


@pytest.mark.parametrize("name", [*HELD, "a fixture"])
def test_the_folder_json_and_the_page_say_the_same(name: str, tmp_path: Path) -> None:
    place = tmp_path / "x"
    place.mkdir()
    path = place / "x.pth"
    if name in HELD:
        path.write_bytes(HELD[name])
    else:
        shutil.copy(FIXTURES / "valid" / "checkpoint-ddp-forged-cuda0-zip.pth", path)
    report, around = agrees(path), agrees(place)
    assert (known(around), around.worst) == (known(report), report.worst)
    said = json.loads(invoke(["check", "--json", str(path)]).stdout)
    assert (said["grade"], said["worst"]) == (report.grade, report.worst)
    assert [one["code"] for one in said["findings"]] == [one.code for one in report.findings]
    if report.error is None:
        page = tmp_path / "page.html"
        assert invoke(["report", str(path), "-o", str(page)]).exit_code == 0
        severe = {one.code for one in report.findings if one.severity != "info"}
        assert all(code in page.read_text(encoding="utf-8") for code in severe)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_bytes_of_tensors_that_look_like_a_pickle_are_none(tmp_path: Path) -> None:
    numbers = torch.ones(64)
    # BINSTRING of 207 bytes, BINPERSID: opcodes as three in two hundred tensors of weights have them.
    numbers.view(torch.uint8)[:4] = torch.tensor([0x55, 0xCF, 0x7E, 0x3F], dtype=torch.uint8)
    numbers.view(torch.uint8)[209] = 0x51
    saved = {}
    for name, value in {"weight": numbers, "storage": numbers.untyped_storage()}.items():
        stream = io.BytesIO()
        torch.save({"norm": value}, stream)
        saved[f"{name}.pth"] = stream.getvalue()
    packed = {"weights.zip": zip_file(saved), "weights.pth.gz": gzip.compress(saved["weight.pth"], mtime=0)}
    dcp.save({"norm": numbers}, checkpoint_id=tmp_path / "x" / "step")
    np.save(tmp_path / "x" / "step" / "a.npy", numbers.numpy())
    for name, data in {"model.pth": WEIGHTS, **saved, **packed}.items():
        (tmp_path / "x" / name).write_bytes(data)

    for path in (tmp_path / "x", *(tmp_path / "x").iterdir()):
        report = agrees(path)
        assert (known(report), worst(report.worst)) == ("data", None), path
    # What no tree names as a storage, or names with another size, may be anything.
    for number, size in enumerate((4, 8)):
        place = tmp_path / str(number)
        place.mkdir()
        (place / "model.pth").write_bytes(WEIGHTS)
        tree = pickled({"w": tensor(storage(numel=size))})
        (place / "x.zip").write_bytes(zip_file({"m/data.pkl": tree, "m/data/1": EVIL, "m/data/0": EVIL}))
        assert agrees(place).grade == "system"
