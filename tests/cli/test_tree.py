"""The tree of names: totals that are those of the tensors, and layers that are alike told once."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.program import run


class Block(nn.Module):
    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=bias)
        self.norm = nn.LayerNorm(8)


def tree(model: nn.Module | dict[str, torch.Tensor], tmp_path: Path, *options: str) -> list[str]:
    path = tmp_path / "model.pth"
    torch.save(model if isinstance(model, dict) else model.state_dict(), path)
    return run("inspect", path, *(options or ["--tree"])).output.partition("\n\n")[2].splitlines()


def test_layers_that_are_alike_are_one_line(tmp_path: Path) -> None:
    lines = tree(nn.ModuleDict({"layers": nn.ModuleList([Block() for _ in range(12)])}), tmp_path, "--tree")

    assert lines[:3] == [
        "layers  48 tensors, 1,056 elements, 4.12 KiB, float32",
        "  0–11  12 × 4 tensors, 88 elements, 352 B, float32",
        "    linear  2 tensors, 72 elements, 288 B, float32",
    ]
    assert len(lines) == 8


def test_a_layer_that_differs_is_shown_as_itself(tmp_path: Path) -> None:
    blocks = [Block(bias=number != 5) for number in range(12)]
    blocks[8].to(torch.float16)
    lines = tree(nn.Sequential(*blocks), tmp_path, "--depth", "1")

    assert [line.split()[0] for line in lines] == ["0–4", "5", "6–7", "8", "9–11"]
    assert "float16" in lines[3]


def test_nothing_is_folded_when_that_is_asked_for(tmp_path: Path) -> None:
    lines = tree(nn.Sequential(Block(), Block()), tmp_path, "--tree", "--no-fold")

    assert [line.split()[0] for line in lines if not line.startswith(" ")] == ["0", "1"]


def test_numbers_that_are_not_neighbours_stay_apart(tmp_path: Path) -> None:
    lines = tree({f"{name}.w": torch.ones(2) for name in ("0", "2", "3", "03", "4", "x")}, tmp_path, "--depth", "1")

    assert [line.split()[0] for line in lines] == ["0.w", "2–3.w", "03.w", "4.w", "x.w"]


def test_totals_are_those_of_all_tensors(tmp_path: Path) -> None:
    model = nn.Sequential(Block(), nn.Sequential(Block(bias=False), nn.BatchNorm1d(3)))
    lines = tree(model, tmp_path, "--depth", "1", "--no-fold")
    numbers = [int(found.replace(",", "")) for line in lines for found in re.findall(r"([\d,]+) elements", line)]

    assert sum(numbers) == sum(tensor.numel() for tensor in model.state_dict().values())


def test_what_is_tied_counts_once_in_a_total(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = nn.ModuleDict({"embedding": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
            self.inside["head"].weight = self.inside["embedding"].weight
            self.copy = nn.Linear(3, 5, bias=False)
            self.copy.weight = self.inside["head"].weight

    lines = tree(Tied(), tmp_path, "--tree")
    assert lines[0] == "inside  2 tensors, 15 elements, 60 B, float32"
    assert lines[1].startswith("  embedding.weight  [5, 3]")


ORDERS: dict[str, Callable[[list[str]], list[str]]] = {
    "as text": sorted,
    "backwards": lambda names: names[::-1],
    "shuffled": lambda names: random.Random(1).sample(names, len(names)),
}


@pytest.mark.parametrize(("order", "head"), list(zip(ORDERS, ["layers", "model.decoder.blocks", ""], strict=True)))
def test_equal_layers_are_one_line_in_any_order_of_the_file(order: str, head: str, tmp_path: Path) -> None:
    names = [
        f"{head}.{at}.{one}".lstrip(".")
        for at in range(112)
        for one in ("a.weight", "a.bias", "experts.0.w", "experts.1.w")
    ]
    sizes = {"weight": (3, 2), "bias": (2,), "w": (4,)}
    weights = {name: torch.ones(sizes[name.rpartition(".")[2]]) for name in ORDERS[order](names)}
    lines = tree({**weights, "embedding": torch.ones(2)}, tmp_path)

    assert any("0–111  112 × 4 tensors, 16 elements" in line for line in lines)
    assert len(lines) <= 8


def test_names_are_sorted_as_people_sort_them(tmp_path: Path) -> None:
    names = ["b.10", "b.9", "b.1.x", "a", "b.01", "²", "b." + "9" * 5000, "b.9.w", "10", "9"]
    torch.save({name: torch.ones(1) for name in names}, tmp_path / "model.pth")
    printed = run("inspect", "--sort", "name", "--table", "tsv", "--columns", "name", tmp_path / "model.pth").stdout

    assert printed.splitlines()[1:] == ["9", "10", "a", "b.01", "b.1.x", "b.9", "b.9.w", "b.10", "b." + "9" * 5000, "²"]


def test_names_that_differ_by_a_number_alone_are_in_its_order(tmp_path: Path) -> None:
    names = ("layer1.a", "layer10.b", "layer2.c", "head.w", "bn2.d", "conv2.e", "bn1.f", "conv1.g")
    lines = tree({name: torch.ones(at + 1) for at, name in enumerate(names)}, tmp_path)

    assert [line.split(".")[0] for line in lines] == [
        "layer1",
        "layer2",
        "layer10",
        "head",
        "bn1",
        "conv1",
        "bn2",
        "conv2",
    ]
