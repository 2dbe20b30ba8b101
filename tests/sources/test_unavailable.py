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
    ["https://huggingface.co/x/resolve/main/model.safetensors", "s3://b/k.pth", "hf://o/n", "gs://b", "HTTP://x"],
)
def test_addresses_are_not_read(address: str) -> None:
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


TRAINED = ["optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "config.json", "trainer_state.json"]


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["config.json", "model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json"], -1),
        (["pytorch_model-1.bin", "pytorch_model.bin.index.json"], -1),
        (["pytorch_model.bin.index.json", "model.safetensors.index.json"], -1),
        ([*TRAINED, "model.safetensors"], -1),
        ([*TRAINED, "adapter_model.safetensors"], -1),
        ([*TRAINED, "random_states_0.pkl", "pytorch_model.bin"], -1),
        (["config.json", "pytorch_model.bin", "model.safetensors"], -1),
        (["diffusion_pytorch_model.bin", "diffusion_pytorch_model.safetensors"], -1),
        (["notes.txt", "net.pth"], -1),
        (["a.pth", "b.pth"], None),
        (["a.safetensors.index.json", "b.safetensors.index.json"], None),
        (["adapter_model.safetensors", "model.safetensors"], None),
        (["optimizer.pt"], None),
        (["notes.txt"], None),
    ],
)
def test_the_one_candidate_in_a_directory_comes_with_the_command(
    names: list[str], chosen: int | None, tmp_path: Path
) -> None:
    error = refused(folder(tmp_path, names))

    assert error.kind == "directory"
    assert error.command == (None if chosen is None else f"ckptool inspect {tmp_path}/{names[chosen]}")
    if chosen is not None:
        assert (error.hint or "").startswith(f"Name a file in it: {names[chosen]}")


def test_a_directory_of_folders_names_them(tmp_path: Path) -> None:
    assert "unet" in (refused(folder(tmp_path, ["unet/x.bin", "vae/x.bin"])).hint or "")
    (tmp_path / "none").mkdir()
    assert refused(tmp_path / "none").hint is None


def test_a_distributed_checkpoint_is_named(tmp_path: Path) -> None:
    error = refused(folder(tmp_path, [".metadata", "__0_0.distcp", "__1_0.distcp"]))

    assert error.kind == "distributed-checkpoint"
    assert "2 files" in error.message
    assert f"dcp_to_torch {tmp_path}" in (error.hint or "")
    (tmp_path / ".metadata").unlink()
    assert "without its index" in refused(tmp_path).message
