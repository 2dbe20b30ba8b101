"""Device tags are rewritten wherever they stand, counted by what they were, and then plain ``torch.load`` works."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptool import check, load, migrate, open_checkpoint
from tests import build
from tests.device.tags import WRAPPERS, OfADevice, real
from tests.each import each
from tests.fixture_set.forging import forged, mixed, tagged
from tests.migration.refused import refused
from tests.migration.test_round_trips import loaded
from tests.program import invoke
from tests.scale import exhaustive, in_turn

TAGS = (
    *("cuda:0", "cuda:3", "npu:0", "mlu:0", "mps", "mps:0", "xpu:0", "hpu", "xla:0", "privateuseone:0", "gpu"),
    "cpu:0",
)


def save(content: Any, path: Path, tag: Any, *, legacy: bool = False) -> Path:
    with forged(tagged(tag) if isinstance(tag, str) else tag):
        torch.save(content, path, _use_new_zipfile_serialization=not legacy)
    return path


@pytest.mark.parametrize(("form", "legacy", "tag"), in_turn(["state_dict", "same"], [False, True], TAGS))
def test_a_tag_that_torch_fails_on_is_rewritten(tag: str, legacy: bool, form: Any, tmp_path: Path) -> None:
    state = {"a": torch.ones(3), "b": torch.arange(4)}
    source = save(state, tmp_path / "a.pth", tag, legacy=legacy)
    with pytest.raises(Exception):  # noqa: B017 - each device has an error of its own
        loaded(source)

    report = migrate(source, tmp_path / "b.pth", form=form, to="cpu")

    found = loaded(tmp_path / "b.pth")
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    assert report.retagged == {tag: 2}
    assert report.location == "cpu"


@exhaustive
@pytest.mark.parametrize("form", ["state_dict", "same"])
def test_no_tag_is_left_of_the_device_that_saved_a_file(form: Any, tmp_path: Path) -> None:
    there = real()
    wrapped = [there.file("model", container, how) for how in WRAPPERS for container in ("zip", "legacy")]
    for path in (*there.files(), *wrapped):
        if form == "same" or not path.name.startswith("list-"):
            no_tag_is_left(path, form, tmp_path / path.name)


def no_tag_is_left(path: Path, form: Any, target: Path) -> None:
    report = migrate(path, target, form=form, to="cpu")

    with open_checkpoint(target) as found:
        tensors = [*found.tensors.values(), *found.attributes.values()]
        locations = {info.location for tensor in tensors for info in (tensor.info, *(p for _, p in tensor.info.parts))}
        assert locations == {"cpu"}
    expected = {tensor["device"] for tensor in json.loads(path.with_suffix(".json").read_text())["tensors"]}
    assert set(report.retagged) >= expected - {"cpu"}
    assert "cpu" not in report.retagged


def test_storages_are_counted_by_the_tags_that_torch_finds(of_a_device: OfADevice, tmp_path: Path) -> None:
    for container in ("zip", "legacy"):
        source, seen = of_a_device.file(container=container), list[str]()

        def see(storage: torch.UntypedStorage, tag: str, seen: list[str] = seen) -> torch.UntypedStorage:
            seen.append(tag)
            return storage

        loaded(source, map_location=see)
        report = migrate(source, tmp_path / source.name, to="mps")

        assert report.retagged == {of_a_device.tag: len(seen)}
        assert set(seen) == {of_a_device.tag}
        assert set(tags_of(tmp_path / source.name)) == {"mps"}


def test_tags_are_counted_by_storage_and_by_what_they_were(tmp_path: Path) -> None:
    shared, other, cpu = torch.ones(4), torch.ones(2), torch.ones(1)
    state = {"a": shared, "view": shared[1:], "b": other, "c": cpu, "tied": other}
    source = save(state, tmp_path / "a.pth", mixed([(shared, "cuda:0"), (other, "npu:1")]))

    assert migrate(source, tmp_path / "b.pth", to="cpu").retagged == {"cuda:0": 1, "npu:1": 1}
    assert migrate(source, tmp_path / "c.pth", to="cuda:0").retagged == {"npu:1": 1, "cpu": 1}
    assert migrate(source, tmp_path / "d.pth").retagged == {}


@pytest.mark.parametrize("legacy", [False, True])
def test_devices_inside_objects_follow_and_are_counted(legacy: bool, tmp_path: Path) -> None:
    optimizer = {"state": {0: {"exp_avg": torch.ones(2), "where": torch.device("cuda:1")}}, "param_groups": []}
    content = {
        "model": {"w": torch.ones(2)},
        "optimizer": optimizer,
        "args": argparse.Namespace(device=torch.device("cuda:0"), other=[torch.device("cuda:0"), torch.device("cpu")]),
        "name": "cuda:0",
    }
    source = save(content, tmp_path / "a.pth", "cuda:0", legacy=legacy)

    report = migrate(source, tmp_path / "b.pth", to="cpu")

    found = loaded(tmp_path / "b.pth", weights_only=False)
    assert found["args"].device == torch.device("cpu")
    assert found["args"].other == [torch.device("cpu"), torch.device("cpu")]
    assert found["optimizer"]["state"][0]["where"] == torch.device("cpu")
    assert found["name"] == "cuda:0"  # a text is not a device
    assert report.retagged == {"cuda:0": 4, "cuda:1": 1}


def test_a_safetensors_file_has_no_device_to_rewrite(tmp_path: Path) -> None:
    source = save({"w": torch.ones(2)}, tmp_path / "a.pth", "cuda:0")

    assert migrate(source, tmp_path / "b.safetensors", to="cpu").retagged == {}
    migrate(tmp_path / "b.safetensors", tmp_path / "c.pth", to="cuda:1")

    with open_checkpoint(tmp_path / "c.pth") as found:
        assert found.tensors["w"].info.location == "cuda:1"


# Byte order


def big_endian_zip(tree: dict[str, bytes], storages: dict[str, bytes]) -> bytes:
    members = {"archive/data.pkl": build.pickled(tree), "archive/byteorder": b"big", "archive/version": b"3\n"}
    return build.zip_file(members | {f"archive/data/{key}": data for key, data in storages.items()})


def untyped(key: str, nbytes: int) -> bytes:
    parts = ("storage", build.named("torch.storage", "UntypedStorage"), key, "cuda:0", nbytes)
    return build.ops(parts) + b"Q"


def of_type(stored: bytes, dtype: str, numel: int, offset: int = 0) -> bytes:
    hooks = build.call(build.named("collections", "OrderedDict"))
    function = build.named("torch._utils", "_rebuild_tensor_v3")
    return build.call(function, stored, offset, (numel,), (1,), False, hooks, build.named("torch", dtype))


@pytest.mark.parametrize("form", ["same", "state_dict"])
def test_big_endian_tensors_without_a_typed_storage_are_turned_round(form: Any, tmp_path: Path) -> None:
    values = torch.arange(8, dtype=torch.int32).to(torch.uint16)
    swapped = values.numpy().byteswap().tobytes()
    tree = {"a": of_type(untyped("0", 16), "uint16", 8), "view": of_type(untyped("0", 16), "uint16", 3, 2)}
    (tmp_path / "a.pth").write_bytes(big_endian_zip(tree, {"0": swapped}))

    migrate(tmp_path / "a.pth", tmp_path / "b.pth", form=form, to="cpu")

    found = loaded(tmp_path / "b.pth")
    assert torch.equal(found["a"], values)
    assert torch.equal(found["view"], values[2:5])
    assert found["a"].untyped_storage().data_ptr() == found["view"].untyped_storage().data_ptr()


@each(
    ("name", "other", "fact"),
    [("b", of_type(untyped("0", 16), "uint32", 4), "of two sizes"), ("bare", untyped("1", 16), "does not say of what")],
)
def test_a_big_endian_storage_of_several_things_or_of_nobody_knows_what_is_refused(
    name: str, other: bytes, fact: str, tmp_path: Path
) -> None:
    tree = {"a": of_type(untyped("0", 16), "uint16", 8), name: other}
    (tmp_path / "a.pth").write_bytes(big_endian_zip(tree, {"0": bytes(16), "1": bytes(16)}))

    refused(tmp_path / "a.pth", tmp_path / "b.pth", form="same", kind="unsupported-tensor", match=fact)


def of_three_devices(path: Path, *, legacy: bool = False) -> Path:
    state = {"a": torch.ones(3), "b": torch.ones(4), "c": torch.ones(5), "d": torch.ones(6)}
    tags = ("cuda:0", "cuda:1", "cuda:2", "cuda:1")
    return save(state, path, mixed(zip(state.values(), tags, strict=True)), legacy=legacy)


def tags_of(path: Path) -> list[str]:
    with open_checkpoint(path) as checkpoint:
        return [tensor.info.location for tensor in checkpoint.tensors.values()]


@pytest.mark.parametrize(("form", "legacy"), [("same", False), ("state_dict", True)])
def test_each_device_gets_the_tag_that_a_mapping_has_for_it(form: Any, legacy: bool, tmp_path: Path) -> None:
    path = of_three_devices(tmp_path / "x.pth", legacy=legacy)
    to = {"cuda:1": "cuda:0", "cuda:2": "cpu"}
    seen: list[str] = []

    def see(storage: torch.UntypedStorage, tag: str) -> torch.UntypedStorage:
        seen.append(tag)
        return storage

    report = migrate(path, tmp_path / "y.pth", to=to, form=form)

    assert tags_of(tmp_path / "y.pth") == ["cuda:0", "cuda:0", "cpu", "cuda:0"]
    loaded(tmp_path / "y.pth", map_location=see)
    assert seen == ["cuda:0", "cuda:0", "cpu", "cuda:0"]  # what torch itself is told
    assert (report.retagged, report.location) == ({"cuda:1": 2, "cuda:2": 1}, to)
    assert report.after.devices == {"cuda:0": 3, "cpu": 1}
    assert "cuda:1 -> cuda:0: 2" in str(report)
    assert not report.notes


def test_a_mapping_swaps_devices_at_once(tmp_path: Path) -> None:
    path = of_three_devices(tmp_path / "x.pth")

    migrate(path, tmp_path / "y.pth", to={"cuda:0": "cuda:1", "cuda:1": "cuda:0"})

    assert tags_of(tmp_path / "y.pth") == ["cuda:1", "cuda:0", "cuda:2", "cuda:0"]


def test_a_device_that_the_file_does_not_have_is_refused_unless_it_is_meant(tmp_path: Path) -> None:
    path = of_three_devices(tmp_path / "x.pth")

    to = {"cuda:7": "cpu", "cuda:2": "cpu"}
    error = refused(path, tmp_path / "y.pth", to=to, match=r"nothing in the file was saved on 'cuda:7'")
    assert "It has cuda:0, cuda:1, cuda:2." in str(error.hint)
    report = migrate(path, tmp_path / "y.pth", to=to, allow_unmatched=True)

    assert report.notes == ("nothing in the file was saved on 'cuda:7'",)
    assert report.retagged == {"cuda:2": 1}


NUMBERS, KINDS = "numbered from 0 to 127", "no extension of torch here adds another"


@each(
    ("device", "said"),
    [
        *(("gpu:1", "'cuda:1'"), ("GPU", "'cuda'"), ("cuda0", "'cuda:0'"), ("cpu:0", "'cpu'"), ("cuda:", "'cuda'")),
        *((" cuda:0", "'cuda:0'"), ("cuda: 0", "'cuda:0'"), ("cuda:01", "'cuda:1'")),
        *(("cuda:128", NUMBERS), ("npu:999", NUMBERS), ("cuda:x", NUMBERS), ("xpu:-1", NUMBERS), ("cuda:0,1", NUMBERS)),
        *(("warp:7", KINDS), ("nonsense", KINDS), ("", ""), ("0", ""), ("disk", "cpu, cuda, hpu")),
    ],
)
def test_what_is_no_device_is_refused_with_what_was_meant(device: str, said: str, tmp_path: Path) -> None:
    source = save({"w": torch.ones(2)}, tmp_path / "a.pth", "cpu")

    error = refused(source, tmp_path / "b.pth", to=device, kind="not-a-device")
    assert error.hint
    assert said in error.hint


def test_weights_without_values_are_named_by_whoever_gives_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.save({"w": torch.ones(2, device="meta")}, tmp_path / "in.pth")
    said = "1 tensor on the meta device, without values: w"

    assert load(tmp_path / "in.pth", "cpu")["w"].is_meta
    assert said in caplog.text
    for form in ("state_dict", "dcp"):
        assert said in migrate(tmp_path / "in.pth", tmp_path / form, form=form).notes


def test_a_note_says_that_torch_gives_tensors_on_meta_no_values(tmp_path: Path) -> None:
    source = save({"w": torch.ones(2)}, tmp_path / "a.pth", "cpu")
    target = tmp_path / "b.pth"

    notes = [migrate(source, target, to=to, force=True).notes for to in ("cuda:0", {"cpu": "meta"}, "meta")]

    assert [len(found) for found in notes] == [0, 1, 1]
    assert "map_location='cpu'" in notes[-1][0]
    assert torch.load(target)["w"].is_meta
    assert torch.load(target, map_location="cpu")["w"].tolist() == [1, 1]
    (found,) = check(target).findings
    assert (found.code, found.message) == ("CK126", "torch.load() gives 1 tensor no values, for their tag is meta: w")
    assert (found.command or "").endswith("b.pth --to cpu")


def test_the_command_line_takes_pairs_of_devices(tmp_path: Path) -> None:
    path = of_three_devices(tmp_path / "x.pth")
    target = tmp_path / "y.pth"

    done = invoke(["migrate", str(path), str(target), "--to", "cuda:1=cuda:0", "--to", "cuda:2=cpu"])

    assert (done.exit_code, tags_of(target)) == (0, ["cuda:0", "cuda:0", "cpu", "cuda:0"])
    for given in (["cpu", "cuda:0"], ["cpu", "cuda:1=cpu"]):
        arguments = [word for text in given for word in ("--to", text)]
        refused = invoke(["migrate", str(path), str(tmp_path / "z.pth"), *arguments])
        assert refused.exit_code == 2
        assert f"OLD=NEW for each: {', '.join(given)}" in " ".join(refused.output.split())


@pytest.mark.parametrize("tag", TAGS)
def test_a_result_that_stays_on_a_device_says_so_with_the_option(tag: str, tmp_path: Path) -> None:
    source = save({"model": {"w": torch.ones(2)}, "epoch": 1}, tmp_path / "a.pth", tag)

    def notes(name: str, *options: str) -> str:
        return invoke(["migrate", str(source), str(tmp_path / name), *options]).output

    for number, form in enumerate(("same", "state_dict")):
        said = notes(f"{number}.pth", "--form", form)
        stays = f"tensors stay on {tag}: loading asks for that device, unless map_location says otherwise"
        assert (f"{stays}; for a machine without it, --to cpu" in said) == (tag != "cpu:0")
        assert "stay on" not in notes(f"to{number}.pth", "--form", form, "--to", "cpu")
        assert "stay on" not in notes(f"pairs{number}.pth", "--form", form, "--to", f"{tag}=cuda:1")
    assert "stay on" not in notes("a.safetensors")
