"""Checkpoints inside gzip, zips and tars that other programs made; ``FILE::MEMBER`` picks one."""

from __future__ import annotations

import gzip
import io
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptool
from ckptool import (
    CkptoolError,
    LimitExceeded,
    Limits,
    MalformedFile,
    NotACheckpoint,
    TruncatedFile,
    UnsupportedFeature,
    open_checkpoint,
)
from tests import build, zip_bytes
from tests.build import COMPRESSED
from tests.each import each
from tests.formats.said import refused
from tests.scale import in_turn


def weights(numel: int = 4) -> bytes:
    tree = {"w": build.tensor(build.storage("0", numel), (numel,)), "b": build.tensor(build.storage("0", numel), (1,))}
    return build.torch_zip(tree, {"0": build.floats(numel)})


def optimizer() -> bytes:
    state = {"state": {0: {"exp_avg": build.tensor(build.storage("0"))}}, "param_groups": []}
    return build.torch_zip(state, {"0": build.floats()})


def stable_baselines(method: str = "stored") -> bytes:
    pack = zip_bytes.stored if method == "stored" else zip_bytes.deflated
    return zip_bytes.whole(
        [
            pack("data", b'{"policy_class": "MlpPolicy"}'),
            pack("pytorch_variables.pth", build.torch_zip({})),
            pack("policy.pth", weights()),
            pack("policy.optimizer.pth", optimizer()),
            pack("_stable_baselines3_version", b"2.3.2"),
        ]
    )


def tar_gz(members: dict[str, bytes]) -> bytes:
    return gzip.compress(build.tar_file(members))


# gzip


@pytest.mark.parametrize("name", build.one_of_each())
def test_any_checkpoint_opens_through_gzip(name: str) -> None:
    data = build.one_of_each()[name]
    plain, packed = open_checkpoint(data), open_checkpoint(gzip.compress(data))

    assert packed.format == plain.format == name
    assert list(packed.tensors) == list(plain.tensors)
    for found, expected in zip(packed.tensors.values(), plain.tensors.values(), strict=True):
        assert found.read() == expected.read()
        assert found.info.storage is not None
        assert found.info.storage.file_offset is None
    assert packed.file_nbytes == len(gzip.compress(data))


def test_gzip_in_several_members_and_with_padding_is_joined() -> None:
    data = weights()
    parts = gzip.compress(data[:100]) + gzip.compress(data[100:])

    for packed in (parts, parts + bytes(512), gzip.compress(b"") + parts):
        assert list(open_checkpoint(packed).tensors) == ["w", "b"]


def test_packed_too_deep_is_refused() -> None:
    data = weights()
    for _ in range(4):
        data = gzip.compress(data)
    assert list(open_checkpoint(data).tensors) == ["w", "b"]

    assert refused(gzip.compress(data), UnsupportedFeature).kind == "nested-archives"


# Archives


@pytest.mark.parametrize("method", ["stored", "deflated"])
def test_the_one_member_that_holds_weights_is_opened(method: str) -> None:
    checkpoint = open_checkpoint(stable_baselines(method))

    assert (checkpoint.member, checkpoint.format) == ("policy.pth", "torch_zip")
    assert checkpoint.tensors["w"].read() == build.floats()
    found = {member.name: (member.form, member.tensors) for member in checkpoint.members}
    assert found == {
        "pytorch_variables.pth": ("data", 0),
        "policy.pth": ("state_dict", 2),
        "policy.optimizer.pth": ("training", 1),
    }


@pytest.mark.parametrize("pack", [build.zip_file, build.tar_file, tar_gz], ids=["zip", "tar", "tar.gz"])
def test_the_only_checkpoint_among_other_files_is_opened(pack: object) -> None:
    data = pack({"config.json": b'{"a": 1}', "vocabulary/tokens.txt": b"a\nb\n", "weights.th": weights()})  # type: ignore[operator]

    checkpoint = open_checkpoint(data)
    assert checkpoint.member == "weights.th"
    assert checkpoint.tensors["w"].read() == build.floats()


def test_several_that_could_be_meant_are_listed_and_none_is_opened() -> None:
    checkpoint = open_checkpoint(build.zip_file({"a.pth": weights(), "b/c.pth": weights(8), "readme": b"x"}))

    assert (checkpoint.form, checkpoint.format, len(checkpoint.tensors)) == ("archive", "packed", 0)
    assert [(member.name, member.format, member.tensors) for member in checkpoint.members] == [
        ("a.pth", "torch_zip", 2),
        ("b/c.pth", "torch_zip", 2),
    ]
    assert checkpoint.members[1].nbytes == len(weights(8))
    assert checkpoint.weights is None


def test_a_member_that_cannot_be_read_is_told_of() -> None:
    checkpoint = open_checkpoint(build.zip_file({"a.pth": weights(), "b.pth": weights()[:-9]}))

    assert checkpoint.member == "a.pth"
    ((name, why),) = checkpoint.unopened
    assert name == "b.pth"
    assert "truncated" in why
    assert checkpoint.notes == ()


def test_a_broken_checkpoint_that_is_the_only_one_gives_its_own_error() -> None:
    assert "model.pth" in refused(build.zip_file({"readme": b"x", "model.pth": weights()[:-9]}), TruncatedFile).message


@each(
    ("pack", "members"),
    in_turn(
        [build.zip_file, build.tar_file, tar_gz], [{}, {"readme.txt": b"hello"}, {"a/b.py": b"import os", "a/c": b""}]
    ),
)
def test_an_archive_without_checkpoints_is_named(pack: object, members: dict[str, bytes]) -> None:
    with pytest.raises(CkptoolError) as caught:
        open_checkpoint(pack(members))  # type: ignore[operator]
    if members:
        assert isinstance(caught.value, NotACheckpoint)


def test_links_in_a_tar_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret.pth").write_bytes(weights())
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
            link = tarfile.TarInfo(f"model{kind!r}.pth")
            link.type, link.linkname = kind, str(tmp_path / "secret.pth")
            tar.addfile(link)

    refused(stream, NotACheckpoint)


# FILE::MEMBER


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "model.zip"
    path.write_bytes(stable_baselines())
    return path


def test_a_member_can_be_picked(archive: Path) -> None:
    with open_checkpoint(f"{archive}::policy.optimizer.pth") as checkpoint:
        assert checkpoint.member == "policy.optimizer.pth"
        assert list(checkpoint.tensors) == ["state.0.exp_avg"]
        assert (checkpoint.path, checkpoint.file_nbytes) == (str(archive), archive.stat().st_size)


@pytest.mark.parametrize("name", ["missing.pth", "policy", "", "Policy.pth", "policy.pth::more"])
def test_a_member_that_is_not_there_is_told_of_with_those_that_are(archive: Path, name: str) -> None:
    if not name:  # no member is named: the file itself is meant
        assert open_checkpoint(f"{archive}::").member == "policy.pth"
        return
    caught = refused(f"{archive}::{name}")
    assert caught.path == str(archive)
    if "::" not in name:
        assert caught.kind == "no-member"
        assert caught.hint is not None
        assert "policy.pth" in caught.hint


def test_a_member_of_a_file_that_is_no_archive_is_told_of(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(build.safetensors({"w": build.floats()}))

    assert refused(f"{path}::w", MalformedFile).kind == "no-member"


def test_a_member_that_is_no_checkpoint_is_named(archive: Path) -> None:
    refused(f"{archive}::data", NotACheckpoint)


def test_members_of_gzipped_tars_can_be_picked(tmp_path: Path) -> None:
    (tmp_path / "x.tar.gz").write_bytes(tar_gz({"a.pth": weights(), "b.pth": weights(8)}))

    assert open_checkpoint(f"{tmp_path}/x.tar.gz::b.pth").tensors["w"].info.shape == (8,)


def test_the_name_that_is_shown_for_a_member_of_a_member_opens_it_again(tmp_path: Path) -> None:
    inner = build.zip_file({"model.pth": weights(), "readme": b"x"})
    (tmp_path / "outer.zip").write_bytes(build.zip_file({"inner.zip": inner, "notes": b"y"}))

    first = open_checkpoint(tmp_path / "outer.zip")
    again = open_checkpoint(f"{tmp_path}/outer.zip::{first.member}")
    assert first.member == again.member == "inner.zip::model.pth"
    assert list(again.tensors) == list(first.tensors) == ["w", "b"]


def test_the_record_of_a_torch_zip_is_no_member_worth_picking(tmp_path: Path) -> None:
    (tmp_path / "x.pth").write_bytes(weights())

    refused(f"{tmp_path}/x.pth::archive/data/0")


# compressed as a whole


@pytest.mark.parametrize("name", COMPRESSED)
def test_whatever_compressed_a_checkpoint_it_opens(name: str) -> None:
    pack = COMPRESSED[name]
    found = open_checkpoint(pack(weights()))

    assert found.format == "torch_zip"
    assert found.tensors["w"].read() == build.floats()
    assert [one.code for one in ckptool.check(pack(weights())).findings].count("CK202") == 1
    assert name in next(one.message for one in ckptool.check(pack(weights())).findings if one.code == "CK202")


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_bytes_that_are_cut_damaged_or_too_many_are_errors(name: str) -> None:
    data = COMPRESSED[name](weights())

    for length in (*range(2, 60), len(data) - 9, len(data) - 1):
        refused(data[:length])
    assert refused(data[:-12]).kind == f"truncated-{name}"
    refused(COMPRESSED[name](bytes(1 << 20)), LimitExceeded, limits=Limits(inflated_nbytes=1 << 16))
    damaged = bytearray(data)
    damaged[-6] ^= 1  # mostly of its checksum
    assert refused(bytes(damaged), MalformedFile).kind == f"damaged-{name}"


@pytest.mark.parametrize("name", ["bzip2", "xz", "gzip"])
def test_compressed_files_one_after_another_are_joined(name: str) -> None:
    data, pack = weights(), COMPRESSED[name]

    assert list(open_checkpoint(pack(data[:100]) + pack(data[100:])).tensors) == ["w", "b"]


@pytest.mark.parametrize("name", COMPRESSED)
def test_what_is_compressed_and_no_checkpoint_is_named(name: str) -> None:
    assert refused(COMPRESSED[name](b"<!DOCTYPE html><title>x</title>"), NotACheckpoint).kind == "html"
    assert refused(COMPRESSED[name](b""), NotACheckpoint).kind == f"{name}-empty"


@pytest.mark.parametrize("text", [b"x^2 + y^2 = 1\n" * 20, b"x\x9c", b"BZh", b"BZh91AY&SY", b"]\0\0\x80\0", b"x = 1\n"])
def test_what_only_begins_like_something_compressed_is_another_error(text: bytes) -> None:
    refused(text)


# folders of several files that are one checkpoint


def packed_folder(place: str) -> dict[str, bytes]:
    folder = Path(__file__).parents[2] / "fixtures" / "folders" / "dcp"
    return {f"{place}{one.name}": one.read_bytes() for one in sorted(folder.iterdir())}


@pytest.mark.parametrize(
    ("place", "pack"),
    in_turn(["", "./", "./model_weights/", "a/b/"], [build.tar_file, tar_gz, build.zip_file]),
)
def test_a_distributed_checkpoint_in_an_archive_is_called_so(
    place: str, pack: Callable[[dict[str, bytes]], bytes]
) -> None:
    data = pack({"model_config.yaml": b"target: a.b", **packed_folder(place)})
    caught = refused(data, UnsupportedFeature, r"torch\.distributed\.checkpoint of 2 files")
    assert "Unpack" in str(caught.hint)
    assert place in caught.message


def test_a_distributed_checkpoint_beside_weights_hides_nothing(tmp_path: Path) -> None:
    path = tmp_path / "both.nemo"
    path.write_bytes(build.tar_file({"weights.pt": weights(), **packed_folder("dist/")}))
    with open_checkpoint(path) as opened:
        assert set(opened.tensors) == {"w", "b"}
    assert [one.code for one in ckptool.check(path).findings if one.severity == "error"] == ["CK114"]
    refused(f"{path}::dist", UnsupportedFeature, "2 files in 'dist/'")


@each("text", [b"x", b"x^2 + y^2 = 1, as everybody knows since school, and more of it", b"x\x01", b"x\x9c"])
def test_text_that_begins_as_zlib_does_is_no_file_cut_short(text: bytes) -> None:
    data = zip_bytes.whole([zip_bytes.stored("policy.pth", weights()), zip_bytes.stored("mark", text)])

    assert {one.code for one in ckptool.check(data).findings if one.severity != "info"} == set()


def test_zlib_that_is_cut_short_is_still_one() -> None:
    packed = zlib.compress(build.torch_zip({"w": build.tensor(build.storage("0"))}, {"0": build.floats()}))
    data = zip_bytes.whole([zip_bytes.stored("policy.pth", weights()), zip_bytes.stored("mark", packed[:-40])])

    assert {one.code for one in ckptool.check(data).findings if one.severity != "info"}


@pytest.mark.parametrize("beside", [{}, {"README.md": b"# one"}, {"config.yml": b"a: 1", "results.json": b"{}"}])
def test_the_one_zip_of_a_folder_is_opened(beside: dict[str, bytes], tmp_path: Path) -> None:
    (tmp_path / "ppo.zip").write_bytes(stable_baselines())
    for name, data in beside.items():
        (tmp_path / name).write_bytes(data)

    with open_checkpoint(tmp_path) as checkpoint:
        assert list(checkpoint.weights or ()) == ["w", "b"]


def test_two_zips_of_a_folder_are_named(tmp_path: Path) -> None:
    for name in ("a.zip", "b.zip"):
        (tmp_path / name).write_bytes(stable_baselines())

    assert "a.zip" in (refused(tmp_path).hint or "")
