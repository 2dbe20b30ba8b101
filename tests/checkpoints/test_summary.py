"""What tensors come to, whatever they share: as torch has it, and as the same tensors in other files come to."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool import open_checkpoint
from ckptool.checkpoints.summary import Summary, summarise
from tests.program import invoke

BASE = torch.arange(64, dtype=torch.float32)


def summary(tensors: dict[str, Any]) -> Summary:
    stream = io.BytesIO()
    torch.save(tensors, stream)
    with open_checkpoint(stream.getvalue()) as checkpoint:
        return summarise(checkpoint)


@pytest.mark.parametrize(
    ("tensors", "tied", "numel", "nbytes"),
    [
        ({"a": torch.zeros(2, 3), "b": torch.zeros(4)}, 0, 10, 40),
        ({"a": BASE, "b": BASE, "c": torch.ones(4)}, 1, 68, 272),
        ({"a": BASE[:8], "b": BASE[8:]}, 0, 64, 256),
        ({"a": BASE[:8], "b": BASE}, 0, 72, 256),
        ({"a": (empty := torch.zeros(0, 3)), "b": empty}, 1, 0, 0),
        ({"a": torch.zeros(0), "b": torch.ones(4)}, 0, 4, 16),
        ({"a": torch.zeros(3, device="meta"), "b": torch.ones(4)}, 0, 7, 16),
        ({"a": torch.eye(3).to_sparse(), "b": torch.ones(4)}, 0, 13, 76),
    ],
    ids=["apart", "tied", "views", "view-and-whole", "empty-tied", "empty", "meta", "sparse"],
)
def test_shared_bytes_and_tied_elements_count_once(tensors: dict[str, Any], tied: int, numel: int, nbytes: int) -> None:
    found = summary(tensors)

    assert (found.tensors, found.tied, found.numel, found.nbytes) == (len(tensors), tied, numel, nbytes)


@pytest.mark.parametrize(
    ("tensor", "is_plain"),
    [
        (torch.ones(2), True),
        (torch.tensor(1.0), True),
        (torch.nn.Parameter(torch.ones(2)), True),
        (torch.ones(2, 0), False),
        (torch.eye(2).to_sparse(), False),
    ],
)
def test_what_is_plain_has_elements_in_strided_memory(tensor: Any, is_plain: bool) -> None:
    assert summary({"w": tensor, "b": torch.ones(1)}).is_plain == is_plain


def head(path: Path) -> dict[str, str]:
    """Return the facts that `inspect -q` prints, by their labels."""
    lines = invoke(["inspect", "-q", str(path)]).stdout.splitlines()[1:]
    return {line[2:15].strip(): line[15:] for line in lines if line[2:15].strip()}


def brief(path: Path) -> list[str]:
    """Return the counts that `inspect -b` prints of a file: tensors, parameters, elements."""
    return invoke(["inspect", "-b", str(path)]).stdout.splitlines()[1].split()[3:6]


NET = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
"""18 elements in the linear layer, 12 in the norm, and its counter."""
ADAM = torch.optim.Adam(NET.parameters())
NET(torch.ones(2, 4)).sum().backward()
ADAM.step()
SAVED: dict[str, tuple[Any, int | None, int]] = {
    "state dict": (NET.state_dict(), 28, 28),
    "whole model": (NET, 28, 28),
    "training": ({"epoch": 3, "model": NET.state_dict(), "optimizer": ADAM.state_dict()}, 28, 28 + 2 * 21 + 4),
    "optimizer alone": (ADAM.state_dict(), None, 2 * 21 + 4),
    "two models": ({"generator": NET.state_dict(), "critic": NET.state_dict() | {"x": torch.ones(2)}}, None, 30),
    "averaged beside": (
        {"state_dict": NET.state_dict(), "ema": {name: one + 1 for name, one in NET.state_dict().items()}},
        28,
        56,
    ),
    "tied": ({"model": {"a": NET[0].weight, "b": NET[0].weight}, "best": torch.ones(5)}, 12, 17),
}


@pytest.mark.parametrize("which", SAVED)
def test_parameters_are_those_of_the_weights_and_elements_are_all(which: str, tmp_path: Path) -> None:
    content, parameters, elements = SAVED[which]
    path = tmp_path / "model.pth"
    torch.save(content, path)

    found = json.loads(invoke(["inspect", "--json", str(path)]).stdout)["summary"]
    assert (found["parameters"], found["numel"]) == (parameters, elements)
    row = ckptool.fleet.row(str(path))
    assert (row["parameters"], row["numel"]) == (parameters, elements)
    assert brief(path)[1:] == ["-" if parameters is None else str(parameters), str(elements)]
    said = head(path)["tensors"]
    if parameters == elements:
        assert f"; {parameters} parameters, " in said
    elif parameters is None:
        assert f"; {elements} elements, " in said
        assert "parameter" not in said
    else:
        assert f"; {parameters} parameters in the weights, {elements} elements in all, " in said
    text = invoke(["inspect", "-q", str(path)]).stdout
    assert not re.search(r"optimizer, \d+ tensors, \d+ parameters", text)


@pytest.mark.parametrize(
    ("names", "prefix", "under"),
    [
        (["fc.weight", "fc.bias"], None, "fc."),
        (["transformer.h.0.w", "transformer.h.1.w"], None, "transformer."),
        (["module.fc.weight", "module.fc.bias"], "module.", "fc."),
        (["module._orig_mod.a.w", "module._orig_mod.b.w"], "module._orig_mod.", None),
        (["model.a", "model.b"], None, "model."),
        (["a", "b"], None, None),
    ],
)
def test_a_prefix_is_what_a_wrapper_added(
    names: list[str], prefix: str | None, under: str | None, tmp_path: Path
) -> None:
    torch.save({name: torch.ones(2) for name in names}, tmp_path / "model.pth")
    facts = head(tmp_path / "model.pth")

    assert (facts.get("prefix"), facts.get("all under")) == (prefix, under)
    path = tmp_path / "model.pth"
    done = invoke(["migrate", str(path), str(tmp_path / "to.safetensors")]).stdout
    assert ("\n  prefix " in done) == (prefix is not None)
    assert ("\n  all under " in done) == (under is not None)
