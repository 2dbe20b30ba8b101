"""What migration refuses rather than writes, and what reading back finds out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors

from ckptool import migrate, open_checkpoint
from ckptool.errors import MigrationRefused, OutputFailed
from tests import build
from tests.scale import in_turn

PLAIN = build.tensor(build.storage())
ON_A_DEVICE = build.call(
    build.named("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"), PLAIN, None, "xla:0", False
)
NUMPY = build.call(
    build.named("numpy.core.multiarray", "_reconstruct"), build.named("numpy", "ndarray"), (0,), build.raw(b"b")
)
NUMPY += build.ops(
    (
        1,
        (4,),
        build.call(build.named("numpy", "dtype"), "f4") + build.ops((3, "<")) + b"b",
        False,
        build.raw(build.floats()),
    )
)
NUMPY += b"b"
FROM_NUMPY = build.call(build.named("torch._utils", "_rebuild_device_tensor_from_numpy"), NUMPY, None, "xla:0", False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def migrated(folder: Path, tree: Any, **options: Any) -> Any:
    """Return the tensors of what a checkpoint with this tree becomes."""
    (folder / "old.pth").write_bytes(build.torch_zip(tree, {"0": build.floats(), "1": b""}))
    migrate(folder / "old.pth", folder / "new.pth", force=True, **options)
    with open_checkpoint(folder / "new.pth") as found:
        return {name: (tensor.info.dtype.name, tensor.info.location) for name, tensor in found.tensors.items()}


@pytest.mark.parametrize("other", [b"", build.safetensors({"v": build.floats()})], ids=["refused", "other names"])
def test_what_the_reference_library_refuses_or_finds_otherwise_is_not_published(
    other: bytes, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numpy")  # without it, nothing is read back by that library
    (folder / "old.pth").write_bytes(build.torch_zip({"w": PLAIN}, {"0": build.floats()}))
    (folder / "other").write_bytes(other)
    opened = safetensors.safe_open
    monkeypatch.setattr(safetensors, "safe_open", lambda _, **options: opened(str(folder / "other"), **options))
    with pytest.raises(OutputFailed, match="the safetensors library") as caught:
        migrate(folder / "old.pth", folder / "new.safetensors")
    assert caught.value.kind == "verification-failed"
    assert not (folder / "new.safetensors").exists()


@pytest.mark.parametrize("made", [ON_A_DEVICE, FROM_NUMPY], ids=["from a CPU tensor", "from numpy"])
def test_a_tensor_that_is_built_on_its_device_is_not_cast_where_it_stands(made: bytes, folder: Path) -> None:
    tree = {"state_dict": {"w": made, "v": PLAIN}, "epoch": 3}

    assert migrated(folder, tree, form="same")["state_dict.w"] == ("float32", "xla:0")
    assert migrated(folder, tree, form="same", to="cuda:1")["state_dict.w"] == ("float32", "cuda:1")
    with pytest.raises(MigrationRefused) as caught:
        migrated(folder, tree, form="same", dtype="float16")
    assert caught.value.kind == "unsupported-cast"
    assert caught.value.hint is not None


def test_a_tensor_of_a_layout_that_nobody_else_writes_is_refused(folder: Path) -> None:
    jagged = build.call(
        build.named("torch._tensor", "_rebuild_from_type_v2"),
        build.named("torch.nested._internal.nested_tensor", "_rebuild_njt"),
        build.named("torch.nested._internal.nested_tensor", "NestedTensor"),
        ({"values": PLAIN, "offsets": PLAIN},),
        None,
    )

    assert "state_dict.w" in migrated(folder, {"state_dict": {"w": jagged}, "epoch": 3}, form="same")
    with pytest.raises(MigrationRefused) as caught:
        migrated(folder, {"w": jagged, "v": PLAIN}, form="state_dict")
    assert caught.value.kind == "unsupported-tensor"


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"dtype": "float31"}, "not-a-dtype"),
        ({"dtype": "float16", "keep_dtype": ["("]}, "bad-pattern"),
        ({"form": "model"}, "no-model"),
        ({"reverse": True}, "contradiction"),
        ({"reverse": True, "form": "state_dict"}, "contradiction"),
        ({"recipe_arguments": {"heads": 2}}, "contradiction"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(options: dict[str, Any], kind: str, folder: Path) -> None:
    with pytest.raises(MigrationRefused) as caught:
        migrated(folder, {"w": PLAIN}, **options)
    assert caught.value.kind == kind


# Nothing left

STUB = build.tensor(build.storage("1", 0), (0,))
WEIGHTS = {"module.conv.weight": PLAIN, "module.conv.bias": PLAIN, "module.norm.weight": PLAIN}
TRAINING = {"state_dict": WEIGHTS, "optimizer": {"state": {0: {"momentum_buffer": PLAIN}}, "param_groups": []}}
ALONE: dict[str, Any] = {"state_dict": WEIGHTS}


def refused(folder: Path, tree: Any, **options: Any) -> MigrationRefused:
    """Return how a migration is refused that ``allow_empty`` allows, and that leaves what is there alone."""
    new = folder / ("new.safetensors" if options.get("form") == "safetensors" else "new.pth")
    (folder / "old.pth").write_bytes(build.torch_zip(tree, {"0": build.floats(), "1": b""}))
    new.write_bytes(b"as it was")
    with pytest.raises(MigrationRefused) as caught:
        migrate(folder / "old.pth", new, force=True, **options)
    with pytest.raises(MigrationRefused):
        migrate(folder / "old.pth", new, force=True, dry_run=True, **options)
    assert new.read_bytes() == b"as it was"
    migrate(folder / "old.pth", new, force=True, allow_empty=True, **options)
    return caught.value


EMPTYING: dict[str, tuple[dict[str, Any], str]] = {
    "include": ({"include": ["zzz*"]}, "include 'zzz*' matches none"),
    "includes": ({"include": ["zzz*", "conv"]}, "include 'zzz*', include 'conv' match none"),
    "exclude": ({"exclude": ["module.*"]}, "exclude 'module.*'"),
    "both": ({"include": ["*.bias"], "exclude": ["*conv*"]}, "include '*.bias', exclude '*conv*'"),
    "renamed": ({"exclude": ["*"], "rename": [("conv", "x")]}, "exclude '*'"),
}


@pytest.mark.parametrize(
    ("form", "tree", "case"), in_turn(["state_dict", "safetensors", "same"], [WEIGHTS, ALONE, TRAINING], EMPTYING)
)
def test_a_migration_that_leaves_no_weights_is_refused(case: str, tree: Any, form: str, folder: Path) -> None:
    options, cause = EMPTYING[case]
    error = refused(folder, tree, form=form, **options)

    assert (error.kind, error.message) == ("no-tensor-left", f"none of the 3 tensors is left: {cause}")
    assert error.hint is not None


@pytest.mark.parametrize("form", ["state_dict", "safetensors"])
def test_weights_that_are_dropped_by_their_paths_are_counted(form: str, folder: Path) -> None:
    error = refused(folder, {"w": PLAIN, "v": PLAIN, "n": 3}, form=form, drop=["w", "v"], drop_unsupported=True)

    assert error.message == "none of the 2 tensors is left: drop 'w', drop 'v', drop_unsupported"


def test_everything_can_be_dropped_but_the_last_tensor(folder: Path) -> None:
    error = refused(folder, ALONE | {"epoch": 3}, form="same", drop=["state_dict"])
    assert error.message == "none of the 3 tensors is left: drop 'state_dict'"

    assert migrated(folder, TRAINING, form="same", drop=["state_dict"])


def test_a_format_that_can_hold_no_tensor_of_them_is_refused(folder: Path) -> None:
    made = build.call(build.named("torch._utils", "_rebuild_meta_tensor_no_storage"), None, (3,), (1,), False)
    tree = {"w": made.replace(b"N", build.named("torch", "float32"), 1), "v": ON_A_DEVICE}
    error = refused(folder, tree, form="safetensors", drop_unsupported=True, include=["w"])

    assert error.message == "none of the 2 tensors is left: include 'w', drop_unsupported"


def test_the_nearest_names_of_a_glob_that_matches_none_are_named(folder: Path) -> None:
    error = refused(folder, WEIGHTS, include=["norm.*", "*.bias"])

    assert (error.kind, error.message) == ("no-such-name", "include 'norm.*' matches none of the 3 names")
    near = "The nearest names are module.norm.weight, module.conv.weight, module.conv.bias."
    assert error.hint == f"{near} If this is meant, say so with `allow_unmatched=True`."


@pytest.mark.parametrize("form", ["state_dict", "same"])
def test_globs_and_rules_that_change_nothing_are_noted_if_they_may(form: Any, folder: Path) -> None:
    (folder / "old.pth").write_bytes(build.torch_zip(TRAINING | {"n": 1}, {"0": build.floats()}))
    rules = [("nothing", "x"), ("conv", "fold"), ("fold", "c")]
    options: dict[str, Any] = {"form": form, "exclude": ["zzz*", "*.bias"], "rename": rules, "include": ["*conv*"]}
    with pytest.raises(MigrationRefused) as caught:
        migrate(folder / "old.pth", folder / "b", **options)
    assert (caught.value.kind, caught.value.option) == ("no-such-name", "allow_unmatched")
    report = migrate(folder / "old.pth", folder / "b", allow_unmatched=True, **options)

    effects = [note for note in report.notes if "matches" in note or "changes" in note]
    assert effects == ["exclude 'zzz*' matches no name", "rename 'nothing=x' changes no name"]
    with open_checkpoint(folder / "b") as found:
        assert found.weights is not None
        assert list(found.weights) == ["module.c.weight"]


@pytest.mark.parametrize("form", ["state_dict", "safetensors"])
def test_weights_without_elements_are_refused(form: str, folder: Path) -> None:
    stubs = {"module": dict.fromkeys("abcd", STUB), "param_shapes": [3]}
    error = refused(folder, stubs, form=form)

    assert (error.kind, error.message) == ("no-elements", "all 4 tensors of the weights have no elements")
    assert migrated(folder, stubs | {"scale": PLAIN}, form="same", allow_missing=True)["scale"] == ("float32", "cpu")
    refused(folder, {"w": PLAIN, "stub": STUB}, form="same", exclude=["w"])


def test_a_file_that_holds_no_tensors_is_migrated_as_before(folder: Path) -> None:
    assert migrated(folder, {"epoch": 3}, form="same") == {}
    (folder / "stubs.pth").write_bytes(build.torch_zip({"module": {"a": STUB}, "n": 1}, {"1": b""}))
    notes = migrate(folder / "stubs.pth", folder / "b.pth", form="same").notes
    assert "the weights have no elements: their values may be in other files" in notes
