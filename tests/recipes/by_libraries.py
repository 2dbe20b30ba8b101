"""What tests of recipes with the libraries of the other side have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import ckptool

Weights = dict[str, Tensor]


def moved(weights: Weights, recipe: str, folder: Path, *, reverse: bool = False, **arguments: int) -> Weights:
    """Return what a recipe makes of weights in a file."""
    source, target = folder / "moved-from.safetensors", folder / "moved-to.safetensors"
    save_file(weights, source)
    target.unlink(missing_ok=True)
    # Some tests have only some of the names, and so half an adapter.
    ckptool.migrate(source, target, recipe=recipe, reverse=reverse, recipe_arguments=arguments, allow_missing=True)
    return load_file(target)


def assert_same(some: Weights, others: Weights) -> None:
    """Assert that weights have the same names, and the same values bit by bit."""
    assert sorted(some) == sorted(others)
    assert not [name for name, value in some.items() if not torch.equal(value, others[name])]


def under(prefix: str, weights: Weights) -> Weights:
    """Return weights with a prefix before each name."""
    return {prefix + name: value for name, value in weights.items()}


def like(model: nn.Module) -> Weights:
    """Return random weights for a model."""
    torch.manual_seed(0)
    return {name: torch.randn(value.shape) for name, value in model.state_dict().items()}


def scrambled(model: Any) -> Any:
    """Give a model other weights than it was made with, which are often zeros and ones, and return it for inference."""
    torch.manual_seed(0)
    for value in model.state_dict().values():
        if value.is_floating_point():
            value.copy_(torch.rand(value.shape) * 0.5 + 0.1)
    return model.eval()


def saved(model: Any, folder: Path) -> Weights:
    """Return the weights of a model of transformers with the names that they have in its files."""
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def opened(kind: Any, weights: Weights, folder: Path, may_miss: frozenset[str] = frozenset()) -> Any:
    """Return a model of transformers from weights in a folder that has its settings; it wants these and no others."""
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    model, said = kind.from_pretrained(folder, output_loading_info=True)
    assert set(said["missing_keys"]) <= may_miss
    assert not any(said[key] for key in ("unexpected_keys", "mismatched_keys", "error_msgs"))
    return model.eval()
