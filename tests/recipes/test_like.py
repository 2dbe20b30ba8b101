"""``migrate --like OTHER``: the one way to the names of another checkpoint is found, or said to be none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckptool
from tests.program import invoke

Names = dict[str, tuple[int, ...]]


def saved(path: Path, names: Names) -> Path:
    torch.save({name: torch.randn(shape) for name, shape in names.items()}, path)
    return path


PLAIN: Names = {"conv.weight": (4, 3), "conv.bias": (4,), "head.weight": (4, 4)}


def under(prefix: str, names: Names) -> Names:
    return {f"{prefix}{name}": shape for name, shape in names.items()}


PAIRS = {
    "ddp": (under("module.", PLAIN), PLAIN),
    "compiled under Lightning": (under("model._orig_mod.", PLAIN), PLAIN),
    "into ddp": (PLAIN, under("module.", PLAIN)),
    "another prefix": (under("net.", PLAIN), under("backbone.", PLAIN)),
    "weight_norm, old to new": (
        {"a.weight_g": (2, 1), "a.weight_v": (2, 2)},
        {"a.parametrizations.weight.original0": (2, 1), "a.parametrizations.weight.original1": (2, 2)},
    ),
    "the same": (PLAIN, PLAIN),
}


@pytest.mark.parametrize("name", PAIRS)
def test_the_names_of_another_checkpoint(name: str, tmp_path: Path) -> None:
    before, wanted = PAIRS[name]
    source, other = saved(tmp_path / "source.pth", before), saved(tmp_path / "other.pth", wanted)
    report = ckptool.migrate(source, tmp_path / "out.safetensors", like=other)
    assert f"as {str(other)!r} is: " in str(report)
    found, values = load_file(tmp_path / "out.safetensors"), torch.load(source)
    assert {one: tuple(tensor.shape) for one, tensor in found.items()} == wanted
    for new, old in zip(wanted, before, strict=True):
        assert torch.equal(found[new], values[old])


APART = {
    "names that are only alike": ({"q.weight": (2, 2), "k.weight": (2, 2)}, {"a.weight": (2, 2), "b.weight": (2, 2)}),
    "one that is missing": ({"module.conv.weight": (4, 3), "module.conv.bias": (4,)}, PLAIN),
    "one too many": ({**under("module.", PLAIN), "module.other.weight": (9,)}, PLAIN),
    "another shape": (under("module.", {**PLAIN, "conv.bias": (5,)}), PLAIN),
    "two that could be it": ({**under("student.", PLAIN), **under("teacher.", PLAIN)}, PLAIN),
}


@pytest.mark.parametrize("name", APART)
def test_what_is_not_clear_is_refused_with_what_is_left(name: str, tmp_path: Path) -> None:
    before, wanted = APART[name]
    source, other = saved(tmp_path / "source.pth", before), saved(tmp_path / "other.pth", wanted)
    done = invoke(["migrate", str(source), str(tmp_path / "out.safetensors"), "--like", str(other)])
    assert done.exit_code == 1
    assert str(source) in done.stderr
    assert "no known way leads to the names" in done.stderr
    assert not (tmp_path / "out.safetensors").exists()


def test_a_recipe_and_another_checkpoint_contradict_each_other(tmp_path: Path) -> None:
    source = saved(tmp_path / "source.pth", PLAIN)
    with pytest.raises(ckptool.MigrationRefused, match="both say"):
        ckptool.migrate(source, tmp_path / "out.pth", like=source, recipe="any")
