"""A file whose tags are forged is the file that a device writes, byte for byte."""

from __future__ import annotations

import pickletools
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.device import build, tags
from tests.device.tags import OfADevice

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(build.lacks() is not None, reason=str(build.lacks())),
    pytest.mark.skipif(not hasattr(torch, "accelerator"), reason="the device is written for torch 2.6 and later"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    build.library("sim")
    forged, real = (tmp_path_factory.mktemp(name) for name in ("forged", "real"))
    command = [sys.executable, "-m", "tests.device.saved", str(forged), str(real)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return real, forged


def opcodes(path: Path) -> list[list[tuple[str, Any]]]:
    """
    Return the opcodes of an old file's five pickles.

    Storages are named by their addresses, here by the order in which they come. The last pickle lists them sorted by
    address, here by that order.
    """
    names: dict[str, str] = {}
    pickles = []
    with path.open("rb") as stream:
        for _ in range(5):
            found: list[tuple[str, Any]] = []
            for opcode, argument, _position in pickletools.genops(stream):
                address = isinstance(argument, str) and len(argument) > 6 and argument.isdecimal()
                found.append((opcode.name, names.setdefault(argument, f"#{len(names)}") if address else argument))
            pickles.append(found)
    return [*pickles[:-1], sorted(pickles[-1], key=repr)]


def test_the_same_files_are_there(folders: tuple[Path, Path]) -> None:
    names = [sorted(path.name for path in folder.iterdir()) for folder in folders]

    assert names[0] == names[1]
    assert len(names[0]) == 16


def test_zip_files_are_equal(folders: tuple[Path, Path]) -> None:
    differ = []
    for real in sorted(folders[0].glob("*-zip.pth")):
        assert zipfile.is_zipfile(real)
        if real.read_bytes() != (folders[1] / real.name).read_bytes():
            differ.append(real.name)

    assert differ == []


def test_old_files_are_equal_but_for_addresses(folders: tuple[Path, Path]) -> None:
    differ = []
    for real in sorted(folders[0].glob("*-legacy.pth")):
        forged = folders[1] / real.name
        if opcodes(real) != opcodes(forged) or real.stat().st_size != forged.stat().st_size:
            differ.append(real.name)

    assert differ == []


def told(files: OfADevice, path: Path) -> tuple[str, list[dict[str, Any]]]:
    """
    Return what was noted of a file when it was written, but for values and the tag.

    An optimizer has as many parameters as the device makes of tied ones; there, as on others that torch does not have
    itself, ``Module.to`` makes two of them.
    """
    said = files.said(path)
    rows = [{key: value for key, value in row.items() if key != "sha256"} for row in said["tensors"]]
    kept = [row for row in rows if not row["name"].startswith("optimizer.")]
    assert kept
    return said["form"], [row | {"device": row["device"].replace(files.tag, "there")} for row in kept]


def test_what_the_trainer_saved_there_is_what_the_fixtures_claim_but_for_the_tag() -> None:
    there, claimed = tags.real(), tags.FORGED
    pairs = list(zip(there.files(), claimed.files(), strict=True))

    assert len(pairs) == 12
    for ours, theirs in pairs:
        assert ours.name.replace(there.place, "") == theirs.name.replace(claimed.place, "")
        assert told(there, ours) == told(claimed, theirs)
