"""
Real folders: they hold what their own loaders give, and if one thing is wrong, that is said.

A file is gone, cut short, of another run, or has another bit; or there is a stranger.

Nothing wrong is called fine, nothing honest damaged, and nothing ends in a traceback. What no file tells is left out:
a flipped bit where there are no checksums, and a file of another run that has the same names and shapes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import ckptool
from ckptool import CheckReport, CkptoolError, open_checkpoint
from tests.formats.said import wrong
from tests.scale import step

CORPUS = Path(__file__).parents[3] / "shared" / "corpus-dirs"
FIXTURES = Path(__file__).parents[2] / "fixtures" / "folders"

Held = dict[str, tuple[tuple[int, ...], str, str]]

_UNPROTECTED = (".safetensors", ".json", ".metadata", "latest", ".txt", "main")
"""How names end of files in which a changed bit does not show: they have no checksums."""


class Mutation(NamedTuple):
    """What is changed, and how."""

    kind: str
    place: Path
    change: Callable[[Path], object]


def folders() -> list[Path]:
    """Return the folders that are whole, a group of a few in each."""
    found = sorted(one for one in CORPUS.glob("*") if one.is_dir() and not one.name.startswith("broken"))
    return [*found, FIXTURES / "dcp"]


def rows() -> list[dict[str, Any]]:
    """Return what the loaders of those who wrote the folders found there."""
    manifest = CORPUS / "manifest.jsonl"
    lines = manifest.read_text().splitlines() if manifest.exists() else []
    return [row for row in map(json.loads, lines) if not row["dir"].startswith("broken")]


@pytest.mark.skipif(not CORPUS.is_dir(), reason=f"{CORPUS} is not there")
@pytest.mark.parametrize("row", rows(), ids=lambda row: row["dir"])
def test_they_hold_what_their_own_loaders_give(row: dict[str, Any]) -> None:
    name, wanted = row["dir"], row["tensors"]
    if name == "dcp-zstd":
        pytest.importorskip("zstandard", reason="zstandard is not installed")
    if name == "peft-beside-base":  # the weights are the base's
        wanted = {key.removeprefix("base."): one for key, one in wanted.items() if key.startswith("base.")}
    with open_checkpoint(CORPUS / name) as checkpoint:
        held = checkpoint.weights if name.startswith("deepspeed") else checkpoint.tensors
        for key, said in wanted.items():
            if key == "lm_head.weight" and key not in (held or ()):  # tied, and left out by save_pretrained
                continue
            found = (held or {})[key]
            assert (list(found.shape), found.dtype) == (said["shape"], said["dtype"])
            assert sha256(found.read()).hexdigest() == said["sha256"], key
        if name.startswith(("rank-files", "megatron-mp")):
            assert (checkpoint.unmerged is None) == bool(wanted)
    if wanted and name.startswith(("dcp-", "lightning", "megatron-torch-dist")):
        assert not wrong(ckptool.check(CORPUS / name, deep=True))


def _in_file(file: Path, place: Path, others: dict[str, list[bytes]]) -> Iterator[Mutation]:
    size = file.stat().st_size
    yield Mutation("delete", place, Path.unlink)
    for cut in sorted({0, size // 2, size - 1} - {size, -1}):
        yield Mutation("truncate", place, lambda path, cut=cut: os.truncate(path, cut))
    for number in range(1, 6):
        at = size * number // 6
        if size:
            yield Mutation("flip", place, lambda path, at=at: _flip(path, at))
    for data in others[file.name]:
        if data != file.read_bytes():
            yield Mutation("swap", place, lambda path, data=data: path.write_bytes(data))


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << (at % 8)
    path.write_bytes(data)


def _strangers(place: Path) -> Iterator[Mutation]:
    texts = {
        "notes.txt": b"hello",
        "odd.json": b'{"a": [1',
        "odd.pt": b"none",
        "latest": b"see notes",
        ".metadata": b"x",
    }
    for name, data in texts.items():
        yield Mutation("stranger", place / name, lambda path, data=data: path.exists() or path.write_bytes(data))
    yield Mutation("stranger", place / "plots", Path.mkdir)
    for name in ("link", "link.pt", "a.safetensors"):
        yield Mutation("stranger", place / name, lambda path: path.symlink_to("/nowhere"))


def mutations(folder: Path, others: dict[str, list[bytes]]) -> Iterator[Mutation]:
    inside = sorted(folder.rglob("*"))
    for one in inside:
        if one.is_file() and not one.is_symlink():
            yield from _in_file(one, one.relative_to(folder), others)
    for one in (folder, *(one for one in inside if one.is_dir())):
        yield from _strangers(one.relative_to(folder))


def held(folder: Path) -> Held:
    """Return what can be read of a folder: shapes, types and digests, by name."""
    found: Held = {}
    with open_checkpoint(folder) as checkpoint:
        for name, tensor in checkpoint.tensors.items():
            try:
                digest = sha256(tensor.read()).hexdigest()
            except CkptoolError:
                digest = "cannot be read"
            found[name] = tuple(tensor.shape), str(tensor.dtype), digest
        found.update({f"::{one.name}": ((), "", "") for one in checkpoint.members if not checkpoint.tensors})
    return found


def wrongs(report: CheckReport) -> Counter[str]:
    return Counter(one.code for one in report.findings if one.severity != "info" or one.code == "CK145")


def _is_told(report: CheckReport, before: CheckReport) -> bool:
    if report.error is not None or wrongs(report) != wrongs(before):
        return True
    # Where nothing says how many there were, the finding that says so says what is missing, too.
    said, known = ([one.message for one in each.findings if one.code == "CK145"] for each in (report, before))
    return said != known


def _shapes(found: Held) -> dict[str, tuple[object, ...]]:
    return {name: one[:2] for name, one in found.items()}


def _wrong(mutation: Mutation, copy: Path, known: Held, before: CheckReport) -> str | None:
    """Return what is wrong with what is said of a folder in which something is."""
    report = ckptool.check(copy, deep=True)
    if mutation.kind == "stranger":
        return (
            None if report.error is None and wrongs(report) == wrongs(before) and held(copy) == known else str(report)
        )
    told = _is_told(report, before)
    if report.error is not None:
        return None
    found = held(copy)
    if mutation.kind == "swap" or (mutation.kind == "flip" and mutation.place.name.endswith(_UNPROTECTED)):
        is_whole = mutation.place.suffix == ".safetensors" and "-of-" not in mutation.place.name
        same = mutation.kind == "flip" or is_whole or _shapes(found) == _shapes(known)
    elif mutation.place.name in ("model_index.json", "latest", "model.safetensors") or "blobs" in mutation.place.parts:
        same = True  # what it joined is listed; without the base, the adapter is what there is
    else:
        same = found == known
    return None if told or same else f"nothing is said: {report}"


@pytest.mark.skipif(not CORPUS.is_dir(), reason=f"{CORPUS} is not there")
def test_what_is_wrong_with_a_folder_is_said_and_nothing_else(tmp_path: Path) -> None:
    others: dict[str, list[bytes]] = defaultdict(list)
    for file in sorted(CORPUS.rglob("*")):
        if file.is_file() and file.read_bytes() not in others[file.name]:
            others[file.name].append(file.read_bytes())
    number = 0
    faults: list[str] = []
    for folder in folders():
        known, before = held(folder), ckptool.check(folder, deep=True)
        for mutation in mutations(folder, others):
            number += 1
            if number % step(97):
                continue
            copy = tmp_path / "copy"
            shutil.copytree(folder, copy, symlinks=True, copy_function=shutil.copyfile)
            for one in (copy, *copy.rglob("*")):
                if one.is_dir():
                    one.chmod(0o755)
            mutation.change(copy / mutation.place)
            found = _wrong(mutation, copy, known, before)
            if found is not None:
                faults.append(f"{folder.name}: {mutation.kind} {mutation.place}: {found}")
            shutil.rmtree(copy)
    assert not faults, "\n\n".join(faults[:8])
    assert number > 1000
