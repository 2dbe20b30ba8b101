"""The report: the file before and the file after are what ``inspect`` says of them, and a dry run says the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptool import migrate, open_checkpoint
from tests.migration.refused import refused
from tests.program import invoke
from tests.scale import in_turn

VALID = Path(__file__).parents[2] / "fixtures" / "valid"

SOURCES = (
    "checkpoint-ddp-forged-cuda0-zip.pth",
    "ema-compiled-forged-cuda0-legacy.pth",
    "lenet-model-forged-cuda0-legacy.pth",
    "model-plain-cpu-legacy.pth",
    "views-cpu-zip.pth",
    "state-dict-float8-e4m3fn-cpu-zip.pth",
    "device-meta-zip.pth",
    "device-forged-meta-zip.pth",
    "torchscript-script-cpu.pt",
    "safetensors-tied-cpu.safetensors",
)
WAYS: dict[str, dict[str, Any]] = {
    "same": {"form": "same", "to": "cuda:1", "strip_wrappers": True},
    "cast": {"form": "same", "dtype": "float16", "saturate": True},
    "state_dict": {"form": "state_dict", "strip_module": True, "to": "cpu"},
    "safetensors": {"form": "safetensors", "drop_unsupported": True, "allow_empty": True},
}


def facts_of(path: Path) -> dict[str, Any]:
    found = json.loads(invoke(["inspect", "--json", path]).stdout)
    facts = ("tensors", "tied", "numel", "devices", "dtypes", "prefixes")
    return {name: found[name] for name in ("format", "form", "file_nbytes")} | {
        name: found["summary"][name] for name in facts
    }


def as_json(facts: Any) -> Any:
    return json.loads(json.dumps(facts._asdict()))


CASES = [case for case in in_turn(WAYS, SOURCES) if "torchscript" not in case[1] or case[0] != "same"]


@pytest.mark.parametrize(("way", "name"), CASES)
def test_both_sides_are_what_inspect_says_of_the_files(name: str, way: str, tmp_path: Path) -> None:
    target = tmp_path / "out"

    plan = migrate(VALID / name, target, dry_run=True, **WAYS[way])
    assert not target.exists()
    done = migrate(VALID / name, target, **WAYS[way])

    assert as_json(done.before) == facts_of(VALID / name)
    assert as_json(done.after) == facts_of(target)
    assert (plan.before, plan.after, plan.renamed, plan.dropped) == (
        done.before,
        done.after,
        done.renamed,
        done.dropped,
    )


@pytest.mark.parametrize("legacy", [False, True])
def test_names_of_a_model_whose_wrapper_goes_are_reported_and_held(legacy: bool, tmp_path: Path) -> None:
    model = nn.Sequential(nn.DataParallel(nn.Sequential(nn.Linear(2, 2), nn.DataParallel(nn.BatchNorm1d(2)))))
    content = {"net": nn.DataParallel(model), "epoch": 1}
    torch.save(content, tmp_path / "a.pth", _use_new_zipfile_serialization=not legacy)

    report = migrate(tmp_path / "a.pth", tmp_path / "b.pth", strip_module=True)

    with open_checkpoint(tmp_path / "b.pth") as found:
        names = list(found.tensors)
    assert dict(report.renamed)["net.module.0.module.1.module.running_mean"] == "net.0.1.running_mean"
    assert [new for _, new in report.renamed] == names
    assert (report.before.prefixes, report.after.prefixes) == (("module.", "0."), ("0.",))


NOTES: dict[str, tuple[str, dict[str, Any], str]] = {
    "training": ("checkpoint-plain-cpu-zip.pth", {"form": "state_dict"}, "training cannot be resumed"),
    "optimizer": ("checkpoint-plain-cpu-zip.pth", {"drop": ["optimizer"]}, "training cannot be resumed"),
    "class": ("lenet-model-forged-cuda0-legacy.pth", {"form": "state_dict"}, "build ckptool.reference.nets.LeNet"),
    "source": ("lenet-model-forged-cuda0-legacy.pth", {}, "the source of 3 classes"),
    "program": ("torchscript-script-cpu.pt", {"form": "state_dict"}, "the program in the torchscript file"),
    "tags": ("state-dict-plain-cpu-zip.pth", {"form": "safetensors", "to": "cuda"}, "no device tags"),
    "prefix": ("state-dict-plain-cpu-zip.pth", {"strip_module": True}, "nothing was stripped"),
    "same tags": ("state-dict-plain-cpu-zip.pth", {"to": "cpu"}, "no device tag is changed"),
    "left behind": ("checkpoint-plain-cpu-zip.pth", {"exclude": "head.*"}, "'optimizer' stays, with states for"),
    "dropped": ("checkpoint-plain-cpu-zip.pth", {"drop": ["model.norm.bias"]}, "'optimizer' stays, with states for"),
}


@pytest.mark.parametrize("note", NOTES)
def test_what_will_not_be_possible_is_said_beforehand(note: str, tmp_path: Path) -> None:
    name, options, words = NOTES[note]
    plan = migrate(VALID / name, tmp_path / "out", dry_run=True, **options)
    whole = migrate(VALID / "state-dict-plain-cpu-zip.pth", tmp_path / "out", dry_run=True)

    assert [words in said for said in plan.notes].count(True) == 1
    assert whole.notes == ()


def test_weights_that_no_optimizer_has_states_for_may_go(tmp_path: Path) -> None:
    plan = migrate(VALID / "checkpoint-plain-cpu-zip.pth", tmp_path / "x", exclude="*.running_*", dry_run=True)
    assert not any("'optimizer' stays" in note for note in plan.notes)


def test_names_that_are_not_there_are_not_changed_in_silence(tmp_path: Path) -> None:
    torch.save({"epoch": 1}, tmp_path / "x.pth")
    assert migrate(tmp_path / "x.pth", add_prefix="net.", dry_run=True).notes[0].startswith("no name is changed")


class Later(nn.Module):
    _version = 3

    def __init__(self, own: int | None = None) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        if own is not None:
            self._version = own


@pytest.mark.parametrize("form", ["state_dict", "safetensors"])
def test_versions_of_classes_that_no_file_has_are_assumed_with_a_note(form: Any, tmp_path: Path) -> None:
    model = nn.Sequential(Later(), nn.DataParallel(Later(own=7)), nn.BatchNorm1d(2))
    torch.save({"model": model}, tmp_path / "whole.pth")
    report = migrate(tmp_path / "whole.pth", tmp_path / "out", form=form)
    migrate(report.target, tmp_path / "again.pth", form="state_dict")
    written = {path: facts["version"] for path, facts in torch.load(tmp_path / "again.pth")._metadata.items()}
    expected = {path: facts["version"] for path, facts in model.state_dict()._metadata.items()}
    assert written == {**expected, "0": 1}
    (note,) = [note for note in report.notes if "version" in note]
    assert note.startswith(f"the file does not say of which version {__name__}.Later was: it is written as 1")


def test_versions_that_are_known_need_no_note(tmp_path: Path) -> None:
    torch.save(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)), tmp_path / "whole.pth")
    torch.save(Later().state_dict(), tmp_path / "plain.pth")
    for name in ("whole.pth", "plain.pth"):
        assert not any("version" in note for note in migrate(tmp_path / name, form="state_dict", dry_run=True).notes)
    torch.save(Later(own=2), tmp_path / "own.pth")
    assert not any("version" in note for note in migrate(tmp_path / "own.pth", form="state_dict", dry_run=True).notes)


@pytest.mark.parametrize("way", [{"form": "same"}, {"form": "dcp"}], ids=str)
def test_a_dry_run_is_refused_where_the_folder_of_the_result_is_not_there(way: dict[str, Any], tmp_path: Path) -> None:
    source = VALID / "state-dict-plain-cpu-zip.pth"
    for dry_run in (False, True):
        refused(source, tmp_path / "absent" / "x", dry_run=dry_run, **way, kind="no-folder", match="no such folder")
