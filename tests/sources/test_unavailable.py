"""Paths that are no files: what they are, and the file to give instead."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from ckptool import FileUnavailable, open_checkpoint


def refused(path: str | Path) -> FileUnavailable:
    with pytest.raises(FileUnavailable) as caught:
        open_checkpoint(path)
    return caught.value


def folder(tmp_path: Path, names: Sequence[str]) -> Path:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    return tmp_path


def test_a_hyphen_is_standard_input_which_is_a_pipe() -> None:
    assert (refused("-").kind, refused("-").hint) == ("not-a-file", "Save the stream to a file first.")


@pytest.mark.parametrize(
    "address",
    ["ftp://x/model.safetensors", "hdfs://b/k.pth", "rsync://o/n", "sftp://b"],
)
def test_addresses_of_other_kinds_are_not_read(address: str) -> None:
    assert (refused(address).kind, refused(address).hint) == ("address", "Download the file first, and give its path.")


def test_an_address_of_a_file_has_a_path() -> None:
    assert "/tmp/x.pth" in (refused("file:///tmp/x.pth").hint or "")


@pytest.mark.parametrize(
    ("name", "is_hub"),
    [("bert-base/uncased", True), ("meta-llama/Llama-3.1-8B", True), ("models/net.pth", False), ("a/b/c", False),
     ("net", False), ("../x", False), ("here/net", False), ("~/net", False)],
)  # fmt: skip
def test_names_on_the_hub_are_to_be_downloaded(
    name: str, is_hub: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()

    assert refused(name).kind == "missing"
    assert ("hf download" in (refused(name).hint or "")) is is_hub


def test_a_directory_of_folders_names_them(tmp_path: Path) -> None:
    assert "unet" in (refused(folder(tmp_path, ["unet/x.txt", "vae/x.txt"])).hint or "")
    (tmp_path / "none").mkdir()
    assert refused(tmp_path / "none").hint is None


def test_a_distributed_checkpoint_that_was_not_finished_is_named(tmp_path: Path) -> None:
    error = refused(folder(tmp_path, ["meta.pt", "__0_0.distcp", "__1_0.distcp"]))

    assert error.kind == "distributed-checkpoint"
    assert "2 files without its index" in error.message
