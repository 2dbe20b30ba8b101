"""Safetensors files are those that the reference library would have written, ties and all."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn

from ckptool import MigrationReport, check, migrate, open_checkpoint
from ckptool.errors import MalformedFile, MigrationRefused, OutputFailed
from tests import build
from tests.against_torch import oracle
from tests.each import each
from tests.migration.refused import refused
from tests.scale import examples, exhaustive, in_turn


def converted(state: Any, folder: Path, **options: Any) -> tuple[Path, MigrationReport]:
    torch.save(state, folder / "a.pth")
    return folder / "b.safetensors", migrate(folder / "a.pth", folder / "b.safetensors", force=True, **options)


def payload_of(path: Path) -> bytes:
    data = path.read_bytes()
    return data[8 + int.from_bytes(data[:8], "little") :]


def header_of(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    return header


@settings(max_examples=examples(40))
@given(
    st.dictionaries(
        st.text('abz.0_"\\\nüé', min_size=1, max_size=6),
        st.tuples(st.sampled_from(oracle.SAFETENSORS_DTYPES), st.lists(st.integers(0, 3), max_size=3).map(tuple)),
        min_size=1,
        max_size=8,
    )
)
def test_tensors_stand_where_the_reference_library_puts_them(
    tmp_path_factory: pytest.TempPathFactory, kinds: dict[str, tuple[str, tuple[int, ...]]]
) -> None:
    folder = tmp_path_factory.mktemp("x")
    state = {
        name: oracle.filled(dtype, shape) for name, (dtype, shape) in kinds.items() if shape or "float4" not in dtype
    }
    if not state:
        return
    path, report = converted(state, folder, allow_empty=True)
    save_file({name: tensor.clone() for name, tensor in state.items()}, folder / "c.safetensors", {"format": "pt"})

    ours, theirs = header_of(path), header_of(folder / "c.safetensors")
    metadata = ours.pop("__metadata__")
    assert metadata.pop("format") == theirs.pop("__metadata__")["format"] == "pt"
    assert set(metadata) <= {"ckptool.order"}
    assert list(ours.items()) == list(theirs.items())
    assert payload_of(path) == payload_of(folder / "c.safetensors")
    assert report.tied == {}
    if not metadata:
        assert path.read_bytes() == (folder / "c.safetensors").read_bytes()


def test_a_plain_state_dict_is_written_byte_for_byte_as_the_reference_library_does(tmp_path: Path) -> None:
    state = {"n": torch.arange(3), "a.weight": torch.ones(3, 4), "b.weight": torch.zeros(2), "h": torch.ones(1).half()}
    path, _ = converted(state, tmp_path)
    save_file(state, tmp_path / "c.safetensors", {"format": "pt"})

    assert path.read_bytes() == (tmp_path / "c.safetensors").read_bytes()


def test_every_type_reads_as_it_was(tmp_path: Path) -> None:
    tensors = {dtype: oracle.filled(dtype, (3, 4)) for dtype in oracle.SAFETENSORS_DTYPES}
    path, _ = converted(tensors, tmp_path)
    migrate(path, tmp_path / "back.pth")
    back = torch.load(tmp_path / "back.pth")

    with safe_open(path, framework="pt") as found:
        for dtype, tensor in tensors.items():
            read = found.get_tensor(dtype)
            assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
            assert read.untyped_storage().tolist() == tensor.untyped_storage().tolist()
            assert (back[dtype].dtype, back[dtype].stride()) == (tensor.dtype, tensor.stride())
            assert back[dtype].untyped_storage().tolist() == tensor.untyped_storage().tolist()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.z = nn.Embedding(4, 2)
        self.a = nn.Linear(2, 4, bias=False)
        self.a.weight = self.z.weight
        self.m = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.n = self.m


@pytest.mark.parametrize("whole", [False, True])
def test_tied_names_are_recorded_as_the_reference_library_records_them(whole: bool, tmp_path: Path) -> None:
    model = Tied()
    path, report = converted(model if whole else model.state_dict(), tmp_path)
    save_model(model, str(tmp_path / "c.safetensors"))

    ours, theirs = header_of(path), header_of(tmp_path / "c.safetensors")
    tied = {key: kept for key, kept in theirs.pop("__metadata__").items() if key != "format"}
    found = {key: kept for key, kept in ours.pop("__metadata__").items() if not key.startswith("ckptool.")}
    assert found == {"format": "pt", **tied}
    assert report.tied == tied
    assert list(ours.items()) == list(theirs.items())


def test_the_reference_library_loads_a_tied_model_from_it(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    del model.n, other.n  # the library trips over tied counters, in its own files too
    path, _ = converted(model.state_dict(), tmp_path)

    assert load_model(other, path) == (set(), [])
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)
    assert other.a.weight is other.z.weight


def test_expanded_ties_stand_under_every_name(tmp_path: Path) -> None:
    state = Tied().state_dict()
    path, report = converted(state, tmp_path, expand_tied=True)

    with safe_open(path, framework="pt") as found:
        assert set(found.keys()) == set(state)
        assert all(torch.equal(found.get_tensor(name), tensor) for name, tensor in state.items())
    assert report.tied == {}


def test_views_of_one_storage_are_no_ties(tmp_path: Path) -> None:
    flat = torch.arange(12.0)
    z = torch.complex(torch.arange(3.0), torch.ones(3))
    state = {"all": flat, "rows": flat.view(3, 4), "t": flat.view(3, 4).t(), "part": flat[2:5], "every": flat[::2]}
    state |= {"z": z, "conj": z.conj(), "neg": z.clone().conj().imag, "wide": flat[:1].expand(5)}
    path, report = converted(state, tmp_path)

    with safe_open(path, framework="pt") as found:
        for name, tensor in state.items():
            assert torch.equal(found.get_tensor(name), tensor), name
    assert report.tied == {}


def test_a_name_that_the_metadata_needs_is_kept_and_the_other_left_out(tmp_path: Path) -> None:
    shared = torch.ones(3)
    path, report = converted({"a": shared, "format": shared}, tmp_path)

    assert header_of(path)["__metadata__"]["format"] == "pt"
    assert report.tied == {"a": "format"}
    migrate(path, tmp_path / "c.pth")
    assert list(torch.load(tmp_path / "c.pth")) == ["a", "format"]


def quantised() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


UNSUPPORTED: dict[str, Any] = {
    "sparse": lambda: torch.eye(2).to_sparse(),
    "quantised": lambda: quantised(),
    "complex128": lambda: torch.ones(2, dtype=torch.complex128),
    "on meta": lambda: torch.ones(2, device="meta"),
    "a number": lambda: 3,
    "a list of tensors": lambda: [torch.ones(1)],
    "bits": lambda: torch.ones(2, dtype=torch.uint8).view(torch.bits8),
}


@pytest.mark.parametrize("what", UNSUPPORTED)
def test_what_the_format_cannot_hold_is_refused_by_name_or_left_out(what: str, tmp_path: Path) -> None:
    state = {**nn.Linear(2, 2).state_dict(), "odd": UNSUPPORTED[what]()}
    warnings.simplefilter("ignore", UserWarning)  # torch's own, about quantised tensors
    with pytest.raises(MigrationRefused) as caught:
        converted(state, tmp_path, key="")

    assert caught.value.kind == "unsupported-entries"
    dtype = str(state["odd"].dtype).removeprefix("torch.") if isinstance(state["odd"], torch.Tensor) else ""
    assert re.search(rf"'odd' \(.*\b{dtype}\)", caught.value.message)
    assert caught.value.option == "drop_unsupported"
    assert not (tmp_path / "b.safetensors").exists()

    path, report = converted(state, tmp_path, key="", drop_unsupported=True)
    with safe_open(path, framework="pt") as found:
        assert set(found.keys()) == {"weight", "bias"}
    assert "odd" in " ".join(report.dropped)


@each(("name", "kind"), [("__metadata__", "reserved-name"), ("\ud800", "unsupported-name")])
def test_a_name_that_a_header_cannot_have_is_refused(name: str, kind: str, tmp_path: Path) -> None:
    with pytest.raises(MigrationRefused) as caught:
        converted({name: torch.ones(1), "b": torch.ones(1)}, tmp_path)

    assert caught.value.kind == kind


@pytest.mark.parametrize("big", [False, True])
def test_strided_and_big_endian_data_is_written_right(big: bool, tmp_path: Path) -> None:
    tensors = {"x": torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1), "n": torch.arange(5, dtype=torch.int16)}
    torch.save(tensors, tmp_path / "a.pth")
    if big:
        _make_big_endian(tmp_path / "a.pth")
    migrate(tmp_path / "a.pth", tmp_path / "b.safetensors")

    with safe_open(tmp_path / "b.safetensors", framework="pt") as found:
        for name, tensor in tensors.items():
            assert oracle.tensor_bytes(found.get_tensor(name)) == oracle.tensor_bytes(tensor)


def _make_big_endian(path: Path) -> None:
    with ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    for name, size in (("a/data/0", 4), ("a/data/1", 2)):
        data = members[name]
        members[name] = b"".join(data[start : start + size][::-1] for start in range(0, len(data), size))
    path.write_bytes(build.zip_file(members | {"a/byteorder": b"big"}))


@exhaustive
def test_the_reference_reader_opens_it_where_numpy_is_missing_too(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(4.0)}, tmp_path / "a.pth")
    program = (
        "import sys; sys.modules['numpy'] = None; import safetensors; from ckptool import migrate; "
        "asked = []; real = safetensors.safe_open; "
        "safetensors.safe_open = lambda path, framework: asked.append(framework) or real(path, framework=framework); "
        "print(asked, *migrate(sys.argv[1], sys.argv[2]).read_back_by[1:])"
    )
    command = [sys.executable, "-W", "ignore", "-c", program, str(tmp_path / "a.pth"), str(tmp_path / "b.safetensors")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    assert done.stdout.strip() == f"['numpy', 'pt'] safetensors {safetensors.__version__}"


def test_the_report_says_what_read_the_file_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"a": torch.arange(4.0)}, tmp_path / "a.pth")
    found = migrate(tmp_path / "a.pth", tmp_path / "b.safetensors").read_back_by
    monkeypatch.setitem(sys.modules, "safetensors", None)

    assert found == ("ckptool", f"safetensors {safetensors.__version__}")
    assert migrate(tmp_path / "a.pth", tmp_path / "c.safetensors").read_back_by == ("ckptool",)


def test_a_reference_library_that_does_not_know_a_newer_type_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str, framework: str) -> None:
        raise safetensors.SafetensorError("Error while deserializing header: InvalidHeaderDeserialization")

    monkeypatch.setattr(safetensors, "safe_open", refuse)
    torch.save({"a": torch.zeros(8, dtype=torch.uint8).view(torch.float8_e8m0fnu)}, tmp_path / "new.pth")
    torch.save({"a": torch.arange(4.0)}, tmp_path / "old.pth")

    assert migrate(tmp_path / "new.pth", tmp_path / "new.safetensors").read_back_by == ("ckptool",)
    refused(tmp_path / "old.pth", tmp_path / "old.safetensors", error=OutputFailed)


def test_what_a_file_says_of_itself_stays_in_it(tmp_path: Path) -> None:
    save_file({"a.b": torch.ones(2)}, tmp_path / "a.safetensors", metadata={"format": "pt", "title": "tiny", "x": "a"})
    migrate(tmp_path / "a.safetensors", tmp_path / "b.safetensors", strip_prefix="a")
    report = migrate(tmp_path / "a.safetensors", tmp_path / "c.pth")

    with safe_open(tmp_path / "b.safetensors", framework="pt") as found:
        assert found.metadata() == {"format": "pt", "title": "tiny", "x": "a"}
    assert set(report.dropped) == {"__metadata__.title", "__metadata__.x"}


@pytest.mark.parametrize(
    ("framework", "how"), in_turn(["mlx", "tf", "flax", "np", "one of its own"], ["same", "in place", "shards"])
)
def test_the_format_that_a_file_names_is_kept(framework: str, how: str, tmp_path: Path) -> None:
    source, target = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file({"a.b": torch.ones(2), "a.c": torch.ones(200)}, source, metadata={"format": framework})
    if how == "in place":
        migrate(target := source, in_place=True, rename=[("^a", "x")])
    elif how == "shards":
        migrate(source, target := tmp_path / "cut", max_shard_size=500)
    else:
        migrate(source, target)

    for file in target.glob("*-of-*.safetensors") if how == "shards" else [target]:
        assert header_of(file)["__metadata__"]["format"] == framework
    if how == "same":
        assert migrate(source, tmp_path / "c.pth").dropped == ("__metadata__.format",)


NO_TEXT: dict[str, Any] = {
    "a number": ({"epoch": 3, "format": "pt", "title": "x"}, {"epoch": "3", "format": "pt", "title": "x"}),
    "null": ({"a": None}, {"a": "null", "format": "pt"}),
    "nested": ({"a": [1, {"b": 2.5}], "c": True}, {"a": '[1, {"b": 2.5}]', "c": "true", "format": "pt"}),
    "a list": ([1, 2], {"__metadata__": "[1, 2]", "format": "pt"}),
}


@pytest.mark.parametrize(("which", "how"), in_turn(NO_TEXT, ["same", "in place", "shards"]))
def test_metadata_that_is_no_text_is_an_error_for_check_and_becomes_text(which: str, how: str, tmp_path: Path) -> None:
    odd, expected = NO_TEXT[which]
    source = tmp_path / "a.safetensors"
    header = json.dumps({"__metadata__": odd, "w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    header += b" " * (64 - len(header) % 8)
    source.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(SafetensorError):
        load_file(source)
    found = check(source)
    assert [(one.code, one.severity) for one in found.findings] == [("CK118", "error")]

    target = source if how == "in place" else tmp_path / ("cut" if how == "shards" else "b.safetensors")
    if how == "in place":
        report = migrate(source, in_place=True, rename=[("^w", "v")])
    else:
        report = migrate(source, target, max_shard_size=500 if how == "shards" else None)

    assert any("taken as text" in note for note in report.notes)
    assert check(target).worst is None
    file = next(target.glob("*.safetensors")) if how == "shards" else target
    assert header_of(file)["__metadata__"] == expected
    assert torch.equal(next(iter(load_file(file).values())), torch.zeros(2))


def test_a_header_of_metadata_alone_in_the_old_broken_form_is_named(tmp_path: Path) -> None:
    header = b'{},"__metadata__":{"a":"b"}'
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)

    with pytest.raises(MalformedFile, match="metadata alone") as caught:
        open_checkpoint(tmp_path / "a.safetensors")
    assert caught.value.hint == "It holds no tensors: save the weights again."


def test_the_facts_of_modules_keep_the_key_that_older_files_have(tmp_path: Path) -> None:
    path, _ = converted(nn.Sequential(nn.BatchNorm1d(2)).state_dict(), tmp_path)

    assert json.loads(header_of(path)["__metadata__"]["ckptool.modules"]) == {"": 1, "0": 2}


def test_what_hangs_on_a_plain_tensor_keeps_it_from_nothing(tmp_path: Path) -> None:
    weight = torch.arange(4.0)
    weight.note = torch.zeros(2)  # type: ignore[attr-defined]
    torch.save({"weight": weight}, tmp_path / "a.pth")
    migrate(tmp_path / "a.pth", tmp_path / "a.safetensors")

    with safe_open(tmp_path / "a.safetensors", framework="pt") as found:
        assert torch.equal(found.get_tensor("weight"), weight)
