"""Where a migration writes: names that readers would take for something else, and words that are options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from tests.build import index_of_shards, safetensors, zip_file
from tests.each import each
from tests.missing import on_windows
from tests.program import invoke


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": {"w": torch.ones(2)}, "epoch": 1}, "model.pth")
    (tmp_path / "model.safetensors").write_bytes(safetensors({"w": bytes(4)}))
    return tmp_path


def refused(folder: Path, *arguments: str) -> str:
    """Run a migration that must be refused and write nothing; return what is printed."""
    before = sorted(folder.iterdir())
    result = invoke(["migrate", *arguments])

    assert result.exit_code == 1, result.output
    assert sorted(folder.iterdir()) == before
    return result.output


NO_CHECKPOINT = "onnx gguf npz npy h5 hdf5 keras tflite pb mlmodel json txt pt2 ONNX gz"


@each("suffix", NO_CHECKPOINT.split())
def test_a_suffix_of_something_else_is_refused(suffix: str, source: Path) -> None:
    assert "Name it 'out.pth', or .safetensors" in refused(source, "model.pth", f"out.{suffix}")


@each(
    ("arguments", "says"),
    [
        (["a\\b.onnx"], r"'a\b.onnx' would be read"),
        (["a\\b::c"], r"'a\b::c' is the name of a member of a file"),
        (["out", "--max-shard-size", "1MB", "--config-from", "a\\b"], r"'a\b' has no settings of a model"),
        (["--model", "a\\b.py:Net"], r"'a\b.py:Net' cannot be built: FileNotFoundError: there is no file 'a\b.py'"),
    ],
)
def test_a_path_is_printed_with_its_own_backslashes(arguments: list[str], says: str, source: Path) -> None:
    Path("a\\b").mkdir(parents=True, exist_ok=True)

    assert says in refused(source, "model.pth", *arguments)


@each("suffix", ["pth", "pt", "bin", "ckpt", "pth.tar", "weights", ""])
def test_names_of_checkpoints_and_of_nothing_are_taken(suffix: str, source: Path) -> None:
    report = ckptool.migrate("model.pth", f"out.{suffix}")

    assert Path(report.target).exists()
    assert torch.load(report.target)["epoch"] == 1


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["model.pth", "out.safetensors", "--form", "same"], "Name it 'out.pth', or write --form safetensors"),
        (["model.pth", "out.safetensors", "--form", "state_dict"], "Name it 'out.pth', or write --form safetensors"),
        (["model.pth", "out.safetensors.bak"], "or write --form safetensors"),
        (["model.pth", "out.safetensors~"], "or write --form safetensors"),
        (["model.pth", "out.st"], "Name it 'out.pth', or write --form safetensors"),
        (["model.safetensors", "out.npz", "--form", "same"], "Name it 'out.safetensors'."),
        *(
            (["model.pth", name, "--form", "safetensors"], "Name it 'out.safetensors', or write --form state_dict.")
            for name in ("out.pth", "out.pt", "out.bin", "out.ckpt", "out.PTH")
        ),
        (["model.safetensors", "out.pth", "--form", "same"], "Name it 'out.safetensors', or write --form state_dict."),
    ],
)
def test_a_suffix_and_a_form_that_contradict_each_other_are_refused(
    arguments: list[str], hint: str, source: Path
) -> None:
    assert hint in refused(source, *arguments)


@pytest.mark.parametrize(
    ("word", "option"),
    [
        ("cpu", "--to cpu"),
        ("cuda:0", "--to cuda:0"),
        ("CPU", "--to cpu"),
        ("gpu", "--to cuda"),
        ("safetensors", "--form safetensors"),
        ("float16", "--dtype float16"),
        ("bf16", "--dtype bf16"),
        ("5GB", "--max-shard-size 5GB"),
    ],
)
def test_a_word_that_is_an_options_value_is_no_name(word: str, option: str, source: Path) -> None:
    assert f"Say {option}, and leave the name out" in refused(source, "model.pth", word)
    assert Path(ckptool.migrate("model.pth", f"./{word}").target).exists()


def test_a_members_name_is_no_name_of_a_file(source: Path) -> None:
    assert "is the name of a member of a file" in refused(source, "model.pth", "model.pth::data.pkl")


def test_a_folder_may_have_any_name(source: Path) -> None:
    for name in ("cpu", "weights.onnx"):
        (source / name).mkdir()

        assert Path(ckptool.migrate("model.pth", name).target) == Path(name) / "model.pth"


def test_an_archive_is_not_replaced_by_one_of_its_members(source: Path) -> None:
    packed = zip_file({"a.pth": Path("model.pth").read_bytes(), "b.pth": Path("model.pth").read_bytes()})
    Path("all.zip").write_bytes(packed)
    Path("link.pth").hardlink_to("all.zip")

    for target in ("all.zip", "link.pth"):
        assert "Write to another file" in refused(source, "all.zip::a.pth", target, "--force")
    assert Path("all.zip").read_bytes() == packed


def test_a_shard_is_not_replaced_by_what_is_made_of_all(source: Path) -> None:
    Path("m.safetensors.index.json").write_bytes(index_of_shards({"w": "model.safetensors"}))

    assert "Write to another file" in refused(source, "m.safetensors.index.json", "model.safetensors", "--force")


@pytest.mark.parametrize(("text", "tag"), [("CPU", "cpu"), ("Cuda:0", "cuda:0"), ("MPS", "mps"), ("cuda", "cuda")])
def test_devices_are_taken_in_any_case(text: str, tag: str, source: Path) -> None:
    report = ckptool.migrate("model.pth", "out.pth", to=text)
    assert report.location == tag
    assert list(report.after.devices) == [tag]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("a.pth.tar", "a.cpu.pth"), ("a.v1.pt.tar", "a.v1.cpu.pt"), ("a.tar", "a.cpu.pth"), ("a.b.tar", "a.b.cpu.pth")],
)
def test_a_suffix_of_two_parts_is_one(name: str, expected: str, source: Path) -> None:
    (source / "model.pth").rename(source / name)
    assert ckptool.migrate(source / name, to="cpu").target == str(source / expected)
    # Without its second part, the name is another file's.
    (source / "kept").mkdir()
    assert ckptool.migrate(source / name, source / "kept").target == str(source / "kept" / expected.replace(".cpu", ""))


@on_windows("no file has a name by its number")
@each(("folder", "options"), [("/dev", {}), ("/proc/self", {}), ("/dev", {"max_shard_size": "5GB"})])
def test_the_name_of_an_open_file_is_none_for_its_result(folder: str, options: Any, source: Path) -> None:
    with (source / "model.pth").open("rb") as file:
        path = f"{folder}/fd/{file.fileno()}"
        if not Path(path).exists():
            pytest.skip(f"{folder}/fd is not there")
        with pytest.raises(ckptool.MigrationRefused, match="is an open file, beside which nothing can be written"):
            ckptool.migrate(path, dry_run=True, **options)
        assert ckptool.migrate(path, "named", dry_run=True, **options).target == "named"
