"""The same weights by other writers than ``torch.save``: safetensors, TorchScript, torch.export."""

from __future__ import annotations

import json
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING

import torch
from safetensors import torch as safetensors
from torch import Tensor

from tests.fixture_set.cases import Case
from tests.fixture_set.expected import entries
from tests.fixture_set.forging import true_tag
from tests.fixture_set.places import relative_code, relative_program

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ckptool.reference.trainer import Trained


def other_formats(tied: Trained, mlp: Trained) -> Iterator[Case]:
    """Yield safetensors, TorchScript by both roads, and torch.export's .pt2."""
    tied_model = deepcopy(tied.model).eval()
    tied_state = {name: tensor for name, tensor in tied_model.state_dict().items() if name != "head.weight"}
    yield _safetensors(
        "tied",
        tied_state,
        "TiedReader by save_model, which drops the second name of a tied tensor",
        lambda target: safetensors.save_model(tied_model, str(target), metadata={"format": "pt"}),
    )
    for dtype in ("float32", "bfloat16", "float8_e4m3fn"):
        state = {name: tensor.to(getattr(torch, dtype)) for name, tensor in mlp.model.state_dict().items()}
        writer = partial(safetensors.save_file, state, metadata={"format": "pt"})
        yield _safetensors(dtype.replace("_", "-"), state, f"MLP by save_file, in {dtype}", writer)
    images = torch.rand(2, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    with relative_code():
        scripted = torch.jit.script(tied_model)
        traced = torch.jit.trace(tied_model, images)  # type: ignore[no-untyped-call]
    yield _scripted("torchscript-script-cpu", scripted, "torch.jit.script; TiedReader")
    yield _scripted("torchscript-trace-cpu", traced, "torch.jit.trace; TiedReader")
    program = torch.export.export(tied_model, (images,))
    relative_program(program)
    yield Case(
        name="export-cpu",
        shows="torch.export.save; TiedReader",
        form="model",
        format="pt2",
        tensors=entries(_tied_together(program.state_dict), true_tag),
        write=lambda target: torch.export.save(program, target),
        suffix=".pt2",
    )


def _safetensors(name: str, state: dict[str, Tensor], shows: str, write: Callable[[Path], object]) -> Case:
    return Case(
        name=f"safetensors-{name}-cpu",
        shows=f"safetensors; {shows}",
        form="state_dict",
        format="safetensors",
        tensors=entries(_in_safetensors_order(state), true_tag),
        write=write,
        suffix=".safetensors",
    )


def _scripted(name: str, module: torch.jit.ScriptModule, shows: str) -> Case:
    return Case(
        name=name,
        shows=shows,
        form="model",
        format="torchscript",
        tensors=entries(module, true_tag),
        write=lambda target: torch.jit.save(module, str(target)),
        suffix=".pt",
    )


def _tied_together(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Order names as torch.export does in a file: all names of a storage where its first one stands."""
    first: dict[int, int] = {}
    for position, tensor in enumerate(tensors.values()):
        first.setdefault(tensor.untyped_storage().data_ptr(), position)
    return dict(sorted(tensors.items(), key=lambda item: first[item[1].untyped_storage().data_ptr()]))


def _in_safetensors_order(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Order tensors as the library does in a file: by alignment, then by name; its header says so."""
    raw = safetensors.save(tensors)
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    return {name: tensors[name] for name in header}
