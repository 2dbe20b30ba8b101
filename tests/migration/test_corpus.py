"""
Files that strangers published, into every form. Skipped where the folder is not there.

Each succeeds, or is refused by name for a reason that is true of the file: the reasons are spelled out here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from ckptool import Checkpoint, CkptoolError, LazyTensor, MigrationReport, migrate, open_checkpoint
from ckptool.errors import MigrationRefused, WeightsNotFound
from tests.against_torch import oracle
from tests.corpus.files import FOLDER, MARKS, ROWS, name_of
from tests.migration.test_round_trips import loaded
from tests.scale import some

pytestmark = MARKS


def opened(row: dict[str, Any]) -> Checkpoint:
    try:
        return open_checkpoint(FOLDER / row["file"])
    except CkptoolError as error:
        pytest.skip(f"not openable: {error.kind}")


def attempt(row: dict[str, Any], target: Path, **options: Any) -> tuple[MigrationReport | None, str | None]:
    """Return the report, or the kind of the refusal, after which nothing may lie in the folder."""
    try:
        return migrate(FOLDER / row["file"], target, to="cpu", **options), None
    except (MigrationRefused, WeightsNotFound) as error:
        left, refused = list(target.parent.iterdir()), error.kind
    assert left == []
    return None, refused


def is_ambiguous(source: Checkpoint) -> bool:
    """Say whether no state dict stands out: none that is a model's, or several."""
    return source.weights is None


def not_plain(weights: Mapping[str, LazyTensor]) -> list[str]:
    infos = {name: tensor.info for name, tensor in weights.items()}
    return [name for name, info in infos.items() if info.layout != "strided" or info.storage is None or info.parts]


@pytest.mark.parametrize("row", some(ROWS, 10), ids=name_of)
def test_a_state_dict_opens_plainly_and_is_equal_to_the_source(row: dict[str, Any], tmp_path: Path) -> None:
    with opened(row) as source:
        target = tmp_path / "x.pth"
        _, refused = attempt(row, target, form="state_dict")
        assert (refused == "which-weights") == is_ambiguous(source)
        if refused:
            return

        assert source.weights is not None
        found = dict(oracle.named_tensors(loaded(target, weights_only=True)))
        tied = {name: kept for name, kept in source.metadata.items() if kept in source.weights}
        deeper = set(found) - set(source.weights) - set(tied)  # in tuples: the packed weights of quantised layers
        head = f"{source.weights.key}." if source.weights.key else ""
        assert {head + name for name in deeper} <= set(source.tensors)
        assert [name for name in found if name not in deeper] == list(source.weights) or tied
        assert set(source.weights) | set(tied) <= set(found)
        for name, tensor in source.weights.items():
            info = tensor.info
            assert found[name].device.type == ("meta" if info.location == "meta" else "cpu")
            assert (str(found[name].dtype), tuple(found[name].shape)) == (f"torch.{info.dtype}", info.shape)
            if info.layout == "strided" and info.storage is not None:
                assert tensor.read() == oracle.tensor_bytes(found[name]), name


@pytest.mark.parametrize("row", some(ROWS, 10), ids=name_of)
def test_a_safetensors_file_opens_in_the_reference_reader_and_is_equal_to_the_source(
    row: dict[str, Any], tmp_path: Path
) -> None:
    with opened(row) as source:
        target = tmp_path / "x.safetensors"
        report, refused = attempt(row, target)
        assert refused in (None, "which-weights", "unsupported-entries")
        assert (refused == "which-weights") == is_ambiguous(source)
        if refused == "unsupported-entries":
            report, _ = attempt(row, target, drop_unsupported=True, allow_empty=True)
            assert report is not None
            assert report.dropped
        if report is None:
            return

        assert source.weights is not None
        with safe_open(target, framework="pt") as reference:
            found = {name: reference.get_tensor(name) for name in reference.keys()}  # noqa: SIM118 - no mapping
        for name, tensor in source.weights.items():
            kept = report.tied.get(name, name)
            if kept in found:
                assert str(found[kept].dtype) == f"torch.{tensor.info.dtype}"
                assert tensor.read() == oracle.tensor_bytes(found[kept]), name
            else:
                assert name in not_plain(source.weights) or name.startswith(report.dropped)
        assert set(found) <= set(source.weights)


@pytest.mark.parametrize("row", some(ROWS, 10), ids=name_of)
def test_the_same_form_keeps_everything(row: dict[str, Any], tmp_path: Path) -> None:
    with opened(row) as source:
        target = tmp_path / "x"
        report, refused = attempt(row, target, form="same")
        assert (refused == "no-tree") == (source.format in ("torchscript", "pt2"))
        if report is None:
            return

        with open_checkpoint(target) as found:
            assert {str(one) for one in found.globals} >= {
                str(one) for one in source.globals if "torch" not in one.module
            }
            assert [path for path, _ in found.extras] == [path for path, _ in source.extras]
            for ours, theirs in ((found.tensors, source.tensors), (found.attributes, source.attributes)):
                assert list(ours) == list(theirs) or report.form == "safetensors"
                assert set(ours) == set(theirs)
                for name, tensor in theirs.items():
                    assert ours[name].info.location in ("cpu", "meta")
                    if tensor.info.storage is not None:
                        assert ours[name].read() == tensor.read(), name


@pytest.mark.parametrize(
    "row",
    some([row for row in ROWS if row["torch_weights_only"] == "ok" and row["container"] != "safetensors"], 10),
    ids=name_of,
)
def test_what_torch_opened_with_a_map_location_it_opens_without(row: dict[str, Any], tmp_path: Path) -> None:
    before = loaded(FOLDER / row["file"], map_location="cpu", weights_only=True)
    target = tmp_path / "x.pth"
    _, refused = attempt(row, target, form="same")
    assert refused in (None, "no-tree")
    if refused:
        return

    after = loaded(target, weights_only=True)
    wanted, found = (dict(oracle.named_tensors(tree)) for tree in (before, after))
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert found[name].stride() == tensor.stride()
        assert oracle.tensor_bytes(found[name]) == oracle.tensor_bytes(tensor), name
    assert oracle.torch_ties(list(found.values())) == oracle.torch_ties(list(wanted.values()))
    assert getattr(after, "_metadata", None) == getattr(before, "_metadata", None)
