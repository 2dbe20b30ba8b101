"""The comparisons of the zoo find what is wrong, and nothing where nothing is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptool
from tests.zoo import advice
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


def test_a_refusal_is_counted_with_its_reason(box: Box, tmp_path: Path) -> None:
    state = {"w": torch.eye(3).to_sparse()}
    box.save("sparse.pt", state)
    box.weights("sparse.pt", state)
    found = compared(box, "sparse.pt", tmp_path / "scratch")
    assert found.verdict == "refused"
    assert found.refused[0].startswith("migrate safetensors: MigrationRefused:")


def test_advice_that_does_not_help_is_found(box: Box, tmp_path: Path) -> None:
    path = box.save("net.pt", Net())  # a whole model: torch.load() refuses it in any form that keeps it whole
    found = Comparison(path, "net.pt")
    words = ["migrate", str(path), "--form", "same", "again.pt"]
    advice._try(found, "the same again", words, tmp_path / "scratch" / "advice", weights_only=True)
    assert found.bad_advice == ["the same again: torch.load() does not open what it wrote"]
    advice._try(found, "no such thing", ["migrate", "none.pt"], tmp_path / "scratch" / "advice", weights_only=True)
    assert "no such thing: exit 2" in found.bad_advice[1]
