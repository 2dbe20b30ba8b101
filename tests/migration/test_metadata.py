"""What is said beside tensors: shown by ``inspect --metadata``, set and left out by ``migrate``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ckptool import MigrationRefused, load, migrate, open_checkpoint
from ckptool.formats.safetensors import MODULES_KEY, ORDER_KEY
from tests.each import each
from tests.program import OURS, run
from tests.scale import step

TAGS = json.dumps({"10_cat": {f"tag {number}": number for number in range(30)}})
TEXTS = {"format": "pt", "title": "a cat\nand more", "ss_tag_frequency": TAGS, "ss_steps": "800"}


def metadata_of(path: Path) -> dict[str, str]:
    """Return what the format's own library finds."""
    with safe_open(path, framework="pt") as opened:
        found: dict[str, str] = opened.metadata()
    return found


def lora(folder: Path) -> Path:
    """Write a file with the texts that trainers keep."""
    path = folder / "lora.safetensors"
    save_file({"a.weight": torch.arange(9.0).view(3, 3), "b.weight": torch.ones(2)}, path, metadata=TEXTS)
    return path


@each("how", ["copy", "in place", "compact", "shards"])
def test_keys_are_set_and_left_out(how: str, tmp_path: Path) -> None:
    source = lora(tmp_path)
    changes: Any = {"set_metadata": {"author": "ünï", "title": ""}, "drop_metadata": ["ss_t*", "title"]}
    if how in ("in place", "compact"):
        report = migrate(source, in_place=True, compact=how == "compact", **changes)
        out = source
    elif how == "shards":
        report = migrate(source, tmp_path / "out", max_shard_size=40, **changes)
        out = tmp_path / "out" / "model-00001-of-00002.safetensors"
        assert metadata_of(out.with_name("model-00002-of-00002.safetensors")) == {"format": "pt"}
    else:
        report = migrate(source, tmp_path / "out.safetensors", **changes)
        out = tmp_path / "out.safetensors"
    assert metadata_of(out) == {"format": "pt", "author": "ünï", "title": "", "ss_steps": "800"}
    assert report.metadata == {"author": "ünï", "title": ""}
    assert report.dropped == ("__metadata__.ss_tag_frequency",)
    assert report.verified
    with open_checkpoint(out if how != "shards" else tmp_path / "out") as found:
        assert found.weights is not None
        assert {name: one.info.shape for name, one in found.weights.items()} == {"a.weight": (3, 3), "b.weight": (2,)}


def test_what_names_ties_and_order_are_read_from_stays(tmp_path: Path) -> None:
    tied = torch.ones(2, 2)
    torch.save({"z": tied, "y": tied, "a": torch.zeros(3)}, tmp_path / "a.pth")
    source = tmp_path / "a.safetensors"
    migrate(tmp_path / "a.pth", source, set_metadata={"note": "x"})
    before = metadata_of(source)
    assert before.keys() == {"format", "note", "z", ORDER_KEY}
    for key in ("z", ORDER_KEY, "format"):
        with pytest.raises(MigrationRefused, match=f"{key!r} .*stays") as refused:
            migrate(source, in_place=True, drop_metadata=[key])
        assert refused.value.kind == "reserved-metadata"
    new = ({"z": "b"}, {ORDER_KEY: "[]"}, {MODULES_KEY: "{}"}, {"w": "y"}, {"DCP_SHARDING_INFO": "{}"})
    for one in new:
        with pytest.raises(MigrationRefused, match=repr(next(iter(one)))) as refused:
            migrate(source, tmp_path / "b.safetensors", set_metadata=one)
        assert refused.value.kind == "reserved-metadata"
    assert not (tmp_path / "b.safetensors").exists()
    migrate(source, in_place=True, drop_metadata=["*"])
    assert metadata_of(source) == {key: text for key, text in before.items() if key != "note"}
    assert list(load(source)) == ["z", "y", "a"]


def test_globs_about_nothing_are_refused(tmp_path: Path) -> None:
    source = lora(tmp_path)
    out = tmp_path / "out.safetensors"
    done = run("migrate", source, out, "--drop-metadata", "modelspec.*", code=1)
    assert "drop_metadata 'modelspec.*' matches none of the 3 keys of metadata" in done.stderr
    assert "It has ss_steps, ss_tag_frequency, title." in done.stderr
    assert not out.exists()
    run("migrate", source, out, "--drop-metadata", "modelspec.*", "--allow-unmatched")
    assert metadata_of(out) == TEXTS
    other = tmp_path / "other.safetensors"
    save_file({"a": torch.ones(1)}, other, metadata={"modelspec.title": "x"})
    run("migrate", source, other, "--out-dir", tmp_path / "all", "--drop-metadata", "modelspec.*")
    assert metadata_of(tmp_path / "all" / "lora.safetensors") == TEXTS
    assert metadata_of(tmp_path / "all" / "other.safetensors") == {"format": "pt"}


def test_forms_without_metadata_say_what_has_some(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pth")
    before = (tmp_path / "a.pth").read_bytes()
    for arguments in ([tmp_path / "b.pth"], ["--in-place"], [tmp_path / "b", "--form", "dcp"]):
        done = run("migrate", tmp_path / "a.pth", *arguments, "--set-metadata", "title=x", code=1)
        assert "has no metadata beside its tensors" in done.stderr
        assert "Write --form safetensors" in done.stderr
    assert [one.name for one in tmp_path.iterdir()] == ["a.pth"]
    assert (tmp_path / "a.pth").read_bytes() == before
    run("migrate", tmp_path / "a.pth", "--form", "safetensors", "--set-metadata", "title=a=b")
    assert metadata_of(tmp_path / "a.safetensors") == {"format": "pt", "title": "a=b"}
    for wrong in ("title", "=x"):
        done = run("migrate", tmp_path / "a.pth", "--set-metadata", wrong, code=2)
        assert f"not of the form K=V: {wrong!r}" in done.stderr


def test_in_place_there_is_room_or_it_says_so(tmp_path: Path) -> None:
    source = lora(tmp_path)
    before = source.read_bytes()
    done = run("migrate", source, "--in-place", "--set-metadata", f"more={'x' * 600}", code=1)
    room = int.from_bytes(before[:8], "little")
    assert f"there is room for {room:,}" in done.stderr
    assert source.read_bytes() == before
    run("migrate", source, "--in-place", "--drop-metadata", "ss_tag*", "--set-metadata", f"more={'x' * 450}")
    assert len(source.read_bytes()) == len(before)
    assert metadata_of(source) == {**{key: text for key, text in TEXTS.items() if text != TAGS}, "more": "x" * 450}
    order = tmp_path / "order.safetensors"
    torch.save({name: torch.ones(3) for name in "zyxwvu"}, tmp_path / "order.pth")
    migrate(tmp_path / "order.pth", order, set_metadata={"spare": "x" * 20})
    change = ["--drop-metadata", "spare", "--set-metadata", f"a={'x' * 40}"]
    assert "there is room for" in run("migrate", order, "--in-place", *change, code=1).stderr
    assert ORDER_KEY in metadata_of(order)
    edited = source.read_bytes()
    done = run("migrate", source, "--in-place", "--set-metadata", "ss_steps=800", "--json")
    assert json.loads(done.stdout)["written"] is False
    assert source.read_bytes() == edited


def test_scales_of_weights_in_metadata_are_no_text_to_leave_out(tmp_path: Path) -> None:
    path = tmp_path / "q.safetensors"
    values = {"layer.weight": torch.ones(8, 8).to(torch.float8_e4m3fn), "layer.bias": torch.ones(8)}
    save_file(values, path, metadata={"layer.weight_scale": "0.25", "note": "x"})
    migrate(path, tmp_path / "a.safetensors", drop_metadata=["note"])
    with pytest.raises(MigrationRefused) as refused:
        migrate(path, tmp_path / "b.safetensors", drop_metadata=["*"])
    assert refused.value.kind == "breaks-quantized"
    migrate(path, tmp_path / "b.safetensors", drop_metadata=["*"], break_quantized=True)


def test_inspect_lays_metadata_out(tmp_path: Path) -> None:
    lines = run("inspect", "--metadata", lora(tmp_path)).stdout.splitlines()
    said = dict(line.split(": ", 1) for line in lines if line[:1].isalpha())
    assert said["format"] == "pt"
    assert said["title"] == r"a cat\nand more"
    start = lines.index("ss_tag_frequency: {")
    end = lines.index("}", start)
    assert json.loads("\n".join(["{", *lines[start + 1 : end + 1]])) == json.loads(TAGS)


def test_inspect_shows_values_that_are_no_tensors(tmp_path: Path) -> None:
    settings = {"lr": 0.1, "layers": [1, 2], "name": "x" * 200, "betas": (0.9, 0.99), "none": None, 7: {"on": True}}
    path = tmp_path / "a.ckpt"
    torch.save({"epoch": 3, "state_dict": {"a": torch.ones(2)}, "hyper_parameters": settings, "arch": "net"}, path)
    lines = run("inspect", "--metadata", path).stdout.splitlines()
    assert lines[0] == "epoch: 3"
    assert lines[-1] == "arch: net"
    expected = json.loads(json.dumps(settings))
    assert json.loads("\n".join(["{", *lines[2:-1]])) == expected
    own = [settings]
    for _ in range(40):
        own = [own, own]  # type: ignore[list-item]
    torch.save({"a": torch.ones(2), "own": own}, path)
    assert len(run("inspect", "--metadata", path).stdout) < 10_000_000
    torch.save({"a": torch.ones(2)}, path)
    assert "it has no metadata" in run("inspect", "--metadata", path).stderr


def test_every_fixture_has_lines_of_text(tmp_path: Path) -> None:
    for path in OURS[:: step(3)]:
        printed = run("inspect", "--metadata", path).stdout
        assert all(line.isprintable() for line in printed.splitlines()), path
