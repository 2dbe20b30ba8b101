"""What is peculiar to an index of shards: several files that are one checkpoint, and what may be opened beside one."""

from __future__ import annotations

import io
import json
import os
import pickle
import threading
import time
import tracemalloc
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import ckptool
from ckptool import (
    AmbiguousFile,
    CkptoolError,
    DamagedFile,
    FileUnavailable,
    LimitExceeded,
    Limits,
    MalformedFile,
    NotACheckpoint,
    SourceChanged,
    TruncatedFile,
    UnsupportedFeature,
    open_checkpoint,
)
from tests import build
from tests.each import each
from tests.formats.said import descriptors, refused
from tests.loading.same import assert_same_tensor
from tests.missing import only_linux
from tests.program import invoke
from tests.scale import in_turn

Tensors = dict[str, torch.Tensor]
FIRST, SECOND, THIRD = "model-00001-of-00003.bin", "model-00002-of-00003.bin", "model-00003-of-00003.bin"


def shards_of_tensors() -> dict[str, Tensors]:
    torch.manual_seed(3)
    wide = torch.randn(8, 6)
    return {
        FIRST: {"c.weight": torch.randn(5, 3), "a.weight": wide, "a.tied": wide},
        SECOND: {"b.weight": torch.randn(4).to(torch.bfloat16), "b.count": torch.tensor(7)},
        THIRD: {"d.turned": wide.t()[1:], "d.empty": torch.empty(0, 3), "d.mask": torch.tensor([True, False])},
    }


def save_pickle(tensors: Tensors, path: Path) -> None:
    path.write_bytes(pickle.dumps(tensors))


def save_safetensors(tensors: Tensors, path: Path) -> None:
    apart = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(apart, path, metadata={"format": "pt"})


def save_legacy(tensors: Tensors, path: Path) -> None:
    torch.save(tensors, path, _use_new_zipfile_serialization=False)


def load_safetensors(path: Path) -> Tensors:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is not a mapping


def load_torch(path: Path) -> Tensors:
    loaded: Tensors = torch.load(path, weights_only=True)
    return loaded


WRITERS: dict[str, tuple[Callable[[Tensors, Path], None], Callable[[Path], Tensors]]] = {
    "safetensors": (save_safetensors, load_safetensors),
    "torch_zip": (lambda tensors, path: torch.save(tensors, path), load_torch),
    "torch_legacy": (save_legacy, load_torch),
    "pickle": (save_pickle, lambda path: pickle.loads(path.read_bytes())),
}
every_kind = pytest.mark.parametrize("kind", WRITERS)


def write(folder: Path, kind: str = "safetensors", **metadata: object) -> Path:
    """Write shards, and the index of them, whose order is neither theirs nor the alphabet's."""
    for file, tensors in shards_of_tensors().items():
        WRITERS[kind][0](tensors, folder / file)
    shard_of = {name: file for file, tensors in shards_of_tensors().items() for name in tensors}
    names = sorted(shard_of, key=lambda name: name[::-1])
    return write_index(folder, {name: shard_of[name] for name in names}, **metadata)


def write_index(folder: Path, shard_of: Mapping[str, str], **metadata: object) -> Path:
    path = folder / "model.index.json"
    path.write_bytes(build.index_of_shards(shard_of, **metadata))
    return path


def merged(folder: Path, kind: str) -> Tensors:
    """Return what the stock readers find in all shards."""
    return {name: one for file in shards_of_tensors() for name, one in WRITERS[kind][1](folder / file).items()}


def assert_same(found: Mapping[str, torch.Tensor], expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same_tensor(found[name], tensor, name)


def small(folder: Path, shard_of: Mapping[str, str] | None = None, **shards: dict[str, bytes]) -> Path:
    """Write ``a`` and ``b`` with a tensor of that name each, or other shards, and an index."""
    for file, tensors in (shards or {"a": {"a": build.floats()}, "b": {"b": build.floats()}}).items():
        (folder / file).write_bytes(build.safetensors(tensors))
    return write_index(folder, shard_of or {"a": "a", "b": "b"})


# One checkpoint


@pytest.mark.parametrize(("kind", "mmap"), in_turn(WRITERS, [True, False]))
def test_it_loads_what_its_shards_hold_together(kind: str, mmap: bool, tmp_path: Path) -> None:
    path = write(tmp_path, kind)
    expected = merged(tmp_path, kind)

    found = ckptool.load(path, mmap=mmap)

    assert list(found) == list(json.loads(path.read_bytes())["weight_map"])
    assert_same(found, expected)


@every_kind
def test_what_is_tied_in_a_shard_stays_tied(kind: str, tmp_path: Path) -> None:
    with open_checkpoint(write(tmp_path, kind)) as checkpoint:
        tied = checkpoint.tensors["a.tied"].info.storage == checkpoint.tensors["a.weight"].info.storage
        apart = {id(tensor.info.storage.source) for tensor in checkpoint.tensors.values() if tensor.info.storage}

    assert tied == (kind != "safetensors")
    assert len(apart) >= 3


@pytest.mark.parametrize(("kind", "target"), in_turn(WRITERS, ["whole.safetensors", "whole.pth"]))
def test_migrating_merges_the_shards(kind: str, target: str, tmp_path: Path) -> None:
    path = write(tmp_path, kind)
    expected = merged(tmp_path, kind)

    report = ckptool.migrate(path, tmp_path / target, expand_tied=target.endswith("s"))

    read = load_safetensors if target.endswith("s") else load_torch
    if target.endswith("s"):  # which knows rows alone
        expected = {name: tensor.contiguous() for name, tensor in expected.items()}
    assert_same(read(tmp_path / target), expected)
    assert report.verified
    assert report.tensors == len(expected)
    assert list(ckptool.load(tmp_path / target)) == list(json.loads(path.read_bytes())["weight_map"])


@pytest.mark.parametrize(
    ("kind", "name", "form"),
    [
        ("safetensors", "model.migrated.safetensors", "safetensors"),
        ("torch_zip", "pytorch_model.state_dict.bin", "state_dict"),
    ],
)
def test_form_same_writes_one_file_of_the_shards_format(kind: str, name: str, form: str, tmp_path: Path) -> None:
    index = write(tmp_path, kind).rename(tmp_path / f"{name.partition('.')[0]}.{name.rpartition('.')[2]}.index.json")

    report = ckptool.migrate(index, form="same")

    assert report.form == form
    assert Path(report.target) == tmp_path / name
    assert_same(ckptool.load(tmp_path / name), merged(tmp_path, kind))
    if kind == "safetensors":
        assert_same(ckptool.load(tmp_path), merged(tmp_path, kind))  # the folder is what it was


def test_merging_takes_no_more_memory_than_pieces_do(tmp_path: Path) -> None:
    shards = {file: {file: os.urandom(24 << 20)} for file in ("a", "b")}
    path = small(tmp_path, {"a": "a", "b": "b"}, **shards)
    ckptool.migrate(path, tmp_path / "warm.safetensors")
    tracemalloc.start()
    try:
        ckptool.migrate(path, tmp_path / "out.safetensors")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert load_safetensors(tmp_path / "out.safetensors")["b"].numpy().tobytes() == shards["b"]["b"]
    assert peak < 8 << 20


def test_a_model_is_filled_from_shards(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 2)
    save_file({"weight": torch.ones(2, 4)}, tmp_path / "a")
    save_file({"bias": torch.full((2,), 3.0)}, tmp_path / "b")
    path = write_index(tmp_path, {"weight": "a", "bias": "b"})

    ckptool.load_into(model, path)
    assert model(torch.ones(4)).tolist() == [7.0, 7.0]

    live = ckptool.LiveModel(torch.nn.Linear(4, 2), path)
    assert live(torch.ones(4)).tolist() == [7.0, 7.0]
    assert ckptool.predict_memory(path, mmap=False).host_nbytes == 40


def test_a_whole_model_is_none(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFeature):
        ckptool.load_model(write(tmp_path), trust=True)


def bytes_read() -> int:
    """Return how many bytes this process has read so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


@only_linux("/proc")
def test_opening_reads_no_tensor_and_deep_reads_all(tmp_path: Path) -> None:
    path = small(tmp_path, **{name: {name: bytes(1 << 20)} for name in ("a", "b")})
    read = [bytes_read()]
    for call in (
        lambda: open_checkpoint(path).close(),
        lambda: ckptool.check(path),
        lambda: ckptool.check(path, deep=True),
    ):
        call()
        read.append(bytes_read())
    opening, quick, deep = (after - before for before, after in pairwise(read))

    assert opening < 40_000
    assert quick < 400_000  # a zip may end where a shard does
    assert deep > 2 << 20


# What is said of it


def test_it_says_of_how_many_files_it_is_and_where_each_tensor_stands(tmp_path: Path) -> None:
    path = write(tmp_path)
    nbytes = sum(file.stat().st_size for file in tmp_path.iterdir())

    with open_checkpoint(path) as checkpoint:
        assert (checkpoint.format, checkpoint.form, checkpoint.file_nbytes) == ("safetensors", "state_dict", nbytes)
        assert {shard.name: shard.tensors for shard in checkpoint.shards} == {THIRD: 3, FIRST: 3, SECOND: 2}
        assert checkpoint.shard_of["b.count"] == SECOND
        assert checkpoint.metadata == {"format": "pt"}
    shown = invoke(["inspect", str(path)]).output
    found = json.loads(invoke(["inspect", "--json", str(path)]).output)

    assert "format       safetensors in 3 shards, " in shown
    assert f"{SECOND}: 2 tensors, " in shown
    assert found["file_nbytes"] == nbytes
    assert {one["name"]: one["shard"] for one in found["tensors"]} == json.loads(path.read_bytes())["weight_map"]
    assert sorted(one["name"] for one in found["shards"]) == [FIRST, SECOND, THIRD]
    assert sum(one["nbytes"] for one in found["shards"]) + path.stat().st_size == nbytes


def test_all_shards_are_listed_in_a_pipe(tmp_path: Path) -> None:
    names = [f"s{number:02}" for number in range(20)]
    path = small(tmp_path, {name: name for name in names}, **{name: {name: build.floats()} for name in names})
    shown = invoke(["inspect", "-q", str(path)]).output

    assert all(f"{name}: " in shown for name in names)


@every_kind
def test_check_reads_every_shard(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path, kind)

    quick, deep = ckptool.check(path), ckptool.check(path, values=True)

    # Tensors in plain pickles are streams that torch.load() reads as it did before weights_only: a warning of its own.
    warned = ["CK204"] if kind == "pickle" else []
    assert [one.code for one in quick.findings if one.severity != "info"] == warned
    assert (quick.shards, quick.file_nbytes) == (3, deep.file_nbytes)
    assert [one.code for one in deep.findings if one.severity != "info"] == warned
    assert "every byte was read" in deep.verdict
    assert "in 3 shards" in invoke(["check", str(path)]).output
    assert deep.matching == deep.records
    assert (deep.records or 0) == (0 if kind != "torch_zip" else deep.records)
    assert kind == "safetensors" or [one.message for one in quick.findings if one.code == "CK202"]


def test_a_changed_byte_is_found_in_its_shard(tmp_path: Path) -> None:
    path = write(tmp_path, "torch_zip")
    with open_checkpoint(path) as checkpoint:
        storage = checkpoint.tensors["b.weight"].info.storage
        assert storage is not None
        offset = storage.offset
    data = bytearray((tmp_path / SECOND).read_bytes())
    data[offset] ^= 1
    (tmp_path / SECOND).write_bytes(data)

    (found,) = (one for one in ckptool.check(path, deep=True).findings if one.code == "CK105")

    assert found.message.startswith(f"shard '{SECOND}': record ")
    assert found.message.endswith("it holds b.weight")
    refused(path, DamagedFile, by=ckptool.load, verify=True)
    with pytest.raises(DamagedFile):
        ckptool.migrate(path, tmp_path / "out.pth")
    assert not (tmp_path / "out.pth").exists()


def test_a_damaged_record_is_said_to_hold_only_what_is_in_its_shard(tmp_path: Path) -> None:
    for name in ("a", "b"):
        tree = build.pickled({name: build.tensor(build.storage("0", 1024), (1024,), (1,))})
        members = {"x/data.pkl": tree, "x/data/0": bytes(4096), "x/version": b"3"}
        (tmp_path / name).write_bytes(build.zip_file(members, deflated=["x/data/0"]))
    path = write_index(tmp_path, {"a": "a", "b": "b"})
    data = bytearray((tmp_path / "b").read_bytes())
    data[data.index(b"data/0") + 6 + 4] ^= 0xFF
    (tmp_path / "b").write_bytes(data)

    found = [one.message for one in ckptool.check(path, deep=True).findings if one.code == "CK105"]

    assert len(found) == 1
    assert found[0].startswith("shard 'b': ")
    assert found[0].endswith("it holds b")


def test_diff_takes_shards_for_the_file_they_were(tmp_path: Path) -> None:
    path = write(tmp_path, "torch_zip")
    ckptool.migrate(path, tmp_path / "one.pth")
    torch.save({**merged(tmp_path, "torch_zip"), "b.count": torch.tensor(8)}, tmp_path / "other.pth")

    assert ckptool.diff(path, tmp_path / "one.pth").same
    assert [one.name for one in ckptool.diff(path, tmp_path / "other.pth").values] == ["b.count"]


@each(
    ("total_size", "is_said"),
    [
        (48, False),
        (32, False),
        (47, True),
        (0, True),
        (48.0, False),
        (49.5, False),
        ("47", False),
        (None, False),
        (True, False),
    ],
)
def test_a_total_that_is_not_the_tensors_is_a_finding(total_size: object, is_said: bool, tmp_path: Path) -> None:
    shared = torch.zeros(4)
    torch.save({"a": shared, "tied": shared}, tmp_path / "a")
    torch.save({"b": torch.ones(4)}, tmp_path / "b")
    path = write_index(tmp_path, {"a": "a", "tied": "a", "b": "b"}, total_size=total_size)

    found = [one for one in ckptool.check(path).findings if one.code == "CK107"]

    assert bool(found) == is_said
    assert all(one.severity == "warning" and f"{total_size:,} bytes" in one.message for one in found)


def test_an_index_without_metadata_announces_nothing(tmp_path: Path) -> None:
    small(tmp_path)
    (tmp_path / "model.index.json").write_text('\n {"weight_map": {"a": "a", "b": "b"}}')

    assert ckptool.check(tmp_path / "model.index.json").worst is None


def test_what_shards_say_differently_is_left_out_and_noted(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "a", metadata={"format": "pt", "by": "me"})
    save_file({"b": torch.ones(1)}, tmp_path / "b", metadata={"format": "pt", "by": "you", "only": "b"})

    with open_checkpoint(write_index(tmp_path, {"a": "a", "b": "b"})) as checkpoint:
        assert checkpoint.metadata == {"format": "pt", "only": "b"}
        assert checkpoint.notes == ("shards differ in metadata, which is left out: 'by'",)


def test_versions_of_modules_are_left_out_and_noted(tmp_path: Path) -> None:
    torch.save(torch.nn.BatchNorm1d(2).state_dict(), tmp_path / "a")
    names = list(torch.nn.BatchNorm1d(2).state_dict())

    with open_checkpoint(write_index(tmp_path, dict.fromkeys(names, "a"))) as checkpoint:
        assert checkpoint.notes == ("shard 'a': the versions of modules that it holds are left out",)


# What does not fit together


def test_missing_shards_are_counted_and_named(tmp_path: Path) -> None:
    path = write(tmp_path)
    (tmp_path / FIRST).unlink()
    assert str(refused(path, FileUnavailable).hint).startswith("Put it ")
    (tmp_path / THIRD).unlink()

    caught = refused(path, FileUnavailable)
    assert caught.message == f"2 of 3 shards not there: '{FIRST}', '{THIRD}'"
    assert str(caught.hint).startswith("Put them ")
    assert (caught.kind, caught.needed, caught.actual) == ("missing-shards", 3, 1)
    assert caught.path == str(path)
    assert ckptool.check(path).error is not None


def test_of_many_missing_shards_three_are_named(tmp_path: Path) -> None:
    for count, ending in ((3, "'s0', 's1', 's2'"), (4, "'s0', 's1', 's2' and 1 more")):
        path = write_index(tmp_path, {f"t{number}": f"s{number}" for number in range(count)})

        assert refused(path, FileUnavailable).message.endswith(f"not there: {ending}")


def but(change: Callable[[Path, Path], object]) -> Callable[[Path], Path]:
    """Write two small shards, and change them; the change gets the index, and the second of them."""

    def make(folder: Path) -> Path:
        path = small(folder)
        change(path, folder / "b")
        return path

    return make


def _saved(what: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        torch.save(what, folder / "a")
        return write_index(folder, {"x": "a"})

    return make


def _as_link(_: Path, shard: Path) -> None:
    shard.rename(shard.with_name("c"))
    shard.symlink_to("c")


def _text(text: str) -> Callable[[Path], Path]:
    return but(lambda index, _: index.write_text(text))


ONE, TWO = {"a": build.floats()}, {"a": build.floats(), "b": build.floats()}
# What names lead to, and other indexes that contradict themselves, are in tests/hostile/cases/shards.py.
BROKEN: dict[str, tuple[Callable[[Path], Path], type[CkptoolError], str]] = {
    "a tensor in two shards": (lambda f: small(f, a=TWO, b={"b": b"1234"}), AmbiguousFile, "ambiguous-shards"),
    "another index": (but(lambda index, shard: shard.write_bytes(index.read_bytes())), MalformedFile, "nested-index"),
    "a link": (but(_as_link), FileUnavailable, "shard-link"),
    "a file as a folder": (lambda f: small(f, {"a": "a", "b": "a/b"}), FileUnavailable, "unavailable"),
    "a shard that is cut": (
        but(lambda _, shard: os.truncate(shard, shard.stat().st_size - 1)),
        TruncatedFile,
        "truncated-safetensors",
    ),
    "a whole model": (but(lambda _, shard: torch.save(torch.nn.Linear(1, 1), shard)), UnsupportedFeature, "shard-form"),
    "a training checkpoint": (_saved({"x": torch.ones(1), "epoch": 3}), UnsupportedFeature, "shard-form"),
    "weights beside others": (
        _saved({"x": torch.ones(1), "ema": {"x": torch.ones(1)}}),
        UnsupportedFeature,
        "shard-form",
    ),
    "weights under a key": (_saved({"model": {"x": torch.ones(1)}}), UnsupportedFeature, "shard-form"),
    "a bare tensor": (_saved(torch.ones(1)), UnsupportedFeature, "shard-form"),
    "shards of two formats": (
        but(lambda _, shard: torch.save({"b": torch.ones(4)}, shard)),
        UnsupportedFeature,
        "shard-format",
    ),
    "a shard in a zip": (
        but(lambda _, shard: shard.write_bytes(build.zip_file({"model.safetensors": shard.read_bytes()}))),
        UnsupportedFeature,
        "shard-format",
    ),
    "a list of names": (_text('{"x": {"weight_map": {}}, "weight_map": []}'), MalformedFile, "malformed-index"),
    "no weight_map of its own": (_text('{"x": {"weight_map": {"a": "a"}}}'), MalformedFile, "malformed-index"),
    "no JSON": (_text('{"weight_map": {"a": "a",}}'), MalformedFile, "malformed-index"),
}


@each("name", BROKEN)
def test_what_does_not_fit_together_is_refused_and_everything_closed(name: str, tmp_path: Path) -> None:
    make, error, kind = BROKEN[name]
    path = make(tmp_path)
    before = descriptors()

    assert (refused(path, error).kind, descriptors()) == (kind, before)


@pytest.mark.parametrize("name", ["a shard that is cut", "a whole model", "another index", "a shard in a zip"])
def test_what_is_wrong_with_a_shard_names_it(name: str, tmp_path: Path) -> None:
    path = BROKEN[name][0](tmp_path)

    caught = refused(path)
    assert caught.message.startswith(("shard 'a': ", "shard 'b': "))
    assert caught.path == str(path)


@pytest.mark.parametrize("kind", ["safetensors", "torch_zip"])
def test_any_damage_to_any_file_gives_a_result_or_an_error_of_ours(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path, kind)
    files = {file: file.read_bytes() for file in (path, tmp_path / FIRST, tmp_path / SECOND)}
    random = Random(kind)

    refused: set[type[CkptoolError]] = set()
    for number in range(120):
        file = (path, path, tmp_path / FIRST, tmp_path / SECOND)[number % 4]
        data = bytearray(files[file])
        for _ in range(random.randint(1, 3)):
            data[random.randrange(min(len(data), 2000))] = random.choice(b'\0"{}[]:,./\\a0\xff')
        file.write_bytes(data)
        try:
            with open_checkpoint(path) as checkpoint:
                read = {name: tensor.read() for name, tensor in checkpoint.tensors.items()}
                assert read.keys() == checkpoint.shard_of.keys()
        except CkptoolError as error:
            refused.add(type(error))
        file.write_bytes(files[file])
    open_checkpoint(path).close()

    assert len(refused) > 2


def test_more_shards_than_may_be_open_can_be_read(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource", reason="Windows: it has no limits on descriptors that can be set")
    names = [f"s{number}" for number in range(60)]
    path = small(tmp_path, {name: name for name in names}, **{name: {name: build.floats()} for name in names})
    before = descriptors()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 30, limits[1]))
    try:
        with open_checkpoint(path) as checkpoint:
            assert [len(checkpoint.tensors[name].read()) for name in names] == [len(build.floats())] * 60
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    assert descriptors() == before


def test_closing_closes_every_shard(tmp_path: Path) -> None:
    path = write(tmp_path)
    before = descriptors()
    with open_checkpoint(path) as checkpoint:
        assert descriptors() == before + 4
    assert descriptors() == before

    with pytest.raises(ValueError, match="closed"):
        checkpoint.tensors["b.weight"].read()


def test_tensors_outlive_a_checkpoint_that_nobody_closed(tmp_path: Path) -> None:
    before = descriptors()
    tensors = open_checkpoint(small(tmp_path)).tensors

    assert tensors["b"].read() == build.floats()
    del tensors
    assert descriptors() == before


@pytest.mark.parametrize("file", [FIRST, SECOND, THIRD, "model.index.json"])
def test_each_file_is_held_to_be_unchanged(file: str, tmp_path: Path) -> None:
    with open_checkpoint(write(tmp_path)) as checkpoint:
        checkpoint.check_unchanged()
        with (tmp_path / file).open("ab") as stream:
            stream.write(b" ")

        with pytest.raises(SourceChanged) as caught:
            checkpoint.check_unchanged()
        assert caught.value.path == str(tmp_path / file)


def test_an_error_while_reading_names_the_shard(tmp_path: Path) -> None:
    with open_checkpoint(small(tmp_path)) as checkpoint:
        os.truncate(tmp_path / "b", 8)

        with pytest.raises(SourceChanged) as caught:
            checkpoint.tensors["b"].read()
        assert caught.value.path == str(tmp_path / "b")


def test_an_index_that_is_gone_in_time_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = small(tmp_path)
    swapping(monkeypatch, "a", lambda: path.unlink(missing_ok=True))
    refused(path, SourceChanged)


@pytest.mark.parametrize("limits", [Limits(shards=1), Limits(tensors=1), Limits(header_nbytes=50)])
def test_an_index_keeps_to_the_limits(limits: Limits, tmp_path: Path) -> None:
    path = small(tmp_path)

    refused(path, LimitExceeded, limits=limits)
    open_checkpoint(path, limits=Limits(shards=2, tensors=2, header_nbytes=path.stat().st_size)).close()


@pytest.mark.parametrize("wrap", [bytes, io.BytesIO])
def test_where_there_is_no_folder_an_index_is_named_and_refused(wrap: Callable[[bytes], Any], tmp_path: Path) -> None:
    caught = refused(wrap(small(tmp_path).read_bytes()), NotACheckpoint)
    assert caught.kind == "index-json"
    assert caught.hint == "Open it by its path, beside the files that it names, such as 'a'."


def test_in_an_archive_an_index_has_no_folder(tmp_path: Path) -> None:
    path = small(tmp_path)
    (tmp_path / "packed.zip").write_bytes(build.zip_file({file.name: file.read_bytes() for file in tmp_path.iterdir()}))

    assert refused(f"{tmp_path}/packed.zip::{path.name}", NotACheckpoint).kind == "index-json"


# What is opened


def test_a_shard_may_stand_in_a_folder_below(tmp_path: Path) -> None:
    (tmp_path / "x" / "y").mkdir(parents=True)
    (tmp_path / "x" / "y" / "a b").write_bytes(build.safetensors(ONE))
    path = write_index(tmp_path, {"a": "x/y/a b"})

    with open_checkpoint(path) as checkpoint:
        assert checkpoint.tensors["a"].read() == build.floats()


def test_a_path_of_one_component_has_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = small(tmp_path)
    monkeypatch.chdir(tmp_path)

    with open_checkpoint(path.name) as checkpoint:
        assert checkpoint.tensors["a"].read() == build.floats()


def test_the_index_itself_may_be_a_link_for_it_was_named_by_the_caller(tmp_path: Path) -> None:
    small(tmp_path).rename(tmp_path / "real.json")
    (tmp_path / "link.json").symlink_to("real.json")

    open_checkpoint(tmp_path / "link.json").close()


def snapshot(folder: Path, shard: str = "b", up: int = 2, root: str = "snapshots", digest: str = "0f" * 32) -> Path:
    """Lay shards out as the hub's cache does, in a snapshot and its blobs; return the path of the index."""
    blobs, place = folder / "blobs", (folder / root / "c0ffee" / shard).parent
    blobs.mkdir()
    place.mkdir(parents=True)
    below = folder / root / "c0ffee"
    (blobs / ("a1" * 20)).write_bytes(build.index_of_shards({"a": "a", "b": shard}))
    (below / "model.index.json").symlink_to("../../blobs/" + "a1" * 20)
    (blobs / ("9e" * 32)).write_bytes(build.safetensors({"a": build.floats()}))
    (below / "a").symlink_to("../../blobs/" + "9e" * 32)
    (blobs / digest).write_bytes(build.safetensors({"b": build.floats()}))
    (below / shard).symlink_to("../" * up + "blobs/" + digest)
    return below / "model.index.json"


@pytest.mark.parametrize(("shard", "up"), [("b", 2), ("x/b", 3), ("x/y/b", 4)])
def test_the_links_of_the_hubs_cache_are_followed(shard: str, up: int, tmp_path: Path) -> None:
    before = descriptors()
    with open_checkpoint(snapshot(tmp_path, shard, up)) as checkpoint:
        assert checkpoint.tensors["b"].read() == build.floats()
        assert descriptors() == before + 3


def test_an_index_in_a_folder_of_a_snapshot_finds_its_shards(tmp_path: Path) -> None:
    path = snapshot(tmp_path, "unet/b", 3)
    index = write_index(path.parent / "unet", {"b": "b"})

    open_checkpoint(index).close()


def _move_link(target: str) -> Callable[[Path], None]:
    def change(below: Path) -> None:
        (below / "b").unlink()
        (below / "b").symlink_to(target)

    return change


def _link_blob(below: Path) -> None:
    blob = below.parents[1] / "blobs" / ("0f" * 32)
    blob.rename(below.parents[1] / "secret")
    blob.symlink_to("../secret")


def _link_blobs(below: Path) -> None:
    (below.parents[1] / "blobs").rename(below.parents[1] / "others")
    (below.parents[1] / "blobs").symlink_to("others")


def _link_snapshots(below: Path) -> None:
    below.parent.rename(below.parents[1] / "real")
    (below.parents[1] / "snapshots").symlink_to("real")


def _replace_by(make: Callable[[Path], None]) -> Callable[[Path], None]:
    def change(below: Path) -> None:
        blob = below.parents[1] / "blobs" / ("0f" * 32)
        blob.unlink()
        make(blob)

    return change


DIGEST = "0f" * 32
NO_BLOBS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a name that is not a digest": (_move_link("../../blobs/secret"), "shard-link"),
    "a digest of another length": (_move_link(f"../../blobs/{DIGEST}0"), "shard-link"),
    "a digest in capitals": (_move_link(f"../../blobs/{DIGEST.upper()}"), "shard-link"),
    "a digest and a line": (_move_link(f"../../blobs/{DIGEST}\n"), "shard-link"),
    "further in": (_move_link(f"../../blobs/{DIGEST}/x"), "shard-link"),
    "one folder too few": (_move_link(f"../blobs/{DIGEST}"), "shard-link"),
    "one folder too many": (_move_link(f"../../../blobs/{DIGEST}"), "shard-link"),
    "a way round": (_move_link(f"../../x/../blobs/{DIGEST}"), "shard-link"),
    "another folder": (_move_link(f"../../blob/{DIGEST}"), "shard-link"),
    "a whole path": (_move_link(f"/blobs/{DIGEST}"), "shard-link"),
    "a blob that is a link": (_link_blob, "shard-link"),
    "blobs that are a link": (_link_blobs, "shard-link"),
    "snapshots that are a link": (_link_snapshots, "shard-link"),
    "a blob that is a pipe": (_replace_by(lambda blob: os.mkfifo(blob)), "not-a-file"),
    "a blob that is a folder": (_replace_by(lambda blob: blob.mkdir()), "not-a-file"),
    "no blob": (_replace_by(lambda _: None), "missing-shards"),
}


@each("name", NO_BLOBS)
def test_no_other_link_is_taken_for_one_of_the_hubs(name: str, tmp_path: Path) -> None:
    path = snapshot(tmp_path)
    change, kind = NO_BLOBS[name]
    change(path.parent)
    before = descriptors()

    assert (refused(path, FileUnavailable).kind, descriptors()) == (kind, before)


def test_outside_of_snapshots_the_same_link_is_refused(tmp_path: Path) -> None:
    caught = refused(snapshot(tmp_path, root="archives"), FileUnavailable)
    assert caught.kind == "shard-link"
    assert "cp -rL" in (caught.hint or "")


def swapping(monkeypatch: pytest.MonkeyPatch, when: str, swap: Callable[[], object]) -> None:
    """Do something in the moment before a component is opened."""
    real = os.open

    def opened(path: str, flags: int, *args: Any, **options: Any) -> int:
        if path == when and options.get("dir_fd") is not None:
            swap()
        return real(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", opened)


@pytest.mark.parametrize(
    ("swapped", "when", "target"),
    [("x/a", "a", "y/secret"), ("x", "x", "y"), ("x", "a", "y")],
    ids=["a shard", "its folder", "its folder, once that is open"],
)
def test_what_becomes_a_link_in_time_is_not_followed(
    swapped: str, when: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, name, data in (("x", "a", build.floats()), ("y", "a", bytes(16)), ("y", "secret", bytes(16))):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).write_bytes(build.safetensors({"a": data}))
    path = write_index(tmp_path, {"a": "x/a"})

    def swap() -> None:
        if not (tmp_path / swapped).is_symlink():
            (tmp_path / swapped).rename(tmp_path / "kept")
            (tmp_path / swapped).symlink_to(tmp_path / target)

    swapping(monkeypatch, when, swap)
    if (swapped, when) == ("x", "a"):
        with open_checkpoint(path) as checkpoint:
            assert checkpoint.tensors["a"].read() == build.floats()
        return
    assert refused(path, FileUnavailable).kind == "shard-link"


def test_a_shard_that_is_swapped_all_the_time_is_read_or_refused(tmp_path: Path) -> None:
    path = small(tmp_path)
    (tmp_path / "secret").write_bytes(build.safetensors({"b": bytes(16)}))
    shard = (tmp_path / "b").read_bytes()
    done = threading.Event()

    def swap() -> None:
        while not done.is_set():
            (tmp_path / "new").symlink_to("secret")
            (tmp_path / "new").replace(tmp_path / "b")
            (tmp_path / "new").write_bytes(shard)
            (tmp_path / "new").replace(tmp_path / "b")
            # Now and then long enough to be read on a busy machine, and most often not.
            time.sleep(pauses.choice((0, 0, 0, 0.002, 0.05)))

    pauses = Random(7)
    thread = threading.Thread(target=swap)
    thread.start()
    read, refused = 0, list[str]()
    end = time.monotonic() + 60
    try:
        while (read + len(refused) < 100 or not (read and "shard-link" in refused)) and time.monotonic() < end:
            try:
                with open_checkpoint(path) as checkpoint:
                    assert checkpoint.tensors["b"].read() == build.floats()
                    read += 1
            except CkptoolError as error:
                refused.append(error.kind)
    finally:
        done.set()
        thread.join()

    assert read
    assert {"shard-link"} <= set(refused) <= {"shard-link", "source-changed"}
