"""The comparisons of the zoo find what is wrong, and nothing where nothing is."""

from __future__ import annotations

import io
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import ckptool
from tests.scale import exhaustive
from tests.zoo import advice, table
from tests.zoo.box import Box, Net
from tests.zoo.compare import Comparison, compare


def compared(box: Box, name: str, scratch: Path) -> Comparison:
    path = box.folder / name
    found = compare(path, name, [one for one in box.expected if one.path == path], scratch)
    assert found is not None
    return found


@pytest.fixture
def box(tmp_path: Path) -> Box:
    (tmp_path / "scratch").mkdir()
    return Box(tmp_path / "files")


def test_a_plain_state_dict_is_equal(box: Box, tmp_path: Path) -> None:
    model = Net()
    box.save("net.pt", model.state_dict(), model)
    found = compared(box, "net.pt", tmp_path / "scratch")
    assert (found.verdict, found.tensors, found.bad_advice) == ("equal", 9, [])


def test_other_weights_than_expected_are_wrong(box: Box, tmp_path: Path) -> None:
    model = Net()
    box.save("net.pt", model.state_dict())
    box.weights("net.pt", {**model.state_dict(), "head.bias": torch.ones(2)})
    found = compared(box, "net.pt", tmp_path / "scratch")
    assert found.verdict == "wrong"
    assert any("load: 1 differ, 'head.bias'" in why for why in found.wrong)


def test_tensors_that_are_not_read_are_wrong(box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    box.save("net.pt", Net().state_dict())
    monkeypatch.setattr(ckptool.LazyTensor, "read", lambda self: bytes(self.nbytes))
    found = compared(box, "net.pt", tmp_path / "scratch")
    assert any("of 9 tensors are not read" in why for why in found.wrong)


def test_what_a_class_adds_in_code_is_refused_and_what_the_file_has_is_not_excused(
    box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = ModuleType("bitsandbytes")  # known to save something else than parameters and buffers
    package.Counting = Counting  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "bitsandbytes", package)
    monkeypatch.setattr(Counting, "__module__", "bitsandbytes")
    box.save("whole.pt", torch.nn.Sequential(Counting(3, 2)))
    found = compared(box, "whole.pt", tmp_path / "scratch")
    assert (found.verdict, found.tensors) == ("refused", 3)
    assert found.refused[0].startswith("load: IncompleteWeights")
    assert "0 (bitsandbytes.Counting)" in found.refused[0]
    monkeypatch.setattr(ckptool.LazyTensor, "read", lambda self: bytes(self.nbytes))
    found = compared(box, "whole.pt", tmp_path / "scratch")
    assert any(why.startswith("2 of 3 tensors are not read") for why in found.wrong)


class Counting(torch.nn.Linear):
    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}features"] = torch.tensor([self.in_features, self.out_features])


def test_files_inside_values_are_opened(box: Box, tmp_path: Path) -> None:
    model = Net()
    inside = io.BytesIO()
    torch.save(model.state_dict(), inside)
    box.path("net.pkl").write_bytes(pickle.dumps({"net": inside.getvalue(), "seed": 3}))
    box.weights("net.pkl", model, member="net")
    found = compared(box, "net.pkl", tmp_path / "scratch")
    assert (found.verdict, found.refused) == ("equal", [])


def test_names_that_only_look_like_those_of_wrappers_are_kept(box: Box, tmp_path: Path) -> None:
    model = torch.nn.Sequential()
    model.module = torch.nn.Linear(3, 2)
    box.save("net.pt", model.state_dict(), model, wrapped=False)
    assert compared(box, "net.pt", tmp_path / "scratch").verdict == "equal"
    box.weights("net.pt", model)
    assert compared(box, "net.pt", tmp_path / "scratch").verdict == "wrong"


def test_a_refusal_is_counted_with_its_reason(box: Box, tmp_path: Path) -> None:
    state = {"w": torch.eye(3).to_sparse()}
    box.save("sparse.pt", state)
    box.weights("sparse.pt", state)
    found = compared(box, "sparse.pt", tmp_path / "scratch")
    assert found.verdict == "refused"
    assert found.refused[0].startswith("migrate safetensors: MigrationRefused:")


def test_what_torch_opens_and_ckptool_does_not_is_unreadable(
    box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ckptool.UnreadableFile("no")

    box.save("net.pt", Net().state_dict())
    monkeypatch.setattr(ckptool, "open_checkpoint", refuse)
    assert compared(box, "net.pt", tmp_path / "scratch").verdict == "unreadable"


def test_advice_that_does_not_help_is_found(box: Box, tmp_path: Path) -> None:
    path = box.save("net.pt", Net())  # a whole model: torch.load() refuses it in any form that keeps it whole
    found = Comparison(path, "net.pt")
    words = ["migrate", str(path), "--form", "same", "again.pt"]
    advice._try(found, "the same again", words, tmp_path / "scratch" / "advice", weights_only=True)
    assert found.bad_advice == ["the same again: torch.load() does not open what it wrote"]
    advice._try(found, "no such thing", ["migrate", "none.pt"], tmp_path / "scratch" / "advice", weights_only=True)
    assert "no such thing: exit 2" in found.bad_advice[1]


@exhaustive
def test_a_row_is_worse_with_one_file_less_that_is_equal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    row = ("torch", "torch", "2", "3", "9", "2", "1", "0", "0", "0")
    page = tmp_path / "README.md"
    page.write_text(f"{table.BEGIN}\n{table.text([row])}\n{table.END}\n")
    monkeypatch.setattr(table, "PAGE", page)
    assert table.worse([row]) == []
    assert table.worse([(*row[:5], "1", "2", "0", "0", "0")])
    assert table.worse([(*row[:9], "1")])
    table.written([(*row[:5], "3", "0", "0", "0", "0")])
    assert "| torch | torch | 2 | 3 | 9 | 3 | 0 | 0 | 0 | 0 |" in page.read_text()
