"""A ``.pt2`` file's tensors are the exported program's state dict and constants."""

from __future__ import annotations

import io
import json
import zipfile
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from ckptool import CkptoolError, open_checkpoint
from tests.against_torch import oracle

if TYPE_CHECKING:
    from pathlib import Path

# torch's exporter warns about itself, and differently from release to release.
pytestmark = pytest.mark.filterwarnings("ignore")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        whole = torch.arange(40.0).reshape(5, 8)
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(4)
        self.view = nn.Parameter(whole[1:4, 2:6])
        self.turned = nn.Parameter(torch.arange(12, dtype=torch.bfloat16).reshape(3, 4).t(), requires_grad=False)
        self.register_buffer("kept", torch.arange(4, dtype=torch.int64))
        self.register_buffer("forgotten", torch.full((4,), 0.5, dtype=torch.float64), persistent=False)
        self.register_buffer("nothing", torch.zeros(0, 4))
        self.constant = torch.tensor([1.0, 2.0, 3.0, 4.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embedding(x)) + self.kept + self.forgotten + self.constant
        x = x + self.view.sum() + self.turned.sum() + self.nothing.sum() + torch.tensor([4.0])
        return self.head(x.float())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.export.ExportedProgram]:
    path = tmp_path_factory.mktemp("pt2") / "my.model.pt2"
    torch.export.save(torch.export.export(Net().eval(), (torch.arange(5),)), path)
    return path, torch.export.load(path)


def test_the_state_dict_is_the_programs_own_in_the_files_order(
    saved: tuple[Path, torch.export.ExportedProgram],
) -> None:
    path, program = saved
    with zipfile.ZipFile(path) as archive:
        (config,) = (name for name in archive.namelist() if name.endswith("_weights_config.json"))
        names = list(json.loads(archive.read(config))["config"])

    with open_checkpoint(path) as checkpoint:
        tensors = checkpoint.tensors
        assert (checkpoint.format, checkpoint.form) == ("pt2", "model")
        assert list(tensors) == names
        assert sorted(tensors) == sorted(program.state_dict)
        for name, tensor in program.state_dict.items():
            oracle.assert_same_tensor(tensors[name], tensor)
            assert (tensors[name].info.kind == "parameter") == isinstance(tensor, nn.Parameter)
        assert checkpoint.weights is not None
        assert sorted(checkpoint.weights) == sorted(program.state_dict)
    assert tensors["embedding.weight"].info.storage == tensors["head.weight"].info.storage
    assert tensors["embedding.weight"].info.storage != tensors["norm.weight"].info.storage


def test_constants_and_non_persistent_buffers_are_attributes(
    saved: tuple[Path, torch.export.ExportedProgram],
) -> None:
    path, program = saved

    found = {name.removeprefix("constants."): tensor for name, tensor in open_checkpoint(path).attributes.items()}
    assert sorted(found) == sorted(program.constants)
    assert "forgotten" in found
    for name, tensor in program.constants.items():
        assert found[name].read() == oracle.tensor_bytes(tensor)
        assert f"torch.{found[name].info.dtype}" == str(tensor.dtype)


@pytest.mark.parametrize("suffix", [".pt", ".json"])
@pytest.mark.parametrize("folder", ["", "program/"])
def test_the_layout_before_2_8_reads_as_its_two_inner_files(suffix: str, folder: str) -> None:
    state, constants = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.ones(2)}, {"c": torch.zeros(3)}
    data = old_layout({"state_dict": state, "constants": constants}, suffix, folder)

    with open_checkpoint(data) as checkpoint:
        assert (checkpoint.format, checkpoint.form) == ("pt2", "model")
        oracle.assert_same(checkpoint, state)
        assert checkpoint.attributes["constants.c"].read() == bytes(12)


def test_the_layout_before_2_8_may_have_no_constants_but_no_program_is_without_a_state_dict() -> None:
    assert list(open_checkpoint(old_layout({"state_dict": {"w": torch.ones(2)}}, ".pt", "")).tensors) == ["w"]
    with pytest.raises(CkptoolError) as caught:
        open_checkpoint(old_layout({}, ".pt", ""))
    assert caught.value.kind == "malformed-pt2"


def old_layout(parts: dict[str, dict[str, torch.Tensor]], suffix: str, folder: str) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr(f"{folder}version", "8.2")
        archive.writestr(f"{folder}serialized_exported_program.json", "{}")
        for name, content in parts.items():
            inner = io.BytesIO()
            torch.save(content, inner)
            archive.writestr(f"{folder}serialized_{name}{suffix}", inner.getvalue())
    return stream.getvalue()


def test_two_programs_in_one_file_are_two_state_dicts(tmp_path: Path) -> None:
    from torch.export.pt2_archive._package import package_pt2

    programs = {
        "first": torch.export.export(nn.Linear(2, 3), (torch.zeros(1, 2),)),
        "second": torch.export.export(nn.Linear(3, 2), (torch.zeros(1, 3),)),
    }
    package_pt2(tmp_path / "two.pt2", exported_programs=programs)

    with open_checkpoint(tmp_path / "two.pt2") as checkpoint:
        assert [group.key for group in checkpoint.state_dicts] == ["first", "second"]
        assert list(checkpoint.tensors) == ["first.weight", "first.bias", "second.weight", "second.bias"]
        for group in checkpoint.state_dicts:
            for name, tensor in programs[group.key].state_dict.items():
                oracle.assert_same_tensor(group[name], tensor)


def test_weights_of_a_tensor_subclass_are_read_from_their_own_pickle(tmp_path: Path) -> None:
    program = torch.export.export(nn.Linear(2, 3), (torch.zeros(1, 2),))
    program.state_dict["weight"] = nn.Parameter(torch.arange(6.0).reshape(3, 2).as_subclass(Odd))
    torch.export.save(program, tmp_path / "odd.pt2")

    with open_checkpoint(tmp_path / "odd.pt2") as checkpoint:
        assert checkpoint.tensors["weight"].read() == oracle.tensor_bytes(torch.arange(6.0))
        assert checkpoint.tensors["weight"].info.subclass is not None


class Odd(torch.Tensor):
    """A class that torch's exporter pickles."""
